"""Which offsets of a partition are settled: a low-water mark, and the few settled ranges above it.

    offsets   0 1 2 3 4 5 6 7 8 9
    settled   x x x . x x . x . .      Cursor(low=3, above=((4, 6), (7, 8)))

Groups finish out of order, so offsets are settled out of order; the mark moves over them as the holes close, and what
is kept stays as small as the disorder. A reader resumes at `low` and skips what lies above and is settled.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from .log import Partition

MAX_OFFSET = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A frozen snapshot. Raises `ValueError` for ranges that are not ascending, apart and above the mark."""

    low: int = 0
    """Every offset below is settled, this one is not."""
    above: tuple[tuple[int, int], ...] = ()
    """Settled [start, stop) above the mark."""

    def __post_init__(self) -> None:
        end = self.low
        if not 0 <= end <= MAX_OFFSET:
            raise ValueError(f"cursor: expected a low-water mark from 0 to 2**63 - 1, found {end}")
        for start, stop in self.above:
            if not end < start < stop <= MAX_OFFSET:
                raise ValueError(
                    f"cursor: expected settled ranges in order, apart, and above {self.low}; found {self.above}"
                )
            end = stop

    def used(self, offset: int) -> bool:
        """Is this offset settled?"""
        if offset < self.low:
            return True
        index = bisect_right(self.above, offset, key=lambda settled: settled[0]) - 1
        return index >= 0 and offset < self.above[index][1]

    def to_json(self) -> list[int]:
        """[low, start, stop, start, stop, ...]"""
        return [self.low, *(edge for settled in self.above for edge in settled)]

    @classmethod
    def from_json(cls, value: object) -> "Cursor":
        """Raises `ValueError` for anything that `to_json` does not write."""
        edges = _offsets(value)
        if len(edges) % 2 != 1:
            raise ValueError(f"cursor: expected [low, start, stop, ...], found {value!r}")
        return cls(low=edges[0], above=tuple(zip(edges[1::2], edges[2::2], strict=True)))


class CursorTracker:
    """A cursor that moves. Not thread-safe. Using an offset costs a binary search in the ranges above the mark."""

    def __init__(self, cursor: Cursor | None = None) -> None:
        cursor = cursor or Cursor()
        self._low = cursor.low
        self._starts = [start for start, _ in cursor.above]
        self._stops = [stop for _, stop in cursor.above]

    @property
    def low(self) -> int:
        """Every offset below is settled, this one is not."""
        return self._low

    def used(self, offset: int) -> bool:
        """Is this offset settled?"""
        if offset < self._low:
            return True
        index = bisect_right(self._starts, offset) - 1
        return index >= 0 and offset < self._stops[index]

    def use(self, offset: int) -> bool:
        """Settle one offset. False, and nothing changes, where it was settled before: somebody is using it twice.

        Raises `ValueError` for what is no offset.
        """
        if self.used(_offset(offset)):
            return False
        self._settle(offset, offset + 1)
        return True

    def skip(self, start: int, stop: int) -> None:
        """Settle all of [start, stop): offsets that hold no record (compaction, transaction markers). Idempotent."""
        if _offset(start) < _offset(stop):
            self._settle(start, stop)

    def skip_to(self, offset: int) -> None:
        """Settle everything below `offset`, what was read and is not finished too: where reading begins, or what
        retention has deleted. For a gap between two records there is `skip`. Never moves back."""
        self.skip(0, offset)

    def snapshot(self) -> Cursor:
        return Cursor(low=self._low, above=tuple(zip(self._starts, self._stops, strict=True)))

    def _settle(self, start: int, stop: int) -> None:
        # Ranges that overlap or touch [start, stop) melt into it.
        first, last = bisect_left(self._stops, start), bisect_right(self._starts, stop)
        if first < last:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        if start <= self._low:
            self._low = max(self._low, stop)
            del self._starts[:last], self._stops[:last]
        else:
            self._starts[first:last], self._stops[first:last] = [start], [stop]


class Cursors(Mapping[Partition, Cursor]):
    """The cursors of many partitions, frozen: what a checkpoint holds."""

    __slots__ = ("_cursors",)

    def __init__(self, cursors: Mapping[Partition, Cursor] | None = None) -> None:
        self._cursors = dict(sorted((cursors or {}).items()))

    def __getitem__(self, partition: Partition) -> Cursor:
        return self._cursors[partition]

    def __iter__(self) -> Iterator[Partition]:
        return iter(self._cursors)

    def __len__(self) -> int:
        return len(self._cursors)

    def __repr__(self) -> str:
        marks = ", ".join(f"{p}: {c.low}" + f"+{len(c.above)}" * bool(c.above) for p, c in self._cursors.items())
        return f"Cursors({marks})"

    def to_json(self) -> dict[str, dict[str, list[int]]]:
        """{topic: {partition number: [low, start, stop, ...]}}"""
        value: dict[str, dict[str, list[int]]] = {}
        for partition, cursor in self._cursors.items():
            value.setdefault(partition.topic, {})[str(partition.number)] = cursor.to_json()
        return value

    @classmethod
    def from_json(cls, value: object) -> "Cursors":
        """Raises `ValueError` for anything that `to_json` does not write."""
        return cls(
            {
                Partition(topic, _number(number)): Cursor.from_json(edges)
                for topic, numbers in _object(value).items()
                for number, edges in _object(numbers).items()
            }
        )


def _offset(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_OFFSET:
        raise ValueError(f"expected an offset from 0 to 2**63 - 1, found {value!r}")
    return value


def _offsets(value: object) -> list[int]:
    if not isinstance(value, list):
        raise ValueError(f"cursor: expected a list of offsets, found {value!r}")
    return [_offset(item) for item in cast("list[object]", value)]


def _number(value: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise ValueError(f"cursors: expected the number of a partition, found {value!r}")
    return int(value)


def _object(value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"cursors: expected an object by topic and partition, found {value!r}")
    return cast("dict[str, object]", value)
