"""`KafkaWriter`: appends with back-pressure, acknowledged through futures.

    caller thread:  append --> room in the buffer? (waits) --> client's queue          the client's own threads send
    reports thread:                       future resolved, room made <-- client's delivery reports

The two meet in `_Buffer`. It knows nothing of the writer, so that a writer dropped unclosed is noticed: it warns, and
what it accepted is still sent while the process lives.
"""

import logging
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Condition, Thread, current_thread
from types import TracebackType
from typing import Self

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from ..log import Headers, LogError, Partition, Position, Topic, check_record, record_size
from .errors import code_of, to_log_error

_log = logging.getLogger(__name__)

PATIENCE = 60.0
"""Seconds that the first append to a topic waits for a cluster that cannot be reached."""


class _Buffer:
    """The records under way: how many, how many bytes; and the thread that serves their reports."""

    def __init__(self, client: Producer, capacity: int) -> None:
        self.client = client
        self.changed = Condition()
        self.pending = 0
        self._capacity = capacity
        self._bytes = 0
        self._closing = False
        self._thread = Thread(target=self._serve, name="rollstream-reports", daemon=True)
        self._thread.start()

    def enter(self, size: int) -> None:
        """Take room for a record, waiting until there is some; a record larger than the buffer waits for all of it.

        The reports' own thread is never held back: it is the one that makes room. Raises `LogError` once closing.
        """
        with self.changed:
            while self._bytes and self._bytes + size > self._capacity and not self._is_exempt():
                self.changed.wait()
            if self._closing:
                raise LogError("the writer is closed")
            self.pending += 1
            self._bytes += size

    def leave(self, size: int) -> None:
        """Give the room back."""
        with self.changed:
            self.pending -= 1
            self._bytes -= size
            self.changed.notify_all()

    def settle(self, future: "Future[Position]", size: int, error: KafkaError | None, message: Message) -> None:
        """The delivery report of one record."""
        topic, number, offset = message.topic(), message.partition(), message.offset()
        if error is not None:
            future.set_exception(to_log_error(error, f"append to {topic}"))
        elif topic is None or number is None or offset is None:
            future.set_exception(LogError(f"append to {topic}: acknowledged without a position"))
        else:
            future.set_result(Position(Partition(topic, number), offset))
        self.leave(size)

    def drain(self, timeout: float) -> bool:
        """Wait until nothing is under way; False when `timeout` (s) ended first."""
        with self.changed:
            return self.changed.wait_for(lambda: self.pending == 0, timeout)

    def seal(self) -> None:
        """Accept no more; the thread ends once nothing is under way."""
        with self.changed:
            self._closing = True
            self.changed.notify_all()

    def join(self) -> None:
        if current_thread() is not self._thread:
            self._thread.join()

    def _is_exempt(self) -> bool:
        return self._closing or current_thread() is self._thread

    def _serve(self) -> None:
        while not (self._closing and self.pending == 0):
            self.client.poll(0.1)


class KafkaWriter:
    """A `Writer` to Kafka: idempotent, `acks=all`, compressed, bounded in bytes.

    `find` tells a topic's settings; it is asked when a topic is first used, and again before a record is refused.
    """

    def __init__(self, client: Producer, find: Callable[[str], Topic], *, capacity: int, max_bytes: int) -> None:
        self._buffer = _Buffer(client, capacity)
        self._find = find
        self._max_bytes = max_bytes
        self._topics: dict[str, Topic] = {}
        self._closed = False

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
        future: Future[Position] = Future()
        future.set_running_or_notify_cancel()
        size = record_size(key, value, headers)
        send = partial(
            self._buffer.client.produce,
            topic,
            value,
            key,
            -1 if partition is None else partition,
            on_delivery=partial(self._buffer.settle, future, size),
            headers=[*headers.items()] if headers else None,
        )
        try:
            self._check(topic, key, size)
            self._buffer.enter(size)
            self._send(send, size, f"append to {topic}")
        except LogError as error:
            future.set_exception(error)
        return future

    def flush(self, timeout: float) -> None:
        if not self._buffer.drain(timeout):
            raise LogError(f"{self._buffer.pending} records not acknowledged within {timeout} s", retriable=True)

    def close(self, timeout: float = 30.0) -> None:
        if self._closed:
            return
        self._closed = True
        self._buffer.seal()
        left = 0 if self._buffer.drain(timeout) else self._buffer.pending
        if left:
            self._buffer.client.purge()
        self._buffer.join()
        if left:
            raise LogError(f"closed with {left} records not acknowledged within {timeout} s; their futures failed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            warnings.warn(f"unclosed {type(self).__name__}", ResourceWarning, stacklevel=2, source=self)
            self._buffer.seal()

    def _check(self, topic: str, key: bytes | None, size: int) -> None:
        known = self._topics.get(topic)
        if known is None:
            known = self._topics[topic] = self._learn(topic)
        if size > self._limit(known):
            known = self._topics[topic] = self._learn(topic)
        check_record(known, key, size, self._limit(known))

    def _limit(self, topic: Topic) -> int:
        return min(self._max_bytes, int(topic.config.get("max.message.bytes", self._max_bytes)))

    def _learn(self, topic: str) -> Topic:
        """The topic's settings, waiting for a cluster that cannot be reached just now."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return self._find(topic)
            except LogError as error:
                if not error.retriable or time.monotonic() > deadline or self._closed:
                    raise
                _log.warning("append to %s waits for the cluster: %s", topic, error)

    def _send(self, send: Callable[[], None], size: int, doing: str) -> None:
        while True:
            try:
                send()
                return
            except BufferError:  # the client counts a little more than the buffer does
                with self._buffer.changed:
                    self._buffer.changed.wait(0.05)
            except KafkaException as error:
                self._buffer.leave(size)
                raise to_log_error(code_of(error), doing) from error
