"""The reader loses no place: over restarts, pauses, revocations, gaps; and the loop on which it sits never waits."""

import threading
import uuid
from collections.abc import Mapping
from typing import Any

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from rollstream.consumers import Progress, Reader
from rollstream.consumers.reader import Revoked
from rollstream.infra.kafka import KafkaLog
from rollstream.infra.log import Log, LogError, OffsetExpired, Partition, Position, Record, Topic, UnknownTopic
from rollstream.infra.memory import MemoryConsumer, MemoryLog
from rollstream.infra.topics import Names

PATIENCE = 40.0


@pytest.fixture
def topic(names: Names) -> str:
    return names.trajectories("maze")


def open_reader(log: Log, topic: str, progress: Progress | None = None, **settings: Any) -> Reader:
    return Reader(log, {topic: 1.0}, group=f"{topic}.trainer", progress=progress or Progress(), **settings)


def write(log: Log, topic: str, count: int, partition: int = 0, size: int = 20) -> list[Position]:
    with log.writer() as writer:
        futures = [writer.append(topic, b"x" * size, partition=partition) for _ in range(count)]
        return [future.result(PATIENCE) for future in futures]


def take(reader: Reader, count: int) -> list[Position]:
    positions: list[Position] = []
    while len(positions) < count:
        arrival = reader.take(PATIENCE)
        assert arrival is not None, f"{len(positions)} of {count} came"
        if isinstance(arrival, Record):
            positions.append(arrival.position)
    return positions


class SpyLog(MemoryLog):
    """Counts polls, and can refuse commits."""

    def __init__(self) -> None:
        super().__init__()
        self.polls = self.delivered = 0
        self.commits = 0
        self.refuse = False
        self.polled = threading.Condition()

    def read(self, *args: Any, **settings: Any) -> MemoryConsumer:
        consumer = super().read(*args, **settings)
        poll, commit = consumer.poll, consumer.commit

        def counted(max_records: int, timeout: float) -> list[Record]:
            records = poll(max_records, min(timeout, 0.01))
            with self.polled:
                self.polls += 1
                self.delivered += len(records)
                self.polled.notify_all()
            return records

        def refused(offsets: Mapping[Partition, int]) -> None:
            self.commits += 1
            if self.refuse:
                raise LogError("rebalance in progress", retriable=True)
            commit(offsets)

        consumer.poll, consumer.commit = counted, refused  # type: ignore[method-assign]
        return consumer

    def await_polls(self, count: int) -> None:
        with self.polled:
            wanted = self.polls + count
            assert self.polled.wait_for(lambda: self.polls >= wanted, PATIENCE)


def test_everything_comes_once_in_order_within_a_partition(log: Log, topic: str) -> None:
    written = write(log, topic, 30, 0) + write(log, topic, 10, 1)
    with open_reader(log, topic) as reader:
        taken = take(reader, 40)
        assert reader.take(0) is None
    assert sorted(taken) == sorted(written)
    for number in (0, 1):
        offsets = [p.offset for p in taken if p.partition.number == number]
        assert offsets == sorted(offsets)


def test_a_restart_skips_what_is_settled_and_nothing_else(log: Log, topic: str) -> None:
    written = write(log, topic, 10)
    progress = Progress()
    with open_reader(log, topic, progress) as reader:
        take(reader, 10)
    progress.settle(written[i] for i in (0, 1, 4, 9))
    again = Progress(progress.snapshot())
    with open_reader(log, topic, again) as reader:
        assert take(reader, 6) == [written[i] for i in (2, 3, 5, 6, 7, 8)]
        more = write(log, topic, 1)
        assert take(reader, 1) == more
    assert again.marks(log.partitions(topic))[written[0].partition] == 2


def test_offsets_are_committed_on_every_partition_for_lag_display(log: Log, topic: str) -> None:
    written, progress = write(log, topic, 3), Progress()
    with open_reader(log, topic, progress, commit_every=0.0) as reader:
        take(reader, 3)
        progress.settle(written[:2])
    partitions = log.partitions(topic)
    assert log.committed(f"{topic}.trainer", partitions) == {partitions[0]: 2, partitions[1]: 0}


def test_the_bound_pauses_the_partitions_and_keeps_the_place(log: Log, topic: str) -> None:
    written = write(log, topic, 30, size=1000)
    with open_reader(log, topic, buffer_bytes=8000) as reader:
        taken = take(reader, 1)
        more = write(log, topic, 10, partition=1, size=1000)
        taken += take(reader, 39)
    assert [p for p in taken if p.partition.number == 0] == written
    assert [p for p in taken if p.partition.number == 1] == more


def test_polling_goes_on_while_nobody_takes_and_the_bound_holds() -> None:
    log = SpyLog()
    topic = make_topic(log)
    written = write(log, topic, 500, size=1000)
    with open_reader(log, topic, buffer_bytes=8000) as reader:
        log.await_polls(100)
        # At the most full but for one byte, and then a batch of a quarter; the first came before any size was known.
        assert log.delivered <= 10
        assert take(reader, 500) == written


def make_topic(log: Log, partitions: int = 1) -> str:
    log.create(Topic(name="t", partitions=partitions))
    return "t"


def test_a_commit_that_fails_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    log = SpyLog()
    topic = make_topic(log)
    log.refuse = True
    with open_reader(log, topic, commit_every=0.0) as reader:
        log.await_polls(3)
        written = write(log, topic, 3)
        assert take(reader, 3) == written
        assert log.commits >= 3
    assert "offsets not committed" in caplog.text


def test_an_expired_cursor_is_an_error_that_names_what_is_gone(
    log: Log, topic: str, backend: str, request: pytest.FixtureRequest
) -> None:
    if backend == "tansu":
        pytest.skip("Tansu 0.6 cannot delete records")
    written, progress = write(log, topic, 10), Progress()
    partition = written[0].partition
    progress.start(partition, 0)
    progress.settle(written[:3])
    expire(log, partition, 7, request)
    with (
        open_reader(log, topic, Progress(progress.snapshot())) as reader,
        pytest.raises(OffsetExpired, match=r"offset 3 is gone, the log now starts at 7; 4 records"),
    ):
        take(reader, 1)


def expire(log: Log, partition: Partition, offset: int, request: pytest.FixtureRequest) -> None:
    if isinstance(log, MemoryLog):
        log.expire(partition, offset)
        return
    admin: Any = AdminClient({"bootstrap.servers": request.getfixturevalue("kafka_address")})
    for answer in admin.delete_records([TopicPartition(partition.topic, partition.number, offset)]).values():
        answer.result(PATIENCE)


def test_reading_begins_where_an_expired_log_begins(topic_of_memory: tuple[MemoryLog, str]) -> None:
    log, topic = topic_of_memory
    written, progress = write(log, topic, 10), Progress()
    log.expire(written[0].partition, 6)
    with open_reader(log, topic, progress) as reader:
        assert take(reader, 4) == written[6:]
    assert progress.marks([written[0].partition]) == {written[0].partition: 6}


@pytest.fixture
def topic_of_memory() -> tuple[MemoryLog, str]:
    log = MemoryLog()
    return log, make_topic(log)


def test_offsets_without_a_record_are_settled_on_the_way(kafka_address: str) -> None:
    """Transaction markers take offsets; the low-water mark must not stop before them."""
    log = KafkaLog(kafka_address)
    topic = f"gaps-{uuid.uuid4()}"
    log.create(Topic(name=topic))
    producer = Producer({"bootstrap.servers": kafka_address, "transactional.id": topic})
    producer.init_transactions(PATIENCE)
    for _ in range(3):
        producer.begin_transaction()
        producer.produce(topic, b"v", partition=0)
        producer.commit_transaction(PATIENCE)
    progress = Progress()
    with open_reader(log, topic, progress) as reader:
        taken = take(reader, 3)
    assert [p.offset for p in taken] == [0, 2, 4]
    progress.settle(taken)
    assert progress.snapshot()[Partition(topic, 0)].to_json() == [5]
    log.close()


def test_what_is_revoked_while_it_waits_goes_to_the_next_owner(log: Log, topic: str, backend: str) -> None:
    if backend == "tansu":
        pytest.skip("Tansu 0.6 accepts static membership without effect: see docs/brokers.md")
    written = write(log, topic, 20, 0) + write(log, topic, 20, 1)
    with open_reader(log, topic, instance="first") as first:
        early = take(first, 1)
        with open_reader(log, topic, instance="second") as second:
            gone, before = await_revocation(first)
            theirs = {p for p in written if p.partition in gone}
            kept = [p for p in early + before if p.partition not in gone]
            assert set(take(second, 20)) == theirs
            kept += take(first, 20 - len(kept))
            assert set(kept) == set(written) - theirs
        assert set(take(first, 20)) == theirs, "unsettled, so it is read again by whoever has it now"


def await_revocation(reader: Reader) -> tuple[Revoked, list[Position]]:
    """The partitions taken away, and what came before that."""
    before: list[Position] = []
    while not isinstance(event := reader.take(PATIENCE), Revoked):
        assert event is not None, "nothing was revoked"
        before.append(event.position)
    return event, before


def test_the_end_is_never_found_before_the_last_record_was_taken() -> None:
    for _ in range(50):
        log = MemoryLog()
        topic = make_topic(log)
        written = write(log, topic, 3)
        taken: list[Position] = []
        with open_reader(log, topic, ends={written[0].partition: 3}) as reader:
            while reader.outlook() != (frozenset(), False):
                arrival = reader.take(PATIENCE)
                if isinstance(arrival, Record):
                    taken.append(arrival.position)
        assert taken == written


def test_what_ends_the_thread_is_raised_where_records_are_taken() -> None:
    with open_reader(MemoryLog(), "nowhere") as reader, pytest.raises(UnknownTopic):
        reader.take(PATIENCE)


def test_close_wakes_the_one_who_waits(topic_of_memory: tuple[MemoryLog, str]) -> None:
    log, topic = topic_of_memory
    answers: list[object] = []
    with open_reader(log, topic) as reader:
        thread = threading.Thread(target=lambda: answers.append(reader.take(PATIENCE)))
        thread.start()
    thread.join(PATIENCE)
    assert answers == [None]


def test_what_a_step_settled_meanwhile_does_not_come_again() -> None:
    """A partition that left and came back during a step is read again, from before the records of that step."""
    log = MemoryLog()
    topic = make_topic(log, partitions=2)
    written, progress = write(log, topic, 4, 0) + write(log, topic, 4, 1), Progress()
    with open_reader(log, topic, progress, instance="first") as reader:
        assert set(take(reader, 8)) == set(written)
        with open_reader(log, topic, instance="second"):
            gone, _ = await_revocation(reader)
        (partition,) = gone
        assert take(reader, 1)[0].partition == partition, "it is back, and read again"
        progress.settle(written)
        more = write(log, topic, 1, partition.number)
        assert take(reader, 1) == more
