"""The stack of `rollstream up`: it stays when the command has ended, until `down`.

    up --> state.json, rollstream.toml --> status --> down
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .component import Progress
from .endpoints import Broker, Endpoints
from .layout import plan_endpoints
from .local import LocalStack, end_stack, ignore_progress
from .metadata import broker_answers
from .plan import load_plan
from .seaweed import STORE, store_answers
from .state import folder_lock, load_state

DEFAULT_DIRECTORY = Path(".rollstream")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentStatus:
    """One server as it is now."""

    name: str
    port: int
    pid: int
    """Its process, or what it was when `alive` is False."""
    alive: bool
    answering: bool
    """It serves its clients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackStatus:
    """The stack of one folder as it is now."""

    directory: Path
    up: bool
    """Every server lives and answers."""
    stale: bool
    """It was started and never stopped, but none of it lives: the machine was restarted, or everything was killed."""
    owner: int | None
    """Process that the stack ends with; None for one in the background, or none at all."""
    components: Mapping[str, ComponentStatus]
    endpoints: Endpoints | None
    """None where nothing was started."""


def up(
    directory: Path = DEFAULT_DIRECTORY,
    *,
    broker: Broker = "tansu",
    brokers: int = 1,
    progress: Progress = ignore_progress,
) -> Endpoints:
    """Start a stack that outlives this process. Raises as `LocalStack.start`; `AlreadyUp` carries the endpoints."""
    return LocalStack(directory, broker=broker, brokers=brokers, background=True).start(progress)


def down(directory: Path = DEFAULT_DIRECTORY) -> tuple[str, ...]:
    """End the stack of this folder, the data stay. Returns the servers that it ended; none where none lived."""
    if not directory.exists():
        return ()
    with folder_lock(directory):
        state = load_state(directory)
        if state is None:
            return ()
        living = tuple(state.living())
        end_stack(directory, state)
    return living


def status(directory: Path = DEFAULT_DIRECTORY) -> StackStatus:
    """Look at every server of this folder's stack, and ask each that lives whether it answers."""
    state, plan = load_state(directory), load_plan(directory)
    if state is None or plan is None:
        return StackStatus(directory=directory, up=False, stale=False, owner=None, components={}, endpoints=None)
    living = state.living()
    components: dict[str, ComponentStatus] = {}
    for name, child in state.children.items():
        alive = name in living and child.alive
        answering = alive and (store_answers(plan) if name == STORE else broker_answers(child.port))
        components[name] = ComponentStatus(
            name=name, port=child.port, pid=child.server.pid, alive=alive, answering=answering
        )
    return StackStatus(
        directory=directory,
        up=all(name in components and components[name].answering for name in state.expected),
        stale=not living,
        owner=state.owner.pid if state.owner else None,
        components=components,
        endpoints=plan_endpoints(plan, state.broker),
    )
