"""Gymnasium environments (https://gymnasium.farama.org) with discrete actions: `open_environment("gymnasium", ...)`.

The reward of an episode is the sum of its steps' rewards. An environment goes back to a shelf for the next episode,
since making one takes up to milliseconds and `reset(seed=...)` makes it new; one that raised does not.
"""

import inspect
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol, cast

import numpy as np

from ..environment import Action, EnvironmentFactory, Outcome
from .games import host_game
from .options import (
    Common,
    Options,
    UnusableEnvironment,
    check_options,
    read_common,
    read_option,
    refuse_payload,
    resolve_name,
    tell_version,
    unknown_name,
)
from .views import Invalid, Referee, open_talk, say_text

_OPTIONS = ("actions", "random_map", "frozen", "max_episode_steps")

_ACTIONS = {
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
    "CartPole": ("left", "right"),
}
"""Start of an environment's id -> what its actions are called."""

_COLOUR = re.compile("\x1b\\[[0-9;]*m(.*?)\x1b\\[0m", re.DOTALL)


class _Gym(Protocol):
    """A Gymnasium environment, in its own terms."""

    action_space: Any
    metadata: Mapping[str, Any]
    unwrapped: Any

    def reset(self, *, seed: int) -> tuple[Any, Mapping[str, Any]]: ...

    def step(self, action: int) -> tuple[Any, Any, bool, bool, Mapping[str, Any]]: ...

    def render(self) -> Any: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What a view's `read` gets."""

    observation: Any
    """As the environment gave it."""
    actions: tuple[str, ...]
    """Names of the actions that may be taken now."""
    info: Mapping[str, Any]
    env: Any
    """The bare environment, to look deeper (e.g. `sight.env.desc` of FrozenLake)."""
    draw: Callable[[], str]
    """Draws the board, if the environment can do so in text; "" otherwise."""


@dataclass(slots=True)
class _Shelf:
    """Environments between two episodes."""

    make: Callable[[], _Gym]
    spare: list[_Gym] = field(default_factory=list[_Gym])
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self) -> _Gym:
        with self.lock:
            if self.spare:
                return self.spare.pop()
        return self.make()

    def put(self, gym: _Gym) -> None:
        with self.lock:
            self.spare.append(gym)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kit:
    """What all episodes of one factory share."""

    common: Common
    names: tuple[str, ...]
    """Of the actions, in order."""
    first: int
    """Number of the first action."""
    shelf: _Shelf
    make_map: Callable[[int], _Gym] | None
    """Makes an environment with a map of its own for a seed."""


def open_game(name: str, options: Options) -> EnvironmentFactory:
    """A factory of one Gymnasium environment. Raises `UnusableEnvironment`.

    Options: `actions` (names for the actions, in order), `random_map` (FrozenLake: the side of a map that each seed
    draws anew, 0 for the fixed one) with `frozen` (the share of safe cells), `max_episode_steps`, the common ones, and
    whatever the environment's class takes, e.g. `is_slippery`.
    """
    parameters = _find_parameters(name)
    check_options(name, options, {*_OPTIONS, *parameters} - {"render_mode"})
    settings = {key: value for key, value in options.items() if key in {*parameters, "max_episode_steps"}}
    make = _choose_make(name, settings)
    shelf = _Shelf(make)
    gym = shelf.take()
    space, kinds = gym.action_space, import_module("gymnasium.spaces")
    if not isinstance(space, kinds.Discrete):
        raise UnusableEnvironment(f"{name!r}: expected a discrete action space, found {space}")
    shelf.put(gym)
    kit = _Kit(
        common=read_common(name, options, threads=False),
        names=_name_actions(name, options, int(space.n)),
        first=int(space.start),
        shelf=shelf,
        make_map=_plan_maps(options, parameters, make),
    )
    return host_game(lambda: GymGame(kit), threads=kit.common.threads)


class GymGame:
    """One Gymnasium environment as a `Game`."""

    def __init__(self, kit: _Kit) -> None:
        self.name = kit.common.label
        self.version = tell_version("gymnasium")
        self._kit = kit
        self._gym: _Gym | None = None
        self._sound = True
        self._read: Callable[[Sight], str] = kit.common.view.read or read_sight
        self._act: Callable[[str], int | Invalid] = kit.common.view.act or self._find_action

    def reset(self, payload: Mapping[str, str], seed: int) -> Outcome:
        refuse_payload(payload)
        kit = self._kit
        self._gym = kit.make_map(seed) if kit.make_map else kit.shelf.take()
        self._referee = Referee(kit.common.rules)
        self._total = 0.0
        # Until it has answered; one that did not may be in any state.
        self._sound = False
        observation, info = self._gym.reset(seed=seed)
        self._sound = True
        return Outcome(messages=open_talk(kit.common.system, self._look(self._gym, observation, info)))

    def step(self, action: Action) -> Outcome:
        if self._gym is None:
            raise RuntimeError("expected reset before step")
        move = self._act(action.text)
        if isinstance(move, Invalid):
            return self._referee.refuse_move(move)
        self._sound = False
        observation, reward, terminated, truncated, info = self._gym.step(move)
        self._sound = True
        reward = float(reward)
        self._total += reward
        if terminated or truncated:
            text = f"The episode is over. Return: {self._total:g}"
            return self._referee.end_game(self._total, text=text, truncated=not terminated, step_reward=reward)
        return Outcome(messages=(say_text(self._look(self._gym, observation, info)),), step_reward=reward)

    def close(self) -> None:
        gym, self._gym = self._gym, None
        if gym is None:
            return
        if self._sound and self._kit.make_map is None:
            self._kit.shelf.put(gym)
        else:
            gym.close()

    def _look(self, gym: _Gym, observation: Any, info: Mapping[str, Any]) -> str:
        names, mask = self._kit.names, info.get("action_mask")
        legal = names if mask is None else tuple(name for name, on in zip(names, mask, strict=True) if on)
        board = _choose_drawing(gym)
        return self._read(Sight(observation=observation, actions=legal, info=info, env=gym.unwrapped, draw=board))

    def _find_action(self, text: str) -> int | Invalid:
        """The default move: the last action that the text names, or its number."""
        names, first = self._kit.names, self._kit.first
        known = {name.lower(): first + index for index, name in enumerate(names)}
        known |= {str(first + index): first + index for index in range(len(names))}
        for word in reversed(re.findall(r"[\w-]+", text.lower())):
            if word in known:
                return known[word]
        return Invalid(reason=f"No action found in your answer. Actions: {', '.join(names)}")


def read_sight(sight: Sight) -> str:
    """The default view: the board where there is one, the observation, the actions."""
    board = sight.draw()
    lines = [board] if board else []
    return "\n".join([*lines, f"Observation: {_tell_value(sight.observation)}", f"Actions: {', '.join(sight.actions)}"])


def _find_parameters(name: str) -> set[str]:
    gymnasium = import_module("gymnasium")
    try:
        entry = gymnasium.spec(name).entry_point
    except gymnasium.error.Error as error:
        raise unknown_name("environment of gymnasium", name, sorted(gymnasium.registry)) from error
    factory: Any = resolve_name(entry) if isinstance(entry, str) else entry
    return set(inspect.signature(factory).parameters)


def _choose_make(name: str, settings: Mapping[str, Any]) -> Callable[..., _Gym]:
    """How to make it: drawing in text, where it can."""
    gymnasium = import_module("gymnasium")

    def make(**more: Any) -> _Gym:
        gym: _Gym = gymnasium.make(name, disable_env_checker=True, **{**settings, **more})
        return gym

    def make_drawing(**more: Any) -> _Gym:
        return make(render_mode="ansi", **more)

    try:
        modes = make().metadata.get("render_modes", ())
    except (gymnasium.error.Error, TypeError, ValueError, AssertionError, ImportError) as error:
        raise UnusableEnvironment(f"{name!r} cannot be made with {dict(settings)}: {error}") from error
    return make_drawing if "ansi" in modes else make


def _plan_maps(options: Options, parameters: set[str], make: Callable[..., _Gym]) -> Callable[[int], _Gym] | None:
    size = read_option(options, "random_map", int, 0)
    frozen = read_option(options, "frozen", float, 0.8)
    if size == 0:
        return None
    if not {"desc", "map_name"} <= parameters or {"desc", "map_name"} & set(options):
        raise UnusableEnvironment("option 'random_map': expected FrozenLake without a 'desc' or 'map_name' of its own")
    # Maps are drawn until one has a way to the goal; with fewer safe cells than 0.59 large ones never have.
    if size < 2 or not 0.6 <= frozen <= 1:
        raise UnusableEnvironment(f"expected random_map >= 2 and 0.6 <= frozen <= 1, found {size} and {frozen}")
    draw_map = import_module("gymnasium.envs.toy_text.frozen_lake").generate_random_map
    return lambda seed: make(desc=draw_map(size=size, p=frozen, seed=seed))


def _name_actions(name: str, options: Options, count: int) -> tuple[str, ...]:
    default = next((names for start, names in _ACTIONS.items() if name.startswith(start)), ())
    if len(default) != count:
        default = tuple(str(number) for number in range(count))
    given: Any = options.get("actions", default)
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise UnusableEnvironment(f"option 'actions': expected {count} names, found {given!r}")
    names = tuple(str(each) for each in cast(Sequence[object], given))
    if len(names) != count:
        raise UnusableEnvironment(f"option 'actions': expected {count} names, found {len(names)}: {', '.join(names)}")
    return names


def _choose_drawing(gym: _Gym) -> Callable[[], str]:
    if "ansi" not in gym.metadata.get("render_modes", ()):
        return lambda: ""
    return lambda: _COLOUR.sub(r"[\1]", str(gym.render())).strip("\n")


def _tell_value(value: Any) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(_tell_value(part) for part in cast(tuple[object, ...], value)) + ")"
    return str(np.asarray(value).tolist())
