"""The audit: what became of every acknowledged trajectory, told from the log, the ledger and a checkpoint alone.

records of the trajectory topics          what was acknowledged
receipts on the checkpoint's lineage      what was trained, what was dropped and why
cursors in the checkpoint                 what should have been settled by now

settled below the cursor, in no receipt   -> lost
settled by two receipts, or an id twice   -> twice
not settled                               -> pending
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ..infra.checkpoints import Checkpoints, Manifest
from ..infra.cursors import Cursors
from ..infra.log import Log, Partition, Position, Record
from ..infra.scan import scan
from ..infra.topics import Names
from ..schemas import Receipt, Trajectory, WireError, decode_as, parse_headers
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
    """What the receipts of one lineage tell of each position."""

    def __init__(self, receipts: Iterable[Receipt]) -> None:
        self.trained: set[Position] = set()
        self.dropped: dict[Position, str] = {}
        self.settled: Counter[Position] = Counter()
        """How many times; once is right."""
        for receipt in receipts:
            for consumed in receipt.consumed:
                partition = Partition(consumed.topic, consumed.partition)
                trained = [Position(partition, int(o)) for o in consumed.trained]
                self.trained.update(trained)
                self.settled.update(trained)
                for reason, offsets in consumed.dropped.items():
                    dropped = [Position(partition, int(o)) for o in offsets]
                    self.dropped.update(dict.fromkeys(dropped, reason))
                    self.settled.update(dropped)


def audit(
    log: Log,
    names: Names,
    run: str,
    checkpoints: Checkpoints,
    *,
    version: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Audit:
    """Audit the run's latest checkpoint, or the one with this policy version. Works on a live run.

    `progress` is called with the number of records read so far. Raises `CheckpointError` for a version without a
    checkpoint.
    """
    manifest = checkpoints.latest() if version is None else checkpoints.manifest(version)
    fates, cursors = _progress(log, names, run, manifest)
    topics = sorted(t for t in log.topics() if names.environment(t) is not None)
    partitions = [p for t in topics for p in log.partitions(t)]
    records = _counted(scan(log, partitions), progress)
    return _judge(records, fates, cursors, manifest.version if manifest else 0)


def _counted(records: Iterator[Record], progress: Callable[[int], None] | None) -> Iterator[Record]:
    for number, record in enumerate(records, start=1):
        yield record
        if progress is not None:
            progress(number)


def _progress(log: Log, names: Names, run: str, manifest: Manifest | None) -> tuple[Fates, Cursors]:
    if manifest is None:
        return Fates(()), Cursors()
    receipts = {(r.incarnation, r.version): r for r in Ledger(log, names, run).receipts()}
    line = lineage(receipts, (manifest.incarnation, manifest.version))
    if not line.complete:
        logger.warning("the ledger does not reach back to the first step of run %s: older offsets look lost", run)
    return Fates(line.receipts), manifest.cursors


def _judge(records: Iterator[Record], fates: Fates, cursors: Cursors, version: int) -> Audit:
    tally = _Tally(fates, cursors)
    for record in records:
        tally.add(record)
    return Audit(
        acknowledged=tally.acknowledged,
        trained=tally.trained,
        dropped=tally.dropped,
        pending=tally.pending,
        lost=len(tally.lost),
        twice=len(tally.twice),
        expired=len(fates.settled) - tally.met,
        version=version,
        problems=tuple((tally.lost + tally.twice)[:20]),
    )


class _Tally:
    """Counts the records of the log against their fates."""

    def __init__(self, fates: Fates, cursors: Cursors) -> None:
        self._fates, self._cursors = fates, cursors
        self._ids: dict[str, Position] = {}
        self.acknowledged = self.trained = self.pending = self.met = 0
        self.dropped: Counter[str] = Counter()
        self.lost: list[str] = []
        self.twice: list[str] = []

    def add(self, record: Record) -> None:
        position, fates = record.position, self._fates
        times = fates.settled[position]
        self.met += times > 0
        if times > 1:
            self.twice.append(f"{position} was settled {times} times")
        if record.value is None:
            return
        self.acknowledged += 1
        if position in fates.trained:
            self.trained += 1
            self._compare(record, record.value)
        elif times:
            self.dropped[fates.dropped[position]] += 1
        elif (cursor := self._cursors.get(position.partition)) is not None and cursor.used(position.offset):
            self.lost.append(f"{position} is settled by the cursor and in no receipt")
        else:
            self.pending += 1

    def _compare(self, record: Record, value: bytes) -> None:
        """Was this trajectory id trained from another position already?"""
        trajectory_id = _identify(record, value)
        first = self._ids.setdefault(trajectory_id, record.position)
        if first != record.position:
            self.twice.append(f"{record.position} and {first} both trained {trajectory_id}")


def _identify(record: Record, value: bytes) -> str:
    """Its trajectory id, of the headers or else of the body; its position where neither tells."""
    try:
        named = parse_headers(record.headers).trajectory_id
        return named if named is not None else decode_as(Trajectory, value).trajectory_id
    except WireError:
        return str(record.position)
