"""The rollout worker: many episodes at once on one engine.

    rollstream.tasks --intake--> open task --> group_size episodes, `concurrency` at once --> delivery --> acknowledged
         ^                                                                                                     |
         +------ commit, only below the first task that is not wholly acknowledged <---------------------------+

A worker that dies gives back what it did not finish: its uncommitted tasks go to another one. Tasks whose partition moved
away in a rebalance are ended without a record. Samples that were acknowledged before are recognised by their ids.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..infra.deadletters import DeadLetters
from ..infra.log import Consumer, Log, Partition, Position, Record, UnknownTopic
from ..infra.topics import Names
from ..schemas import Command, Control, Task, WireError, decode_as
from .delivery import Delivery
from .engine import Engine
from .environment import Action, Environment, EnvironmentFactory, Outcome
from .episode import Rendering, run_episode
from .limits import Abort, Limits
from .ownership import Ownership
from .policy import PolicyFollower

logger = logging.getLogger(__name__)

COMMIT_EVERY = 1.0
"""Seconds between commits of finished tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """How much a worker does at once, and how long anything may take."""

    concurrency: int = 64
    """Episodes at once."""
    limits: Limits = field(default_factory=Limits)
    own_limits: Mapping[str, Limits] = field(default_factory=dict[str, Limits])
    """Environment -> limits of its own."""
    max_lag: int | None = None
    """Begin no episode while the engine is more than so many versions behind the newest policy; None never waits."""


@dataclass(slots=True, eq=False)
class _Open:
    """A task under way."""

    position: Position
    task: Task
    left: int
    """Episodes without an acknowledged record."""
    aborts: list[Abort] = field(default_factory=list[Abort])
    runner: "asyncio.Task[None] | None" = None


class Worker:
    """One worker process. `run` serves tasks until `stop`, or until the log fails for good."""

    def __init__(
        self,
        log: Log,
        names: Names,
        environments: Mapping[str, EnvironmentFactory],
        engine: Engine,
        renderer: Rendering,
        policy: PolicyFollower,
        settings: WorkerSettings,
    ) -> None:
        self._log, self._names, self._settings = log, names, settings
        self._environments, self._engine, self._renderer, self._policy = environments, engine, renderer, policy
        self._places = asyncio.Semaphore(settings.concurrency)
        self._open: dict[str, _Open] = {}
        self._done = Ownership()
        self._stop = asyncio.Event()
        self._paused: set[str] = set()

    def stop(self) -> None:
        """Take no more tasks, give back what is not finished, and return from `run`. Call it on the loop's thread."""
        self._stop.set()

    async def run(self) -> None:
        """Raises `LogError` when the log refuses what it must take, alone or in an `ExceptionGroup`."""
        with self._log.writer() as writer, contextlib.closing(DeadLetters(self._log, self._names)) as letters:
            delivery = Delivery(writer, self._names)
            async with asyncio.TaskGroup() as parts:
                followers = [parts.create_task(self._policy.follow(self._engine)), parts.create_task(self._obey())]
                await self._intake(parts, delivery, letters)
                for follower in followers:
                    follower.cancel()

    async def _intake(self, parts: asyncio.TaskGroup, delivery: Delivery, letters: DeadLetters) -> None:
        consumer = self._log.subscribe(
            [self._names.tasks],
            group=f"{self._names.namespace}.workers",
            on_assign=self._done.assigned,
            on_revoke=self._done.revoked,
        )
        committed = time.monotonic()
        with consumer:
            while not self._stop.is_set():
                for record in await self._poll(consumer):
                    self._begin(record, parts, delivery, letters)
                for gone in self._done.moved():
                    self._abandon(gone)
                if time.monotonic() - committed >= COMMIT_EVERY:
                    await self._commit(consumer)
                    committed = time.monotonic()
            for task in list(self._open.values()):
                self._end(task)
            await self._commit(consumer)

    async def _poll(self, consumer: Consumer) -> list[Record]:
        """The next tasks, if there is room for them; polling goes on in any case, for the group's sake."""
        full = sum(task.left for task in self._open.values()) >= 2 * self._settings.concurrency
        assigned = consumer.assignment()
        if full or "" in self._paused:
            consumer.pause(assigned)
        else:
            consumer.resume(assigned)
        return await asyncio.to_thread(consumer.poll, 4, 0.05 if full else 0.2)

    async def _commit(self, consumer: Consumer) -> None:
        marks = self._done.marks(consumer.assignment())
        if marks:
            await asyncio.to_thread(consumer.commit, marks)

    def _begin(self, record: Record, parts: asyncio.TaskGroup, delivery: Delivery, letters: DeadLetters) -> None:
        if self._done.known(record.position):
            return
        try:
            task = decode_as(Task, record.value or b"")
        except WireError as error:
            letters.send(record, reason=error.reason, error=str(error))
            self._done.finish(record.position)
            return
        if task.task_id in self._open:
            return
        opened = self._open[task.task_id] = _Open(position=record.position, task=task, left=task.group_size)
        opened.runner = parts.create_task(self._serve(opened, record, delivery, letters))

    async def _serve(self, opened: _Open, record: Record, delivery: Delivery, letters: DeadLetters) -> None:
        """Play the task's whole group; the task is finished when every sample is acknowledged."""
        try:
            async with asyncio.TaskGroup() as samples:
                for index in range(opened.task.group_size):
                    samples.create_task(self._sample(opened, index, delivery))
        except* UnknownTopic as errors:
            letters.send(record, reason="unknown-topic", error=str(errors.exceptions[0]))
        finally:
            self._open.pop(opened.task.task_id, None)
        self._done.finish(opened.position)

    async def _sample(self, opened: _Open, index: int, delivery: Delivery) -> None:
        task, abort = opened.task, Abort()
        opened.aborts.append(abort)
        limits = self._settings.own_limits.get(task.environment, self._settings.limits)
        async with self._places:
            await self._await_turn(task)
            environment = self._environment(task)
            trajectory = await run_episode(task, index, environment, self._engine, self._renderer, limits, abort=abort)
        await delivery.deliver(trajectory, task.traceparent)
        opened.left -= 1

    def _environment(self, task: Task) -> Environment:
        try:
            return self._environments[task.environment]()
        except Exception as error:  # noqa: BLE001 - the user's code; its failure becomes the record's cause
            return Unavailable(task.environment, error)

    async def _await_turn(self, task: Task) -> None:
        """Hold an episode back while its environment is paused, or the engine's policy lags too far behind."""
        lag = self._settings.max_lag
        while task.environment in self._paused or (
            lag is not None and self._policy.announced - self._engine.version > lag
        ):
            await asyncio.sleep(0.05)

    def _abandon(self, partition: Partition) -> None:
        for task in [t for t in self._open.values() if t.position.partition == partition]:
            logger.info("task %s went to another worker", task.task.task_id)
            self._end(task)

    def _end(self, task: _Open) -> None:
        """End a task without records; whoever gets it next plays it from the start."""
        self._open.pop(task.task.task_id, None)
        if task.runner is not None:
            task.runner.cancel()

    async def _obey(self) -> None:
        """Follow the control topic from now on."""
        bounds = self._log.bounds(self._log.partitions(self._names.control))
        with self._log.read({p: end for p, (_, end) in bounds.items()}) as consumer:
            while True:
                for record in await asyncio.to_thread(consumer.poll, 100, 0.5):
                    self._apply(record)

    def _apply(self, record: Record) -> None:
        try:
            control = decode_as(Control, record.value or b"")
        except WireError as error:
            logger.warning("%s is no control record: %s", record.position, error)
            return
        logger.info("%s %s: %s", control.command.lower(), control.target or "all", control.reason)
        if control.command is Command.PAUSE:
            self._paused.add(control.target)
        elif control.command is Command.RESUME:
            self._paused.clear() if not control.target else self._paused.discard(control.target)
        elif opened := self._open.get(control.target):
            for abort in opened.aborts:
                abort.request(control.reason or "cancelled")


class Unavailable:
    """Stands in for an environment that cannot be made: every reset raises what its making raised."""

    version = ""

    def __init__(self, name: str, error: Exception) -> None:
        self.name, self._error = name, error

    async def reset(self, payload: Mapping[str, str], seed: int) -> Outcome:
        if isinstance(self._error, KeyError):
            raise LookupError(f"this worker has no environment {self.name!r}; name it in its configuration")
        raise self._error

    async def step(self, action: Action) -> Outcome:
        raise self._error

    async def close(self) -> None:
        pass
