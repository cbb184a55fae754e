"""What bounds an episode from outside: limits and their watch, gates shared with other episodes, a way to abort one."""

import asyncio
import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one episode may take. Times in seconds, each for one call; time spent waiting at a gate is not charged."""

    init_timeout: float = 60.0
    step_timeout: float = 60.0
    generate_timeout: float = 300.0
    close_timeout: float = 10.0
    max_turns: int = 0
    """Sampled turns; 0 for no limit but the task's."""
    max_tokens: int = 0
    """Tokens of the whole episode; 0 for no limit but the engine's context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gates:
    """How many calls of a stage may run at once, among all episodes that share the gates; None for any number."""

    init: asyncio.Semaphore | None = None
    generate: asyncio.Semaphore | None = None
    step: asyncio.Semaphore | None = None


class Abort:
    """Ends one episode early from outside; its record is ABORTED. For the event loop that plays the episode only.

    It cancels the task that plays the episode, and the episode takes that cancellation back; one that comes from
    elsewhere (a shutdown) goes on its way.
    """

    def __init__(self) -> None:
        self._reason: str | None = None
        self._player: asyncio.Task[object] | None = None
        self._interrupted = False

    @property
    def reason(self) -> str | None:
        """What was given to `request`; None if it was not called."""
        return self._reason

    @property
    def interrupted(self) -> bool:
        """The player was cancelled by this request."""
        return self._interrupted

    def request(self, reason: str) -> None:
        """End the episode now, or as soon as it begins. Does nothing to one that has ended."""
        if self._reason is not None:
            return
        self._reason = reason
        if self._player is not None:
            self._interrupted = True
            self._player.cancel()

    def watch(self, player: "asyncio.Task[object] | None") -> None:
        """Called by the episode: the task to interrupt from now on, None when it is over."""
        self._player = player


class Watch:
    """Cancels the task that plays an episode when a call takes longer than it may.

    `asyncio.timeout` sets and clears a timer for every call, which costs as much as a move of most games. Here a call
    only moves a deadline, and one timer an episode looks after it.
    """

    def __init__(self, player: "asyncio.Task[object]") -> None:
        self._player = player
        self._loop = player.get_loop()
        self._deadline = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._expired = False
        self.allowed = math.inf
        """Seconds that the call may take, or could have taken."""
        self.rings = 0
        """How often the player was cancelled."""

    @property
    def expired(self) -> bool:
        """The last call took too long, and the player was cancelled for it."""
        return self._expired

    def start(self, seconds: float) -> None:
        """A call begins that may take so long."""
        self.allowed = seconds
        self._expired = False
        self._deadline = self._loop.time() + seconds
        if self._timer is not None and self._timer.when() > self._deadline:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self._loop.call_at(self._deadline, self._ring)

    def stop(self) -> None:
        """The call is over."""
        self._deadline = math.inf

    def close(self) -> None:
        """The episode is over."""
        if self._timer is not None:
            self._timer.cancel()

    def _ring(self) -> None:
        self._timer = None
        if self._loop.time() >= self._deadline:
            self._expired = True
            self.rings += 1
            self._player.cancel()
        elif self._deadline < math.inf:
            self._timer = self._loop.call_at(self._deadline, self._ring)
