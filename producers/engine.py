"""What an engine is: token ids in; token ids, log-probabilities and policy versions out.

Engines batch whatever is asked of them at the same time. New weights: pause, load, drop every cached prefix, stamp the
version, go on with the requests under way; their later tokens carry the new version (a second span).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..schemas import PolicySpan, RollstreamError, Sampling


class EngineError(RollstreamError):
    """An engine could not do what was asked: a request that makes no sense, weights that do not fit, a failed model."""


class EngineLost(EngineError):
    """The engine is gone for good: it failed beyond repair, or was closed. Whoever uses it must end."""


class PromptTooLong(EngineError):
    """The prompt leaves no room for a single sampled token."""

    def __init__(self, *, prompt: int, context: int) -> None:
        super().__init__(
            f"the prompt has {prompt} tokens; the engine's context of {context} must hold it and at least one more: "
            "end the episode earlier, or open the engine with a longer context"
        )
        self.prompt, self.context = prompt, context


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """What an engine sampled for one prompt."""

    tokens: NDArray[np.int32]
    """[k], k >= 1 unless aborted; the end-of-turn token is one of them when it was sampled."""
    logprobs: NDArray[np.float32]
    """[k]: log p of each token under the distribution it was drawn from (after temperature, top-p, top-k).

    For temperature 0 the log-probability at temperature 1."""
    spans: tuple[PolicySpan, ...]
    """Versions over the k tokens."""
    finish_reason: str
    """"stop" (an end-of-turn token was sampled), "length" (`max_tokens` or the context ended it) or "abort"."""


class Engine(Protocol):
    """Generates tokens with one set of weights, for many callers at once (one event loop)."""

    @property
    def version(self) -> int:
        """Policy version of the weights that the next token will be sampled with."""
        ...

    @property
    def model(self) -> str:
        """Name of the model, for the records."""
        ...

    @property
    def context(self) -> int:
        """Most tokens (prompt and completion together) that one request may have."""
        ...

    async def generate(self, prompt: Sequence[int] | NDArray[np.int32], sampling: Sampling) -> Completion:
        """Sample one completion. Cancelling the call frees its place in the batch.

        Raises `PromptTooLong` where the prompt does not fit, `EngineError` where the request makes no sense or the
        engine failed, `EngineLost` where it will never answer again.
        """
        ...

    async def load(self, weights: Path, version: int) -> None:
        """Serve the weights in this directory (safetensors) from the next token on, under this version.

        Raises `EngineError` and goes on with the old weights and version where they do not fit the model, `EngineLost`
        where it cannot go on with either.
        """
        ...

    async def close(self) -> None: ...
