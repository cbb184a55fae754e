"""The episode loop: exactly one record whatever happens, tokens only appended, what was done before kept."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import pytest

from rollstream.producers.engine import Completion, EngineError, EngineLost
from rollstream.producers.environment import Action, Message, Outcome
from rollstream.producers.episode import run_episode
from rollstream.producers.limits import Abort, Gates, Limits
from rollstream.schemas import PolicySpan, Role, Sampling, Status, Task, Trajectory, decode, encode

END, SYSTEM, USER, AGENT = range(4)
TASK = Task(task_id="task", environment="counting", seed=7, group_size=8, sampling=Sampling(max_tokens=8))
QUICK = Limits(init_timeout=0.02, step_timeout=0.02, generate_timeout=0.02, close_timeout=0.02)


class Letters:
    """A renderer of one token a letter."""

    fingerprint = "letters"

    def opening(self, messages: Sequence[Message]) -> list[int]:
        return [*self._speak(messages), AGENT]

    def extend(self, sampled_ended: bool, messages: Sequence[Message]) -> list[int]:
        return [*([] if sampled_ended else [END]), *self._speak(messages), AGENT]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(i) for i in ids if i > AGENT)

    def _speak(self, messages: Sequence[Message]) -> list[int]:
        roles = {Role.SYSTEM: SYSTEM, Role.USER: USER}
        return [t for m in messages for t in (roles[m.role], *map(ord, m.content), END)]


def say(text: str, version: int = 3, finish: str = "stop") -> Completion:
    """What an engine samples to say this."""
    tokens = [*map(ord, text), END] if finish == "stop" else [*map(ord, text)]
    return Completion(
        tokens=np.array(tokens, np.int32),
        logprobs=-np.arange(1, len(tokens) + 1, dtype=np.float32),
        spans=(PolicySpan(version=version, count=len(tokens)),) if tokens else (),
        finish_reason=finish,
    )


class Engine:
    """Says what it was told to, and keeps the prompts it was asked."""

    version, model, context = 3, "parrot", 200

    def __init__(self, *answers: Completion | Exception | Callable[[], Awaitable[Completion]]) -> None:
        self._answers = list(answers)
        self.prompts: list[list[int]] = []
        self.samplings: list[Sampling] = []

    async def generate(self, prompt: Any, sampling: Sampling) -> Completion:
        self.prompts.append(list(prompt))
        self.samplings.append(sampling)
        answer = self._answers.pop(0) if self._answers else say("x")
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, Completion) else await answer()

    async def load(self, weights: object, version: int) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


def told(*texts: str, **more: Any) -> Outcome:
    return Outcome(messages=tuple(Message(role=Role.USER, content=text) for text in texts), **more)


@dataclass
class World:
    """An environment that gives prepared outcomes; an exception is raised, a function awaited."""

    steps: list[Any]
    start: Any = field(default_factory=lambda: told("go"))
    at_close: Any = None
    name: str = "counting"
    version: str = "1.0"
    actions: list[Action] = field(default_factory=list[Action])
    closed: int = 0

    async def reset(self, payload: Mapping[str, str], seed: int) -> Outcome:
        return cast(Outcome, await self._give(self.start))

    async def step(self, action: Action) -> Outcome:
        self.actions.append(action)
        return cast(Outcome, await self._give(self.steps.pop(0)))

    async def close(self) -> None:
        self.closed += 1
        await self._give(self.at_close)

    async def _give(self, what: Any) -> Any:
        if isinstance(what, BaseException):
            raise what
        if not callable(what):
            return what
        awaitable: Any = what()
        return await awaitable


async def hang() -> Any:
    await asyncio.Event().wait()


async def play(world: World, engine: Engine | None = None, task: Task = TASK, **more: Any) -> Trajectory:
    """Play sample 2, and see that the record can be written and the environment was closed once."""
    limits = more.pop("limits", Limits())
    trajectory = await run_episode(task, 2, world, engine or Engine(), Letters(), limits, **more)
    assert isinstance(decode(encode(trajectory)), Trajectory)
    assert world.closed == 1
    return trajectory


async def test_a_whole_episode_is_recorded_turn_by_turn() -> None:
    opening = Outcome(messages=(Message(role=Role.SYSTEM, content="S"), Message(role=Role.USER, content="go")))
    world = World(
        [told("hi", step_reward=0.25), told("bye", done=True, reward=2.0, rewards={"part": 2.0}, metrics={"m": 3})],
        start=opening,
    )
    engine = Engine(say("a"), say("bc", finish="length"))
    trajectory = await play(world, engine)

    assert (trajectory.trajectory_id, trajectory.group_id, trajectory.sample_index) == ("task/2/0", "task", 2)
    assert (trajectory.environment, trajectory.environment_version) == ("counting", "1.0")
    assert (trajectory.seed, trajectory.model, trajectory.tokenizer) == (7, "parrot", "letters")
    assert (trajectory.status, trajectory.cause) == (Status.COMPLETED, None)
    assert (trajectory.reward, dict(trajectory.rewards)) == (2.0, {"part": 2.0})
    assert [(t.role.value, t.tokens, t.sampled, t.text, t.reward, t.finish_reason) for t in trajectory.turns] == [
        ("SYSTEM", 0, False, "S", None, None),
        ("USER", 8, False, "go", None, None),
        ("ASSISTANT", 2, True, "a", 0.25, "stop"),
        ("USER", 5, False, "hi", None, None),
        ("ASSISTANT", 2, True, "bc", None, "length"),
        ("USER", 0, False, "bye", None, None),
    ]
    text = [SYSTEM, ord("S"), END, USER, *b"go", END, AGENT, ord("a"), END, USER, *b"hi", END, AGENT, *b"bc"]
    assert trajectory.tokens.tolist() == text
    assert trajectory.logprobs.tolist() == [-1, -2, -1, -2]
    assert trajectory.spans == (PolicySpan(version=3, count=4),)
    assert trajectory.metrics["turns"] == 2
    assert trajectory.metrics["m"] == 3
    assert {"init_seconds", "generate_seconds", "step_seconds"} <= set(trajectory.metrics)
    assert [a.text for a in world.actions] == ["a", "bc"]
    assert world.actions[0].tokens.tolist() == [ord("a"), END]
    times = [ms for turn in trajectory.turns[1:] for ms in (turn.started_ms, turn.finished_ms)]
    assert trajectory.started_ms <= min(times) <= max(times) <= trajectory.finished_ms
    assert times == sorted(times)


async def test_the_tokens_of_a_turn_are_a_prefix_of_those_of_the_next() -> None:
    world = World([told("b"), told(), told("c", "d"), told("e", done=True)])
    engine = Engine(say("1"), say("22", finish="length"), say(""), say("4"))
    trajectory = await play(world, engine)
    whole = trajectory.tokens.tolist()
    assert len(engine.prompts) == 4
    for prompt in engine.prompts:
        assert whole[: len(prompt)] == prompt
        assert prompt[-1] == AGENT
    assert trajectory.sampled_mask().sum() == len(trajectory.logprobs) == 2 + 2 + 1 + 2


async def test_spans_of_equal_versions_are_one_span() -> None:
    swapped = replace(say("ab"), spans=(PolicySpan(version=4, count=1), PolicySpan(version=5, count=2)))
    world = World([told("."), told("."), told(".", done=True)])
    trajectory = await play(world, Engine(say("a", version=4), swapped, say("c", version=5)))
    assert [(s.version, s.count) for s in trajectory.spans] == [(4, 3), (5, 4)]
    assert trajectory.version_range() == (4, 5)


@pytest.mark.parametrize(
    ("world", "engine", "cause", "error", "turns"),
    [
        (World([], start=ValueError("no map")), Engine(), "init-error", "ValueError: no map", 0),
        (World([told("b"), KeyError("k")]), Engine(), "step-error", "KeyError: 'k'", 4),
        (World([SystemExit(1)]), Engine(), "step-error", "SystemExit: 1", 2),
        (World([asyncio.CancelledError()]), Engine(), "step-error", "CancelledError", 2),
        (World([TimeoutError("its own")]), Engine(), "step-error", "TimeoutError: its own", 2),
        (
            World([None]),
            Engine(),
            "step-error",
            "TypeError: expected the environment to give an Outcome, found None",
            2,
        ),
        (World([], start=told("a", step_reward=1.0)), Engine(), "init-error", "ValueError: expected no step_reward", 0),
        (World([], start=Outcome(messages=(Message(role=Role.TOOL, content=""),))), Engine(), "render-error", "Key", 0),
        (World([told("b")]), Engine(say("a"), EngineError("lost")), "generate-error", "EngineError: lost", 3),
        (World([], start=hang), Engine(), "init-timeout", "no answer within 0.02 s", 0),
        (World([hang]), Engine(), "step-timeout", "no answer within 0.02 s", 2),
        (World([told("b")]), Engine(say("a"), hang), "generate-timeout", "no answer within 0.02 s", 3),
        (World([told("b", done=True, reward=math.nan)]), Engine(), "bad-reward", "for reward, found nan", 3),
        (World([told("b", done=True, reward=-math.inf)]), Engine(), "bad-reward", "for reward, found -inf", 3),
        (World([told("b", done=True, reward=None)]), Engine(), "bad-reward", "for reward, found None", 3),
        (World([told("b", done=True, rewards={"p": math.nan})]), Engine(), "bad-reward", "rewards['p'], found nan", 3),
        (World([told("b", step_reward=math.inf)]), Engine(), "bad-reward", "for step_reward, found inf", 2),
    ],
)
async def test_a_failure_is_a_record_that_keeps_what_was_before(
    world: World, engine: Engine, cause: str, error: str, turns: int
) -> None:
    trajectory = await play(world, engine, limits=QUICK)
    assert (trajectory.status, trajectory.cause, trajectory.reward) == (Status.FAILED, cause, 0.0)
    assert error in trajectory.metadata["error"]
    assert len(trajectory.turns) == turns


async def test_an_engine_that_is_lost_is_no_failure_of_the_episode() -> None:
    world = World([told("b")])
    with pytest.raises(EngineLost, match="for good"):
        await play(world, Engine(say("a"), EngineLost("for good")))
    assert (len(world.actions), world.closed) == (1, 1)


LOGPROBS = say("a").logprobs


@pytest.mark.parametrize(
    ("completion", "cause"),
    [
        (replace(say("a"), logprobs=LOGPROBS[:1]), "bad-completion"),
        (replace(say("a"), spans=()), "bad-completion"),
        (replace(say("a"), spans=(PolicySpan(version=3, count=3),)), "bad-completion"),
        (say("a", version=0), "bad-completion"),
        (replace(say("a"), tokens=np.array([-1, 0], np.int32)), "bad-completion"),
        (say("", finish="length"), "bad-completion"),
        (say("longer than eight"), "bad-completion"),
        *[
            (replace(say("a"), logprobs=np.array([-1, bad], np.float32)), "bad-logprobs")
            for bad in (math.nan, -math.inf)
        ],
        *[(replace(say("a"), logprobs=np.array([bad, -1], np.float32)), "bad-logprobs") for bad in (-9999.0, 0.5)],
    ],
)
async def test_an_answer_that_must_not_be_written_is_not_written(completion: Completion, cause: str) -> None:
    trajectory = await play(World([told("b")]), Engine(say("a"), completion))
    assert (trajectory.status, trajectory.cause) == (Status.FAILED, cause)
    assert [turn.text for turn in trajectory.turns] == ["go", "a", "b"]
    assert len(trajectory.logprobs) == 2


async def test_a_full_context_truncates() -> None:
    # The opening takes 5 tokens of 9; a turn of 2 and its reply of 4 leave no room for another token.
    full = await play(World([told("b")]), Engine(say("a")), limits=Limits(max_tokens=9))
    assert (full.status, full.cause) == (Status.TRUNCATED, "context")
    assert [(turn.text, turn.tokens) for turn in full.turns] == [("go", 5), ("a", 2), ("b", 0)]

    opening = await play(World([]), Engine(), limits=Limits(max_tokens=5))
    assert (opening.status, opening.cause, len(opening.tokens)) == (Status.TRUNCATED, "context", 0)
    assert [turn.text for turn in opening.turns] == ["go"]


async def test_a_turn_cut_by_the_context_ends_the_episode_and_one_cut_by_the_task_does_not() -> None:
    engine = Engine(say("abc", finish="length"))
    world = World([])
    cut = await play(world, engine, limits=Limits(max_tokens=8))
    assert engine.samplings[0].max_tokens == 3
    assert (cut.status, cut.cause, world.actions) == (Status.TRUNCATED, "context", [])
    assert len(cut.tokens) == 8

    short = replace(TASK, sampling=Sampling(max_tokens=3))
    world = World([told("b", done=True)])
    went_on = await play(world, Engine(say("abc", finish="length")), short)
    assert (went_on.status, [action.text for action in world.actions]) == (Status.COMPLETED, ["abc"])


@pytest.mark.parametrize(("task_turns", "limit", "expected"), [(2, 0, 2), (0, 3, 3), (2, 3, 2), (4, 3, 3)])
async def test_too_many_turns_truncate(task_turns: int, limit: int, expected: int) -> None:
    world = World([told("again", reward=5.0) for _ in range(9)])
    trajectory = await play(world, task=replace(TASK, max_turns=task_turns), limits=Limits(max_turns=limit))
    assert (trajectory.status, trajectory.cause, trajectory.reward) == (Status.TRUNCATED, "turns", 0.0)
    assert trajectory.metrics["turns"] == len(world.actions) == expected
    assert (trajectory.turns[-1].text, trajectory.turns[-1].tokens) == ("again", 0)


async def test_the_environment_may_end_at_the_last_turn_at_once_or_by_a_limit_of_its_own() -> None:
    last = await play(World([told("b", done=True, reward=1)]), task=replace(TASK, max_turns=1))
    assert (last.status, last.reward) == (Status.COMPLETED, 1.0)
    at_once = await play(World([], start=told("over", done=True, reward=1)))
    assert (at_once.status, at_once.reward, len(at_once.tokens)) == (Status.COMPLETED, 1.0, 0)
    limited = await play(World([told("b", truncated=True, reward=0.5)]))
    assert (limited.status, limited.cause, limited.reward) == (Status.TRUNCATED, "environment", 0.5)


async def test_an_engine_that_gives_up_aborts_and_keeps_its_tokens() -> None:
    trajectory = await play(World([]), Engine(say("ab", finish="abort")))
    assert (trajectory.status, trajectory.cause, len(trajectory.logprobs)) == (Status.ABORTED, "engine", 2)
    nothing = await play(World([]), Engine(say("", finish="abort")))
    assert (nothing.status, [turn.text for turn in nothing.turns]) == (Status.ABORTED, ["go"])


async def test_text_that_cannot_be_encoded_is_escaped() -> None:
    trajectory = await play(World([told("x\ud800", done=True)]))
    assert trajectory.turns[-1].text == "x\\ud800"


class Pause:
    """A call that says when it was reached, and goes on when it is told to."""

    def __init__(self, then: Any = None) -> None:
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()
        self._then = then

    async def __call__(self) -> Any:
        self.reached.set()
        await self.go_on.wait()
        return self._then


async def test_an_abort_gives_an_aborted_record() -> None:
    for stage in ("init", "generate", "step"):
        pause, abort = Pause(), Abort()
        world = World([pause if stage == "step" else told("b")], start=pause if stage == "init" else told("go"))
        engine = Engine(pause) if stage == "generate" else Engine()
        playing = asyncio.create_task(play(world, engine, abort=abort))
        await pause.reached.wait()
        abort.request("group cancelled")
        abort.request("a second time")
        trajectory = await playing
        assert (trajectory.status, trajectory.cause) == (Status.ABORTED, "cancelled")
        assert trajectory.metadata["error"] == "group cancelled"
        assert len(trajectory.turns) == {"init": 0, "generate": 1, "step": 2}[stage]
        assert playing.cancelling() == 0


async def test_an_abort_before_the_start_or_after_the_end() -> None:
    abort = Abort()
    abort.request("early")
    world = World([])
    assert (await play(world, abort=abort)).status is Status.ABORTED
    late, pause = Abort(), Pause()
    playing = asyncio.create_task(play(World([told("b", done=True)], at_close=pause), abort=late))
    await pause.reached.wait()
    late.request("late")
    pause.go_on.set()
    assert (await playing).status is Status.COMPLETED


@pytest.mark.parametrize("aborted", [True, False])
async def test_a_cancellation_that_the_environment_swallows_leaves_none_behind(aborted: bool) -> None:
    reached, abort = asyncio.Event(), Abort()

    async def stubborn() -> Outcome:
        reached.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return told("won", done=True, reward=1.0)
        raise AssertionError

    limits = Limits() if aborted else QUICK
    playing = asyncio.create_task(play(World([stubborn]), abort=abort, limits=limits))
    await reached.wait()
    if aborted:
        abort.request("stop")
    assert (await playing).reward == 1.0
    assert playing.cancelling() == 0


async def test_a_stage_may_take_longer_than_the_one_before() -> None:
    limits = Limits(init_timeout=0.02, generate_timeout=0.04, step_timeout=0.12)
    async with asyncio.timeout(10):
        trajectory = await play(World([told("b"), hang]), limits=limits)
    assert trajectory.cause == "step-timeout"
    assert trajectory.metrics["step_seconds"] >= 0.12


async def test_an_environment_that_turns_its_cancellation_into_an_error_has_taken_too_long() -> None:
    async def convert() -> Outcome:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise RuntimeError("interrupted") from None
        raise AssertionError

    assert (await play(World([convert]), limits=QUICK)).cause == "step-timeout"


@pytest.mark.parametrize("aborted", [False, True])
async def test_a_shutdown_propagates_and_still_closes_the_environment(aborted: bool) -> None:
    pause, abort, world = Pause(), Abort(), World([])
    world.start = pause
    playing = asyncio.create_task(run_episode(TASK, 0, world, Engine(), Letters(), Limits(), abort=abort))
    await pause.reached.wait()
    if aborted:
        abort.request("at the same time")
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert playing.cancelled()
    assert world.closed == 1


@pytest.mark.parametrize("at_close", [RuntimeError("stuck"), SystemExit(2), asyncio.CancelledError(), hang])
async def test_a_failing_close_is_logged_and_changes_nothing(at_close: Any, caplog: pytest.LogCaptureFixture) -> None:
    world = World([told("b", done=True, reward=1.0)], at_close=at_close)
    with caplog.at_level(logging.WARNING):
        trajectory = await play(world, limits=QUICK)
    assert (trajectory.status, trajectory.reward) == (Status.COMPLETED, 1.0)
    assert "task/2/0" in caplog.text


async def test_waiting_at_a_gate_is_not_charged() -> None:
    gates = Gates(init=asyncio.Semaphore(1), generate=asyncio.Semaphore(1), step=asyncio.Semaphore(1))
    for name in ("init", "generate", "step"):
        gate: asyncio.Semaphore = getattr(gates, name)
        async with gate:
            playing = asyncio.create_task(play(World([told("b", done=True)]), limits=QUICK, gates=gates))
            await asyncio.sleep(3 * QUICK.init_timeout)
            assert not playing.done()
        trajectory = await playing
        assert trajectory.status is Status.COMPLETED
        assert trajectory.metrics["queue_seconds"] > 2 * QUICK.init_timeout > trajectory.metrics[f"{name}_seconds"]


async def test_a_gate_lets_so_many_through() -> None:
    gates, inside, most = Gates(step=asyncio.Semaphore(2)), 0, 0

    async def step() -> Outcome:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0)
        inside -= 1
        return told("b", done=True)

    await asyncio.gather(*[play(World([step]), gates=gates) for _ in range(6)])
    assert most == 2


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        (RuntimeError("crash"), "step-error"),
        (hang, "step-timeout"),
        (told("b", done=True, reward=math.nan), "bad-reward"),
    ],
)
async def test_case_12_one_of_eight_fails_and_seven_arrive(bad: Any, cause: str) -> None:
    worlds = [World([told("on"), bad if index == 3 else told("b", done=True, reward=1.0)]) for index in range(8)]
    limits = Limits(step_timeout=0.05)
    samples = await asyncio.gather(
        *[run_episode(TASK, index, worlds[index], Engine(), Letters(), limits) for index in range(8)]
    )
    assert [sample.sample_index for sample in samples] == list(range(8))
    assert len({sample.trajectory_id for sample in samples}) == 8
    assert [sample.status for sample in samples].count(Status.COMPLETED) == 7
    assert (samples[3].status, samples[3].cause) == (Status.FAILED, cause)
    assert samples[3].metrics["turns"] == 2
