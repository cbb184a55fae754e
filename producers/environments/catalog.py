"""Opening an environment by the name of its adapter, as a configuration file gives it."""

from collections.abc import Callable
from importlib import import_module
from inspect import signature
from typing import cast

from ...schemas.errors import MissingExtra
from ..environment import Environment, EnvironmentFactory
from .options import Options, UnusableEnvironment, resolve_name, unknown_name

_ADAPTERS = {
    "textarena": ("textarena", "arena"),
    "reasoning-gym": ("reasoning_gym", "reasoning"),
    "gymnasium": ("gymnasium", "gym"),
}
"""Adapter -> the package that it adapts, and its module here."""


def open_environment(adapter: str, name: str, options: Options | None = None) -> EnvironmentFactory:
    """A factory of environments; each call of it makes one for one episode.

    `adapter` is "textarena", "reasoning-gym" or "gymnasium", and `name` a game, a dataset or an id of that package; or
    `adapter` is "package.module:function" of your own, which is called as `function(name, **options)` for each episode
    and returns an `Environment`. Options are those of the adapter, of every adapter (docs/environments.md) and of the
    game itself.

    Raises `UnusableEnvironment` for anything unknown or unusable, `MissingExtra` where the package is not installed.
    """
    given = dict(options or {})
    if ":" in adapter:
        return _open_own(adapter, name, given)
    if adapter not in _ADAPTERS:
        raise unknown_name("adapter", adapter, [*_ADAPTERS, "package.module:function"])
    package, module = _ADAPTERS[adapter]
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        raise MissingExtra(f"the adapter {adapter!r}", "envs") from error
    open_game: Callable[[str, Options], EnvironmentFactory] = import_module(f".{module}", __package__).open_game
    return open_game(name, given)


def _open_own(reference: str, name: str, options: dict[str, object]) -> EnvironmentFactory:
    function = resolve_name(reference)
    if not callable(function):
        raise UnusableEnvironment(f"{reference!r}: expected a function that makes an environment, found {function!r}")
    parameters = signature(function).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        for key in options:
            if key not in list(parameters)[1:]:
                raise unknown_name(f"option of {reference}", key, list(parameters)[1:])
    make = cast(Callable[..., Environment], function)
    return lambda: make(name, **options)
