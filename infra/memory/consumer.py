"""`MemoryConsumer`: a member of a group, or a reader of partitions named by hand."""

import time
import warnings
from collections.abc import Iterable, Mapping
from threading import RLock
from types import TracebackType
from typing import Self

from ..log import LogError, OnAssign, OnRevoke, Partition, Record, check_starts, out_of_range
from .groups import Member
from .store import Store


class MemoryConsumer:
    """A `Consumer` of a `MemoryLog`."""

    def __init__(
        self,
        store: Store,
        start: Mapping[Partition, int],
        *,
        group: str | None = None,
        member: Member | None = None,
        on_assign: OnAssign | None = None,
        on_revoke: OnRevoke | None = None,
    ) -> None:
        self._store, self._group, self._member = store, group, member
        self._on_assign, self._on_revoke = on_assign, on_revoke
        self._positions = dict(start)
        self._paused: set[Partition] = set()
        self._turn = 0
        self._broken: Exception | None = None
        self._polling = False
        self._closing = False
        self._closed = False
        self._busy = RLock()

    def poll(self, max_records: int, timeout: float) -> list[Record]:
        with self._busy:
            self._check_usable()
            self._polling = True
            try:
                return self._await_records(max_records, time.monotonic() + timeout)
            finally:
                self._polling = False
                if self._closing:
                    self._release_all()

    def assignment(self) -> frozenset[Partition]:
        return frozenset(self._positions)

    def position(self, partition: Partition) -> int:
        return self._positions[self._own(partition)]

    def seek(self, partition: Partition, offset: int) -> None:
        self._positions[self._own(partition)] = offset

    def pause(self, partitions: Iterable[Partition]) -> None:
        self._paused.update([self._own(partition) for partition in partitions])

    def resume(self, partitions: Iterable[Partition]) -> None:
        self._paused.difference_update([self._own(partition) for partition in partitions])

    def commit(self, offsets: Mapping[Partition, int]) -> None:
        if self._group is None:
            raise LogError("only a consumer with a group commits; this one reads partitions named by hand")
        with self._store.changed:
            self._check_usable()
            if gone := offsets.keys() - (self._positions.keys() if self._member is None else self._member.held):
                raise LogError(f"not committed: {', '.join(map(str, sorted(gone)))} not assigned to this consumer")
            self._store.group(self._group).offsets.update(offsets)

    def close(self) -> None:
        with self._store.changed:
            self._closing = True
            self._store.changed.notify_all()
        with self._busy:
            if not self._polling:  # else a callback of poll asks for it, and poll does it when it ends
                self._release_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._closed:
            warnings.warn(f"unclosed {type(self).__name__}", ResourceWarning, stacklevel=2, source=self)

    def _await_records(self, limit: int, deadline: float) -> list[Record]:
        while True:
            self._rebalance()
            with self._store.changed:
                # looked at again under the lock: a change just before it would go unnoticed in the wait below
                if self._due() and not self._closing:
                    continue
                records = [] if self._closing else self._take(limit)
                left = deadline - time.monotonic()
                if records or left <= 0 or self._closing:
                    return records
                # an absent static member's place ends by time alone, and nothing notifies of that
                self._store.changed.wait(min(left, self._patience()))
                self._check_usable()

    def _release_all(self) -> None:
        if self._closed:
            return
        try:
            if self._on_revoke is not None and self._positions:
                self._on_revoke(self.assignment())
        finally:
            self._closed = True
            self._leave()

    def _check_usable(self) -> None:
        if self._closed:
            raise LogError("the consumer is closed")
        if self._broken is not None:
            raise self._broken
        if self._member is not None and self._member.fenced:
            raise LogError(f"fenced: another consumer joined as instance {self._member.instance!r}; close this one")

    def _own(self, partition: Partition) -> Partition:
        if partition not in self._positions:
            raise LogError(f"{partition} is not assigned to this consumer")
        return partition

    def _due(self) -> bool:
        """Is there something to give up or to take?"""
        if self._group is None or self._member is None:
            return False
        return bool(self._member.surplus() or self._store.group(self._group).free(self._member))

    def _patience(self) -> float:
        """Seconds until the place of an absent static member ends; other changes notify."""
        if self._group is None or self._member is None:
            return float("inf")
        now = time.monotonic()
        ends = self._store.group(self._group).expire(now, self._store.counts())
        return float("inf") if ends is None else max(ends - now, 0)

    def _rebalance(self) -> None:
        """Give up what others are to have, then take what is free."""
        if self._group is None or self._member is None:
            return
        member = self._member
        with self._store.changed:
            lost = member.surplus()
        if lost:
            self._release(member, lost)
        with self._store.changed:
            gained = self._store.group(self._group).free(member)
            member.held |= gained
        if gained:
            self._start(self._group, gained)

    def _release(self, member: Member, lost: frozenset[Partition]) -> None:
        try:
            if self._on_revoke is not None:
                self._on_revoke(lost)
        finally:
            with self._store.changed:
                member.held -= lost
                self._store.changed.notify_all()
            for partition in lost:
                self._positions.pop(partition, None)
            self._paused -= lost

    def _start(self, group: str, gained: frozenset[Partition]) -> None:
        try:
            chosen: Mapping[Partition, int] = {}
            if self._on_assign is not None:
                chosen = check_starts(self._on_assign(gained), gained)
        except Exception as error:  # whatever it raises, these partitions have no known place to start from
            self._broken = error
            raise
        with self._store.changed:
            committed = self._store.committed(group, gained)
            earliest = {partition: self._store.shelf(partition).first for partition in gained}
        self._positions.update({**earliest, **committed, **chosen})

    def _take(self, limit: int) -> list[Record]:
        """At most `limit` records; each partition gets its turn to be first."""
        self._check_positions()
        ready = sorted(self._positions.keys() - self._paused)
        self._turn = (self._turn + 1) % max(len(ready), 1)
        taken: list[Record] = []
        for partition in ready[self._turn :] + ready[: self._turn]:
            records = self._store.shelf(partition).read(self._positions[partition], limit - len(taken))
            taken += records
            self._positions[partition] += len(records)
        return taken

    def _check_positions(self) -> None:
        for partition in self._positions.keys() - self._paused:
            shelf = self._store.shelf(partition)
            if not shelf.first <= self._positions[partition] <= shelf.end:
                raise out_of_range(partition, self._positions[partition], (shelf.first, shelf.end))

    def _leave(self) -> None:
        with self._store.changed:
            if self._group is not None and self._member is not None:
                self._store.group(self._group).leave(self._member, time.monotonic(), self._store.counts())
            self._store.changed.notify_all()
        self._positions.clear()
