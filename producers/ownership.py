"""Which tasks a worker finished, partition by partition, and which partitions went to another worker.

The consumer group tells from inside a poll, on the polling thread; the worker acts on its own loop.

    revoked --> maybe gone --an assignment without it came, or 5 s passed--> moved (its open tasks are ended)
                    |
                    +--assigned again--> nothing happened: open tasks went on meanwhile, finished ones are known
"""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ..infra.cursors import CursorTracker
from ..infra.log import Partition, Position

PATIENCE = 5.0
"""Seconds after which a revoked partition counts as another's."""


@dataclass(slots=True, eq=False)
class _Read:
    """How far one partition was read and finished."""

    next: int
    """The offset after the last one read."""
    done: CursorTracker = field(default_factory=CursorTracker)


class Ownership:
    """Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._reads: dict[Partition, _Read] = {}
        self._new: set[Partition] = set()
        """Assigned, and no record read since."""
        self._revoked: dict[Partition, float] = {}
        self._moved: set[Partition] = set()

    def assigned(self, partitions: frozenset[Partition]) -> None:
        """Reading begins at the committed offsets."""
        with self._lock:
            self._moved |= self._revoked.keys() - partitions
            self._moved -= partitions
            self._revoked.clear()
            self._new |= partitions

    def revoked(self, partitions: frozenset[Partition]) -> None:
        with self._lock:
            self._revoked.update(dict.fromkeys(partitions, self._clock()))

    def moved(self) -> frozenset[Partition]:
        """Partitions that are certainly another's now; each is told once."""
        with self._lock:
            late = {p for p, since in self._revoked.items() if self._clock() - since > PATIENCE}
            for partition in late:
                del self._revoked[partition]
            gone = frozenset(self._moved | late)
            self._moved.clear()
            for partition in gone:
                self._reads.pop(partition, None)
            return gone

    def known(self, position: Position) -> bool:
        """Was the task at this position, which was just read, finished here before?"""
        partition, offset = position
        with self._lock:
            read = self._reads.get(partition)
            if read is None or partition in self._new:
                # The first record after an assignment lies at the committed offset: all below is finished, by whomever.
                self._new.discard(partition)
                read = self._reads.setdefault(partition, _Read(next=offset))
                read.done.skip_to(offset)
            elif offset > read.next:
                # Offsets without a record, such as the markers of a transaction: nobody would ever finish them.
                read.done.skip(read.next, offset)
            read.next = offset + 1
            return read.done.used(offset)

    def finish(self, position: Position) -> None:
        """Every record of the task at this position was acknowledged."""
        with self._lock:
            if position.partition in self._reads:
                self._reads[position.partition].done.use(position.offset)

    def marks(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """The offsets to commit: below them everything is finished."""
        with self._lock:
            return {p: self._reads[p].done.low for p in partitions if p in self._reads and p not in self._new}
