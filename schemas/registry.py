"""Which schema stands behind an id: those of this release, and through a lookup those of other releases.

    id in the framing --> shipped with this release? --> found before? --> lookup.fetch --> readable here? --> Resolved
                                                                             (topic, registry)      |
                                                                                              UnknownSchema

Without a Schema Registry an id is made of the schema's own text, so that everybody arrives at the same one. With one it
is the registry's: `Schemas(ids=...)` then both writes and knows this release's schemas by it.
"""

import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from threading import Lock
from typing import Any, NamedTuple, Protocol

from . import avro
from .compatibility import parsed_problems
from .errors import UnknownSchema
from .shape import parse_text

MAX_ID = 2**31 - 1
"""Ids are positive and fit 31 bits, as those of Confluent's registry."""
MISSES = 1024
"""Most ids that are remembered as unknown."""

_FILE = re.compile(r"(?P<record>[a-z_]+)\.v(?P<version>[0-9]+)\.avsc")
_log = logging.getLogger(__name__)


class Shipped(NamedTuple):
    """One schema of this release."""

    id: int
    name: str
    """Record and version, e.g. "trajectory.v1"."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """How to read data of one schema id."""

    kind: str
    """Which record it is: "Trajectory", "Task", ..."""
    writer: dict[str, Any]
    reader: dict[str, Any] | None
    """This release's schema of the record; None where the writer's is the same."""


class Lookup(Protocol):
    """Finds schemas that this release does not carry."""

    def fetch(self, schema_id: int) -> str:
        """The schema's text. Raises `UnknownSchema` where there is none, `SchemaAway` where nobody answers now.

        Any error but the first passes through to the caller of `resolve` and is not remembered.
        """
        ...


def schema_id(text: str) -> int:
    """A stable positive 31-bit id of a schema's full text: docs and defaults count, space and key order do not."""
    canonical = json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return int.from_bytes(hashlib.sha256(canonical.encode()).digest()[:4]) & MAX_ID or 1


@cache
def record_schemas() -> tuple[Shipped, ...]:
    """Every schema in this release, oldest version of each record first; what `topics apply` publishes."""
    found: list[tuple[str, int, str]] = []
    for file in files(avro).iterdir():
        if match := _FILE.fullmatch(file.name):
            found.append((match["record"], int(match["version"]), file.read_text("utf-8")))
    return tuple(Shipped(schema_id(text), f"{record}.v{version}", text) for record, version, text in sorted(found))


class Current(NamedTuple):
    """The schema that this release writes a record with."""

    id: int
    schema: dict[str, Any]


@cache
def current_schemas() -> dict[str, Current]:
    """The newest schema of each record, by kind."""
    newest = {shipped.name.partition(".")[0]: shipped for shipped in record_schemas()}
    parsed = ((shipped.id, parse_text(shipped.text)) for shipped in newest.values())
    return {_kind(schema): Current(number, schema) for number, schema in parsed}


class Schemas:
    """Which schema an id stands for, and by which id this process writes. Thread-safe; a known id takes no lock.

    `lookup` is asked once for an id that this release does not know; without one such an id is refused. An id that
    nobody knew is asked for again after `retry_after` seconds, since its schema may have been published meanwhile.
    `ids`: this release's own id of each schema -> the registry's; None where there is no registry.
    """

    def __init__(
        self,
        lookup: Lookup | None = None,
        *,
        ids: Mapping[int, int] | None = None,
        retry_after: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lookup = lookup
        self._retry_after = retry_after
        self._clock = clock
        self._lock = Lock()
        self._misses: dict[int, tuple[float, str]] = {}
        self._known = {shipped.id: _resolved(shipped.text) for shipped in record_schemas()}
        self._current = current_schemas()
        if ids is not None:
            # Those of its own stay known: older records of the log may have them.
            self._known |= {ids[own]: resolved for own, resolved in self._known.items() if own in ids}
            self._current = {kind: Current(ids[own], schema) for kind, (own, schema) in self._current.items()}

    def current(self, kind: str) -> Current:
        """What records of this kind are written with."""
        return self._current[kind]

    def settled(self, schema_id: int) -> bool:
        """Whether `resolve` asks nobody: the id is known or none at all, or nobody knew it just now."""
        missed = self._misses.get(schema_id)
        asked = missed is not None and self._clock() < missed[0]
        return asked or schema_id in self._known or not 0 < schema_id <= MAX_ID or self._lookup is None

    def resolve(self, schema_id: int) -> Resolved:
        """How to read data written with this id. Raises `UnknownSchema`, and what the lookup raises: `SchemaAway`."""
        known = self._known.get(schema_id)
        if known is not None:
            return known
        if not 0 < schema_id <= MAX_ID:
            raise UnknownSchema(f"expected a schema id from 1 to {MAX_ID}, found {schema_id}")
        with self._lock:
            return self._known.get(schema_id) or self._find(schema_id)

    def _find(self, schema_id: int) -> Resolved:
        missed = self._misses.get(schema_id)
        if missed is not None and self._clock() < missed[0]:
            raise UnknownSchema(missed[1])
        try:
            found = self._fetch(schema_id)
        except UnknownSchema as error:
            self._remember(schema_id, str(error))
            raise
        self._misses.pop(schema_id, None)
        self._known[schema_id] = found
        _log.info("schema %d found: a %s of another release", schema_id, found.kind)
        return found

    def _fetch(self, schema_id: int) -> Resolved:
        if self._lookup is None:
            raise UnknownSchema(
                f"schema {schema_id} is not one of this release, and no registry or topic to ask is set"
            )
        try:
            return _resolved(self._lookup.fetch(schema_id))
        except UnknownSchema as error:
            raise UnknownSchema(f"schema {schema_id}: {error}") from error

    def _remember(self, schema_id: int, message: str) -> None:
        self._misses.pop(schema_id, None)
        if len(self._misses) >= MISSES:
            del self._misses[next(iter(self._misses))]
        self._misses[schema_id] = (self._clock() + self._retry_after, message)


def _kind(schema: dict[str, Any]) -> str:
    return str(schema["name"]).removeprefix("rollstream.")


def _resolved(text: str) -> Resolved:
    writer = parse_text(text)
    current = current_schemas().get(_kind(writer))
    if current is None:
        raise UnknownSchema(f"expected a record of rollstream, found {writer['name']}")
    if problems := parsed_problems(current.schema, writer):
        raise UnknownSchema(f"cannot be read by this release: {'; '.join(map(str, problems))}")
    return Resolved(kind=_kind(writer), writer=writer, reader=None if writer == current.schema else current.schema)


@cache
def shipped_only() -> Schemas:
    """The schemas of this release, and no lookup: enough where everybody runs the same release."""
    return Schemas()
