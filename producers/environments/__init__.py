"""Environments of public packages, and what it takes to bring your own (docs/environments.md).

open_environment(adapter, name, options)     textarena, reasoning-gym, gymnasium, or "package.module:function"
View, Invalid                                what the agent reads, and how its words become a move
Game, Inline, Threaded                       a game without async, and the two ways to play it
"""

from .catalog import open_environment
from .games import Game, Inline, Threaded
from .options import UnusableEnvironment
from .views import Invalid, View

__all__ = ["Game", "Inline", "Invalid", "Threaded", "UnusableEnvironment", "View", "open_environment"]
