"""Where records go that nobody here can use: the original bytes untouched, headers that tell what, where and why.

    a bad record --DeadLetters.send--> <namespace>.dead-letter --read_letters--> people: `rollstream dlq`
                                          |      ^
                     after a fix: replay (replay.py), and a mark that says so

One record may lie there more than once: each consumer group sends what it cannot read, and one that restarts sends it
again. All its letters name the same position of origin, and a mark holds for all of them.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from .log import Headers, Log, Partition, Position, Record, RecordTooLarge, Writer, await_position
from .scan import scan
from .topics import Names

TOPIC, PARTITION, OFFSET, REASON, ERROR = (
    "rollstream-origin-topic",
    "rollstream-origin-partition",
    "rollstream-origin-offset",
    "rollstream-reason",
    "rollstream-error",
)
REPLAYED_FROM = "rollstream-replayed-from"
"""On a record that was replayed: the position of its letter."""
REPLAYED, REPLAYED_TO = "rollstream-replayed", "rollstream-replayed-to"
"""On a mark, which has no value: the origin of the letters that it holds for, and where their record lies now."""

OWN = frozenset((TOPIC, PARTITION, OFFSET, REASON, ERROR))
"""Headers that a letter has beside those of the original record."""


class DeadLetters:
    """Appends to `<namespace>.dead-letter`, and waits until the log has it: what is here is never lost.

    Of a record that is too large for that topic the letter tells where it lies; it has no key, bytes or headers of it.
    """

    def __init__(self, log: Log, names: Names, *, timeout: float = 60.0) -> None:
        self._writer: Writer = log.writer()
        self._topic = names.dead_letter
        self._timeout = timeout
        self.count = 0
        """Records sent so far."""

    def send(self, record: Record, *, reason: str, error: str) -> None:
        """Raises `LogError` when it cannot be written; the caller must then stop rather than go on without it."""
        try:
            self._append(record, record.headers, _told(record, reason, error))
        except RecordTooLarge as large:
            # Brokers bound the compressed size, and a client may be set higher: no reason to stop for good.
            note = f"{large.size} bytes, too large for a dead letter, lie only at {record.position}: {error}"
            bare = Record(partition=record.partition, offset=record.offset, key=None, value=None)
            self._append(bare, {}, _told(record, reason, note))
        self.count += 1

    def _append(self, record: Record, headers: Headers, told: Headers) -> None:
        future = self._writer.append(self._topic, record.value, key=record.key, headers={**headers, **told})
        await_position(future, self._timeout, f"the dead letter for {record.position}")

    def close(self) -> None:
        self._writer.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """One dead letter, as read."""

    position: Position
    """Where it lies itself."""
    origin: Position | None
    """Where the record lay; None where the headers do not tell, as of a letter that somebody else wrote."""
    reason: str
    error: str
    time_ms: int
    """When it was sent, milliseconds since the epoch."""
    key: bytes | None
    value: bytes | None
    headers: Headers = field(default_factory=dict[str, bytes])
    """Those of the original record."""
    replayed: str = ""
    """Where the record lies since it was replayed; empty where it was not."""

    @property
    def identity(self) -> str:
        """The same for all letters of one record."""
        return str(self.origin or self.position)


def read_letters(log: Log, names: Names) -> Iterator[Letter]:
    """Every dead letter there now, oldest first in each partition. Raises `LogError`."""
    partitions = log.partitions(names.dead_letter)
    bounds = log.bounds(partitions)
    start, stop = {p: first for p, (first, _) in bounds.items()}, {p: end for p, (_, end) in bounds.items()}
    # A mark comes after its letters, so they are known only once all was read.
    marks = dict(mark for record in scan(log, start, stop=stop) if (mark := _mark(record)))
    for record in scan(log, start, stop=stop):
        if _mark(record) is None:
            yield _letter(record, marks)


def parse_position(text: str) -> Position | None:
    """What `str(Position)` wrote; None for anything else."""
    match = re.fullmatch(r"(.+)\[(\d{1,9})\]@(\d{1,18})", text)
    return Position(Partition(match[1], int(match[2])), int(match[3])) if match else None


def _told(record: Record, reason: str, error: str) -> dict[str, bytes]:
    return {
        TOPIC: record.partition.topic.encode(),
        PARTITION: str(record.partition.number).encode(),
        OFFSET: str(record.offset).encode(),
        REASON: reason.encode(),
        ERROR: error[:2000].encode("utf-8", "replace"),
    }


def _mark(record: Record) -> tuple[str, str] | None:
    if record.value is not None or REPLAYED not in record.headers:
        return None
    return _text(record.headers, REPLAYED), _text(record.headers, REPLAYED_TO)


def _letter(record: Record, marks: Mapping[str, str]) -> Letter:
    told = {name: _text(record.headers, name) for name in OWN}
    origin = parse_position(f"{told[TOPIC]}[{told[PARTITION]}]@{told[OFFSET]}")
    return Letter(
        position=record.position,
        origin=origin,
        reason=told[REASON] or "unknown",
        error=told[ERROR],
        time_ms=record.timestamp_ms,
        key=record.key,
        value=record.value,
        headers={name: value for name, value in record.headers.items() if name not in OWN},
        replayed=marks.get(str(origin or record.position), ""),
    )


def _text(headers: Headers, name: str) -> str:
    return headers.get(name, b"").decode("utf-8", "replace")
