"""A record between an episode and the log: what goes on the wire, and where its bytes are just now.

pack(trajectory)     its frame and its headers; those of its stub where it cannot be written
lift(kept)           one that a dead worker left on the disk
parcel.shrink        the stub in its place: the same sample, FAILED, without its columns, so that its group need
                     not wait for it
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..infra.topics import Names
from ..schemas import (
    Claim,
    InvalidRecord,
    Schemas,
    Status,
    Trajectory,
    WireError,
    decode_as,
    encode,
    trajectory_headers,
)
from ..schemas.headers import POLICY_HIGHEST, POLICY_LOWEST
from .spill import Kept, Spilled

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Parcel:
    """One record on its way: in memory, on the disk, or both. Holds on to no trajectory with columns."""

    topic: str
    key: bytes
    headers: dict[str, bytes]
    value: bytes | None
    """None while it is only on the disk."""
    size: int
    """Bytes of the value."""
    schemas: Schemas
    """How its frame is written."""
    outcome: str
    """What is counted once it is acknowledged."""
    bare: Trajectory | None = None
    """Which sample it is; told while the value itself is on the disk only, and never for one of a dead worker."""
    appended: Callable[[], None] | None = None
    """Called once it is under way, or on the disk."""
    number: int = 0
    """Its place in line."""
    kept: Kept | None = None
    sent: bool = False
    """The writer has it."""
    final: bool = False
    """It was made smaller: what is refused now is refused, and what lies on the disk is not this value."""

    @property
    def in_memory(self) -> bool:
        return self.value is not None

    def lay_down(self, kept: Kept) -> None:
        """Its bytes lie on the disk now, too; memory keeps which sample it is."""
        self.kept = kept
        if self.value is not None and not self.final:
            self.bare = self._identify(self.value)

    def let_go(self) -> None:
        """Out of memory, as it lies on the disk; but what was made smaller is not what lies there."""
        if self.kept is not None and not self.final:
            self.value = None

    def rest(self) -> None:
        """It needs nobody's place any more."""
        told, self.appended = self.appended, None
        if told is not None:
            told()

    def spilled(self, value: bytes) -> Spilled:
        """As it goes to the disk."""
        return Spilled(topic=self.topic, key=self.key, headers=self.headers, value=value)

    def fill(self, record: Spilled) -> bytes:
        """As it comes from the disk."""
        self.topic, self.key, self.headers, self.value = record.topic, record.key, dict(record.headers), record.value
        return record.value

    def claim(self, claim: Claim) -> None:
        """The reference in place of the body. Key and headers stay: what is stale is dropped without a look at it."""
        self._replace(encode(claim, schemas=self.schemas))

    def shrink(self, cause: str, detail: str) -> None:
        """The stub in its place. Raises `WireError` for a foreign value, which tells no sample."""
        bare = self.bare or self._identify(self.value or b"")
        self._replace(encode(_stub(bare, cause, detail), schemas=self.schemas))
        self.headers = {
            name: value for name, value in self.headers.items() if name not in (POLICY_LOWEST, POLICY_HIGHEST)
        }
        self.outcome = cause

    def _identify(self, value: bytes) -> Trajectory:
        return _bare(decode_as(Trajectory, value, schemas=self.schemas))

    def _replace(self, value: bytes) -> None:
        self.value, self.size, self.final = value, len(value), True


def pack(
    trajectory: Trajectory,
    names: Names,
    schemas: Schemas,
    traceparent: str | None,
    appended: Callable[[], None] | None,
) -> Parcel:
    """The record of an episode. Raises `LogError` for an environment that can have no topic."""
    topic, outcome = names.trajectories(trajectory.environment), trajectory.status.lower()
    try:
        value, headers = encode(trajectory, schemas=schemas), _headers(trajectory, traceparent)
    except WireError as error:
        outcome = "oversize" if error.reason == "too-large" else "unwritable"
        stub = _stub(_bare(trajectory), outcome, str(error))
        value, headers = encode(stub, schemas=schemas), _headers(stub, traceparent)
    return Parcel(
        topic=topic,
        key=trajectory.group_id.encode(),
        headers=headers,
        value=value,
        size=len(value),
        schemas=schemas,
        outcome=outcome,
        appended=appended,
    )


def lift(kept: Kept, schemas: Schemas) -> Parcel:
    """A record of a dead worker; nothing of it is read yet."""
    return Parcel(
        topic="", key=b"", headers={}, value=None, size=kept.room, schemas=schemas, outcome="recovered", kept=kept
    )


def _bare(trajectory: Trajectory) -> Trajectory:
    """Which sample it is, and nothing else."""
    return Trajectory(
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.group_id,
        group_size=trajectory.group_size,
        sample_index=trajectory.sample_index,
        environment=trajectory.environment,
        seed=trajectory.seed,
        started_ms=trajectory.started_ms,
        finished_ms=trajectory.finished_ms,
    )


def _stub(bare: Trajectory, cause: str, detail: str) -> Trajectory:
    logger.error("trajectory %s: %s: %s", bare.trajectory_id, cause, detail)
    return replace(bare, status=Status.FAILED, cause=cause, metadata={"error": detail[:1000]})


def _headers(trajectory: Trajectory, traceparent: str | None) -> dict[str, bytes]:
    """The record's headers; a broken trace must not cost a trajectory."""
    try:
        return trajectory_headers(trajectory, traceparent)
    except InvalidRecord as error:
        logger.warning("trajectory %s goes without its trace: %s", trajectory.trajectory_id, error)
        return trajectory_headers(trajectory)
