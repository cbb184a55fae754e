"""Read a stretch of the log from start to its present end, and stop: audits, tables, exports.

A log may tell an end beyond its last record: Tansu, killed in the middle of an append, has counted the record and not
stored it. Readers pass such a hole as soon as a record follows it; one at the end would be waited for in vain, so here
it is found, and the log ends before it.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import cast

from .log import Log, LogError, Partition, Record

logger = logging.getLogger(__name__)

QUIET = 3.0
"""Seconds without a record after which the end is looked at again."""
PROOF = 5.0
"""Seconds without an answer to a read after which there is no record: a read at one is answered at once."""
GROWTH = 16
"""By how much further back each look for the last record goes."""


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
        waited, looked = 0.0, False
        while open_:
            records = consumer.poll(1000, 1.0)
            waited, looked = (0.0, False) if records else (waited + 1.0, looked)
            if waited >= patience:
                raise LogError(f"no record came for {patience:g} s from {sorted(map(str, open_))}", retriable=True)
            yield from (r for r in records if r.offset < last[r.partition])
            if waited >= QUIET and not looked:
                last |= _look_again(log, {p: last[p] for p in open_})
                looked = True
            done = {p for p in open_ if consumer.position(p) >= last[p]}
            # What goes on arriving there must not keep the patience for the others alive.
            consumer.pause(done)
            open_ -= done


def find_ends(log: Log, partitions: Iterable[Partition]) -> dict[Partition, int]:
    """The offset after the last record of each partition: as in `bounds`, but before any hole at the end.

    Raises `LogError` where a partition does not answer.
    """
    bounds = log.bounds(partitions)
    ends = {p: first for p, (first, _) in bounds.items()}
    left = {p for p, (first, end) in bounds.items() if first < end}
    back = 1
    while left:
        starts = {p: max(bounds[p][0], bounds[p][1] - back) for p in left}
        found = _read_ends(log, starts, {p: bounds[p][1] for p in left})
        ends |= found
        left -= found.keys() | {p for p in left if starts[p] == bounds[p][0]}
        back *= GROWTH
    for partition, (_, end) in bounds.items():
        if ends[partition] < end:
            logger.warning("%s: no record from %d up to its end, %d", partition, ends[partition], end)
    return ends


def _look_again(log: Log, last: Mapping[Partition, int]) -> dict[Partition, int]:
    """The ends of these partitions, without holes; as they were where the log does not answer."""
    try:
        ends = find_ends(log, last)
    except LogError as error:
        if not error.retriable:
            raise
        return dict(last)
    return {p: min(end, ends[p]) for p, end in last.items()}


def _read_ends(log: Log, starts: Mapping[Partition, int], stops: Mapping[Partition, int]) -> dict[Partition, int]:
    """The offset after the last record that can be read, of the partitions that have one from `starts` on."""
    found, open_, waited = dict[Partition, int](), set(stops), 0.0
    with log.read(starts) as consumer:
        while open_ and waited < PROOF:
            records = consumer.poll(1000, 0.5)
            waited = 0.0 if records else waited + 0.5
            found |= {r.partition: r.offset + 1 for r in records}
            done = {p for p in open_ if found.get(p, 0) >= stops[p]}
            # What goes on arriving there must not put off the verdict on the others.
            consumer.pause(done)
            open_ -= done
    return found
