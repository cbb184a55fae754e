"""What the reader hands to the trainer: one arrival for each record of a trajectory topic, kept or dropped.

    record -> tombstone? -> headers -> staleness gate -> decode, a claim from the store -> sanity -> Arrival
                                            |                       |
                                         dropped                dead letter

Nothing falls to the floor: a record that cannot be used becomes an arrival with a reason, and its offset is settled
like every other. Where its headers or its key name its group it still takes its seat there: the group need not wait for
it, and one of poison alone is settled by the group timeout and frees its slot. A tombstone has no seat.
"""

from dataclasses import dataclass

from ..infra.claims import Claims, read_trajectory
from ..infra.deadletters import REPLAYED_FROM, DeadLetters
from ..infra.log import Position, Record
from ..schemas import Trajectory, TrajectoryHeaders, WireError, parse_headers
from ..schemas.registry import Schemas
from ..schemas.rules import NAME
from .batch import exclusion
from .hyperparameters import Objective
from .staleness import StalenessGate

LONGEST = NAME
"""Bytes of a key that is taken for a group id: the receipt that names the group must fit into its record."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrival:
    """One record of a trajectory topic after admission."""

    position: Position
    group_id: str
    """Empty where the record does not tell."""
    trajectory_id: str
    group_size: int
    """Samples in its group; 0 where the record does not tell."""
    trajectory: Trajectory | None
    """None when dropped at admission."""
    reason: str | None
    """Why it was dropped."""
    buried: bool = False
    """It is a dead letter now, and may come again once whatever is wrong with it is mended."""
    replayed: bool = False
    """It was a dead letter, and comes again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Turns records into arrivals; called by the trainer's thread."""

    gate: StalenessGate
    dead_letters: DeadLetters
    schemas: Schemas
    claims: Claims
    """Where the bodies lie that were too large for their topic."""
    objective: Objective = Objective.GRPO
    vocabulary: int | None = None
    """Number of tokens the model knows; a token outside is dead-lettered."""
    tokenizer: str = ""
    """Fingerprint that a trajectory must carry; "" accepts any."""
    max_bytes: int = 64 << 20
    """Largest value that is decoded."""

    def admit(self, record: Record) -> Arrival:
        """Never raises for what is in the record; raises `LogError` where the dead letter cannot be written.

        Raises `StoreError` where a claimed body cannot be had now, retriable if the store is away: the record is good.
        """
        if record.value is None:
            return _dropped(record, "tombstone")
        headers: TrajectoryHeaders | None = None
        try:
            headers = parse_headers(record.headers)
            reason = self.gate.judge(headers.lowest_version) if headers.lowest_version is not None else None
            if reason is not None:
                return _dropped(record, reason, headers)
            trajectory = self._decode(record.value)
        except WireError as error:
            self.dead_letters.send(record, reason=error.reason, error=str(error))
            return _dropped(record, error.reason, headers, buried=True)
        return self._judge(record, trajectory)

    def _decode(self, value: bytes) -> Trajectory:
        trajectory = read_trajectory(
            value, self.claims, schemas=self.schemas, max_bytes=self.max_bytes, vocabulary=self.vocabulary
        )
        if self.tokenizer and trajectory.tokenizer != self.tokenizer:
            raise WireError(
                f"trajectory {trajectory.trajectory_id} was tokenized by {trajectory.tokenizer!r}, the model here uses "
                f"{self.tokenizer!r}",
                reason="foreign-tokenizer",
            )
        return trajectory

    def _judge(self, record: Record, trajectory: Trajectory) -> Arrival:
        reason = exclusion(trajectory, self.objective) or self.gate.judge_trajectory(trajectory)
        return Arrival(
            position=record.position,
            group_id=trajectory.group_id,
            trajectory_id=trajectory.trajectory_id,
            group_size=trajectory.group_size,
            trajectory=trajectory if reason is None else None,
            reason=reason,
            replayed=REPLAYED_FROM in record.headers,
        )


def _dropped(record: Record, reason: str, headers: TrajectoryHeaders | None = None, *, buried: bool = False) -> Arrival:
    return Arrival(
        position=record.position,
        group_id=(headers and headers.group_id) or _keyed(record),
        trajectory_id=(headers and headers.trajectory_id) or "",
        group_size=(headers and headers.group_size) or 0,
        trajectory=None,
        reason=reason,
        buried=buried,
        replayed=REPLAYED_FROM in record.headers,
    )


def _keyed(record: Record) -> str:
    """The group id that its key tells; empty where it is none, and for a tombstone."""
    if record.value is None or record.key is None or len(record.key) > LONGEST:
        return ""
    try:
        return record.key.decode()
    except UnicodeDecodeError:
        return ""
