"""What an environment is: an async `reset` and `step`, in messages.

    async with the worker:   first = await env.reset(payload, seed)
                             while not outcome.done: outcome = await env.step(action)

One instance plays one episode at a time; the worker makes as many as it needs. Whatever it raises becomes a FAILED
trajectory with the cause, and the other episodes go on.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..schemas import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation."""

    role: Role
    content: str
    tool_calls: tuple[str, ...] = ()
    """Each a JSON object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What the policy did in its turn."""

    text: str
    """The decoded sampled tokens, special tokens left out, stripped."""
    tokens: NDArray[np.int32]
    """[k]: the sampled tokens themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the environment answers to a reset or a step."""

    messages: tuple[Message, ...] = ()
    """New messages since the last one; on reset the whole opening. May be empty when done."""
    done: bool = False
    truncated: bool = False
    """Ended by a limit of the environment rather than by the task itself."""
    step_reward: float | None = None
    reward: float = 0.0
    """Terminal reward; counts when done or truncated."""
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    """Named parts of the terminal reward."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


class Environment(Protocol):
    """A place where an agent acts over turns."""

    @property
    def name(self) -> str:
        """Names the topic, so [a-z0-9-]+."""
        ...

    @property
    def version(self) -> str: ...

    async def reset(self, payload: Mapping[str, str], seed: int) -> Outcome:
        """Begin an episode. The same payload and seed give the same episode. Raises on a payload it cannot use."""
        ...

    async def step(self, action: Action) -> Outcome: ...

    async def close(self) -> None:
        """Release what it holds. Called once, whatever happened before."""
        ...


EnvironmentFactory = Callable[[], Environment]
