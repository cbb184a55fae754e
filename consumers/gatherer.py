"""Collects the groups of one step: records are admitted and assembled until enough groups are settled.

    rank 0   listen a round --+                                                   +--> take its share
    rank 1   listen a round --+--> standings of all: enough? stopped? at the end? -+--> take its share

A step is full when `groups_per_step` groups are settled, those included that are dropped whole: so every group frees
its slot, whatever became of it, and a run never waits for groups that nobody will send. With several ranks it is full
when they have so many together; a rank without data takes part with none.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..infra.log import Partition, Record
from ..infra.store import StoreError
from ..schemas import SchemaAway
from .arrivals import Arrival
from .groups import Assembler, Group
from .ranks import ALONE, Ranks
from .reader import Reader, Revoked

ROUND = 0.2
"""Seconds that a rank listens, at most, before it looks how the others stand."""
LONE = 50_000
"""Drops beside any group that fill a step too: its receipt must fit into a record of the ledger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """What one step has to settle."""

    groups: tuple[Group, ...]
    """A nameless one included, for the records that belong to none."""
    idle: float
    """Seconds spent waiting for data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Standing:
    """How far one rank is."""

    settled: int
    lone: int
    stopped: bool
    owed: frozenset[Partition]
    """Of a replay: partitions that it has not read to the end, those of others included."""
    waiting: bool
    """Of a replay: something was read and not taken yet."""


class Gatherer:
    """Used by the trainer's thread."""

    def __init__(
        self,
        reader: Reader,
        admit: Callable[[Record], Arrival],
        assembler: Assembler,
        *,
        groups_per_step: int,
        replay: bool,
        stopped: Callable[[], bool],
        ranks: Ranks = ALONE,
    ) -> None:
        """`admit` judges and decodes when a record is taken: what waits is as small as it was on the wire.

        `groups_per_step`: of all ranks together. `replay`: stop at the reader's `ends` rather than wait for more."""
        self._reader, self._admit, self._assembler, self._ranks = reader, admit, assembler, ranks
        self._wanted, self._replay, self._stopped = groups_per_step, replay, stopped
        self._left: float | None = None

    def gather(self) -> Gathered | None:
        """This rank's part of the next step; None when a rank was asked to stop, or when the replay's end was gathered
        before. Every rank gets None, or none does.

        What is gathered and not returned stays unsettled: a restart reads it again. Raises what ended the reader,
        `RankLost`.
        """
        if self._left is not None:
            self._assembler.excuse(time.monotonic() - self._left)
            if self._ranks.size > 1:
                self._assembler.forget_settled(self._reader.settled)
        waited = self._reader.waited
        while True:
            standings = self._ranks.exchange(self._standing())
            # Asked first: what is settled beyond one step may fill the next ones without a round of listening.
            if any(standing.stopped for standing in standings):
                return None
            if self._full(standings):
                break
            if self._replay and _past(standings):
                self._assembler.flush()
                standings = self._ranks.exchange(self._standing())
                break
            self._listen()
        quotas = share_out([standing.settled for standing in standings], self._wanted)
        groups = self._assembler.take(quotas[self._ranks.rank])
        self._left = time.monotonic()
        if not any(standing.settled or standing.lone for standing in standings):
            return None
        return Gathered(groups=groups, idle=self._reader.waited - waited)

    def _full(self, standings: Sequence[_Standing]) -> bool:
        return sum(s.settled for s in standings) >= self._wanted or sum(s.lone for s in standings) >= LONE

    def _standing(self) -> _Standing:
        owed, waiting = self._reader.outlook() if self._replay else (frozenset[Partition](), False)
        return _Standing(
            settled=self._assembler.settled,
            lone=self._assembler.lone,
            stopped=self._stopped(),
            owed=owed,
            waiting=waiting,
        )

    def _listen(self) -> None:
        """One round; a rank alone need not wait for its end."""
        until = time.monotonic() + ROUND
        while (left := until - time.monotonic()) > 0:
            taken = self._reader.take(left)
            if isinstance(taken, Revoked):
                self._assembler.forget(taken)
            elif taken is not None:
                self._judge(taken)
            self._assembler.expire()
            if taken is None or self._ranks.size == 1 or self._assembler.settled >= self._wanted:
                return

    def _judge(self, record: Record) -> None:
        began = time.monotonic()
        try:
            self._assembler.add(self._admit(record))
        except (SchemaAway, StoreError) as error:
            if isinstance(error, StoreError) and not error.retriable:
                raise
            self._reader.park(record, error)
            # To find out that somebody is away may take a minute in which nobody listened.
            self._assembler.excuse(time.monotonic() - began)


def share_out(settled: Sequence[int], wanted: int) -> list[int]:
    """How many of its settled groups each rank brings, as even as possible, `wanted` at most in all."""
    quotas = [0] * len(settled)
    while sum(quotas) < min(wanted, sum(settled)):
        # The rank with the fewest so far that has more; the lower one first.
        rank = min((r for r, n in enumerate(settled) if quotas[r] < n), key=lambda r: quotas[r])
        quotas[rank] += 1
    return quotas


def _past(standings: Sequence[_Standing]) -> bool:
    """Was everything below the ends read, by whoever has the partition, and taken?"""
    first, *others = standings
    owed = first.owed.intersection(*(standing.owed for standing in others))
    return not owed and not any(standing.waiting for standing in standings)
