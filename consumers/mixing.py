"""Records that wait between log and trainer: a queue for each topic, taken in proportion to their weights.

    put --> [ topic a ]--\
    put --> [ topic b ]---> take: the topic that is furthest behind its share, among those that have something
    put --> [ topic c ]--/

Weighted fair queueing (Demers, Keshav and Shenker 1989): each topic has a clock that moves 1 / weight with each record
taken. A topic that had nothing for a while does not save up a claim, so an environment that stands still neither holds
the others up nor floods them when it is back.
"""

from collections import deque
from collections.abc import Callable, Mapping

from ..infra.log import Partition, Record, record_size


class Mixer:
    """Not thread-safe: the reader holds its lock."""

    def __init__(self, weights: Mapping[str, float], limit: int) -> None:
        """`weights`: topic -> share on any scale; `limit`: bytes of records, shared evenly among the topics."""
        self._weights = dict(weights)
        self._limit = limit // len(weights)
        self._queues: dict[str, deque[Record]] = {topic: deque() for topic in weights}
        self._bytes = dict.fromkeys(weights, 0)
        self._clocks = dict.fromkeys(weights, 0.0)
        self._now = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def put(self, record: Record) -> None:
        topic = record.partition.topic
        self._queues[topic].append(record)
        self._bytes[topic] += _size(record)

    def take(self, owed: Callable[[str], bool]) -> Record | None:
        """The next record, or None to wait: nothing is there, or the topic that is due has nothing yet but is `owed`
        more (in a replay, where the mix must not depend on who was read first)."""
        for topic in sorted(self._clocks, key=lambda t: self._clocks[t]):
            if self._queues[topic]:
                return self._pop(topic)
            if owed(topic):
                return None
            self._clocks[topic] = max(self._clocks[topic], self._now)
        return None

    def _pop(self, topic: str) -> Record:
        record = self._queues[topic].popleft()
        self._bytes[topic] -= _size(record)
        self._now = self._clocks[topic]
        self._clocks[topic] += 1 / self._weights[topic]
        return record

    def full(self, topic: str) -> bool:
        """Has this topic used up its part of the bound?"""
        return self._bytes[topic] >= self._limit

    def roomy(self, topic: str) -> bool:
        """Is half of this topic's part free again?"""
        return self._bytes[topic] <= self._limit // 2

    def discard(self, partitions: frozenset[Partition]) -> None:
        """Drop what waits of these partitions."""
        for topic, queue in self._queues.items():
            kept = deque(r for r in queue if r.partition not in partitions)
            self._queues[topic] = kept
            self._bytes[topic] = sum(map(_size, kept))


def _size(record: Record) -> int:
    return record_size(record.key, record.value, record.headers)
