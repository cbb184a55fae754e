"""What receipts say became of each offset: two bytes an offset, so that millions fit."""

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from ..infra.log import Partition, Position
from ..schemas import Receipt
from ..schemas.records import Offsets

Bounds = Mapping[Partition, tuple[int, int]]
"""First offset that is there, and the one behind the last."""

TRAINED = 1
"""The fate of a trained record; 0 is none, reasons of drops have those above."""


class Fates:
    """The fates that these receipts tell, for the offsets within `bounds`."""

    def __init__(self, receipts: Iterable[Receipt], bounds: Bounds) -> None:
        self._first = {p: first for p, (first, _) in bounds.items()}
        self._columns = {p: np.zeros(end - first, np.uint16) for p, (first, end) in bounds.items()}
        self._codes = {"": TRAINED}
        self._outside: dict[Partition, list[Offsets]] = {}
        self.again: Counter[Position] = Counter()
        """Positions settled more than once, and how many times."""
        for receipt in receipts:
            for consumed in receipt.consumed:
                partition = Partition(consumed.topic, consumed.partition)
                self._settle(partition, consumed.trained, TRAINED)
                for reason, offsets in consumed.dropped.items():
                    self._settle(partition, offsets, self._codes.setdefault(reason, len(self._codes) + 1))
        self._reasons = {code: reason for reason, code in self._codes.items()}
        # Read by the record, which a memoryview does in half the time.
        self._views = {p: column.data for p, column in self._columns.items()}
        outside = sum(len(np.unique(np.concatenate(parts))) for parts in self._outside.values())
        self.settled = outside + sum(int(np.count_nonzero(column)) for column in self._columns.values())
        """Distinct positions, those that are not in the log any more included."""

    def of(self, partition: Partition, offset: int) -> int:
        """0: not settled, `TRAINED`, or the fate whose `reason` is asked for."""
        view, at = self._views.get(partition), offset - self._first.get(partition, 0)
        return view[at] if view is not None and 0 <= at < len(view) else 0

    def reason(self, fate: int) -> str:
        """Why it was dropped; empty for `TRAINED`."""
        return self._reasons[fate]

    def _settle(self, partition: Partition, offsets: Offsets, code: int) -> None:
        column = self._columns.get(partition, np.zeros(0, np.uint16))
        at = offsets - self._first.get(partition, 0)
        inside = (at >= 0) & (at < len(column))
        if not inside.all():
            self._outside.setdefault(partition, []).append(offsets[~inside])
        at = at[inside]
        self._repeat(partition, at[column[at] != 0])
        # Trained and dropped: it was trained.
        column[at[column[at] != TRAINED]] = code

    def _repeat(self, partition: Partition, at: NDArray[np.int64]) -> None:
        for offset in (at + self._first.get(partition, 0)).tolist():
            position = Position(partition, offset)
            self.again[position] += 1 if position in self.again else 2
