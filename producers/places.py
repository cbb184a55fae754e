"""The places of a worker: how many episodes it plays at once, and whose is next.

    enter --> waiting, by environment, the oldest task first --> a place --> leave
                  |
                  +-- held back while its `ready` says so (paused, policy too old), without a place

Half of the places are reserved, in equal parts, for the environments that the worker knows; the other half goes to
whoever asks, the environment with the fewest first. So one whose episodes hang or crawl cannot take all of them.
"""

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import count


class Place:
    """Room for one episode."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave: Callable[[], None] | None = leave

    def leave(self, *_: object) -> None:
        """Give it back. Idempotent; fine as a callback."""
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    """Somebody without a place."""

    rank: tuple[int, int]
    """Order of his task, and of his coming."""
    ready: Callable[[], bool]
    given: asyncio.Future[Place]

    def __lt__(self, other: "_Waiter") -> bool:
        return self.rank < other.rank


class Places:
    """For one event loop."""

    def __init__(self, capacity: int, environments: Iterable[str]) -> None:
        """Raises `ValueError` for a capacity below 1."""
        if capacity < 1:
            raise ValueError(f"expected room for at least one episode, found {capacity}")
        known = max(1, len(set(environments)))
        self._free = capacity
        self._most = max(1, capacity - (known - 1) * max(1, capacity // (2 * known)))
        self._used: Counter[str] = Counter()
        self._waiting: dict[str, list[_Waiter]] = {}
        self._numbers = count()

    @property
    def free(self) -> int:
        return self._free

    async def enter(self, environment: str, order: int, ready: Callable[[], bool]) -> Place:
        """A place for an episode of this environment: lowest `order` first, and not before `ready()`."""
        given: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        waiter = _Waiter((order, next(self._numbers)), ready, given)
        heapq.heappush(self._waiting.setdefault(environment, []), waiter)
        self.refresh()
        try:
            return await given
        except asyncio.CancelledError:
            if given.done() and not given.cancelled():
                given.result().leave()
            raise

    def refresh(self) -> None:
        """Hand out what can be had: to be called when somebody may have become ready."""
        while self._free and (chosen := self._choose()) is not None:
            environment, waiter = chosen
            waiters = self._waiting[environment]
            if waiters[0] is waiter:
                heapq.heappop(waiters)
            else:
                waiters.remove(waiter)
                heapq.heapify(waiters)
            self._free -= 1
            self._used[environment] += 1
            waiter.given.set_result(Place(partial(self._take_back, environment)))

    def _choose(self) -> tuple[str, _Waiter] | None:
        """Whoever is next: the first ready one of the environment that has the fewest places."""
        open_ = sorted((self._used[e], e) for e in self._waiting if self._used[e] < self._most)
        for _, environment in open_:
            if (waiter := self._first(environment)) is not None:
                return environment, waiter
        return None

    def _first(self, environment: str) -> _Waiter | None:
        waiters = self._waiting[environment]
        while waiters and waiters[0].given.done():
            heapq.heappop(waiters)  # it was cancelled
        if not waiters:
            del self._waiting[environment]
            return None
        if waiters[0].ready():
            return waiters[0]
        return min((waiter for waiter in waiters if not waiter.given.done() and waiter.ready()), default=None)

    def _take_back(self, environment: str) -> None:
        self._free += 1
        self._used[environment] -= 1
        if not self._used[environment]:
            del self._used[environment]
        self.refresh()
