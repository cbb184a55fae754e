"""The producing half of the staleness bound."""

import pytest

from rollstream.producers.slots import Slots


def fill(slots: Slots, counter: list[int]) -> list[str]:
    taken: list[str] = []
    while (environment := slots.pick()) is not None:
        counter[0] += 1
        slots.take(environment, group := f"{environment}-{counter[0]}")
        taken.append(group)
    return taken


def test_total_is_one_more_than_the_staleness_times_the_step() -> None:
    slots = Slots(max_staleness=2, groups_per_step=4, ratios={"a": 1})
    assert len(fill(slots, [0])) == slots.total == 12
    assert slots.pick() is None


def test_a_slot_is_free_only_when_settled_and_published() -> None:
    slots = Slots(max_staleness=0, groups_per_step=2, ratios={"a": 1})
    first, second = fill(slots, [0])
    slots.announce(1)
    assert slots.pick() is None
    slots.settle([first], 2)
    assert slots.pick() is None, "settled, but policy 2 is not announced yet"
    slots.announce(2)
    assert slots.pick() == "a"
    slots.settle([second], 2)
    assert slots.held == 0, "settled after its policy was announced"


def test_settling_twice_or_a_stranger_frees_nothing_more() -> None:
    slots = Slots(max_staleness=0, groups_per_step=2, ratios={"a": 1})
    first, _ = fill(slots, [0])
    slots.announce(9)
    slots.settle([first, first, "stranger"], 3)
    slots.settle([first], 4)
    assert slots.held == 1


def test_an_environment_that_stands_still_uses_up_its_own_slots_only() -> None:
    slots = Slots(max_staleness=1, groups_per_step=4, ratios={"slow": 1, "fast": 3})
    assert (slots.quota("slow"), slots.quota("fast")) == (2, 6)
    counter = [0]
    fill(slots, counter)
    for version in range(2, 30):
        fast = [g for g in list(slots._held) if g.startswith("fast")]  # pyright: ignore[reportPrivateUsage]
        slots.settle(fast, version)
        slots.announce(version)
        assert {g.split("-")[0] for g in fill(slots, counter)} == {"fast"}


@pytest.mark.parametrize("ratios", [{"a": 1.0}, {"a": 1, "b": 1, "c": 1}, {"a": 0.01, "b": 5}, {"a": 2, "b": 3}])
def test_quotas_add_up_and_nobody_is_left_out(ratios: dict[str, float]) -> None:
    slots = Slots(max_staleness=2, groups_per_step=5, ratios=ratios)
    assert sum(slots.quota(e) for e in ratios) == slots.total
    assert min(slots.quota(e) for e in ratios) >= 1


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_oldest_first_keeps_the_bound_exactly(max_staleness: int) -> None:
    policy, counter = 1, [0]
    slots = Slots(max_staleness=max_staleness, groups_per_step=3, ratios={"a": 1})
    flying: list[tuple[str, int]] = []
    for _ in range(50):
        flying += [(group, policy) for group in fill(slots, counter)]
        step, flying = flying[:3], flying[3:]
        assert all(policy - version <= max_staleness for _, version in step)
        policy += 1
        slots.settle([group for group, _ in step], policy)
        slots.announce(policy)


@pytest.mark.parametrize(
    ("staleness", "groups", "ratios"),
    [(-1, 1, {"a": 1}), (0, 0, {"a": 1}), (0, 1, {}), (0, 1, {"a": 0}), (0, 1, {"a": -1})],
)
def test_nonsense_is_refused(staleness: int, groups: int, ratios: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Slots(max_staleness=staleness, groups_per_step=groups, ratios=ratios)
