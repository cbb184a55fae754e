"""The schemas topic: every schema that a release shipped, by its id, so that a reader can decode what others wrote.

publish_schemas (`rollstream topics apply`) --> <namespace>.schemas --> LogSchemas.fetch --> Schemas.resolve
"""

from threading import Lock

from ..schemas import UnknownSchema, record_schemas
from .log import Log, LogError, Partition
from .scan import scan
from .topics import Names


class LogSchemas:
    """The `Lookup` over the schemas topic. Thread-safe.

    What was read is kept; an id that is not among it makes it read on to the present end of the topic.
    """

    def __init__(self, log: Log, names: Names) -> None:
        self._log, self._topic = log, names.schemas
        self._texts: dict[int, str] = {}
        self._next: dict[Partition, int] = {}
        self._lock = Lock()

    def fetch(self, schema_id: int) -> str:
        """The schema's text. Raises `UnknownSchema` where the topic has none, `LogError` where it cannot be read."""
        with self._lock:
            if schema_id not in self._texts:
                self._read_on()
            if schema_id not in self._texts:
                raise UnknownSchema(
                    f"{self._topic} has no schema {schema_id}; the release that writes it publishes it by "
                    f"`rollstream topics apply`"
                )
            return self._texts[schema_id]

    def known(self) -> dict[int, str]:
        """Every schema in the topic now: id to text."""
        with self._lock:
            self._read_on()
            return dict(self._texts)

    def _read_on(self) -> None:
        bounds = self._log.bounds(self._log.partitions(self._topic))
        start = {partition: max(self._next.get(partition, 0), first) for partition, (first, _) in bounds.items()}
        stop = {partition: end for partition, (_, end) in bounds.items()}
        for record in scan(self._log, start, stop=stop):
            if record.key is not None and record.value is not None and record.key.isdigit():
                self._texts[int(record.key)] = record.value.decode(errors="replace")
        self._next = {partition: max(start[partition], stop[partition]) for partition in bounds}


def publish_schemas(log: Log, names: Names) -> tuple[int, ...]:
    """Put the schemas of this release into the topic, those that are not there yet; returns their ids.

    Raises `LogError` where another text stands under one of the ids: two schemas must never share one.
    """
    there = LogSchemas(log, names).known()
    for shipped in record_schemas():
        if there.get(shipped.id, shipped.text) != shipped.text:
            raise LogError(f"{names.schemas}: {shipped.name} has id {shipped.id}, where another schema stands already")
    new = [shipped for shipped in record_schemas() if shipped.id not in there]
    with log.writer() as writer:
        appended = [
            writer.append(
                names.schemas,
                shipped.text.encode(),
                key=str(shipped.id).encode(),
                headers={"name": shipped.name.encode()},
            )
            for shipped in new
        ]
    for future in appended:
        future.result()
    return tuple(shipped.id for shipped in new)
