"""From a finished episode to an acknowledged record: exactly one, whatever is wrong with the episode.

    Trajectory --encode--> append --> acknowledged
                  |           |
                  |           +-- too large ---> the same without its columns, FAILED "oversize", counted
                  +-- not writable ------------> the same without its columns, FAILED "unwritable", counted

At most `WINDOW` bytes are under way at once, far fewer than a writer's buffer holds: so an append need not wait, and is
made on the event loop itself. Whoever comes while the window is full waits without stopping the loop.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable

from ..infra.log import LogError, Position, RecordTooLarge, Writer
from ..infra.topics import Names
from ..schemas import InvalidRecord, Status, Trajectory, WireError, encode, trajectory_headers

logger = logging.getLogger(__name__)

WINDOW = 8 << 20
"""Bytes of appended records that are not acknowledged yet."""
SMALL = 512 << 10
"""A larger record may exceed its topic's limit, and then the writer asks the broker: not on the event loop."""


class Delivery:
    """Appends trajectories to their environments' topics. For one event loop; its writer should be nobody else's."""

    def __init__(self, writer: Writer, names: Names) -> None:
        self._writer, self._names = writer, names
        self._window = _Window(WINDOW)
        self._topics: dict[str, str] = {}
        """Topics of the environments whose topic the writer has met."""
        self.counts: Counter[str] = Counter()
        """Acknowledged records by status, in lower case; stubs by their cause."""

    async def deliver(
        self,
        trajectory: Trajectory,
        traceparent: str | None = None,
        *,
        appended: Callable[[], None] | None = None,
    ) -> Position:
        """Append and wait for the log's acknowledgement. `appended` is called between the two.

        What passes by itself is tried again until it has passed. Raises `UnknownTopic`, and `LogError` when the log
        cannot take it at all.
        """
        try:
            value, headers = encode(trajectory), _headers(trajectory, traceparent)
        except WireError as error:
            return await self._stub(trajectory, "unwritable", str(error), traceparent, appended)
        try:
            position = await self._append(trajectory, value, headers, appended)
        except RecordTooLarge as error:
            return await self._stub(trajectory, "oversize", f"{len(value)} bytes: {error}", traceparent, appended)
        self.counts[trajectory.status.lower()] += 1
        return position

    async def _append(
        self, trajectory: Trajectory, value: bytes, headers: dict[str, bytes], appended: Callable[[], None] | None
    ) -> Position:
        await self._window.enter(len(value))
        try:
            while True:
                try:
                    return await self._try(trajectory, value, headers, appended)
                except LogError as error:
                    if not error.retriable:
                        raise
                    logger.warning("trajectory %s is appended once more: %s", trajectory.trajectory_id, error)
        finally:
            self._window.leave(len(value))

    async def _try(
        self, trajectory: Trajectory, value: bytes, headers: dict[str, bytes], appended: Callable[[], None] | None
    ) -> Position:
        environment, key = trajectory.environment, trajectory.group_id.encode()
        topic = self._topics.get(environment)
        if topic is not None and len(value) <= SMALL:
            future = self._writer.append(topic, value, key=key, headers=headers)
        else:
            topic = self._names.trajectories(environment)
            future = await asyncio.to_thread(self._writer.append, topic, value, key=key, headers=headers)
        if appended is not None:
            appended()
        position = future.result() if future.done() else await asyncio.wrap_future(future)
        self._topics[environment] = topic
        return position

    async def _stub(
        self,
        trajectory: Trajectory,
        cause: str,
        detail: str,
        traceparent: str | None,
        appended: Callable[[], None] | None,
    ) -> Position:
        """Its group must not wait for it: the same sample, FAILED, without what could not be written."""
        logger.error("trajectory %s: %s: %s", trajectory.trajectory_id, cause, detail)
        stub = Trajectory(
            trajectory_id=trajectory.trajectory_id,
            group_id=trajectory.group_id,
            group_size=trajectory.group_size,
            sample_index=trajectory.sample_index,
            environment=trajectory.environment,
            seed=trajectory.seed,
            metadata={"error": detail[:1000]},
            status=Status.FAILED,
            cause=cause,
            started_ms=trajectory.started_ms,
            finished_ms=trajectory.finished_ms,
        )
        position = await self._append(stub, encode(stub), _headers(stub, traceparent), appended)
        self.counts[cause] += 1
        return position


class _Window:
    """Room for bytes under way. First come, first served; what is larger than the window waits for all of it."""

    def __init__(self, size: int) -> None:
        self._size, self._used = size, 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def enter(self, size: int) -> None:
        if not self._waiting and self._fits(size):
            self._used += size
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(size)
            raise

    def leave(self, size: int) -> None:
        self._used -= size
        while self._waiting and (self._waiting[0][1].done() or self._fits(self._waiting[0][0])):
            wanted, turn = self._waiting.popleft()
            if not turn.done():
                self._used += wanted
                turn.set_result(None)

    def _fits(self, size: int) -> bool:
        return not self._used or self._used + size <= self._size


def _headers(trajectory: Trajectory, traceparent: str | None) -> dict[str, bytes]:
    """The record's headers; a broken trace must not cost a trajectory."""
    try:
        return trajectory_headers(trajectory, traceparent)
    except InvalidRecord as error:
        logger.warning("trajectory %s goes without its trace: %s", trajectory.trajectory_id, error)
        return trajectory_headers(trajectory)
