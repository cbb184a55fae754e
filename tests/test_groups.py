"""Groups come together whatever the order, the copies and the holes; every record is settled exactly once."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.consumers import Arrival, Assembler, Group, Seen
from rollstream.consumers import groups as groups_module
from rollstream.infra.log import Partition, Position
from rollstream.schemas import Trajectory

Episode = Callable[..., Trajectory]
P, Q = Partition("maze", 0), Partition("maze", 1)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def seen() -> Seen:
    return Seen(max_staleness=2)


@pytest.fixture
def assembler(seen: Seen, clock: Clock) -> Assembler:
    return Assembler(seen, timeout=10.0, clock=clock)


def arrive(trajectory: Trajectory, offset: int, partition: Partition = P, reason: str | None = None) -> Arrival:
    return Arrival(
        position=Position(partition, offset),
        group_id=trajectory.group_id,
        trajectory_id=trajectory.trajectory_id,
        group_size=trajectory.group_size,
        trajectory=trajectory if reason is None else None,
        reason=reason,
    )


def dead(trajectory: Trajectory, offset: int) -> Arrival:
    """It could not be read, and is a dead letter now."""
    return replace(arrive(trajectory, offset, reason="unknown-schema"), buried=True)


def again(trajectory: Trajectory, offset: int, reason: str | None = None) -> Arrival:
    """The same, replayed after a fix."""
    return replace(arrive(trajectory, offset, reason=reason), replayed=True)


def nameless(offset: int, reason: str) -> Arrival:
    return Arrival(
        position=Position(P, offset), group_id="", trajectory_id="", group_size=0, trajectory=None, reason=reason
    )


def settle(assembler: Assembler, seen: Seen, version: int = 1) -> dict[str, Group]:
    """Take what is settled, and make it known as a step does."""
    groups = assembler.take(1000)
    for group in groups:
        for member in group.members:
            seen.add(group.group_id, member.trajectory.trajectory_id, version)
        for drop in group.dropped if group.group_id else ():
            seen.add(group.group_id, drop.trajectory_id or str(drop.position), version)
    return {group.group_id: group for group in groups}


def offsets(group: Group) -> list[int]:
    return [member.position.offset for member in group.members]


def reasons(group: Group) -> dict[int, str]:
    return {drop.position.offset: drop.reason for drop in group.dropped}


def test_a_group_is_settled_when_its_last_sample_comes_and_stands_in_sample_order(
    assembler: Assembler, seen: Seen, episode: Episode
) -> None:
    for offset, index in enumerate([2, 0, 3]):
        assembler.add(arrive(episode("g", index, size=4), offset))
    assert (assembler.waiting, assembler.settled) == (1, 0)
    assembler.add(arrive(episode("g", 1, size=4), 3))
    assert (assembler.waiting, assembler.settled) == (0, 1)
    assert offsets(settle(assembler, seen)["g"]) == [1, 3, 0, 2]


def test_a_group_of_one_never_waits(assembler: Assembler, seen: Seen, episode: Episode) -> None:
    assembler.add(arrive(episode("g", 0, size=1), 0))
    assert offsets(settle(assembler, seen)["g"]) == [0]


def test_dropped_samples_take_their_seat_and_nobody_waits_for_them(
    assembler: Assembler, seen: Seen, episode: Episode
) -> None:
    for index, reason in enumerate(["failed", None, "empty", None]):
        assembler.add(arrive(episode("g", index, size=4), index, reason=reason))
    group = settle(assembler, seen)["g"]
    assert (offsets(group), reasons(group)) == ([1, 3], {0: "failed", 2: "empty"})


@pytest.mark.parametrize("moment", ["waiting", "settled", "trained"])
def test_a_copy_is_a_duplicate_whenever_it_comes(
    assembler: Assembler, seen: Seen, episode: Episode, moment: str
) -> None:
    first, second = episode("g", 0), episode("g", 1)
    trained: list[Group] = []
    assembler.add(arrive(first, 0))
    if moment == "waiting":
        assembler.add(arrive(first, 1, Q))
    assembler.add(arrive(second, 2))
    if moment == "settled":
        assembler.add(arrive(first, 1, Q))
        assembler.add(arrive(second, 3))
    trained += settle(assembler, seen).values()
    if moment == "trained":
        assembler.add(arrive(first, 1, Q))
        assembler.add(arrive(second, 3))
    trained += settle(assembler, seen).values()
    assert [offsets(g) for g in trained if g.group_id] == [[0, 2]]
    copies = {"waiting": {1: "duplicate"}}.get(moment, {1: "duplicate", 3: "duplicate"})
    assert [reasons(g) for g in trained if not g.group_id] == [copies]
    assert assembler.waiting == 0


def test_a_good_copy_of_a_dropped_sample_takes_its_seat(assembler: Assembler, seen: Seen, episode: Episode) -> None:
    assembler.add(arrive(episode("g", 0), 0, reason="malformed"))
    assembler.add(arrive(episode("g", 0), 1))
    assembler.add(arrive(episode("g", 0), 2, reason="malformed"))
    assembler.add(arrive(episode("g", 1), 3))
    groups = settle(assembler, seen)
    assert offsets(groups["g"]) == [1, 3]
    assert reasons(groups[""]) == {0: "malformed", 2: "duplicate"}


def test_the_timeout_trains_what_is_there_and_the_straggler_is_late(
    assembler: Assembler, seen: Seen, episode: Episode, clock: Clock
) -> None:
    for index in (0, 1):
        assembler.add(arrive(episode("g", index, size=3), index))
    assembler.add(arrive(episode("lonely", 0, size=3), 2))
    clock.now = 9.9
    assembler.expire()
    assert assembler.settled == 0
    clock.now = 10.0
    assembler.add(arrive(episode("young", 0), 3))
    assembler.expire()
    assert assembler.waiting == 1
    assembler.add(arrive(episode("g", 2, size=3), 4))
    groups = settle(assembler, seen)
    assert offsets(groups["g"]) == [0, 1]
    assert (offsets(groups["lonely"]), reasons(groups["lonely"])) == ([], {2: "group-timeout"})
    assert reasons(groups[""]) == {4: "late"}
    assembler.add(arrive(episode("lonely", 1, size=3), 5))
    assert reasons(settle(assembler, seen)[""]) == {5: "late"}


def test_the_time_of_a_step_does_not_count(assembler: Assembler, seen: Seen, episode: Episode, clock: Clock) -> None:
    assembler.add(arrive(episode("g", 0), 0))
    clock.now = 600.0
    assembler.excuse(595.0)
    assembler.expire()
    assert assembler.settled == 0
    assembler.add(arrive(episode("g", 1), 1))
    assert offsets(settle(assembler, seen)["g"]) == [0, 1]


def test_clones_need_no_company(seen: Seen, episode: Episode) -> None:
    assembler = Assembler(seen, timeout=10.0, min_samples=1)
    assembler.add(arrive(episode("g", 0, size=8), 0))
    assembler.flush()
    assert offsets(settle(assembler, seen)["g"]) == [0]


def test_poison_of_one_group_has_a_seat_each_and_is_settled_by_the_timeout(
    assembler: Assembler, seen: Seen, clock: Clock
) -> None:
    for offset in (0, 1):
        assembler.add(replace(nameless(offset, "malformed"), group_id="g"))
    clock.now = 10.0
    assembler.expire()
    assembler.add(replace(nameless(2, "bad-framing"), group_id="g"))
    groups = settle(assembler, seen)
    assert (offsets(groups["g"]), reasons(groups["g"])) == ([], {0: "malformed", 1: "malformed"})
    assert reasons(groups[""]) == {2: "bad-framing"}
    assembler.add(replace(nameless(3, "malformed"), group_id="g"))
    assert reasons(settle(assembler, seen)[""]) == {3: "malformed"}
    assert assembler.waiting == 0


def test_poison_takes_the_seat_of_a_sample(assembler: Assembler, seen: Seen, episode: Episode) -> None:
    assembler.add(replace(nameless(0, "malformed"), group_id="g"))
    for index in (0, 2):
        assembler.add(arrive(episode("g", index, size=3), index + 1))
    group = settle(assembler, seen)["g"]
    assert (offsets(group), reasons(group)) == ([1, 3], {0: "malformed"})


def test_a_group_of_dead_letters_trains_once_when_it_is_replayed(
    assembler: Assembler, seen: Seen, episode: Episode
) -> None:
    pair = [episode("a", 0), episode("a", 1)]
    for offset, trajectory in enumerate(pair):
        assembler.add(dead(trajectory, offset))
    assert reasons(settle(assembler, seen)["a"]) == {0: "unknown-schema", 1: "unknown-schema"}
    for offset, trajectory in enumerate(pair, 2):
        assembler.add(again(trajectory, offset))
    group = settle(assembler, seen)["a"]
    assert (offsets(group), group.anew) == ([2, 3], True)
    for offset, trajectory in enumerate(pair, 4):
        assembler.add(again(trajectory, offset))
    assembler.add(arrive(pair[0], 6))
    assert reasons(settle(assembler, seen)[""]) == {4: "duplicate", 5: "duplicate", 6: "duplicate"}


def test_a_copy_that_nobody_replayed_does_not_open_a_group_of_dead_letters(
    assembler: Assembler, seen: Seen, episode: Episode
) -> None:
    assembler.add(dead(episode("a", 0, size=1), 0))
    settle(assembler, seen)
    assembler.add(arrive(episode("a", 0, size=1), 1))
    assert reasons(settle(assembler, seen)[""]) == {1: "late"}


def test_what_is_replayed_of_a_trained_group_is_a_group_of_its_own(
    assembler: Assembler, seen: Seen, episode: Episode, clock: Clock
) -> None:
    group = [episode("a", index, size=5) for index in range(5)]
    for offset, trajectory in enumerate(group[:2]):
        assembler.add(arrive(trajectory, offset))
    for offset, trajectory in enumerate(group[2:], 2):
        assembler.add(dead(trajectory, offset))
    assert offsets(settle(assembler, seen)["a"]) == [0, 1]
    for offset, trajectory in enumerate(group[2:4], 5):
        assembler.add(again(trajectory, offset))
    assembler.add(again(group[0], 7))
    assembler.add(again(group[4], 8, reason="stale"))
    assert assembler.waiting == 1
    clock.now = 10.0
    assembler.expire()
    settled = settle(assembler, seen)
    assert offsets(settled["a"]) == [5, 6]
    assert reasons(settled[""]) == {7: "duplicate", 8: "stale"}


def test_a_replayed_sample_takes_its_seat_where_its_group_is_not_taken_yet(
    assembler: Assembler, seen: Seen, episode: Episode
) -> None:
    assembler.add(arrive(episode("a", 0, size=3), 0))
    assembler.add(dead(episode("a", 1, size=3), 1))
    assembler.add(again(episode("a", 1, size=3), 2))
    assembler.add(dead(episode("a", 2, size=3), 3))
    assert assembler.settled == 1
    assembler.add(again(episode("a", 2, size=3), 4))
    settled = settle(assembler, seen)
    assert (offsets(settled["a"]), settled["a"].anew) == ([0, 2, 4], False)
    assert reasons(settled[""]) == {1: "unknown-schema", 3: "unknown-schema"}


def test_a_key_that_too_many_share_does_not_burst_a_receipt(
    assembler: Assembler, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups_module, "CROWD", 3)
    for offset in range(5):
        assembler.add(replace(nameless(offset, "malformed"), group_id="g"))
    groups = settle(assembler, seen)
    assert (list(reasons(groups["g"])), list(reasons(groups[""]))) == ([0, 1, 2], [3, 4])


def test_records_without_ids_are_settled_one_by_one(assembler: Assembler, seen: Seen, episode: Episode) -> None:
    for offset in range(3):
        assembler.add(nameless(offset, "tombstone"))
    half = episode("g", 0, size=2)
    for offset in (3, 4):
        record = arrive(half, offset, reason="malformed")
        assembler.add(
            Arrival(
                position=record.position,
                group_id="g",
                trajectory_id="",
                group_size=2,
                trajectory=None,
                reason="malformed",
            )
        )
    groups = settle(assembler, seen)
    assert reasons(groups[""]) == {0: "tombstone", 1: "tombstone", 2: "tombstone"}
    assert reasons(groups["g"]) == {3: "malformed", 4: "malformed"}


def test_what_a_lost_partition_brought_is_forgotten_and_comes_again(
    assembler: Assembler, seen: Seen, episode: Episode
) -> None:
    assembler.add(nameless(9, "tombstone"))
    for index, partition in enumerate((P, Q)):
        assembler.add(arrive(episode("settled", index), index, partition))
        assembler.add(arrive(episode("waiting", index, size=3), 10 + index, partition))
    assembler.add(arrive(episode("gone", 0), 20, P))
    assembler.add(arrive(episode("kept", 0), 21, Q))
    assembler.forget([P])
    assert (assembler.waiting, assembler.settled, assembler.lone) == (3, 0, 0)
    assembler.add(arrive(episode("settled", 0), 0, P))
    assembler.add(arrive(episode("gone", 0), 20, P))
    assembler.add(arrive(episode("gone", 1), 22, P))
    groups = settle(assembler, seen)
    assert offsets(groups["settled"]) == [0, 1]
    assert offsets(groups["gone"]) == [20, 22]
    assert "" not in groups


Event = st.tuples(st.integers(0, 3), st.integers(0, 2), st.sampled_from([None, None, None, "stale", "malformed"]))


@settings(deadline=None, max_examples=200)
@given(st.lists(st.one_of(Event, st.sampled_from(["step", "timeout", "deaf"])), max_size=60))
def test_any_stream_settles_each_record_once_and_trains_no_id_twice(
    episode: Episode, events: list[tuple[int, int, str | None] | str]
) -> None:
    clock, seen = Clock(), Seen(max_staleness=None)
    assembler = Assembler(seen, timeout=10.0, clock=clock)
    groups: list[Group] = []
    sent = 0
    for event in events:
        if event == "step":
            taken = settle(assembler, seen)
            groups += taken.values()
        elif event == "timeout":
            clock.now += 10.0
            assembler.expire()
        elif event == "deaf":
            assembler.excuse(1.0)
        elif not isinstance(event, str):
            number, index, reason = event
            assembler.add(arrive(episode(f"g{number}", index, size=3), sent, reason=reason))
            sent += 1
    assembler.flush()
    groups += settle(assembler, seen).values()
    positions = [m.position for g in groups for m in g.members] + [d.position for g in groups for d in g.dropped]
    assert sorted(p.offset for p in positions) == list(range(sent))
    trained = Counter(m.trajectory.trajectory_id for g in groups for m in g.members)
    assert set(trained.values()) <= {1}
    named = Counter(g.group_id for g in groups if g.group_id)
    assert set(named.values()) <= {1}
