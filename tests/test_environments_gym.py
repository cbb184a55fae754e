"""Gymnasium's toy games: seeds, words for actions, returns, limits, and the shelf that environments go back to."""

import asyncio
import random
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from rollstream.producers.environment import Action, Environment, Outcome
from rollstream.producers.environments import Invalid, View, open_environment
from rollstream.producers.environments.gym import Sight

TAXI = next(name for name in import_module("gymnasium").registry if name.startswith("Taxi-"))
FIRM = {"is_slippery": False}


def act(text: str) -> Action:
    return Action(text=text, tokens=np.zeros(1, np.int32))


async def play(environment: Environment, seed: int, words: Iterable[str]) -> list[Outcome]:
    outcomes = [await environment.reset({}, seed)]
    for word in words:
        await asyncio.sleep(0)
        outcomes.append(await environment.step(act(word)))
        if outcomes[-1].done or outcomes[-1].truncated:
            break
    await environment.close()
    return outcomes


def texts(outcomes: list[Outcome]) -> list[str]:
    return [message.content for outcome in outcomes for message in outcome.messages]


async def test_frozen_lake_is_drawn_and_won() -> None:
    make = open_environment("gymnasium", "FrozenLake-v1", FIRM)
    outcomes = await play(make(), 0, ["down", "Down!", "Not down, I go right.", "1", "2", "right"])
    assert texts(outcomes)[0] == "[S]FFF\nFHFH\nFFFH\nHFFG\nObservation: 0\nActions: left, down, right, up"
    assert "SFFF\n[F]HFH" in texts(outcomes)[1]
    assert [outcome.step_reward for outcome in outcomes] == [None, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert (outcomes[-1].done, outcomes[-1].reward) == (True, 1.0)
    lost = (await play(make(), 0, ["down", "right"]))[-1]
    assert (lost.done, lost.reward) == (True, 0.0)


async def test_a_limit_of_steps_truncates_with_the_return_so_far() -> None:
    outcomes = await play(open_environment("gymnasium", TAXI)(), 3, ["north"] * 300)
    assert len(outcomes) == 1 + 200
    assert (outcomes[-1].done, outcomes[-1].truncated, outcomes[-1].reward) == (False, True, -200.0)
    short = await play(open_environment("gymnasium", TAXI, {"max_episode_steps": 7})(), 3, ["north"] * 300)
    assert (len(short), short[-1].reward) == (1 + 7, -7.0)


async def test_actions_have_names_and_a_mask_hides_those_that_do_nothing() -> None:
    opening = texts(await play(open_environment("gymnasium", TAXI)(), 3, []))[0]
    assert opening.splitlines()[-1] == "Actions: south, east"
    named = open_environment("gymnasium", "FrozenLake-v1", {**FIRM, "actions": ["w", "s", "e", "n"]})
    outcomes = await play(named(), 0, ["s"])
    assert "Observation: 4\nActions: w, s, e, n" in texts(outcomes)[1]


async def test_an_environment_without_a_drawing_tells_its_observation() -> None:
    outcomes = await play(open_environment("gymnasium", "Blackjack-v1")(), 1, ["hit"] * 12)
    assert texts(outcomes)[0].startswith("Observation: (")
    assert (outcomes[-1].done, outcomes[-1].reward) == (True, -1.0)
    pole = texts(await play(open_environment("gymnasium", "CartPole-v1")(), 1, []))[0]
    assert pole.endswith("Actions: left, right")


async def test_words_that_name_no_action_are_an_invalid_move() -> None:
    strict = await play(open_environment("gymnasium", "FrozenLake-v1", FIRM)(), 0, ["jump"])
    assert (strict[-1].done, strict[-1].reward, strict[-1].metrics["invalid_moves"]) == (True, 0.0, 1.0)
    mild = open_environment("gymnasium", "FrozenLake-v1", {**FIRM, "forgive": 1, "penalty": 0.25})
    outcomes = await play(mild(), 0, ["4", "down", "down", "right", "down", "right", "right"])
    assert texts(outcomes)[1] == "No action found in your answer. Actions: left, down, right, up"
    assert outcomes[-1].reward == 0.75


async def test_a_seed_is_an_episode_also_on_an_environment_from_the_shelf() -> None:
    make = open_environment("gymnasium", "FrozenLake-v1")
    walks = [["right", "down"] * 10, ["down", "right"] * 10]
    alone = [texts(await play(make(), seed, walk)) for seed in range(4) for walk in walks]
    assert len({tuple(walk) for walk in alone}) > 2
    state, numpy_state = random.getstate(), np.random.get_state(legacy=False)
    together = await asyncio.gather(*[play(make(), seed, walk) for seed in range(4) for walk in walks])
    assert [texts(outcomes) for outcomes in together] == alone
    assert random.getstate() == state
    assert str(np.random.get_state(legacy=False)) == str(numpy_state)


async def test_a_random_map_is_drawn_by_the_seed() -> None:
    make = open_environment("gymnasium", "FrozenLake-v1", {**FIRM, "random_map": 5, "frozen": 0.7})
    maps = [texts(await play(make(), seed, []))[0].splitlines()[:5] for seed in (0, 1, 2, 0)]
    assert maps[0] == maps[3]
    assert len({tuple(rows) for rows in maps}) == 3
    assert all(len(rows[-1]) == 5 and rows[-1].endswith("G") for rows in maps)


async def test_a_view_may_look_into_the_environment() -> None:
    def read(sight: Sight) -> str:
        row, column = divmod(int(sight.observation), 4)
        return "".join(cell.decode() for cell in sight.env.desc[row]) + f" {column}"

    view = View(read=read, act=lambda text: "LDRU".find(text) if text in "LDRU" else Invalid(reason="?"))
    outcomes = await play(open_environment("gymnasium", "FrozenLake-v1", {**FIRM, "view": view})(), 0, ["D", "D", "x"])
    assert texts(outcomes) == ["SFFF 0", "FHFH 0", "FFFH 0", "?"]


async def test_an_environment_that_raised_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lake: Any = import_module("gymnasium.envs.toy_text.frozen_lake").FrozenLakeEnv
    step, broken = lake.step, list[object]()

    def fail(self: object, action: int) -> object:
        if action == 3:
            broken.append(self)
            raise RuntimeError("crack")
        return step(self, action)

    monkeypatch.setattr(lake, "step", fail)
    used: list[object] = []

    def read(sight: Sight) -> str:
        used.append(sight.env)
        return ""

    make = open_environment("gymnasium", "FrozenLake-v1", {"view": View[Sight, int](read=read)})
    await play(make(), 0, ["left"])
    environment = make()
    await environment.reset({}, 0)
    with pytest.raises(RuntimeError, match="crack"):
        await environment.step(act("up"))
    assert used[0] is used[1] is used[2] is broken[0]
    await environment.close()
    await play(make(), 0, ["left"])
    assert used[3] is not broken[0]


async def test_it_may_be_closed_before_it_was_reset_and_stepped_only_after() -> None:
    environment = open_environment("gymnasium", "FrozenLake-v1")()
    with pytest.raises(RuntimeError, match="expected reset before step"):
        await environment.step(act("up"))
    await environment.close()
