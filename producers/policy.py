"""How a worker comes by new weights: the policy topic says what is new, the store has it, the engine swaps.

rollstream.policy --newest update--> manifest (digest checked) --> weights (verified) --> engine.load
                                         |                           |                      |
                                         +------- on any failure: keep the weights it has, say so, wait for the next
"""

import asyncio
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

from ..infra.checkpoints import Checkpoints
from ..infra.log import Consumer, Log, Partition, Record
from ..infra.topics import Names
from ..schemas import PolicyUpdate, WireError, decode_as
from ..schemas.errors import RollstreamError
from .engine import Engine

logger = logging.getLogger(__name__)

WEIGHTS = "weights/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy on this machine's disk."""

    version: int
    directory: Path
    """A Hugging Face directory: weights, config, tokenizer."""


class PolicyFollower:
    """Keeps an engine at the newest published policy of one run."""

    def __init__(self, log: Log, names: Names, run: str, checkpoints: Checkpoints, scratch: Path) -> None:
        self._log, self._names, self._run = log, names, run
        self._checkpoints, self._scratch = checkpoints, scratch
        self.announced = 0
        """The newest version heard of."""
        self.refused = 0
        """Policies that could not be verified or loaded."""

    async def first(self, *, poll: float = 0.5) -> Policy:
        """The latest policy; waits, with a word in the log, until the trainer has published one."""
        waiting = False
        while (manifest := await asyncio.to_thread(self._checkpoints.latest)) is None:
            if not waiting:
                logger.warning("run %s has no policy yet: waiting for its trainer to publish one", self._run)
            waiting = True
            await asyncio.sleep(poll)
        self.announced = max(self.announced, manifest.version)
        return await asyncio.to_thread(self._fetch, manifest.version)

    async def follow(self, engine: Engine) -> None:
        """Load every newer policy as it is announced, until cancelled. Raises `LogError`."""
        with self._log.read(self._start()) as consumer:
            while True:
                update = await self._newest(consumer)
                if update is not None and update.version > engine.version:
                    self.announced = max(self.announced, update.version)
                    await self._swap(engine, update)

    def _start(self) -> dict[Partition, int]:
        """One record before the end: the newest update that is there already."""
        bounds = self._log.bounds(self._log.partitions(self._names.policy))
        return {p: max(first, end - 1) for p, (first, end) in bounds.items()}

    async def _newest(self, consumer: Consumer) -> PolicyUpdate | None:
        updates = [u for r in await asyncio.to_thread(consumer.poll, 1000, 0.5) if (u := self._parse(r)) is not None]
        return max(updates, key=lambda u: u.version, default=None)

    def _parse(self, record: Record) -> PolicyUpdate | None:
        if record.value is None:
            return None
        try:
            update = decode_as(PolicyUpdate, record.value)
        except WireError as error:
            logger.warning("%s is no policy update: %s", record.position, error)
            return None
        return update if update.run == self._run else None

    async def _swap(self, engine: Engine, update: PolicyUpdate) -> None:
        try:
            policy = await asyncio.to_thread(self._fetch, update.version, update.digest)
            await engine.load(policy.directory, policy.version)
        except RollstreamError as error:
            self.refused += 1
            logger.error("policy %d was not taken, %d stays: %s", update.version, engine.version, error)
            return
        await asyncio.to_thread(self._clean, keep=policy.directory)

    def _fetch(self, version: int, digest: str | None = None) -> Policy:
        manifest = self._checkpoints.manifest(version, digest=digest)
        directory = self._scratch / f"policy-{version}"
        self._checkpoints.fetch(manifest, WEIGHTS, directory)
        return Policy(version=version, directory=directory / WEIGHTS)

    def _clean(self, *, keep: Path) -> None:
        for folder in self._scratch.glob("policy-*"):
            if folder not in keep.parents:
                shutil.rmtree(folder, ignore_errors=True)
