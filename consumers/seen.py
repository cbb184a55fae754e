"""What was settled lately, so that a re-sent trajectory is recognised, after a restart and from another partition too.

Memory is bounded without a guess. A trajectory settled at version v has its oldest token at or below v; once the policy
is past v + max_staleness, a copy of it is stale and the gate drops it, so its row may go. Where there is no staleness
bound (behaviour cloning) the newest `limit` rows are kept; a copy older than these would train again.
"""

import io
from collections import OrderedDict

import numpy as np
import xxhash

ROW = np.dtype([("group", "<u8"), ("trajectory", "<u8"), ("version", "<i8")])
LIMIT = 1_000_000
"""Rows at most, 24 bytes each in a checkpoint."""


class Seen:
    """Ids of settled groups and trajectories, as 64-bit hashes."""

    def __init__(self, *, max_staleness: int | None, limit: int = LIMIT) -> None:
        self._max_staleness, self._limit = max_staleness, limit
        self._rows: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self._groups: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def group(self, group_id: str) -> bool:
        """Was this group settled?"""
        return _hash(group_id) in self._groups

    def trajectory(self, trajectory_id: str) -> bool:
        """Was this trajectory settled, as trained or dropped?"""
        return _hash(trajectory_id) in self._rows

    def add(self, group_id: str, trajectory_id: str, version: int) -> None:
        """Remember a trajectory that was settled. `version`: the policy trained by that step, or the oldest among the
        trajectory's own tokens where that is newer (the trainer went back to an older checkpoint)."""
        row = _hash(trajectory_id)
        if row not in self._rows:
            group = _hash(group_id)
            self._rows[row] = (group, version)
            self._groups[group] = self._groups.get(group, 0) + 1

    def evict(self, version: int) -> None:
        """Forget what a gate at this version drops anyway, and the oldest rows past the limit."""
        while self._rows:
            group, settled = next(iter(self._rows.values()))
            stale = self._max_staleness is not None and settled < version - self._max_staleness
            if not stale and len(self._rows) <= self._limit:
                return
            self._rows.popitem(last=False)
            self._groups[group] -= 1
            if not self._groups[group]:
                del self._groups[group]

    def to_bytes(self) -> bytes:
        """The rows as a .npy file: they travel in the checkpoint."""
        rows = np.array([(group, row, version) for row, (group, version) in self._rows.items()], ROW)
        buffer = io.BytesIO()
        np.save(buffer, rows, allow_pickle=False)
        return buffer.getvalue()

    def load(self, data: bytes) -> None:
        """Replace the rows by those of a checkpoint. Raises `ValueError` for bytes that are none."""
        rows = np.load(io.BytesIO(data), allow_pickle=False)
        if rows.dtype != ROW:
            raise ValueError(f"expected rows of {ROW}, found {rows.dtype}")
        self._rows.clear()
        self._groups.clear()
        for group, row, version in rows.tolist():
            self._rows[row] = (group, version)
            self._groups[group] = self._groups.get(group, 0) + 1


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())
