"""From a finished episode to an acknowledged record: exactly one, whatever is wrong with the episode.

Trajectory --encode--> append --> acknowledged
              |           |
              |           +-- too large ---> the same without its columns, FAILED "oversize", counted
              +-- not writable ------------> the same without its columns, FAILED "unwritable", counted
"""

import asyncio
import logging
from collections import Counter
from dataclasses import replace

import numpy as np

from ..infra.log import Position, RecordTooLarge, Writer
from ..infra.topics import Names
from ..schemas import Status, Trajectory, WireError, encode, trajectory_headers

logger = logging.getLogger(__name__)


class Delivery:
    """Appends trajectories to their environments' topics."""

    def __init__(self, writer: Writer, names: Names) -> None:
        self._writer, self._names = writer, names
        self.counts: Counter[str] = Counter()
        """Acknowledged records by status, in lower case."""

    async def deliver(self, trajectory: Trajectory, traceparent: str | None = None) -> Position:
        """Append and wait for the log's acknowledgement. Raises `LogError` when the log cannot take it at all."""
        try:
            value, headers = encode(trajectory), trajectory_headers(trajectory, traceparent)
        except WireError as error:
            return await self._stub(trajectory, "unwritable", str(error))
        try:
            position = await self._append(trajectory, value, headers)
        except RecordTooLarge as error:
            return await self._stub(trajectory, "oversize", f"{len(value)} bytes: {error}")
        self.counts[trajectory.status.lower()] += 1
        return position

    async def _append(self, trajectory: Trajectory, value: bytes, headers: dict[str, bytes]) -> Position:
        topic, key = self._names.trajectories(trajectory.environment), trajectory.group_id.encode()
        # The append blocks while the buffer is full: that back-pressure must not stop the event loop.
        future = await asyncio.to_thread(self._writer.append, topic, value, key=key, headers=headers)
        return await asyncio.wrap_future(future)

    async def _stub(self, trajectory: Trajectory, cause: str, detail: str) -> Position:
        """Its group must not wait for it: the same sample, FAILED, without what could not be written."""
        logger.error("trajectory %s: %s: %s", trajectory.trajectory_id, cause, detail)
        stub = replace(
            trajectory,
            tokens=np.empty(0, np.int32),
            logprobs=np.empty(0, np.float32),
            spans=(),
            turns=(),
            reward=0.0,
            rewards={},
            metrics={},
            metadata={"error": detail[:1000]},
            status=Status.FAILED,
            cause=cause,
        )
        self.counts[cause] += 1
        return await self._append(stub, encode(stub), trajectory_headers(stub))
