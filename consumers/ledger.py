"""The ledger: one receipt a step, appended before the step's checkpoint is published.

A receipt counts for a checkpoint only if its (incarnation, version) lies on that checkpoint's lineage. Written first,
it can be left over from a step whose checkpoint was never published: such a receipt lies on no lineage, and costs
nothing.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ..infra.log import Log, Partition, Position, Record, Writer, await_position
from ..infra.scan import scan
from ..infra.schemabook import open_schemas
from ..infra.topics import Names
from ..schemas import Consumed, Receipt, Schemas, WireError, decode_as, encode
from ..schemas.records import Offsets

logger = logging.getLogger(__name__)

Step = tuple[str, int]
"""Names a step over all lives of a run: (incarnation, policy version that it produced)."""


class Settlement:
    """What one step does with the records that it took."""

    def __init__(self) -> None:
        self.trained: list[Position] = []
        self.dropped: dict[str, list[Position]] = {}

    def drop(self, reason: str, positions: Iterable[Position]) -> None:
        self.dropped.setdefault(reason, []).extend(positions)

    def add(self, other: "Settlement") -> None:
        """Those of another rank, too."""
        self.trained += other.trained
        for reason, positions in other.dropped.items():
            self.drop(reason, positions)

    def positions(self) -> list[Position]:
        return [*self.trained, *(p for positions in self.dropped.values() for p in positions)]

    def consumed(self) -> tuple[Consumed, ...]:
        """The receipt's columns, by partition."""
        trained = _by_partition(self.trained)
        dropped = {reason: _by_partition(positions) for reason, positions in self.dropped.items()}
        partitions = sorted(trained.keys() | {p for columns in dropped.values() for p in columns})
        return tuple(
            Consumed(
                topic=p.topic,
                partition=p.number,
                trained=trained.get(p, np.empty(0, np.int64)),
                dropped={reason: columns[p] for reason, columns in dropped.items() if p in columns},
            )
            for p in partitions
        )


def _by_partition(positions: Iterable[Position]) -> dict[Partition, Offsets]:
    columns: defaultdict[Partition, list[int]] = defaultdict(list)
    for partition, offset in positions:
        columns[partition].append(offset)
    return {p: np.sort(np.array(offsets, np.int64)) for p, offsets in columns.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """A checkpoint and its parents, as the ledger tells them."""

    receipts: tuple[Receipt, ...]
    """Newest first."""
    missing: tuple[Step, ...] = ()
    """Steps on it whose receipt is not there, newest first."""

    @property
    def complete(self) -> bool:
        """Every receipt is there, back to the run's first."""
        return not self.missing


class Ledger:
    """Receipts of one run."""

    def __init__(
        self, log: Log, names: Names, run: str, schemas: Schemas | None = None, *, writer: Writer | None = None
    ) -> None:
        """`writer`: one that is open already, and closed by whoever opened it; else the first write opens one."""
        self._log, self._topic, self._run = log, names.ledger, run
        self._schemas = schemas or open_schemas(log, names)
        self._given, self._writer = writer, writer

    def write(self, receipt: Receipt, *, timeout: float = 60.0) -> None:
        """Append and wait for the log's acknowledgement. Raises `LogError`, after `timeout` (s) too."""
        if self._writer is None:
            self._writer = self._log.writer()
        future = self._writer.append(self._topic, encode(receipt, schemas=self._schemas), key=self._run.encode())
        await_position(future, timeout, f"the receipt of step {receipt.step}")

    def receipts(self) -> Iterator[Receipt]:
        """Every receipt of the run now in the log, oldest first. One that cannot be read is passed over, and logged."""
        return self._read(self._log.partitions(self._topic))

    def truncated(self) -> bool:
        """Did retention remove receipts, of whatever run?"""
        return any(first > 0 for first, _ in self._log.bounds(self._log.partitions(self._topic)).values())

    def last_version(self, *, look_back: int = 100) -> int:
        """The highest version among the newest receipts; 0 without any. Published or not, it is never used again.

        Looks `look_back` records back, and further where these are all of other runs.
        """
        bounds = self._log.bounds(self._log.partitions(self._topic))
        found = 0
        while not found:
            start = {p: max(first, end - look_back) for p, (first, end) in bounds.items()}
            found = max((receipt.version for receipt in self._read(start)), default=0)
            if all(start[p] == first for p, (first, _) in bounds.items()):
                break
            look_back *= 10
        return found

    def close(self) -> None:
        if self._writer is not None and self._writer is not self._given:
            self._writer.close()
        self._writer = self._given

    def _read(self, start: Mapping[Partition, int] | Iterable[Partition]) -> Iterator[Receipt]:
        records = scan(self._log, start)
        return (receipt for r in records if r.key == self._run.encode() and (receipt := self._receipt(r)) is not None)

    def _receipt(self, record: Record) -> Receipt | None:
        if record.value is None:
            return None
        try:
            return decode_as(Receipt, record.value, schemas=self._schemas)
        except WireError as error:
            logger.warning("%s is no receipt, what it may have told is missing: %s", record.position, error)
            return None


def lineage(
    receipts: Mapping[Step, Receipt], tip: Step, *, ask: Callable[[Step], Step | None] | None = None
) -> Lineage:
    """Follow the parents from one step to the first of the run.

    `ask` tells the parent of a step whose receipt is not there; without it, or where it tells none, the way ends there.
    """
    left, found, missing = dict(receipts), list[Receipt](), list[Step]()
    step: Step | None = tip
    while step is not None:
        # Popped, so that receipts which name each other as parents end it too.
        if (receipt := left.pop(step, None)) is not None:
            found.append(receipt)
            step = (receipt.parent_incarnation, receipt.parent) if receipt.parent else None
        else:
            missing.append(step)
            step = None if ask is None else ask(step)
    return Lineage(receipts=tuple(found), missing=tuple(missing))
