"""Starting servers under their guards, waiting until they answer, and ending them.

launch_child --> await_answer --> ... --> end_children          (SIGTERM, a grace, SIGKILL)
"""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from .component import Component, Progress
from .endpoints import StackError
from .process import Process, await_ends, identify_process, is_alive, send_signal
from .state import Child

GUARD = Path(__file__).with_name("guard.py")
LARGEST_LOG = 16 << 20
TAIL_LINES = 25
MARGIN = 5.0
"""Seconds that a guard may take beyond the grace of its server."""

Guard = subprocess.Popen[bytes]


def launch_child(component: Component, *, owned: bool) -> tuple[Child, Guard]:
    """Start a server under its guard. An owned one ends with this process, the other stays.

    Raises `StackError` when it ends at once.
    """
    guard = _launch_guard(component, owner=os.getpid() if owned else 0)
    assert guard.stdout is not None
    with guard.stdout as told:
        processes = [identify_process(int(pid)) for pid in told.readline().split()]
    if not owned:
        guard.wait()
    if len(processes) != 2 or processes[0] is None or processes[1] is None:
        guard.wait()
        raise StackError(f"{component.name} ended at once; {quote_log(component.log)}")
    return Child(processes[0], processes[1], component.port, component.grace), guard


def _launch_guard(component: Component, *, owner: int) -> Guard:
    with _open_log(component.log) as log:
        return subprocess.Popen(
            (sys.executable, "-I", "-S", str(GUARD), str(owner), str(component.grace), *component.command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=component.directory,
            env=component.environment(),
            start_new_session=True,
        )


def _open_log(log: Path) -> BinaryIO:
    """Append to the log; one that grew large is first put aside."""
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists() and log.stat().st_size > LARGEST_LOG:
        log.replace(log.with_suffix(".old.log"))
    return log.open("ab")


def quote_log(log: Path) -> str:
    """The end of a server's log, for an error."""
    with log.open(errors="replace") as lines:
        tail = "".join(deque(lines, TAIL_LINES)).rstrip()
    return f"the end of {log}:\n{tail}" if tail else f"{log} is empty"


def await_answer(component: Component, child: Child, progress: Progress) -> None:
    """Wait until the server serves clients. Raises `StackError` with its log's end when it ends or takes too long."""
    began = told = time.monotonic()
    while not component.answers():
        now = time.monotonic()
        if not child.alive:
            raise StackError(f"{component.name} ended while it started; {quote_log(component.log)}")
        if now - began > component.patience:
            raise StackError(
                f"{component.name} (pid {child.server.pid}) does not answer on port {component.port} "
                f"{component.patience:.0f} s after its start; {quote_log(component.log)}"
            )
        if now - told > 5:
            told = now
            progress(f"{component.name}: still starting after {now - began:.0f} s")
        time.sleep(0.1)
    progress(f"{component.name}: answers on port {component.port} after {time.monotonic() - began:.1f} s")


def end_children(children: Iterable[Child]) -> None:
    """End these servers, all at the same time, and wait until they and their guards are gone.

    Raises `StackError` where even SIGKILL does not end one.
    """
    ending = tuple(children)
    everything = [process for child in ending for process in (child.guard, child.server)]
    for child in ending:
        # The guard tells its server; only one whose guard is gone has to be told here.
        send_signal(child.guard if is_alive(child.guard) else child.server, signal.SIGTERM)
    stubborn = await_ends(everything, max((child.grace for child in ending), default=0.0) + MARGIN)
    for process in stubborn:
        send_signal(process, signal.SIGKILL)
    _expect_ends(stubborn)


def kill_child(child: Child) -> None:
    """End one server as a crash would (SIGKILL) and wait until it and its guard are gone."""
    send_signal(child.server, signal.SIGKILL)
    _expect_ends((child.server, child.guard))


def _expect_ends(processes: Iterable[Process]) -> None:
    if left := await_ends(processes, MARGIN):
        raise StackError(f"these processes do not end, even on SIGKILL: {', '.join(str(p.pid) for p in left)}")
