"""The trainer's ear on the log: one thread polls, a buffer bounded in bytes stands between it and the step.

    poll --> skip what the checkpoint's cursor has --> [ buffer ] --> take: admit (gate, decode)    the trainer's thread
      |                                                 |
      +-- over the bound: partitions are paused, <------+
          polling goes on

A step of any length costs no membership. Offsets are committed on every assigned partition from the first moment, for
lag display only.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Self

from ..infra.log import Consumer, Log, Partition, Record
from .arrivals import Arrival
from .progress import Progress

logger = logging.getLogger(__name__)


class Revoked(frozenset[Partition]):
    """Partitions that were taken away: what came from them and is not settled belongs to their next owner."""


class Reader:
    """Reads topics as a member of a consumer group. Use as a context manager."""

    def __init__(
        self,
        log: Log,
        topics: Iterable[str],
        *,
        group: str,
        progress: Progress,
        admit: Callable[[Record], Arrival],
        buffer_bytes: int = 64 << 20,
        commit_every: float = 1.0,
    ) -> None:
        self._log, self._topics, self._group = log, tuple(topics), group
        self._progress, self._admit = progress, admit
        self._limit, self._commit_every = buffer_bytes, commit_every
        self._ready = threading.Condition()
        self._buffer: deque[Record | Revoked] = deque()
        self._bytes = 0
        self.waited = 0.0
        """Seconds that `take` has waited for data so far."""
        self._error: BaseException | None = None
        self._stopped = False
        self._expected: dict[Partition, int] = {}
        self._thread = threading.Thread(target=self._run, name="rollstream-reader", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def take(self, timeout: float) -> Arrival | Revoked | None:
        """The next arrival, or None after `timeout` (s). Raises what ended the reading thread, e.g. `OffsetExpired`.

        Admission happens here, so that what waits is as small as it was on the wire.
        """
        with self._ready:
            if not self._buffer:
                began = time.monotonic()
                self._ready.wait_for(lambda: self._buffer or self._error or self._stopped, timeout)
                self.waited += time.monotonic() - began
            if not self._buffer:
                if self._error is not None:
                    raise self._error
                return None
            record = self._buffer.popleft()
            self._bytes -= _size(record)
        return record if isinstance(record, Revoked) else self._admit(record)

    def past(self, ends: Mapping[Partition, int]) -> bool:
        """Was everything below these offsets read and taken?"""
        with self._ready:
            return not self._buffer and all(self._expected.get(p, 0) >= end for p, end in ends.items() if end)

    def close(self) -> None:
        with self._ready:
            self._stopped = True
            self._ready.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            consumer = self._log.subscribe(
                self._topics, group=self._group, on_assign=self._assigned, on_revoke=self._revoked
            )
            with consumer:
                self._loop(consumer)
        except BaseException as error:  # noqa: BLE001 - handed to the thread that takes
            with self._ready:
                self._error = error
                self._ready.notify_all()

    def _loop(self, consumer: Consumer) -> None:
        paused: frozenset[Partition] = frozenset()
        committed = time.monotonic()
        while not self._stopped:
            paused = self._throttle(consumer, paused)
            for record in consumer.poll(500, 0.1):
                self._push(record)
            if time.monotonic() - committed >= self._commit_every:
                self._commit(consumer)
                committed = time.monotonic()
        self._commit(consumer)

    def _throttle(self, consumer: Consumer, paused: frozenset[Partition]) -> frozenset[Partition]:
        assigned = consumer.assignment()
        if self._bytes >= self._limit:
            consumer.pause(assigned - paused)
            return assigned
        if paused and self._bytes <= self._limit // 2:
            consumer.resume(paused & assigned)
            return frozenset()
        return paused & assigned

    def _push(self, record: Record) -> None:
        expected = self._expected.get(record.partition, record.offset)
        if record.offset > expected:
            self._progress.bridge(record.partition, expected, record.offset)
        self._expected[record.partition] = record.offset + 1
        if self._progress.settled(record.position):
            return
        with self._ready:
            self._buffer.append(record)
            self._bytes += _size(record)
            self._ready.notify_all()

    def _commit(self, consumer: Consumer) -> None:
        marks = self._progress.marks(consumer.assignment())
        if marks:
            consumer.commit(marks)

    def _assigned(self, partitions: frozenset[Partition]) -> Mapping[Partition, int]:
        bounds = self._log.bounds(partitions)
        starts = {p: self._progress.start(p, bounds[p][0]) for p in partitions}
        self._expected.update(starts)
        logger.info("assigned %s", ", ".join(f"{p} from {start}" for p, start in sorted(starts.items())))
        return starts

    def _revoked(self, partitions: frozenset[Partition]) -> None:
        with self._ready:
            kept = [r for r in self._buffer if isinstance(r, Revoked) or r.partition not in partitions]
            self._buffer = deque(kept)
            self._bytes = sum(map(_size, kept))
            self._buffer.append(Revoked(partitions))
            self._ready.notify_all()
        for partition in partitions:
            self._expected.pop(partition, None)


def _size(record: Record | Revoked) -> int:
    """Bytes of the value: what the bound counts."""
    return 0 if isinstance(record, Revoked) or record.value is None else len(record.value)
