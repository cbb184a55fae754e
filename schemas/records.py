"""What crosses the log, as typed values. One record type a topic kind:

    Task           dispatcher -> workers                   rollstream.tasks
    Trajectory     workers -> every consumer group         rollstream.trajectories.<environment>
    PolicyUpdate   trainer -> workers                      rollstream.policy
    Receipt        trainer -> dispatcher, audit            rollstream.ledger
    Control        whoever runs the workers -> all of them rollstream.control
    Claim          in place of a record over its topic's limit, on that topic

Values are checked when they are encoded and again when they are decoded (validate.py). Hot columns are numpy arrays,
little-endian, contiguous and read-only views of the body's bytes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
Floats = NDArray[np.float32]
Offsets = NDArray[np.int64]
Mask = NDArray[np.bool_]


class Status(StrEnum):
    """How an episode ended. A failed rollout is data, not an exception."""

    COMPLETED = "COMPLETED"
    TRUNCATED = "TRUNCATED"
    """A limit on turns, tokens or time ended it."""
    ABORTED = "ABORTED"
    """Cancelled from outside."""
    FAILED = "FAILED"
    """The environment, the engine or a judge failed; `cause` says how."""


class Role(StrEnum):
    """Who speaks in a turn."""

    SYSTEM = "SYSTEM"
    USER = "USER"
    ASSISTANT = "ASSISTANT"
    TOOL = "TOOL"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpan:
    """`count` consecutive sampled tokens that one policy version produced."""

    version: int
    """>= 1."""
    count: int
    """>= 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A stretch of the token column with one speaker."""

    role: Role
    tokens: int
    """Number of tokens of this turn in `Trajectory.tokens`."""
    sampled: bool
    """The policy sampled them; only these have log-probabilities and policy spans."""
    masked: bool = False
    """Left out of the loss although sampled."""
    reward: float | None = None
    """Reward of the step that followed this turn, if the environment gave one."""
    text: str | None = None
    """For people; nothing is ever re-tokenized from it."""
    tool_calls: tuple[str, ...] = ()
    """Each a JSON object."""
    finish_reason: str | None = None
    """Why sampling stopped: "stop", "length" or "abort"."""
    started_ms: int = 0
    finished_ms: int = 0
    """Wall clock, milliseconds since the epoch."""


def _empty_tokens() -> Tokens:
    return np.empty(0, np.int32)


def _empty_floats() -> Floats:
    return np.empty(0, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """One episode of one agent, token-exact.

    `logprobs` and `spans` cover the sampled tokens only, in order. Both are empty where no policy of a run sampled (a
    scripted player, a person): such a trajectory can be cloned, not reinforced.
    """

    trajectory_id: str
    """Deterministic from task, sample index and attempt (`trajectory_id()`), so that a re-run is recognised."""
    group_id: str
    """The samples of one task that are compared with each other; also the record's key."""
    group_size: int
    sample_index: int
    """0 <= sample_index < group_size."""
    environment: str
    environment_version: str = ""
    seed: int = 0
    model: str = ""
    """Name of the model that sampled."""
    tokenizer: str = ""
    """Fingerprint of the tokenizer."""
    temperature: float = 1.0
    tokens: Tokens = field(default_factory=_empty_tokens)
    """[n] int32: all turns in order."""
    logprobs: Floats = field(default_factory=_empty_floats)
    """[sampled] float32: log p of each sampled token, as its sampler computed it after temperature; [0] if unknown."""
    spans: tuple[PolicySpan, ...] = ()
    """Policy versions over the sampled tokens; counts sum to [sampled], or () if unknown."""
    turns: tuple[Turn, ...] = ()
    reward: float = 0.0
    """Terminal reward of the episode."""
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    """Named parts of it."""
    status: Status = Status.COMPLETED
    cause: str | None = None
    """Why it FAILED, was ABORTED or TRUNCATED."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    started_ms: int = 0
    finished_ms: int = 0
    """Wall clock, milliseconds since the epoch."""

    def sampled_mask(self) -> Mask:
        """[n] bool: the tokens that were sampled."""
        return _mask(self, lambda turn: turn.sampled)

    def trainable_mask(self) -> Mask:
        """[n] bool: sampled and not loss-masked."""
        return _mask(self, lambda turn: turn.sampled and not turn.masked)

    def versions(self) -> Offsets:
        """[sampled] int64: the policy version of each sampled token; [0] if unknown."""
        if not self.spans:
            return np.empty(0, np.int64)
        return np.repeat([s.version for s in self.spans], [s.count for s in self.spans]).astype(np.int64)

    def version_range(self) -> tuple[int, int] | None:
        """Lowest and highest policy version among the trainable tokens; None if there are none or they are unknown."""
        if not self.spans:
            return None
        if not any(turn.masked and turn.sampled for turn in self.turns):
            versions = [span.version for span in self.spans]
            return min(versions), max(versions)
        trainable = self.trainable_mask()[self.sampled_mask()]
        left = self.versions()[trainable]
        return (int(left.min()), int(left.max())) if left.size else None


def _mask(trajectory: Trajectory, chosen: Callable[[Turn], bool]) -> Mask:
    turns = trajectory.turns
    return np.repeat(
        np.fromiter((chosen(t) for t in turns), np.bool_, len(turns)),
        np.fromiter((t.tokens for t in turns), np.int64, len(turns)),
    )


def trajectory_id(task_id: str, sample_index: int, attempt: int = 0) -> str:
    """The id of one sample of one task: equal for a re-run of the same attempt."""
    return f"{task_id}/{sample_index}/{attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How an engine samples one turn."""

    temperature: float = 1.0
    """0 is greedy."""
    max_tokens: int = 256
    """At most so many sampled tokens a turn."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A request for a group of rollouts."""

    task_id: str
    """Also the group id of its trajectories and the record's key."""
    environment: str
    seed: int
    """Every sample of the group starts from this seed."""
    group_size: int
    sampling: Sampling = field(default_factory=Sampling)
    max_turns: int = 0
    """Sampled turns at most; 0 leaves it to the environment."""
    attempt: int = 0
    """Higher when a task is dispatched again on purpose; part of the trajectory ids."""
    payload: Mapping[str, str] = field(default_factory=dict[str, str])
    """For the environment: whatever its `reset` takes."""
    created_ms: int = 0
    traceparent: str | None = None
    """W3C Trace Context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyUpdate:
    """A policy that was published: points at its manifest in the object store."""

    run: str
    version: int
    incarnation: str
    step: int
    manifest: str
    """Object key of the manifest."""
    digest: str
    """SHA-256 (hex) of the manifest's bytes."""
    published_ms: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Consumed:
    """What one step used of one partition: ascending, disjoint offsets."""

    topic: str
    partition: int
    trained: Offsets
    """[k] int64."""
    dropped: Mapping[str, Offsets] = field(default_factory=dict[str, Offsets])
    """Reason -> [k] int64."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Receipt:
    """What one step consumed. It counts for a checkpoint only if (incarnation, version) lies on that lineage."""

    run: str
    incarnation: str
    step: int
    version: int
    """The policy version that the step produced."""
    parent: int
    """The policy version that it was computed from; 0 for the first of a run."""
    parent_incarnation: str = ""
    """The incarnation that produced the parent, so that a fenced trainer's stray receipt is told apart."""
    consumed: tuple[Consumed, ...] = ()
    groups: tuple[str, ...] = ()
    """Ids of the groups that were settled (trained, dropped, or partly each): their slots are free now."""
    loss: float = 0.0
    """Of the step's first pass over the whole batch; 0 where no sample trained."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    written_ms: int = 0


class Command(StrEnum):
    """What a Control record asks of the workers."""

    CANCEL = "CANCEL"
    """End the episodes of one group; they are recorded as ABORTED."""
    PAUSE = "PAUSE"
    """Take no new tasks; go on with what is under way."""
    RESUME = "RESUME"


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """An order to every worker."""

    command: Command
    target: str = ""
    """Group id for CANCEL; an environment, or "" for all, for PAUSE and RESUME."""
    reason: str = ""
    issued_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Stands for a record too large for its topic: the object in the store that holds that record's frame."""

    size: int
    """Bytes of the frame."""
    sha256: str
    """Of the frame, hex: its name in the store, and its proof."""


WireRecord = Task | Trajectory | PolicyUpdate | Receipt | Control | Claim
"""Whatever crosses the log."""
