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

Whatever was done before stays in the record. Two things give no record and propagate, once the environment is closed:
a cancellation of the task that plays it, and `EngineLost`, which is no fault of the episode's: another engine can play
it from the start.
"""

import asyncio
import logging
import math
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from ..schemas import Role, Status, Task, Trajectory
from .engine import Engine, EngineLost
from .environment import Action, Environment, Message, Outcome
from .limits import Abort, Gates, Limits, Watch
from .transcript import Ended, Ending, Transcript, clock_ms
from .voices import EngineVoice, Rendering, Voice

__all__ = ["Abort", "Gates", "Limits", "Rendering", "Voice", "play_episode", "run_episode"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


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

    Raises nothing but `EngineLost`, and `asyncio.CancelledError` when the calling task was cancelled by anything other
    than `abort`.
    """
    return await play_episode(
        task, sample_index, environment, EngineVoice(engine), renderer, limits, gates=gates, abort=abort
    )


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
) -> Trajectory:
    """As `run_episode`, whoever answers."""
    transcript = Transcript(task, sample_index, model=voice.model, tokenizer=renderer.fingerprint)
    transcript.metadata.update(voice.metadata)
    episode = _Episode(task, environment, voice, renderer, limits, gates or Gates(), transcript)
    try:
        ending = await episode.play(abort or Abort())
    finally:
        await episode.close()
    if ending.status is Status.FAILED:
        logger.warning("%s failed (%s): %s", transcript.name, ending.cause, ending.detail)
    return transcript.finish(ending)


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
        player = asyncio.current_task()
        if player is None:
            raise RuntimeError("expected to run in an asyncio task, found none")
        self._player = player
        self._cancelled_before = player.cancelling()
        self._watch = Watch(player)

    async def play(self, abort: Abort) -> Ending:
        """INIT, RUN and EVAL, or why they did not come to their end."""
        if abort.reason is not None:
            return _abort(abort.reason)
        abort.watch(self._player)
        try:
            return await self._live()
        except Ended as ended:
            return ended.ending
        except asyncio.CancelledError as error:
            # What neither the abort nor the watch sent comes from outside: a shutdown.
            own = abort.interrupted + self._watch.rings
            if self._player.cancelling() - self._cancelled_before > own:
                raise
            if abort.interrupted:
                return _abort(abort.reason)
            return self._fail(error)
        except EngineLost:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever is raised becomes the cause in the record
            return self._fail(error)
        finally:
            abort.watch(None)
            self._watch.close()
            for _ in range(abort.interrupted + self._watch.rings):
                self._player.uncancel()

    async def close(self) -> None:
        """Close the environment; a failure is logged and changes nothing."""
        try:
            async with asyncio.timeout(self._limits.close_timeout):
                await self._environment.close()
        except asyncio.CancelledError:
            if self._player.cancelling() > self._cancelled_before:
                raise
            logger.warning("%s: closing the environment was cancelled from within", self._transcript.name)
        except (Exception, SystemExit):  # the user's code; the episode is over and its record stands
            logger.warning("%s: the environment did not close", self._transcript.name, exc_info=True)

    async def _live(self) -> Ending:
        environment, transcript, task = self._environment, self._transcript, self._task
        since = clock_ms()
        reset = partial(environment.reset, task.payload, task.seed)
        outcome = await self._call("init", self._limits.init_timeout, reset)
        transcript.environment_version = environment.version
        render: Callable[[Sequence[Message]], Sequence[int]] = self._renderer.opening
        while True:
            outcome = self._take(outcome)
            if self._is_over(outcome):
                transcript.note(outcome.messages, since)
                return self._judge(outcome)
            self._hear(outcome.messages, render, since)
            action, sampled_ended = await self._answer()
            render = partial(self._renderer.extend, sampled_ended)
            since = clock_ms()
            outcome = await self._call("step", self._limits.step_timeout, partial(environment.step, action))

    async def _call(self, stage: str, seconds: float, call: Callable[[], Awaitable[Result]]) -> Result:
        """One call of a stage, through its gate and within its time."""
        self._stage = stage
        gate = self._gates[stage]
        if gate is None:
            return await self._clock(stage, seconds, call)
        waited = time.perf_counter()
        async with gate:
            self._transcript.spend("queue", time.perf_counter() - waited)
            return await self._clock(stage, seconds, call)

    async def _clock(self, stage: str, seconds: float, call: Callable[[], Awaitable[Result]]) -> Result:
        started = time.perf_counter()
        self._watch.start(seconds)
        try:
            return await call()
        finally:
            self._watch.stop()
            self._transcript.spend(stage, time.perf_counter() - started)

    def _take(self, outcome: object) -> Outcome:
        """An outcome, once what came with it besides its words is noted."""
        if not isinstance(outcome, Outcome):
            raise TypeError(f"expected the environment to give an Outcome, found {outcome!r}")
        self._transcript.metrics.update({str(name): float(value) for name, value in outcome.metrics.items()})
        if outcome.step_reward is not None:
            self._transcript.pay(_finite(outcome.step_reward, "step_reward"))
        return outcome

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
            raise Ended(Ending(status=Status.TRUNCATED, cause="context"))
        self._transcript.hear(messages, ids, since)
        self._history.extend(messages)

    async def _answer(self) -> tuple[Action, bool]:
        """A sampled turn, and whether it ended by itself."""
        transcript, sampling = self._transcript, self._task.sampling
        room = self._capacity - len(transcript.tokens)
        if cut := room < sampling.max_tokens:
            sampling = replace(sampling, max_tokens=room)
        # A copy: the tokens grow, and an engine may hold a prompt longer than its caller waits.
        prompt, since = tuple(transcript.tokens), clock_ms()
        completion = await self._call(
            "generate",
            self._limits.generate_timeout,
            lambda: self._voice.answer(self._history, prompt, sampling),
        )
        self._stage = "render"
        text = self._renderer.decode(completion.tokens.tolist()).strip()
        if len(completion.tokens) or completion.finish_reason != "abort":
            transcript.speak(completion, text, since)
            self._history.append(Message(role=Role.ASSISTANT, content=text))
        if completion.finish_reason == "abort":
            raise Ended(Ending(status=Status.ABORTED, cause="engine"))
        if completion.finish_reason == "length" and cut:
            raise Ended(Ending(status=Status.TRUNCATED, cause="context"))
        return Action(text=text, tokens=completion.tokens), completion.finish_reason == "stop"

    def _fail(self, error: BaseException) -> Ending:
        """What is recorded of an error, or of the cancellation that the watch sent."""
        if self._watch.expired:
            cause, detail = f"{self._stage}-timeout", f"no answer within {self._watch.allowed:g} s"
        else:
            cause, detail = f"{self._stage}-error", "".join(traceback.format_exception_only(error)).strip()
            logger.debug("%s: what was raised", self._transcript.name, exc_info=error)
        return Ending(status=Status.FAILED, cause=cause, detail=detail)


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
    raise Ended(Ending(status=Status.FAILED, cause="bad-reward", detail=detail))
