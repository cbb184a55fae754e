"""Exact end offsets, from the high watermark that comes with a fetch.

ListOffsets is exact on Apache Kafka. On Tansu 0.6 it answers with the first offset of some batch written earlier, plus
one; the high watermark in the answer to a fetch is exact on both. So each partition is fetched from once, at what
ListOffsets says, and that watermark is taken.
"""

import time
from collections.abc import Mapping
from threading import Lock

from confluent_kafka import Consumer, TopicPartition

from ..log import LogError, Partition
from .errors import is_passing, to_log_error

SETTINGS = {
    "enable.partition.eof": "true",
    "fetch.wait.max.ms": "5",
    "max.partition.fetch.bytes": "1024",
    "queued.min.messages": "1",
}
"""For the probe's consumer: answer at once, also at the end, and with as little data as may be."""
PATIENCE = 20.0
"""Seconds until a partition that does not answer is an error."""


class EndProbe:
    """Asks for end offsets with a consumer of its own. Thread-safe."""

    def __init__(self, client: Consumer) -> None:
        self._client = client
        self._turn = Lock()

    def ends(self, starts: Mapping[Partition, int]) -> dict[Partition, int]:
        """The offset that the next record of each partition gets. `starts` must not lie beyond it."""
        if not starts:
            return {}
        with self._turn:
            self._client.assign([TopicPartition(p.topic, p.number, offset) for p, offset in starts.items()])
            try:
                self._await_answers(set(starts))
                return {partition: self._watermark(partition) for partition in starts}
            finally:
                self._client.unassign()

    def close(self) -> None:
        with self._turn:
            self._client.close()

    def _await_answers(self, silent: set[Partition]) -> None:
        deadline = time.monotonic() + PATIENCE
        while silent:
            if time.monotonic() > deadline:
                names = ", ".join(map(str, sorted(silent)))
                raise LogError(f"no answer from {names} within {PATIENCE} s", retriable=True)
            for message in self._client.consume(1, 0.5) + self._client.consume(10_000, 0):
                error, topic, number = message.error(), message.topic(), message.partition()
                if error is not None and error.name() != "_PARTITION_EOF":
                    if not is_passing(error):
                        raise to_log_error(error, "find the end of the log")
                elif topic is not None and number is not None:
                    silent.discard(Partition(topic, number))

    def _watermark(self, partition: Partition) -> int:
        return self._client.get_watermark_offsets(TopicPartition(partition.topic, partition.number), cached=True)[1]
