"""Opening an environment, hosting a game, and the common options: mistakes are named, nothing hangs the rest."""

import asyncio
import sys
import threading
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rollstream.producers.environment import Action, Outcome
from rollstream.producers.environments import (
    Inline,
    Invalid,
    Threaded,
    UnusableEnvironment,
    View,
    open_environment,
)
from rollstream.producers.environments.games import Crew
from rollstream.producers.environments.views import Referee, Rules
from rollstream.schemas import MissingExtra

ACTION = Action(text="x", tokens=np.zeros(1, np.int32))


class Stepper:
    """A game whose steps call a function."""

    name, version = "stepper", "1"

    def __init__(self, step: Callable[[], object] = lambda: None) -> None:
        self._step = step
        self.threads: list[str] = []
        self.closed = threading.Event()

    def reset(self, payload: Mapping[str, str], seed: int) -> Outcome:
        self.threads.append(threading.current_thread().name)
        return Outcome(reward=float(seed))

    def step(self, action: Action) -> Outcome:
        self.threads.append(threading.current_thread().name)
        self._step()
        return Outcome(done=True)

    def close(self) -> None:
        assert not self.closed.is_set()
        self.closed.set()


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of a user."""
    module = ModuleType("own_games")
    monkeypatch.setitem(sys.modules, "own_games", module)
    return module


async def test_an_environment_of_ones_own_is_made_anew_for_each_episode(own: ModuleType) -> None:
    made: list[tuple[str, int]] = []

    def make(name: str, size: int = 3) -> Inline:
        made.append((name, size))
        return Inline(Stepper())

    vars(own)["make"] = make
    factory = open_environment("own_games:make", "maze", {"size": 5})
    assert made == []
    first, second = factory(), factory()
    assert first is not second
    assert made == [("maze", 5), ("maze", 5)]
    assert (await first.reset({}, 9)).reward == 9


def test_an_option_that_ones_own_function_does_not_take_is_named(own: ModuleType) -> None:
    def make(name: str, size: int = 3) -> Inline:
        return Inline(Stepper())

    vars(own)["make"] = make
    vars(own)["number"] = 3
    with pytest.raises(UnusableEnvironment, match=r"option of own_games:make: 'sise'; did you mean 'size'\?"):
        open_environment("own_games:make", "maze", {"sise": 5})
    with pytest.raises(UnusableEnvironment, match="expected a function that makes an environment, found 3"):
        open_environment("own_games:number", "maze")
    with pytest.raises(UnusableEnvironment, match="'own_games:other' names nothing"):
        open_environment("own_games:other", "maze")
    with pytest.raises(UnusableEnvironment, match="'no_such_module:make' names nothing"):
        open_environment("no_such_module:make", "maze")


@pytest.mark.parametrize(
    ("adapter", "name", "options", "message"),
    [
        ("text-arena", "GuessTheNumber-v0", {}, r"adapter: 'text-arena'; did you mean 'textarena'\?"),
        (
            "textarena",
            "GuesTheNumber-v0",
            {},
            "textarena: 'GuesTheNumber-v0'; did you mean 'GuessTheNumber-v0'",
        ),
        ("gymnasium", "FrozenLake-v7", {}, "environment of gymnasium: 'FrozenLake-v7'; did you mean 'FrozenLake-v1'"),
        ("reasoning-gym", "chain_sums", {}, "dataset of reasoning-gym: 'chain_sums'; did you mean 'chain_sum'"),
        ("textarena", "GuessTheNumber-v0", {"max_turn": 1}, r"'max_turn'; did you mean 'max_turns'\?"),
        ("gymnasium", "FrozenLake-v1", {"slippery": True}, r"'slippery'; did you mean 'is_slippery'\?"),
        ("gymnasium", "FrozenLake-v1", {"render_mode": "human"}, "unknown option of FrozenLake-v1: 'render_mode'"),
        ("reasoning-gym", "chain_sum", {"seed": 1}, "unknown option of chain_sum: 'seed'"),
        ("reasoning-gym", "chain_sum", {"tries": 0}, "'tries': expected 1 or more, found 0"),
        ("reasoning-gym", "chain_sum", {"tries": "2"}, "'tries': expected int, found '2'"),
        ("reasoning-gym", "chain_sum", {"threads": 1}, "'threads': expected bool, found 1"),
        ("reasoning-gym", "chain_sum", {"forgive": True}, "'forgive': expected int, found True"),
        ("reasoning-gym", "chain_sum", {"label": "Ü"}, "'label': expected letters"),
        ("reasoning-gym", "chain_sum", {"view": 3}, "'view': expected a View"),
        ("reasoning-gym", "chain_sum", {"view": "os:nothing"}, "'os:nothing' names nothing"),
        ("textarena", "GuessTheNumber-v0", {"reward": "both"}, "'reward': expected 'win' or 'native', found 'both'"),
        ("gymnasium", "FrozenLake-v1", {"actions": ["a"]}, "'actions': expected 4 names, found 1: a"),
        ("gymnasium", "FrozenLake-v1", {"actions": "abcd"}, "'actions': expected 4 names, found 'abcd'"),
        ("gymnasium", "FrozenLake-v1", {"desc": ["Q"]}, r"'FrozenLake-v1' cannot be made with \{'desc': \['Q'\]\}"),
        ("gymnasium", "FrozenLake-v1", {"random_map": 1}, "expected random_map >= 2"),
        ("gymnasium", "FrozenLake-v1", {"random_map": 4, "map_name": "8x8"}, "without a 'desc' or 'map_name'"),
        ("gymnasium", "Taxi-v4", {"random_map": 4}, "'random_map': expected FrozenLake"),
        ("gymnasium", "Pendulum-v1", {}, "expected a discrete action space"),
    ],
)
def test_a_mistake_is_named(adapter: str, name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(UnusableEnvironment, match=message):
        open_environment(adapter, name, options)


@pytest.mark.parametrize(
    ("adapter", "package"),
    [("textarena", "textarena"), ("reasoning-gym", "reasoning_gym"), ("gymnasium", "gymnasium")],
)
def test_a_missing_package_names_its_extra(adapter: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=r"pip install 'rollstream\[envs\]'"):
        open_environment(adapter, "any")


async def test_common_options_name_the_environment_its_system_message_and_view(own: ModuleType) -> None:
    vars(own)["shout"] = View[Any, int](read=lambda sight: f"AT {sight.observation}")
    options: dict[str, object] = {"system": "Be brief.", "view": "own_games:shout", "label": "lake"}
    environment = open_environment("gymnasium", "FrozenLake-v1", options)()
    opening = await environment.reset({}, 0)
    assert environment.name == "lake"
    assert [(m.role.value, m.content) for m in opening.messages] == [("SYSTEM", "Be brief."), ("USER", "AT 0")]
    await environment.close()
    assert open_environment("gymnasium", "FrozenLake-v1")().name == "frozenlake-v1"


@pytest.mark.parametrize(
    ("adapter", "name"), [("textarena", "GuessTheNumber-v0"), ("reasoning-gym", "gcd"), ("gymnasium", "FrozenLake-v1")]
)
async def test_a_payload_that_says_nothing_to_an_adapter_is_refused(adapter: str, name: str) -> None:
    environment = open_environment(adapter, name)()
    with pytest.raises(UnusableEnvironment, match="expected a task without payload"):
        await environment.reset({"level": "3"}, 0)
    await environment.close()


@pytest.mark.parametrize("threads", [False, True])
async def test_a_game_is_played_on_the_loop_or_in_a_thread(threads: bool) -> None:
    game = Stepper()
    environment = Threaded(game) if threads else Inline(game)
    assert (environment.name, environment.version) == ("stepper", "1")
    assert (await environment.reset({}, 4)).reward == 4
    assert (await environment.step(ACTION)).done
    await environment.close()
    assert game.closed.is_set()
    here = threading.current_thread().name
    assert [name == here for name in game.threads] == [not threads, not threads]


async def test_what_a_threaded_game_raises_reaches_the_caller() -> None:
    def fail() -> None:
        raise SystemExit("bye")

    environment = Threaded(Stepper(fail))
    with pytest.raises(SystemExit, match="bye"):
        await environment.step(ACTION)
    await environment.close()


async def test_a_threaded_game_that_hangs_stops_nobody_and_is_closed_should_it_return() -> None:
    go_on = threading.Event()
    hanging, other = Stepper(go_on.wait), Stepper()
    environment = Threaded(hanging)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await environment.step(ACTION)
    await environment.close()
    assert not hanging.closed.is_set()
    assert (await Threaded(other).step(ACTION)).done
    go_on.set()
    assert await asyncio.to_thread(hanging.closed.wait, 10)


async def test_the_crew_grows_to_the_calls_under_way_and_shrinks_again() -> None:
    crew, barrier = Crew(patience=0.01), threading.Barrier(5)
    workers: set[threading.Thread] = set()

    def meet() -> int:
        workers.add(threading.current_thread())
        return barrier.wait(10)

    calls = [asyncio.wrap_future(crew.submit(meet)) for _ in range(5)]
    assert sorted(await asyncio.gather(*calls)) == [0, 1, 2, 3, 4]
    assert len(workers) == 5
    assert all(worker.daemon for worker in workers)
    for worker in workers:
        await asyncio.to_thread(worker.join, 10)
    assert not any(worker.is_alive() for worker in workers)
    assert await asyncio.wrap_future(crew.submit(lambda: 3)) == 3


async def test_the_crew_uses_its_threads_again() -> None:
    crew = Crew()
    used = {await asyncio.wrap_future(crew.submit(threading.get_ident)) for _ in range(100)}
    assert len(used) < 50


def test_invalid_moves_are_forgiven_fined_and_end_the_game() -> None:
    wrong = Invalid(reason="no move")
    referee = Referee(Rules(forgive=1, penalty=0.25))
    forgiven = referee.refuse_move(wrong)
    assert (forgiven.done, [m.content for m in forgiven.messages]) == (False, ["no move"])
    won = referee.end_game(1.0, text="won")
    assert (won.done, won.reward, dict(won.rewards)) == (True, 0.75, {"game": 1.0, "invalid": -0.25})
    assert won.metrics == {"invalid_moves": 1.0}
    lost = referee.refuse_move(wrong)
    assert (lost.done, lost.reward, dict(lost.rewards)) == (True, -0.5, {"game": 0.0, "invalid": -0.5})

    strict = Referee(Rules())
    assert strict.refuse_move(wrong).done
    clean = Referee(Rules(penalty=1.0)).end_game(1.0, text="", truncated=True, metrics={"m": 2.0})
    assert (clean.done, clean.truncated, clean.reward, dict(clean.rewards)) == (False, True, 1.0, {})
    assert (clean.messages, clean.metrics) == ((), {"m": 2.0, "invalid_moves": 0.0})
