"""Who plays next: the oldest task first, nobody left out, no place lost."""

import asyncio
from collections import Counter

import pytest

from rollstream.producers.places import Place, Places


def always() -> bool:
    return True


async def waiting(places: Places, environment: str, order: int, ready: bool = True) -> "asyncio.Task[Place]":
    """Somebody who asks for a place."""
    asked = asyncio.create_task(places.enter(environment, order, lambda: ready))
    await asyncio.sleep(0)
    return asked


async def test_the_oldest_task_is_next_whoever_came_first() -> None:
    places = Places(1, ["a"])
    held = await places.enter("a", 0, always)
    later, earlier = await waiting(places, "a", 2), await waiting(places, "a", 1)
    held.leave()
    held.leave()
    assert (await earlier) is not None
    assert not later.done()
    (await earlier).leave()
    assert (await later) is not None
    assert places.free == 0


async def test_one_environment_never_takes_what_is_reserved_for_others() -> None:
    places = Places(16, ["slow", "fast"])
    slow = [await waiting(places, "slow", n) for n in range(50)]
    assert sum(asked.done() for asked in slow) == 12
    fast = [await waiting(places, "fast", n) for n in range(50)]
    assert sum(asked.done() for asked in fast) == 4
    assert places.free == 0
    for asked in slow + fast:
        asked.cancel()


async def test_a_free_place_goes_to_the_environment_with_the_fewest() -> None:
    places = Places(6, ["a", "b", "c"])
    held = [await places.enter("a", n, always) for n in range(4)] + [await places.enter("b", n, always) for n in (0, 1)]
    asked = {name: [await waiting(places, name, n) for n in range(6)] for name in "abc"}
    for place in held:
        place.leave()
    await asyncio.sleep(0)
    assert Counter(name for name, all_ in asked.items() for one in all_ if one.done()) == {"a": 2, "b": 2, "c": 2}
    for one in [one for all_ in asked.values() for one in all_]:
        one.cancel()


async def test_who_is_held_back_keeps_nobody_else_waiting() -> None:
    places, ready = Places(1, ["a"]), asyncio.Event()
    first = asyncio.create_task(places.enter("a", 0, ready.is_set))
    second = await waiting(places, "a", 1)
    assert second.done()
    second.result().leave()
    assert not first.done()
    ready.set()
    places.refresh()
    assert (await first) is not None


@pytest.mark.parametrize("given", [False, True])
async def test_a_place_asked_for_in_vain_is_not_lost(given: bool) -> None:
    places = Places(1, ["a"])
    held = await places.enter("a", 0, always)
    asked = await waiting(places, "a", 1)
    if given:
        held.leave()
    asked.cancel()
    await asyncio.wait([asked])
    held.leave()
    assert places.free == 1
    assert await places.enter("a", 2, always)


@pytest.mark.parametrize(("capacity", "environments"), [(1, "abc"), (2, "ab"), (3, "abcd"), (5, "")])
async def test_however_few_places_everybody_gets_on(capacity: int, environments: str) -> None:
    places, played = Places(capacity, environments), Counter[str]()

    async def play(environment: str, order: int) -> None:
        place = await places.enter(environment, order, always)
        await asyncio.sleep(0)
        played[environment] += 1
        place.leave()

    await asyncio.gather(*(play(environment, n) for n in range(20) for environment in environments + "z"))
    assert set(played.values()) == {20}
    assert places.free == capacity


def test_no_place_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="found 0"):
        Places(0, ["a"])
