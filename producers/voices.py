"""Who answers an environment (an engine here, a scripted player in players.py), and what makes tokens of words."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from ..schemas import Sampling, Status
from .engine import Completion, Engine
from .environment import Message
from .transcript import Ended, Ending

_PLACEHOLDER = -9999.0
"""Engines write it, or less, where they have no log-probability."""


class Rendering(Protocol):
    """What an episode needs of a `Renderer`."""

    @property
    def fingerprint(self) -> str: ...

    def opening(self, messages: Sequence[Message]) -> Sequence[int]:
        """Tokens of the opening, up to where the agent's first turn begins."""
        ...

    def extend(self, sampled_ended: bool, messages: Sequence[Message]) -> Sequence[int]:
        """Tokens between a sampled turn and the next one; `sampled_ended`: its end-of-turn token was sampled."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        ...


class Writing(Rendering, Protocol):
    """What an episode of a scripted player needs of a `Renderer`."""

    def reply(self, text: str) -> Sequence[int]:
        """Tokens of an agent's turn with these words, its end-of-turn token included."""
        ...


class Voice(Protocol):
    """Answers the environment."""

    @property
    def model(self) -> str: ...

    @property
    def metadata(self) -> Mapping[str, str]:
        """Goes into the record."""
        ...

    @property
    def context(self) -> int:
        """Most tokens that an episode may have."""
        ...

    async def answer(self, history: Sequence[Message], prompt: Sequence[int], sampling: Sampling) -> Completion:
        """The next turn, of at most `sampling.max_tokens` tokens, given all words and all tokens so far."""
        ...


class EngineVoice:
    """An engine; what it samples is checked before it is believed."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def model(self) -> str:
        return self._engine.model

    @property
    def metadata(self) -> Mapping[str, str]:
        return {}

    @property
    def context(self) -> int:
        return self._engine.context

    async def answer(self, history: Sequence[Message], prompt: Sequence[int], sampling: Sampling) -> Completion:
        completion = await self._engine.generate(prompt, sampling)
        check_completion(completion, sampling.max_tokens)
        return completion


def check_completion(completion: Completion, most: int) -> None:
    """Raise `Ended` where a completion must not be written, so that the turns before it still can be."""
    if expected := _find_fault(completion, most):
        raise _refuse("bad-completion", expected, completion)
    logprobs = completion.logprobs
    # Every comparison with NaN is false.
    if logprobs.size and not (logprobs.min() > _PLACEHOLDER and logprobs.max() <= 0):
        raise _refuse("bad-logprobs", f"log-probabilities from above {_PLACEHOLDER:g} to 0", completion)


def _find_fault(completion: Completion, most: int) -> str:
    """What was expected where tokens, log-probabilities and spans do not go together; "" where they do."""
    tokens, spans = completion.tokens, completion.spans
    count = tokens.size
    if count > most or (count == 0 and completion.finish_reason != "abort"):
        return f"1 to {most} tokens"
    if completion.logprobs.size != count:
        return f"{count} log-probabilities"
    if sum(span.count for span in spans) != count or any(span.version < 1 for span in spans):
        return f"spans over {count} tokens, of versions >= 1"
    return "token ids >= 0" if count and tokens.min() < 0 else ""


def _refuse(cause: str, expected: str, completion: Completion) -> Ended:
    return Ended(Ending(status=Status.FAILED, cause=cause, detail=f"expected {expected}, found {completion}"))
