"""Evaluating a policy: the mean of what was played, and an end with an engine that is lost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from rollstream.producers import Limits, evaluate_policy
from rollstream.producers.engine import Completion, EngineError, EngineLost
from rollstream.producers.environment import Action, Message, Outcome
from rollstream.schemas import PolicySpan, Role, Sampling

SAYS = (Message(role=Role.USER, content="well?"),)


class Letters:
    """A renderer: one token for whatever is said."""

    fingerprint = "letters"

    def opening(self, messages: Sequence[Message]) -> list[int]:
        return [1]

    def extend(self, sampled_ended: bool, messages: Sequence[Message]) -> list[int]:
        return [2]

    def decode(self, ids: Sequence[int]) -> str:
        return "x" * len(ids)


@dataclass
class Failing:
    """An engine that answers so many requests and fails the next: that one, or every one after it if it is lost."""

    answers: int
    failure: EngineError = field(default_factory=lambda: EngineError("no request too many"))
    closed: bool = False
    model: str = "failing"
    version: int = 1
    context: int = 8

    async def generate(self, prompt: Sequence[int] | NDArray[np.int32], sampling: Sampling) -> Completion:
        self.answers -= 1
        if self.answers == -1 or (self.answers < 0 and isinstance(self.failure, EngineLost)):
            raise self.failure
        return Completion(
            tokens=np.array([3], np.int32),
            logprobs=np.array([-0.5], np.float32),
            spans=(PolicySpan(version=1, count=1),),
            finish_reason="stop",
        )

    async def load(self, weights: Path, version: int) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        self.closed = True


class Seeded:
    """One turn; its reward is the seed."""

    name, version = "seeded", "1"

    async def reset(self, payload: Mapping[str, str], seed: int) -> Outcome:
        self.seed = seed
        return Outcome(messages=SAYS)

    async def step(self, action: Action) -> Outcome:
        return Outcome(messages=SAYS, done=True, reward=float(self.seed))

    async def close(self) -> None:
        """Nothing to release."""


async def evaluate(engine: Failing, *, concurrency: int = 1) -> dict[str, float]:
    return await evaluate_policy(
        lambda: engine,
        Letters(),
        {"seeded": Seeded},
        sampling=Sampling(max_tokens=4),
        max_turns={},
        limits=Limits(),
        seeds=(2, 4, 9),
        concurrency=concurrency,
    )


async def test_the_mean_of_every_seed() -> None:
    engine = Failing(3)
    assert await evaluate(engine) == {"seeded": 5.0}
    assert engine.closed


async def test_one_failed_episode_counts_as_nothing() -> None:
    assert await evaluate(Failing(1, EngineError("this request"))) == {"seeded": 11 / 3}


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_an_engine_that_is_lost_gives_no_score(concurrency: int) -> None:
    engine = Failing(1, EngineLost("for good"))
    with pytest.raises(EngineLost, match="for good"):
        await evaluate(engine, concurrency=concurrency)
    assert engine.closed
