"""Read a stretch of the log from start to its present end, and stop: audits, tables, exports."""

from collections.abc import Iterable, Iterator, Mapping

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
    partitions = tuple(start)
    bounds = log.bounds(partitions)
    first = dict(start) if isinstance(start, Mapping) else {p: bounds[p][0] for p in partitions}
    last = {p: min(bounds[p][1], stop[p]) if stop and p in stop else bounds[p][1] for p in partitions}
    open_ = {p for p in partitions if first[p] < last[p]}
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
            open_ -= {p for p in open_ if consumer.position(p) >= last[p]}
