"""An engine whose model belongs to one thread: what `TransformersEngine` and `VllmEngine` have in common.

    event loop                                              thread "engine"
    generate, generate, ... --all of one loop turn--> inbox --> add --> [ step: one token for every request ] --+
       ^                                                         ^              |                              |
       |                                                         +--------------+---- not finished <-----------+
       +--------------------- one callback a step <------------------------------------ finished <-------------+

    load: files are read and checked (any thread) --> inbox --> swap between two steps, caches dropped, new version

Every token is stamped with the version whose weights computed it, so a completion under way during a load has two spans.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ...infra.weights import WeightsError
from ...schemas.records import PolicySpan, Sampling
from ..engine import Completion, EngineError, PromptTooLong

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """One prompt, as a backend gets it: everything in it makes sense."""

    key: int
    prompt: NDArray[np.int32]
    """[n], 1 <= n < context, every id within the vocabulary."""
    sampling: Sampling
    """`max_tokens` fits into the context."""


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


@dataclass(slots=True, kw_only=True, eq=False)
class _Live:
    """A request under way and what was sampled for it."""

    request: Request
    future: asyncio.Future[Completion]
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    spans: list[PolicySpan] = field(default_factory=list[PolicySpan])

    def extend(self, delta: Delta, version: int) -> None:
        self.tokens.extend(delta.tokens)
        self.logprobs.extend(delta.logprobs)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1] = replace(self.spans[-1], count=self.spans[-1].count + len(delta.tokens))
        elif delta.tokens:
            self.spans.append(PolicySpan(version=version, count=len(delta.tokens)))


class _Outcome(NamedTuple):
    future: asyncio.Future[Completion]
    result: Completion | EngineError


class ThreadedEngine:
    """An `Engine` over a `Backend` in a thread of its own."""

    def __init__(self, open_backend: Callable[[], Backend], *, model: str, version: int) -> None:
        """Open the backend, in its thread, and wait for it: seconds for a large model. Raises what opening raises."""
        self._model, self._version = model, version
        self._inbox = SimpleQueue[Callable[[], None] | None]()
        self._outbox: list[Callable[[], None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._live: dict[int, _Live] = {}
        self._keys = count()
        self._closed: str | None = None
        opened = Future[Backend]()
        # A daemon: whoever forgets to close the engine still gets his process ended.
        self._thread = threading.Thread(target=self._run, args=(open_backend, opened), name="engine", daemon=True)
        self._thread.start()
        self._backend = opened.result()

    @property
    def version(self) -> int:
        """Policy version of the weights that the next token will be sampled with."""
        return self._version

    @property
    def model(self) -> str:
        """Name of the model, for the records."""
        return self._model

    @property
    def context(self) -> int:
        """Most tokens (prompt and completion together) that one request may have."""
        return self._backend.context

    async def generate(self, prompt: Sequence[int] | NDArray[np.int32], sampling: Sampling) -> Completion:
        """Sample one completion. Cancelling the call frees its place in the batch.

        Raises `PromptTooLong` where the prompt does not fit, `EngineError` where the request makes no sense or the
        engine failed.
        """
        request = self._checked(prompt, sampling)
        live = _Live(request=request, future=asyncio.get_running_loop().create_future())
        self._send(partial(self._add, live))
        try:
            return await live.future
        except asyncio.CancelledError:
            self._send(partial(self._abort, request.key))
            raise

    async def load(self, weights: Path, version: int) -> None:
        """Serve the weights in this directory (safetensors) from the next token on, under this version.

        Raises `EngineError` and goes on with the old weights and version where they do not fit the model.
        """
        self._check_open()
        try:
            tensors = await asyncio.to_thread(self._backend.read, weights)
        except WeightsError as error:
            raise EngineError(f"version {version} not loaded, version {self._version} stays: {error}") from error
        swapped = asyncio.get_running_loop().create_future()
        self._send(partial(self._swap, tensors, version, swapped))
        await swapped

    async def close(self) -> None:
        """End the thread and release the model. What is under way fails with `EngineError`. Idempotent."""
        if self._closed is None:
            self._closed = "the engine was closed"
            self._flush()
            self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    def _checked(self, prompt: Sequence[int] | NDArray[np.int32], sampling: Sampling) -> Request:
        self._check_open()
        ids = np.ascontiguousarray(prompt, np.int32)
        if ids.ndim != 1 or not ids.size:
            raise EngineError(f"a prompt of at least one token expected, an array of shape {ids.shape} given")
        if ids.size >= self.context:
            raise PromptTooLong(prompt=ids.size, context=self.context)
        if ids.min() < 0 or ids.max() >= self._backend.vocabulary:
            raise EngineError(
                f"token ids from 0 to {self._backend.vocabulary - 1} expected, {ids.min()} to {ids.max()} given; "
                "is the tokenizer the model's?"
            )
        _check_sampling(sampling)
        limit = min(sampling.max_tokens, self.context - ids.size)
        return Request(key=next(self._keys), prompt=ids, sampling=replace(sampling, max_tokens=limit))

    def _check_open(self) -> None:
        if self._closed is not None:
            raise EngineError(self._closed)

    def _send(self, order: Callable[[], None]) -> None:
        """Give the thread an order, together with all others of this turn of the event loop: they share a batch."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._flush()
        if not self._outbox:
            loop.call_soon(self._flush)
        self._outbox.append(order)

    def _flush(self) -> None:
        orders, self._outbox = self._outbox, []
        if orders:
            self._inbox.put(lambda: [order() for order in orders] and None)

    # What follows runs in the engine's thread.

    def _run(self, open_backend: Callable[[], Backend], opened: Future[Backend]) -> None:
        try:
            backend = open_backend()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the constructor raises it
            opened.set_exception(error)
            return
        opened.set_result(backend)
        while self._obey():
            if self._live:
                self._step(backend)
        self._fail("the engine was closed")
        backend.close()

    def _obey(self) -> bool:
        """Carry out the orders that are there, waiting for one only while nothing is under way; False to end."""
        try:
            order = self._inbox.get(block=not self._live)
            while order is not None:
                order()
                order = self._inbox.get(block=not self._live)
        except Empty:
            return True
        return False

    def _step(self, backend: Backend) -> None:
        try:
            deltas = backend.step()
        except Exception as error:  # noqa: BLE001 - a model may raise anything; its requests fail, the thread lives on
            logger.warning("a step failed", exc_info=True)
            self._fail(f"the model failed: {error!r}")
            return
        finished: list[_Outcome] = []
        for delta in deltas:
            live = self._live[delta.key]
            live.extend(delta, self._version)
            if delta.finish_reason is not None:
                del self._live[delta.key]
                finished.append(_Outcome(live.future, _completion(live, delta.finish_reason)))
        _settle(finished)

    def _add(self, live: _Live) -> None:
        self._live[live.request.key] = live
        self._backend.add(live.request)

    def _abort(self, key: int) -> None:
        if self._live.pop(key, None) is not None:
            self._backend.abort(key)

    def _swap(self, weights: "Mapping[str, Tensor]", version: int, swapped: "asyncio.Future[None]") -> None:
        try:
            self._backend.swap(weights)
        except Exception as error:  # noqa: BLE001 - half-swapped weights must never sample, whatever went wrong
            self._closed = f"the engine failed while it swapped weights: {error!r}"
            self._fail(self._closed)
            _call(swapped, partial(_set_exception, swapped, EngineError(self._closed)))
            return
        self._version = version
        _call(swapped, partial(_set_result, swapped, None))

    def _fail(self, reason: str) -> None:
        """End every request with `EngineError`."""
        lives, self._live = self._live, {}
        for key in lives:
            self._backend.abort(key)
        _settle([_Outcome(live.future, EngineError(reason)) for live in lives.values()])
