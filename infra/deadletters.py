"""Where records go that nobody here can use: the original bytes untouched, headers that tell what, where and why."""

from .log import Log, Record, Writer, await_position
from .topics import Names

TOPIC, PARTITION, OFFSET, REASON, ERROR = (
    "rollstream-origin-topic",
    "rollstream-origin-partition",
    "rollstream-origin-offset",
    "rollstream-reason",
    "rollstream-error",
)


class DeadLetters:
    """Appends to `<namespace>.dead-letter`, and waits until the log has it: what is here is never lost."""

    def __init__(self, log: Log, names: Names, *, timeout: float = 60.0) -> None:
        self._writer: Writer = log.writer()
        self._topic = names.dead_letter
        self._timeout = timeout
        self.count = 0
        """Records sent so far."""

    def send(self, record: Record, *, reason: str, error: str) -> None:
        """Raises `LogError` when it cannot be written; the caller must then stop rather than go on without it."""
        headers = {
            **record.headers,
            TOPIC: record.partition.topic.encode(),
            PARTITION: str(record.partition.number).encode(),
            OFFSET: str(record.offset).encode(),
            REASON: reason.encode(),
            ERROR: error[:2000].encode("utf-8", "replace"),
        }
        future = self._writer.append(self._topic, record.value, key=record.key, headers=headers)
        await_position(future, self._timeout, f"the dead letter for {record.position} ({reason})")
        self.count += 1

    def close(self) -> None:
        self._writer.close()
