"""Processes by identity: a pid together with the time its process began, so that a reused pid is never taken for it."""

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

POLL = 0.02


class Process(NamedTuple):
    """One process, while this machine is up."""

    pid: int
    started: int
    """Clock ticks between the boot and its start, as in /proc/PID/stat."""


def identify_process(pid: int) -> Process | None:
    """The process that has this pid now; None if there is none, or only its corpse (a zombie)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in brackets may hold spaces and brackets of its own.
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else Process(pid, int(fields[19]))


def is_alive(process: Process) -> bool:
    return identify_process(process.pid) == process


def send_signal(process: Process, number: signal.Signals) -> None:
    """Signal this process and no other; nothing happens if it is gone."""
    if is_alive(process):
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


def await_ends(processes: Iterable[Process], timeout: float) -> tuple[Process, ...]:
    """Wait until all are gone, for `timeout` seconds at most. Returns those that still live."""
    deadline = time.monotonic() + timeout
    left = tuple(processes)
    while left := tuple(p for p in left if is_alive(p)):
        if time.monotonic() >= deadline:
            break
        time.sleep(POLL)
    return left


def boot_id() -> str:
    """Names this boot of the machine: pids and start times of another one mean nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
