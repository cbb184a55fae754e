"""Collects the groups of one step: the reader's arrivals through the assembler, until enough groups are settled.

A step is full when `groups_per_step` groups are settled, those included that are dropped whole: so every group frees its
slot, whatever became of it, and a run never waits for groups that nobody will send.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..infra.log import Partition
from .groups import Assembler, Group
from .reader import Reader, Revoked


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """What one step has to settle."""

    groups: tuple[Group, ...]
    """Nameless ones included."""
    idle: float
    """Seconds spent waiting for data."""
    last: bool
    """The log was read up to where this trainer was told to end."""


class Gatherer:
    """Used by the trainer's thread."""

    def __init__(
        self,
        reader: Reader,
        assembler: Assembler,
        *,
        groups_per_step: int,
        ends: Mapping[Partition, int] | None,
        stopped: Callable[[], bool],
    ) -> None:
        """`ends`: stop at these offsets rather than waiting for more."""
        self._reader, self._assembler = reader, assembler
        self._wanted, self._ends, self._stopped = groups_per_step, ends, stopped
        self._settled: list[Group] = []

    def gather(self) -> Gathered | None:
        """The next step's groups; None when asked to stop, or when everything up to `ends` was gathered before.

        What is gathered and not returned stays unsettled: a restart reads it again. Raises what ended the reader.
        """
        waited = self._reader.waited
        while self._named() < self._wanted:
            if self._stopped():
                return None
            if self._ends is not None and self._reader.past(self._ends):
                return self._finish(self._reader.waited - waited)
            arrival = self._reader.take(0.2)
            if isinstance(arrival, Revoked):
                self._forget(arrival)
            elif arrival is not None and (group := self._assembler.add(arrival)):
                self._settled.append(group)
            self._settled += self._assembler.expired()
        return self._take(self._reader.waited - waited, last=False)

    def _named(self) -> int:
        return sum(bool(g.group_id) for g in self._settled)

    def _forget(self, gone: Revoked) -> None:
        self._assembler.forget(gone)
        left = (
            Group(
                group_id=g.group_id,
                members=tuple(m for m in g.members if m.position.partition not in gone),
                dropped=tuple(d for d in g.dropped if d.position.partition not in gone),
            )
            for g in self._settled
        )
        self._settled = [g for g in left if g.members or g.dropped]

    def _finish(self, idle: float) -> Gathered | None:
        self._settled += self._assembler.flush()
        return self._take(idle, last=True) if self._settled else None

    def _take(self, idle: float, *, last: bool) -> Gathered:
        groups, self._settled = tuple(self._settled), []
        return Gathered(groups=groups, idle=idle, last=last)
