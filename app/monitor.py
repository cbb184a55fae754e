"""What a run does now, told from its topics alone: a reader of the ledger beside everybody else."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..infra.log import Log, Partition, Record
from ..infra.scan import scan
from ..infra.schemabook import open_schemas
from ..infra.topics import Names
from ..schemas import Receipt, Schemas, WireError, decode_as
from .output import Pace

WINDOW = 20
"""Receipts that rates and means are taken over."""
LAG_EVERY = 1.0
"""Seconds between two questions to the broker where the topics end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A moment of a run."""

    step: int = 0
    version: int = 0
    """Newest policy version in the ledger."""
    reward: dict[str, float] = field(default_factory=dict[str, float])
    """Environment -> mean reward over the last receipts."""
    trajectories_per_s: float = 0.0
    """Settled by the trainer, over the last receipts."""
    tokens_per_s: float = 0.0
    staleness: float = 0.0
    """Mean over the trained samples of the last receipts, in versions."""
    idle: float = 0.0
    """Share of its time that the trainer waited for data, over the last receipts."""
    lag: int = 0
    """Records on the trajectory topics that no receipt has settled."""


class RunMonitor:
    """Used by one thread; `close` ends its consumer."""

    def __init__(
        self,
        log: Log,
        names: Names,
        run: str,
        environments: Sequence[str],
        *,
        from_step: int = 0,
        schemas: Schemas | None = None,
    ) -> None:
        """`from_step`: leave out older receipts (a warm start)."""
        self._log, self._run, self._from = log, run, from_step
        self._schemas = schemas or open_schemas(log, names)
        self._partitions = [p for e in environments for p in log.partitions(names.trajectories(e))]
        self._recent: deque[Receipt] = deque(maxlen=WINDOW)
        self._settled: dict[Partition, int] = {}
        self._ends: dict[Partition, int] = {}
        self._asking = Pace(LAG_EVERY, at_once=True)
        bounds = log.bounds(log.partitions(names.ledger))
        ends = {p: end for p, (_, end) in bounds.items()}
        for record in scan(log, {p: first for p, (first, _) in bounds.items()}, stop=ends):
            self._take(record)
        self._consumer = log.read(ends)

    def poll(self, timeout: float) -> list[Receipt]:
        """Receipts of the run written since it was made, oldest first, those before `from_step` left out."""
        taken = [self._take(record) for record in self._consumer.poll(100, timeout)]
        return [receipt for receipt in taken if receipt is not None]

    def snapshot(self) -> Snapshot:
        """The run as of the last poll."""
        if not self._recent:
            return Snapshot(lag=self._lag())
        last, total = self._recent[-1], self._sum
        span = max((last.written_ms - self._recent[0].written_ms) / 1000, 1e-3)
        seconds = {kind: total(f"seconds.{kind}") for kind in ("idle", "learn", "publish")}
        return Snapshot(
            step=last.step,
            version=last.version,
            reward=self._rewards(),
            trajectories_per_s=total("trajectories", skip=1) / span,
            tokens_per_s=total("tokens", skip=1) / span,
            staleness=self._mean("staleness"),
            idle=seconds["idle"] / max(sum(seconds.values()), 1e-9),
            lag=self._lag(),
        )

    def close(self) -> None:
        self._consumer.close()

    def _take(self, record: Record) -> Receipt | None:
        try:
            receipt = decode_as(Receipt, record.value or b"", schemas=self._schemas)
        except WireError:
            return None
        if receipt.run != self._run:
            return None
        self._count(receipt)
        if receipt.step < self._from:
            return None
        self._recent.append(receipt)
        return receipt

    def _count(self, receipt: Receipt) -> None:
        for consumed in receipt.consumed:
            partition = Partition(consumed.topic, consumed.partition)
            count = len(consumed.trained) + sum(map(len, consumed.dropped.values()))
            self._settled[partition] = self._settled.get(partition, 0) + count

    def _lag(self) -> int:
        if self._asking.due():
            self._ends = {p: end for p, (_, end) in self._log.bounds(self._partitions).items()}
        return sum(max(0, end - self._settled.get(p, 0)) for p, end in self._ends.items())

    def _sum(self, name: str, *, skip: int = 0) -> float:
        return sum(r.metrics.get(name, 0.0) for r in list(self._recent)[skip:])

    def _mean(self, name: str) -> float:
        values = [r.metrics[name] for r in self._recent if name in r.metrics]
        return sum(values) / len(values) if values else 0.0

    def _rewards(self) -> dict[str, float]:
        names = sorted({n for r in self._recent for n in r.metrics if n.startswith("reward.")})
        return {n.removeprefix("reward."): self._mean(n) for n in names}
