"""Room for what is under way: bounded in bytes, in line, and it tells when nothing moves any more."""

import asyncio
import time
from collections import deque


class Window:
    """For one event loop. First come, first served; what is larger than the window waits for all of it."""

    def __init__(self, size: int) -> None:
        self._size, self._used = size, 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._moved = time.monotonic()

    def quiet(self) -> float:
        """Seconds since something left, or since something came into the empty window."""
        return time.monotonic() - self._moved

    def enter(self, size: int) -> "asyncio.Future[None] | None":
        """None where there is room, or else what is done once there is; then `leave`, or before that `quit`."""
        if not self._waiting and self._fits(size):
            self._take(size)
            return None
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        return turn

    def quit(self, turn: "asyncio.Future[None]", size: int) -> None:
        if turn.done() and not turn.cancelled():
            self.leave(size)
        turn.cancel()

    def leave(self, size: int) -> None:
        self._used -= size
        self._moved = time.monotonic()
        while self._waiting and (self._waiting[0][1].done() or self._fits(self._waiting[0][0])):
            wanted, turn = self._waiting.popleft()
            if not turn.done():
                self._take(wanted)
                turn.set_result(None)

    def _take(self, size: int) -> None:
        if not self._used:
            self._moved = time.monotonic()
        self._used += size

    def _fits(self, size: int) -> bool:
        return not self._used or self._used + size <= self._size
