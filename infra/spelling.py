"""Settings spelled as TOML, secrets hidden."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

from .sections import is_secret

HIDDEN = "***"


def render_settings(values: Mapping[str, Any]) -> str:
    """Settings as TOML, secrets hidden; what is not set is a comment."""
    return "\n".join(_table_lines(values, ())).lstrip("\n") + "\n"


def _table_lines(table: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[str]:
    inner: dict[str, Any] = {name: value for name, value in table.items() if isinstance(value, dict)}
    plain = {name: value for name, value in table.items() if name not in inner}
    if above and (plain or not inner):
        yield f"\n[{'.'.join(_bare(name) for name in above)}]"
    for name, value in plain.items():
        yield f"# {_bare(name)} is not set" if value is None else f"{_bare(name)} = {spell_value(name, value)}"
    for name, value in inner.items():
        yield from _table_lines(value, (*above, name))


def _bare(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() else json.dumps(name)


def spell_value(name: str, value: object) -> str:
    """One value; `name` says whether it is a secret."""
    if is_secret(name):
        return json.dumps(HIDDEN)
    if isinstance(value, dict):
        items = cast(dict[str, object], value).items()
        return "{ " + ", ".join(f"{_bare(key)} = {spell_value(key, inner)}" for key, inner in items) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(spell_value(name, item) for item in cast(list[object], value)) + "]"
    return json.dumps(value, ensure_ascii=False)
