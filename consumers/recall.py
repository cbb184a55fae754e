"""Recall: the groups of a past step, from the offsets in its receipt.

trained, zero-variance, skipped-...   what the step was offered: read again, grouped as it was
every other reason                    dropped before; stays a drop, and is not read
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise

from ..infra.claims import Claims, read_trajectory
from ..infra.log import Log, Partition, Position
from ..infra.scan import scan
from ..schemas import Receipt, Schemas, Trajectory, WireError
from ..schemas.errors import RollstreamError
from .groups import Drop, Group, Member

GAP = 5000
"""Records between two wanted ones that are rather read over than sought past."""


class ReplayError(RollstreamError):
    """A step that cannot be replayed: what it needs is gone, or was never there."""


class Recall:
    """Reads the records of past steps."""

    def __init__(self, log: Log, claims: Claims, schemas: Schemas) -> None:
        self._log, self._claims, self._schemas = log, claims, schemas

    def groups(self, receipt: Receipt) -> tuple[Group, ...]:
        """The groups that the step was offered, and a nameless one of what was dropped before.

        Raises `ReplayError` where records are gone or cannot be read, `LogError`, `StoreError`.
        """
        offered = list(offered_positions(receipt))
        found = self._read(offered, receipt.step)
        members: defaultdict[str, list[Member]] = defaultdict(list)
        for position in offered:
            members[found[position].group_id].append(Member(position, found[position]))
        groups = [
            Group(group_id=group_id, members=tuple(sorted(group, key=_place)), dropped=())
            for group_id, group in members.items()
        ]
        drops = tuple(Drop(position, reason) for position, reason in _drops(receipt) if not _offered(reason))
        return (*groups, Group(group_id="", members=(), dropped=drops))

    def _read(self, positions: Iterable[Position], step: int) -> dict[Position, Trajectory]:
        wanted: defaultdict[Partition, list[int]] = defaultdict(list)
        for partition, offset in positions:
            wanted[partition].append(offset)
        self._check_bounds(wanted, step)
        found: dict[Position, Trajectory] = {}
        for stretch in _stretches(wanted):
            left = {Position(p, offset) for p, offsets in stretch.items() for offset in offsets}
            start, stop = {p: o[0] for p, o in stretch.items()}, {p: o[-1] + 1 for p, o in stretch.items()}
            for record in scan(self._log, start, stop=stop):
                if record.position in left and record.value is not None:
                    found[record.position] = self._decode(record.value, record.position, step)
            if missing := sorted(left - found.keys()):
                raise ReplayError(f"step {step} trained {missing[0]}, where the log holds no record any more")
        return found

    def _check_bounds(self, wanted: dict[Partition, list[int]], step: int) -> None:
        there = self._log.topics()
        if gone := sorted({p.topic for p in wanted} - there.keys()):
            raise ReplayError(f"step {step} trained records of the topic {gone[0]}, which is gone")
        for partition, (first, end) in self._log.bounds(wanted).items():
            lowest, highest = min(wanted[partition]), max(wanted[partition])
            if lowest < first:
                raise ReplayError(
                    f"step {step} trained {Position(partition, lowest)}, which retention has removed: the log starts "
                    f"at {first} now. Lengthen retention.ms to replay for longer"
                )
            if highest >= end:
                raise ReplayError(
                    f"step {step} trained {Position(partition, highest)}, but the log ends at {end}: is it the log "
                    f"that this run was trained from?"
                )

    def _decode(self, value: bytes, position: Position, step: int) -> Trajectory:
        try:
            return read_trajectory(value, self._claims, schemas=self._schemas)
        except WireError as error:
            raise ReplayError(f"step {step} trained {position}, which cannot be read any more: {error}") from error


def offered_positions(receipt: Receipt) -> Iterator[Position]:
    """What the step was offered to train on."""
    for consumed in receipt.consumed:
        partition = Partition(consumed.topic, consumed.partition)
        yield from (Position(partition, offset) for offset in consumed.trained.tolist())
    yield from (position for position, reason in _drops(receipt) if _offered(reason))


def _drops(receipt: Receipt) -> Iterator[tuple[Position, str]]:
    for consumed in receipt.consumed:
        partition = Partition(consumed.topic, consumed.partition)
        for reason, offsets in consumed.dropped.items():
            yield from ((Position(partition, offset), reason) for offset in offsets.tolist())


def _offered(reason: str) -> bool:
    return reason == "zero-variance" or reason.startswith("skipped-")


def _place(member: Member) -> tuple[int, str]:
    return member.trajectory.sample_index, member.trajectory.trajectory_id


def _stretches(wanted: dict[Partition, list[int]]) -> Iterator[dict[Partition, list[int]]]:
    """Offsets without large gaps, the next stretch of every partition at once."""
    left = {partition: sorted(offsets) for partition, offsets in wanted.items()}
    while left:
        cuts = {p: _cut(offsets) for p, offsets in left.items()}
        yield {p: offsets[: cuts[p]] for p, offsets in left.items()}
        left = {p: offsets[cuts[p] :] for p, offsets in left.items() if len(offsets) > cuts[p]}


def _cut(offsets: list[int]) -> int:
    """How many of these ascending offsets come before the first large gap."""
    gaps = (at for at, (one, other) in enumerate(pairwise(offsets), 1) if other - one > GAP)
    return next(gaps, len(offsets))
