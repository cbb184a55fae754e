"""What an engine's thread and the model in it say to each other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ...schemas import Sampling
from ..engine import EngineError, PromptTooLong

if TYPE_CHECKING:
    from torch import Tensor

LEAST_TEMPERATURE = 0.01
"""Below it logits overflow, and vLLM would sample at another temperature than it is told."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """One prompt, as a backend gets it: everything in it makes sense."""

    key: int
    prompt: NDArray[np.int32]
    """[n], 1 <= n < context, every id within the vocabulary."""
    sampling: Sampling
    """`max_tokens` fits into the context."""

    @classmethod
    def checked(
        cls, key: int, prompt: Sequence[int] | NDArray[np.int32], sampling: Sampling, backend: "Backend"
    ) -> "Request":
        """Raises `PromptTooLong`, or `EngineError` naming what makes no sense."""
        vocabulary = backend.vocabulary
        try:
            ids = np.ascontiguousarray(prompt, np.int32)
        except (OverflowError, TypeError, ValueError) as error:
            raise EngineError(f"token ids (int32) expected: {error}") from error
        if ids.ndim != 1 or not ids.size:
            raise EngineError(f"a prompt of at least one token expected, an array of shape {ids.shape} given")
        if ids.size >= backend.context:
            raise PromptTooLong(prompt=ids.size, context=backend.context)
        if ids.min() < 0 or ids.max() >= vocabulary:
            raise EngineError(
                f"token ids from 0 to {vocabulary - 1} expected, {ids.min()} to {ids.max()} given; "
                "is the tokenizer the model's?"
            )
        if not (sampling.temperature == 0 or LEAST_TEMPERATURE <= sampling.temperature < inf):
            raise EngineError(f"temperature 0 (greedy) or >= {LEAST_TEMPERATURE} expected, {sampling} given")
        if not 0 < sampling.top_p <= 1:
            raise EngineError(f"0 < top_p <= 1 expected, {sampling} given")
        if sampling.top_k < 0 or sampling.max_tokens < 1:
            raise EngineError(f"top_k >= 0 and max_tokens >= 1 expected, {sampling} given")
        limit = min(sampling.max_tokens, backend.context - ids.size)
        return cls(key=key, prompt=ids, sampling=replace(sampling, max_tokens=limit))


class Delta(NamedTuple):
    """What one step sampled for one request."""

    key: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str | None
    """"stop" or "length" with the last token, None before."""


class Backend(Protocol):
    """A model and its batch. Only the engine's thread calls it, but for `read` and the properties."""

    @property
    def context(self) -> int: ...

    @property
    def vocabulary(self) -> int:
        """Number of token ids that a prompt may hold."""
        ...

    def add(self, request: Request) -> None: ...

    def abort(self, key: int) -> None:
        """Forget a request; one that is unknown or finished is fine."""
        ...

    def step(self) -> list[Delta]:
        """Sample the next token of every request that has a place in the batch."""
        ...

    def read(self, directory: Path) -> "Mapping[str, Tensor]":
        """Read and check new weights, from any thread. Raises `WeightsError`."""
        ...

    def swap(self, weights: "Mapping[str, Tensor]") -> None:
        """Serve these weights, which `read` returned, and forget what was computed with the old ones.

        Requests under way go on: what their tokens need is computed anew.
        """
        ...

    def close(self) -> None: ...
