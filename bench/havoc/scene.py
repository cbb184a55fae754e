"""What runs: the servers of a local stack, and the roles of a run as guarded processes. Who dies is started again.

    set up:   stack -> topics -> model -> trainer, workers -> dispatcher
    look:     logs, records, deaths; whoever is due starts again, servers without being waited for
    kill:     -9, at once

Children end with this process, however it ends: each has a guard.
"""

import random
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from havoc.journal import Follow, Journal
from havoc.plan import MODEL, Kind, Plan, write_config
from havoc.tail import Seen, Tail, count_partitions, lagging_replicas
from rollstream.app.context import Context
from rollstream.app.crew import Crew
from rollstream.app.demo.models import make_model
from rollstream.app.demo.plan import Plan as ModelPlan
from rollstream.app.topics import apply_topics
from rollstream.infra.config import Config
from rollstream.infra.stack import LocalStack, StackError
from rollstream.schemas import Receipt, WireError, decode_as

MOST_FAILURES = 30
"""Failed starts in a row of one role: a server that is away lets it fail, over and over."""
LONGEST_OUTAGE = 2.0
"""Seconds that a killed server stays away, at most."""


@dataclass(slots=True)
class Server:
    """A server of the stack, as the scene looks after it."""

    again_at: float | None = None
    """When it is launched again; None while it runs."""
    launched: float = 0.0
    ready: "Future[None] | None" = None
    """Done once it serves; None where it was never launched anew."""


@dataclass(slots=True)
class Signs:
    """What was seen last, in seconds of the monotonic clock."""

    steps: int = 0
    """Receipts seen."""
    receipt: float = 0.0
    """A receipt was written: its checkpoint is being published."""
    join: float = 0.0
    """A worker or the trainer began to join its group."""
    deaths: list[str] = field(default_factory=list[str])
    """Roles that ended by themselves, with their last words."""


class Scene:
    """Use as a context manager, by one thread."""

    def __init__(self, plan: Plan, rng: random.Random) -> None:
        self.plan, self._rng = plan, rng
        self.workers = tuple(f"worker-{number}" for number in range(plan.workers))
        self.stack = LocalStack(plan.folder, broker=plan.broker, brokers=plan.brokers)
        self.crew = Crew(plan.logs, most_failures=MOST_FAILURES)
        self.journal = Journal({worker: plan.logs / f"{worker}.log" for worker in self.workers})
        self.signs = Signs()
        self.seen: dict[str, str] = {}
        """Place -> trajectory id, of every record that the tail saw."""
        self.serving: set[str] = set()
        """Workers that began to serve, in any of their lives."""
        self._trainer_log = Follow(plan.logs / "trainer.log")
        self._servers = {name: Server() for name in self.stack.components}
        self._pool = ThreadPoolExecutor(len(self._servers) + 1, thread_name_prefix="chaos")

    def __enter__(self) -> Self:
        model = self._pool.submit(make_model, ModelPlan(seed=self.plan.seed), self.plan.folder / MODEL)
        try:
            self.endpoints = self.stack.start()
            write_config(self.plan, self.endpoints)
            self.here = Context(Config.load(self.plan.config, environ={}))
            apply_topics(self.here)
            self.topics = count_partitions(self.endpoints.bootstrap, self._is_read)
            model.result()
            self.tail = Tail(self.endpoints.bootstrap, self.topics)
            self._start_roles()
        except BaseException:  # whatever ended it, Ctrl-C too: nothing may stay behind
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.crew.stop()
        finally:
            self.stack.stop()
            self._pool.shutdown()
            if hasattr(self, "tail"):
                self.tail.close()
            if hasattr(self, "here"):
                self.here.close()

    def start(self, name: str, *arguments: str) -> None:
        """Run `rollstream ARGUMENTS` as a guarded process."""
        self.crew.start(name, "-c", str(self.plan.config), *arguments)

    def look(self, timeout: float = 0.05) -> None:
        """Take in what happened, and start again who is due. Raises `StackError` for who does not stay alive."""
        self._hear(self.tail.look(timeout))
        self._read_logs()
        for death in self.crew.check():
            self._read_logs()
            self.journal.died(death.name, time.time(), "died")
            if death.status != 137:
                self.signs.deaths.append(str(death))
        for name, server in self._servers.items():
            self._look_after(name, server)

    # ------------------------------------------------------------------ victims

    def members(self, kind: Kind) -> tuple[str, ...]:
        """The processes of a kind."""
        brokers = tuple(name for name in self._servers if name.startswith("broker"))
        groups: dict[Kind, tuple[str, ...]] = {
            "trainer": ("trainer",),
            "dispatcher": ("dispatcher",),
            "worker": self.workers,
            "broker": brokers,
            "store": ("store",),
        }
        return groups[kind]

    def alive(self, name: str) -> bool:
        if name in self._servers:
            return self._servers[name].again_at is None and self.stack.alive(name)
        return self.crew.alive(name)

    def age(self, name: str) -> float:
        """Seconds since it was started the last time."""
        return time.monotonic() - self._servers[name].launched if name in self._servers else self.crew.age(name)

    def ready(self, name: str) -> bool:
        """Does this server serve, as far as is known?"""
        server = self._servers[name]
        return server.again_at is None and (server.ready is None or server.ready.done())

    def expendable(self, name: str) -> bool:
        """May it be killed now? Of several brokers one at a time: only while the others have every record too."""
        if not self.alive(name):
            return False
        others = [broker for broker in self.members("broker") if broker != name]
        if name not in self.members("broker") or not others:
            return True
        # One that has just been killed may be killed again while it starts.
        return all(self.ready(broker) for broker in others) and (
            not self.ready(name) or lagging_replicas(self.endpoints.bootstrap) == 0
        )

    def kill(self, name: str) -> float:
        """Kill -9; returns when it was dead, in seconds since the epoch."""
        if name in self._servers:
            self.stack.kill(name)
            server = self._servers[name]
            server.again_at = time.monotonic() + self._rng.uniform(0.0, LONGEST_OUTAGE)
            return time.time()
        self.crew.kill(name)
        moment = time.time()
        self._read_logs()
        self.journal.died(name, moment, "killed")
        return moment

    # ------------------------------------------------------------------ inside

    def _is_read(self, topic: str) -> bool:
        names = self.here.names
        return names.environment(topic) is not None or topic in (names.ledger, names.tasks)

    def _start_roles(self) -> None:
        """The dispatcher comes once all workers serve: so the first tasks are not theirs who join first."""
        for worker in self.workers:
            self.start(worker, "-vv", "work")
        self.start("trainer", "-v", "train")

    def _hear(self, records: list[Seen]) -> None:
        for record in records:
            if record.topic == self.here.names.ledger:
                self._hear_receipt(record.value or b"")
            elif record.topic != self.here.names.tasks:
                self.seen[record.place] = record.headers.get("rollstream.trajectory", b"").decode()

    def _hear_receipt(self, value: bytes) -> None:
        with suppress(WireError):
            decode_as(Receipt, value)
            self.signs.steps += 1
            self.signs.receipt = time.monotonic()

    def _read_logs(self) -> None:
        joining = self.journal.read()
        self.serving |= joining
        if joining or any(" goes on from policy " in line for line in self._trainer_log.read()):
            self.signs.join = time.monotonic()

    def _look_after(self, name: str, server: Server) -> None:
        now = time.monotonic()
        if server.again_at is None and not self.stack.alive(name):
            self.signs.deaths.append(f"{name} ended by itself")
            server.again_at = now
        if server.again_at is not None and now >= server.again_at:
            self.stack.launch(name)
            server.again_at, server.launched = None, time.monotonic()
            server.ready = self._pool.submit(self._await, name)

    def _await(self, name: str) -> None:
        # It may be killed meanwhile: then it is launched again, and awaited anew.
        with suppress(StackError):
            self.stack.await_answer(name)
