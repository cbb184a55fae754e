"""What runs now in a stack's folder, written down so that another process can look at it and end it.

A state is believed only as far as its processes are still the same ones: same boot, same pid, same start time. What is
left is stale, and says nothing.
"""

import fcntl
import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from .endpoints import Broker
from .plan import write_private
from .process import Process, boot_id, is_alive

FILE = "state.json"


class Child(NamedTuple):
    """One server and the guard over it."""

    guard: Process
    server: Process
    port: int
    grace: float
    """Seconds that its guard gives it to end."""

    @property
    def alive(self) -> bool:
        return is_alive(self.server)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The servers of one folder."""

    boot: str
    broker: Broker
    expected: tuple[str, ...]
    """Names of the servers that make it whole."""
    owner: Process | None
    """Who goes on owning them; None in the background."""
    children: Mapping[str, Child] = field(default_factory=dict[str, Child])

    def living(self) -> dict[str, Child]:
        """The servers (or guards) that are still there."""
        if self.boot != boot_id():
            return {}
        return {name: child for name, child in self.children.items() if child.alive or is_alive(child.guard)}

    def with_child(self, name: str, child: Child) -> Self:
        return replace(self, children={**self.children, name: child})

    def save(self, directory: Path) -> None:
        plain = {"boot": self.boot, "broker": self.broker, "expected": self.expected, "owner": self.owner}
        write_private(directory / FILE, json.dumps({**plain, "children": self.children}, indent=2))


def load_state(directory: Path) -> State | None:
    """The folder's state; None where nothing was started or everything was stopped."""
    try:
        told: dict[str, Any] = json.loads((directory / FILE).read_text())
    except FileNotFoundError:
        return None
    return State(
        boot=told["boot"],
        broker=told["broker"],
        expected=tuple(told["expected"]),
        owner=Process(*told["owner"]) if told["owner"] else None,
        children={
            name: Child(Process(*guard), Process(*server), port, grace)
            for name, (guard, server, port, grace) in told["children"].items()
        },
    )


def clear_state(directory: Path) -> None:
    (directory / FILE).unlink(missing_ok=True)


@contextmanager
def folder_lock(directory: Path) -> Generator[None]:
    """Only one at a time starts or stops the stack of a folder; the others wait."""
    with (directory / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
