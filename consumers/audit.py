"""The audit: what became of every acknowledged trajectory, told from the log, the ledger and a checkpoint alone.

records of the trajectory topics          what was acknowledged
receipts on the checkpoint's lineage      what was trained, what was dropped and why
cursors in the checkpoint                 what should have been settled by now

settled below the cursor, in no receipt   -> lost
trained by two receipts, or an id twice   -> twice
not settled                               -> pending
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ..infra.checkpoints import Checkpoints, Manifest
from ..infra.cursors import Cursors, CursorTracker
from ..infra.log import Log, Partition, Position, Record
from ..infra.scan import scan
from ..infra.topics import Names
from ..schemas import Receipt, WireError, parse_headers
from .ledger import Ledger, lineage

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The verdict for one checkpoint, over the log as it is now."""

    acknowledged: int
    """Records on the trajectory topics, tombstones left out."""
    trained: int
    dropped: Mapping[str, int] = field(default_factory=dict[str, int])
    """Reason -> records."""
    pending: int = 0
    """Not settled yet by this checkpoint."""
    lost: int = 0
    twice: int = 0
    expired: int = 0
    """Settled offsets that retention deleted since; counted nowhere else."""
    version: int = 0
    """The checkpoint's policy version; 0 where the run has none."""
    problems: tuple[str, ...] = ()
    """The first few lost or doubled ones, by position."""

    @property
    def clean(self) -> bool:
        return not self.lost and not self.twice

    def as_json(self) -> dict[str, object]:
        """What `rollstream audit --json` prints."""
        return {
            "acknowledged": self.acknowledged,
            "trained": self.trained,
            "dropped": dict(sorted(self.dropped.items())),
            "pending": self.pending,
            "lost": self.lost,
            "twice": self.twice,
            "expired": self.expired,
            "version": self.version,
            "problems": list(self.problems),
        }


class Fates:
    """Position -> how often trained, and why dropped, over one lineage."""

    def __init__(self, receipts: Iterable[Receipt]) -> None:
        self.trained: Counter[Position] = Counter()
        self.dropped: dict[Position, str] = {}
        for receipt in receipts:
            for consumed in receipt.consumed:
                partition = Partition(consumed.topic, consumed.partition)
                self.trained.update(Position(partition, int(o)) for o in consumed.trained)
                for reason, offsets in consumed.dropped.items():
                    self.dropped.update({Position(partition, int(o)): reason for o in offsets})


def audit(log: Log, names: Names, run: str, checkpoints: Checkpoints, *, version: int | None = None) -> Audit:
    """Audit the run's latest checkpoint, or the one with this policy version. Works on a live run.

    Raises `CheckpointError` for a version without a checkpoint.
    """
    manifest = checkpoints.latest() if version is None else checkpoints.manifest(version)
    fates, cursors = _progress(log, names, run, manifest)
    topics = sorted(t for t in log.topics() if names.environment(t) is not None)
    partitions = [p for t in topics for p in log.partitions(t)]
    return _judge(scan(log, partitions), fates, cursors, manifest.version if manifest else 0)


def _progress(log: Log, names: Names, run: str, manifest: Manifest | None) -> tuple[Fates, Cursors]:
    if manifest is None:
        return Fates(()), Cursors()
    receipts = {(r.incarnation, r.version): r for r in Ledger(log, names, run).receipts()}
    line = lineage(receipts, (manifest.incarnation, manifest.version))
    if not line.complete:
        logger.warning("the ledger does not reach back to the first step of run %s: older offsets look lost", run)
    return Fates(line.receipts), manifest.cursors


def _judge(records: Iterator[Record], fates: Fates, cursors: Cursors, version: int) -> Audit:
    trackers = {p: CursorTracker(c) for p, c in cursors.items()}
    acknowledged = trained = pending = met = 0
    dropped: Counter[str] = Counter()
    lost: list[str] = []
    twice: list[str] = []
    ids: dict[str, Position] = {}
    for record in records:
        position = record.position
        times, reason = fates.trained[position], fates.dropped.get(position)
        met += bool(times) or reason is not None
        if record.value is None:
            continue
        acknowledged += 1
        if times:
            trained += 1
            twice += [f"{position} was trained {times} times"] * (times > 1 or reason is not None)
            twice += _repeated(record, ids)
        elif reason is not None:
            dropped[reason] += 1
        elif (tracker := trackers.get(position.partition)) is not None and tracker.used(position.offset):
            lost.append(f"{position} lies below the cursor and in no receipt")
        else:
            pending += 1
    return Audit(
        acknowledged=acknowledged,
        trained=trained,
        dropped=dropped,
        pending=pending,
        lost=len(lost),
        twice=len(twice),
        expired=len(fates.trained.keys() | fates.dropped.keys()) - met,
        version=version,
        problems=tuple((lost + twice)[:20]),
    )


def _repeated(record: Record, ids: dict[str, Position]) -> list[str]:
    """A trajectory id that was trained from another position already."""
    try:
        trajectory_id = parse_headers(record.headers).trajectory_id
    except WireError:
        return []
    if trajectory_id is None:
        return []
    first = ids.setdefault(trajectory_id, record.position)
    return [] if first == record.position else [f"{record.position} and {first} both trained {trajectory_id}"]
