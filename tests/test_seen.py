"""Duplicates are recognised within a bound of memory that loses none."""

import io
import tracemalloc

import numpy as np
import pytest

from rollstream.consumers.seen import Seen


def test_remembers_trajectories_and_their_groups() -> None:
    seen = Seen(max_staleness=2)
    seen.add("g", "g/0/0", 5)
    assert seen.group("g")
    assert seen.trajectory("g/0/0")
    assert not seen.trajectory("g/1/0")
    assert not seen.group("h")


def test_forgets_only_what_the_gate_drops_anyway() -> None:
    seen = Seen(max_staleness=2)
    for version in range(1, 10):
        seen.add(f"g{version}", f"t{version}", version)
        seen.evict(version)
    # Settled at 7, its oldest token is at most 7: a copy is at most 2 stale at version 9, so it must still be known.
    assert [v for v in range(1, 10) if seen.trajectory(f"t{v}")] == [7, 8, 9]
    assert [v for v in range(1, 10) if seen.group(f"g{v}")] == [7, 8, 9]


def test_a_group_is_known_as_long_as_one_of_its_trajectories() -> None:
    seen = Seen(max_staleness=0)
    seen.add("g", "a", 1)
    seen.add("g", "b", 2)
    seen.evict(2)
    assert (seen.group("g"), seen.trajectory("a"), seen.trajectory("b")) == (True, False, True)


def test_without_a_staleness_bound_the_newest_are_kept() -> None:
    seen = Seen(max_staleness=None, limit=3)
    for n in range(10):
        seen.add(f"g{n}", f"t{n}", 1)
    seen.evict(1_000)
    assert len(seen) == 3
    assert seen.trajectory("t9")
    assert not seen.trajectory("t6")


def test_past_the_limit_the_oldest_go_and_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Four are settled within the bound where three fit: the first would train again."""
    seen = Seen(max_staleness=100, limit=3)
    for n in range(3):
        seen.add("g", f"t{n}", 1)
        seen.evict(1)
    assert not caplog.records
    for n in range(3, 10):
        seen.add(f"h{n}", f"t{n}", 2)
        seen.evict(2)
    assert [n for n in range(10) if seen.trajectory(f"t{n}")] == [7, 8, 9]
    assert not seen.group("g")
    (line,) = caplog.messages
    assert "3 settled trajectories are remembered" in line
    assert "count it as twice" in line


def test_what_is_stale_goes_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    seen = Seen(max_staleness=1, limit=3)
    for version in range(1, 50):
        seen.add("g", f"t{version}", version)
        seen.evict(version)
    assert len(seen) == 2
    assert not caplog.records


def test_memory_stays_as_small_as_what_is_remembered() -> None:
    """A hundred thousand pass through a window of a thousand; forgotten rows are not carried along."""
    seen = Seen(max_staleness=None, limit=1000)
    tracemalloc.start()
    try:
        for n in range(20_000):
            seen.add(f"g{n // 4}", f"t{n}", 1)
            seen.evict(1)
        before, _ = tracemalloc.get_traced_memory()
        for n in range(20_000, 120_000):
            seen.add(f"g{n // 4}", f"t{n}", 1)
            seen.evict(1)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 200_000
    assert len(seen) == 1000
    again = Seen(max_staleness=None, limit=1000)
    again.load(seen.to_bytes())
    assert again.to_bytes() == seen.to_bytes()
    assert [again.trajectory(f"t{n}") for n in (118_999, 119_000, 119_999)] == [False, True, True]


def test_travels_in_a_checkpoint() -> None:
    seen, again = Seen(max_staleness=2), Seen(max_staleness=2)
    for n in range(100):
        seen.add(f"g{n // 8}", f"t{n}", n // 30)
    again.add("other", "other", 1)
    again.load(seen.to_bytes())
    assert again.to_bytes() == seen.to_bytes()
    assert all(again.trajectory(f"t{n}") for n in range(100))
    assert not again.trajectory("other")


def test_foreign_bytes_are_refused() -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    with pytest.raises(ValueError, match="expected rows"):
        Seen(max_staleness=1).load(buffer.getvalue())
