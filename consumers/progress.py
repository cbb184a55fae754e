"""Which offsets are settled, partition by partition.

Shared by the reader (where to start, what to skip, what to commit) and the trainer (what a step used). The snapshot of
it inside the checkpoint is the truth about progress. Every rank knows the progress of all: each tells the others what
it bridged, and settles what any of them settled, so that a partition may change hands between two steps.
"""

import threading
from collections.abc import Iterable
from typing import NamedTuple

from ..infra.cursors import Cursors, CursorTracker
from ..infra.log import Partition, Position


class Bridge(NamedTuple):
    """Offsets [start, stop) that hold no record, or lie below where reading began."""

    partition: Partition
    start: int
    stop: int


class Progress:
    """Thread-safe cursors of every partition met so far."""

    def __init__(self, cursors: Cursors | None = None) -> None:
        self._lock = threading.Lock()
        self._trackers: dict[Partition, CursorTracker] = {}
        self._bridges: list[Bridge] = []
        for partition, cursor in (cursors or Cursors()).items():
            self._trackers[partition] = CursorTracker(cursor)

    def start(self, partition: Partition, earliest: int) -> int:
        """Where reading this partition begins: its low-water mark, or `earliest` if it was never met before."""
        with self._lock:
            if partition not in self._trackers:
                self._trackers[partition] = CursorTracker()
                self._bridge(Bridge(partition, 0, earliest))
            return self._trackers[partition].low

    def settled(self, position: Position) -> bool:
        with self._lock:
            tracker = self._trackers.get(position.partition)
            return tracker is not None and tracker.used(position.offset)

    def settle(self, positions: Iterable[Position]) -> None:
        """Mark as trained or dropped. Raises `ValueError` for one that was settled before: nothing trains twice."""
        with self._lock:
            for position in positions:
                if not self._trackers[position.partition].use(position.offset):
                    raise ValueError(f"{position} was settled before")

    def bridge(self, partition: Partition, start: int, stop: int) -> None:
        """Mark offsets in [start, stop) that hold no record (compaction, transaction markers) as settled."""
        with self._lock:
            self._bridge(Bridge(partition, start, stop))

    def bridges(self) -> list[Bridge]:
        """What was bridged since the last call, partitions that were met first included."""
        with self._lock:
            bridges, self._bridges = self._bridges, []
        return bridges

    def follow(self, bridges: Iterable[Bridge]) -> None:
        """Take over what other ranks bridged. Idempotent."""
        with self._lock:
            for partition, start, stop in bridges:
                self._trackers.setdefault(partition, CursorTracker()).skip(start, stop)

    def marks(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """Low-water marks: the offsets to commit, for lag display."""
        with self._lock:
            return {p: self._trackers[p].low for p in partitions if p in self._trackers}

    def snapshot(self) -> Cursors:
        with self._lock:
            return Cursors({p: tracker.snapshot() for p, tracker in self._trackers.items()})

    def _bridge(self, bridge: Bridge) -> None:
        self._trackers[bridge.partition].skip(bridge.start, bridge.stop)
        self._bridges.append(bridge)
