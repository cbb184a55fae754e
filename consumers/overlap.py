"""What two ranks took for the same step: settled once, by the lower one.

    the same record twice       its partition changed hands: only one rank has it, the other forgets it
    another record of a group   a copy in another partition, or a group split by added partitions:
                                "duplicate" where the lower rank has that sample, else "late"

Each rank sees the same claims and so comes to the same verdict. A group that another rank settled in an earlier step,
while it waited here, is found in `Seen` and judged in the same way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..infra.log import Position
from .groups import Drop, Group
from .ranks import Ranks
from .seen import Seen


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claim:
    """What one rank took."""

    positions: frozenset[Position]
    groups: Mapping[str, frozenset[str]]
    """Group id -> its trajectory ids."""


def part_groups(groups: Sequence[Group], ranks: Ranks, seen: Seen) -> tuple[Group, ...]:
    """The groups without what belongs to another rank, now or since an earlier step. Raises `RankLost`."""
    if ranks.size == 1:
        return tuple(groups)
    claims = ranks.exchange(_claim(groups))[: ranks.rank]
    taken = frozenset[Position]().union(*(claim.positions for claim in claims))
    known: dict[str, frozenset[str]] = {}
    for claim in claims:
        for group_id, ids in claim.groups.items():
            known[group_id] = known.get(group_id, frozenset()) | ids
    own: list[Group] = []
    late: list[Drop] = []
    for group in groups:
        left = _without(group, taken)
        if group.group_id and (group.group_id in known or _settled(left, seen)):
            late += _late(left, known.get(group.group_id, frozenset()), seen)
        elif left.members or left.dropped:
            own.append(left)
    if late:
        own.append(Group(group_id="", members=(), dropped=tuple(late)))
    return tuple(own)


def _settled(group: Group, seen: Seen) -> bool:
    """Was it settled in an earlier step? What was replayed since is no part of that unless it was trained, too."""
    revived = group.anew and not any(seen.trajectory(m.trajectory.trajectory_id) for m in group.members)
    return seen.group(group.group_id) and not revived


def _claim(groups: Sequence[Group]) -> _Claim:
    return _Claim(
        positions=frozenset(p for group in groups for p in _positions(group)),
        groups={g.group_id: _ids(g) for g in groups if g.group_id},
    )


def _positions(group: Group) -> list[Position]:
    return [*(m.position for m in group.members), *(d.position for d in group.dropped)]


def _ids(group: Group) -> frozenset[str]:
    return frozenset(m.trajectory.trajectory_id for m in group.members) | {d.trajectory_id for d in group.dropped}


def _without(group: Group, taken: frozenset[Position]) -> Group:
    return replace(
        group,
        members=tuple(m for m in group.members if m.position not in taken),
        dropped=tuple(d for d in group.dropped if d.position not in taken),
    )


def _late(group: Group, known: frozenset[str], seen: Seen) -> list[Drop]:
    members = [Drop(m.position, "late", m.trajectory.trajectory_id) for m in group.members]
    return [_judge(drop, known, seen) for drop in (*members, *group.dropped)]


def _judge(drop: Drop, known: frozenset[str], seen: Seen) -> Drop:
    if not drop.trajectory_id:
        return drop
    repeated = drop.trajectory_id in known or seen.trajectory(drop.trajectory_id)
    return drop._replace(reason="duplicate" if repeated else "late")
