"""Collects the groups of one step: the reader's arrivals through the assembler, until enough groups are settled.

A step is full when `groups_per_step` groups are settled, those included that are dropped whole: so every group frees
its slot, whatever became of it, and a run never waits for groups that nobody will send.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from .groups import Assembler, Group
from .reader import Reader, Revoked

LONE = 50_000
"""Drops beside any group that fill a step too: its receipt must fit into a record of the ledger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """What one step has to settle."""

    groups: tuple[Group, ...]
    """A nameless one included, for the records that belong to none."""
    idle: float
    """Seconds spent waiting for data."""


class Gatherer:
    """Used by the trainer's thread."""

    def __init__(
        self,
        reader: Reader,
        assembler: Assembler,
        *,
        groups_per_step: int,
        replay: bool,
        stopped: Callable[[], bool],
    ) -> None:
        """`replay`: stop at the reader's `ends` rather than waiting for more."""
        self._reader, self._assembler = reader, assembler
        self._wanted, self._replay, self._stopped = groups_per_step, replay, stopped
        self._left: float | None = None

    def gather(self) -> Gathered | None:
        """The next step's groups; None when asked to stop, or when the replay's end was gathered before.

        What is gathered and not returned stays unsettled: a restart reads it again. Raises what ended the reader.
        """
        if self._left is not None:
            self._assembler.excuse(time.monotonic() - self._left)
        waited = self._reader.waited
        while not self._full():
            if self._stopped():
                return None
            if self._replay and self._reader.past():
                self._assembler.flush()
                break
            self._listen()
        groups = self._assembler.take(self._wanted)
        self._left = time.monotonic()
        return Gathered(groups=groups, idle=self._reader.waited - waited) if groups else None

    def _full(self) -> bool:
        return self._assembler.settled >= self._wanted or self._assembler.lone >= LONE

    def _listen(self) -> None:
        arrival = self._reader.take(0.2)
        if isinstance(arrival, Revoked):
            self._assembler.forget(arrival)
        elif arrival is not None:
            self._assembler.add(arrival)
        self._assembler.expire()
