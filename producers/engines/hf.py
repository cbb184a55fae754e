"""The `transformers` engine: continuous batching over a plain Hugging Face model, for small machines.

A step is one forward pass (or a few, so that short rows are not padded to long ones) that gives every request its next
token. Requests join between steps; a prompt is computed from where the cache of its conversation ends.
"""

from collections import OrderedDict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...infra.models import end_ids as declared_ends
from ...infra.models import open_model
from ...infra.weights import copy_weights, read_model_weights
from ..engine import EngineError
from .backend import Delta, Request
from .cache import RowCache, RowPool
from .sampling import draw_tokens
from .threaded import ThreadedEngine

WASTE = 512
"""Padding tokens that cost about as much as one more forward pass of a small model."""
PASS_TOKENS = 8192
"""Tokens of one forward pass at most (one long prompt may have more): bounds its memory."""


class TransformersEngine(ThreadedEngine):
    """An `Engine` over `transformers`: correct on any machine, fast for small models."""

    def __init__(
        self,
        model_directory: Path,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        max_batch: int = 64,
        context: int | None = None,
        end_ids: Sequence[int] | None = None,
        name: str | None = None,
        seed: int = 0,
        version: int = 0,
    ) -> None:
        """Open a model directory.

        `max_batch`: requests sampled at a time; as many idle conversations are remembered. `context`: the model's own
        unless given. `end_ids`: tokens that end a turn, by default what the directory declares. `name`: for the
        records, by default the directory's. Raises `EngineError` for a model that does not attend to everything before
        a token, `MissingExtra`.
        """

        def opened() -> _Backend:
            model: Any = open_model(model_directory, dtype=dtype, device=device)
            ends = declared_ends(model_directory) if end_ids is None else end_ids
            length = _fitting_context(model.config, context)
            return _Backend(model, max_batch=max_batch, context=length, ends=frozenset(ends), seed=seed)

        super().__init__(opened, model=name or model_directory.name, version=version)


@dataclass(slots=True, kw_only=True, eq=False)
class _Row:
    """A request in the batch."""

    request: Request
    row: int
    """Of the cache."""
    tokens: list[int]
    """Prompt and sampled tokens."""
    filled: int
    """How many of them the cache holds."""

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.filled


class _Backend:
    def __init__(self, model: Any, *, max_batch: int, context: int, ends: frozenset[int], seed: int) -> None:
        self._model, self._ends, self._max_batch = model, ends, max_batch
        self._device: torch.device = model.device
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self._pool = RowPool(2 * max_batch)
        self._cache = RowCache(rows=2 * max_batch, context=context, layers=model.config.num_hidden_layers)
        self._past = self._cache.as_transformers()
        self._waiting = OrderedDict[int, Request]()
        self._rows: dict[int, _Row] = {}
        self.context = context
        self.vocabulary: int = model.config.vocab_size

    def add(self, request: Request) -> None:
        self._waiting[request.key] = request

    def abort(self, key: int) -> None:
        self._waiting.pop(key, None)
        if key in self._rows:
            self._leave(self._rows[key])

    @torch.inference_mode()
    def step(self) -> list[Delta]:
        while self._waiting and len(self._rows) < self._max_batch:
            self._enter(self._waiting.popitem(last=False)[1])
        deltas: list[Delta] = []
        for rows in _passes(list(self._rows.values())):
            samplings = [row.request.sampling for row in rows]
            tokens, logprobs = draw_tokens(self._forward(rows), samplings, self._generator)
            deltas += [self._advance(*drawn) for drawn in zip(rows, tokens, logprobs, strict=True)]
        return deltas

    def read(self, directory: Path) -> Mapping[str, Tensor]:
        return read_model_weights(self._model, directory)

    def swap(self, weights: Mapping[str, Tensor]) -> None:
        copy_weights(self._model, weights)
        self._pool.forget()
        self._cache.forget()
        for row in self._rows.values():
            row.filled = 0

    def close(self) -> None:
        self._cache.forget()
        del self._model

    def _enter(self, request: Request) -> None:
        row, filled = self._pool.claim(request.prompt.tobytes())
        self._rows[request.key] = _Row(request=request, row=row, tokens=request.prompt.tolist(), filled=filled)

    def _leave(self, row: _Row) -> None:
        del self._rows[row.request.key]
        self._pool.release(row.row, np.array(row.tokens[: row.filled], np.int32).tobytes())

    def _forward(self, rows: Sequence[_Row]) -> Tensor:
        """[b, vocabulary]: logits after the last token of each row; the cache then holds all its tokens.

        New tokens are padded on the left, so the last column is everybody's last token.
        """
        width = max(row.pending for row in rows)
        ids, positions = np.zeros((2, len(rows), width), np.int64)
        real = np.zeros((len(rows), width), np.bool_)
        for index, row in enumerate(rows):
            start = width - row.pending
            ids[index, start:] = row.tokens[row.filled :]
            positions[index, start:] = np.arange(row.filled, len(row.tokens))
            real[index, start:] = True
        where = self._tensor(positions)
        self._cache.place(self._tensor([row.row for row in rows]), where, self._tensor(real))
        seen = torch.arange(self._cache.length, device=self._device) <= where.unsqueeze(-1)
        output = self._model(
            input_ids=self._tensor(ids),
            position_ids=where,
            attention_mask=seen.unsqueeze(1),
            past_key_values=self._past,
            use_cache=True,
            logits_to_keep=1,
        )
        # Only now: of a pass that fails nothing may be taken up later.
        for row in rows:
            row.filled = len(row.tokens)
        logits: Tensor = output.logits
        return logits[:, -1]

    def _advance(self, row: _Row, token: int, logprob: float) -> Delta:
        row.tokens.append(token)
        sampled = len(row.tokens) - row.request.prompt.size
        reason = "stop" if token in self._ends else "length" if sampled == row.request.sampling.max_tokens else None
        if reason is not None:
            self._leave(row)
        return Delta(row.request.key, (token,), (logprob,), reason)

    def _tensor(self, values: Any) -> Tensor:
        return torch.as_tensor(values, device=self._device)


def _passes(rows: list[_Row]) -> Generator[list[_Row]]:
    """Split a batch into forward passes: rows of like width together, where padding would cost more than a pass."""
    rows.sort(key=lambda row: row.pending, reverse=True)
    batch: list[_Row] = []
    waste = 0
    for row in rows:
        width = batch[0].pending if batch else row.pending
        waste += width - row.pending
        if batch and (waste > WASTE or width * (len(batch) + 1) > PASS_TOKENS):
            yield batch
            batch, waste = [], 0
        batch.append(row)
    if batch:
        yield batch


def _fitting_context(config: Any, context: int | None) -> int:
    longest: int = config.max_position_embeddings
    length = longest if context is None else context
    if length > longest:
        raise EngineError(f"context: at most the model's {longest} expected, {context} given")
    kinds: set[str] = set(getattr(config, "layer_types", None) or ["full_attention"])
    window: int | None = getattr(config, "sliding_window", None)
    if kinds != {"full_attention"} or (window is not None and window < length):
        raise EngineError(
            f"a model with full attention in every layer expected, {', '.join(sorted(kinds))} with a window of "
            f"{window} found; give a context within the window, or use the vllm engine"
        )
    return length
