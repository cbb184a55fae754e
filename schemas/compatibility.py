"""Whether data written by one Avro schema can be read by another, by the resolution rules of the specification.

The log keeps old offsets, and old workers write beside new ones, so every two versions of a record ever shipped must
read each other's data (FULL_TRANSITIVE). These checks look at schemas alone and touch no data.

Reference: Apache Avro 1.12 specification, "Schema Resolution".
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from .shape import Avro, definitions, parse_text

_PROMOTIONS = {
    ("int", "long"),
    ("int", "float"),
    ("int", "double"),
    ("long", "float"),
    ("long", "double"),
    ("float", "double"),
    ("string", "bytes"),
}
"""(written, read) pairs of different types that resolve whatever the value; not all bytes are a string."""


_KEEP = "keep the type that was shipped, and give what is new a field of its own, with a default"


class Problem(NamedTuple):
    """One thing that a reader cannot make of what was written. Renders itself."""

    found: str
    """Where, and what."""
    advice: str
    """What to do instead."""

    def __str__(self) -> str:
        return self.found


def full_problems(first: str, second: str, names: tuple[str, str] = ("first", "second")) -> tuple[Problem, ...]:
    """What keeps two schema texts from reading each other's data; empty when they are FULL compatible.

    Raises `UnknownSchema` where one of them is no schema of a record.
    """
    pairs = ((second, first, names[::-1]), (first, second, names))
    return tuple(
        Problem(f"{own} cannot read {other}: {problem}", problem.advice)
        for reader, writer, (own, other) in pairs
        for problem in reader_problems(reader, writer)
    )


def reader_problems(reader: str, writer: str) -> tuple[Problem, ...]:
    """What keeps a reader of the text `reader` from reading data of `writer`; empty when it can.

    Raises `UnknownSchema` where one of them is no schema of a record.
    """
    return parsed_problems(parse_text(reader), parse_text(writer))


def parsed_problems(reader: dict[str, Any], writer: dict[str, Any]) -> tuple[Problem, ...]:
    """`reader_problems` of two schemas that `parse_text` gave."""
    return tuple(_Resolution(reader, writer).problems(reader, writer, _short(reader)))


class _Resolution:
    """One reader against one writer. Neither has recursive types: `parse_text` refuses them."""

    def __init__(self, reader: Avro, writer: Avro) -> None:
        self._reader_names = definitions(reader)
        self._writer_names = definitions(writer)

    def problems(self, reader: Avro, writer: Avro, path: str) -> Iterator[Problem]:
        reader, writer = _follow(reader, self._reader_names), _follow(writer, self._writer_names)
        if isinstance(writer, list):
            for branch in writer:
                yield from self.problems(reader, branch, path)
        elif isinstance(reader, list):
            if all(any(True for _ in self.problems(branch, writer, path)) for branch in reader):
                yield Problem(f"{path}: no branch of the reader's union takes the written {_short(writer)}", _KEEP)
        else:
            yield from self._pair(reader, writer, path)

    def _pair(self, reader: dict[str, Any], writer: dict[str, Any], path: str) -> Iterator[Problem]:
        kinds = (writer["type"], reader["type"])
        if kinds[0] != kinds[1]:
            if kinds not in _PROMOTIONS:
                yield Problem(f"{path}: {kinds[0]} was written, {kinds[1]} is read", _KEEP)
        elif "name" in reader and not _same_name(reader, writer):
            found = f"{path}: {writer['name']} was written, {reader['name']} is read, and no alias joins them"
            yield Problem(found, "keep the name: an alias is known to newer readers only")
        elif kinds[0] == "record":
            yield from self._fields(reader, writer, path)
        elif kinds[0] == "enum":
            yield from _symbols(reader, writer, path)
        elif kinds[0] == "fixed" and reader["size"] != writer["size"]:
            yield Problem(f"{path}: {writer['size']} bytes were written, {reader['size']} are read", _KEEP)
        elif kinds[0] == "array":
            yield from self.problems(reader["items"], writer["items"], f"{path}[]")
        elif kinds[0] == "map":
            yield from self.problems(reader["values"], writer["values"], f"{path}[]")

    def _fields(self, reader: dict[str, Any], writer: dict[str, Any], path: str) -> Iterator[Problem]:
        written = {field["name"]: field for field in writer["fields"]}
        for field in reader["fields"]:
            names = [name for name in (field["name"], *field.get("aliases", ())) if name in written]
            if names:
                yield from self.problems(field["type"], written[names[0]]["type"], f"{path}.{field['name']}")
            elif "default" not in field:
                found = f"{path}.{field['name']}: is read, was not written, and has no default"
                yield Problem(found, "give a new field a default; keep a field that has none, under its name")


def _follow(schema: Avro, names: dict[str, dict[str, Any]]) -> list[Any] | dict[str, Any]:
    """The definition behind a name; a primitive as a definition of its own."""
    if isinstance(schema, str):
        return names.get(schema, {"type": schema})
    if isinstance(schema, dict) and not isinstance(schema["type"], str):
        return _follow(schema["type"], names)
    return schema


def _same_name(reader: dict[str, Any], writer: dict[str, Any]) -> bool:
    """Unqualified names agree, or one of the reader's aliases is the writer's name."""
    aliases = {alias.rpartition(".")[2] for alias in reader.get("aliases", ())}
    return _short(writer) in {_short(reader), *aliases}


def _symbols(reader: dict[str, Any], writer: dict[str, Any], path: str) -> Iterator[Problem]:
    unknown = [symbol for symbol in writer["symbols"] if symbol not in reader["symbols"]]
    if unknown and "default" not in reader:
        found = f"{path}: {', '.join(unknown)} may be written, which the reader does not know and has no default for"
        yield Problem(found, "keep the symbols of an enum that was shipped without a default one")


def _short(schema: dict[str, Any]) -> str:
    return str(schema.get("name", schema["type"])).rpartition(".")[2]
