"""One body for every log: in memory, on Tansu, on Apache Kafka. Each test has its own topic, so brokers are shared."""

import gc
import os
import uuid
from collections import defaultdict
from collections.abc import Iterable
from threading import Event, Thread
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from rollstream.infra.kafka import KafkaLog
from rollstream.infra.log import (
    FRAMING,
    Consumer,
    Log,
    LogError,
    OffsetExpired,
    Partition,
    Position,
    Record,
    RecordTooLarge,
    Topic,
    UnknownTopic,
    Writer,
    record_size,
)
from rollstream.infra.memory import MemoryLog
from rollstream.infra.murmur import partition_for

BACKENDS = ("memory", "tansu", "kafka")
PATIENCE = 40.0


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def log(backend: str, request: pytest.FixtureRequest) -> Log:
    return MemoryLog() if backend == "memory" else KafkaLog(request.getfixturevalue(f"{backend}_address"))


@pytest.fixture
def topic(log: Log) -> str:
    """A topic with three partitions."""
    return make_topic(log, 3)


def make_topic(log: Log, partitions: int, **config: str) -> str:
    name = f"test-{uuid.uuid4()}"
    settings = {key.replace("_", "."): value for key, value in config.items()}
    log.create(Topic(name=name, partitions=partitions, config=settings))
    return name


def write(log: Log, topic: str, values: Iterable[bytes], *, partition: int | None = None) -> list[Position]:
    """Append and wait; without a partition the value is the key too."""
    with log.writer() as writer:
        futures = [
            writer.append(topic, value, key=value if partition is None else None, partition=partition)
            for value in values
        ]
        return [future.result(PATIENCE) for future in futures]


def take(consumer: Consumer, count: int) -> list[Record]:
    """Exactly `count` records, one at a time, so that none beyond is taken."""
    records: list[Record] = []
    while len(records) < count:
        found = consumer.poll(count - len(records), PATIENCE)
        assert found, f"{len(records)} of {count} records came"
        records += found
    return records


def read_all(log: Log, topic: str) -> list[Record]:
    bounds = log.bounds(log.partitions(topic))
    with log.read({partition: first for partition, (first, _) in bounds.items()}) as consumer:
        return take(consumer, sum(end - first for first, end in bounds.values()))


def expire(log: Log, partition: Partition, offset: int, request: pytest.FixtureRequest) -> None:
    """Delete what lies below the offset, as retention would."""
    if isinstance(log, MemoryLog):
        log.expire(partition, offset)
        return
    admin: Any = AdminClient({"bootstrap.servers": request.getfixturevalue("kafka_address")})
    answers = admin.delete_records([TopicPartition(partition.topic, partition.number, offset)])
    for answer in answers.values():
        answer.result(PATIENCE)


def drop(held: list[Writer] | list[Consumer]) -> None:
    held.clear()
    gc.collect()


class TestWriting:
    def test_positions_are_true_and_order_holds_within_a_partition(self, log: Log, topic: str) -> None:
        values = [b"%03d" % number for number in range(120)]
        positions = write(log, topic, values)

        read = read_all(log, topic)
        assert {record.position: record.value for record in read} == dict(zip(positions, values, strict=True))
        by_partition: dict[Partition, list[Record]] = defaultdict(list)
        for record in read:
            by_partition[record.partition].append(record)
        assert len(by_partition) == 3
        for records in by_partition.values():
            assert [record.offset for record in records] == list(range(len(records)))
            assert [record.value for record in records] == sorted(record.value or b"" for record in records)

    def test_a_key_lies_where_the_java_client_puts_it(self, log: Log) -> None:
        topic = make_topic(log, 7)
        keys = [b"", b"\x00", b"group-1", "größe".encode(), bytes(range(256)), *(b"k%d" % n for n in range(60))]
        positions = write(log, topic, keys)
        assert [p.partition.number for p in positions] == [partition_for(key, 7) for key in keys]

    def test_a_given_partition_wins_over_the_key(self, log: Log, topic: str) -> None:
        with log.writer() as writer:
            positions = [writer.append(topic, b"v", key=b"same", partition=n).result(PATIENCE) for n in (2, 0, 1)]
        assert [position.partition.number for position in positions] == [2, 0, 1]

    def test_a_record_without_a_key_lands_somewhere(self, log: Log, topic: str) -> None:
        with log.writer() as writer:
            position = writer.append(topic, b"v").result(PATIENCE)
        (record,) = read_all(log, topic)
        assert (record.position, record.key) == (position, None)

    def test_headers_tombstones_and_empty_bytes_come_back_as_they_were(self, log: Log, topic: str) -> None:
        headers = {"traceparent": b"00-ab-01", "empty": b"", "bytes": bytes(range(256)), "ünicode": b"x"}
        with log.writer() as writer:
            for key, value in ((b"k", None), (b"k", b""), (b"", b"v")):
                writer.append(topic, value, key=key, headers=headers, partition=1)
        records = read_all(log, topic)
        assert [(record.key, record.value) for record in records] == [(b"k", None), (b"k", b""), (b"", b"v")]
        assert all(record.headers == headers for record in records)
        assert all(record.timestamp_ms > 1_600_000_000_000 for record in records)

    def test_too_large_is_refused_and_its_neighbours_arrive(self, log: Log) -> None:
        topic = make_topic(log, 1, max_message_bytes="20000")
        sizes = (10, 20_000 - FRAMING, 20_000 - FRAMING + 1, 20_001, 3_000_000, 10)
        with log.writer() as writer:
            futures = [writer.append(topic, os.urandom(size)) for size in sizes]
            errors = [future.exception(PATIENCE) for future in futures]
        assert [type(error) for error in errors] == [type(None)] * 2 + [RecordTooLarge] * 3 + [type(None)]
        assert isinstance(errors[2], RecordTooLarge)
        assert (errors[2].size, errors[2].limit, errors[2].retriable) == (20_001, 20_000, False)
        assert [len(record.value or b"") for record in read_all(log, topic)] == [10, 20_000 - FRAMING, 10]

    def test_whether_it_is_too_large_does_not_depend_on_its_content(self, log: Log) -> None:
        topic = make_topic(log, 1, max_message_bytes="20000")
        with log.writer() as writer:
            error = writer.append(topic, bytes(30_000)).exception(PATIENCE)
        assert isinstance(error, RecordTooLarge)

    def test_key_and_headers_count_too(self, log: Log) -> None:
        topic = make_topic(log, 1, max_message_bytes="20000")
        key, headers = os.urandom(5_000), {"h": os.urandom(5_000)}
        room = 20_000 - record_size(key, None, headers)
        with log.writer() as writer:
            assert writer.append(topic, os.urandom(room), key=key, headers=headers).exception(PATIENCE) is None
            error = writer.append(topic, os.urandom(room + 1), key=key, headers=headers).exception(PATIENCE)
        assert isinstance(error, RecordTooLarge)

    def test_no_key_on_a_compacted_topic_is_refused_alone(self, log: Log) -> None:
        topic = make_topic(log, 1, cleanup_policy="compact")
        with log.writer() as writer:
            futures = [writer.append(topic, b"v", key=key) for key in (b"a", None, b"b")]
            errors = [future.exception(PATIENCE) for future in futures]
        assert isinstance(errors[1], LogError)
        assert [record.key for record in read_all(log, topic)] == [b"a", b"b"]

    def test_an_unknown_topic_fails_at_once_and_is_not_created(self, log: Log) -> None:
        name = f"test-{uuid.uuid4()}"
        nowhere = Partition(name, 0)
        with log.writer() as writer:
            assert isinstance(writer.append(name, b"v").exception(PATIENCE), UnknownTopic)
        for ask in (
            lambda: log.partitions(name),
            lambda: log.bounds([nowhere]),
            lambda: log.read({nowhere: 0}),
            lambda: log.subscribe([name], group="g"),
            lambda: log.alter(name, {"retention.ms": "1"}),
        ):
            with pytest.raises(UnknownTopic, match=name):
                ask()
        assert name not in log.topics()

    def test_a_partition_that_is_not_there_is_refused(self, log: Log, topic: str) -> None:
        with log.writer() as writer:
            error = writer.append(topic, b"v", partition=3).exception(PATIENCE)
        assert isinstance(error, LogError)
        assert not isinstance(error, UnknownTopic)
        with pytest.raises(LogError, match="3 partitions"):
            log.read({Partition(topic, 3): 0})

    def test_a_writer_takes_ten_times_its_buffer(self, backend: str, request: pytest.FixtureRequest) -> None:
        log: Log = MemoryLog()
        if backend != "memory":
            address = request.getfixturevalue(f"{backend}_address")
            log = KafkaLog(address, settings={"queue.buffering.max.kbytes": "256"})
        topic = make_topic(log, 2)
        values = [os.urandom(32 * 1024) for _ in range(80)]
        assert len(set(write(log, topic, values))) == 80
        assert {record.value for record in read_all(log, topic)} == set(values)

    def test_closing_flushes_and_ends(self, log: Log, topic: str) -> None:
        writer = log.writer()
        futures = [writer.append(topic, b"%d" % number) for number in range(500)]
        writer.close()
        assert all(future.done() for future in futures)
        assert len({future.result() for future in futures}) == 500
        writer.close()
        with pytest.raises(LogError, match="closed"):
            writer.append(topic, b"late")

    def test_flush_waits_for_every_acknowledgement(self, log: Log, topic: str) -> None:
        with log.writer() as writer:
            futures = [writer.append(topic, b"%d" % number) for number in range(100)]
            writer.flush(PATIENCE)
            assert all(future.done() for future in futures)

    def test_an_append_cannot_be_cancelled(self, log: Log, topic: str) -> None:
        with log.writer() as writer:
            future = writer.append(topic, b"v")
            assert not future.cancel()
            assert future.result(PATIENCE).offset == 0

    def test_a_callback_may_append_again(self, log: Log, topic: str) -> None:
        seen = Event()
        with log.writer() as writer:
            writer.append(topic, b"1").add_done_callback(
                lambda _: writer.append(topic, b"2").add_done_callback(lambda _: seen.set())
            )
            assert seen.wait(PATIENCE)
        assert {record.value for record in read_all(log, topic)} == {b"1", b"2"}

    def test_several_threads_share_a_writer(self, log: Log, topic: str) -> None:
        with log.writer() as writer:

            def fill(name: int) -> None:
                for number in range(50):
                    writer.append(topic, b"%d/%d" % (name, number), partition=name)

            threads = [Thread(target=fill, args=(name,)) for name in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for partition in log.partitions(topic):
            values = [record.value for record in read_all(log, topic) if record.partition == partition]
            assert values == [b"%d/%d" % (partition.number, number) for number in range(50)]

    def test_dropping_a_writer_unclosed_warns(self, log: Log) -> None:
        held = [log.writer()]
        with pytest.warns(ResourceWarning, match="unclosed"):
            drop(held)


class TestBounds:
    def test_an_empty_partition_starts_and_ends_at_zero(self, log: Log, topic: str) -> None:
        assert log.bounds(log.partitions(topic)) == {Partition(topic, number): (0, 0) for number in range(3)}
        assert log.bounds([]) == {}

    def test_every_acknowledged_record_lies_below_the_end(self, log: Log, topic: str) -> None:
        partition = Partition(topic, 1)
        with log.writer() as writer:
            for burst in range(1, 16):
                futures = [writer.append(topic, b"v", partition=1) for _ in range(burst)]
                last = max(future.result(PATIENCE).offset for future in futures)
                assert log.bounds([partition]) == {partition: (0, last + 1)}


class TestReading:
    def test_seek_wins_over_what_was_fetched(self, log: Log) -> None:
        topic = make_topic(log, 1)
        partition = Partition(topic, 0)
        write(log, topic, [b"%d" % number for number in range(300)], partition=0)
        with log.read({partition: 10}) as consumer:
            assert [record.offset for record in take(consumer, 5)] == [10, 11, 12, 13, 14]
            for target in (250, 3, 299):
                consumer.seek(partition, target)
                assert consumer.position(partition) == target
                assert take(consumer, 1)[0].offset == target
                assert consumer.position(partition) == target + 1

    def test_a_seek_before_the_first_poll_counts(self, log: Log) -> None:
        topic = make_topic(log, 1)
        partition = Partition(topic, 0)
        write(log, topic, [b"%d" % number for number in range(20)], partition=0)
        with log.read({partition: 0}) as consumer:
            consumer.seek(partition, 7)
            assert take(consumer, 1)[0].offset == 7

    def test_pausing_keeps_the_place(self, log: Log, topic: str) -> None:
        quiet, busy = Partition(topic, 0), Partition(topic, 1)
        for number in (0, 1):
            write(log, topic, [b"%d" % value for value in range(200)], partition=number)
        with log.read({quiet: 0, busy: 0}) as consumer:
            first = take(consumer, 10)
            consumer.pause([quiet])
            position = consumer.position(quiet)
            assert {record.partition for record in take(consumer, 200 - sum(r.partition == busy for r in first))} == {
                busy
            }
            assert consumer.poll(10, 0.3) == []
            assert consumer.position(quiet) == position
            consumer.resume([quiet])
            assert [record.offset for record in take(consumer, 200 - position)] == list(range(position, 200))

    def test_seeking_a_paused_partition_keeps_it_paused(self, log: Log) -> None:
        topic = make_topic(log, 1)
        partition = Partition(topic, 0)
        write(log, topic, [b"%d" % number for number in range(20)], partition=0)
        with log.read({partition: 0}) as consumer:
            take(consumer, 1)
            consumer.pause([partition])
            consumer.seek(partition, 12)
            assert consumer.poll(10, 0.3) == []
            consumer.resume([partition])
            assert take(consumer, 1)[0].offset == 12

    def test_a_record_arrives_while_poll_waits(self, log: Log, topic: str) -> None:
        ready = Event()
        with log.read({Partition(topic, 0): 0}) as consumer:

            def send() -> None:
                ready.wait(PATIENCE)
                write(log, topic, [b"late"], partition=0)

            thread = Thread(target=send)
            thread.start()
            ready.set()
            assert consumer.poll(10, PATIENCE)[0].value == b"late"
            thread.join()

    def test_nothing_comes_when_the_time_is_up(self, log: Log, topic: str) -> None:
        with log.read({Partition(topic, 0): 0}) as consumer:
            assert consumer.poll(10, 0.05) == []
            assert consumer.poll(10, 0) == []

    def test_no_more_records_than_asked_for(self, log: Log) -> None:
        topic = make_topic(log, 1)
        write(log, topic, [b"%d" % number for number in range(50)], partition=0)
        with log.read({Partition(topic, 0): 0}) as consumer:
            while consumer.position(Partition(topic, 0)) < 50:
                assert len(consumer.poll(7, PATIENCE)) <= 7

    def test_only_assigned_partitions_are_moved(self, log: Log, topic: str) -> None:
        other = Partition(topic, 2)
        with log.read({Partition(topic, 0): 0}) as consumer:
            assert consumer.assignment() == {Partition(topic, 0)}
            for move in (
                lambda: consumer.position(other),
                lambda: consumer.seek(other, 0),
                lambda: consumer.pause([other]),
                lambda: consumer.resume([other]),
            ):
                with pytest.raises(LogError, match="not assigned"):
                    move()
            with pytest.raises(LogError, match="group"):
                consumer.commit({Partition(topic, 0): 0})

    def test_closing_from_another_thread_ends_a_poll(self, log: Log, topic: str) -> None:
        consumer = log.read({Partition(topic, 0): 0})
        results: list[list[Record]] = []
        thread = Thread(target=lambda: results.append(consumer.poll(1, PATIENCE)))
        thread.start()
        consumer.close()
        thread.join(PATIENCE)
        assert not thread.is_alive()
        consumer.close()
        with pytest.raises(LogError, match="closed"):
            consumer.poll(1, 0)

    def test_dropping_a_consumer_unclosed_warns(self, log: Log, topic: str) -> None:
        held = [log.read({Partition(topic, 0): 0})]
        with pytest.warns(ResourceWarning, match="unclosed"):
            drop(held)


class TestExpiry:
    @pytest.fixture(autouse=True)
    def _needs_deletion(self, backend: str) -> None:
        if backend == "tansu":
            pytest.skip("Tansu 0.6 deletes no records and answers a fetch out of range with nothing")

    def test_a_position_that_is_gone_is_told_until_a_seek(
        self, log: Log, topic: str, request: pytest.FixtureRequest
    ) -> None:
        gone, fine = Partition(topic, 0), Partition(topic, 1)
        for number in (0, 1):
            write(log, topic, [b"%d" % value for value in range(30)], partition=number)
        expire(log, gone, 20, request)
        assert log.bounds([gone]) == {gone: (20, 30)}
        with log.read({gone: 5}) as consumer:
            for _ in range(2):
                with pytest.raises(OffsetExpired, match="15 records") as caught:
                    take(consumer, 1)
                assert (caught.value.partition, caught.value.wanted, caught.value.earliest) == (gone, 5, 20)
            consumer.seek(gone, 20)
            assert [record.offset for record in take(consumer, 10)] == list(range(20, 30))
        with log.read({fine: 5}) as consumer:
            assert take(consumer, 1)[0].offset == 5

    def test_an_offset_never_written_is_told(self, log: Log, topic: str) -> None:
        write(log, topic, [b"v"] * 3, partition=0)
        with log.read({Partition(topic, 0): 9}) as consumer:
            with pytest.raises(LogError, match="never written") as caught:
                take(consumer, 1)
            assert not isinstance(caught.value, OffsetExpired)
            consumer.seek(Partition(topic, 0), 2)
            assert take(consumer, 1)[0].offset == 2

    def test_a_committed_offset_that_is_gone_is_told(
        self, log: Log, topic: str, request: pytest.FixtureRequest
    ) -> None:
        partition, group = Partition(topic, 0), f"g-{uuid.uuid4()}"
        write(log, topic, [b"%d" % value for value in range(10)], partition=0)
        with log.subscribe([topic], group=group) as consumer:
            take(consumer, 10)
            consumer.commit({partition: 4})
        expire(log, partition, 8, request)
        with log.subscribe([topic], group=group) as consumer, pytest.raises(OffsetExpired, match="offset 4 is gone"):
            take(consumer, 1)


class TestTopics:
    def test_creating_again_is_fine_and_a_mismatch_is_not(self, log: Log) -> None:
        name = make_topic(log, 2, max_message_bytes="5000")
        log.create(Topic(name=name, partitions=2))
        with pytest.raises(LogError, match="expected 3 partitions, found it there with 2"):
            log.create(Topic(name=name, partitions=3))
        assert log.topics()[name] == 2
        assert log.partitions(name) == (Partition(name, 0), Partition(name, 1))
        described = log.describe(name)
        assert (described.name, described.partitions, described.replication) == (name, 2, 1)
        assert described.config == {"max.message.bytes": "5000"}

    def test_altering_sets_and_keeps(self, log: Log) -> None:
        name = make_topic(log, 1, max_message_bytes="5000")
        log.alter(name, {"retention.ms": "86400000"})
        assert log.describe(name).config == {"max.message.bytes": "5000", "retention.ms": "86400000"}
        assert log.settings(name)["retention.ms"] == "86400000"

    def test_an_altered_limit_is_seen_by_a_writer_at_work(self, log: Log) -> None:
        name = make_topic(log, 1, max_message_bytes="5000")
        with log.writer() as writer:
            assert isinstance(writer.append(name, bytes(6000)).exception(PATIENCE), RecordTooLarge)
            log.alter(name, {"max.message.bytes": "9000"})
            assert writer.append(name, bytes(6000)).result(PATIENCE).offset == 0

    def test_growing(self, log: Log, backend: str) -> None:
        name = make_topic(log, 1)
        if backend == "tansu":
            with pytest.raises(LogError, match="cannot add partitions"):
                log.grow(name, 3)
            pytest.skip("Tansu 0.6 cannot add partitions; it says so")
        log.grow(name, 3)
        log.grow(name, 3)
        assert log.topics()[name] == 3
        with pytest.raises(LogError, match="cannot shrink"):
            log.grow(name, 2)
        assert {p.partition.number for p in write(log, name, [b"%d" % n for n in range(40)])} == {0, 1, 2}
