"""The dispatcher: turns environments and seeds into tasks, as fast as slots come free.

    replay tasks + ledger (what was in flight when the last dispatcher ended)
    loop:  slot free? -> next task of the environment that is due -> rollstream.tasks
           ledger, policy -> settle, announce -> slots come free
           dead letters: a task among them -> its slot is free, nothing will ever come of it

It keeps no state of its own: the log has it all.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..infra.deadletters import TOPIC
from ..infra.log import Consumer, Log, Partition, Record, Writer, await_position
from ..infra.scan import scan
from ..infra.schemabook import open_schemas
from ..infra.topics import Names
from ..schemas import PolicyUpdate, Receipt, Sampling, SchemaAway, Schemas, Task, WireError, decode, encode
from .slots import Slots

logger = logging.getLogger(__name__)

PATIENCE = 60.0
"""Seconds for the log to acknowledge a task."""
RETRY = 1.0
"""Seconds until a schema that nobody could tell is asked for again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the tasks of one environment come from."""

    environment: str
    ratio: float = 1.0
    """Share of the groups, on any positive scale."""
    group_size: int = 8
    first_seed: int = 0
    last_seed: int = (1 << 31) - 1
    """Seeds run from first to last, both included, and begin again."""
    sampling: Sampling = field(default_factory=Sampling)
    max_turns: int = 0
    payload: Mapping[str, str] = field(default_factory=dict[str, str])

    def task(self, run: str, number: int) -> Task:
        """The `number`-th task of this source: the same in every life of the dispatcher."""
        return Task(
            task_id=_task_id(run, self.environment, number),
            environment=self.environment,
            seed=self.first_seed + number % (self.last_seed - self.first_seed + 1),
            group_size=self.group_size,
            sampling=self.sampling,
            max_turns=self.max_turns,
            payload=self.payload,
            created_ms=time.time_ns() // 1_000_000,
        )


class Dispatcher:
    """Dispatches the tasks of one run. One at a time; a second one's tasks are recognised as duplicates."""

    def __init__(
        self,
        log: Log,
        names: Names,
        run: str,
        sources: Mapping[str, Source],
        *,
        max_staleness: int,
        groups_per_step: int,
        schemas: Schemas | None = None,
    ) -> None:
        """`sources`: by their environments. Raises `ValueError` for one under another name."""
        if wrong := [name for name, source in sources.items() if source.environment != name]:
            raise ValueError(f"expected each source under the name of its environment, found others under {wrong}")
        self._log, self._names, self._run, self._sources = log, names, run, dict(sources)
        self._schemas = schemas or open_schemas(log, names)
        ratios = {name: source.ratio for name, source in sources.items()}
        self.slots = Slots(max_staleness=max_staleness, groups_per_step=groups_per_step, ratios=ratios)
        self._next = dict.fromkeys(sources, 0)
        self._stop = threading.Event()

    def stop(self) -> None:
        """Ask `run` to end. Thread-safe; fine in a signal handler."""
        self._stop.set()

    def run(self, *, limit: int | None = None, progress: Callable[[Task], None] | None = None) -> int:
        """Dispatch until stopped, or until `limit` tasks were appended; returns how many. Raises `LogError`."""
        self._replay()
        start = self._feedback()
        sent = 0
        with self._log.read(start) as feedback, self._log.writer() as writer:
            while not self._stop.is_set() and (limit is None or sent < limit):
                task = self._send(writer)
                if task is not None:
                    sent += 1
                    if progress is not None:
                        progress(task)
                self._listen(feedback, 0.2 if task is None else 0.0)
        return sent

    def _send(self, writer: Writer) -> Task | None:
        """Append the task that is due; None where no slot is free."""
        environment = self.slots.pick()
        if environment is None:
            return None
        task = self._sources[environment].task(self._run, self._next[environment])
        self._next[environment] += 1
        self.slots.take(environment, task.task_id)
        future = writer.append(self._names.tasks, encode(task, schemas=self._schemas), key=task.task_id.encode())
        await_position(future, PATIENCE, f"task {task.task_id}")
        return task

    def _replay(self) -> None:
        """Find the tasks of this run already in the log: they hold slots until a receipt names them."""
        for record in scan(self._log, self._log.partitions(self._names.tasks)):
            task = self._decoded(record)
            if not isinstance(task, Task) or (number := self._number(task)) is None:
                continue
            if task.environment in self._next:
                self._next[task.environment] = max(self._next[task.environment], number + 1)
            self.slots.take(task.environment, task.task_id)

    def _number(self, task: Task) -> int | None:
        """Which of this run's tasks it is; None for a task of another run, or of nobody's."""
        digits = task.task_id.rpartition(".")[2]
        if not (digits.isascii() and digits.isdigit() and len(digits) < 19):
            return None
        number = int(digits)
        return number if task.task_id == _task_id(self._run, task.environment, number) else None

    def _topics(self) -> tuple[str, ...]:
        return self._names.ledger, self._names.policy, self._names.dead_letter

    def _feedback(self) -> dict[Partition, int]:
        """Apply what came back up to now; returns where to go on."""
        partitions = [p for t in self._topics() for p in self._log.partitions(t)]
        bounds = self._log.bounds(partitions)
        stop = {p: end for p, (_, end) in bounds.items()}
        for record in scan(self._log, {p: first for p, (first, _) in bounds.items()}, stop=stop):
            self._apply(record)
        logger.info("%r after replay; next tasks %s", self.slots, self._next)
        return stop

    def _listen(self, feedback: Consumer, timeout: float) -> None:
        for record in feedback.poll(500, timeout):
            self._apply(record)

    def _apply(self, record: Record) -> None:
        if (
            record.partition.topic == self._names.dead_letter
            and record.headers.get(TOPIC) != self._names.tasks.encode()
        ):
            return
        value = self._decoded(record)
        if isinstance(value, Receipt) and value.run == self._run:
            self.slots.settle(value.groups, value.version)
        elif isinstance(value, PolicyUpdate) and value.run == self._run:
            self.slots.announce(value.version)
        elif isinstance(value, Task):
            self.slots.release(value.task_id)

    def _decoded(self, record: Record) -> object:
        """The value, or None for what cannot be read: trainer and workers report it, here it only holds no slot.

        A schema that nobody can tell now is waited for, until the dispatcher is stopped.
        """
        while record.value is not None:
            try:
                return decode(record.value, schemas=self._schemas)
            except WireError as error:
                logger.warning("%s cannot be read: %s", record.position, error)
                return None
            except SchemaAway as away:
                logger.warning("%s has to wait: %s", record.position, away)
                if self._stop.wait(RETRY):
                    return None
        return None


def _task_id(run: str, environment: str, number: int) -> str:
    return f"{run}.{environment}.{number:08d}"
