"""What a command works with: the configuration, and the log, store and checkpoints that it names.

--config, --set --> Config --> Context --on first use--> log, store, checkpoints --> closed with the command
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..infra.config import Config
from ..infra.topics import Names
from ..schemas.errors import RollstreamError
from . import wiring
from .reach import reach_broker, reach_store

if TYPE_CHECKING:
    from ..infra.checkpoints import Checkpoints
    from ..infra.claims import Claims
    from ..infra.log import Log, Topic
    from ..infra.registry import Registry
    from ..infra.store import ObjectStore
    from ..schemas import Schemas


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was given before the command."""

    config: Path | None = None
    overrides: tuple[str, ...] = ()


@contextmanager
def opened(context: typer.Context) -> "Generator[Context]":
    """The context of a command; its log is closed at the end. Raises `ConfigError`, which names file and key."""
    options: Options = context.obj
    ready = Context(Config.load(options.config, overrides=options.overrides))
    try:
        yield ready
    finally:
        ready.close()


@dataclass(frozen=True)
class Context:
    """Opened parts are cached; `close` ends them."""

    config: Config

    @property
    def run(self) -> str:
        return self.config.run.name

    @cached_property
    def names(self) -> Names:
        return Names(self.config.run.namespace)

    @cached_property
    def log(self) -> "Log":
        """Raises `Unreachable` where no broker answers."""
        reach_broker(self.config.kafka.bootstrap)
        return wiring.open_log(self.config)

    @cached_property
    def store(self) -> "ObjectStore":
        """Raises `Unreachable` where no store answers."""
        from ..infra.s3 import S3Store

        reach_store(self.config.store.url)
        return S3Store.from_config(self.config.store)

    @cached_property
    def claims(self) -> "Claims":
        """What was too large for the log; the store is opened once there is something to fetch."""
        from ..infra.claims import Claims

        return Claims(lambda: self.store, self.names)

    @cached_property
    def registry(self) -> "Registry | None":
        """The Schema Registry, if one is configured; nobody is asked yet."""
        from ..infra.registry import Registry

        return Registry.from_config(self.config.registry)

    @cached_property
    def reader_schemas(self) -> "Schemas":
        """For those who only read: works while the registry is away, as far as the log knows its ids."""
        from ..infra.schemabook import LogSchemas
        from ..schemas import Schemas

        return Schemas(LogSchemas(self.log, self.names, self.registry))

    @cached_property
    def role_schemas(self) -> "Schemas":
        """For those who write, too: by the registry's ids, if one is configured. Raises as `open_schemas`."""
        from ..infra.schemabook import open_schemas

        auto_register = self.config.registry.auto_register
        return open_schemas(self.log, self.names, self.registry, auto_register=auto_register)

    @cached_property
    def checkpoints(self) -> "Checkpoints":
        from ..infra.checkpoints import Checkpoints

        return Checkpoints(self.store, self.run)

    def topics(self) -> "tuple[Topic, ...]":
        """The topics that this configuration declares."""
        from ..infra.topics import declared

        partitions = {name: e.partitions for name, e in self.config.environments.items()}
        return declared(self.config.run.namespace, partitions)

    def environment_topics(self) -> dict[str, str]:
        """Environment -> trajectory topic, of those on the log. Raises `RollstreamError` where there is none."""
        found = {e: t for t in sorted(self.log.topics()) if (e := self.names.environment(t)) is not None}
        if not found:
            raise RollstreamError(
                f"no topic {self.names.namespace}.trajectories.* at {self.config.kafka.bootstrap}; "
                "`rollstream topics apply` creates what the configuration declares"
            )
        return found

    def expect_environments(self) -> None:
        """Raises `RollstreamError` where none is configured."""
        if not self.config.environments:
            raise RollstreamError(
                "no environment is configured; add a table [environments.NAME] with an adapter, "
                "or --set environments.NAME.adapter=textarena"
            )

    def close(self) -> None:
        if "log" in self.__dict__:
            self.log.close()
        if self.__dict__.get("registry") is not None:
            self.__dict__["registry"].close()
