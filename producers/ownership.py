"""Which tasks a worker finished, partition by partition, and which partitions went to another worker.

The consumer group tells from inside a poll, on the polling thread; the worker acts on its own loop.

    revoked --> maybe gone --an assignment without it came, or 5 s passed--> moved (its open tasks are ended)
                    |
                    +--assigned again--> nothing happened: open tasks went on meanwhile, finished ones are known
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping

from ..infra.cursors import CursorTracker
from ..infra.log import Partition, Position

PATIENCE = 5.0
"""Seconds after which a revoked partition counts as another's."""


class Ownership:
    """Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._done: dict[Partition, CursorTracker] = {}
        self._new: set[Partition] = set()
        self._revoked: dict[Partition, float] = {}
        self._moved: set[Partition] = set()

    def assigned(self, partitions: frozenset[Partition]) -> Mapping[Partition, int]:
        """Reading begins at the committed offsets."""
        with self._lock:
            self._moved |= self._revoked.keys() - partitions
            self._moved -= partitions
            self._revoked.clear()
            self._new |= partitions
        return {}

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
                self._done.pop(partition, None)
            return gone

    def known(self, position: Position) -> bool:
        """Was the task at this position finished here before?"""
        with self._lock:
            tracker = self._done.setdefault(position.partition, CursorTracker())
            if position.partition in self._new:
                # The first record after an assignment lies at the committed offset: all below is finished, whoever did it.
                self._new.discard(position.partition)
                tracker.skip_to(position.offset)
            return tracker.used(position.offset)

    def finish(self, position: Position) -> None:
        """Every record of the task at this position was acknowledged."""
        with self._lock:
            if position.partition in self._done:
                self._done[position.partition].use(position.offset)

    def marks(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """The offsets to commit: below them everything is finished."""
        with self._lock:
            return {p: self._done[p].low for p in partitions if p in self._done and p not in self._new}
