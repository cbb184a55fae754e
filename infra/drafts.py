"""A configuration while it is put together: plain values by key, and for each where it came from."""

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from ..schemas.errors import RollstreamError

Key = tuple[str, ...]
Table = dict[str, Any]

SETTINGS: Key = ("kafka", "settings")
"""Names of client settings have dots in them: below here a key is one name, whatever its parts."""


class ConfigError(RollstreamError):
    """A mistake in the configuration: where it stands, its key, what was expected."""


class Origin(NamedTuple):
    """Where a value came from."""

    place: str
    text: str | None = None
    """What it was read from where that was plain text: it may be meant literally."""


class Draft:
    """Layers laid over each other; what is read later is stronger."""

    def __init__(self) -> None:
        self._values: Table = {}
        self._origins: dict[Key, Origin] = {}

    def read_file(self, path: Path) -> None:
        """Raises `ConfigError` where there is no such file or it is not TOML."""
        try:
            table = tomllib.loads(path.read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: expected a configuration file, found: {error}") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path}: expected TOML, found: {error}") from error
        for key, value in _leaves(table):
            self._put(_joined(key), value, Origin(str(path)))

    def read_environment(self, environ: Mapping[str, str], *, sections: Iterable[str]) -> None:
        """Take every ROLLSTREAM_SECTION__KEY. Raises `ConfigError` for one that only looks like it."""
        names = tuple(sections)
        for variable, text in sorted(environ.items()):
            name = variable.removeprefix("ROLLSTREAM_").lower()
            if not variable.startswith("ROLLSTREAM_"):
                continue
            if "__" in name:
                self._put_text(_spelled(tuple(name.split("__"))), text, f"environment variable {variable}")
            elif meant := [section for section in names if name.startswith(f"{section}_")]:
                fixed = f"ROLLSTREAM_{meant[0]}__{name[len(meant[0]) + 1 :]}".upper()
                raise ConfigError(f"environment variable {variable}: expected two _ after the section: {fixed}")

    def read_override(self, override: str) -> None:
        """Take one `section.key=value`."""
        name, equals, text = override.partition("=")
        key = tuple(part.strip() for part in name.split("."))
        if not equals or len(key) < 2 or not all(key):
            # What follows the = may be a secret.
            raise ConfigError(f"--set {name}: expected section.key=value, for instance trainer.lr=1e-5")
        self._put_text(_joined(key), text.strip(), "--set")

    def has(self, key: Key) -> bool:
        """Whether a value was read for this key."""
        return key in self._origins

    def take_literally(self, keys: Iterable[Key]) -> bool:
        """Take the text itself where a value read from text does not fit. Returns whether anything changed."""
        changed = False
        for key in keys:
            found = self.origin(key)
            if found is not None and found[1].text is not None and self._look_up(found[0]) != found[1].text:
                self._put(found[0], found[1].text, found[1])
                changed = True
        return changed

    def origin(self, key: Key) -> tuple[Key, Origin] | None:
        """Where the value at this key, or around it, or below it, came from."""
        around = (key[:length] for length in range(len(key), 0, -1))
        below = (other for other in self._origins if other[: len(key)] == key)
        for candidate in (*around, *below):
            if candidate in self._origins:
                return candidate, self._origins[candidate]
        return self.origin(key[:-1]) if len(key) > 1 else None

    def to_json(self) -> str:
        return json.dumps(self._values, default=str)

    def _put_text(self, key: Key, text: str, place: str) -> None:
        value = text if key[:2] == SETTINGS else _parsed(text)
        self._put(key, value, Origin(place, text))

    def _put(self, key: Key, value: object, origin: Origin) -> None:
        table = self._values
        for depth, part in enumerate(key[:-1], 1):
            inner = table.setdefault(part, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"{origin.place}: {'.'.join(key[:depth])} is a value already, expected a section")
            table = cast(Table, inner)
        table[key[-1]] = value
        self._origins = {other: at for other, at in self._origins.items() if other[: len(key)] != key}
        self._origins[key] = origin

    def _look_up(self, key: Key) -> object:
        value: Any = self._values
        for part in key:
            value = value[part]
        return value


def _leaves(table: Table, above: Key = ()) -> Iterator[tuple[Key, object]]:
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from _leaves(cast(Table, value), (*above, name))
        else:
            yield (*above, name), value


def _joined(key: Key) -> Key:
    return (*SETTINGS, ".".join(key[2:])) if key[:2] == SETTINGS and len(key) > 2 else key


def _spelled(key: Key) -> Key:
    """Variables have no dots and dashes; client settings have dots, environments dashes."""
    if key[:2] == SETTINGS:
        return _joined(tuple(part.replace("_", ".") for part in key) if len(key) > 2 else key)
    if key[0] == "environments" and len(key) > 1:
        return ("environments", key[1].replace("_", "-"), *key[2:])
    return key


def _parsed(text: str) -> object:
    """The TOML value that the text spells, else the text."""
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return table["value"] if len(table) == 1 else text
