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
from dataclasses import dataclass
from functools import partial
from itertools import count
from threading import Condition, Lock, Thread, current_thread
from types import TracebackType
from typing import Self

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from ..log import Headers, LogError, Partition, Position, Topic, check_record, record_size
from .doubt import Doubt
from .errors import code_of, to_log_error

_log = logging.getLogger(__name__)

PATIENCE = 60.0
"""Seconds that the first append to a topic waits for a cluster that cannot be reached."""
ATTEMPTS = 5
"""How often a record is sent whose acknowledgement leaves open whether it was stored."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Append:
    """One record under way."""

    topic: str
    value: bytes | None
    key: bytes | None
    number: int
    headers: list[tuple[str, str | bytes | None]] | None
    size: int
    future: "Future[Position]"
    attempts: int = 0
    sent: int = 0
    """Which sending of its buffer the last one was."""


class _Buffer:
    """The records under way: how many, how many bytes; and the thread that serves their reports."""

    def __init__(self, client: Producer, capacity: int, batch_bytes: int) -> None:
        self.pending = 0
        self._client = client
        self._capacity, self._batch_bytes = capacity, batch_bytes
        self._bytes = 0
        self._closing = False
        self._sendings = count()
        self._doubts: dict[Partition, Doubt] = {}
        self._changed = Condition()
        self._thread = Thread(target=self._serve, name="rollstream-reports", daemon=True)
        self._thread.start()

    def enter(self, size: int) -> None:
        """Take room for a record, waiting until there is some; a record larger than the buffer waits for all of it.

        The reports' own thread is never held back: it is the one that makes room. Raises `LogError` once closing.
        """
        with self._changed:
            while self._bytes and self._bytes + size > self._capacity and not self._is_exempt():
                self._changed.wait()
            if self._closing:
                raise LogError("the writer is closed")
            self.pending += 1
            self._bytes += size

    def send(self, append: _Append) -> None:
        """Hand a record to the client. Its future gets whatever comes of it."""
        append.attempts += 1
        append.sent = next(self._sendings)
        while True:
            try:
                self._client.produce(
                    append.topic,
                    append.value,
                    append.key,
                    append.number,
                    on_delivery=partial(self._settle, append),
                    headers=append.headers,
                )
                return
            except BufferError:  # the client counts a little more than this buffer does
                with self._changed:
                    self._changed.wait(0.05)
            except KafkaException as error:
                self._finish(append, to_log_error(code_of(error), f"append to {append.topic}"))
                return

    def drain(self, timeout: float) -> bool:
        """Wait until nothing is under way; False when `timeout` (s) ended first."""
        with self._changed:
            return self._changed.wait_for(lambda: self.pending == 0, timeout)

    def seal(self) -> None:
        """Accept no more; the thread ends once nothing is under way."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def purge(self) -> None:
        """Give up what is under way."""
        self._client.purge()

    def join(self) -> None:
        if current_thread() is not self._thread:
            self._thread.join()

    def _is_exempt(self) -> bool:
        return self._closing or current_thread() is self._thread

    def _serve(self) -> None:
        while not (self._closing and self.pending == 0):
            self._client.poll(0.1)

    def _settle(self, append: _Append, error: KafkaError | None, message: Message) -> None:
        """The delivery report of one record."""
        partition = Partition(append.topic, message.partition() or 0)
        if error is not None:
            self._finish(append, to_log_error(error, f"append to {append.topic}"))
        elif not self._is_doubtful(append, partition, message.offset()):
            self._finish(append, Position(partition, message.offset() or 0))
        elif append.attempts < ATTEMPTS:
            _log.warning("%s: a record was acknowledged as a duplicate, without a position; appending again", partition)
            self.send(append)
        else:
            doing = f"append to {append.topic}: acknowledged {ATTEMPTS} times as a duplicate, without a position"
            self._finish(append, LogError(doing, retriable=True))

    def _is_doubtful(self, append: _Append, partition: Partition, offset: int | None) -> bool:
        doubt = self._doubts.get(partition)
        if doubt is None:
            if offset is not None:
                return False
            doubt = self._doubts[partition] = Doubt(self._batch_bytes)
        return doubt.raised(offset, append.size, sent=append.sent, now=next(self._sendings))

    def _finish(self, append: _Append, outcome: Position | LogError) -> None:
        if isinstance(outcome, LogError):
            append.future.set_exception(outcome)
        else:
            append.future.set_result(outcome)
        with self._changed:
            self.pending -= 1
            self._bytes -= append.size
            # a waiter woken for every record costs more than the record
            if self.pending == 0 or self._bytes <= self._capacity * 3 // 4 < self._bytes + append.size:
                self._changed.notify_all()


class KafkaWriter:
    """A `Writer` to Kafka: idempotent, `acks=all`, compressed, bounded in bytes.

    `find` tells a topic's settings; it is asked when a topic is first used, and again before a record is refused.
    `connect` opens a client whose batches hold so many bytes. There is one for all usual topics, and another for those
    that accept less than a usual batch: the broker judges a batch as a whole, and its records fall together.
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
        self._topics: dict[str, Topic] = {}
        self._lock = Lock()
        self._closed = False
        self._buffers = {batch_bytes: _Buffer(connect(batch_bytes), capacity, batch_bytes)}

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
        append = _Append(
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
        for buffer in self._buffers.values():
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

    def _check(self, topic: str, key: bytes | None, size: int) -> Topic:
        known = self._topics.get(topic)
        if known is None:
            known = self._topics[topic] = self._learn(topic)
        if size > self._limit(known):
            known = self._topics[topic] = self._learn(topic)
        check_record(known, key, size, self._limit(known))
        return known

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

    def _choose(self, topic: Topic) -> _Buffer:
        size = min(self._batch_bytes, self._limit(topic))
        if size not in self._buffers:
            with self._lock:
                if self._closed:
                    raise LogError("the writer is closed")
                if size not in self._buffers:
                    self._buffers[size] = _Buffer(self._connect(size), self._capacity, size)
        return self._buffers[size]

    def _seal(self) -> None:
        with self._lock:
            self._closed = True
            for buffer in self._buffers.values():
                buffer.seal()

    def _drain(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        return all(buffer.drain(deadline - time.monotonic()) for buffer in [*self._buffers.values()])

    def _pending(self) -> int:
        return sum(buffer.pending for buffer in [*self._buffers.values()])
