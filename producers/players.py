"""Scripted players: they answer an environment in words, without a model.

    play_scripted:   the same episode loop as with an engine; the player's words are tokenized once and stand as sampled
                     turns without log-probabilities and without policy versions: they can be cloned, not reinforced

For a warm start, a baseline, or an opponent that is not trained.
"""

import inspect
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..schemas import Sampling, Task, Trajectory
from .engine import Completion
from .environment import Environment, Message
from .episode import play_episode
from .limits import Abort, Gates, Limits
from .voices import Writing

_NO_CONTEXT = (1 << 31) - 1


class Player(Protocol):
    """Plays one episode."""

    @property
    def name(self) -> str:
        """Goes into the record's metadata as `player`."""
        ...

    def act(self, history: Sequence[Message]) -> str | Awaitable[str]:
        """What to say next, given all messages so far; the environment spoke last."""
        ...


PlayerFactory = Callable[[random.Random], Player]
"""Makes a player for one episode; all its chance must come from the generator it is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One kind of player in a mixture."""

    weight: float
    make: PlayerFactory


class Mixture:
    """Players of several kinds, drawn by weight: the same seed, task and sample give the same player, and play."""

    def __init__(self, parts: Sequence[Part], seed: int = 0) -> None:
        """Raises `ValueError` unless there is a positive weight and no negative one."""
        weights = [part.weight for part in parts]
        if not parts or min(weights) < 0 or sum(weights) <= 0:
            raise ValueError(f"expected weights >= 0 with one above 0, found {weights}")
        self._parts = tuple(parts)
        self._weights = weights
        self._seed = seed

    def draw(self, task: Task, sample_index: int) -> Player:
        """The player of one sample of one task."""
        # Text is hashed the same way in every process, unlike `hash`.
        generator = random.Random(f"{self._seed}/{task.task_id}/{sample_index}/{task.attempt}")
        (part,) = generator.choices(self._parts, self._weights)
        return part.make(generator)


async def play_scripted(
    task: Task,
    sample_index: int,
    environment: Environment,
    player: Player,
    renderer: Writing,
    limits: Limits | None = None,
    *,
    gates: Gates | None = None,
    abort: Abort | None = None,
) -> Trajectory:
    """As `run_episode`, with a player in the engine's place. Words beyond the task's `sampling.max_tokens` are cut."""
    return await play_episode(
        task,
        sample_index,
        environment,
        _PlayerVoice(player, renderer),
        renderer,
        limits or Limits(),
        gates=gates,
        abort=abort,
    )


class _PlayerVoice:
    """A player as the one who answers."""

    model = ""
    context = _NO_CONTEXT

    def __init__(self, player: Player, renderer: Writing) -> None:
        self.metadata = {"player": player.name}
        self._player = player
        self._renderer = renderer

    async def answer(self, history: Sequence[Message], prompt: Sequence[int], sampling: Sampling) -> Completion:
        said = self._player.act(history)
        words = await said if inspect.isawaitable(said) else said
        ids = self._renderer.reply(words)
        return Completion(
            tokens=np.asarray(ids[: sampling.max_tokens], np.int32),
            logprobs=np.empty(0, np.float32),
            spans=(),
            finish_reason="stop" if len(ids) <= sampling.max_tokens else "length",
        )
