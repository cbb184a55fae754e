"""The options that every adapter understands, and how a mistake in one is told.

Options come from a configuration file or from code, so they are plain values; a `view` may also be a reference
("package.module:name") to one.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import version
from typing import Any, TypeVar

from ...schemas.errors import RollstreamError
from .views import Rules, View

Options = Mapping[str, object]
Value = TypeVar("Value")

COMMON = ("label", "system", "view", "forgive", "penalty", "threads")


class UnusableEnvironment(RollstreamError):
    """An environment cannot be opened as asked: an unknown game or option, a wrong value, a need for the network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """What every adapter is told."""

    label: str
    """The environment's name on records and topics, [a-z0-9-]+."""
    system: str
    """A system message before the opening; "" for none."""
    view: View[Any, Any]
    rules: Rules
    threads: bool
    """Each call runs in a thread of its own, rather than on the event loop."""


def read_common(name: str, options: Options, *, threads: bool) -> Common:
    """The common options, with `threads` as the default of that option. Raises `UnusableEnvironment`."""
    label = read_option(options, "label", str, re.sub("[^a-z0-9]+", "-", name.lower()).strip("-"))
    if not re.fullmatch("[a-z0-9-]+", label):
        raise UnusableEnvironment(f"option 'label': expected letters a-z, digits and '-', found {label!r}")
    return Common(
        label=label,
        system=read_option(options, "system", str, ""),
        view=_read_view(options.get("view", View[Any, Any]())),
        rules=Rules(
            forgive=read_option(options, "forgive", int, 0),
            penalty=read_option(options, "penalty", float, 0.0),
        ),
        threads=read_option(options, "threads", bool, threads),
    )


def read_option(options: Options, key: str, kind: type[Value], default: Value) -> Value:
    """One option as a value of `kind` (a whole number passes for a float). Raises `UnusableEnvironment`."""
    value = _widen_number(options.get(key, default), kind)
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise UnusableEnvironment(f"option {key!r}: expected {kind.__name__}, found {value!r}")


def check_options(what: str, options: Options, known: Iterable[str]) -> None:
    """Raises `UnusableEnvironment` for the first option that `what` does not have."""
    names = sorted({*known, *COMMON})
    for key in options:
        if key not in names:
            raise unknown_name(f"option of {what}", key, names)


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UnusableEnvironment:
    """The error for a name that is not among `known`, with what was probably meant."""
    names = list(known)
    folded = {known_name.lower(): known_name for known_name in names}
    near = [folded[match] for match in difflib.get_close_matches(name.lower(), folded, n=3)]
    if near:
        hint = "did you mean " + " or ".join(repr(match) for match in near) + "?"
    else:
        shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
        hint = f"there are {shown}" if names else "there are none"
    return UnusableEnvironment(f"unknown {kind}: {name!r}; {hint}")


def resolve_name(reference: str) -> object:
    """What "package.module:name" names. Raises `UnusableEnvironment` where there is no such thing."""
    module, _, name = reference.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UnusableEnvironment(f"{reference!r} names nothing (expected 'package.module:name'): {error}") from error


def refuse_payload(payload: Mapping[str, str]) -> None:
    """Raise for a task's payload where the seed and the options say all."""
    if payload:
        raise UnusableEnvironment(f"expected a task without payload, found {dict(payload)}; use the options")


@cache
def tell_version(package: str) -> str:
    """Package and version, for the records. Kept: looking it up takes a millisecond."""
    return f"{package}-{version(package)}"


def _widen_number(value: object, kind: type[Any]) -> object:
    return float(value) if kind is float and type(value) is int else value


def _read_view(value: object) -> View[Any, Any]:
    found = resolve_name(value) if isinstance(value, str) else value
    if not isinstance(found, View):
        raise UnusableEnvironment(f"option 'view': expected a View, or 'package.module:name' of one, found {found!r}")
    return found  # pyright: ignore[reportUnknownVariableType]
