"""The state of a memory log: topics, the records of each partition, groups."""

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import count
from threading import Condition

from ..log import Headers, LogError, Partition, Position, Record, Topic, UnknownTopic, check_record, record_size
from ..murmur import partition_for
from .groups import Group

_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")


@dataclass(slots=True)
class Shelf:
    """The records of one partition."""

    first: int = 0
    """Offset of the oldest record still there."""
    records: list[Record] = field(default_factory=list[Record])

    @property
    def end(self) -> int:
        """The offset that the next record gets."""
        return self.first + len(self.records)

    def read(self, position: int, limit: int) -> list[Record]:
        """At most `limit` records from this position on."""
        start = position - self.first
        return self.records[start : start + limit]


class Store:
    """Everything that the writers and consumers of one log share. Methods take the lock by themselves."""

    def __init__(self, max_bytes: int, session_timeout: float) -> None:
        self.changed = Condition()
        """Reentrant lock of the whole store; notified when there is something new to see."""
        self.topics: dict[str, Topic] = {}
        self._max_bytes = max_bytes
        self._session_timeout = session_timeout
        self._shelves: dict[Partition, Shelf] = {}
        self._groups: dict[str, Group] = {}
        self._turns = count()

    def counts(self) -> dict[str, int]:
        """The partition count of every topic."""
        with self.changed:
            return {name: topic.partitions for name, topic in self.topics.items()}

    def find(self, topic: str) -> Topic:
        """Raises `UnknownTopic`."""
        with self.changed:
            if topic not in self.topics:
                raise UnknownTopic(f"there is no topic {topic!r}; `rollstream topics apply` creates what is declared")
            return self.topics[topic]

    def shelf(self, partition: Partition) -> Shelf:
        """A partition, to be used under the lock. Raises `UnknownTopic`, or `LogError` where the topic has fewer."""
        topic = self.find(partition.topic)
        if partition not in self._shelves:
            raise LogError(f"there is no {partition}: the topic has {topic.partitions} partitions")
        return self._shelves[partition]

    def resize(self, topic: Topic) -> None:
        """Put a topic there, or change the number of its partitions."""
        if not _NAME.fullmatch(topic.name) or topic.partitions < 1:
            raise LogError(
                f"expected a topic name of letters, digits and ._- with at least 1 partition, "
                f"found {topic.name!r} with {topic.partitions}"
            )
        with self.changed:
            self.topics[topic.name] = replace(topic, config=dict(topic.config), replication=1)
            for number in range(topic.partitions):
                self._shelves.setdefault(Partition(topic.name, number), Shelf())
            for group in self._groups.values():
                group.level(self.counts())
            self.changed.notify_all()

    def group(self, name: str) -> Group:
        """A consumer group, to be used under the lock; there from its first use."""
        with self.changed:
            return self._groups.setdefault(name, Group(self._session_timeout))

    def committed(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """Committed offsets; partitions without one are left out."""
        with self.changed:
            offsets = self._groups[group].offsets if group in self._groups else {}
            return {partition: offsets[partition] for partition in partitions if partition in offsets}

    def put(
        self, topic: str, value: bytes | None, key: bytes | None, headers: Headers | None, number: int | None
    ) -> Position:
        """Append one record. Raises what the future of `Writer.append` fails with."""
        with self.changed:
            declared = self.find(topic)
            limit = int(declared.config.get("max.message.bytes", self._max_bytes))
            check_record(declared, key, record_size(key, value, headers), limit)
            # without a key Kafka's client sticks to a random partition; turns are as good, and tests can rely on them
            partition = Partition(topic, self._choose(key, declared.partitions) if number is None else number)
            shelf = self.shelf(partition)
            record = Record(
                partition=partition,
                offset=shelf.end,
                key=key,
                value=value,
                headers=dict(headers or {}),
                timestamp_ms=time.time_ns() // 1_000_000,
            )
            shelf.records.append(record)
            self.changed.notify_all()
            return record.position

    def expire(self, partition: Partition, offset: int) -> None:
        """Delete the records below `offset`."""
        with self.changed:
            shelf = self.shelf(partition)
            if not shelf.first <= offset <= shelf.end:
                raise LogError(f"{partition}: expected an offset from {shelf.first} to {shelf.end}, found {offset}")
            del shelf.records[: offset - shelf.first]
            shelf.first = offset
            self.changed.notify_all()

    def _choose(self, key: bytes | None, partitions: int) -> int:
        return next(self._turns) % partitions if key is None else partition_for(key, partitions)
