"""The demo's two games, through the adapters that everybody uses, with a view of few words.

    number   TextArena's GuessTheNumber: a number out of a window of 46 within 1..50, six guesses, "higher" or "lower"
    lake     Gymnasium's FrozenLake on a random 4x4 map: where you are and what lies around you; twelve moves

A seed is spread over the games so that training and evaluation never share one: a fifth of all (window, number) pairs
and of all maps is held out, and only `split = "eval"` plays them. With `words = "plain"` the games speak English, for a
model that brings a language with it.
"""

import random
import zlib
from collections.abc import Callable, Mapping
from functools import cache, lru_cache, partial
from importlib import import_module
from itertools import product
from typing import Any, Literal

from ...producers.environment import Action, Environment, EnvironmentFactory, Outcome
from ...producers.environments import Invalid, View, open_environment
from ...producers.environments.arena import Said
from ...producers.environments.chance import draw_from
from ...producers.environments.gym import Sight
from ...schemas.errors import RollstreamError

Split = Literal["train", "eval"]
Words = Literal["terse", "plain"]
SPLITS: tuple[Split, ...] = ("train", "eval")

TOP, WIDTH, GUESSES = 50, 46, 6
SIZE, FROZEN, MOVES = 4, 0.75, 12
ACTIONS = ("left", "down", "right", "up")
DELTAS = ((0, -1), (1, 0), (0, 1), (-1, 0))
MAPS = 2000
"""Maps in each split: making one takes a millisecond, so they are kept."""
HELD_OUT = 5
"""One in so many tasks is kept from training."""

GAMES = ("number", "lake")


def number(name: str, split: Split = "train", words: Words = "terse") -> Environment:
    """`adapter = "rollstream.app.demo.games:number"`."""
    return Spread(name, partial(find_number, split=_checked(split)), partial(_open_number, words=words))


def lake(name: str, split: Split = "train", words: Words = "terse") -> Environment:
    """`adapter = "rollstream.app.demo.games:lake"`."""
    return Spread(name, partial(find_map, split=_checked(split)), partial(_open_lake, words=words))


def vocabulary() -> tuple[str, ...]:
    """Every word of both games in their terse form."""
    cells = ("".join(cell) for cell in product("FHGW", repeat=4))
    return (
        *("<number>", "<lake>", "higher", "lower", "invalid"),
        *map(str, range(1, TOP + 1)),
        *ACTIONS,
        *(f"r{row}c{column}" for row in range(1, SIZE + 1) for column in range(1, SIZE + 1)),
        *(cell for cell in cells if cell.count("G") <= 1 and cell.count("W") <= 2),
    )


class Spread:
    """An environment whose seeds are spread over the tasks of one split."""

    def __init__(
        self, name: str, find: Callable[[int], tuple[int, Any]], make: Callable[[Any], EnvironmentFactory]
    ) -> None:
        self.name, self._find, self._make = name, find, make
        self._game: Environment | None = None

    @property
    def version(self) -> str:
        return self._game.version if self._game else ""

    async def reset(self, payload: Mapping[str, str], seed: int) -> Outcome:
        own, variant = self._find(seed)
        self._game = self._make(variant)()
        return await self._game.reset(payload, own)

    async def step(self, action: Action) -> Outcome:
        if self._game is None:
            raise RuntimeError("expected reset before step")
        return await self._game.step(action)

    async def close(self) -> None:
        if self._game is not None:
            await self._game.close()


# The number


@lru_cache(maxsize=4096)
def find_number(seed: int, split: Split) -> tuple[int, int]:
    """The game's own seed and the lowest number of its window, for the `seed`-th task of a split."""
    for own in range(seed * 1000, (seed + 1) * 1000):
        # Not from `own` alone: the game draws its number from that, and the window would give half of it away.
        low = random.Random(f"window {own}").randint(1, TOP - WIDTH + 1)
        if ((_target(own, low) + 2 * low) % HELD_OUT == 0) == (split == "eval"):
            return own, low
    raise AssertionError(f"no {split} task near seed {seed}")


def _target(seed: int, low: int) -> int:
    """The number that the game will draw."""
    _open_number(low, "terse")  # loads the game's class, its randomness isolated
    game: Any = import_module("textarena").make("GuessTheNumber-v0-hardcore-raw", **_window(low))
    draw_from(random.Random(seed), lambda: game.reset(num_players=1, seed=seed))
    return int(game.game_number)


def _window(low: int) -> dict[str, int]:
    return {"min_number": low, "max_number": low + WIDTH - 1, "max_turns": GUESSES - 1}


@cache
def _open_number(low: int, words: Words) -> EnvironmentFactory:
    read, act = (_read_number, _guess) if words == "terse" else (_tell_number, _find_guess)
    view = View[tuple[Said, ...], str](read=partial(read, low), act=act)
    options = {"label": "number", "view": view, **_window(low)}
    return open_environment("textarena", "GuessTheNumber-v0-hardcore", options)


def _read_number(low: int, said: tuple[Said, ...]) -> str:
    if any(kind == "PROMPT" for kind, _ in said):
        return f"<number> {low} {low + WIDTH - 1}"
    text = said[-1].text if said else ""
    return "higher" if "higher" in text else "lower" if "lower" in text else "invalid"


def _tell_number(low: int, said: tuple[Said, ...]) -> str:
    heard = _read_number(low, said)
    if heard.startswith("<number>"):
        return f"Guess my number from {low} to {low + WIDTH - 1}. You have {GUESSES} guesses. Answer with one number."
    return "Answer with a number that you have not tried." if heard == "invalid" else f"My number is {heard}."


def _guess(text: str) -> str | Invalid:
    return f"[{text}]" if text.isdigit() else Invalid(reason="invalid")


def _find_guess(text: str) -> str | Invalid:
    found = next(
        (word for word in text.replace("[", " ").replace("]", " ").split() if word.strip(".,!").isdigit()), None
    )
    return f"[{found.strip('.,!')}]" if found else Invalid(reason="Answer with one number, e.g. 17.")


# The lake


@lru_cache(maxsize=4096)
def find_map(seed: int, split: Split) -> tuple[int, tuple[str, ...]]:
    """The game's own seed and the rows of its map, for the `seed`-th task of a split, of which there are `MAPS`."""
    first = seed % MAPS * 1000
    for own in range(first, first + 1000):
        rows = draw_map(own)
        if (zlib.crc32("".join(rows).encode()) % HELD_OUT == 0) == (split == "eval"):
            return own, rows
    raise AssertionError(f"no {split} map near seed {seed}")


def draw_map(seed: int) -> tuple[str, ...]:
    """Rows of a random map with a way through: S start, F frozen, H hole, G goal."""
    rows: list[str] = import_module("gymnasium.envs.toy_text.frozen_lake").generate_random_map(SIZE, FROZEN, seed=seed)
    return tuple(rows)


@lru_cache(maxsize=2 * MAPS)
def _open_lake(rows: tuple[str, ...], words: Words) -> EnvironmentFactory:
    view = View[Sight, int](read=_read_lake, act=_move) if words == "terse" else View[Sight, int](read=_tell_lake)
    options = {
        "label": "lake",
        "view": view,
        "is_slippery": False,
        "desc": rows,
        "max_episode_steps": MOVES,
    }
    return open_environment("gymnasium", "FrozenLake-v1", options)


def _read_lake(sight: Sight) -> str:
    row, column = divmod(int(sight.observation), SIZE)
    words = f"r{row + 1}c{column + 1} {neighbours(_rows(sight.env), row, column)}"
    return f"<lake> {words}" if sight.env.lastaction is None else words


def _tell_lake(sight: Sight) -> str:
    row, column = divmod(int(sight.observation), SIZE)
    names = {"F": "ice", "H": "a hole", "G": "the goal", "W": "a wall"}
    near = neighbours(_rows(sight.env), row, column)
    around = ", ".join(f"{action}: {names[cell]}" for action, cell in zip(ACTIONS, near, strict=True))
    told = f"Row {row + 1}, column {column + 1}. {around}."
    if sight.env.lastaction is not None:
        return told
    return (
        f"Cross the frozen lake to row {SIZE}, column {SIZE}, around the holes. "
        f"Answer with one word: left, down, right or up. {told}"
    )


def _move(text: str) -> int | Invalid:
    return ACTIONS.index(text) if text in ACTIONS else Invalid(reason="invalid")


def neighbours(rows: tuple[str, ...], row: int, column: int) -> str:
    """What lies to the left, below, to the right and above: F, H, G, or W for a wall."""

    def cell(r: int, c: int) -> str:
        return rows[r][c].replace("S", "F") if 0 <= r < SIZE and 0 <= c < SIZE else "W"

    return "".join(cell(row + down, column + right) for down, right in DELTAS)


def _rows(env: Any) -> tuple[str, ...]:
    return tuple("".join(cell.decode() for cell in row) for row in env.desc)


def _checked(split: str) -> Split:
    for known in SPLITS:
        if split == known:
            return known
    raise RollstreamError(f"option 'split': expected train or eval, found {split!r}")
