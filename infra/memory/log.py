"""`MemoryLog` and its writer: the log's Protocols over a store in memory."""

import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType
from typing import Self

from ..log import Headers, LogError, OnAssign, OnRevoke, Partition, Position, Topic
from .consumer import MemoryConsumer
from .store import Store


class MemoryLog:
    """A `Log` in memory. `max_bytes` bounds a record where its topic sets no `max.message.bytes`.

    `session_timeout` (s): how long the place of a static member that closed is kept for its return.
    """

    def __init__(self, *, max_bytes: int = 1_048_576, session_timeout: float = 6.0) -> None:
        self._store = Store(max_bytes, session_timeout)

    def writer(self) -> "MemoryWriter":
        return MemoryWriter(self._store)

    def subscribe(
        self,
        topics: Iterable[str],
        *,
        group: str,
        on_assign: OnAssign | None = None,
        on_revoke: OnRevoke | None = None,
        instance: str | None = None,
    ) -> MemoryConsumer:
        store, names = self._store, frozenset(topics)
        with store.changed:
            for name in names:
                store.find(name)
            member = store.group(group).join(names, instance, store.counts())
            store.changed.notify_all()
        return MemoryConsumer(store, {}, group=group, member=member, on_assign=on_assign, on_revoke=on_revoke)

    def read(self, start: Mapping[Partition, int], *, group: str | None = None) -> MemoryConsumer:
        for partition in start:
            self._store.shelf(partition)
        return MemoryConsumer(self._store, start, group=group)

    def partitions(self, topic: str) -> tuple[Partition, ...]:
        return tuple(Partition(topic, number) for number in range(self._store.find(topic).partitions))

    def bounds(self, partitions: Iterable[Partition]) -> dict[Partition, tuple[int, int]]:
        with self._store.changed:
            shelves = {partition: self._store.shelf(partition) for partition in partitions}
            return {partition: (shelf.first, shelf.end) for partition, shelf in shelves.items()}

    def committed(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, int]:
        return self._store.committed(group, partitions)

    def topics(self) -> dict[str, int]:
        return self._store.counts()

    def describe(self, topic: str) -> Topic:
        return self._store.find(topic)

    def settings(self, topic: str) -> Mapping[str, str]:
        return self._store.find(topic).config

    def create(self, topic: Topic) -> None:
        with self._store.changed:
            there = self._store.topics.get(topic.name)
            if there is None:
                self._store.resize(topic)
            elif there.partitions != topic.partitions:
                raise LogError(
                    f"{topic.name}: expected {topic.partitions} partitions, found it there with {there.partitions}"
                )

    def grow(self, topic: str, partitions: int) -> None:
        with self._store.changed:
            there = self._store.find(topic)
            if partitions < there.partitions:
                raise LogError(f"{topic} has {there.partitions} partitions and cannot shrink to {partitions}")
            self._store.resize(replace(there, partitions=partitions))

    def alter(self, topic: str, config: Mapping[str, str]) -> None:
        with self._store.changed:
            there = self._store.find(topic)
            self._store.topics[topic] = replace(there, config={**there.config, **config})

    def expire(self, partition: Partition, offset: int) -> None:
        """Delete the records below `offset`, as retention would."""
        self._store.expire(partition, offset)

    def close(self) -> None:
        """Nothing to release."""


class MemoryWriter:
    """A `Writer` into a `MemoryLog`; its futures are done when it returns them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._closed = False

    def append(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Headers | None = None,
        partition: int | None = None,
    ) -> "Future[Position]":
        if self._closed:
            raise LogError("the writer is closed")
        future: Future[Position] = Future()
        future.set_running_or_notify_cancel()
        try:
            position = self._store.put(topic, value, key, headers, partition)
        except LogError as error:
            future.set_exception(error)
        else:
            future.set_result(position)
        return future

    def flush(self, timeout: float) -> None:
        """Nothing is ever under way."""

    def close(self, timeout: float = 30.0) -> None:
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._closed:
            warnings.warn(f"unclosed {type(self).__name__}", ResourceWarning, stacklevel=2, source=self)
