"""The demo's games and players: training never sees what is evaluated, every word is known, the skills are mixed."""

import random
from collections import Counter

import numpy as np
import pytest

from rollstream.app.demo import players
from rollstream.app.demo.games import GUESSES, MAPS, find_map, find_number, lake, number, vocabulary
from rollstream.app.demo.play import FIRST_SEED
from rollstream.app.demo.players import PLAYERS
from rollstream.producers.environment import Action, Environment, EnvironmentFactory, Message
from rollstream.schemas import Task
from rollstream.schemas.errors import RollstreamError

GAMES: dict[str, EnvironmentFactory] = {"number": lambda: number("number"), "lake": lambda: lake("lake")}


def say(text: str) -> Action:
    return Action(text=text, tokens=np.empty(0, np.int32))


async def play(environment: Environment, game: str, seed: int) -> tuple[float, list[str]]:
    """One scripted episode: its reward, and every word that became tokens (the closing message does not)."""
    task = Task(task_id=f"test.{game}.{seed}", environment=game, seed=seed, group_size=1)
    player = PLAYERS[game](task, 0)
    history: list[Message] = []
    words: list[str] = []
    outcome = await environment.reset({}, seed)
    while True:
        if outcome.done or outcome.truncated:
            await environment.close()
            return outcome.reward, words
        history += outcome.messages
        words += [word for message in outcome.messages for word in message.content.split()]
        said = player.act(history)
        words.append(said)
        outcome = await environment.step(say(said))


def test_splits_apart_number() -> None:
    """No window and number of 400 evaluation tasks is among those of 3,000 seeds of training, scripted or online.

    Every window goes with every number: where one told of the other, a policy could learn the numbers by heart.
    """
    trained = {_number_task(seed, "train") for start in (0, FIRST_SEED) for seed in range(start, start + 1500)}
    evaluated = {_number_task(seed, "eval") for seed in range(400)}
    assert (len(trained), len(evaluated)) == (184, 46)
    assert trained.isdisjoint(evaluated)


def _number_task(seed: int, split: str) -> tuple[int, int]:
    from rollstream.app.demo import games

    own, low = find_number(seed, "train" if split == "train" else "eval")
    return low, games._target(own, low)  # pyright: ignore[reportPrivateUsage]


def test_splits_apart_lake() -> None:
    trained = {find_map(seed, "train")[1] for seed in range(MAPS)}
    evaluated = {find_map(seed, "eval")[1] for seed in range(200)}
    assert len(evaluated) > 100
    assert trained.isdisjoint(evaluated)


@pytest.mark.parametrize("game", GAMES)
async def test_vocabulary_covers(game: str) -> None:
    """The tokenizer of the tiny model knows all that games and players say."""
    known = set(vocabulary())
    assert len(known) == len(vocabulary())
    said: set[str] = set()
    for seed in range(60):
        said.update((await play(GAMES[game](), game, seed))[1])
    assert said <= known
    assert len(said) > 20


@pytest.mark.parametrize("game", GAMES)
async def test_same_seed_same_episode(game: str) -> None:
    once = [await play(GAMES[game](), game, seed) for seed in range(8)]
    state = random.getstate()
    again = [await play(GAMES[game](), game, seed) for seed in range(8)]
    assert once == again
    assert random.getstate() == state


@pytest.mark.parametrize(
    ("game", "kind", "lowest", "highest"),
    [
        ("number", "bisect", 0.95, 1.0),
        ("number", "walk", 0.05, 0.6),
        ("number", "careless", 0.02, 0.3),
        ("lake", "expert", 1.0, 1.0),
        ("lake", "wander", 0.05, 0.6),
        ("lake", "reckless", 0.02, 0.5),
    ],
)
async def test_skills(game: str, kind: str, lowest: float, highest: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of player wins about as often as its name says."""
    monkeypatch.setattr(players, f"{game.upper()}_KINDS", {kind: 1.0})
    rewards = [(await play(GAMES[game](), game, seed))[0] for seed in range(80)]
    assert lowest <= sum(reward >= 1 for reward in rewards) / len(rewards) <= highest


@pytest.mark.parametrize("game", GAMES)
def test_kinds_mixed(game: str) -> None:
    """Every kind plays, the bad ones most."""
    tasks = (Task(task_id=f"{n}", environment=game, seed=n, group_size=1) for n in range(200))
    kinds = Counter(PLAYERS[game](task, 0).name for task in tasks)
    weights = {"number": players.NUMBER_KINDS, "lake": players.LAKE_KINDS}[game]
    assert kinds.keys() == weights.keys()
    assert abs(kinds[next(iter(weights))] / 200 - next(iter(weights.values()))) < 0.15


@pytest.mark.parametrize("game", GAMES)
async def test_plain_words(game: str) -> None:
    """For a model that brings a language, the games speak English and forgive how an answer is worded."""
    environment = {"number": number, "lake": lake}[game](game, words="plain")
    outcome = await environment.reset({}, 3)
    assert len(" ".join(message.content for message in outcome.messages).split()) > 10
    outcome = await environment.step(say("I guess 17." if game == "number" else "right"))
    assert outcome.messages[-1].content
    await environment.close()


async def test_number_ends() -> None:
    """After the last guess the game is over."""
    environment = number("number")
    outcome = await environment.reset({}, 5)
    low = int(outcome.messages[-1].content.split()[1])
    answers = 0
    while not (outcome.done or outcome.truncated):
        outcome = await environment.step(say(str(low)))
        answers += 1
    assert answers <= GUESSES


def test_unknown_split() -> None:
    with pytest.raises(RollstreamError, match="expected train or eval, found 'test'"):
        number("number", split="test")  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
