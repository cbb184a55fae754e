"""`KafkaWriter` over clients that end: a new one takes over, and what was under way may be appended again."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import cast

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from rollstream.infra.kafka.writer import KafkaWriter
from rollstream.infra.log import LogError, Partition, Position, Topic

FENCED = 90
"""PRODUCER_FENCED"""


class Report:
    """A delivery report's message."""

    def __init__(self, offset: int) -> None:
        self._offset = offset

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self._offset


class Client:
    """Stands for a Producer: stores what it is given, or refuses it all with one error."""

    def __init__(self, error: KafkaError | None = None, *, at_once: bool = False, reports: int = 1000) -> None:
        self.error, self.at_once = error, at_once
        self.reports = threading.Semaphore(reports)
        """How many more it delivers."""
        self.stored: list[bytes] = []
        self._reports: deque[Callable[[], None]] = deque()

    def produce(self, topic: str, value: bytes, *_: object, on_delivery: Callable[..., None], **__: object) -> None:
        if self.error is not None and self.at_once:
            raise KafkaException(self.error)
        if self.error is None:
            self.stored.append(value)
        message = Report(len(self.stored) - 1)
        self._reports.append(lambda: on_delivery(self.error, message))

    def poll(self, timeout: float) -> None:
        if not self._reports:
            threading.Event().wait(0.001)
        elif self.reports.acquire(timeout=timeout):
            self._reports.popleft()()


class Clients:
    """What the writer connects to, one after the other."""

    def __init__(self, *clients: Client) -> None:
        self.all = list(clients)
        self.opened: list[Client] = []

    def connect(self, batch_bytes: int) -> Producer:
        client = self.all[len(self.opened)]
        self.opened.append(client)
        return cast("Producer", client)


@pytest.fixture
def open_writer() -> Iterator[Callable[[Clients], KafkaWriter]]:
    opened: list[KafkaWriter] = []

    def open_one(clients: Clients) -> KafkaWriter:
        writer = KafkaWriter(
            clients.connect, lambda name: Topic(name=name), capacity=1 << 20, max_bytes=1 << 20, batch_bytes=1 << 16
        )
        opened.append(writer)
        return writer

    yield open_one
    for writer in opened:
        writer.close(5.0)


@pytest.mark.parametrize("error", [KafkaError(FENCED), KafkaError(KafkaError.UNKNOWN, "gone", True)])
@pytest.mark.parametrize("at_once", [False, True])
def test_new_client_takes_over(error: KafkaError, at_once: bool, open_writer: Callable[[Clients], KafkaWriter]) -> None:
    """Fenced, or any fatal error, told by a report or by the call: the same append works when it is made again."""
    clients = Clients(Client(error, at_once=at_once), Client())
    writer = open_writer(clients)
    refusal = writer.append("t", b"a").exception(10)
    assert isinstance(refusal, LogError)
    assert refusal.retriable
    assert writer.append("t", b"a").result(10) == Position(Partition("t", 0), 0)
    assert writer.append("t", b"b").result(10).offset == 1
    assert clients.opened[1].stored == [b"a", b"b"]
    assert len(clients.opened) == 2


def test_old_client_is_waited_for(open_writer: Callable[[Clients], KafkaWriter]) -> None:
    """What a replaced client has under way counts until it is reported."""
    clients = Clients(Client(KafkaError(FENCED), reports=0), Client())
    writer = open_writer(clients)
    first, late = writer.append("t", b"first"), writer.append("t", b"late")
    old = clients.opened[0]
    old.reports.release()
    assert first.exception(10) is not None
    assert writer.append("t", b"b").result(10).offset == 0
    with pytest.raises(LogError, match="1 records not acknowledged"):
        writer.flush(0.05)
    old.reports.release()
    assert late.exception(10) is not None
    writer.flush(10)


def test_other_refusals_keep_the_client(open_writer: Callable[[Clients], KafkaWriter]) -> None:
    """What the broker refuses for its content is refused; what passes may be tried again. Neither ends the client."""
    clients = Clients(Client(KafkaError(KafkaError.POLICY_VIOLATION)))
    writer = open_writer(clients)
    refusal = writer.append("t", b"a").exception(10)
    assert isinstance(refusal, LogError)
    assert not refusal.retriable
    clients.opened[0].error = KafkaError(KafkaError.UNKNOWN)
    passing = writer.append("t", b"a").exception(10)
    assert isinstance(passing, LogError)
    assert passing.retriable
    assert len(clients.opened) == 1
