"""Producers: environments, engines, episodes, the worker, the dispatcher. Lazy, so that only what is used is imported.

Add a name in both places: `_HOMES` for the running program, the TYPE_CHECKING block for checkers and editors.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .delivery import Delivery
    from .dispatcher import Dispatcher, Source
    from .engine import Completion, Engine, EngineError, EngineLost, PromptTooLong
    from .engines import open_engine
    from .environment import Action, Environment, EnvironmentFactory, Message, Outcome
    from .environments import Game, Inline, Invalid, Threaded, UnusableEnvironment, View, open_environment
    from .episode import run_episode
    from .evaluation import evaluate_policy
    from .limits import Abort, Gates, Limits
    from .players import Mixture, Part, Player, play_scripted
    from .policy import Policy, PolicyFollower
    from .rendering import Renderer, RenderingError
    from .slots import Slots
    from .worker import Worker, WorkerSettings

_HOMES = {
    "Abort": "limits",
    "Action": "environment",
    "Completion": "engine",
    "Delivery": "delivery",
    "Dispatcher": "dispatcher",
    "Engine": "engine",
    "EngineError": "engine",
    "EngineLost": "engine",
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
    "Policy": "policy",
    "PolicyFollower": "policy",
    "PromptTooLong": "engine",
    "Renderer": "rendering",
    "RenderingError": "rendering",
    "Slots": "slots",
    "Source": "dispatcher",
    "Threaded": "environments",
    "UnusableEnvironment": "environments",
    "View": "environments",
    "Worker": "worker",
    "WorkerSettings": "worker",
    "evaluate_policy": "evaluation",
    "open_engine": "engines",
    "open_environment": "environments",
    "play_scripted": "players",
    "run_episode": "episode",
}

__all__ = [
    "Abort",
    "Action",
    "Completion",
    "Delivery",
    "Dispatcher",
    "Engine",
    "EngineError",
    "EngineLost",
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
    "Policy",
    "PolicyFollower",
    "PromptTooLong",
    "Renderer",
    "RenderingError",
    "Slots",
    "Source",
    "Threaded",
    "UnusableEnvironment",
    "View",
    "Worker",
    "WorkerSettings",
    "evaluate_policy",
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
