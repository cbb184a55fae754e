"""One episode: an environment and whoever answers it, played to an end that is always exactly one `Trajectory`.

    INIT   environment.reset --> the opening, rendered
    RUN    loop:  room for a token? --> answer (engine or player) --> environment.step --> its words, rendered, appended
    EVAL   the last outcome --> terminal reward, status, cause

    ended by                                          status       cause
    the environment                                   COMPLETED
    a limit of the environment                        TRUNCATED    environment
    no room for another token, or a turn cut by that  TRUNCATED    context
    the limit on turns                                TRUNCATED    turns
    Abort.request                                     ABORTED      cancelled
    the engine, for a reason of its own               ABORTED      engine
    something raised                                  FAILED       init-error, generate-error, step-error, render-error
    something took longer than its stage may          FAILED       init-timeout, generate-timeout, step-timeout
    NaN, an infinity or no number for a reward        FAILED       bad-reward
    an engine's answer that must not be written       FAILED       bad-completion, bad-logprobs

Whatever was done before stays in the record. Only a cancellation of the task that plays it gives no record: it
propagates, once the environment is closed.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

from ..schemas import Role, Sampling, Status, Task, Trajectory
from .engine import Completion, Engine
from .environment import Action, Environment, Message, Outcome
from .limits import Abort, Gates, Limits
from .transcript import Ending, Transcript, clock_ms

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_PLACEHOLDER = -9999.0


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


class Voice(Protocol):
    """Who answers the environment: an engine, or a scripted player."""

    @property
    def model(self) -> str: ...

    @property
    def context(self) -> int:
        """Most tokens that an episode may have."""
        ...

    async def answer(self, history: Sequence[Message], prompt: Sequence[int], sampling: Sampling) -> Completion: ...


class _EngineVoice:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def model(self) -> str:
        return self._engine.model

    @property
    def context(self) -> int:
        return self._engine.context

    async def answer(self, history: Sequence[Message], prompt: Sequence[int], sampling: Sampling) -> Completion:
        completion = await self._engine.generate(prompt, sampling)
        _check_completion(completion, sampling.max_tokens)
        return completion


async def run_episode(
    task: Task,
    sample_index: int,
    environment: Environment,
    engine: Engine,
    renderer: Rendering,
    limits: Limits,
    *,
    gates: Gates | None = None,
    abort: Abort | None = None,
) -> Trajectory:
    """Play one sample of a task with an engine, close the environment, and return the record.

    Raises nothing but `asyncio.CancelledError`, when the calling task was cancelled by anything other than `abort`.
    """
    voice = _EngineVoice(engine)
    return await play_episode(task, sample_index, environment, voice, renderer, limits, gates=gates, abort=abort)


async def play_episode(
    task: Task,
    sample_index: int,
    environment: Environment,
    voice: Voice,
    renderer: Rendering,
    limits: Limits,
    *,
    gates: Gates | None = None,
    abort: Abort | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Trajectory:
    """As `run_episode`, whoever answers. `metadata` goes into the record."""
    transcript = Transcript(task, sample_index, model=voice.model, tokenizer=renderer.fingerprint)
    transcript.metadata.update(metadata or {})
    episode = _Episode(task, environment, voice, renderer, limits, gates or Gates(), transcript)
    try:
        ending = await episode.play(abort or Abort())
    finally:
        await episode.close()
    return transcript.finish(ending)


class _Ended(Exception):
    """Ends an episode from within a stage."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.cause)
        self.ending = ending


class _Episode:
    """The loop over the stages."""

    def __init__(
        self,
        task: Task,
        environment: Environment,
        voice: Voice,
        renderer: Rendering,
        limits: Limits,
        gates: Gates,
        transcript: Transcript,
    ) -> None:
        self._task = task
        self._environment = environment
        self._voice = voice
        self._renderer = renderer
        self._limits = limits
        self._gates = {"init": gates.init, "generate": gates.generate, "step": gates.step}
        self._transcript = transcript
        self._capacity = min(limits.max_tokens or voice.context, voice.context)
        self._max_turns = min(filter(None, (task.max_turns, limits.max_turns)), default=0)
        self._history: list[Message] = []
        self._stage = "init"

    async def play(self, abort: Abort) -> Ending:
        """INIT, RUN and EVAL, or why they did not come to their end."""
        if abort.reason is not None:
            return _abort(abort.reason)
        player, before = _current_task()
        abort.watch(player)
        try:
            return await self._live()
        except _Ended as ended:
            if ended.ending.status is Status.FAILED:
                logger.warning("%s failed (%s): %s", self._transcript.name, ended.ending.cause, ended.ending.detail)
            return ended.ending
        except asyncio.CancelledError:
            if player.cancelling() - before > abort.interrupted:
                raise
            return _abort(abort.reason) if abort.interrupted else self._fail("cancelled from within")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever is raised becomes the cause in the record
            return self._fail(f"{type(error).__name__}: {error}", error)
        finally:
            abort.watch(None)
            if abort.interrupted:
                player.uncancel()

    async def close(self) -> None:
        """Close the environment; a failure is logged and changes nothing."""
        player, before = _current_task()
        try:
            async with asyncio.timeout(self._limits.close_timeout):
                await self._environment.close()
        except asyncio.CancelledError:
            if player.cancelling() > before:
                raise
            logger.warning("%s: closing the environment was cancelled from within", self._transcript.name)
        except (Exception, SystemExit):  # noqa: BLE001 - the episode is over, and its record stands
            logger.warning("%s: the environment did not close", self._transcript.name, exc_info=True)

    async def _live(self) -> Ending:
        environment, transcript, task = self._environment, self._transcript, self._task
        since = clock_ms()
        outcome = await self._call(
            "init", self._limits.init_timeout, lambda: environment.reset(task.payload, task.seed)
        )
        transcript.environment_version = environment.version
        render: Callable[[Sequence[Message]], Sequence[int]] = self._renderer.opening
        while True:
            self._take(outcome)
            if self._is_over(outcome):
                transcript.note(outcome.messages, since)
                return self._judge(outcome)
            self._hear(outcome.messages, render, since)
            action, sampled_ended = await self._answer()
            render = partial(self._renderer.extend, sampled_ended)
            since = clock_ms()
            outcome = await self._call("step", self._limits.step_timeout, partial(environment.step, action))

    async def _call(self, stage: str, timeout: float, call: Callable[[], Awaitable[Result]]) -> Result:
        """One call of a stage, through its gate and within its time."""
        self._stage = stage
        gate = self._gates[stage]
        if gate is None:
            return await self._clock(stage, timeout, call)
        waited = time.perf_counter()
        async with gate:
            self._transcript.spend("queue", time.perf_counter() - waited)
            return await self._clock(stage, timeout, call)

    async def _clock(self, stage: str, timeout: float, call: Callable[[], Awaitable[Result]]) -> Result:
        started = time.perf_counter()
        watch = asyncio.timeout(timeout)
        try:
            async with watch:
                return await call()
        except TimeoutError:
            if not watch.expired():
                raise
            ending = Ending(status=Status.FAILED, cause=f"{stage}-timeout", detail=f"no answer within {timeout:g} s")
            raise _Ended(ending) from None
        finally:
            self._transcript.spend(stage, time.perf_counter() - started)

    def _take(self, outcome: Outcome) -> None:
        """Note what came with an outcome besides its words."""
        if not isinstance(outcome, Outcome):
            raise TypeError(f"expected the environment to give an Outcome, found {outcome!r}")
        self._transcript.metrics.update({str(name): float(value) for name, value in outcome.metrics.items()})
        if outcome.step_reward is not None:
            self._transcript.pay(_finite(outcome.step_reward, "step_reward"))

    def _is_over(self, outcome: Outcome) -> bool:
        turns = self._max_turns and self._transcript.sampled_turns >= self._max_turns
        return bool(outcome.done or outcome.truncated or turns)

    def _judge(self, outcome: Outcome) -> Ending:
        """EVAL: what the last outcome is worth."""
        if not outcome.done and not outcome.truncated:
            return Ending(status=Status.TRUNCATED, cause="turns")
        return Ending(
            status=Status.COMPLETED if outcome.done else Status.TRUNCATED,
            cause=None if outcome.done else "environment",
            reward=_finite(outcome.reward, "reward"),
            rewards={str(name): _finite(part, f"rewards[{name!r}]") for name, part in outcome.rewards.items()},
        )

    def _hear(
        self, messages: Sequence[Message], render: Callable[[Sequence[Message]], Sequence[int]], since: int
    ) -> None:
        """Append what the environment said, if a sampled token still fits after it."""
        self._stage = "render"
        ids = render(messages)
        if len(self._transcript.tokens) + len(ids) >= self._capacity:
            self._transcript.note(messages, since)
            raise _Ended(Ending(status=Status.TRUNCATED, cause="context"))
        self._transcript.hear(messages, ids, since)
        self._history.extend(messages)

    async def _answer(self) -> tuple[Action, bool]:
        """A sampled turn, and whether it ended by itself."""
        transcript, sampling = self._transcript, self._task.sampling
        room = self._capacity - len(transcript.tokens)
        if cut := room < sampling.max_tokens:
            sampling = replace(sampling, max_tokens=room)
        prompt, since = tuple(transcript.tokens), clock_ms()
        completion = await self._call(
            "generate",
            self._limits.generate_timeout,
            lambda: self._voice.answer(self._history, prompt, sampling),
        )
        self._stage = "render"
        text = self._renderer.decode(completion.tokens.tolist()).strip()
        if len(completion.tokens):
            transcript.speak(completion, text, since)
            self._history.append(Message(role=Role.ASSISTANT, content=text))
        if completion.finish_reason == "abort":
            raise _Ended(Ending(status=Status.ABORTED, cause="engine"))
        if completion.finish_reason == "length" and cut:
            raise _Ended(Ending(status=Status.TRUNCATED, cause="context"))
        return Action(text=text, tokens=completion.tokens), completion.finish_reason == "stop"

    def _fail(self, detail: str, error: BaseException | None = None) -> Ending:
        logger.warning("%s failed (%s-error): %s", self._transcript.name, self._stage, detail, exc_info=error)
        return Ending(status=Status.FAILED, cause=f"{self._stage}-error", detail=detail)


def _current_task() -> tuple["asyncio.Task[object]", int]:
    """The task that runs now, and how many cancellations were asked of it before."""
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("expected to run in an asyncio task, found none")
    return task, task.cancelling()


def _abort(reason: str | None) -> Ending:
    return Ending(status=Status.ABORTED, cause="cancelled", detail=reason or "")


def _finite(value: object, name: str) -> float:
    """A reward as a float. Ends the episode where it is none, or none that can be compared."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if math.isfinite(number):
        return number
    detail = f"expected a finite number for {name}, found {value!r}"
    raise _Ended(Ending(status=Status.FAILED, cause="bad-reward", detail=detail))


def _check_completion(completion: Completion, most: int) -> None:
    """Ends the episode where an engine's answer must not be written, so that the turns before it still can be."""
    tokens, logprobs, spans = completion.tokens, completion.logprobs, completion.spans
    count = tokens.size
    expected = {"log-probabilities": logprobs.size, "tokens in spans": sum(span.count for span in spans)}
    problem = next((f"expected {count} {name}, found {size}" for name, size in expected.items() if size != count), None)
    if count > most or (count == 0 and completion.finish_reason != "abort"):
        problem = f"expected 1 to {most} tokens, found {count}"
    elif count and (tokens.min() < 0 or min(span.version for span in spans) < 1):
        problem = "expected token ids >= 0 and policy versions >= 1"
    if problem is not None:
        raise _Ended(Ending(status=Status.FAILED, cause="bad-completion", detail=problem))
    # Every comparison with NaN is false. Engines write -9999 where they have none.
    if count and not (logprobs.min() > _PLACEHOLDER and logprobs.max() <= 0):
        detail = f"expected log-probabilities from above {_PLACEHOLDER:g} to 0, found {logprobs.tolist()}"
        raise _Ended(Ending(status=Status.FAILED, cause="bad-logprobs", detail=detail[:500]))
