"""An episode as it is written down, turn by turn, until it is a `Trajectory`.

Tokens are only ever appended, so those before one sampled turn are a prefix of those before the next, and whatever ends
an episode leaves a record of all that was done before.

    hear(messages, ids)       what the environment said: all tokens of a batch of messages belong to its last one
    speak(completion, text)   what was sampled
    note(messages)            what was said but not tokenized (the end of the story): turns of 0 tokens, for people
    finish(ending)            the record
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..schemas import Floats, PolicySpan, Role, Status, Task, Trajectory, Turn, trajectory_id
from .engine import Completion
from .environment import Message

_DETAIL = 2000
"""Most characters of a cause in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an episode ended."""

    status: Status
    cause: str | None = None
    """A short name that can be counted: "context", "turns", "step-timeout", ..."""
    detail: str = ""
    """The cause in words; kept in the record's metadata as `error`."""
    reward: float = 0.0
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])


class Ended(Exception):
    """Ends an episode from within a stage."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.cause)
        self.ending = ending


class Transcript:
    """The record of an episode under way."""

    def __init__(self, task: Task, sample_index: int, *, model: str, tokenizer: str) -> None:
        self._task = task
        self._sample_index = sample_index
        self._model = model
        self._tokenizer = tokenizer
        self._turns: list[Turn] = []
        self._logprobs: list[Floats] = [np.empty(0, np.float32)]
        self._spans: list[PolicySpan] = []
        self._seconds: dict[str, float] = {}
        self._started = clock_ms()
        self.name = trajectory_id(task.task_id, sample_index, task.attempt)
        self.tokens: list[int] = []
        """All so far; appended to, never rewritten."""
        self.sampled_turns = 0
        self.environment_version = ""
        self.metrics: dict[str, float] = {}
        """The environment's."""
        self.metadata: dict[str, str] = {}

    def hear(self, messages: Sequence[Message], ids: Sequence[int], started_ms: int) -> None:
        """The environment's words since `started_ms`, and the tokens that they became."""
        self.tokens.extend(ids)
        self.note(messages[:-1], started_ms)
        if messages:
            self._note(messages[-1], len(ids), started_ms)
        elif ids:
            self._turns.append(
                Turn(role=Role.USER, tokens=len(ids), sampled=False, started_ms=started_ms, finished_ms=clock_ms())
            )

    def note(self, messages: Sequence[Message], started_ms: int) -> None:
        """The environment's words, without tokens."""
        for message in messages:
            self._note(message, 0, started_ms)

    def speak(self, completion: Completion, text: str, started_ms: int) -> None:
        """A sampled turn; its completion was found sound."""
        tokens: list[int] = completion.tokens.tolist()
        self.tokens.extend(tokens)
        self.sampled_turns += 1
        self._logprobs.append(np.asarray(completion.logprobs, np.float32))
        for span in completion.spans:
            self._add_span(span)
        self._turns.append(
            Turn(
                role=Role.ASSISTANT,
                tokens=len(tokens),
                sampled=True,
                text=clean_text(text),
                finish_reason=completion.finish_reason,
                started_ms=started_ms,
                finished_ms=clock_ms(),
            )
        )

    def pay(self, reward: float) -> None:
        """What the environment paid for the turn just sampled."""
        if not self._turns:
            raise ValueError(f"expected no step_reward from a reset, found {reward}")
        self._turns[-1] = replace(self._turns[-1], reward=reward)

    def spend(self, stage: str, seconds: float) -> None:
        """Time that a stage took, or that was waited for it ("queue")."""
        self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds

    def finish(self, ending: Ending) -> Trajectory:
        """The record."""
        task = self._task
        seconds = {f"{stage}_seconds": spent for stage, spent in self._seconds.items()}
        metadata = {**self.metadata, "error": clean_text(ending.detail[:_DETAIL])} if ending.detail else self.metadata
        return Trajectory(
            trajectory_id=self.name,
            group_id=task.task_id,
            group_size=task.group_size,
            sample_index=self._sample_index,
            environment=task.environment,
            environment_version=clean_text(self.environment_version),
            seed=task.seed,
            model=self._model,
            tokenizer=self._tokenizer,
            temperature=task.sampling.temperature,
            tokens=np.asarray(self.tokens, np.int32),
            logprobs=np.concatenate(self._logprobs),
            spans=tuple(self._spans),
            turns=tuple(self._turns),
            reward=ending.reward,
            rewards=ending.rewards,
            status=ending.status,
            cause=ending.cause,
            metrics={**self.metrics, **seconds, "turns": float(self.sampled_turns)},
            metadata=metadata,
            started_ms=self._started,
            finished_ms=clock_ms(),
        )

    def _note(self, message: Message, tokens: int, started_ms: int) -> None:
        self._turns.append(
            Turn(
                role=Role(message.role),
                tokens=tokens,
                sampled=False,
                text=clean_text(message.content),
                tool_calls=tuple(clean_text(call) for call in message.tool_calls),
                started_ms=started_ms,
                finished_ms=clock_ms(),
            )
        )

    def _add_span(self, span: PolicySpan) -> None:
        """Append a span, or lengthen the last one where its version is the same."""
        version, count = int(span.version), int(span.count)
        if self._spans and self._spans[-1].version == version:
            count += self._spans.pop().count
        self._spans.append(PolicySpan(version=version, count=count))


def clock_ms() -> int:
    """Wall clock, milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


def clean_text(text: str) -> str:
    """The text as UTF-8 can carry it: lone surrogates are written as escapes."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")
