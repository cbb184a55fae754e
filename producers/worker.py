"""The rollout worker: many episodes at once on one engine.

    rollstream.tasks --intake--> open task --places--> group_size episodes --delivery--> acknowledged
         ^                           |                                                        |
         |                           +-- unreadable, or for no topic --> rollstream.dead-letter
         +------ commit, only below the first task that is not wholly acknowledged <----------+

A worker that dies gives back what it did not finish: its uncommitted tasks go to another one. So does one whose engine
is lost: it ends, where it could only fail task after task. Tasks whose partition moved away in a rebalance are ended;
only those of their episodes that were over by then leave a record. Samples acknowledged before are recognised by their
ids. Cut off from the log a worker plays on, and what it finished waits on its disk (spill.py).
"""

import asyncio
import logging
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import cast

from ..infra.claims import Claims
from ..infra.deadletters import DeadLetters
from ..infra.log import Log, LogError, Partition, Position, Record, RecordTooLarge, UnknownTopic
from ..infra.schemabook import open_schemas
from ..infra.store import StoreError
from ..infra.topics import Names
from ..schemas import Schemas, Task, WireError, decode_as, framed_id, trajectory_id
from .delivery import Delivery
from .engine import Engine, EngineLost
from .environment import EnvironmentFactory
from .episode import Rendering, run_episode
from .intake import Intake
from .learning import learn_schema
from .limits import Abort, Gates, Limits
from .making import make_environment
from .orders import Orders
from .places import Place, Places
from .policy import PolicyFollower
from .spill import Spill

logger = logging.getLogger(__name__)

BACKLOG = 1024
"""Tasks that are read ahead. Those that have not begun cost nothing, and behind the tasks of an environment that stands
still lie those of others."""
LARGEST_GROUP = 4096
"""Samples of one task; more are a mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """How much a worker does at once, and how long anything may take."""

    concurrency: int = 64
    """Episodes at once."""
    limits: Limits = field(default_factory=Limits)
    own_limits: Mapping[str, Limits] = field(default_factory=dict[str, Limits])
    """Environment -> limits of its own."""
    pools: Mapping[str, int] = field(default_factory=dict[str, int])
    """Stage ("init", "step", "generate") -> calls at once; 0 or absent for any number. Waiting is not charged."""
    max_lag: int | None = None
    """Begin no task while the engine is more than so many versions behind the newest policy; None never waits."""
    spill: Path | None = None
    """Folder for finished episodes that the log does not take just now; None keeps them in memory."""
    spill_bytes: int = 1 << 30
    """Most bytes on the disk; 0 keeps none there."""


@dataclass(slots=True, eq=False)
class _Open:
    """A task under way."""

    record: Record
    task: Task
    order: int
    positions: set[Position]
    """Where the task lies; more than one where it was dispatched twice."""
    begun: bool = False
    aborts: list[Abort] = field(default_factory=list[Abort])
    runner: "asyncio.Task[None] | None" = None


class Worker:
    """One worker process. `run` serves tasks until `stop`, or until the log or the engine fails for good.

    A factory of an environment runs on the event loop: what takes time belongs into its `reset`.
    """

    def __init__(
        self,
        log: Log,
        names: Names,
        environments: Mapping[str, EnvironmentFactory],
        engine: Engine,
        renderer: Rendering,
        policy: PolicyFollower,
        settings: WorkerSettings,
        schemas: Schemas | None = None,
        claims: Claims | None = None,
    ) -> None:
        """`claims`: where bodies go that exceed their topic's limit; without it their samples are FAILED."""
        self._claims = claims
        self._log, self._names, self._settings = log, names, settings
        self._environments, self._engine, self._renderer, self._policy = environments, engine, renderer, policy
        self._places = Places(settings.concurrency, environments)
        self._gates = Gates(**{stage: asyncio.Semaphore(size) for stage, size in settings.pools.items() if size})
        self._schemas = schemas or open_schemas(log, names)
        self._orders = Orders(self._schemas)
        self._learners: set[asyncio.Task[None]] = set()
        self._open: dict[tuple[str, int], _Open] = {}
        self._numbers = count()
        self._stop = asyncio.Event()
        self.counts: Mapping[str, int] = {}
        """Trajectories acknowledged since `run` began, by status in lower case."""

    def stop(self) -> None:
        """Take no more tasks, give back what is not finished, and return from `run`. Call it on the loop's thread."""
        self._stop.set()

    async def run(self) -> None:
        """Raises `LogError` or `StoreError` when log or store refuse what they must take, `EngineLost` when the engine
        is of no more use, `SpillError` for a folder of no use.

        Tasks that are not finished are given back in any case.
        """
        spill = await asyncio.to_thread(self._open_spill)
        writer, letters = self._log.writer(), DeadLetters(self._log, self._names)
        delivery = Delivery(writer, self._names, schemas=self._schemas, claims=self._claims, spill=spill)
        self.counts = delivery.counts
        try:
            async with asyncio.TaskGroup() as parts:
                followers = [
                    parts.create_task(delivery.recover()),
                    parts.create_task(self._policy.follow(self._engine, self._refresh)),
                    parts.create_task(self._orders.follow(self._log, self._names, self._refresh)),
                ]
                await self._serve(_Shift(parts, delivery, letters))
                for follower in followers:
                    follower.cancel()
        except BaseExceptionGroup as errors:
            if (fatal := _find(errors)) is not None:
                raise fatal from errors
            raise
        finally:
            try:
                await asyncio.to_thread(letters.close)
            finally:
                await delivery.close()

    def _open_spill(self) -> Spill | None:
        folder, limit = self._settings.spill, self._settings.spill_bytes
        return Spill(folder, limit=limit) if folder is not None and limit else None

    async def _serve(self, shift: "_Shift") -> None:
        # Whoever cancels a group, or pauses an environment, may count on every worker that has tasks.
        await self._orders.following.wait()
        async with Intake(self._log, self._names) as intake:
            try:
                while not self._stop.is_set():
                    hold = self._orders.all_paused or len(self._open) + len(self._learners) >= BACKLOG
                    for record in await intake.take(hold=hold):
                        self._begin(record, shift, intake)
                    for partition in intake.moved():
                        self._abandon(partition)
            finally:
                for learner in self._learners:
                    learner.cancel()
                for opened in list(self._open.values()):
                    self._end(opened)
            await shift.wait()

    def _begin(self, record: Record, shift: "_Shift", intake: Intake) -> None:
        if record.value is None:
            logger.warning("%s is a tombstone; skipped", record.position)
            intake.finish([record.position])
            return
        number = framed_id(record.value)
        if number is None or self._schemas.settled(number):
            self._admit(record, record.value, shift, intake)
        else:
            self._learners.add(learner := shift.start(self._learn(record, record.value, shift, intake)))
            learner.add_done_callback(self._learners.discard)

    async def _learn(self, record: Record, value: bytes, shift: "_Shift", intake: Intake) -> None:
        """Begin a task of another release once its schema is known, while others go on."""
        await learn_schema(self._schemas, value)
        self._admit(record, value, shift, intake)

    def _admit(self, record: Record, value: bytes, shift: "_Shift", intake: Intake) -> None:
        try:
            task = decode_as(Task, value, schemas=self._schemas)
            self._check(task)
        except WireError as error:
            shift.start(self._bury(record, error.reason, error, shift, intake))
            return
        if (there := self._open.get((task.task_id, task.attempt))) is not None:
            there.positions.add(record.position)
            return
        opened = _Open(record=record, task=task, order=next(self._numbers), positions={record.position})
        self._open[task.task_id, task.attempt] = opened
        opened.runner = shift.start(self._play(opened, shift, intake))

    def _check(self, task: Task) -> None:
        """Raises `WireError` for a task that no worker can serve."""
        if task.group_size > LARGEST_GROUP:
            raise WireError(f"expected a group of at most {LARGEST_GROUP}, found {task.group_size}", reason="bad-group")
        try:
            self._names.trajectories(task.environment)
        except LogError as error:
            raise WireError(str(error), reason="bad-environment") from error

    async def _play(self, opened: _Open, shift: "_Shift", intake: Intake) -> None:
        """Play the task's whole group; the task is finished when every sample is acknowledged."""
        try:
            await self._play_group(opened, shift)
        except ExceptionGroup as errors:
            error = _find(errors) or errors.exceptions[0]
            own = isinstance(error, UnknownTopic | RecordTooLarge)
            if isinstance(error, LogError | StoreError | EngineLost) and not own:
                raise error from errors
            # This task's fault, and no reason to end the others.
            reason = "unknown-topic" if isinstance(error, UnknownTopic) else "not-playable"
            await self._bury(opened.record, reason, error, shift, intake)
        finally:
            self._forget(opened)
        intake.finish(opened.positions)

    async def _play_group(self, opened: _Open, shift: "_Shift") -> None:
        task = opened.task
        async with asyncio.TaskGroup() as samples:
            for index in range(task.group_size):
                place = await self._places.enter(task.environment, opened.order, lambda: self._may_play(opened))
                opened.begun = True
                sample = samples.create_task(self._sample(opened, index, place, shift))
                # A task that is cancelled before it began never comes to its own end.
                sample.add_done_callback(place.leave)

    async def _sample(self, opened: _Open, index: int, place: Place, shift: "_Shift") -> None:
        task, abort = opened.task, Abort()
        if (reason := self._orders.cancelled(task)) is not None:
            abort.request(reason)
        opened.aborts.append(abort)
        name = trajectory_id(task.task_id, index, task.attempt)
        # These three lines are a worker's journal: what it had under way, should it be killed.
        logger.debug("sample %s begins", name)
        playing = run_episode(
            task,
            index,
            make_environment(self._environments, task.environment),
            self._engine,
            self._renderer,
            self._settings.own_limits.get(task.environment, self._settings.limits),
            gates=self._gates,
            abort=abort,
        )
        # The place is free once the record is in the writer's buffer or on the disk: where neither takes it the
        # episodes stop. No name for the trajectory: what waits on the disk must not be in memory, too.
        delivered = shift.delivery.deliver(await playing, task.traceparent, appended=place.leave)
        opened.aborts.remove(abort)
        logger.debug("sample %s is played", name)
        logger.debug("sample %s is acknowledged at %s", name, await delivered)

    def _may_play(self, opened: _Open) -> bool:
        """Hold a task back while its environment is paused, or the engine's policy lags too far behind."""
        if opened.begun or self._orders.cancelled(opened.task) is not None:
            return True
        lag = self._settings.max_lag
        return not self._orders.paused(opened.task.environment) and (
            lag is None or self._policy.lag(self._engine) <= lag
        )

    def _refresh(self) -> None:
        """Something changed in the orders, or in the policy."""
        for opened in self._open.values():
            if (reason := self._orders.cancelled(opened.task)) is not None:
                for abort in opened.aborts:
                    abort.request(reason)
        self._places.refresh()

    async def _bury(self, record: Record, reason: str, error: Exception, shift: "_Shift", intake: Intake) -> None:
        """Dead-letter a task that cannot be served. Raises `LogError` where that fails: it must not be lost."""
        logger.error("%s is no task that can be served: %s: %s", record.position, reason, error)
        await asyncio.to_thread(shift.letters.send, record, reason=reason, error=str(error))
        intake.finish([record.position])

    def _abandon(self, partition: Partition) -> None:
        """What lies in this partition is another worker's now."""
        for opened in list(self._open.values()):
            opened.positions = {position for position in opened.positions if position.partition != partition}
            if not opened.positions:
                logger.info("task %s went to another worker", opened.task.task_id)
                self._end(opened)

    def _end(self, opened: _Open) -> None:
        """End a task without records; whoever gets it next plays it from the start."""
        self._forget(opened)
        if opened.runner is not None:
            opened.runner.cancel()

    def _forget(self, opened: _Open) -> None:
        key = opened.task.task_id, opened.task.attempt
        # By then another partition may have brought the same task anew.
        if self._open.get(key) is opened:
            del self._open[key]


class _Shift:
    """What one call of `run` works with."""

    def __init__(self, parts: asyncio.TaskGroup, delivery: Delivery, letters: DeadLetters) -> None:
        self.delivery, self.letters = delivery, letters
        self._parts = parts
        self._runners: set[asyncio.Task[None]] = set()

    def start(self, runner: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        task = self._parts.create_task(runner)
        self._runners.add(task)
        task.add_done_callback(self._runners.discard)
        return task

    async def wait(self) -> None:
        """Until everything started has ended; what it raised is raised by the group of `run`."""
        if self._runners:
            await asyncio.wait(self._runners)


def _find(errors: BaseException) -> EngineLost | LogError | StoreError | None:
    """That the engine is lost, or else the first refusal of log or store, in a group of errors."""
    found = [error for error in _flatten(errors) if isinstance(error, EngineLost | LogError | StoreError)]
    return next((error for error in found if isinstance(error, EngineLost)), found[0] if found else None)


def _flatten(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from _flatten(inner)
    else:
        yield error
