"""The records under way in one client, where the caller's half and the network's half of a writer meet.

caller thread:    enter (waits for room) --> send --> the client's queue, sent by the client's own threads
reports thread:   future resolved, room made <-- delivery report
"""

import logging
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import count
from threading import Condition, Thread, current_thread

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from ..log import LogError, Partition, Position
from .doubt import Doubt
from .errors import code_of, ends_client, to_log_error

_log = logging.getLogger(__name__)

ATTEMPTS = 5
"""How often a record is sent whose acknowledgement leaves open whether it was stored."""


@dataclass(slots=True, kw_only=True, eq=False)
class Append:
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


class Buffer:
    """Counts the records under way and their bytes, and serves their reports from a thread of its own.

    It knows nothing of its writer, so that a writer dropped unclosed is noticed, while what it accepted is still sent.
    """

    def __init__(self, client: Producer, capacity: int, batch_bytes: int) -> None:
        self.pending = 0
        self.broken = False
        """The client is of no more use: what is appended from now on needs another one."""
        self._client = client
        self._capacity, self._batch_bytes = capacity, batch_bytes
        self._bytes = 0
        self._held = 0
        """Callers in `enter`."""
        self._closing = False
        self._sendings = count()
        self._doubts: dict[Partition, Doubt] = {}
        self._changed = Condition()
        self._thread = Thread(target=self._serve, name="rollstream-reports", daemon=True)
        self._thread.start()

    def enter(self, size: int) -> None:
        """Take room for a record, waiting until there is some; a record larger than the buffer waits for all of it.

        The reports' own thread is never held back: it is the one that makes room. Raises `LogError` once closing;
        retriable where only this client is closed.
        """
        with self._changed:
            self._held += 1
            try:
                while self._bytes and self._bytes + size > self._capacity and not self._is_exempt():
                    self._changed.wait()
            finally:
                self._held -= 1
            if self._closing:
                raise LogError("the writer is closed", retriable=self.broken)
            self.pending += 1
            self._bytes += size

    def send(self, append: Append) -> None:
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
            except BufferError:
                # only callbacks that append more than was settled overrun this buffer so far; the thread that
                # serves them must go on, and other callers wait for it
                if current_thread() is self._thread:
                    self._finish(append, LogError(f"append to {append.topic}: the buffer is full", retriable=True))
                    return
                with self._changed:
                    self._changed.wait(0.05)
            except KafkaException as error:
                self._finish(append, self._refusal(append, code_of(error)))
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
        # a report ends the wait at once; the time only bounds how late the end is noticed
        while not (self._closing and self.pending == 0):
            self._client.poll(0.1)

    def _settle(self, append: Append, error: KafkaError | None, message: Message) -> None:
        """The delivery report of one record."""
        partition = Partition(append.topic, message.partition() or 0)
        if error is not None:
            self._finish(append, self._refusal(append, error))
        elif not self._is_doubtful(append, partition, message.offset()):
            self._finish(append, Position(partition, message.offset() or 0))
        elif append.attempts < ATTEMPTS:
            _log.warning("%s: a record was acknowledged as a duplicate, without a position; appending again", partition)
            self.send(append)
        else:
            doing = f"append to {append.topic}: acknowledged {ATTEMPTS} times as a duplicate, without a position"
            self._finish(append, LogError(doing, retriable=True))

    def _refusal(self, append: Append, error: KafkaError) -> LogError:
        doing = f"append to {append.topic}"
        if not ends_client(error):
            return to_log_error(error, doing)
        if not self.broken:
            _log.warning("%s: %s (%s); a new client takes over", doing, error.str(), error.name())
        self.broken = True
        return LogError(f"{doing}: {error.str()} ({error.name()}); another client may append it", retriable=True)

    def _is_doubtful(self, append: Append, partition: Partition, offset: int | None) -> bool:
        doubt = self._doubts.get(partition)
        if doubt is None:
            if offset is not None:
                return False
            doubt = self._doubts[partition] = Doubt(self._batch_bytes)
        return doubt.raised(offset, append.size, sent=append.sent, now=next(self._sendings))

    def _finish(self, append: Append, outcome: Position | LogError) -> None:
        if isinstance(outcome, LogError):
            append.future.set_exception(outcome)
        else:
            append.future.set_result(outcome)
        with self._changed:
            self.pending -= 1
            self._bytes -= append.size
            # whoever waits is not woken for every record: the switch costs more than the record
            if self.pending == 0 or (self._held and self._bytes <= self._capacity * 3 // 4):
                self._changed.notify_all()
