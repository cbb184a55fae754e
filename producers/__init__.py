"""Producers: environments, engines, episodes, the worker, the dispatcher. Lazy, so that only what is used is imported.

Add a name in both places: `_HOMES` for the running program, the TYPE_CHECKING block for checkers and editors.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine import Completion, Engine, EngineError, PromptTooLong
    from .engines import open_engine
    from .environment import Action, Environment, EnvironmentFactory, Message, Outcome
    from .environments import Game, Inline, Invalid, Threaded, UnusableEnvironment, View, open_environment
    from .episode import run_episode
    from .limits import Abort, Gates, Limits
    from .players import Mixture, Part, Player, play_scripted
    from .rendering import Renderer, RenderingError

_HOMES = {
    "Abort": "limits",
    "Action": "environment",
    "Completion": "engine",
    "Engine": "engine",
    "EngineError": "engine",
    "Environment": "environment",
    "EnvironmentFactory": "environment",
    "Game": "environments",
    "Gates": "limits",
    "Inline": "environments",
    "Invalid": "environments",
    "Limits": "limits",
    "Message": "environment",
    "Mixture": "players",
    "Outcome": "environment",
    "Part": "players",
    "Player": "players",
    "PromptTooLong": "engine",
    "Renderer": "rendering",
    "RenderingError": "rendering",
    "Threaded": "environments",
    "UnusableEnvironment": "environments",
    "View": "environments",
    "open_engine": "engines",
    "open_environment": "environments",
    "play_scripted": "players",
    "run_episode": "episode",
}

__all__ = [
    "Abort",
    "Action",
    "Completion",
    "Engine",
    "EngineError",
    "Environment",
    "EnvironmentFactory",
    "Game",
    "Gates",
    "Inline",
    "Invalid",
    "Limits",
    "Message",
    "Mixture",
    "Outcome",
    "Part",
    "Player",
    "PromptTooLong",
    "Renderer",
    "RenderingError",
    "Threaded",
    "UnusableEnvironment",
    "View",
    "open_engine",
    "open_environment",
    "play_scripted",
    "run_episode",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
