"""Duplicates are recognised within a bound of memory that loses none."""

import io

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
