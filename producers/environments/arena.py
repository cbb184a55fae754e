"""Single-player games of textarena (https://github.com/LeonGuertler/TextArena): `open_environment("textarena", ...)`.

What the package does in its own way, and what is made of it here:

- A game draws from the global `random`: each has its own generator here (chance.py), and is built anew for each
  episode, since some draw while they are built. A seed gives the same game as it does in the package.
- The plain ids keep text from before the reset: the "-raw" game is taken, whichever was asked for.
- A lost game still pays a part, 0.9 for a near guess: the reward here is 1 for a win and 0 otherwise, unless
  `reward="native"`. The game's own reward stands in the metrics as `native_reward`.
- The first invalid move in a row is forgiven by the game and costs no turn; `max_turns=N` gives N + 1 turns.
- Games that download word lists or ask a model over the network are refused.
"""

import inspect
import random
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ..environment import Action, EnvironmentFactory, Outcome
from .chance import draw_from, isolate_modules
from .games import host_game
from .options import (
    Common,
    Options,
    UnusableEnvironment,
    check_options,
    read_common,
    read_option,
    refuse_payload,
    tell_version,
    unknown_name,
)
from .views import Invalid, Referee, open_talk, say_text

_OPTIONS = ("reward",)

_NETWORK = {
    "nltk": "downloads word lists when it is loaded",
    "EnglishDictionary": "downloads word lists when it is loaded",
    "OpenRouter": "asks a language model over the network",
}
"""A word in a game's source -> why it cannot be played here."""

_GAME = -1
"""Sender of what a game says; some games get the other fields of their echo wrong."""

_SLOW = ("RushHour", "Set", "Sokoban", "Sudoku")
"""Games that take milliseconds to seconds to lay out."""


class Said(NamedTuple):
    """Something that the game told the player; a view's `read` gets a tuple of what is new."""

    kind: str
    """textarena's observation type: PROMPT, GAME_BOARD, GAME_MESSAGE, GAME_ACTION_DESCRIPTION or GAME_ADMIN."""
    text: str


class _Arena(Protocol):
    """A game of textarena, in its own terms."""

    def reset(self, num_players: int, seed: int) -> None: ...

    def step(self, action: str) -> tuple[bool, Mapping[str, Any]]: ...

    def get_observation(self) -> tuple[int, list[tuple[int, str, Any]]]: ...

    def close(self) -> tuple[Mapping[int, Any] | None, Mapping[int, Mapping[str, Any]]]: ...


def open_game(name: str, options: Options) -> EnvironmentFactory:
    """A factory of one textarena game. Raises `UnusableEnvironment`.

    Options: `reward` ("win" or "native"), the common ones, and whatever the game's class takes, e.g. `max_turns`.
    """
    identity = name if name.endswith("-raw") else f"{name}-raw"
    spec = _find_spec(name, identity)
    game = _load_class(name, spec.entry_point)
    parameters = set(inspect.signature(game).parameters)
    check_options(name, options, {*_OPTIONS, *parameters})
    common = read_common(name, options, threads=any(slow in spec.entry_point for slow in _SLOW))
    reward = read_option(options, "reward", str, "win")
    if reward not in ("win", "native"):
        raise UnusableEnvironment(f"option 'reward': expected 'win' or 'native', found {reward!r}")
    settings = {key: value for key, value in options.items() if key in parameters}
    make = import_module("textarena").make
    return host_game(
        lambda: ArenaGame(common, lambda: make(identity, **settings), native=reward == "native"),
        threads=common.threads,
    )


class ArenaGame:
    """One textarena game as a `Game`."""

    def __init__(self, common: Common, make: Callable[[], _Arena], *, native: bool) -> None:
        self.name = common.label
        self.version = tell_version("textarena")
        self._common = common
        self._make = make
        self._native = native
        self._read: Callable[[tuple[Said, ...]], str] = common.view.read or read_said
        self._act: Callable[[str], str | Invalid] = common.view.act or bracket_words

    def reset(self, payload: Mapping[str, str], seed: int) -> Outcome:
        refuse_payload(payload)
        self._generator = random.Random(seed)
        self._referee = Referee(self._common.rules)
        said = draw_from(self._generator, lambda: self._begin(seed))
        return Outcome(messages=open_talk(self._common.system, self._read(said)))

    def step(self, action: Action) -> Outcome:
        move = self._act(action.text)
        if isinstance(move, Invalid):
            return self._referee.refuse_move(move)
        done, _ = draw_from(self._generator, lambda: self._arena.step(move))
        if done:
            return self._finish()
        return Outcome(messages=(say_text(self._read(self._listen())),))

    def close(self) -> None:
        """Nothing to release."""

    def _begin(self, seed: int) -> tuple[Said, ...]:
        self._arena = self._make()
        self._arena.reset(num_players=1, seed=seed)
        return self._listen()

    def _listen(self) -> tuple[Said, ...]:
        """What the game said since the last time, without its echo of the player's words."""
        _, observation = self._arena.get_observation()
        return tuple(Said(kind.name, text) for sender, text, kind in observation if sender == _GAME)

    def _finish(self) -> Outcome:
        rewards, info = self._arena.close()
        if rewards is None:
            raise RuntimeError("expected rewards from a game that is over, found None")
        invalid, paid = bool(info[0]["invalid_move"]), rewards[0]
        # Three games give the reward and the reason of an invalid move the wrong way round.
        native = 0.0 if invalid and isinstance(paid, str) else float(paid)
        won = native >= 1 and not invalid
        return self._referee.end_game(
            native if self._native else float(won),
            text=str(info[0].get("reason") or ""),
            metrics={"native_reward": native},
        )


def read_said(said: tuple[Said, ...]) -> str:
    """The default view: everything that was said, a paragraph each."""
    return "\n\n".join(text.strip() for _, text in said)


def bracket_words(text: str) -> str | Invalid:
    """The default move: the agent's words, in the brackets that most games look for if it has written none."""
    return text if "[" in text or "]" in text else f"[{text}]"


def _find_spec(name: str, identity: str) -> Any:
    registry: Mapping[str, Any] = import_module("textarena.envs.registration").ENV_REGISTRY
    if identity not in registry:
        if identity.removesuffix("-raw").removesuffix("-train") + "-raw" in registry:
            raise UnusableEnvironment(
                f"{name!r} is a wrapped form; ask for {name.removesuffix('-train')!r}, and give a view"
            )
        raise unknown_name("game of textarena", name, (i.removesuffix("-raw") for i in registry if i.endswith("-raw")))
    return registry[identity]


def _load_class(name: str, entry: str) -> Any:
    """The game's class, once it is sure that loading it reaches for no network."""
    module, _, attribute = entry.partition(":")
    folder = Path(str(import_module("textarena").__file__)).parent.joinpath(*module.split(".")[1:-1])
    sources = [path.read_text(encoding="utf-8") for path in folder.rglob("*.py") if not path.name.startswith("test")]
    for word, reason in _NETWORK.items():
        if any(word in source for source in sources):
            raise UnusableEnvironment(f"{name!r} {reason}; choose a game that needs no network")
    if not any("SinglePlayerState" in source for source in sources):
        raise UnusableEnvironment(f"{name!r} is for several players; only single-player games are supported")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, SyntaxError, AttributeError) as error:
        raise UnusableEnvironment(f"{name!r} cannot be loaded by this Python: {error}") from error
    isolate_modules("textarena")
    return found
