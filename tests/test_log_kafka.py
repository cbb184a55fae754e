"""What only the Kafka log has: settings, secrets, bounded buffers, live growth, brokers that die."""

import logging
import socket
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Condition, Event, Thread
from typing import cast

import pytest
from confluent_kafka import KafkaError, Message, Producer

from rollstream.infra.kafka import KafkaLog, KafkaWriter, admin
from rollstream.infra.kafka.settings import Role, assemble
from rollstream.infra.log import Consumer, LogError, Partition, Position, Record, RecordTooLarge, Topic, Writer
from rollstream.infra.stack import Broker, LocalStack, find_obstacle

PATIENCE = 60.0


@pytest.fixture
def nowhere() -> str:
    """An address where nothing listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"


@pytest.fixture
def topic(kafka_address: str) -> str:
    name = f"test-{uuid.uuid4()}"
    KafkaLog(kafka_address).create(Topic(name=name, partitions=2))
    return name


class TestSettings:
    def test_secrets_are_shown_nowhere(self, nowhere: str, caplog: pytest.LogCaptureFixture) -> None:
        settings = {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "PLAIN",
            "sasl.username": "worker",
            "sasl.password": "hunter2-hunter2",
            "ssl.key.password": "correct-horse",
        }
        log = KafkaLog(nowhere, settings=settings)
        assert "sasl.password" in repr(log)
        assert "hunter2" not in repr(log)
        with caplog.at_level(logging.DEBUG), log.writer() as writer:
            assert "hunter2" not in repr(writer)
        # a value in the wrong place: the client quotes it
        with pytest.raises(LogError) as caught:
            KafkaLog(nowhere, settings={**settings, "sasl.mechanism": "hunter2-hunter2"}).writer()
        shown = f"{caught.value} {caught.value.__cause__} {caught.value.__context__} {caplog.text}"
        assert "Unsupported SASL mechanism" in shown
        assert "hunter2" not in shown
        assert "correct-horse" not in shown

    def test_security_reaches_every_client(self) -> None:
        settings = {"security.protocol": "SASL_SSL", "sasl.username": "u", "sasl.password": "p", "ssl.ca.location": "x"}
        roles: tuple[Role, ...] = ("admin", "writer", "consumer")
        for role in roles:
            assert settings.items() <= assemble(role, "b:1", settings).items()

    def test_a_setting_goes_only_to_those_it_concerns(self) -> None:
        settings = {"linger.ms": "50", "fetch.max.bytes": "5000000", "session.timeout.ms": "9000"}
        assert assemble("writer", "b:1", settings).items() >= {"linger.ms": "50"}.items()
        assert assemble("consumer", "b:1", settings).items() >= {"session.timeout.ms": "9000"}.items()
        assert "fetch.max.bytes" not in assemble("writer", "b:1", settings)
        assert "linger.ms" not in assemble("consumer", "b:1", settings)
        assert not settings.keys() & assemble("admin", "b:1", settings).keys()

    def test_the_classic_protocol_times_out_after_six_seconds_and_the_new_one_asks_the_broker(self) -> None:
        assert assemble("consumer", "b:1", {})["session.timeout.ms"] == "6000"
        kip848 = assemble("consumer", "b:1", {"group.protocol": "consumer"})
        assert not {"session.timeout.ms", "heartbeat.interval.ms", "partition.assignment.strategy"} & kip848.keys()

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("acks", "1"),
            ("enable.idempotence", "false"),
            ("partitioner", "consistent"),
            ("enable.auto.commit", "true"),
            ("auto.offset.reset", "latest"),
            ("allow.auto.create.topics", "true"),
            ("group.id", "mine"),
            ("bootstrap.servers", "elsewhere:9092"),
            ("partition.assignment.strategy", "range"),
        ],
    )
    def test_what_the_log_relies_on_cannot_be_set(self, name: str, value: str) -> None:
        with pytest.raises(LogError, match=name):
            KafkaLog("127.0.0.1:1", settings={name: value})

    def test_a_setting_that_the_client_does_not_know_is_named(self) -> None:
        with pytest.raises(LogError, match=r"no\.such\.setting"):
            KafkaLog("127.0.0.1:1", settings={"no.such.setting": "1"})


class TestBuffer:
    """A writer whose cluster does not answer: everything it accepts stays in the buffer."""

    @pytest.fixture
    def writer(self, nowhere: str) -> KafkaWriter:
        def connect(batch_bytes: int) -> Producer:
            settings = assemble("writer", nowhere, {"batch.size": str(batch_bytes)})
            return Producer(settings, logger=logging.getLogger("test"))

        return KafkaWriter(
            connect, lambda name: Topic(name=name), capacity=100_000, max_bytes=50_000, batch_bytes=50_000
        )

    def test_a_full_buffer_holds_the_caller_back_and_drops_nothing(self, writer: KafkaWriter) -> None:
        futures = [writer.append("t", bytes(9_800)) for _ in range(10)]
        held, went_on = Event(), Event()

        def overfill() -> None:
            held.set()
            futures.append(writer.append("t", bytes(9_800)))
            went_on.set()

        thread = Thread(target=overfill)
        thread.start()
        held.wait(PATIENCE)
        assert not went_on.wait(0.3)
        with pytest.raises(LogError, match="10 records not acknowledged") as caught:
            writer.flush(0.1)
        assert caught.value.retriable
        assert not any(future.done() for future in futures)
        with pytest.raises(LogError, match="closed with 10 records"):
            writer.close(timeout=0.1)
        thread.join(PATIENCE)
        errors = [future.exception(PATIENCE) for future in futures]
        assert len(errors) == 11
        assert all(isinstance(error, LogError) for error in errors)
        assert all(error.retriable for error in errors[:10] if isinstance(error, LogError))

    def test_small_records_count_with_their_overhead(self, writer: KafkaWriter) -> None:
        fits = 100_000 // (1 + 97)
        for _ in range(fits):
            writer.append("t", b"v")
        went_on = Event()

        def overfill() -> None:
            writer.append("t", b"v")
            went_on.set()

        thread = Thread(target=overfill)
        thread.start()
        assert not went_on.wait(0.3)
        with pytest.raises(LogError, match=f"closed with {fits} records"):
            writer.close(timeout=0.1)
        thread.join(PATIENCE)

    def test_a_record_over_the_clients_limit_is_refused_without_a_broker(self, writer: KafkaWriter) -> None:
        assert isinstance(writer.append("t", bytes(50_000)).exception(PATIENCE), RecordTooLarge)
        writer.close()


def test_a_cluster_that_is_away_is_told_with_its_cause(nowhere: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "PATIENCE", 0.5)
    monkeypatch.setattr(admin, "_ANSWER", 0.5)
    with pytest.raises(LogError, match="Connection refused") as caught:
        KafkaLog(nowhere).topics()
    assert caught.value.retriable


class ScriptedClient:
    """Stands for the client and its broker: `outcomes` says, batch after batch, what becomes of them; then all is well.

    "lost": acknowledged as a duplicate, and not there. "kept": acknowledged as a duplicate, and there.
    """

    def __init__(self, *outcomes: str, batch: int) -> None:
        self.stored: list[bytes] = []
        self._outcomes = list(outcomes)
        self._batch = batch
        self._queue: list[tuple[bytes, Callable[[KafkaError | None, Message], None]]] = []
        self._filled = Condition()

    def produce(
        self,
        topic: str,
        value: bytes,
        key: bytes | None,
        partition: int,
        *,
        on_delivery: Callable[[KafkaError | None, Message], None],
        headers: object,
    ) -> None:
        with self._filled:
            self._queue.append((value, on_delivery))
            self._filled.notify_all()

    def poll(self, timeout: float) -> int:
        with self._filled:
            self._filled.wait_for(lambda: len(self._queue) >= self._batch, timeout)
            batch, self._queue = self._queue[: self._batch], self._queue[self._batch :]
        outcome = self._outcomes.pop(0) if self._outcomes and batch else "stored"
        first = -1 if outcome != "stored" else len(self.stored)
        if outcome != "lost":
            self.stored += [value for value, _ in batch]
        for place, (_, report) in enumerate(batch):
            report(None, Message(topic="t", partition=0, offset=first + place))
        return len(batch)

    def writer(self) -> KafkaWriter:
        def connect(_: int) -> Producer:
            return cast("Producer", self)

        return KafkaWriter(
            connect, lambda name: Topic(name=name), capacity=1_000_000, max_bytes=1_000_000, batch_bytes=10_000
        )


class TestDoubt:
    """A batch acknowledged as a duplicate says neither whether it was stored nor where."""

    @pytest.mark.parametrize("outcomes", [["lost"], ["kept"], ["stored", "lost"], ["stored", "kept"], ["lost", "kept"]])
    @pytest.mark.parametrize("batch", [1, 3])
    def test_every_future_tells_where_its_record_lies(self, outcomes: list[str], batch: int) -> None:
        client = ScriptedClient(*outcomes, batch=batch)
        values = [b"%d" % number for number in range(12)]
        with client.writer() as writer:
            futures = [writer.append("t", value) for value in values]
            positions = [future.result(PATIENCE) for future in futures]
        assert [client.stored[position.offset] for position in positions] == values

    def test_a_record_that_seems_to_follow_a_batch_in_doubt_is_not_doubted_for_ever(self) -> None:
        # one record in doubt, and not there; the next ones lie at 0, 1, 2, ... truly
        client = ScriptedClient("lost", batch=1)
        values = [b"%04d" % number + bytes(996) for number in range(40)]
        with client.writer() as writer:
            positions = [writer.append("t", value).result(PATIENCE) for value in values]
        assert [client.stored[position.offset] for position in positions] == values
        assert len(client.stored) <= len(values) + 10, "doubt reaches no further than a batch of 10,000 bytes"

    def test_doubt_that_does_not_end_is_an_error(self) -> None:
        client = ScriptedClient(*["lost"] * 5, batch=1)
        with client.writer() as writer:
            error = writer.append("t", b"v").exception(PATIENCE)
            assert isinstance(error, LogError)
            assert error.retriable
            assert writer.append("t", b"w").result(PATIENCE).offset == 0


class TestLiveGrowth:
    def test_a_member_is_given_partitions_that_are_added(self, kafka_address: str, topic: str) -> None:
        log = KafkaLog(kafka_address, settings={"topic.metadata.refresh.interval.ms": "500"})
        with log.writer() as writer, log.subscribe([topic], group=f"g-{uuid.uuid4()}") as consumer:
            poll_until(consumer, lambda: len(consumer.assignment()) == 2)
            log.grow(topic, 4)
            poll_until(consumer, lambda: len(consumer.assignment()) == 4)
            poll_until(consumer, lambda: can_append(writer, topic, 3))
            records = poll_until(consumer, lambda: consumer.position(Partition(topic, 3)) == 1)
        assert [(record.partition.number, record.value) for record in records] == [(3, b"new")]


class TestBrokerDeath:
    @pytest.mark.parametrize("broker", ["kafka", "tansu"])
    def test_a_broker_killed_under_writes_loses_nothing(self, broker: Broker, tmp_path: Path) -> None:
        """No append fails and none is lost; on Apache Kafka none is stored twice either."""
        if obstacle := find_obstacle(broker):
            pytest.skip(obstacle)
        with LocalStack(tmp_path, broker=broker) as stack:
            log = KafkaLog(stack.endpoints.bootstrap)
            log.create(Topic(name="t", partitions=2))
            with log.read(dict.fromkeys(log.partitions("t"), 0)) as consumer:
                with log.writer() as writer:
                    feed = Feed(writer)
                    poll_until(consumer, lambda: consumer.position(Partition("t", 0)) > 50)
                    stack.kill("broker-1")
                    feed.await_more(50)
                    stack.restart("broker-1")
                    feed.await_more(50)
                    positions = feed.finish()
                consumer.seek(Partition("t", 0), 0)
                consumer.seek(Partition("t", 1), 0)
                ends = {partition: end for partition, (_, end) in log.bounds(log.partitions("t")).items()}
                records = poll_until(
                    consumer, lambda: all(consumer.position(partition) == end for partition, end in ends.items())
                )
        found = {record.position: record.value for record in records}
        assert [found[position] for position in positions] == [b"%d" % number for number in range(len(positions))]
        if broker == "kafka":
            assert len(found) == len(positions)


class Feed:
    """Appends numbers from a thread of its own."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._futures: list[Future[Position]] = []
        self._more = Condition()
        self._over = Event()
        self._thread = Thread(target=self._run)
        self._thread.start()

    def await_more(self, count: int) -> None:
        with self._more:
            target = len(self._futures) + count
            assert self._more.wait_for(lambda: len(self._futures) >= target, PATIENCE)

    def finish(self) -> list[Position]:
        self._over.set()
        self._thread.join()
        return [future.result(PATIENCE) for future in self._futures]

    def _run(self) -> None:
        while not self._over.wait(0.001):
            number = len(self._futures)
            future = self._writer.append("t", b"%d" % number, key=b"%d" % number)
            with self._more:
                self._futures.append(future)
                self._more.notify_all()


def can_append(writer: Writer, topic: str, partition: int) -> bool:
    return writer.append(topic, b"new", partition=partition).exception(PATIENCE) is None


def poll_until(consumer: Consumer, done: Callable[[], bool]) -> list[Record]:
    records: list[Record] = []
    for _ in range(int(PATIENCE * 20)):
        records += consumer.poll(1000, 0.05)
        if done():
            return records
    raise AssertionError(f"did not come to it within {PATIENCE} s, {len(records)} records read")
