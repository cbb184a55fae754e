"""A Schema Registry with Confluent's API: where the ids in the framing come from, when one is configured.

    `rollstream topics apply` --register--> subjects, FULL_TRANSITIVE --> ids --bind--> <namespace>.schemas
    a role, at its start      --look_up---> ids, or what to do          --> Schemas(ids=...)
    an id that is unknown     --fetch-----> text, UnknownSchema, SchemaAway (asked again later, never a miss)

One subject a record, by the record's full name ("rollstream.Trajectory"): every environment has a topic of its own, and
a topic holds more than one kind of record, so that subjects by topic would repeat each schema for each environment and
compare records that have nothing to do with each other.
"""

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar, cast

from ..schemas import MissingExtra, RollstreamError, SchemaAway, UnknownSchema, record_schemas
from ..schemas.shape import parse_text
from .sections import RegistrySection

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import Schema, SchemaRegistryClient

logger = logging.getLogger(__name__)

COMPATIBILITY = "FULL_TRANSITIVE"
MISS_TRIES = 3
"""How often an id is asked for before it is unknown: what was registered just now may not have come to every server."""
FIRST_DELAY, LONGEST_DELAY = 0.2, 20.0
"""Seconds until a registry that is away is asked again: the first time, and at most."""
_ABSENT = (40401, 40402, 40403)
"""Error codes of the API: no such subject, version, schema."""
_PASSING = (408, 429, 500, 502, 503, 504)

P = ParamSpec("P")
R = TypeVar("R")


class RegistryError(RollstreamError):
    """The Schema Registry refuses, or has not what it should have."""


class Registered(NamedTuple):
    """One schema as the registry has it."""

    id: int
    subject: str
    version: int
    text: str


@dataclass(slots=True)
class _Pause:
    """Until when a registry that was away is left alone, and for how long the next time."""

    until: float = 0.0
    delay: float = FIRST_DELAY
    why: str = ""


class Registry:
    """The `Lookup` over a registry. Thread-safe.

    One that is away is left alone for a while, longer each time; whoever asks meanwhile is told so at once.
    """

    def __init__(
        self,
        client: "SchemaRegistryClient",
        url: str,
        *,
        patience: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`patience`: seconds that `look_up`, `register` and `versions` wait for a registry that is away."""
        self._client, self.url, self._patience = client, url, patience
        self._clock, self._sleep = clock, sleep
        self._pause = _Pause()

    @classmethod
    def from_config(cls, section: RegistrySection) -> "Registry | None":
        """None where no registry is configured. Asks nobody yet. Raises `MissingExtra`, `RegistryError`."""
        if section.url is None:
            return None
        try:
            from confluent_kafka.schema_registry import SchemaRegistryClient
        except ImportError as error:
            raise MissingExtra("a Schema Registry (registry.url)", "registry") from error
        try:
            client = SchemaRegistryClient(_settings(section, section.url))
        except (ValueError, TypeError, OSError) as error:
            raise RegistryError(f"registry: the client does not take these settings: {error}") from error
        return cls(client, section.url, patience=section.patience)

    def fetch(self, schema_id: int) -> str:
        """The schema's text. Raises `UnknownSchema`, `SchemaAway` at once, `RegistryError`."""
        for _ in range(MISS_TRIES - 1):
            try:
                return self._ask(self._client.get_schema, schema_id).schema_str or ""
            except UnknownSchema:
                self._sleep(FIRST_DELAY)
        return self._ask(self._client.get_schema, schema_id).schema_str or ""

    def look_up(self) -> dict[int, int]:
        """This release's own id of every schema -> the registry's. Raises `RegistryError`, `SchemaAway`."""
        found, missing = dict[int, int](), list[str]()
        for shipped in record_schemas():
            try:
                registered = self._wait(self._client.lookup_schema, _subject(shipped.text), _schema(shipped.text))
                found[shipped.id] = registered.schema_id or 0
            except UnknownSchema:
                missing.append(shipped.name)
        if missing:
            raise RegistryError(
                f"{self.url} has no {', '.join(missing)} of this release; `rollstream topics apply` registers them, "
                f"or set registry.auto_register"
            )
        return found

    def register(self) -> dict[int, int]:
        """Register every schema of this release, and hold its subject to FULL_TRANSITIVE; ids as `look_up`.

        Raises `RegistryError` where a schema is not compatible with what is registered, `SchemaAway`.
        """
        found = dict[int, int]()
        for shipped in record_schemas():
            subject = _subject(shipped.text)
            self._wait(self._client.set_compatibility, subject, COMPATIBILITY)
            found[shipped.id] = self._wait(self._client.register_schema, subject, _schema(shipped.text))
        return found

    def versions(self) -> tuple[Registered, ...]:
        """Everything under the subjects of this release's records. Raises `RegistryError`, `SchemaAway`."""
        subjects = dict.fromkeys(_subject(shipped.text) for shipped in record_schemas())
        return tuple(version for subject in subjects for version in self._versions(subject))

    def _versions(self, subject: str) -> list[Registered]:
        try:
            numbers = self._wait(self._client.get_versions, subject)
        except UnknownSchema:
            return []
        found = [self._wait(self._client.get_version, subject, number) for number in numbers]
        return [
            Registered(version.schema_id or 0, subject, version.version or 0, version.schema.schema_str or "")
            for version in found
        ]

    def close(self) -> None:
        self._client.close()

    def _wait(self, call: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
        """`_ask`, again and again while the registry is away and patience lasts."""
        deadline, said = self._clock() + self._patience, False
        while True:
            try:
                return self._ask(call, *args, **options)
            except SchemaAway as away:
                pause = self._pause.until - self._clock()
                if self._clock() + pause > deadline:
                    raise
                if not said:
                    logger.warning("%s; waiting for it", away)
                said = True
                self._sleep(max(0.0, pause))

    def _ask(self, call: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
        """Raises `UnknownSchema` for what is not there, `SchemaAway`, `RegistryError`."""
        from confluent_kafka.schema_registry import SchemaRegistryError

        if self._clock() < self._pause.until:
            raise SchemaAway(self._pause.why)
        try:
            answer = call(*args, **options)
        except SchemaRegistryError as error:
            raise self._judge(error) from error
        except Exception as error:  # the transport's errors differ between the client's releases; all mean: no answer
            raise self._away(f"{type(error).__name__}: {error}") from error
        self._pause = _Pause()
        return answer

    def _judge(self, error: Any) -> RollstreamError:
        status, code, message = error.http_status_code, error.error_code, str(error.error_message)
        if status in _PASSING:
            return self._away(f"HTTP {status}: {message}")
        self._pause = _Pause()
        if status == 404 and code in _ABSENT:
            return UnknownSchema(f"{self.url}: {message}")
        if status == 409:
            return RegistryError(
                f"{self.url} refuses a schema of this release, since it is not compatible with what is registered: "
                f"{message}; `rollstream schemas check` tells what to do"
            )
        if status in (401, 403):
            return RegistryError(f"{self.url} refuses (HTTP {status}); see registry.user, password and token")
        return RegistryError(
            f"registry.url: expected Confluent's Schema Registry API at {self.url}, found HTTP {status}: {message}"
        )

    def _away(self, why: str) -> SchemaAway:
        delay = self._pause.delay
        why = f"no answer of the Schema Registry at {self.url} ({why})"
        # With jitter: the workers of a run all lose it at the same moment.
        until = self._clock() + delay * random.uniform(0.5, 1.0)
        self._pause = _Pause(until, min(2 * delay, LONGEST_DELAY), why)
        return SchemaAway(why)


def _subject(text: str) -> str:
    return str(parse_text(text)["name"])


def _schema(text: str) -> "Schema":
    from confluent_kafka.schema_registry import Schema

    return Schema(text, "AVRO")


def _settings(section: RegistrySection, url: str) -> dict[str, object]:
    """The client's settings; its own retries are off, for they can neither be told nor be shared."""
    settings: dict[str, object] = {"url": url, "timeout": section.timeout, "max.retries": 0}
    if section.user is not None:
        password = section.password.get_secret_value() if section.password else ""
        settings["basic.auth.user.info"] = f"{section.user}:{password}"
    if section.token is not None:
        settings["bearer.auth.credentials.source"] = "STATIC_TOKEN"
        settings["bearer.auth.token"] = section.token.get_secret_value()
        settings["bearer.auth.logical.cluster"] = ""
    return settings | cast("dict[str, object]", dict(section.settings))
