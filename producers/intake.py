"""How tasks come to a worker, and how it tells which are finished.

rollstream.tasks --poll--> what was not finished here before --> the worker
                                                                    |
commit, below the first task that is not finished <---- finish -----+
   at intervals, when a partition is about to go to another worker, and at the end
"""

import logging
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from ..infra.log import Consumer, Log, LogError, Partition, Position, Record
from ..infra.topics import Names
from .ownership import Ownership
from .polling import Poller

logger = logging.getLogger(__name__)

COMMIT_EVERY = 1.0
"""Seconds between commits of finished tasks."""
AT_ONCE = 32
"""Most records of one poll."""


class Intake:
    """A member of the workers' consumer group. Enter and leave it on one event loop; `finish` is thread-safe."""

    def __init__(self, log: Log, names: Names) -> None:
        self._log, self._names = log, names
        self._ownership = Ownership()
        self._poller = Poller(self._join)
        self._consumer: Consumer | None = None
        self._held: frozenset[Partition] = frozenset()
        self._committed: dict[Partition, int] = {}
        self._due = 0.0

    async def __aenter__(self) -> Self:
        await self._poller.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._poller.close()

    async def take(self, *, hold: bool) -> list[Record]:
        """The next tasks, none with `hold`; membership is kept in any case. Raises `LogError`."""
        return await self._poller.call(lambda consumer: self._take(consumer, hold))

    def finish(self, positions: Iterable[Position]) -> None:
        """These tasks are finished: every sample was acknowledged, or the task was dead-lettered."""
        for position in positions:
            self._ownership.finish(position)

    def moved(self) -> frozenset[Partition]:
        """Partitions that went to another worker; each is told once."""
        return self._ownership.moved()

    def _join(self) -> Consumer:
        self._consumer = self._log.subscribe(
            [self._names.tasks],
            group=f"{self._names.namespace}.workers",
            on_assign=self._assigned,
            on_revoke=self._revoked,
        )
        return self._consumer

    def _take(self, consumer: Consumer, hold: bool) -> list[Record]:
        assigned = consumer.assignment()
        if fresh := assigned - self._held if hold else None:
            consumer.pause(fresh)
        # Only what changes: a client throws away what it has fetched ahead.
        elif not hold and (held := self._held & assigned):
            consumer.resume(held)
        self._held = assigned if hold else frozenset()
        records = consumer.poll(AT_ONCE, 0.05 if hold else 0.2)
        if time.monotonic() >= self._due:
            self._commit(consumer.assignment())
            self._due = time.monotonic() + COMMIT_EVERY
        return [record for record in records if not self._ownership.known(record.position)]

    def _commit(self, partitions: Iterable[Partition]) -> None:
        """Commit what changed. A refusal costs nothing but work done twice, so it is only told."""
        marks = self._ownership.marks(partitions)
        news = {p: mark for p, mark in marks.items() if self._committed.get(p) != mark}
        if not news or self._consumer is None:
            return
        try:
            self._consumer.commit(news)
        except LogError as error:
            logger.warning("finished tasks could not be committed now: %s", error)
        else:
            self._committed.update(news)

    def _assigned(self, partitions: frozenset[Partition]) -> dict[Partition, int]:
        """Runs inside poll. Reading begins at the committed offsets."""
        self._held -= partitions
        for partition in partitions:
            self._committed.pop(partition, None)
        self._ownership.assigned(partitions)
        return {}

    def _revoked(self, partitions: frozenset[Partition]) -> None:
        """Runs inside poll or close."""
        self._commit(partitions)
        self._ownership.revoked(partitions)
