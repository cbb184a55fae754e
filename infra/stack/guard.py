"""One guard stands over each server of the local stack, so that no server outlives who asked for it.

    owner (demo, test, `rollstream up`)
      `-- guard                    ends its server when told to (SIGTERM), or when its owner is gone, kill -9 included
            `-- server             killed by the kernel when its guard is gone, kill -9 included (PR_SET_PDEATHSIG)

A guard without an owner (`rollstream up`) forks away and stays until `rollstream down`. It is run by path with nothing
but the standard library (`python -I -S guard.py OWNER GRACE COMMAND ...`), which keeps it at a few MB and starts it in
milliseconds. It writes two pids to its standard output, its own and the server's, and ends with the server's exit
status; its standard error is the server's log.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
WAKES = {signal.SIGTERM, signal.SIGCHLD}
LOOK = 0.5
"""Seconds between two looks at who the parent is: a dead owner sends no signal."""


def launch_server(command: Sequence[str]) -> int:
    """Start the server and return its pid."""
    guard = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WAKES)
        os.dup2(2, 1)
        if os.getppid() == guard:
            os.execvp(command[0], list(command))
    except OSError as error:
        os.write(2, f"guard: cannot run {command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def watch_server(server: int, owner: int, grace: float) -> int:
    """Wait for the server's end; bring it about when the owner is gone or on SIGTERM. Returns its wait status."""
    deadline = float("inf")
    while True:
        ended, status = os.waitpid(server, os.WNOHANG)
        if ended:
            return status
        signalled = signal.sigtimedwait(WAKES, LOOK)
        told = signalled is not None and signalled.si_signo == signal.SIGTERM
        orphaned = owner != 0 and os.getppid() != owner
        if (told or orphaned) and deadline == float("inf"):
            deadline = time.monotonic() + grace
            os.kill(server, signal.SIGTERM)
        if time.monotonic() > deadline:
            os.kill(server, signal.SIGKILL)


def run_guard(owner: int, grace: float, command: Sequence[str]) -> int:
    """Returns the server's exit status, as a shell gives it: 128 and the signal's number where one ended it."""
    if owner == 0 and os.fork():
        return 0
    signal.pthread_sigmask(signal.SIG_BLOCK, WAKES)
    server = launch_server(command)
    os.write(1, f"{os.getpid()} {server}\n".encode())
    os.dup2(2, 1)
    status = os.waitstatus_to_exitcode(watch_server(server, owner, grace))
    how = f"signal {-status}" if status < 0 else f"exit status {status}"
    os.write(2, f"guard: {os.path.basename(command[0])} (pid {server}) ended with {how}\n".encode())  # noqa: PTH119
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(run_guard(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
