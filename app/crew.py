"""Roles of a run as child processes: each under a guard, so that none outlives its owner; those that die start again.

start --> running --exit 0--> done
             |----other-----> waiting --> started again; given up after a few short lives in a row
             |----kill------> waiting --> started again, as often as it is asked for
             |----stop------> SIGTERM, a grace, SIGKILL
"""

import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..infra.stack import StackError
from ..infra.stack.children import Guard, end_children, kill_child, launch_child, quote_log
from ..infra.stack.component import Component
from ..infra.stack.state import Child

SHORT_LIFE = 15.0
"""Seconds within which a death counts as another failed start."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 8.0
"""Seconds before a process is started again; doubled with each failed start."""


class Death(NamedTuple):
    """A process that ended otherwise than by itself with status 0. Renders itself."""

    name: str
    status: int
    """As a shell tells it: 137 for one that was killed."""
    last_words: str
    """The last line of its log."""

    def __str__(self) -> str:
        how = f"killed by signal {self.status - 128}" if self.status > 128 else f"exit status {self.status}"
        return f"{self.name} died ({how}) and is started again; its last words: {self.last_words or 'none'}"


def process_environment(threads: int) -> dict[str, str]:
    """So many threads for torch: several processes share the cores. No network."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


@dataclass(slots=True)
class _Member:
    component: Component
    child: Child
    guard: Guard
    born: float = field(default_factory=time.monotonic)
    restarts: int = 0
    failures: int = 0
    """Short lives in a row."""
    again_at: float | None = None
    """When it is started again; None while it runs."""
    killed: bool = False
    """By `kill`, and not started again yet."""
    done: bool = False


class Crew:
    """Python processes that run one command line of rollstream each. Used by one thread."""

    def __init__(self, directory: Path, *, threads: int = 1, most_failures: int = 5) -> None:
        """`directory` holds their logs; `most_failures` is how many short lives in a row a process may have."""
        self._directory, self._threads, self._most = directory, threads, most_failures
        self._members: dict[str, _Member] = {}

    @property
    def restarts(self) -> int:
        """How often a process had to be started again."""
        return sum(member.restarts for member in self._members.values())

    def pid(self, name: str) -> int:
        """Of the process itself, not of its guard."""
        return self._members[name].child.server.pid

    def alive(self, name: str) -> bool:
        """Does its process live?"""
        member = self._members[name]
        return not member.done and member.again_at is None and member.child.alive

    def age(self, name: str) -> float:
        """Seconds since it was started, or started again."""
        return time.monotonic() - self._members[name].born

    def kill(self, name: str) -> None:
        """Kill -9 this one, as a crash would, and wait until it is gone. That is no failed start, however young it is.

        Raises `StackError` where it does not end.
        """
        member = self._members[name]
        member.killed = True
        kill_child(member.child)

    def start(self, name: str, *arguments: str) -> None:
        """Run `rollstream ARGUMENTS` under this name."""
        component = Component(
            name=name,
            port=0,
            directory=Path.cwd(),
            log=self._directory / f"{name}.log",
            command=(sys.executable, "-m", "rollstream.app.main", *arguments),
            answers=lambda: True,
            env=process_environment(self._threads),
            grace=20.0,
        )
        self._members[name] = _Member(component, *launch_child(component, owned=True))

    def check(self) -> list[Death]:
        """Look after everybody: note who died, start them again when their pause is over. Returns the new deaths.

        Raises `StackError`, with the end of its log, for one that does not stay alive.
        """
        deaths = [death for name, member in self._members.items() if (death := self._look(name, member))]
        for member in self._members.values():
            if member.again_at is not None and time.monotonic() >= member.again_at:
                _start_again(member)
        return deaths

    def done(self, name: str) -> bool:
        """Did it end by itself, with exit status 0, or was it stopped?"""
        return self._members[name].done

    def stop(self, *names: str) -> None:
        """End these, or everybody, and wait. They count as done."""
        ending = [self._members[name] for name in names or self._members if not self._members[name].done]
        end_children(member.child for member in ending)
        for member in ending:
            member.done, member.again_at = True, None
            member.guard.wait()

    def _look(self, name: str, member: _Member) -> Death | None:
        if member.done or member.again_at is not None or (status := member.guard.poll()) is None:
            return None
        if status == 0:
            member.done = True
            return None
        member.failures = _count_failures(member)
        if member.failures > self._most:
            raise StackError(f"{name} died {member.failures} times in a row; {quote_log(member.component.log)}")
        member.again_at = time.monotonic() + min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** max(0, member.failures - 1))
        return Death(name, status, last_words(member.component.log))


def _count_failures(member: _Member) -> int:
    if member.killed:
        return member.failures
    return member.failures + 1 if time.monotonic() - member.born < SHORT_LIFE else 1


def _start_again(member: _Member) -> None:
    member.child, member.guard = launch_child(member.component, owned=True)
    member.born, member.again_at, member.killed = time.monotonic(), None, False
    member.restarts += 1


def last_words(log: Path) -> str:
    """The last line that the process itself wrote."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()[-25:]]
    return next((line for line in reversed(lines) if line and not line.startswith("guard: ")), "")
