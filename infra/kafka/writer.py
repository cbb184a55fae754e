"""`KafkaWriter`: appends with back-pressure, acknowledged through futures.

append --> topic known? size allowed? key needed? --> buffer (waits for room) --> broker --> future
"""

import logging
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock
from types import TracebackType
from typing import NamedTuple, Self

from confluent_kafka import Producer

from ..log import Headers, LogError, Position, Topic, check_record, record_size
from .buffer import Append, Buffer

_log = logging.getLogger(__name__)

PATIENCE = 60.0
"""Seconds that the first append to a topic waits for a cluster that cannot be reached."""


class _Known(NamedTuple):
    """What the writer knows of a topic."""

    topic: Topic
    limit: int
    """Largest record, in bytes as `record_size` counts them."""


class KafkaWriter:
    """A `Writer` to Kafka: idempotent, `acks=all`, compressed, bounded in bytes.

    `find` tells a topic's settings; it is asked when a topic is first used, and again before a record is refused.
    `connect` opens a client whose batches hold so many bytes. There is one for all usual topics, and another for those
    that accept less than a usual batch: the broker judges a batch as a whole, and its records fall together. A client
    that cannot go on is replaced by a new one; what it had under way fails, retriable.
    """

    def __init__(
        self,
        connect: Callable[[int], Producer],
        find: Callable[[str], Topic],
        *,
        capacity: int,
        max_bytes: int,
        batch_bytes: int,
    ) -> None:
        self._connect, self._find = connect, find
        self._capacity, self._max_bytes, self._batch_bytes = capacity, max_bytes, batch_bytes
        self._known: dict[str, _Known] = {}
        self._lock = Lock()
        self._closed = False
        # opened here, so that settings which the client refuses are known at once
        self._buffers = {batch_bytes: Buffer(connect(batch_bytes), capacity, batch_bytes)}
        self._retired: list[Buffer] = []
        """Those of clients that were replaced, until nothing of them is under way."""

    def append(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Headers | None = None,
        partition: int | None = None,
    ) -> "Future[Position]":
        if self._closed:
            raise LogError("the writer is closed")
        append = Append(
            topic=topic,
            value=value,
            key=key,
            number=-1 if partition is None else partition,
            headers=[*headers.items()] if headers else None,
            size=record_size(key, value, headers),
            future=Future(),
        )
        append.future.set_running_or_notify_cancel()
        try:
            buffer = self._choose(self._check(topic, key, append.size))
            buffer.enter(append.size)
        except LogError as error:
            append.future.set_exception(error)
        else:
            buffer.send(append)
        return append.future

    def flush(self, timeout: float) -> None:
        if not self._drain(timeout):
            raise LogError(f"{self._pending()} records not acknowledged within {timeout} s", retriable=True)

    def close(self, timeout: float = 30.0) -> None:
        if self._closed:
            return
        self._seal()
        left = 0 if self._drain(timeout) else self._pending()
        for buffer in self._every():
            if left:
                buffer.purge()
            buffer.join()
        if left:
            raise LogError(f"closed with {left} records not acknowledged within {timeout} s; their futures failed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and hasattr(self, "_buffers"):
            warnings.warn(f"unclosed {type(self).__name__}", ResourceWarning, stacklevel=2, source=self)
            self._seal()

    def _check(self, topic: str, key: bytes | None, size: int) -> _Known:
        known = self._known.get(topic)
        # the limit may have been raised since: nothing is refused on what was true once
        if known is None or size > known.limit:
            known = self._known[topic] = self._learn(topic)
        check_record(known.topic, key, size, known.limit)
        return known

    def _learn(self, topic: str) -> _Known:
        """The topic's settings, waiting for a cluster that cannot be reached just now."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                found = self._find(topic)
            except LogError as error:
                if not error.retriable or time.monotonic() > deadline or self._closed:
                    raise
                _log.warning("append to %s waits for the cluster: %s", topic, error)
            else:
                limit = min(self._max_bytes, int(found.config.get("max.message.bytes", self._max_bytes)))
                return _Known(found, limit)

    def _choose(self, known: _Known) -> Buffer:
        size = min(self._batch_bytes, known.limit)
        buffer = self._buffers.get(size)
        return buffer if buffer is not None and not buffer.broken else self._open(size)

    def _open(self, size: int) -> Buffer:
        """The buffer for batches of this size, opened now where there is none that can go on."""
        with self._lock:
            if self._closed:
                raise LogError("the writer is closed")
            old = self._buffers.get(size)
            if old is None or old.broken:
                self._buffers[size] = Buffer(self._connect(size), self._capacity, size)
                if old is not None:
                    old.seal()
                    self._retired = [b for b in (*self._retired, old) if b.pending]
            return self._buffers[size]

    def _every(self) -> list[Buffer]:
        return [*self._retired, *self._buffers.values()]

    def _seal(self) -> None:
        with self._lock:
            self._closed = True
            for buffer in self._every():
                buffer.seal()

    def _drain(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        return all(buffer.drain(deadline - time.monotonic()) for buffer in self._every())

    def _pending(self) -> int:
        return sum(buffer.pending for buffer in self._every())
