"""What only the memory log has to show: fair groups of any size, static members, places that expire."""

import random
import uuid
from collections import Counter

import pytest
from confluent_kafka import murmur2 as client_murmur2
from hypothesis import given
from hypothesis import strategies as st

from rollstream.infra.log import Consumer, LogError, Partition, Topic
from rollstream.infra.memory import MemoryConsumer, MemoryLog
from rollstream.infra.murmur import murmur2, partition_for


@pytest.fixture
def log() -> MemoryLog:
    log = MemoryLog(session_timeout=0.05)
    log.create(Topic(name="a", partitions=7))
    log.create(Topic(name="b", partitions=2))
    return log


def settle(*members: Consumer) -> None:
    for _ in range(3):
        for member in members:
            member.poll(0, 0)


class TestMurmur:
    @pytest.mark.parametrize(
        ("key", "signed"),
        [
            (b"21", -973932308),
            (b"foobar", -790332482),
            (b"a-little-bit-long-string", -985981536),
            (b"a-little-bit-longer-string", -1486304829),
            (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
            (b"abc", 479470107),
        ],
    )
    def test_the_values_of_the_java_client(self, key: bytes, signed: int) -> None:
        assert murmur2(key) == signed % 2**32

    @given(st.binary(max_size=64), st.integers(1, 5000))
    def test_as_the_c_client_computes_it(self, key: bytes, partitions: int) -> None:
        assert partition_for(key, partitions) == client_murmur2(key, partitions)


class TestGroups:
    @given(st.lists(st.sampled_from(["join", "join both", "leave", "grow", "poll"]), max_size=25), st.integers())
    def test_every_partition_has_one_reader_and_nobody_two_more_than_another(self, steps: list[str], seed: int) -> None:
        log, chance = MemoryLog(), random.Random(seed)
        log.create(Topic(name="a", partitions=5))
        log.create(Topic(name="b", partitions=2))
        members: list[MemoryConsumer] = []
        for step in steps:
            if step.startswith("join"):
                members.append(log.subscribe(["a", "b"] if step == "join both" else ["a"], group="g"))
            elif step == "leave" and members:
                members.pop(chance.randrange(len(members))).close()
            elif step == "grow":
                log.grow("a", log.topics()["a"] + 1)
            elif members:
                chance.choice(members).poll(0, 0)
            held = Counter(partition for member in members for partition in member.assignment())
            assert all(readers == 1 for readers in held.values())
        settle(*members)
        wide = [member for member in members if any(p.topic == "b" for p in member.assignment())]
        held = Counter(partition for member in members for partition in member.assignment())
        if members:
            assert {p for p in held if p.topic == "a"} == set(log.partitions("a"))
            assert not wide or {p for p in held if p.topic == "b"} == set(log.partitions("b"))
            only_a = [len(member.assignment()) for member in members if member not in wide]
            assert not only_a or max(only_a) - min(only_a) <= 1
        for member in members:
            member.close()

    def test_nobody_takes_what_another_still_holds(self, log: MemoryLog) -> None:
        with log.subscribe(["a"], group="g") as first, log.subscribe(["a"], group="g") as second:
            first.poll(0, 0)
            second.poll(0, 0)
            assert len(first.assignment()) + len(second.assignment()) <= 7
            settle(first, second)
            assert sorted((len(first.assignment()), len(second.assignment()))) == [3, 4]

    def test_a_member_keeps_what_it_can(self, log: MemoryLog) -> None:
        with log.subscribe(["a"], group="g") as first:
            settle(first)
            before = first.assignment()
            with log.subscribe(["a"], group="g") as second:
                settle(first, second)
                assert first.assignment() < before
            settle(first)
            assert first.assignment() == before

    def test_groups_do_not_see_each_other(self, log: MemoryLog) -> None:
        with log.subscribe(["a"], group="g") as one, log.subscribe(["a"], group="h") as other:
            settle(one, other)
            assert len(one.assignment()) == len(other.assignment()) == 7
            one.commit({Partition("a", 0): 0})
        assert log.committed("h", log.partitions("a")) == {}


class TestStaticMembership:
    def test_a_member_that_returns_finds_its_place(self, log: MemoryLog) -> None:
        with log.subscribe(["a"], group="g") as other:
            first = log.subscribe(["a"], group="g", instance="worker-1")
            settle(first, other)
            mine, theirs = first.assignment(), other.assignment()
            first.close()
            with log.subscribe(["a"], group="g", instance="worker-1") as again:
                settle(other, again)
                assert (again.assignment(), other.assignment()) == (mine, theirs)

    def test_a_place_that_nobody_takes_up_is_given_away(self, log: MemoryLog) -> None:
        with log.subscribe(["a"], group="g") as other:
            first = log.subscribe(["a"], group="g", instance="worker-1")
            settle(first, other)
            first.close()
            settle(other)
            assert len(other.assignment()) < 7
            for _ in range(100):
                other.poll(1, 0.05)
                if len(other.assignment()) == 7:
                    break
            assert len(other.assignment()) == 7

    def test_the_second_of_one_name_fences_the_first(self, log: MemoryLog) -> None:
        first = log.subscribe(["a"], group="g", instance="worker-1")
        settle(first)
        with log.subscribe(["a"], group="g", instance="worker-1") as second:
            settle(second)
            assert len(second.assignment()) == 7
            with pytest.raises(LogError, match="fenced"):
                first.poll(1, 0)
            with pytest.raises(LogError, match="fenced"):
                first.commit({Partition("a", 0): 1})
            first.close()
            settle(second)
            assert len(second.assignment()) == 7


class TestExpiry:
    def test_only_what_is_there_expires(self, log: MemoryLog) -> None:
        with log.writer() as writer:
            for _ in range(5):
                writer.append("a", b"v", partition=3)
        for wrong in (6, -1):
            with pytest.raises(LogError, match="from 0 to 5"):
                log.expire(Partition("a", 3), wrong)
        log.expire(Partition("a", 3), 5)
        assert log.bounds([Partition("a", 3)]) == {Partition("a", 3): (5, 5)}
        with log.writer() as writer:
            assert writer.append("a", b"v", partition=3).result().offset == 5

    def test_an_expired_partition_that_is_paused_disturbs_nobody(self, log: MemoryLog) -> None:
        gone, fine = Partition("a", 0), Partition("a", 1)
        with log.writer() as writer:
            for partition in (gone, fine):
                writer.append("a", b"v", partition=partition.number)
        with log.read({gone: 0, fine: 0}) as consumer:
            consumer.pause([gone])
            log.expire(gone, 1)
            assert [record.partition for record in consumer.poll(10, 0)] == [fine]
            consumer.resume([gone])
            with pytest.raises(LogError, match="gone"):
                consumer.poll(10, 0)


def test_no_partition_starves(log: MemoryLog) -> None:
    with log.writer() as writer:
        for number in (0, 1):
            for _ in range(100):
                writer.append("a", b"v", partition=number)
    with log.read({Partition("a", 0): 0, Partition("a", 1): 0}) as consumer:
        first = [consumer.poll(10, 0)[0].partition.number for _ in range(4)]
    assert set(first) == {0, 1}


def test_a_name_that_kafka_would_refuse_is_refused(log: MemoryLog) -> None:
    for name in ("", "with space", "a/b", "x" * 250):
        with pytest.raises(LogError, match="topic name"):
            log.create(Topic(name=name))
    with pytest.raises(LogError, match="at least 1 partition"):
        log.create(Topic(name=f"t-{uuid.uuid4()}", partitions=0))
