"""A local stack, from a folder to endpoints.

    settle plan (ports, keys) -> store -> buckets -> brokers, all at once -> whole cluster -> rollstream.toml

Each server is written into the folder's state as soon as it runs, so that whatever interrupts a start, everything that
was started can be ended.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from .children import Guard, await_answer, end_children, kill_child, launch_child
from .component import Component, Progress
from .endpoints import AlreadyUp, Broker, Endpoints, StackError
from .layout import component_names, plan_components, plan_endpoints
from .metadata import cluster_nodes
from .plan import load_plan, settle_plan, write_private
from .process import boot_id, identify_process
from .seaweed import STORE, create_buckets, remove_sockets
from .state import State, clear_state, folder_lock, load_state

ENDPOINTS_FILE = "rollstream.toml"
CLUSTER_PATIENCE = 30.0
"""Seconds that brokers which answer may take to know of each other."""


def ignore_progress(_line: str) -> None:
    """What `start` calls where nobody looks on."""


class LocalStack:
    """SeaweedFS and Tansu, or SeaweedFS and Apache Kafka, as child processes on loopback.

        with LocalStack(Path(".rollstream")) as stack:
            print(stack.endpoints.bootstrap)

    The servers end with this process, however it ends; with `background` they stay until `down(directory)`. What they
    stored stays in the directory, and a later start goes on with it.
    """

    def __init__(
        self, directory: Path, *, broker: Broker = "tansu", brokers: int = 1, background: bool = False
    ) -> None:
        allowed = (1, 3) if broker == "kafka" else (1,)
        if brokers not in allowed:
            raise StackError(f"brokers: expected {' or '.join(map(str, allowed))} for {broker}, found {brokers}")
        self._directory = directory.absolute()
        self._broker: Broker = broker
        self._brokers = brokers
        self._background = background
        self._components: dict[str, Component] = {}
        self._guards: dict[str, Guard] = {}
        self._state: State | None = None
        self._endpoints: Endpoints | None = None

    def __repr__(self) -> str:
        return f"LocalStack({str(self._directory)!r}, broker={self._broker!r}, brokers={self._brokers})"

    @property
    def directory(self) -> Path:
        return self._directory

    @property
    def endpoints(self) -> Endpoints:
        """Raises `StackError` before `start`."""
        if self._endpoints is None:
            raise StackError(f"{self!r} is not started: call start() or use it as a context manager")
        return self._endpoints

    @property
    def components(self) -> tuple[str, ...]:
        """Names for `kill`, `restart` and `pid`: "store", "broker-1" and so on."""
        return component_names(self._brokers)

    def start(self, progress: Progress = ignore_progress) -> Endpoints:
        """Start every server and wait until all serve.

        Raises `AlreadyUp` where a stack runs in this folder, `StackError` with the end of the log of a server that does
        not start (nothing is left running), `MissingExtra` for a package that is not installed.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        with folder_lock(self._directory):
            refuse_second(self._directory)
            try:
                self._endpoints = self._start_all(progress)
            except BaseException:  # whatever ended it, Ctrl-C too: no server may stay behind
                self._end_all()
                raise
        return self._endpoints

    def stop(self) -> None:
        """End every server. Idempotent; the data stay."""
        if self._state is None:
            return
        with folder_lock(self._directory):
            self._end_all()
        self._endpoints = None

    def __enter__(self) -> Self:
        if self._endpoints is None:
            self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def pid(self, component: str) -> int:
        """Process id of a server that was started."""
        return self._running_state(component).children[component].server.pid

    def kill(self, component: str) -> None:
        """Kill -9 one server, as a crash would, and wait until it is gone."""
        kill_child(self._running_state(component).children[component])
        self._reap(component)

    def restart(self, component: str, progress: Progress = ignore_progress) -> None:
        """Start one server again, on the same data and port, and wait until it serves; ended first if it lives."""
        self.launch(component)
        self.await_answer(component, progress)

    def launch(self, component: str) -> None:
        """As `restart`, without waiting."""
        child = self._running_state(component).children[component]
        end_children([child])
        self._reap(component)
        self._launch(self._components[component])

    def await_answer(self, component: str, progress: Progress = ignore_progress) -> None:
        """Wait until a server that was launched serves; any thread may. Raises `StackError` where it ends instead."""
        await_answer(self._components[component], self._running_state(component).children[component], progress)

    def alive(self, component: str) -> bool:
        """Does the process of this server live?"""
        return self._running_state(component).children[component].alive

    # ------------------------------------------------------------------ start and end

    def _start_all(self, progress: Progress) -> Endpoints:
        plan = settle_plan(self._directory, kafka_brokers=self._brokers if self._broker == "kafka" else 0)
        components = plan_components(self._directory, plan, self._broker)
        self._components = {component.name: component for component in components}
        owner = None if self._background else identify_process(os.getpid())
        self._state = State(boot=boot_id(), broker=self._broker, expected=self.components, owner=owner)
        self._state.save(self._directory)
        store, brokers = components[0], components[1:]
        progress(f"{STORE}: starting on port {store.port}")
        self._launch(store)
        self.await_answer(store.name, progress)
        create_buckets(plan)
        for broker in brokers:
            progress(f"{broker.name}: starting on port {broker.port}")
            self._launch(broker)
        for broker in brokers:
            self.await_answer(broker.name, progress)
        await_cluster(brokers, plan.cluster)
        endpoints = plan_endpoints(plan, self._broker)
        write_private(self._directory / ENDPOINTS_FILE, endpoints.to_toml())
        return endpoints

    def _end_all(self) -> None:
        if self._state is not None:
            end_stack(self._directory, self._state)
        for name in tuple(self._guards):
            self._reap(name)
        self._state = None

    def _launch(self, component: Component) -> None:
        child, guard = launch_child(component, owned=not self._background)
        self._guards[component.name] = guard
        self._state = self._running_state(component.name).with_child(component.name, child)
        self._state.save(self._directory)

    def _running_state(self, component: str) -> State:
        if component not in self.components:
            raise StackError(f"{self!r} has no component {component!r}: it has {', '.join(self.components)}")
        if self._state is None:
            raise StackError(f"{self!r} is not started: call start() or use it as a context manager")
        return self._state

    def _reap(self, component: str) -> None:
        """Collect the exit status of a guard that is gone, so that it does not stay as a zombie."""
        if guard := self._guards.pop(component, None):
            guard.wait()


def refuse_second(directory: Path) -> None:
    """Raise `AlreadyUp` where a stack runs in this folder, `StackError` where a part of one does."""
    state, plan = load_state(directory), load_plan(directory)
    living = state.living() if state else {}
    if state is None or plan is None or not living:
        return
    whose = f"started by process {state.owner.pid}" if state.owner else "in the background"
    if missing := [name for name in state.expected if name not in living]:
        raise StackError(
            f"a part of a stack runs in {directory} ({whose}): {', '.join(living)} live, {', '.join(missing)} not. "
            f"End it first: rollstream down --dir {directory}"
        )
    raise AlreadyUp(f"a stack is up already in {directory} ({whose})", plan_endpoints(plan, state.broker))


def await_cluster(brokers: Sequence[Component], cluster: str) -> None:
    """Wait until every broker knows of all of them. Raises `StackError`."""
    deadline = time.monotonic() + CLUSTER_PATIENCE
    while any(len(cluster_nodes(broker.port, cluster)) < len(brokers) for broker in brokers):
        if time.monotonic() > deadline:
            seen = {broker.name: sorted(cluster_nodes(broker.port, cluster)) for broker in brokers}
            raise StackError(f"the brokers did not find each other in {CLUSTER_PATIENCE:.0f} s, they see {seen}")
        time.sleep(0.1)


def end_stack(directory: Path, state: State) -> None:
    """End what lives of a stack, the brokers before the store that they may write to, and forget it."""
    living = state.living()
    end_children(child for name, child in living.items() if name != STORE)
    end_children(child for name, child in living.items() if name == STORE)
    # Another stack may have been started here since, by somebody who ended this one.
    if load_state(directory) == state:
        clear_state(directory)
        (directory / ENDPOINTS_FILE).unlink(missing_ok=True)
    if plan := load_plan(directory):
        remove_sockets(plan)
