"""The audit: what became of every acknowledged trajectory, told from the log, the ledger and a checkpoint alone.

checkpoint     read first: what is acknowledged after it is pending, and never lost
receipts       on its lineage: what was trained, what was dropped and why
records        of the trajectory topics: what was acknowledged

settled below the cursor, in no receipt              -> lost
  the same, and retention removed those receipts     -> untold
settled by two receipts, or an id trained twice      -> twice
not settled                                          -> pending

Memory: 2 bytes for each record in the log, 28 for each trained one, and the receipts.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import xxhash

from ..infra.checkpoints import Checkpoints
from ..infra.cursors import Cursor, Cursors
from ..infra.log import Log, Partition, Position, Record
from ..infra.scan import scan
from ..infra.topics import Names
from ..schemas import Schemas, Trajectory, WireError, decode_as, parse_headers
from .fates import TRAINED, Fates
from .history import History, read_history
from .ledger import Ledger

SHOWN = 20
"""Problems that are named."""


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
    untold: int = 0
    """Settled by steps whose receipts retention removed from the ledger: whether trained or dropped, nobody knows."""
    expired: int = 0
    """Settled offsets that retention deleted since; counted nowhere else."""
    version: int = 0
    """The checkpoint's policy version; 0 where the run has none."""
    problems: tuple[str, ...] = ()
    """What is missing in the ledger, and the first few lost or doubled ones, by position."""

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
            "untold": self.untold,
            "expired": self.expired,
            "version": self.version,
            "problems": list(self.problems),
        }


def audit(
    log: Log,
    names: Names,
    run: str,
    checkpoints: Checkpoints,
    *,
    version: int | None = None,
    schemas: Schemas | None = None,
    progress: Callable[[int], None] | None = None,
) -> Audit:
    """Audit the run's latest checkpoint, or the one with this policy version. Works on a live run.

    `schemas`: how receipts are read; absent: by the log's own topic. `progress` is called with the number of records
    read so far. Raises `CheckpointError` for a version without a checkpoint.
    """
    manifest = checkpoints.latest() if version is None else checkpoints.manifest(version)
    history = read_history(Ledger(log, names, run, schemas), checkpoints, manifest)
    topics = sorted(t for t in log.topics() if names.environment(t) is not None)
    bounds = log.bounds([p for t in topics for p in log.partitions(t)])
    tally = _Tally(Fates(history.receipts, bounds), manifest.cursors if manifest else Cursors(), history)
    ends = {p: end for p, (_, end) in bounds.items()}
    for record in _counted(scan(log, bounds.keys(), stop=ends), progress):
        tally.add(record)
    return tally.verdict(log, manifest.version if manifest else 0)


def _counted(records: Iterable[Record], progress: Callable[[int], None] | None) -> Iterator[Record]:
    for number, record in enumerate(records, start=1):
        yield record
        if progress is not None:
            progress(number)


class _Tally:
    """Counts the records of the log against their fates."""

    def __init__(self, fates: Fates, cursors: Cursors, history: History) -> None:
        self._fates, self._cursors, self._untold_by = fates, cursors, history.untold
        self._problems = [f"policy {v} of trainer {i} has no receipt in the ledger" for i, v in history.holes]
        self._twins = _Twins()
        self._acknowledged = self._trained = self._pending = self._met = self._untold = 0
        self._dropped: Counter[int] = Counter()
        self._lost = 0

    def add(self, record: Record) -> None:
        fate = self._fates.of(record.partition, record.offset)
        self._met += fate > 0
        if record.value is None:
            return
        self._acknowledged += 1
        if fate == TRAINED:
            self._trained += 1
            self._twins.add(_identify(record, record.value), record.position)
        elif fate:
            self._dropped[fate] += 1
        else:
            self._unsettled(record.position)

    def _unsettled(self, position: Position) -> None:
        if not _used(self._cursors.get(position.partition), position.offset):
            self._pending += 1
        elif _used(self._untold_by.get(position.partition), position.offset):
            self._untold += 1
        else:
            self._lost += 1
            if self._lost <= SHOWN:
                self._problems.append(f"{position} is settled by the cursor and in no receipt")

    def verdict(self, log: Log, version: int) -> Audit:
        again = [f"{p} was settled {times} times" for p, times in sorted(self._fates.again.items())]
        twins = list(self._twins.pairs())
        told = self._problems + again[:SHOWN] + [_tell_twins(log, *pair) for pair in twins[:SHOWN]]
        return Audit(
            acknowledged=self._acknowledged,
            trained=self._trained,
            dropped={self._fates.reason(fate): count for fate, count in self._dropped.items()},
            pending=self._pending,
            lost=self._lost,
            twice=len(again) + len(twins),
            untold=self._untold,
            expired=self._fates.settled - self._met,
            version=version,
            problems=tuple(told[:SHOWN]),
        )


class _Twins:
    """Finds ids that were trained from two positions. Ids are held as 128-bit hashes."""

    def __init__(self) -> None:
        self._high, self._low = array("Q"), array("Q")
        self._partitions: dict[Partition, int] = {}
        self._numbers, self._offsets = array("I"), array("q")

    def add(self, trajectory_id: str, position: Position) -> None:
        high, low = divmod(xxhash.xxh3_128_intdigest(trajectory_id.encode()), 1 << 64)
        self._high.append(high)
        self._low.append(low)
        self._numbers.append(self._partitions.setdefault(position.partition, len(self._partitions)))
        self._offsets.append(position.offset)

    def pairs(self) -> Iterator[tuple[Position, Position]]:
        """Of each id that is there more than once: the first position, and each further one."""
        high, low = np.array(self._high), np.array(self._low)
        order = np.lexsort((low, high))
        equal = (high[order[1:]] == high[order[:-1]]) & (low[order[1:]] == low[order[:-1]])
        first = 0
        for at in np.flatnonzero(equal).tolist():
            # Of a run of equals the first stays; the sort is stable.
            first = first if at and equal[at - 1] else int(order[at])
            yield self._position(first), self._position(int(order[at + 1]))

    def _position(self, index: int) -> Position:
        partitions = list(self._partitions)
        return Position(partitions[self._numbers[index]], self._offsets[index])


def _used(cursor: Cursor | None, offset: int) -> bool:
    return cursor is not None and cursor.used(offset)


def _tell_twins(log: Log, first: Position, second: Position) -> str:
    stop = {second.partition: second.offset + 1}
    record = next(iter(scan(log, {second.partition: second.offset}, stop=stop)), None)
    what = "one trajectory" if record is None or record.value is None else _identify(record, record.value)
    return f"{second} and {first} both trained {what}"


def _identify(record: Record, value: bytes) -> str:
    """Its trajectory id, of the headers or else of the body; its position where neither tells."""
    try:
        named = parse_headers(record.headers).trajectory_id
        return named if named is not None else decode_as(Trajectory, value).trajectory_id
    except WireError:
        return str(record.position)
