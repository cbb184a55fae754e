"""Games written without async, and the two ways to play them from an event loop.

    Inline(game)      on the loop: for games whose calls take microseconds; one that hangs stops everybody
    Threaded(game)    each call in a thread of the crew: for games that compute, wait or might hang

A hop to a thread and back costs more than a move of most games (docs/environments.md has the figures). The crew has as
many threads as calls are under way, so no call waits for another one; a thread whose call never returns is
never used again, and as a daemon does not keep the process from ending.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

from ..environment import Action, Environment, EnvironmentFactory, Outcome

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Job = Callable[[], None]


class Game(Protocol):
    """An `Environment` without async; see there for what each call promises."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    def reset(self, payload: Mapping[str, str], seed: int) -> Outcome: ...

    def step(self, action: Action) -> Outcome: ...

    def close(self) -> None: ...


class Inline:
    """Plays a game on the event loop."""

    def __init__(self, game: Game) -> None:
        self._game = game

    @property
    def name(self) -> str:
        return self._game.name

    @property
    def version(self) -> str:
        return self._game.version

    async def reset(self, payload: Mapping[str, str], seed: int) -> Outcome:
        return self._game.reset(payload, seed)

    async def step(self, action: Action) -> Outcome:
        return self._game.step(action)

    async def close(self) -> None:
        self._game.close()


class Threaded:
    """Plays a game in threads of the crew, one call at a time."""

    def __init__(self, game: Game) -> None:
        self._game = game
        self._call: Future[Outcome] | None = None

    @property
    def name(self) -> str:
        return self._game.name

    @property
    def version(self) -> str:
        return self._game.version

    async def reset(self, payload: Mapping[str, str], seed: int) -> Outcome:
        return await self._play(lambda: self._game.reset(payload, seed))

    async def step(self, action: Action) -> Outcome:
        return await self._play(lambda: self._game.step(action))

    async def close(self) -> None:
        """Close the game; one whose call is still running is closed by that call's thread, should it ever return."""
        call = self._call
        if call is None or call.done():
            await asyncio.wrap_future(_crew.submit(self._game.close))
            return
        logger.warning("%s: a call is still running; its thread is left behind", self._game.name)
        call.add_done_callback(lambda _: self._game.close())

    async def _play(self, call: Callable[[], Outcome]) -> Outcome:
        self._call = _crew.submit(call)
        return await asyncio.wrap_future(self._call)


def host_game(make: Callable[[], Game], *, threads: bool) -> EnvironmentFactory:
    """A factory of environments around games."""

    def make_environment() -> Environment:
        return Threaded(make()) if threads else Inline(make())

    return make_environment


class Crew:
    """Daemon threads that run calls: started when none is idle, ended after `patience` seconds without work."""

    def __init__(self, patience: float = 10.0) -> None:
        self._patience = patience
        self._idle: list[SimpleQueue[Job]] = []
        self._lock = threading.Lock()

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        """Run `call` now, in an idle thread or a new one."""
        future: Future[Result] = Future()
        # From here on it cannot be cancelled: a caller that gives up must not end a call that a thread is in.
        future.set_running_or_notify_cancel()

        def job() -> None:
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - the caller's, who awaits the future
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            inbox = self._idle.pop() if self._idle else self._hire()
        inbox.put(job)
        return future

    def _hire(self) -> "SimpleQueue[Job]":
        inbox: SimpleQueue[Job] = SimpleQueue()
        threading.Thread(target=self._work, args=(inbox,), name="rollstream-game", daemon=True).start()
        return inbox

    def _work(self, inbox: "SimpleQueue[Job]") -> None:
        while True:
            try:
                job = inbox.get(timeout=self._patience)
            except Empty:
                with self._lock:
                    # It may have been taken just now, with a job on its way.
                    if inbox in self._idle:
                        self._idle.remove(inbox)
                        return
                continue
            job()
            # A waiting thread must not keep an episode's objects alive.
            del job
            with self._lock:
                self._idle.append(inbox)


_crew = Crew()
