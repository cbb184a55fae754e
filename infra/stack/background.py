"""The stack of `rollstream up`: it stays when the command has ended, until `down`.

up --> state.json, rollstream.toml --> status --> down
"""

from dataclasses import dataclass
from pathlib import Path

from .component import Progress
from .endpoints import Broker, Endpoints
from .local import LocalStack, end_stack, ignore_progress
from .metadata import cluster_nodes
from .plan import Plan, load_plan
from .seaweed import STORE, store_answers
from .state import State, folder_lock, load_state

DEFAULT_DIRECTORY = Path(".rollstream")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentStatus:
    """One server as it is now."""

    name: str
    port: int
    pid: int | None
    """Its process, or what that was while it lived; None if it was never started."""
    alive: bool
    answering: bool
    """It serves its clients."""


def up(
    directory: Path = DEFAULT_DIRECTORY,
    *,
    broker: Broker = "tansu",
    brokers: int = 1,
    progress: Progress = ignore_progress,
) -> Endpoints:
    """Start a stack that outlives this process. Raises as `LocalStack.start`; `AlreadyUp` carries the endpoints."""
    return LocalStack(directory, broker=broker, brokers=brokers, background=True).start(progress)


def down(directory: Path = DEFAULT_DIRECTORY, *, progress: Progress = ignore_progress) -> tuple[str, ...]:
    """End the stack of this folder; the data stay. Returns the names of the servers that it ended.

    Where the state is stale (nothing of it lives) it only forgets it: a process that got one of the pids since is safe.
    """
    if not directory.exists():
        return ()
    with folder_lock(directory):
        state = load_state(directory)
        if state is None:
            return ()
        living = tuple(state.living())
        progress(f"ending {', '.join(living)}" if living else "nothing of the stack lives, forgetting it")
        end_stack(directory, state)
    return living


def status(directory: Path = DEFAULT_DIRECTORY) -> tuple[ComponentStatus, ...]:
    """Look at every server that this folder's stack should have, and ask each that lives whether it answers.

    Empty where nothing was started, or everything was stopped; all dead where the machine was restarted in between.
    """
    state, plan = load_state(directory), load_plan(directory)
    if state is None or plan is None:
        return ()
    return tuple(_look_at(name, state, plan) for name in state.expected)


def _look_at(name: str, state: State, plan: Plan) -> ComponentStatus:
    port = plan.ports["s3" if name == STORE else name]
    child = state.children.get(name)
    alive = child is not None and name in state.living() and child.alive
    answering = alive and (store_answers(plan) if name == STORE else bool(cluster_nodes(port, plan.cluster)))
    return ComponentStatus(
        name=name, port=port, pid=child.server.pid if child else None, alive=alive, answering=answering
    )
