"""From a finished episode to an acknowledged record: exactly one, whatever is wrong with it, the log, or the store.

    Trajectory --encode--> [ window ] --append--> acknowledged
                  |          |    ^        |
                  |          v    |        +-- too large --> the body to the store, a claim in its place, appended
                  |         on the disk                          |
                  |                                              +-- no store: FAILED "oversize", counted
                  +-- not writable --> the same without its columns, FAILED "unwritable" or "oversize", counted

At most `WINDOW` bytes are under way at once, far fewer than a writer's buffer holds: so an append need not wait, and is
made on the event loop itself. Whoever comes while the window is full waits in line without stopping the loop. Where the
log acknowledged nothing for `STILL` seconds what is in line moves to the disk (spill.py), in its order, and the places
of its episodes are free; where the disk takes no more it waits in memory, and its place with it: so the episodes stop.

A delivery once begun goes on although its caller was cancelled: what is finished is never given up.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable

from ..infra.claims import Claims
from ..infra.log import LogError, Position, RecordTooLarge, UnknownTopic, Writer
from ..infra.store import StoreError
from ..infra.topics import Names
from ..schemas import Claim, Schemas, Trajectory
from ..schemas.registry import shipped_only
from .parcel import Parcel, lift, pack
from .spill import Spill, SpillError
from .window import Window

logger = logging.getLogger(__name__)

WINDOW = 8 << 20
"""Bytes of appended records that are not acknowledged yet, and as many of bodies on their way to the store."""
SMALL = 512 << 10
"""A larger record may exceed its topic's limit, and then the writer asks the broker: not on the event loop."""
STILL = 2.0
"""Seconds without any acknowledgement after which what waits goes to the disk."""
PAUSE = 1.0
"""Seconds between two tries where log or store refused at once."""
GRACE = 30.0
"""Seconds that the end waits for acknowledgements while there are any."""
AT_ONCE = 256
"""Records of dead workers that are in line at once."""
COMPLAIN_EVERY = 10.0
"""Seconds between two lines about a disk that takes no more."""


class Delivery:
    """Appends trajectories to their environments' topics. For one event loop; writer and spill are its own."""

    def __init__(
        self,
        writer: Writer,
        names: Names,
        *,
        schemas: Schemas | None = None,
        claims: Claims | None = None,
        spill: Spill | None = None,
    ) -> None:
        """Without `claims` what exceeds its topic's limit is FAILED; without `spill` all waits in memory."""
        self._writer, self._names, self._claims, self._spill = writer, names, claims, spill
        self._schemas = schemas or shipped_only()
        self._window, self._bodies = Window(WINDOW), Window(WINDOW)
        self._met: set[str] = set()
        """Topics that the writer has met."""
        self._line = asyncio.Lock()
        """Held by whoever must wait for disk or broker before its append, so that nobody overtakes it."""
        self._under_way: dict[asyncio.Task[Position], Parcel] = {}
        self._complained = -math.inf
        self.counts: Counter[str] = Counter()
        """Acknowledged records by status, in lower case; stubs by their cause; "recovered": those of dead workers."""

    def deliver(
        self,
        trajectory: Trajectory,
        traceparent: str | None = None,
        *,
        appended: Callable[[], None] | None = None,
    ) -> "asyncio.Future[Position]":
        """Its position, once the log acknowledged it. `appended` is called once it is under way, or on the disk.

        Nothing here holds on to the trajectory. To cancel the future ends nothing but the waiting for it. What passes
        by itself is tried again until it has passed. The future raises `UnknownTopic`, and `LogError` or `StoreError`
        where they cannot take it at all.
        """
        parcel = pack(trajectory, self._names, self._schemas, traceparent, appended)
        parcel.number = self._spill.number() if self._spill is not None else 0
        return asyncio.shield(self._start(parcel))

    async def recover(self) -> None:
        """Deliver what dead workers left on the disk, in its order; what cannot be delivered is told, and stays."""
        left = self._spill.left if self._spill is not None else ()
        if left:
            logger.warning(
                "%d finished episodes lie on the disk since an earlier worker; they are delivered", len(left)
            )
        for first in range(0, len(left), AT_ONCE):
            await asyncio.wait([self._start(lift(kept, self._schemas)) for kept in left[first : first + AT_ONCE]])

    async def close(self) -> None:
        """Wait as long as acknowledgements come; what then has none stays on the disk. Closes writer and spill.

        Raises `LogError` where finished records are neither acknowledged nor on the disk.
        """
        deadline = time.monotonic() + GRACE
        while self._under_way and (left := min(deadline - time.monotonic(), STILL - self._quiet())) > 0:
            await asyncio.wait(self._under_way, timeout=left)
        for parcel in [*self._under_way.values()]:
            await self._keep(parcel)
        kept = sum(parcel.kept is not None for parcel in self._under_way.values())
        lost = sum(parcel.kept is None and not parcel.sent for parcel in self._under_way.values())
        safe = kept == len(self._under_way)
        if kept:
            logger.warning("%d finished episodes stay on the disk, for the next worker here to deliver", kept)
        await self._abandon()
        try:
            await asyncio.to_thread(self._writer.close, 0.0 if kept and safe else GRACE)
        except LogError:
            if not safe:
                raise
        finally:
            if self._spill is not None:
                await asyncio.to_thread(self._spill.close)
        if lost:
            raise LogError(
                f"closed with {lost} records of finished episodes that the writer never had, nor the disk; their tasks "
                f"are not committed, the next worker plays them again"
            )

    async def _abandon(self) -> None:
        if tasks := [*self._under_way]:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def _quiet(self) -> float:
        return min(self._window.quiet(), self._bodies.quiet())

    # ------------------------------------------------------------------ one record

    def _start(self, parcel: Parcel) -> "asyncio.Task[Position]":
        task = asyncio.get_running_loop().create_task(self._carry(parcel))
        self._under_way[task] = parcel
        task.add_done_callback(self._end)
        return task

    def _end(self, task: "asyncio.Task[Position]") -> None:
        parcel = self._under_way.pop(task)
        # Whoever waited for it may be gone.
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a record for %s was not delivered: %s", parcel.topic or parcel.kept, error)

    async def _carry(self, parcel: Parcel) -> Position:
        while True:
            try:
                position = await self._send(parcel)
                break
            except RecordTooLarge as error:
                if parcel.final:
                    raise
                await self._reduce(parcel, error)
            except SpillError as error:
                parcel.kept = None
                if parcel.bare is None:
                    raise
                parcel.shrink("spill-damaged", str(error))
            except UnknownTopic:
                raise
            except LogError:
                await self._keep(parcel)
                raise
        self.counts[parcel.outcome] += 1
        if self._spill is not None and parcel.kept is not None:
            await self._spill.drop(parcel.kept)
        return position

    async def _send(self, parcel: Parcel) -> Position:
        await self._enter(self._window, parcel)
        size = parcel.size
        try:
            while True:
                try:
                    return await self._append(parcel)
                except LogError as error:
                    if not error.retriable:
                        raise
                    logger.warning("a record for %s is appended once more: %s", parcel.topic, error)
                    parcel.sent = False
                await asyncio.sleep(PAUSE)
        finally:
            self._window.leave(size)

    async def _append(self, parcel: Parcel) -> Position:
        value = parcel.value
        if value is not None and len(value) <= SMALL and parcel.topic in self._met and not self._line.locked():
            future = self._writer.append(parcel.topic, value, key=parcel.key, headers=parcel.headers)
        else:
            async with self._line:
                value = await self._load(parcel)
                future = await asyncio.to_thread(
                    self._writer.append, parcel.topic, value, key=parcel.key, headers=parcel.headers
                )
        # What is refused at once is not under way.
        position = future.result() if future.done() else None
        parcel.sent = True
        self._met.add(parcel.topic)
        parcel.rest()
        return await asyncio.wrap_future(future) if position is None else position

    # ------------------------------------------------------------------ too large for its topic

    async def _reduce(self, parcel: Parcel, error: RecordTooLarge) -> None:
        if self._claims is None:
            parcel.shrink("oversize", f"{parcel.size} bytes: {error}")
            return
        try:
            claim = await self._deposit(parcel, self._claims)
        except StoreError:
            await self._keep(parcel)
            raise
        logger.info("%d bytes for %s lie in the store; the record is a claim", claim.size, parcel.topic)
        parcel.claim(claim)

    async def _deposit(self, parcel: Parcel, claims: Claims) -> Claim:
        while True:
            await self._enter(self._bodies, parcel)
            try:
                return await asyncio.to_thread(claims.deposit, await self._load(parcel))
            except StoreError as error:
                if not error.retriable:
                    raise
                logger.warning("a body for %s is put into the store once more: %s", parcel.topic, error)
            finally:
                self._bodies.leave(parcel.size)
            await self._keep(parcel)
            await asyncio.sleep(PAUSE)

    # ------------------------------------------------------------------ in line

    async def _enter(self, window: Window, parcel: Parcel) -> None:
        """Until there is room; behind a log that stands still, on the disk."""
        turn, size = window.enter(parcel.size), parcel.size
        if turn is None:
            return
        try:
            while self._spill is not None and parcel.in_memory and not turn.done():
                if (left := STILL - window.quiet()) <= 0:
                    await self._keep(parcel)
                    left = STILL
                if parcel.in_memory:
                    await asyncio.wait([turn], timeout=left)
            await turn
        except asyncio.CancelledError:
            window.quit(turn, size)
            raise

    async def _keep(self, parcel: Parcel) -> None:
        """Have it on the disk, where there is one that takes it; then nobody's place is held for it any more."""
        if self._spill is None or parcel.value is None:
            return
        if parcel.kept is None:
            try:
                kept = await self._spill.keep(parcel.number, parcel.spilled(parcel.value))
            except OSError as error:
                self._complain(f"the disk refuses: {error}")
                return
            if kept is None:
                self._complain(f"its {self._spill.limit} bytes are full (worker.spill_bytes)")
                return
            parcel.lay_down(kept)
        parcel.rest()
        parcel.let_go()

    async def _load(self, parcel: Parcel) -> bytes:
        if parcel.value is not None:
            return parcel.value
        if self._spill is None or parcel.kept is None:
            raise RuntimeError("expected a record in memory or on the disk, found it in neither")
        return parcel.fill(await self._spill.read(parcel.kept))

    def _complain(self, why: str) -> None:
        if time.monotonic() - self._complained > COMPLAIN_EVERY:
            self._complained = time.monotonic()
            logger.warning("finished episodes cannot go to the disk, so others wait for their places: %s", why)
