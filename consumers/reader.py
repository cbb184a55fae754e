"""The trainer's ear on the log: one thread polls, a buffer bounded in bytes stands between it and the step.

    poll --> skip what the checkpoint's cursor has --> [ buffer ] --> take                          the trainer's thread
      |                                                 |
      +-- over the bound: partitions are paused, <------+
          polling goes on

A reader alone takes every partition by hand: there is nobody to share them with, and joining a group takes seconds.
Several are members of one, and a step of any length costs no membership. Offsets are committed on every partition from
the first moment, for lag display only.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from ..infra.log import Consumer, Log, LogError, Partition, Position, Record
from .mixing import Mixer
from .parking import Parking
from .progress import Progress

logger = logging.getLogger(__name__)

LOOK = 10.0
"""Seconds between two looks for added partitions."""
LARGE = 1 << 16
"""Bytes that a record is expected to have at most, until a larger one comes."""


class Revoked(frozenset[Partition]):
    """Partitions that were taken away: what came from them and is not settled belongs to their next owner."""


class Reader:
    """Reads topics: all of them, or as one of several readers its part. Use as a context manager."""

    def __init__(
        self,
        log: Log,
        topics: Mapping[str, float],
        *,
        group: str,
        progress: Progress,
        ends: Mapping[Partition, int] | None = None,
        instance: str | None = None,
        buffer_bytes: int = 64 << 20,
        commit_every: float = 1.0,
    ) -> None:
        """`topics`: topic -> its share of what is taken. `ends`: a replay up to these offsets, with exact shares.

        `instance`: one of several readers, a static member of the group under this name; shares then are exact among
        the partitions that it has. None: the only one.
        """
        self._log, self._topics, self._group, self._instance = log, tuple(topics), group, instance
        self._progress, self._ends = progress, ends or {}
        self._limit, self._commit_every = buffer_bytes, commit_every
        self._ready = threading.Condition()
        self._mixer = Mixer(topics, buffer_bytes)
        self._parking = Parking(buffer_bytes)
        self._events: deque[Revoked] = deque()
        self.waited = 0.0
        """Seconds that `take` has waited for data so far."""
        self._error: BaseException | None = None
        self._stopped = False
        self._expected: dict[Partition, int] = {}
        self._paused: frozenset[Partition] = frozenset()
        self._largest = LARGE
        self._look = time.monotonic() + LOOK
        self._thread = threading.Thread(target=self._run, name="rollstream-reader", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def take(self, timeout: float) -> Record | Revoked | None:
        """The next record, or None after `timeout` (s). Raises what ended the reading thread, e.g. `OffsetExpired`."""
        with self._ready:
            began = time.monotonic()
            while (item := self._next()) is None and not (self._error or self._stopped):
                if not self._ready.wait(began + timeout - time.monotonic()):
                    break
            self.waited += time.monotonic() - began
            if item is None and self._error is not None:
                raise self._error
        return item

    def park(self, record: Record, why: Exception) -> None:
        """Give a record back that cannot be used now: it comes again after a while, and nobody behind it waits."""
        self._parking.put(record, why)

    def _next(self) -> Record | Revoked | None:
        if self._events:
            revoked = self._events.popleft()
            self._parking.discard(revoked)
            return revoked
        if (parked := self._parking.take()) is not None or self._parking.full:
            return parked
        # A partition that left and came back during a step is read again from before the step's records.
        while (record := self._mixer.take(self._owed)) is not None and self.settled(record.position):
            pass
        return record

    def settled(self, position: Position) -> bool:
        """Did a step settle this record?"""
        return self._progress.settled(position)

    def _owed(self, topic: str) -> bool:
        return any(p.topic == topic and (self._instance is None or p in self._expected) for p in self._left())

    def _left(self) -> frozenset[Partition]:
        return frozenset(p for p, end in self._ends.items() if self._expected.get(p, 0) < end)

    def outlook(self) -> tuple[frozenset[Partition], bool]:
        """Partitions not read up to their `ends`, those that others have included; and whether anything was read and
        not taken."""
        with self._ready:
            return self._left(), bool(self._events or len(self._mixer) or len(self._parking))

    def close(self) -> None:
        with self._ready:
            self._stopped = True
            self._ready.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            if self._instance is None:
                self._read_alone()
            else:
                self._read_shared(self._instance)
        except BaseException as error:  # noqa: BLE001 - handed to the thread that takes
            with self._ready:
                self._error = error
                self._ready.notify_all()

    def _read_shared(self, instance: str) -> None:
        with self._log.subscribe(
            self._topics, group=self._group, on_assign=self._assigned, on_revoke=self._revoked, instance=instance
        ) as consumer:
            self._loop(consumer)

    def _read_alone(self) -> None:
        """Opened anew where partitions were added: the others go on where they are."""
        while not self._stopped:
            starts = self._assigned(self._partitions())
            with self._log.read(starts, group=self._group) as consumer:
                self._loop(consumer, known=starts)
            self._paused = frozenset()

    def _partitions(self) -> frozenset[Partition]:
        return frozenset(p for topic in self._topics for p in self._log.partitions(topic))

    def _grown(self, known: Mapping[Partition, int]) -> bool:
        """Looked at now and then: partitions may be added to a live topic."""
        if time.monotonic() < self._look:
            return False
        self._look = time.monotonic() + LOOK
        try:
            return self._partitions() > known.keys()
        except LogError as error:
            logger.warning("whether partitions were added is not known: %s", error)
            return False

    def _loop(self, consumer: Consumer, *, known: Mapping[Partition, int] | None = None) -> None:
        """`known`: all partitions there are; ends when there are more."""
        committed = time.monotonic()
        while not self._stopped and not (known and self._grown(known)):
            self._throttle(consumer)
            for record in consumer.poll(self._batch(), 0.1):
                self._push(record)
            if time.monotonic() - committed >= self._commit_every:
                self._commit(consumer)
                committed = time.monotonic()
        self._commit(consumer)

    def _batch(self) -> int:
        """Records to ask for: were all as large as the largest so far, a quarter of the bound."""
        return max(1, min(500, self._limit // 4 // self._largest))

    def _throttle(self, consumer: Consumer) -> None:
        """Pause the topics that used up their part of the buffer, resume those with room."""
        assigned = consumer.assignment()
        with self._ready:
            full = frozenset(p for p in assigned - self._paused if self._mixer.full(p.topic))
            roomy = frozenset(p for p in assigned & self._paused if self._mixer.roomy(p.topic))
        if full:
            consumer.pause(full)
        if roomy:
            consumer.resume(roomy)
        self._paused = self._paused - roomy | full

    def _push(self, record: Record) -> None:
        with self._ready:
            expected = self._expected.get(record.partition, record.offset)
            if record.offset > expected:
                self._progress.bridge(record.partition, expected, record.offset)
            if not self._progress.settled(record.position):
                self._mixer.put(record)
                self._largest = max(self._largest, len(record.value or b""))
            # Last, and under the lock: nobody may find the end reached while its record is still on its way.
            self._expected[record.partition] = record.offset + 1
            self._ready.notify_all()

    def _commit(self, consumer: Consumer) -> None:
        marks = self._progress.marks(consumer.assignment())
        try:
            if marks:
                consumer.commit(marks)
        except LogError as error:
            # For lag display only: a rebalance or a coordinator that is away must not end the training.
            logger.warning("offsets not committed, lag tools see older ones: %s", error)

    def _assigned(self, partitions: frozenset[Partition]) -> Mapping[Partition, int]:
        bounds = self._log.bounds(partitions - self._expected.keys())
        starts = {
            p: self._expected[p] if p in self._expected else self._progress.start(p, bounds[p][0]) for p in partitions
        }
        with self._ready:
            self._expected.update(starts)
            self._ready.notify_all()
        logger.info("assigned %s", ", ".join(f"{p} from {start}" for p, start in sorted(starts.items())))
        return starts

    def _revoked(self, partitions: frozenset[Partition]) -> None:
        with self._ready:
            self._mixer.discard(partitions)
            self._events.append(Revoked(partitions))
            for partition in partitions:
                self._expected.pop(partition, None)
            self._ready.notify_all()
        self._paused -= partitions
