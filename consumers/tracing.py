"""Where something went: from an offset to its step and the checkpoints that contain it, and from a policy back.

offset --> receipts that name it --> on the lineage?  --> the policies from that step on contain it
                                 |-> a dead branch?   --> said so, contains nothing
policy --> its receipts, its parents, the offsets that it trained and dropped
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ..infra.checkpoints import CheckpointError, Checkpoints, Manifest
from ..infra.log import Log, Partition, Position, Record
from ..infra.scan import scan
from ..schemas import Receipt, WireError, parse_headers
from .history import read_history
from .ledger import Ledger


class Branch(StrEnum):
    """Where a receipt stands, seen from one checkpoint."""

    LINEAGE = "lineage"
    """It counts."""
    LEFT = "left"
    """Its policy was published; a later trainer, or this checkpoint, went on from an older one."""
    UNPUBLISHED = "unpublished"
    """Its policy never was: the trainer crashed or was fenced before, or is at it right now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What one step did with a record."""

    outcome: str
    """"trained", or why it was dropped."""
    step: int
    version: int
    incarnation: str
    branch: Branch


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """What became of one record."""

    position: Position
    trajectory_id: str | None
    group_id: str | None
    state: str
    """"trained", "dropped", "pending", "untold" (retention removed its receipt), "lost", "expired" or "unwritten"."""
    fates: tuple[Fate, ...]
    """The one on the lineage first; more than one there: it was settled twice."""
    policies: tuple[int, ...]
    """Of the lineage, ascending: those that were computed with it, or knowing that it was dropped."""

    def as_json(self) -> dict[str, object]:
        """What `rollstream lineage POSITION --json` prints."""
        return {
            "position": str(self.position),
            "trajectory_id": self.trajectory_id,
            "group_id": self.group_id,
            "state": self.state,
            "fates": [
                {
                    "outcome": f.outcome,
                    "step": f.step,
                    "version": f.version,
                    "incarnation": f.incarnation,
                    "branch": f.branch.value,
                }
                for f in self.fates
            ],
            "policies": list(self.policies),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Deed:
    """One step, as its receipt tells it."""

    receipt: Receipt
    branch: Branch
    parents: tuple[int, ...]
    """Policies that it was computed from, newest first, as far as the ledger tells."""

    def as_json(self) -> dict[str, object]:
        """What `rollstream lineage policy V --json` prints."""
        r = self.receipt
        return {
            "version": r.version,
            "step": r.step,
            "incarnation": r.incarnation,
            "branch": self.branch.value,
            "parents": list(self.parents),
            "loss": r.loss,
            "groups": list(r.groups),
            "trained": {str(Partition(c.topic, c.partition)): c.trained.tolist() for c in r.consumed if len(c.trained)},
            "dropped": {
                str(Partition(c.topic, c.partition)): {reason: o.tolist() for reason, o in c.dropped.items()}
                for c in r.consumed
                if c.dropped
            },
        }


class Tracer:
    """Answers for one checkpoint of a run: the latest, or the one of `version`."""

    def __init__(self, log: Log, ledger: Ledger, checkpoints: Checkpoints, *, version: int | None = None) -> None:
        """Reads the ledger. Raises `CheckpointError`, `LogError`."""
        self._log, self._checkpoints = log, checkpoints
        self.manifest: Manifest | None = checkpoints.latest() if version is None else checkpoints.manifest(version)
        self._history = read_history(ledger, checkpoints, self.manifest)
        self._receipts = (*self._history.receipts, *self._history.strays)
        self._line = {id(receipt) for receipt in self._history.receipts}
        self._parents = {(r.incarnation, r.version): (r.parent_incarnation, r.parent) for r in self._receipts}

    def find(self, partitions: Iterable[Partition], trajectory_id: str) -> list[Position]:
        """Where records of this trajectory lie; reads all of them."""
        return sorted(r.position for r in scan(self._log, partitions) if _names(r)[0] == trajectory_id)

    def track(self, position: Position) -> Track:
        """What became of the record at this position. Raises `UnknownTopic`, `LogError`."""
        fates = tuple(self._fates(position))
        record, state = self._look(position, [f for f in fates if f.branch is Branch.LINEAGE])
        trajectory_id, group_id = (None, None) if record is None else _names(record)
        since = [f.version for f in fates if f.branch is Branch.LINEAGE]
        line = sorted({r.version for r in self._history.receipts})
        return Track(
            position=position,
            trajectory_id=trajectory_id,
            group_id=group_id,
            state=state,
            fates=fates,
            policies=tuple(v for v in line if since and v >= min(since)),
        )

    def policy(self, version: int) -> list[Deed]:
        """The steps that made this policy version: one, and what crashed or fenced trainers left under its number."""
        return [self._deed(receipt) for receipt in self._receipts if receipt.version == version]

    def step(self, step: int) -> list[Deed]:
        """The step of this number on the lineage, then those on dead branches."""
        return [self._deed(receipt) for receipt in self._receipts if receipt.step == step]

    def _deed(self, receipt: Receipt) -> Deed:
        chain: list[int] = []
        above = (receipt.parent_incarnation, receipt.parent)
        while above[1] and above[1] not in chain:
            chain.append(above[1])
            above = self._parents.get(above, ("", 0))
        return Deed(receipt=receipt, branch=self._branch(receipt), parents=tuple(chain))

    def _fates(self, position: Position) -> Iterator[Fate]:
        for receipt in self._receipts:
            if (outcome := _outcome(receipt, position)) is not None:
                yield Fate(
                    outcome=outcome,
                    step=receipt.step,
                    version=receipt.version,
                    incarnation=receipt.incarnation,
                    branch=self._branch(receipt),
                )

    def _branch(self, receipt: Receipt) -> Branch:
        if id(receipt) in self._line:
            return Branch.LINEAGE
        try:
            published = self._checkpoints.manifest(receipt.version).incarnation == receipt.incarnation
        except CheckpointError:
            published = False
        return Branch.LEFT if published else Branch.UNPUBLISHED

    def _look(self, position: Position, fates: list[Fate]) -> tuple[Record | None, str]:
        partition, offset = position
        first, end = self._log.bounds([partition])[partition]
        if first <= offset < end:
            record = next(iter(scan(self._log, {partition: offset}, stop={partition: offset + 1})), None)
        else:
            record = None
        if fates:
            return record, "trained" if any(f.outcome == "trained" for f in fates) else "dropped"
        if record is None:
            return None, "expired" if offset < first else "unwritten"
        cursor = self.manifest.cursors.get(partition) if self.manifest else None
        if cursor is None or not cursor.used(offset):
            return record, "pending"
        untold = self._history.untold.get(partition)
        return record, "untold" if untold is not None and untold.used(offset) else "lost"


def _outcome(receipt: Receipt, position: Position) -> str | None:
    for consumed in receipt.consumed:
        if (consumed.topic, consumed.partition) == position.partition:
            columns = {"trained": consumed.trained, **consumed.dropped}
            return next((name for name, offsets in columns.items() if np.isin(position.offset, offsets)), None)
    return None


def _names(record: Record) -> tuple[str | None, str | None]:
    """Trajectory and group id, as far as its headers tell."""
    try:
        headers = parse_headers(record.headers)
    except WireError:
        return None, None
    return headers.trajectory_id, headers.group_id
