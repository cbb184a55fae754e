"""Which tasks are finished, whoever has their partition: what is committed, and what is played again."""

from random import Random

from rollstream.infra.log import Partition, Position
from rollstream.producers.ownership import PATIENCE, Ownership

ONE, TWO = Partition("tasks", 1), Partition("tasks", 2)


class Clock:
    """A clock that is set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def read(ownership: Ownership, partition: Partition, offsets: range) -> list[int]:
    """Those that are not known as finished."""
    return [offset for offset in offsets if not ownership.known(Position(partition, offset))]


def test_only_what_lies_below_the_first_unfinished_task_is_committed() -> None:
    ownership = Ownership()
    ownership.assigned(frozenset({ONE}))
    assert ownership.marks([ONE]) == {}, "nothing was read yet, so nothing is known"
    assert read(ownership, ONE, range(10, 15)) == [10, 11, 12, 13, 14]
    assert ownership.marks([ONE, TWO]) == {ONE: 10}
    for offset, low in [(11, 10), (13, 10), (10, 12), (12, 14), (14, 15)]:
        ownership.finish(Position(ONE, offset))
        assert ownership.marks([ONE]) == {ONE: low}


def test_offsets_without_a_record_hold_nothing_up() -> None:
    ownership = Ownership()
    ownership.assigned(frozenset({ONE}))
    for offset in (3, 5, 9):
        assert not ownership.known(Position(ONE, offset))
        ownership.finish(Position(ONE, offset))
    assert ownership.marks([ONE]) == {ONE: 10}


def test_a_partition_that_comes_back_at_once_goes_on_where_it_was() -> None:
    ownership = Ownership()
    ownership.assigned(frozenset({ONE}))
    read(ownership, ONE, range(5))
    ownership.finish(Position(ONE, 3))
    ownership.revoked(frozenset({ONE}))
    ownership.assigned(frozenset({ONE}))
    assert ownership.moved() == frozenset()
    assert ownership.marks([ONE]) == {}, "where the group stands is told by the first record"
    assert read(ownership, ONE, range(5)) == [0, 1, 2, 4]


def test_what_another_finished_meanwhile_is_finished() -> None:
    ownership = Ownership()
    ownership.assigned(frozenset({ONE}))
    read(ownership, ONE, range(5))
    ownership.revoked(frozenset({ONE}))
    ownership.assigned(frozenset({ONE}))
    assert read(ownership, ONE, range(4, 6)) == [4, 5]
    assert ownership.marks([ONE]) == {ONE: 4}


def test_a_partition_moved_when_an_assignment_comes_without_it() -> None:
    ownership = Ownership()
    ownership.assigned(frozenset({ONE, TWO}))
    read(ownership, ONE, range(3))
    ownership.revoked(frozenset({ONE}))
    assert ownership.moved() == frozenset()
    ownership.assigned(frozenset())
    assert ownership.moved() == frozenset({ONE})
    assert ownership.moved() == frozenset(), "told once"
    ownership.finish(Position(ONE, 0))
    assert ownership.marks([ONE]) == {}


def test_a_partition_moved_when_nothing_is_heard_of_it_for_long() -> None:
    clock = Clock()
    ownership = Ownership(clock)
    ownership.assigned(frozenset({ONE}))
    ownership.revoked(frozenset({ONE}))
    clock.now = PATIENCE
    assert ownership.moved() == frozenset()
    clock.now = PATIENCE + 0.1
    assert ownership.moved() == frozenset({ONE})


def test_a_partition_that_moved_away_and_back_starts_anew() -> None:
    ownership = Ownership()
    ownership.assigned(frozenset({ONE}))
    read(ownership, ONE, range(5))
    ownership.finish(Position(ONE, 4))
    ownership.revoked(frozenset({ONE}))
    ownership.assigned(frozenset())
    assert ownership.moved() == {ONE}
    ownership.assigned(frozenset({ONE}))
    assert read(ownership, ONE, range(2, 5)) == [2, 3, 4]
    assert ownership.marks([ONE]) == {ONE: 2}, "never back to 0, and not beyond what is unfinished"


def test_in_any_order_nothing_unfinished_is_committed() -> None:
    random = Random(0)
    ownership, finished, committed = Ownership(), set[int](), 0
    for _ in range(200):
        ownership.assigned(frozenset({ONE}))
        again = read(ownership, ONE, range(committed, committed + random.randrange(1, 30)))
        assert not finished & set(again), "what was finished here is not played again"
        for offset in random.sample(again, random.randrange(len(again) + 1)):
            ownership.finish(Position(ONE, offset))
            finished.add(offset)
        committed = max(committed, ownership.marks([ONE]).get(ONE, committed))
        assert set(range(committed)) <= finished
        ownership.revoked(frozenset({ONE}))
