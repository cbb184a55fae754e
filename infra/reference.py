"""docs/configuration.md, made of the settings themselves.

python -m rollstream.infra.reference > docs/configuration.md
"""

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from .config import Config
from .sections import find_section, is_table
from .spelling import spell_value

WORDS = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    Path: "path",
    SecretStr: "secret text",
}
OPENING = """\
# Configuration

Settings come from three places, the later ones are stronger:

1. a TOML file: the one given with `--config`, else the one that `ROLLSTREAM_CONFIG` names, else `./rollstream.toml`;
2. environment variables, `ROLLSTREAM_SECTION__KEY`, for instance `ROLLSTREAM_TRAINER__LR=1e-5`,
   `ROLLSTREAM_ENVIRONMENTS__FROZEN_LAKE__RATIO=2` (the environment `frozen-lake`) or
   `ROLLSTREAM_KAFKA__SETTINGS__SASL_PASSWORD=...` (the client setting `sasl.password`);
3. overrides of one command: `--set trainer.lr=1e-5`.

Where none of them sets `kafka.bootstrap`, `store.url` or `store.bucket`, those of the local stack are taken
(`./.rollstream/rollstream.toml`, written by `rollstream up`). Paths are relative to the working directory. An unknown
key or a value of the wrong type ends the command with a message that names the place and the key.

This page is generated from the settings themselves: `python -m rollstream.infra.reference > docs/configuration.md`.
"""


def render_reference(root: type[BaseModel]) -> str:
    """docs/configuration.md for these settings."""
    return "\n".join([OPENING, *_section_lines(root, ())])


def _section_lines(section: type[BaseModel], above: tuple[str, ...]) -> Iterator[str]:
    nested = {name: field for name, field in section.model_fields.items() if find_section(field.annotation)}
    plain = {name: field for name, field in section.model_fields.items() if name not in nested}
    if above:
        yield f"## [{'.'.join(above)}]\n\n{inspect.getdoc(section)}\n"
    if plain:
        yield "| key | type | default | meaning |\n| --- | --- | --- | --- |"
        yield from (_row(name, field) for name, field in plain.items())
        yield ""
    for name, field in nested.items():
        inner = find_section(field.annotation)
        assert inner is not None
        yield from _section_lines(inner, (*above, name, "NAME") if is_table(field.annotation) else (*above, name))


def _row(name: str, field: FieldInfo) -> str:
    default = "required" if field.is_required() else _default(name, field)
    return f"| `{name}` | {_type(field.annotation)} | {default} | {' '.join((field.description or '').split())} |"


def _default(name: str, field: FieldInfo) -> str:
    value = field.default
    plain = list(cast(tuple[object, ...], value)) if isinstance(value, tuple) else value
    plain = str(plain) if isinstance(plain, Path) else plain
    return "" if plain is None or plain == {} else f"`{spell_value(name, plain)}`"


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin is Annotated:
        return _type(arguments[0])
    if origin is tuple:
        return f"[{', '.join(_type(argument) for argument in arguments)}]"
    if is_table(annotation):
        return "table"
    chosen = [argument for argument in arguments if argument is not type(None)]
    return _type(chosen[0]) if chosen else WORDS[annotation]


if __name__ == "__main__":
    sys.stdout.write(render_reference(Config))
