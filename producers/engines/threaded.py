"""An engine whose model belongs to one thread: what `TransformersEngine` and `VllmEngine` have in common.

    event loop                                              thread "engine"
    generate, generate, ... --all of one loop turn--> inbox --> add --> [ step: one token for every request ] --+
       ^                                                         ^              |                              |
       |                                                         +--------------+---- not finished <-----------+
       +--------------------- one callback a step <------------------------------------ finished <-------------+

    load: files are read and checked (any thread) --> inbox --> swap between two steps, caches dropped, new version

Every token is stamped with the version whose weights computed it: a completion under way during a load has two spans.
A swap that fails half-way, or a batch that does not let go of a request, is the engine's end: everything under way and
everything asked later raises `EngineLost`.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...infra.weights import WeightsError
from ...schemas import PolicySpan, Sampling
from ..engine import Completion, EngineError, EngineLost
from .backend import Backend, Delta, Request

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


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

    def completion(self, finish_reason: str) -> Completion | EngineError:
        logprobs = np.array(self.logprobs, np.float32)
        if not np.isfinite(logprobs).all():
            return EngineError(
                f"the model gave log-probabilities {logprobs[~np.isfinite(logprobs)][:3]}; "
                f"are the weights of version {self.spans[-1].version} finite?"
            )
        return Completion(
            tokens=np.array(self.tokens, np.int32),
            logprobs=logprobs,
            spans=tuple(self.spans),
            finish_reason=finish_reason,
        )


class _Outcome(NamedTuple):
    """What to tell one who waits."""

    future: asyncio.Future[Any]
    result: Completion | EngineError | None


_Order = Callable[[], None]


class ThreadedEngine:
    """An `Engine` over a `Backend` in a thread of its own."""

    def __init__(self, open_backend: Callable[[], Backend], *, model: str, version: int) -> None:
        """Open the backend, in its thread, and wait for it: seconds for a large model. Raises what opening raises."""
        self._model, self._version = model, version
        self._inbox = SimpleQueue[list[_Order] | None]()
        self._outbox: list[_Order] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._live: dict[int, _Live] = {}
        self._keys = count()
        self._closing = False
        self._unusable: str | None = None
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
        engine failed, `EngineLost` where it will never answer again.
        """
        self._check_usable()
        request = Request.checked(next(self._keys), prompt, sampling, self._backend)
        live = _Live(request=request, future=asyncio.get_running_loop().create_future())
        self._send(partial(self._add, live))
        try:
            return await live.future
        except asyncio.CancelledError:
            self._send(partial(self._abort, request.key))
            raise

    async def load(self, weights: Path, version: int) -> None:
        """Serve the weights in this directory (safetensors) from the next token on, under this version.

        Raises `EngineError` and goes on with the old weights and version where they do not fit the model, `EngineLost`
        where it cannot go on with either.
        """
        self._check_usable()
        try:
            tensors = await asyncio.to_thread(self._backend.read, weights)
        except WeightsError as error:
            raise EngineError(f"version {version} not loaded, version {self._version} stays: {error}") from error
        self._check_usable()
        swapped = asyncio.get_running_loop().create_future()
        self._send(partial(self._swap, tensors, version, swapped))
        await swapped

    async def close(self) -> None:
        """End the thread and release the model. What is under way fails with `EngineLost`. Idempotent."""
        if not self._closing:
            self._closing, self._unusable = True, "the engine is closed"
            self._flush()
            self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    def _check_usable(self) -> None:
        if self._unusable is not None:
            raise EngineLost(self._unusable)

    def _send(self, order: _Order) -> None:
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
        self._inbox.put(orders)

    # What follows runs in the engine's thread.

    def _run(self, open_backend: Callable[[], Backend], opened: "Future[Backend]") -> None:
        try:
            backend = open_backend()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the constructor raises it
            opened.set_exception(error)
            return
        opened.set_result(backend)
        while self._obey():
            self._step(backend)
        self._fail("the engine was closed")
        backend.close()

    def _obey(self) -> bool:
        """Carry out the orders that are there, waiting only while nothing is under way; False to end."""
        try:
            while (orders := self._inbox.get(block=not self._live)) is not None:
                for order in orders:
                    order()
        except Empty:
            return True
        return False

    def _step(self, backend: Backend) -> None:
        deltas: list[Delta] = []
        if error := _attempt(lambda: deltas.extend(backend.step())):
            logger.warning("a step failed", exc_info=error)
            self._fail(f"the model failed: {error!r}")
        finished: list[_Outcome] = []
        for delta in deltas:
            if (live := self._live.get(delta.key)) is None:
                continue
            live.extend(delta, self._version)
            if delta.finish_reason is not None:
                del self._live[delta.key]
                finished.append(_Outcome(live.future, live.completion(delta.finish_reason)))
        _settle(finished)

    def _add(self, live: _Live) -> None:
        refused: EngineError | None = None
        if self._unusable is not None:
            refused = EngineLost(self._unusable)
        elif error := _attempt(lambda: self._backend.add(live.request)):
            refused = EngineError(f"the request was not taken: {error}")
        if refused is None:
            self._live[live.request.key] = live
        else:
            _settle([_Outcome(live.future, refused)])

    def _abort(self, key: int) -> None:
        if self._live.pop(key, None) is not None:
            self._forget([key])
            if self._unusable is not None:
                self._fail(self._unusable)

    def _swap(self, weights: "Mapping[str, Tensor]", version: int, swapped: "asyncio.Future[None]") -> None:
        if self._unusable is None and (error := _attempt(lambda: self._backend.swap(weights))):
            # Half-swapped weights must never sample.
            self._unusable = f"the engine failed while it swapped weights: {error!r}"
            self._fail(self._unusable)
        if self._unusable is not None:
            _settle([_Outcome(swapped, EngineLost(self._unusable))])
        else:
            self._version = version
            _settle([_Outcome(swapped, None)])

    def _fail(self, reason: str) -> None:
        """End every request, with `EngineLost` where none will be answered again."""
        lives, self._live = self._live, {}
        self._forget(lives)
        kind = EngineError if self._unusable is None else EngineLost
        _settle([_Outcome(live.future, kind(reason)) for live in lives.values()])

    def _forget(self, keys: Iterable[int]) -> None:
        for key in keys:
            error = _attempt(partial(self._backend.abort, key))
            if error is not None and self._unusable is None:
                # Of no more use: its batch is not what it should be.
                self._unusable = f"the engine failed: {error!r}"


def _attempt(action: Callable[[], None]) -> Exception | None:
    """Do it, and give back what it raised: a model may raise anything, and this thread must live to tell who waits."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - see above
        return error
    return None


def _settle(outcomes: "Sequence[_Outcome]") -> None:
    """Wake who waits for these, with one call into each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Outcome]] = {}
    for outcome in outcomes:
        by_loop.setdefault(outcome.future.get_loop(), []).append(outcome)
    for loop, group in by_loop.items():
        try:
            loop.call_soon_threadsafe(_deliver, group)
        except RuntimeError:
            logger.debug("nobody waits any more: the event loop is closed")


def _deliver(outcomes: "Sequence[_Outcome]") -> None:
    for future, result in outcomes:
        if future.done():
            continue
        if isinstance(result, EngineError):
            future.set_exception(result)
        else:
            future.set_result(result)
