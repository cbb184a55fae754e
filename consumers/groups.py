"""The group assembler: samples of one task come together, or their group is settled without the missing ones.

    arrival --> waiting --complete--------> settled --take--> the step         (all samples here, kept or dropped)
                   |--------group timeout-> settled                            (what is there trains)
    arrival of a group settled before ----> dropped: "late", or "duplicate" where that sample was there
    arrival of a sample already waiting --> dropped: "duplicate"
    arrival that tells no trajectory id --> a seat of its own, or dropped for its own reason where its group is settled
    dead letter that was replayed --------> waits, also where its group is settled: it was never read before

Other groups never wait for a slow one. A group that is settled and not yet taken is known here, one that a step took is
known to `Seen`: there is no moment in which a second copy of a group could become a group of its own. Only samples that
were dead letters open a settled group anew, with those replayed beside them: `Seen` knows the group, and not them.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import NamedTuple

from ..infra.log import Partition, Position
from ..schemas import Trajectory
from .arrivals import Arrival
from .seen import Seen

CROWD = 10_000
"""Samples with which a group is settled, whatever its size: a receipt must fit into its record."""


class Drop(NamedTuple):
    """A record that does not train, and why.

    `trajectory_id` is empty where the record does not tell, and for a dead letter: what is replayed is no copy.
    """

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
    """Empty for records that belong to no group, or to one settled before."""
    members: tuple[Member, ...]
    dropped: tuple[Drop, ...]
    anew: bool = False
    """All of it was replayed: its id may have been settled before."""


@dataclass(slots=True)
class _Waiting:
    since: float
    size: int = 0
    """0 until a sample tells."""
    samples: dict[str, Arrival] = field(default_factory=dict[str, Arrival])
    """By trajectory id, or by position where the record does not tell."""

    def complete(self) -> bool:
        return 0 < self.size <= len(self.samples)

    def holds(self, arrival: Arrival) -> bool:
        return _key(arrival) in self.samples

    def put(self, arrival: Arrival) -> Arrival | None:
        """Seat it; returns the one that has to go: a second copy, unless only that one can train."""
        there = self.samples.get(_key(arrival))
        if there is not None and (there.trajectory is not None or arrival.trajectory is None):
            return arrival
        self.samples[_key(arrival)] = arrival
        self.size = max(self.size, arrival.group_size)
        return there


class Assembler:
    """Collects arrivals into groups. Used by one thread."""

    def __init__(
        self, seen: Seen, *, timeout: float, min_samples: int = 2, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`timeout` in seconds of listening from a group's first arrival.

        A group that times out with fewer than `min_samples` samples that may train is dropped as "group-timeout".
        """
        self._seen, self._timeout, self._min_samples, self._clock = seen, timeout, min_samples, clock
        self._deaf = 0.0
        self._waiting: dict[str, _Waiting] = {}
        self._settled: dict[str, _Waiting] = {}
        self._lone: list[Drop] = []

    @property
    def waiting(self) -> int:
        """Groups that wait for samples."""
        return len(self._waiting)

    @property
    def settled(self) -> int:
        """Groups that wait for a step to take them."""
        return len(self._settled)

    @property
    def lone(self) -> int:
        """Drops beside any group that wait for a step to take them."""
        return len(self._lone)

    def add(self, arrival: Arrival) -> None:
        """Take one arrival: its group waits on, or is settled by it."""
        group_id = arrival.group_id
        if not group_id:
            self._lone.append(_drop(arrival))
        elif self._seen.group(group_id) and not self._revives(arrival):
            self._repeat(arrival, known=self._seen.trajectory(arrival.trajectory_id))
        elif (settled := self._settled.get(group_id)) is None:
            self._wait(arrival)
        elif self._revives(arrival):
            self._seat(settled, arrival)
        else:
            self._repeat(arrival, known=settled.holds(arrival))

    def expire(self) -> None:
        """Settle the groups that waited for the group timeout."""
        limit = self._now() - self._timeout
        # In the order of their first arrivals, so that nobody looks at them all with every arrival.
        for group_id, _ in list(takewhile(lambda item: item[1].since <= limit, self._waiting.items())):
            self._settle(group_id)

    def flush(self) -> None:
        """Settle every waiting group with what is there: the log has no more."""
        for group_id in list(self._waiting):
            self._settle(group_id)

    def excuse(self, seconds: float) -> None:
        """Time in which nobody listened, a step's: the samples that came meanwhile are not late."""
        self._deaf += seconds

    def forget(self, partitions: Iterable[Partition]) -> None:
        """Drop, unsettled, what came from partitions that were taken away; their next owner reads it again.

        A group that is settled and loses samples waits for them again.
        """
        gone = set(partitions)
        self._remove(lambda position: position.partition in gone)

    def forget_settled(self, settled: Callable[[Position], bool]) -> None:
        """Drop what another rank settled after its partition changed hands."""
        self._remove(settled)

    def _remove(self, gone: Callable[[Position], bool]) -> None:
        self._lone = [d for d in self._lone if not gone(d.position)]
        for group_id, group in [*self._settled.items(), *self._waiting.items()]:
            left = {k: a for k, a in group.samples.items() if not gone(a.position)}
            if len(left) == len(group.samples):
                continue
            self._settled.pop(group_id, None)
            self._waiting.pop(group_id, None)
            if left:
                self._waiting[group_id] = _Waiting(since=group.since, size=group.size, samples=left)

    def take(self, limit: int) -> tuple[Group, ...]:
        """At most `limit` settled groups, the first first, and all drops beside them; the step makes them known to
        `Seen`."""
        taken = list(islice(self._settled, limit))
        groups = [self._group(group_id, self._settled.pop(group_id)) for group_id in taken]
        if self._lone:
            groups.append(Group(group_id="", members=(), dropped=tuple(self._lone)))
        self._lone = []
        return tuple(groups)

    def _wait(self, arrival: Arrival) -> None:
        waiting = self._waiting.setdefault(arrival.group_id, _Waiting(since=self._now()))
        self._seat(waiting, arrival)
        if waiting.complete() or len(waiting.samples) >= CROWD:
            self._settle(arrival.group_id)

    def _seat(self, group: _Waiting, arrival: Arrival) -> None:
        spare = group.put(arrival)
        if spare is arrival:
            self._repeat(arrival, known=True)
        elif spare is not None:
            self._lone.append(_drop(spare))

    def _revives(self, arrival: Arrival) -> bool:
        """Was it a dead letter, and may it train for the first time?"""
        fresh = arrival.replayed and arrival.trajectory is not None
        return fresh and not self._seen.trajectory(arrival.trajectory_id)

    def _repeat(self, arrival: Arrival, *, known: bool) -> None:
        # Without an id it may be anything, and one that was replayed is not late: what is wrong with it says more.
        told = arrival.trajectory_id and (known or not arrival.replayed)
        reason = ("duplicate" if known else "late") if told else arrival.reason
        self._lone.append(Drop(arrival.position, reason or "invalid", arrival.trajectory_id))

    def _settle(self, group_id: str) -> None:
        self._settled[group_id] = self._waiting.pop(group_id)

    def _group(self, group_id: str, group: _Waiting) -> Group:
        members = [Member(a.position, a.trajectory) for a in group.samples.values() if a.trajectory is not None]
        dropped = [_drop(a) for a in group.samples.values() if a.trajectory is None]
        if not group.complete() and len(members) < self._min_samples:
            dropped += [Drop(m.position, "group-timeout", m.trajectory.trajectory_id) for m in members]
            members = []
        members.sort(key=lambda m: (m.trajectory.sample_index, m.trajectory.trajectory_id))
        anew = all(a.replayed for a in group.samples.values())
        return Group(group_id=group_id, members=tuple(members), dropped=tuple(dropped), anew=anew)

    def _now(self) -> float:
        return self._clock() - self._deaf


def _key(arrival: Arrival) -> str:
    return arrival.trajectory_id or str(arrival.position)


def _drop(arrival: Arrival) -> Drop:
    return Drop(arrival.position, arrival.reason or "invalid", "" if arrival.buried else arrival.trajectory_id)
