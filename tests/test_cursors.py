"""Cursors against a naive set of offsets."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.infra.cursors import MAX_OFFSET, Cursor, Cursors, CursorTracker
from rollstream.infra.log import Partition

LIMIT = 40
offsets = st.integers(0, LIMIT)
moves = st.lists(st.one_of(offsets, st.tuples(offsets, offsets)), max_size=60)


class Naive:
    """The same promises, kept by a plain set."""

    def __init__(self) -> None:
        self.settled: set[int] = set()

    @property
    def low(self) -> int:
        return next(offset for offset in range(LIMIT + 3) if offset not in self.settled)

    def ranges(self) -> tuple[tuple[int, int], ...]:
        above = [o for o in range(self.low, LIMIT + 3) if o in self.settled]
        starts = [o for o in above if o - 1 not in self.settled]
        stops = [o + 1 for o in above if o + 1 not in self.settled]
        return tuple(zip(starts, stops, strict=True))


def played(moves: list[int | tuple[int, int]]) -> tuple[CursorTracker, Naive]:
    tracker, naive = CursorTracker(), Naive()
    for move in moves:
        if isinstance(move, int):
            assert tracker.use(move) is (move not in naive.settled)
            naive.settled.add(move)
        else:
            tracker.skip(*move)
            naive.settled.update(range(*move))
    return tracker, naive


@given(moves)
def test_tracker_equals_a_set(moves: list[int | tuple[int, int]]) -> None:
    tracker, naive = played(moves)
    assert tracker.low == naive.low
    assert tracker.snapshot().above == naive.ranges()
    snapshot = tracker.snapshot()
    for offset in range(LIMIT + 3):
        assert tracker.used(offset) is snapshot.used(offset) is (offset in naive.settled)


@given(moves, moves)
def test_snapshot_resumes_and_survives_json(
    before: list[int | tuple[int, int]], after: list[int | tuple[int, int]]
) -> None:
    tracker, _ = played(before)
    snapshot = tracker.snapshot()
    restored = CursorTracker(Cursor.from_json(json.loads(json.dumps(snapshot.to_json()))))
    for move in after:
        for one in (tracker, restored):
            if isinstance(move, int):
                one.use(move)
            else:
                one.skip(*move)
    assert restored.snapshot() == tracker.snapshot()
    assert snapshot == played(before)[0].snapshot()


@given(moves, offsets)
def test_skip_to_settles_all_below(moves: list[int | tuple[int, int]], offset: int) -> None:
    tracker, naive = played(moves)
    tracker.skip_to(offset)
    naive.settled.update(range(offset))
    assert (tracker.low, tracker.snapshot().above) == (naive.low, naive.ranges())


@given(st.permutations(range(30)))
def test_any_order_closes_every_hole(order: list[int]) -> None:
    tracker = CursorTracker()
    assert all(tracker.use(offset) for offset in order)
    assert tracker.snapshot() == Cursor(low=30)
    assert not any(tracker.use(offset) for offset in order)


def test_a_gap_between_records_is_bridged_and_leaves_the_unfinished_one() -> None:
    tracker = CursorTracker(Cursor(low=5))
    tracker.use(6)
    tracker.skip(7, 10)
    tracker.use(10)
    assert tracker.snapshot() == Cursor(low=5, above=((6, 11),))
    tracker.use(5)
    assert tracker.low == 11


@pytest.mark.parametrize("offset", [-1, MAX_OFFSET + 1, 1.0, True, "7", None])
def test_what_is_no_offset_is_refused(offset: int) -> None:
    tracker = CursorTracker()
    with pytest.raises(ValueError, match="expected an offset"):
        tracker.use(offset)
    assert tracker.snapshot() == Cursor()


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        [],
        [1, 2],
        [-1],
        [3, 3, 4],
        [3, 2, 4],
        [0, 5, 5],
        [0, 6, 4],
        [0, 2, 4, 4, 6],
        [0, 4, 6, 2, 3],
        [0.0],
        [True],
    ],
)
def test_a_broken_cursor_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="expected"):
        Cursor.from_json(value)


def test_cursors_of_many_partitions_survive_json() -> None:
    cursors = Cursors(
        {
            Partition("t.b", 10): Cursor(low=4, above=((6, 9),)),
            Partition("t.b", 2): Cursor(),
            Partition("t.a", 0): Cursor(low=MAX_OFFSET),
        }
    )
    text = json.dumps(cursors.to_json())
    assert text == '{"t.a": {"0": [9223372036854775807]}, "t.b": {"2": [0], "10": [4, 6, 9]}}'
    assert Cursors.from_json(json.loads(text)) == cursors
    assert list(cursors) == [Partition("t.a", 0), Partition("t.b", 2), Partition("t.b", 10)]
    assert repr(cursors) == "Cursors(t.a[0]: 9223372036854775807, t.b[2]: 0, t.b[10]: 4+1)"


@pytest.mark.parametrize("value", [None, [], {"t": []}, {"t": {"x": [0]}}, {"t": {"-1": [0]}}, {"t": {"0": 3}}])
def test_broken_cursors_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="expected"):
        Cursors.from_json(value)


def test_frozen_cursors_do_not_follow_their_source() -> None:
    source = {Partition("t", 0): Cursor(low=1)}
    cursors = Cursors(source)
    source[Partition("t", 1)] = Cursor(low=2)
    assert dict(cursors) == {Partition("t", 0): Cursor(low=1)}
