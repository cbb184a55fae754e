"""Scans end where the records end, also where the log tells an end beyond them."""

from collections.abc import Callable, Iterable, Mapping

import pytest

from rollstream.infra import scan as scanning
from rollstream.infra.log import Log, LogError, Partition, Topic
from rollstream.infra.memory import MemoryLog
from rollstream.infra.memory.consumer import MemoryConsumer
from rollstream.infra.scan import find_ends, scan
from rollstream.infra.topics import Names

TOPIC = "t"
P0, P1, P2 = (Partition(TOPIC, number) for number in range(3))


class Holed(MemoryLog):
    """Tells ends beyond the last records of some partitions, as Tansu does after a kill in the middle of an append."""

    def __init__(self) -> None:
        super().__init__()
        self.holes: dict[Partition, int] = {}
        self.away = False

    def bounds(self, partitions: Iterable[Partition]) -> dict[Partition, tuple[int, int]]:
        if self.away:
            raise LogError("away", retriable=True)
        return {p: (first, end + self.holes.get(p, 0)) for p, (first, end) in super().bounds(partitions).items()}

    def read(self, start: Mapping[Partition, int], *, group: str | None = None) -> MemoryConsumer:
        """From within a hole nothing comes."""
        ends = {p: end for p, (_, end) in super().bounds(start).items()}
        return super().read({p: min(at, ends[p]) for p, at in start.items()}, group=group)


@pytest.fixture
def holed(monkeypatch: pytest.MonkeyPatch) -> Holed:
    """Two records in each partition but the last, which is empty; no waiting for a verdict."""
    monkeypatch.setattr(scanning, "QUIET", 1.0)
    monkeypatch.setattr(scanning, "PROOF", 0.5)
    log = Holed()
    log.create(Topic(name=TOPIC, partitions=3))
    append(log, P0, b"a", b"b")
    append(log, P1, b"c", b"d")
    return log


def append(log: Log, partition: Partition, *values: bytes) -> None:
    with log.writer() as writer:
        for value in values:
            writer.append(TOPIC, value, partition=partition.number).result(10)


def values(log: Log) -> list[bytes | None]:
    return sorted((r.value for r in scan(log, [P0, P1, P2], patience=5.0)), key=str)


def test_hole_at_the_end(holed: Holed) -> None:
    """One in a partition with records, one in an empty partition: everything there is comes, and it ends."""
    holed.holes = {P0: 1, P2: 3}
    assert values(holed) == [b"a", b"b", b"c", b"d"]
    assert find_ends(holed, [P0, P1, P2]) == {P0: 2, P1: 2, P2: 0}


def test_wide_hole(holed: Holed) -> None:
    holed.holes = {P1: 40}
    assert find_ends(holed, [P0, P1]) == {P0: 2, P1: 2}


def test_end_that_does_not_answer(holed: Holed) -> None:
    """Where nobody tells whether there are more, the patience decides as before."""
    holed.holes = {P0: 1}
    found = scan(holed, [P0], patience=2.0)
    assert [next(found).value, next(found).value] == [b"a", b"b"]
    holed.away = True
    with pytest.raises(LogError, match="no record came for 2 s"):
        next(found)


def test_ends_of_a_whole_log(
    log: Log, names: Names, send: Callable[..., object], episode: Callable[..., object]
) -> None:
    """Without holes they are the bounds, on every broker."""
    send([episode("g", 0), episode("g", 1)], 0)
    partitions = log.partitions(names.trajectories("maze"))
    assert find_ends(log, partitions) == {p: end for p, (_, end) in log.bounds(partitions).items()}
    assert sorted(find_ends(log, partitions).values()) == [0, 2]
