"""Records that wait for somebody who is away: in order, bounded, and in nobody's way."""

from dataclasses import replace

from rollstream.consumers.parking import RETRY, Parking
from rollstream.infra.log import Partition, Record, record_size

AWAY = ConnectionError("away")


class Clock:
    """Seconds that pass when told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def record(offset: int, partition: int = 0, size: int = 10) -> Record:
    return Record(partition=Partition("t", partition), offset=offset, key=b"k", value=bytes(size))


def offsets(parking: Parking) -> list[int]:
    taken = list[int]()
    while (found := parking.take()) is not None:
        taken.append(found.offset)
    return taken


def test_tried_after_a_while_in_order() -> None:
    clock = Clock()
    parking = Parking(1000, clock=clock)
    for offset in range(3):
        parking.put(record(offset), AWAY)
    assert parking.take() is None
    clock.now = RETRY
    assert offsets(parking) == [0, 1, 2]
    assert len(parking) == 0


def test_first_again_first_next_time() -> None:
    """One that still cannot be had holds up the other tries, and nobody passes it."""
    clock = Clock()
    parking = Parking(1000, clock=clock)
    for offset in range(3):
        parking.put(record(offset, offset % 2), AWAY)
    clock.now = RETRY
    first = parking.take()
    assert first is not None
    parking.put(first, AWAY)
    assert parking.take() is None
    clock.now = 2 * RETRY
    assert offsets(parking) == [0, 1, 2]


def test_full_by_bytes() -> None:
    one = record(0)
    parking = Parking(2 * record_size(one.key, one.value, one.headers) + 1, clock=Clock())
    for offset in range(2):
        parking.put(record(offset), AWAY)
    assert not parking.full
    parking.put(record(2), AWAY)
    assert parking.full
    parking.discard(frozenset({Partition("t", 0)}))
    assert not parking.full


def test_headers_fill_it_too() -> None:
    """A claim has a hundred bytes of value, and more of headers."""
    parking = Parking(1000, clock=Clock())
    parking.put(replace(record(0), headers={"traceparent": bytes(1000)}), AWAY)
    assert parking.full


def test_discard_only_what_others_have() -> None:
    clock = Clock()
    parking = Parking(1000, clock=clock)
    for offset in range(4):
        parking.put(record(offset, offset % 2), AWAY)
    parking.discard(frozenset({Partition("t", 1)}))
    clock.now = RETRY
    assert offsets(parking) == [0, 2]
