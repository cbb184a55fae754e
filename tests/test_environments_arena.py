"""Games of textarena: a seed is a game, chance is each game's own, and what its reward means."""

import asyncio
import random
from collections.abc import Iterable, Mapping
from importlib import import_module

import numpy as np
import pytest

from rollstream.producers.environment import Action, Environment, Outcome
from rollstream.producers.environments import Invalid, UnusableEnvironment, View, open_environment
from rollstream.producers.environments.arena import Said

GUESS = "GuessTheNumber-v0-hardcore-raw"
WORDS = ("[1]", "[2 3]", "[up]", "[reveal 0 0]", "[right]", "[1 1 1]", "[red]", "[hit]", "[A C]", "[1 2 3 4]")
"""Moves of many games."""


def act(text: str) -> Action:
    return Action(text=text, tokens=np.zeros(1, np.int32))


async def play(environment: Environment, seed: int, words: Iterable[str]) -> list[Outcome]:
    """Outcomes until the end or the last word; other episodes take turns with this one."""
    outcomes = [await environment.reset({}, seed)]
    for word in words:
        await asyncio.sleep(0)
        outcomes.append(await environment.step(act(word)))
        if outcomes[-1].done:
            break
    await environment.close()
    return outcomes


def texts(outcomes: list[Outcome]) -> list[str]:
    return [message.content for outcome in outcomes for message in outcome.messages]


async def find_number(seed: int, name: str = GUESS) -> int:
    """The number of a game, by asking for each."""
    outcomes = await play(
        open_environment("textarena", name, {"max_turns": 60})(), seed, (f"[{n}]" for n in range(1, 51))
    )
    assert outcomes[-1].reward == 1.0
    return len(outcomes) - 1


async def test_a_seed_is_a_game_and_the_same_one_as_in_the_package() -> None:
    numbers = [await find_number(seed) for seed in range(8)]
    assert numbers == [await find_number(seed) for seed in range(8)]
    assert len(set(numbers)) > 4
    # The package seeds the global generator and draws from it.
    assert numbers == [random.Random(seed).randint(1, 50) for seed in range(8)]
    assert numbers[:3] == [await find_number(seed, GUESS.removesuffix("-raw")) for seed in range(3)]


async def test_a_win_pays_one_and_a_near_miss_nothing() -> None:
    number = await find_number(5)
    near = number + 1 if number < 50 else number - 1
    make = open_environment("textarena", GUESS, {"max_turns": 0})
    won = (await play(make(), 5, [f"[{number}]"]))[-1]
    assert (won.done, won.reward, won.metrics["native_reward"]) == (True, 1.0, 1.0)
    lost = (await play(make(), 5, [f"[{near}]"]))[-1]
    assert (lost.done, lost.truncated, lost.reward) == (True, False, 0.0)
    assert lost.metrics["native_reward"] > 0.9
    native = (
        await play(open_environment("textarena", GUESS, {"max_turns": 0, "reward": "native"})(), 5, [f"[{near}]"])
    )[-1]
    assert native.reward == lost.metrics["native_reward"]
    assert "The turn limit has been reached" in texts([lost])[0]


async def test_max_turns_gives_one_turn_more() -> None:
    outcomes = await play(
        open_environment("textarena", GUESS, {"max_turns": 5})(), 3, (f"[{n}]" for n in range(50, 20, -1))
    )
    assert len(outcomes) == 1 + 6


async def test_the_game_forgives_one_invalid_move_in_a_row() -> None:
    make = open_environment("textarena", GUESS, {"max_turns": 5})
    outcomes = await play(make(), 3, ["hello", "[50]", "hello", "[49]", "what", "[51]"])
    assert [outcome.done for outcome in outcomes] == [False, False, False, False, False, False, True]
    assert "invalid move" in texts(outcomes)[1]
    assert outcomes[-1].reward == 0.0


async def test_an_invalid_move_ends_a_game_without_a_win_even_where_the_game_pays_fully(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    game = import_module("textarena.envs.GuessTheNumber.env").GuessTheNumberEnv

    def pay(self: object) -> float:
        return 1.0

    monkeypatch.setattr(game, "_get_percentage_completion", pay)
    last = (await play(open_environment("textarena", GUESS)(), 3, ["a", "b"]))[-1]
    assert (last.done, last.reward, last.metrics["native_reward"]) == (True, 0.0, 1.0)


async def test_the_opening_is_said_once_and_the_players_words_are_not_echoed() -> None:
    environment = open_environment("textarena", GUESS)()
    for _ in range(2):
        outcomes = await play(environment, 3, ["[50]", "49"])
        said = texts(outcomes)
        assert "Guess The Number" in said[0]
        assert said[1:] == ["The target number is lower.", "The target number is lower."]


async def test_a_view_says_a_game_in_a_few_words_and_judges_moves_itself() -> None:
    def read(said: tuple[Said, ...]) -> str:
        return {"higher.": "HI", "lower.": "LO"}.get(said[-1].text.split()[-1], "GO")

    view = View(read=read, act=lambda text: f"[{text}]" if text.isdigit() else Invalid(reason="NO"))
    options = {"view": view, "forgive": 1, "penalty": 0.5}
    number = await find_number(3)
    outcomes = await play(open_environment("textarena", GUESS, options)(), 3, ["50", "word", "1", str(number)])
    assert texts(outcomes)[:4] == ["GO", "LO", "NO", "HI"]
    assert (outcomes[-1].reward, dict(outcomes[-1].rewards)) == (0.5, {"game": 1.0, "invalid": -0.5})
    strict = await play(open_environment("textarena", GUESS, {"view": view})(), 3, ["word", "1"])
    assert [outcome.done for outcome in strict] == [False, True]


@pytest.mark.parametrize("threads", [False, True])
async def test_parallel_episodes_disturb_neither_each_other_nor_the_caller(threads: bool) -> None:
    """2048 draws a tile at every move."""
    make = open_environment("textarena", "2048-v0", {"threads": threads})
    words = ["up", "left", "down", "right"] * 6
    alone = [texts(await play(make(), seed, words)) for seed in range(4)]
    assert len({board for boards in alone for board in boards[-1:]}) == 4
    random.seed(1)
    state = random.getstate()
    together = await asyncio.gather(*[play(make(), seed, words) for seed in (0, 1, 2, 3, 0, 1, 2, 3)])
    assert [texts(outcomes) for outcomes in together] == alone + alone
    assert random.getstate() == state


async def test_textarena_outside_of_an_adapter_draws_from_the_global_generator() -> None:
    await find_number(3)
    game = import_module("textarena").make(GUESS)
    state = random.getstate()
    try:
        game.reset(num_players=1, seed=11)
        assert game.game_number == random.Random(11).randint(1, 50)
        assert random.getstate() != state
    finally:
        random.setstate(state)


def playable() -> list[str]:
    """One id of each single-player game."""
    registry: Mapping[str, object] = import_module("textarena.envs.registration").ENV_REGISTRY
    games: dict[str, str] = {}
    for name in registry:
        if name.endswith("-raw"):
            games.setdefault(name.split("-")[0], name)
    found: list[str] = []
    for name in games.values():
        try:
            open_environment("textarena", name)
        except UnusableEnvironment:
            continue
        found.append(name)
    return found


async def test_every_game_that_opens_is_a_function_of_its_seed_and_leaves_the_global_generator() -> None:
    names = playable()
    assert len(names) >= 20
    for name in names:
        make = open_environment("textarena", name)
        state = random.getstate()
        first, second = await asyncio.gather(play(make(), 7, WORDS), play(make(), 7, WORDS))
        assert first == second, name
        assert texts(first)[0], name
        assert random.getstate() == state, name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Wordle-v0", "downloads word lists"),
        ("Hangman-v0-raw", "downloads word lists"),
        ("TwentyQuestions-v0", "asks a language model over the network"),
        ("GuessTheNumber-v0-train", "wrapped form; ask for 'GuessTheNumber-v0'"),
        ("TicTacToe-v0", "for several players"),
    ],
)
def test_games_that_cannot_be_played_here_are_refused(name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> None:
        raise AssertionError("reached for the network")

    monkeypatch.setattr(import_module("nltk"), "download", download)
    with pytest.raises(UnusableEnvironment, match=message):
        open_environment("textarena", name)
