"""A step is full when enough groups are settled, whatever became of them; a replay ends, a stop returns."""

from collections.abc import Callable
from itertools import count

import pytest

from rollstream.consumers import Arrival, Assembler, Progress, Reader, Seen
from rollstream.consumers import gatherer as module
from rollstream.consumers.gatherer import Gathered, Gatherer
from rollstream.infra.log import Log, LogError, Record, Topic
from rollstream.infra.memory import MemoryLog
from rollstream.infra.store import StoreError
from rollstream.schemas import Trajectory

TOPIC = "t"


@pytest.fixture
def memory() -> MemoryLog:
    log = MemoryLog()
    log.create(Topic(name=TOPIC, partitions=2))
    return log


def admit(record: Record) -> Arrival:
    """The value is "group index size reason", or nothing where the record belongs to no group."""
    group, index, size, reason = (record.value or b"").decode().split(" ")
    if group == "broken":
        raise LogError("the dead letter cannot be written")
    trajectory = Trajectory(
        trajectory_id=f"{group}/{index}",
        group_id=group,
        group_size=int(size),
        sample_index=int(index),
        environment="maze",
    )
    return Arrival(
        position=record.position,
        group_id=group,
        trajectory_id=trajectory.trajectory_id if group else "",
        group_size=int(size),
        trajectory=None if reason else trajectory,
        reason=reason or None,
    )


def write(log: Log, *values: str, partition: int = 0) -> None:
    with log.writer() as writer:
        for value in values:
            writer.append(TOPIC, value.encode(), partition=partition).result(40)


def open_reader(log: Log, *, replay: bool = True) -> Reader:
    ends = {p: end for p, (_, end) in log.bounds(log.partitions(TOPIC)).items()} if replay else None
    return Reader(log, {TOPIC: 1.0}, group="g", progress=Progress(), ends=ends)


def gatherer(
    reader: Reader, groups: int, *, replay: bool = True, stopped: Callable[[], bool] = lambda: False
) -> Gatherer:
    assembler = Assembler(Seen(max_staleness=None), timeout=1000.0)
    return Gatherer(reader, admit, assembler, groups_per_step=groups, replay=replay, stopped=stopped)


def ids(gathered: Gathered | None) -> list[str]:
    assert gathered is not None
    return [group.group_id for group in gathered.groups]


def test_a_step_counts_settled_groups_the_dropped_ones_too(memory: MemoryLog) -> None:
    write(memory, "a 0 1 ", "b 0 2 failed", "b 1 2 failed", "c 0 1 ", "d 0 1 ")
    with open_reader(memory) as reader:
        steps = gatherer(reader, 3)
        assert ids(steps.gather()) == ["a", "b", "c"]
        assert ids(steps.gather()) == ["d"]
        assert steps.gather() is None
        assert steps.gather() is None


def test_records_of_no_group_ride_along_and_do_not_fill_a_step(memory: MemoryLog) -> None:
    write(memory, " 0 0 tombstone", " 0 0 tombstone", "a 0 1 ", " 0 0 tombstone")
    with open_reader(memory) as reader:
        steps = gatherer(reader, 1)
        first, last = steps.gather(), steps.gather()
    assert (ids(first), ids(last)) == (["a", ""], [""])
    assert [len(g.dropped) for gathered in (first, last) if gathered for g in gathered.groups] == [0, 2, 1]


def test_a_flood_of_them_is_settled_before_its_receipt_grows_too_large(
    memory: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LONE", 4)
    write(memory, *[" 0 0 tombstone"] * 9, "a 0 1 ")
    with open_reader(memory) as reader:
        steps = gatherer(reader, 1)
        sizes = [[len(g.members + g.dropped) for g in gathered.groups] for gathered in iter(steps.gather, None)]
    assert sizes == [[4], [4], [1, 1]]


def test_a_replay_settles_what_is_incomplete_at_its_end(memory: MemoryLog) -> None:
    write(memory, "a 0 4 ", "b 0 4 ", "a 1 4 ")
    write(memory, "b 3 4 ", partition=1)
    with open_reader(memory) as reader:
        steps = gatherer(reader, 1)
        found = [group for gathered in iter(steps.gather, None) for group in gathered.groups]
    assert {g.group_id: len(g.members) for g in found} == {"a": 2, "b": 2}


def test_no_step_is_larger_than_asked_for_whatever_times_out_at_once(memory: MemoryLog) -> None:
    write(memory, *(f"g{n} 0 2 " for n in range(7)), " 0 0 tombstone")
    with open_reader(memory) as reader:
        steps = gatherer(reader, 3)
        sizes = [len(list(filter(None, ids(gathered)))) for gathered in iter(steps.gather, None)]
    assert sizes == [3, 3, 1]


def test_an_empty_replay_is_no_step(memory: MemoryLog) -> None:
    with open_reader(memory) as reader:
        assert gatherer(reader, 1).gather() is None


def test_a_stop_gives_nothing_up_to_a_step(memory: MemoryLog) -> None:
    write(memory, "a 0 1 ")
    calls = count()
    with open_reader(memory, replay=False) as reader:
        steps = gatherer(reader, 2, replay=False, stopped=lambda: next(calls) > 3)
        assert steps.gather() is None


def test_a_stop_is_heard_although_the_next_step_is_full_already(memory: MemoryLog) -> None:
    write(memory, *(f"g{n} 0 2 " for n in range(7)))
    asked = [False]
    with open_reader(memory) as reader:
        steps = gatherer(reader, 3, stopped=lambda: asked[0])
        assert len(ids(steps.gather())) == 3
        asked[0] = True
        assert steps.gather() is None
        asked[0] = False
        assert [len(ids(gathered)) for gathered in iter(steps.gather, None)] == [3, 1]


def test_what_admission_raises_ends_the_gathering(memory: MemoryLog) -> None:
    write(memory, "a 0 1 ", "broken 0 1 ")
    with open_reader(memory) as reader, pytest.raises(LogError, match="cannot be written"):
        gatherer(reader, 2).gather()


def test_samples_that_came_while_a_store_was_asked_in_vain_are_not_late(
    memory: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

    def ask(record: Record) -> Arrival:
        if record.offset == 1 and not clock.now:
            clock.now = 60.0
            raise StoreError("the store is away", retriable=True)
        return admit(record)

    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    assembler = Assembler(Seen(max_staleness=None), timeout=10.0, clock=clock.monotonic)
    write(memory, "slow 0 2 ", "a 0 1 ", "slow 1 2 ")
    with open_reader(memory, replay=False) as reader:
        done = Gatherer(reader, ask, assembler, groups_per_step=1, replay=False, stopped=lambda: False).gather()
    assert done is not None
    assert [(g.group_id, len(g.members)) for g in done.groups] == [("slow", 2)]


def test_samples_that_came_during_a_long_step_are_not_late(memory: MemoryLog, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    assembler = Assembler(Seen(max_staleness=None), timeout=10.0, clock=clock.monotonic)
    write(memory, "slow 0 2 ", "a 0 1 ")
    with open_reader(memory, replay=False) as reader:
        steps = Gatherer(reader, admit, assembler, groups_per_step=1, replay=False, stopped=lambda: False)
        assert ids(steps.gather()) == ["a"]
        clock.now = 600.0
        write(memory, "slow 1 2 ")
        done = steps.gather()
    assert done is not None
    assert [(g.group_id, len(g.members)) for g in done.groups] == [("slow", 2)]
