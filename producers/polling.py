"""A consumer of the log on a thread of its own, for callers on an event loop.

    event loop:   await call(work) -----------------------------> answer
                        |                                           ^
    "rollstream-poll":  open --> work(consumer) --> work(consumer) -+--> close

All calls run one after the other on that one thread, the last of them closes the consumer, also where its opening was
cancelled half-way. A call that is cancelled ends by itself before the consumer is closed.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

from ..infra.log import Consumer, Log, Record

Result = TypeVar("Result")


class Poller:
    """`async with Poller(open_consumer) as poller`; raises on entry what `open_consumer` raises."""

    def __init__(self, open_consumer: Callable[[], Consumer]) -> None:
        self._open = open_consumer
        self._consumer: Consumer | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollstream-poll")

    async def call(self, work: Callable[[Consumer], Result]) -> Result:
        """What `work` makes of the consumer. It should take a fraction of a second."""
        return await asyncio.wrap_future(self._thread.submit(self._run, work))

    async def poll(self, max_records: int, timeout: float) -> list[Record]:  # noqa: ASYNC109 - the consumer's, it is no error
        """As `Consumer.poll`."""
        return await self.call(lambda consumer: consumer.poll(max_records, timeout))

    async def __aenter__(self) -> Self:
        try:
            await self.call(lambda consumer: None)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the consumer, once what runs on the thread has ended."""
        closing = self._thread.submit(self._close)
        self._thread.shutdown(wait=False)
        await asyncio.shield(asyncio.wrap_future(closing))

    def _run(self, work: Callable[[Consumer], Result]) -> Result:
        if self._consumer is None:
            self._consumer = self._open()
        return work(self._consumer)

    def _close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()


def open_end(log: Log, topic: str) -> Consumer:
    """A reader of what is yet to come. Raises `UnknownTopic`."""
    bounds = log.bounds(log.partitions(topic))
    return log.read({partition: end for partition, (_, end) in bounds.items()})
