"""The demo's processes: each under a guard, so that none outlives the demo; those that die are started again.

start --> running --exit 0--> done
             |----other-----> started again, at most `most_restarts` times
             |----stop------> SIGTERM, a grace, SIGKILL
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from ...infra.stack import StackError
from ...infra.stack.children import Guard, end_children, launch_child, quote_log
from ...infra.stack.component import Component
from ...infra.stack.state import Child


def process_environment() -> dict[str, str]:
    """One thread a process: several share the cores, and a second thread would wait for the first. No network."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


@dataclass(slots=True)
class _Member:
    component: Component
    child: Child
    guard: Guard
    restarts: int = 0
    done: bool = False


class Crew:
    """Python processes that run one command line of rollstream each."""

    def __init__(self, directory: Path, *, most_restarts: int = 20) -> None:
        """`directory` holds their logs."""
        self._directory, self._most = directory, most_restarts
        self._members: dict[str, _Member] = {}

    @property
    def restarts(self) -> int:
        """How often a process had to be started again."""
        return sum(member.restarts for member in self._members.values())

    def pid(self, name: str) -> int:
        return self._members[name].child.server.pid

    def start(self, name: str, *arguments: str) -> None:
        """Run `rollstream ARGUMENTS` under this name."""
        component = Component(
            name=name,
            port=0,
            directory=Path.cwd(),
            log=self._directory / f"{name}.log",
            command=(sys.executable, "-m", "rollstream.app.main", *arguments),
            answers=lambda: True,
            env=process_environment(),
            grace=20.0,
        )
        child, guard = launch_child(component, owned=True)
        self._members[name] = _Member(component, child, guard)

    def check(self) -> list[str]:
        """Look after everybody; returns the names of those that died and were started again.

        Raises `StackError`, with the end of its log, for one that died too often.
        """
        died: list[str] = []
        for name, member in self._members.items():
            if member.done or member.guard.poll() is None:
                continue
            if member.guard.returncode == 0:
                member.done = True
                continue
            if member.restarts >= self._most:
                raise StackError(f"{name} died {member.restarts + 1} times; {quote_log(member.component.log)}")
            member.restarts += 1
            member.child, member.guard = launch_child(member.component, owned=True)
            died.append(name)
        return died

    def done(self, name: str) -> bool:
        """Did it end by itself, with exit status 0?"""
        return self._members[name].done

    def stop(self, *names: str) -> None:
        """End these, or everybody, and wait. They count as done."""
        ending = [self._members[name] for name in names or self._members if not self._members[name].done]
        end_children(member.child for member in ending)
        for member in ending:
            member.done = True
            member.guard.wait()
