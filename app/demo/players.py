"""Scripted players of mixed skill for the demo's games: what the model is warm started from.

Each draws its kind by weight, then plays by it. Most are bad, some are good; so the model learns the rules and a spread
of habits, and the online phase has something to find.
"""

import random
from collections.abc import Callable, Iterator, Sequence

from ...producers.environment import Message
from ...schemas import Task
from .games import ACTIONS, DELTAS, GUESSES, SIZE, TOP, find_map

NUMBER_KINDS = {"careless": 0.4, "walk": 0.4, "bisect": 0.2}
LAKE_KINDS = {"reckless": 0.55, "wander": 0.25, "expert": 0.2}


class ScriptedPlayer:
    """Says what a generator yields; the generator reads the environment's words through `self.heard`."""

    def __init__(self, name: str, moves: "Callable[[ScriptedPlayer], Iterator[str]]") -> None:
        self.name = name
        self.heard: list[str] = []
        """The words of the environment's last message."""
        self._moves = moves(self)

    def act(self, history: Sequence[Message]) -> str:
        # Plain English ends in the same words that the terse form consists of.
        self.heard = history[-1].content.lower().replace(".", " ").replace(",", " ").split()
        return next(self._moves)


def number_player(task: Task, sample_index: int) -> ScriptedPlayer:
    """A guesser: `careless` guesses anew, `walk` goes step by step, `bisect` halves."""
    rng = random.Random(f"{task.task_id}/{sample_index}")
    (kind,) = rng.choices(list(NUMBER_KINDS), list(NUMBER_KINDS.values()))
    return ScriptedPlayer(kind, lambda player: _guesses(player, kind, rng))


def lake_player(task: Task, sample_index: int) -> ScriptedPlayer:
    """A walker: `reckless` goes right or down, `wander` avoids holes, `expert` takes a shortest way."""
    rng = random.Random(f"{task.task_id}/{sample_index}")
    (kind,) = rng.choices(list(LAKE_KINDS), list(LAKE_KINDS.values()))
    _, rows = find_map(task.seed, "train")
    return ScriptedPlayer(kind, lambda _: _walk(rows, kind, rng))


def _guesses(player: ScriptedPlayer, kind: str, rng: random.Random) -> Iterator[str]:
    low, high = [int(word) for word in player.heard if word.isdigit()][:2]
    fresh = rng.sample(range(low, high + 1), GUESSES + 2)
    stride = rng.choice((1, 2, 3))
    guess = rng.randint(low, high)
    # Halving 1..50 whatever the window: one tree of guesses, which a small model can learn from few episodes.
    left, right = 1, TOP
    first, last = low, high
    while True:
        if kind == "careless":
            guess = fresh.pop()
        elif kind == "bisect":
            guess = min(max((left + right) // 2, first), last)
        yield str(guess)
        if "higher" in player.heard:
            low = left = guess + 1
            walk = guess + stride
        else:
            high = right = guess - 1
            walk = guess - stride
        if kind == "walk":
            guess = min(max(walk, low), high)


def _walk(rows: tuple[str, ...], kind: str, rng: random.Random) -> Iterator[str]:
    away = _distances(rows)
    place = (0, 0)
    while True:
        ways = [(a, place[0] + DELTAS[a][0], place[1] + DELTAS[a][1]) for a in range(4)]
        inside = [way for way in ways if 0 <= way[1] < SIZE and 0 <= way[2] < SIZE]
        safe = [way for way in inside if rows[way[1]][way[2]] != "H"]
        if kind == "reckless":
            (chosen,) = rng.choices(ways, (1, 3, 3, 1))
        elif kind == "wander":
            chosen = rng.choice(safe)
        else:
            chosen = rng.choice([way for way in safe if away.get((way[1], way[2]), 99) < away[place]])
        if chosen in inside:
            place = chosen[1:]
        yield ACTIONS[chosen[0]]


def _distances(rows: tuple[str, ...]) -> dict[tuple[int, int], int]:
    """Moves to the goal from every square that has a way there."""
    found = {(SIZE - 1, SIZE - 1): 0}
    open_ = [(SIZE - 1, SIZE - 1)]
    for row, column in open_:
        for down, right in DELTAS:
            near = (row + down, column + right)
            inside = 0 <= near[0] < SIZE and 0 <= near[1] < SIZE
            if inside and rows[near[0]][near[1]] != "H" and near not in found:
                found[near] = found[row, column] + 1
                open_.append(near)
    return found


PLAYERS: dict[str, Callable[[Task, int], ScriptedPlayer]] = {"number": number_player, "lake": lake_player}
