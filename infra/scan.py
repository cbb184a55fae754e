"""Read a stretch of the log from start to its present end, and stop: audits, tables, exports."""

from collections.abc import Iterable, Iterator, Mapping
from typing import cast

from .log import Log, LogError, Partition, Record


def scan(
    log: Log,
    start: Mapping[Partition, int] | Iterable[Partition],
    *,
    stop: Mapping[Partition, int] | None = None,
    patience: float = 30.0,
) -> Iterator[Record]:
    """Every record from `start` (the earliest where only partitions are given) up to `stop` (now, where not given).

    Order holds within a partition. Raises `LogError` when nothing arrives for `patience` seconds before the end.
    """
    bounds = log.bounds(tuple(start))
    chosen: Mapping[Partition, int] = cast("Mapping[Partition, int]", start) if isinstance(start, Mapping) else {}
    first = {p: chosen.get(p, earliest) for p, (earliest, _) in bounds.items()}
    last = {p: min(end, (stop or {}).get(p, end)) for p, (_, end) in bounds.items()}
    open_ = {p for p in bounds if first[p] < last[p]}
    if not open_:
        return
    with log.read({p: first[p] for p in open_}) as consumer:
        waited = 0.0
        while open_:
            records = consumer.poll(1000, 1.0)
            waited = 0.0 if records else waited + 1.0
            if waited >= patience:
                raise LogError(f"no record came for {patience:g} s from {sorted(map(str, open_))}", retriable=True)
            yield from (r for r in records if r.offset < last[r.partition])
            done = {p for p in open_ if consumer.position(p) >= last[p]}
            # What goes on arriving there must not keep the patience for the others alive.
            consumer.pause(done)
            open_ -= done
