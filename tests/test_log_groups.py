"""Consumer groups, one body for every log: who reads what, from where, and what is committed."""

import threading
import uuid
from collections.abc import Callable, Mapping
from typing import Self

import pytest

from rollstream.infra.kafka import KafkaLog
from rollstream.infra.log import Consumer, Log, LogError, Partition, Record, Topic
from rollstream.infra.memory import MemoryLog

PATIENCE = 60.0


# what a callback does to its consumer is the client's affair, and Tansu takes seconds for each group
ON_FAST_LOGS = pytest.mark.parametrize("log", ["memory", "kafka"], indirect=True)


@pytest.fixture(params=("memory", "tansu", "kafka", "kafka-kip848"))
def log(request: pytest.FixtureRequest) -> Log:
    if request.param == "memory":
        return MemoryLog()
    broker, _, protocol = str(request.param).partition("-")
    settings = {"group.protocol": "consumer"} if protocol else {}
    return KafkaLog(request.getfixturevalue(f"{broker}_address"), settings=settings)


@pytest.fixture
def topic(log: Log) -> str:
    """Four partitions with ten records each."""
    name = f"test-{uuid.uuid4()}"
    log.create(Topic(name=name, partitions=4))
    with log.writer() as writer:
        for number in range(40):
            writer.append(name, b"%d" % (number // 4), partition=number % 4)
    return name


@pytest.fixture
def group() -> str:
    return f"group-{uuid.uuid4()}"


class Member:
    """A consumer that notes what it is told and what it reads."""

    def __init__(
        self, log: Log, topic: str, group: str, start: Mapping[Partition, int] | None = None, **options: str
    ) -> None:
        self.told: list[tuple[str, frozenset[Partition]]] = []
        self.records: list[Record] = []
        self.start = start or {}
        self.finish: Callable[[frozenset[Partition]], None] = lambda _: None
        self.consumer: Consumer = log.subscribe(
            [topic], group=group, on_assign=self._assigned, on_revoke=self._revoked, **options
        )

    def poll(self) -> None:
        self.records += self.consumer.poll(1000, 0.02)

    def _assigned(self, partitions: frozenset[Partition]) -> Mapping[Partition, int]:
        self.told.append(("assigned", partitions))
        return {partition: offset for partition, offset in self.start.items() if partition in partitions}

    def _revoked(self, partitions: frozenset[Partition]) -> None:
        self.told.append(("revoked", partitions))
        self.finish(partitions)

    def told_of(self, what: str) -> frozenset[Partition]:
        return frozenset(partition for kind, partitions in self.told if kind == what for partition in partitions)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.consumer.close()


def run_until(done: Callable[[], bool], *members: Member) -> None:
    """Poll all members in turn until this holds."""
    over = threading.Event()
    timer = threading.Timer(PATIENCE, over.set)
    timer.start()
    try:
        while not done():
            assert not over.is_set(), [(m.told, len(m.records)) for m in members]
            for member in members:
                member.poll()
    finally:
        timer.cancel()


def test_two_members_share_and_the_other_takes_over(log: Log, topic: str, group: str) -> None:
    everything = frozenset(log.partitions(topic))
    with Member(log, topic, group) as first, Member(log, topic, group) as second:
        run_until(
            lambda: (
                len(first.consumer.assignment()) == len(second.consumer.assignment()) == 2
                and len(first.records) + len(second.records) >= 40
            ),
            *(first, second),
        )
        assert first.consumer.assignment() | second.consumer.assignment() == everything
        assert {record.position for record in first.records + second.records} == {
            position for partition in everything for position in positions(partition, 10)
        }

        def committed() -> bool:
            """A stalled machine may cost a member its membership for a moment; polling on gives it back."""
            try:
                first.consumer.commit(dict.fromkeys(first.consumer.assignment(), 10))
            except LogError:
                return False
            return len(first.consumer.assignment()) == 2

        run_until(committed, first, second)
        left = first.consumer.assignment()
        second.told.clear()
        first.consumer.close()
        assert first.told[-1] == ("revoked", left)

        run_until(lambda: second.consumer.assignment() == everything, second)
        kept = everything - left
        assert not second.told_of("revoked") & kept
        with log.writer() as writer:
            for partition in everything:
                writer.append(topic, b"late", partition=partition.number)
        run_until(lambda: sum(record.value == b"late" for record in second.records) == 4, second)
        taken = [record for record in second.records if record.partition in left and record.value == b"late"]
        assert {record.offset for record in taken} == {10}


def test_whoever_leaves_in_the_middle_of_a_join_leaves_the_group_whole(log: Log, topic: str, group: str) -> None:
    with Member(log, topic, group) as early:
        for _ in range(40):
            early.poll()
    with Member(log, topic, group) as late:
        run_until(lambda: len(late.consumer.assignment()) == 4 and len(late.records) >= 40, late)


def positions(partition: Partition, count: int) -> set[tuple[Partition, int]]:
    return {(partition, offset) for offset in range(count)}


def test_starts_come_from_the_callback_then_the_commit_then_the_earliest(log: Log, topic: str, group: str) -> None:
    chosen, committed, *untouched = log.partitions(topic)
    assert log.committed(group, [chosen, committed]) == {}
    with Member(log, topic, group) as member:
        run_until(lambda: len(member.records) == 40, member)
        assert all(member.consumer.position(partition) == 10 for partition in log.partitions(topic))
        member.consumer.commit({chosen: 2, committed: 7})
        member.consumer.commit({})
        assert log.committed(group, log.partitions(topic)) == {chosen: 2, committed: 7}
        with pytest.raises(LogError, match="not assigned"):
            member.consumer.commit({committed: 9, Partition("elsewhere", 0): 1})
        assert log.committed(group, [committed]) == {committed: 7}

    with Member(log, topic, group, {chosen: 4}) as member:
        run_until(lambda: len(member.records) == 6 + 3 + 20, member)
        firsts: dict[Partition, int] = {}
        for record in member.records:
            firsts.setdefault(record.partition, record.offset)
        assert firsts == {chosen: 4, committed: 7, untouched[0]: 0, untouched[1]: 0}

        member.consumer.seek(chosen, 9)
        member.consumer.pause([committed])
        member.consumer.seek(committed, 0)
        run_until(lambda: len(member.records) == 6 + 3 + 20 + 1, member)
        assert member.records[-1].position == (chosen, 9)
    assert log.committed(group, log.partitions(topic)) == {chosen: 2, committed: 7}


@ON_FAST_LOGS
def test_a_failing_start_ends_the_consumer(log: Log, topic: str, group: str) -> None:
    def refuse(_: frozenset[Partition]) -> Mapping[Partition, int]:
        raise ValueError("no checkpoint")

    with log.subscribe([topic], group=group, on_assign=refuse) as consumer:
        for _ in range(2):
            with pytest.raises(ValueError, match="no checkpoint"):
                poll_until_records(consumer)


@ON_FAST_LOGS
def test_a_failing_revoke_is_raised_and_the_place_is_given_up(log: Log, topic: str, group: str) -> None:
    def fail(_: frozenset[Partition]) -> None:
        raise ValueError("cannot finish")

    member = Member(log, topic, group)
    run_until(lambda: len(member.records) == 40, member)
    member.finish = fail
    with pytest.raises(ValueError, match="cannot finish"):
        member.consumer.close()
    with Member(log, topic, group) as heir:
        run_until(lambda: len(heir.consumer.assignment()) == 4, heir)


@ON_FAST_LOGS
def test_closing_inside_a_callback_ends_the_poll(log: Log, topic: str, group: str) -> None:
    opened: list[Consumer] = []

    def stop(_: frozenset[Partition]) -> Mapping[Partition, int]:
        opened[0].close()
        return {}

    opened.append(log.subscribe([topic], group=group, on_assign=stop))
    with pytest.raises(LogError, match="closed"):
        poll_until_records(opened[0])


def poll_until_records(consumer: Consumer) -> None:
    for _ in range(int(PATIENCE * 10)):
        if consumer.poll(100, 0.1):
            return
    raise AssertionError("no record, and no error")
