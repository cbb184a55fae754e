"""Records that are good and cannot be admitted now: what they need, a schema or a body, lies with somebody who is away.

    admit --away--> [ parking ] --after a while, the first one--> admit --> the others at once
                         |
                         +-- over its bound: nothing else is taken either, the log keeps it

So a registry or a store that is away is never taken for a bad record, and stops nobody whose schema is known.
"""

import logging
import time
from collections import deque
from collections.abc import Callable

from ..infra.log import Partition, Record, record_size

logger = logging.getLogger(__name__)

RETRY = 1.0
"""Seconds until the first of them is tried again."""


class Parking:
    """In the order of their arrival. Used by the thread that takes from the reader."""

    def __init__(self, limit: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`limit`: bytes from which on it is full."""
        self._limit, self._clock = limit, clock
        self._records: deque[Record] = deque()
        self._size = 0
        self._due = 0.0
        self._tried: Record | None = None
        """Taken from here last."""

    def __len__(self) -> int:
        return len(self._records)

    @property
    def full(self) -> bool:
        return self._size >= self._limit

    def put(self, record: Record, why: Exception) -> None:
        """Keep it for later; one that was taken from here comes first again."""
        if record is self._tried:
            self._records.appendleft(record)
        else:
            logger.log(logging.INFO if self._records else logging.WARNING, "%s has to wait: %s", record.position, why)
            self._records.append(record)
        self._tried = None
        self._size += _size(record)
        self._due = self._clock() + RETRY

    def take(self) -> Record | None:
        """The first one, if it is time to try it again."""
        if not self._records or self._clock() < self._due:
            return None
        record = self._tried = self._records.popleft()
        self._size -= _size(record)
        return record

    def discard(self, partitions: frozenset[Partition]) -> None:
        """Those of partitions that others have now."""
        self._records = deque(record for record in self._records if record.partition not in partitions)
        self._size = sum(map(_size, self._records))


def _size(record: Record) -> int:
    # A claim is all key and headers.
    return record_size(record.key, record.value, record.headers)
