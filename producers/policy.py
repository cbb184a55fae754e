"""How a worker comes by new weights: the policy topic says what is new, the store has it, the engine swaps.

rollstream.policy --newest update--> manifest (digest checked) --> weights (verified) --> engine.load
                                         |                           |                      |
                                         +------- on any failure: keep the weights it has, say so; go on with the
                                                  next policy, or with this one again where the failure may pass;
                                                  but end with an engine that is lost, it serves nothing any more
"""

import asyncio
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..infra.checkpoints import WEIGHTS, CheckpointError, Checkpoints, manifest_digest
from ..infra.log import Log, Record
from ..infra.schemabook import open_schemas
from ..infra.store import StoreError
from ..infra.topics import Names
from ..schemas import PolicyUpdate, RollstreamError, Schemas, WireError, decode_as
from .engine import Engine, EngineLost
from .learning import learn_schema
from .polling import Poller, open_end

logger = logging.getLogger(__name__)

RETRY = 5.0
"""Seconds until a policy that could not be had is tried again, where the failure may pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy on this machine's disk."""

    version: int
    directory: Path
    """A Hugging Face directory: weights, config, tokenizer."""


class PolicyFollower:
    """Keeps an engine at the newest published policy of one run. For one event loop."""

    def __init__(
        self,
        log: Log,
        names: Names,
        run: str,
        checkpoints: Checkpoints,
        scratch: Path,
        schemas: Schemas | None = None,
    ) -> None:
        """`scratch`: a folder of its own; the policies lie there, and only the one being served is kept."""
        self._log, self._names, self._run = log, names, run
        self._schemas = schemas or open_schemas(log, names)
        self._checkpoints, self._scratch = checkpoints, scratch
        self._digest = ""
        """Of the manifest of the newest policy heard of."""
        self._heard = asyncio.Event()
        self.following = asyncio.Event()
        """Set from when on no announcement is missed."""
        self.announced = 0
        """The newest version heard of."""
        self.refused = 0
        """How often a policy could not be had, verified or loaded."""
        self._refused_version = 0

    def lag(self, engine: Engine) -> int:
        """Versions by which the engine is behind; a policy that cannot be taken does not count."""
        return self.announced - engine.version if self.announced > self._refused_version else 0

    async def first(self, *, poll: float = 0.5) -> Policy:
        """The latest policy; waits, with a word in the log, until there is one that can be had.

        Raises `StoreError` where the store does not answer as a store should.
        """
        said = ""
        while True:
            found = await asyncio.to_thread(self._find)
            if isinstance(found, Policy):
                self._hear(found.version, "")
                return found
            if found != said:
                logger.warning("run %s: %s", self._run, found)
            said = found
            await asyncio.sleep(poll)

    def _find(self) -> Policy | str:
        """The latest policy, or why there is none now."""
        try:
            manifest = self._checkpoints.latest()
            if manifest is None:
                return "no policy yet, waiting for its trainer to publish one"
            return self._fetch(manifest.version, manifest_digest(manifest))
        except CheckpointError as error:
            return f"the latest policy cannot be used, waiting for another: {error}"
        except StoreError as error:
            if not error.retriable:
                raise
            return f"waiting for the store: {error}"

    async def follow(self, engine: Engine, changed: Callable[[], None] = lambda: None) -> None:
        """Load every newer policy as it is announced, until cancelled; `changed` is called when `lag` may have.

        Raises `LogError` and `EngineLost`, in an `ExceptionGroup`.
        """
        async with asyncio.TaskGroup() as parts:
            parts.create_task(self._listen())
            parts.create_task(self._keep(engine, changed))

    async def _listen(self) -> None:
        async with Poller(partial(open_end, self._log, self._names.policy)) as poller:
            await self._look()
            self.following.set()
            while True:
                for record in await poller.poll(1000, 0.5):
                    await learn_schema(self._schemas, record.value or b"")
                    if (update := self._parse(record)) is not None:
                        self._hear(update.version, update.digest)

    async def _look(self) -> None:
        """Hear of what was published before anybody listened."""
        try:
            manifest = await asyncio.to_thread(self._checkpoints.latest)
        except RollstreamError as error:
            logger.warning("run %s: the latest policy cannot be told, waiting for the next: %s", self._run, error)
            return
        if manifest is not None:
            self._hear(manifest.version, manifest_digest(manifest))

    def _hear(self, version: int, digest: str) -> None:
        if version > self.announced:
            self.announced, self._digest = version, digest
            self._heard.set()

    def _parse(self, record: Record) -> PolicyUpdate | None:
        if record.value is None:
            return None
        try:
            update = decode_as(PolicyUpdate, record.value, schemas=self._schemas)
        except WireError as error:
            logger.warning("%s is no policy update: %s", record.position, error)
            return None
        return update if update.run == self._run else None

    async def _keep(self, engine: Engine, changed: Callable[[], None]) -> None:
        """Swap whenever something newer was heard of; what came meanwhile is taken next, what lies between is not."""
        while True:
            await self._heard.wait()
            self._heard.clear()
            changed()
            if self.announced > engine.version:
                await self._swap(engine, self.announced, self._digest)
                changed()

    async def _swap(self, engine: Engine, version: int, digest: str) -> None:
        directory = self._scratch / f"policy-{version}"
        try:
            policy = await asyncio.to_thread(self._fetch, version, digest)
            await engine.load(policy.directory, version)
        except EngineLost:
            raise
        except (RollstreamError, OSError) as error:
            self.refused += 1
            self._refused_version = version
            logger.error("policy %d was not taken, %d stays: %s", version, engine.version, error)
            if isinstance(error, OSError) or (isinstance(error, StoreError) and error.retriable):
                asyncio.get_running_loop().call_later(RETRY, self._heard.set)
            elif self.announced == version:
                # An announcement of a policy that there never was must not stand above those that will come.
                self.announced = engine.version
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
            return
        self._refused_version = 0
        await asyncio.to_thread(self._clean, keep=directory)

    def _fetch(self, version: int, digest: str) -> Policy:
        manifest = self._checkpoints.manifest(version, digest=digest)
        directory = self._scratch / f"policy-{version}"
        self._checkpoints.fetch(manifest, WEIGHTS, directory)
        return Policy(version=version, directory=directory / WEIGHTS)

    def _clean(self, *, keep: Path) -> None:
        for folder in self._scratch.glob("policy-*"):
            if folder != keep:
                shutil.rmtree(folder, ignore_errors=True)
