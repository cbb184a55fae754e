"""Each game of textarena draws from a generator of its own.

textarena's games draw from the global `random`, and their reset seeds it: parallel episodes would spoil one another's
games, and the caller's random numbers too. Saving and restoring the global state around each call costs 26 us (the
state is 2.5 KB) and protects from no other thread. Instead the name `random` inside textarena's modules is bound to a
stand-in, which passes everything on to the generator of the game that this thread is playing, or else to the real
module.
"""

import random
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


class _Playing(threading.local):
    """The generator of the game that this thread is in, if it is in one."""

    generator: random.Random | None = None


class _StandIn:
    """Acts as the module `random`."""

    def __getattr__(self, name: str) -> Any:
        generator = _playing.generator
        return getattr(generator if hasattr(generator, name) else random, name)


_playing = _Playing()
_stand_in = _StandIn()


def isolate_modules(package: str) -> None:
    """Bind `random` to the stand-in in all modules of `package` that are loaded now."""
    for name, module in list(sys.modules.items()):
        if name.split(".", 1)[0] == package and vars(module).get("random") is random:
            vars(module)["random"] = _stand_in


def draw_from(generator: random.Random, call: Callable[[], Result]) -> Result:
    """What `call` returns, with `generator` as the source of randomness of every isolated module in this thread."""
    outer, _playing.generator = _playing.generator, generator
    try:
        return call()
    finally:
        _playing.generator = outer
