"""An Avro schema as plain data: read from its text, looked into, and refused where reading by it could be made to hurt.

Schemas also come from outside (a registry, the topic `rollstream.schemas`), and a decoder believes its schema: a
recursive type lets 200 KB of bytes overflow the C stack, an array of nulls lets four bytes ask for 2**31 items.
"""

import json
from collections.abc import Iterator
from typing import Any, TypeAlias, cast

import fastavro

from .errors import UnknownSchema

Avro = str | list[Any] | dict[str, Any]
"""A schema, or a part of one: a name, a union, or a definition."""
Json: TypeAlias = "str | float | bool | list[Json] | dict[str, Json] | None"

PARTS = 4096
"""Most parts that a schema may have, with every named type written out where it is used."""
DEPTH = 32
TEXT = 1 << 20
"""Most characters of a schema's text."""

_WIDTHS = {"null": 0, "boolean": 1, "int": 1, "long": 1, "float": 4, "double": 8, "bytes": 1, "string": 1}
"""Fewest bytes that a value of each primitive type takes."""


def parse_text(text: str) -> dict[str, Any]:
    """The record schema in this text, names written out in full, safe to decode by. Raises `UnknownSchema`."""
    if len(text) > TEXT:
        raise UnknownSchema(f"expected a schema of at most {TEXT} characters, found {len(text)}")
    try:
        parsed = fastavro.parse_schema(cast(Avro, _plain(json.loads(text))))
        _Measure(parsed).width(parsed)
    except UnknownSchema:
        raise
    except Exception as error:  # whatever a foreign text provokes in two parsers comes to the same: it is no schema
        raise UnknownSchema(f"expected an Avro schema, found {text[:80]!r}: {type(error).__name__}: {error}") from error
    if not isinstance(parsed, dict) or parsed["type"] != "record":
        raise UnknownSchema(f"expected the schema of a record, found {text[:80]!r}")
    return parsed


def _plain(schema: Json) -> Json:
    """Without logical types, which would turn a long into a datetime; who ignores them reads what lies beneath."""
    if isinstance(schema, list):
        return [_plain(part) for part in schema]
    if isinstance(schema, dict):
        return {key: _plain(part) for key, part in schema.items() if key != "logicalType"}
    return schema


def definitions(schema: Avro) -> dict[str, dict[str, Any]]:
    """The named types defined anywhere in it, by full name."""
    return {found["name"]: found for found in _defined(schema)}


def _defined(schema: Avro) -> Iterator[dict[str, Any]]:
    if isinstance(schema, list):
        for branch in schema:
            yield from _defined(branch)
    elif isinstance(schema, dict):
        if "name" in schema:
            yield schema
        for child in children(schema):
            yield from _defined(child)


def children(schema: dict[str, Any]) -> list[Avro]:
    """The schemas directly inside a definition."""
    match schema["type"]:
        case "record" | "error":
            return [field["type"] for field in schema["fields"]]
        case "array":
            return [schema["items"]]
        case "map":
            return [schema["values"]]
        case str():
            return []
        case inner:
            return [inner]


class _Measure:
    """Walks a schema with every name followed, and refuses recursion, items without width, and too many parts."""

    def __init__(self, schema: Avro) -> None:
        self._names = definitions(schema)
        self._open: list[str] = []
        self._parts = 0

    def width(self, schema: Avro, depth: int = 0) -> int:
        """Fewest bytes that a value takes."""
        self._parts += 1
        if self._parts > PARTS or depth > DEPTH:
            raise UnknownSchema(f"expected a schema of at most {PARTS} parts, {DEPTH} deep, found a larger one")
        if isinstance(schema, list):
            return 1 + min(self.width(branch, depth + 1) for branch in schema)
        if isinstance(schema, str):
            return _WIDTHS[schema] if schema in _WIDTHS else self._named(self._names[schema], depth)
        return self._named(schema, depth) if "name" in schema else self._anonymous(schema, depth)

    def _named(self, schema: dict[str, Any], depth: int) -> int:
        name = schema["name"]
        if name in self._open:
            raise UnknownSchema(f"expected no recursive types, found {' > '.join([*self._open, name])}")
        if schema["type"] == "fixed":
            return int(schema["size"])
        if schema["type"] == "enum":
            return 1
        self._open.append(name)
        width = sum(self.width(child, depth + 1) for child in children(schema))
        self._open.pop()
        return width

    def _anonymous(self, schema: dict[str, Any], depth: int) -> int:
        kind = schema["type"]
        widths = [self.width(child, depth + 1) for child in children(schema)]
        if kind == "array" and widths == [0]:
            raise UnknownSchema("expected array items of at least one byte, found items that take none")
        if kind in ("array", "map"):
            return 1
        return widths[0] if widths else _WIDTHS[kind]
