"""What was settled lately, so that a re-sent trajectory is recognised, after a restart and from another partition too.

    bound           rows go when the gate drops every copy of them: settled < version - max_staleness
    limit           and never more than LIMIT rows, the oldest go first (cloning has no bound, so only this one)
    past the limit  a copy of what was forgotten trains again; `rollstream audit` counts it as "twice"

Nothing is guessed below the limit: a trajectory settled at version v has its oldest token at or below v, so once the
policy is past v + max_staleness a copy of it is stale, and its row is not needed. At the limit a checkpoint holds 24 MB
of rows and the trainer some 120 MB. Ids are 64-bit hashes: among LIMIT rows a new trajectory is taken for another with
a probability of 5e-14.
"""

import io
import logging
from array import array

import numpy as np
import xxhash

logger = logging.getLogger(__name__)

ROW = np.dtype([("group", "<u8"), ("trajectory", "<u8"), ("version", "<i8")])
LIMIT = 1_000_000
"""Rows at most, 24 bytes each in a checkpoint."""
SLACK = 4096
"""Forgotten rows that stay in memory until it is worth moving the others."""


class Seen:
    """Ids of settled groups and trajectories, oldest first. Used by the trainer's thread."""

    def __init__(self, *, max_staleness: int | None, limit: int = LIMIT) -> None:
        self._max_staleness, self._limit = max_staleness, limit
        self._first = 0
        self._rows, self._of, self._versions = array("Q"), array("Q"), array("q")
        """Trajectory, its group, when; those before `_first` are forgotten."""
        self._known: set[int] = set()
        self._groups: dict[int, int] = {}
        self._overflowed = False

    def __len__(self) -> int:
        return len(self._known)

    def group(self, group_id: str) -> bool:
        """Was this group settled?"""
        return _hash(group_id) in self._groups

    def trajectory(self, trajectory_id: str) -> bool:
        """Was this trajectory settled, as trained or dropped?"""
        return _hash(trajectory_id) in self._known

    def add(self, group_id: str, trajectory_id: str, version: int) -> None:
        """Remember a trajectory that was settled. `version`: the policy trained by that step, or the oldest among the
        trajectory's own tokens where that is newer (the trainer went back to an older checkpoint)."""
        row = _hash(trajectory_id)
        if row not in self._known:
            self._put(_hash(group_id), row, version)

    def evict(self, version: int) -> None:
        """Forget what a gate at this version drops anyway, and the oldest rows past the limit."""
        while self._known:
            settled = self._versions[self._first]
            stale = self._max_staleness is not None and settled < version - self._max_staleness
            if not stale and len(self._known) <= self._limit:
                break
            self._warn(stale)
            self._forget()
        if self._first > max(SLACK, len(self._known)):
            for column in (self._rows, self._of, self._versions):
                del column[: self._first]
            self._first = 0

    def to_bytes(self) -> bytes:
        """The rows as a .npy file: they travel in the checkpoint."""
        rows = np.empty(len(self), ROW)
        for name, column in (("group", self._of), ("trajectory", self._rows), ("version", self._versions)):
            rows[name] = np.array(column)[self._first :]
        buffer = io.BytesIO()
        np.save(buffer, rows, allow_pickle=False)
        return buffer.getvalue()

    def load(self, data: bytes) -> None:
        """Replace the rows by those of a checkpoint. Raises `ValueError` for bytes that are none."""
        rows = np.load(io.BytesIO(data), allow_pickle=False)
        if rows.dtype != ROW:
            raise ValueError(f"expected rows of {ROW}, found {rows.dtype}")
        self._first = 0
        self._of, self._rows = array("Q", rows["group"].tobytes()), array("Q", rows["trajectory"].tobytes())
        self._versions = array("q", rows["version"].tobytes())
        self._known = set(self._rows)
        groups, counts = np.unique(rows["group"], return_counts=True)
        self._groups = dict(zip(groups.tolist(), counts.tolist(), strict=True))

    def _put(self, group: int, row: int, version: int) -> None:
        self._known.add(row)
        self._groups[group] = self._groups.get(group, 0) + 1
        self._of.append(group)
        self._rows.append(row)
        self._versions.append(version)

    def _forget(self) -> None:
        group = self._of[self._first]
        self._known.discard(self._rows[self._first])
        self._first += 1
        self._groups[group] -= 1
        if not self._groups[group]:
            del self._groups[group]

    def _warn(self, stale: bool) -> None:
        if not stale and not self._overflowed:
            self._overflowed = True
            logger.warning(
                "%d settled trajectories are remembered, from now on the oldest are forgotten: a copy of one of these "
                "would train again, and `rollstream audit` would count it as twice",
                self._limit,
            )


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())
