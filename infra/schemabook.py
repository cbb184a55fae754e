"""The schemas topic: every schema that a release shipped, by its id, so that a reader can decode what others wrote.

publish_schemas (`rollstream topics apply`) --> <namespace>.schemas --> LogSchemas.fetch --> Schemas.resolve
                                                                    a Schema Registry, where one is configured --^

With a Schema Registry a schema stands here under the registry's id, too. So an id means one thing for as long as the
log lives, whatever becomes of the registry: one that lost its memory and gives an id away a second time is found out.
"""

import contextlib
import re
from collections.abc import Mapping
from threading import Lock

from ..schemas import SchemaAway, Schemas, Shipped, UnknownSchema, full_problems, record_schemas, schema_id
from ..schemas.shape import parse_text
from .log import Log, LogError, Partition, UnknownTopic
from .registry import Registry, RegistryError
from .scan import scan
from .topics import Names

_ID = re.compile(rb"[0-9]{1,10}")
"""Any other key of the topic is nobody's id, whatever wrote it."""


class LogSchemas:
    """The `Lookup` over the schemas topic, and over a registry for what the topic has not. Thread-safe.

    What was read is kept; an id that is not among it makes it read on to the present end of the topic.
    """

    def __init__(self, log: Log, names: Names, registry: Registry | None = None) -> None:
        self._log, self._topic, self._registry = log, names.schemas, registry
        self._texts: dict[int, str] = {}
        self._next: dict[Partition, int] = {}
        self._lock = Lock()

    def fetch(self, schema_id: int) -> str:
        """The schema's text. Raises `UnknownSchema` where nobody has it; `SchemaAway`; `LogError`, `RegistryError`."""
        with self._lock:
            if schema_id not in self._texts:
                self._try_read()
            if schema_id in self._texts:
                return self._texts[schema_id]
        if self._registry is not None:
            return self._registry.fetch(schema_id)
        raise UnknownSchema(
            f"{self._topic} has no schema {schema_id}; the release that writes it publishes it by "
            f"`rollstream topics apply`"
        )

    def known(self) -> dict[int, str]:
        """Every schema in the topic now: id to text. Raises `LogError`."""
        with self._lock:
            self._read_on()
            return dict(self._texts)

    def _try_read(self) -> None:
        try:
            self._read_on()
        except UnknownTopic:
            # Without a registry it is a mistake of the set-up, and no reason to dead-letter record after record.
            if self._registry is None:
                raise
        except LogError as error:
            if error.retriable:
                raise SchemaAway(f"{self._topic} cannot be read now: {error}") from error
            raise

    def _read_on(self) -> None:
        bounds = self._log.bounds(self._log.partitions(self._topic))
        start = {partition: max(self._next.get(partition, 0), first) for partition, (first, _) in bounds.items()}
        stop = {partition: end for partition, (_, end) in bounds.items()}
        for record in scan(self._log, start, stop=stop):
            if record.key is not None and record.value is not None and _ID.fullmatch(record.key):
                self._texts[int(record.key)] = record.value.decode(errors="replace")
        self._next = {partition: max(start[partition], stop[partition]) for partition in bounds}


def open_schemas(log: Log, names: Names, registry: Registry | None = None, *, auto_register: bool = False) -> Schemas:
    """How a role reads and writes: by its own ids, or by those that the registry has for this release's schemas.

    Raises `RegistryError` where it has not all of them, or where one of its ids stands for another schema on this log;
    `SchemaAway` where it does not answer; `LogError`.
    """
    if registry is None:
        return Schemas(LogSchemas(log, names))
    ids = registry.register() if auto_register else registry.look_up()
    with contextlib.suppress(UnknownTopic):
        _check(LogSchemas(log, names).known(), _bound(ids), names)
    return Schemas(LogSchemas(log, names, registry), ids=ids)


def publish_schemas(log: Log, names: Names, ids: Mapping[int, int] | None = None) -> tuple[int, ...]:
    """Put the schemas of this release into the topic, those that are not there yet; returns the ids they came under.

    `ids`: this release's own id of each -> the registry's; then it stands under both. Raises `LogError`, or
    `RegistryError` for one of the registry's ids, where another schema stands under one: two must never share one.
    Raises `LogError`, too, where one cannot live beside what is there: each has to read what the other wrote.
    """
    there = LogSchemas(log, names).known()
    own, bound = {shipped.id: shipped for shipped in record_schemas()}, _bound(ids or {})
    for number, shipped in own.items():
        if not _same(there.get(number), shipped):
            raise LogError(f"{names.schemas}: {shipped.name} has id {number}, where another schema stands already")
    _check(there, bound, names)
    new = {number: shipped for number, shipped in (own | bound).items() if number not in there}
    _check_company(there, own, names)
    with log.writer() as writer:
        appended = [
            writer.append(
                names.schemas, shipped.text.encode(), key=str(number).encode(), headers={"name": shipped.name.encode()}
            )
            for number, shipped in new.items()
        ]
    for future in appended:
        future.result()
    return tuple(new)


def _bound(ids: Mapping[int, int]) -> dict[int, Shipped]:
    """The registry's ids of this release's schemas."""
    return {ids[shipped.id]: shipped for shipped in record_schemas() if shipped.id in ids}


def _check(there: Mapping[int, str], bound: Mapping[int, Shipped], names: Names) -> None:
    """Raises `RegistryError` where the log knows one of the registry's ids for another schema."""
    for number, shipped in bound.items():
        if not _same(there.get(number), shipped):
            raise RegistryError(
                f"the Schema Registry has id {number} for {shipped.name}, under which another schema stands in "
                f"{names.schemas}: it has lost its memory, or is another registry than before. Nothing is written by "
                f"its ids, since old records could not be told from new ones. Restore its data, or take a new namespace"
            )


def _check_company(there: Mapping[int, str], own: Mapping[int, Shipped], names: Names) -> None:
    """FULL_TRANSITIVE: every schema that is to be published against all of its record in the topic."""
    versions = [(number, text, name) for number, text in there.items() if (name := _record(text)) is not None]
    for shipped in (shipped for number, shipped in own.items() if number not in there):
        for number, text, name in versions:
            if name == _record(shipped.text) and (
                problems := full_problems(text, shipped.text, (f"schema {number}", shipped.name))
            ):
                raise LogError(
                    f"{names.schemas}: {shipped.name} cannot live beside schema {number}, which is there: "
                    f"{problems[0]}. Nothing was published; {problems[0].advice}"
                )


def _record(text: str) -> str | None:
    """Full name of the record; None where the topic holds no schema under that id."""
    try:
        return str(parse_text(text)["name"])
    except UnknownSchema:
        return None


def _same(text: str | None, shipped: Shipped) -> bool:
    """Whether the topic has this schema under an id, or nothing yet."""
    if text is None or text == shipped.text:
        return True
    try:
        return schema_id(text) == shipped.id
    except ValueError:
        return False
