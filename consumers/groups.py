"""The group assembler: samples of one task come together, or their group is settled without the missing ones.

    arrival --> waiting group --complete--------> Group        (all samples here, kept or dropped)
                     |--------group timeout-----> Group        (what is there trains; the rest arrives "late")
    arrival of a group settled before -----------> dropped: "late", or "duplicate" where that sample was there
    arrival of a sample already waiting ---------> dropped: "duplicate"

Other groups never wait for a slow one.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ..infra.log import Partition, Position
from ..schemas import Trajectory
from .arrivals import Arrival
from .seen import Seen


class Drop(NamedTuple):
    """A record that does not train, and why. `trajectory_id` is empty where the record does not tell."""

    position: Position
    reason: str
    trajectory_id: str = ""


class Member(NamedTuple):
    """A trajectory that may train, and where it lies."""

    position: Position
    trajectory: Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A settled group: what may train, in sample order, and what was dropped."""

    group_id: str
    """Empty for a record that belongs to no waiting group."""
    members: tuple[Member, ...]
    dropped: tuple[Drop, ...]


@dataclass(slots=True)
class _Waiting:
    size: int
    """0 until a member that could be decoded tells."""
    since: float
    members: dict[str, Arrival] = field(default_factory=dict[str, Arrival])

    def complete(self) -> bool:
        return 0 < self.size <= len(self.members)


class Assembler:
    """Collects arrivals into groups. Used by one thread."""

    def __init__(
        self, seen: Seen, *, timeout: float, min_samples: int = 2, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`timeout` in seconds from a group's first arrival; a group that times out with fewer than `min_samples` samples
        that may train is dropped as "group-timeout"."""
        self._seen, self._timeout, self._min_samples, self._clock = seen, timeout, min_samples, clock
        self._waiting: dict[str, _Waiting] = {}

    def __len__(self) -> int:
        """Groups still waiting for samples."""
        return len(self._waiting)

    def add(self, arrival: Arrival) -> Group | None:
        """Take one arrival; returns a group if it settles one: its own, or a nameless one holding a lone drop."""
        if not arrival.group_id:
            return _lone(arrival, arrival.reason)
        if self._seen.group(arrival.group_id):
            known = self._seen.trajectory(arrival.trajectory_id)
            return _lone(arrival, "duplicate" if known else "late")
        waiting = self._waiting.setdefault(arrival.group_id, _Waiting(size=0, since=self._clock()))
        if arrival.trajectory_id in waiting.members:
            return _lone(arrival, "duplicate")
        waiting.members[arrival.trajectory_id] = arrival
        waiting.size = max(waiting.size, arrival.group_size)
        return self._settle(arrival.group_id) if waiting.complete() else None

    def expired(self) -> list[Group]:
        """Settle the groups that waited for the group timeout."""
        limit = self._clock() - self._timeout
        late = [group_id for group_id, waiting in self._waiting.items() if waiting.since <= limit]
        return [self._settle(group_id) for group_id in late]

    def flush(self) -> list[Group]:
        """Settle every waiting group with what is there: the log has no more."""
        return [self._settle(group_id) for group_id in list(self._waiting)]

    def forget(self, partitions: Iterable[Partition]) -> None:
        """Drop, unsettled, what came from partitions that were taken away; their next owner reads it again."""
        gone = set(partitions)
        for group_id, waiting in list(self._waiting.items()):
            waiting.members = {k: a for k, a in waiting.members.items() if a.position.partition not in gone}
            if not waiting.members:
                del self._waiting[group_id]

    def _settle(self, group_id: str) -> Group:
        waiting = self._waiting.pop(group_id)
        members = [Member(a.position, a.trajectory) for a in waiting.members.values() if a.trajectory is not None]
        dropped = [_drop(a, a.reason) for a in waiting.members.values() if a.trajectory is None]
        if not waiting.complete() and len(members) < min(self._min_samples, waiting.size or self._min_samples):
            dropped += [Drop(m.position, "group-timeout", m.trajectory.trajectory_id) for m in members]
            members = []
        members.sort(key=lambda m: (m.trajectory.sample_index, m.trajectory.trajectory_id))
        return Group(group_id=group_id, members=tuple(members), dropped=tuple(dropped))


def _drop(arrival: Arrival, reason: str | None) -> Drop:
    return Drop(arrival.position, reason or "invalid", arrival.trajectory_id)


def _lone(arrival: Arrival, reason: str | None) -> Group:
    return Group(group_id="", members=(), dropped=(_drop(arrival, reason),))
