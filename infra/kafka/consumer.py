"""`KafkaConsumer`: a member of a group, or a reader of partitions named by hand.

    poll --> [client: rebalance?] --> on_revoke, on_assign --> every partition starts at an offset that is known here
         --> [client: records, errors] --> positions move --> records now, an error by the next poll

Offsets are never left to the client: it is told where each partition starts, and to report a position that is gone.
Rebalancing is cooperative (`cooperative-sticky`, or KIP-848 with `group.protocol=consumer`), so a member keeps what it
has while others come and go.
"""

import contextlib
import logging
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from threading import RLock
from types import TracebackType
from typing import Self

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from ..log import LogError, OnAssign, OnRevoke, Partition, Record, check_starts, out_of_range
from .errors import code_of, is_passing, to_log_error
from .messages import at_offset, to_partitions, to_record

_log = logging.getLogger(__name__)

SLICE = 0.2
"""Seconds that one wait in the client lasts at most, so that close and Ctrl-C need not wait longer."""
_PATIENCE = 20.0
"""Seconds for the group's coordinator to answer."""
JOIN = 10.0
"""Seconds for which a member that is to leave waits for the join that it is in the middle of."""

Bounds = Callable[[Iterable[Partition]], dict[Partition, tuple[int, int]]]


class KafkaConsumer:
    """A `Consumer` of Kafka. `bounds` is asked where an error must say what is left of a partition."""

    def __init__(
        self,
        client: Consumer,
        bounds: Bounds,
        *,
        on_assign: OnAssign | None = None,
        on_revoke: OnRevoke | None = None,
    ) -> None:
        self._client, self._bounds = client, bounds
        self._on_assign, self._on_revoke = on_assign, on_revoke
        self._commits = False
        self._joins = self._joining = False
        """In the middle of a join, as far as the callbacks tell; of no account with KIP-848, which has none."""
        self._positions: dict[Partition, int] = {}
        """Next offset of each assigned partition; OFFSET_BEGINNING before the first record of one without a commit."""
        self._paused: set[Partition] = set()
        self._gone: set[Partition] = set()
        """Partitions whose position is out of range, until a seek."""
        self._errors: list[Exception] = []
        """Found while there was something else to do; raised by the next poll, or by close."""
        self._broken: Exception | None = None
        self._fetching = False
        self._closing = False
        self._closed = False
        self._busy = RLock()

    def subscribe(self, topics: Iterable[str], *, joins: bool) -> None:
        """Become a member of the group. `joins`: by the classic protocol."""
        self._commits, self._joining, self._joins = True, joins, joins
        self._client.subscribe(list(topics), on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost)

    def start(self, start: Mapping[Partition, int], *, commits: bool) -> None:
        """Read these partitions, without being a member of the group. `commits`: it has one to commit under."""
        self._commits = commits
        self._client.assign([at_offset(partition, offset) for partition, offset in start.items()])
        self._positions.update(start)

    def poll(self, max_records: int, timeout: float) -> list[Record]:
        deadline = time.monotonic() + timeout
        with self._busy:
            try:
                while True:
                    self._raise_found()
                    left = deadline - time.monotonic()
                    records = self._fetch(max_records, min(max(left, 0), SLICE))
                    if self._closing:
                        return []
                    if records or (left <= 0 and not self._has_found()):
                        return records
            finally:
                if self._closing:
                    self._release()

    def assignment(self) -> frozenset[Partition]:
        return frozenset(self._positions)

    def position(self, partition: Partition) -> int:
        offset = self._positions[self._own(partition)]
        return offset if offset != OFFSET_BEGINNING else self._bounds([partition])[partition][0]

    def seek(self, partition: Partition, offset: int) -> None:
        with self._busy:
            self._own(partition)
            self._gone.discard(partition)
            self._positions[partition] = offset
            try:
                self._client.seek(at_offset(partition, offset))
            except KafkaException as error:
                # _STATE: the fetch failed (out of range) or has not begun yet
                if code_of(error).name() != "_STATE":
                    raise to_log_error(code_of(error), f"seek {partition} to {offset}") from error
                self._restart(partition, offset)

    def pause(self, partitions: Iterable[Partition]) -> None:
        with self._busy:
            chosen = [self._own(partition) for partition in partitions]
            self._client.pause([at_offset(partition) for partition in chosen])
            self._paused.update(chosen)

    def resume(self, partitions: Iterable[Partition]) -> None:
        with self._busy:
            chosen = [self._own(partition) for partition in partitions]
            self._client.resume([at_offset(partition) for partition in chosen])
            self._paused.difference_update(chosen)

    def commit(self, offsets: Mapping[Partition, int]) -> None:
        if not self._commits:
            raise LogError("only a consumer with a group commits; this one reads partitions named by hand")
        with self._busy:
            if gone := offsets.keys() - self._positions.keys():
                raise LogError(f"not committed: {', '.join(map(str, sorted(gone)))} not assigned to this consumer")
            if not offsets:
                return
            try:
                answers = self._client.commit(
                    offsets=[at_offset(*item) for item in offsets.items()], asynchronous=False
                )
            except KafkaException as error:
                raise to_log_error(code_of(error), "commit") from error
            for answer in answers:
                if answer.error is not None:
                    raise to_log_error(answer.error, f"commit {answer.topic}[{answer.partition}]")

    def close(self) -> None:
        self._closing = True
        with self._busy:
            if not self._fetching:  # else a callback of poll asks for it, and poll does it when it ends
                self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            warnings.warn(f"unclosed {type(self).__name__}", ResourceWarning, stacklevel=2, source=self)

    def _release(self) -> None:
        if self._closed:
            return
        self._finish_join()
        self._closed = True
        self._client.close()
        self._positions.clear()
        if self._errors:
            raise self._errors.pop()

    def _finish_join(self) -> None:
        """Tansu 0.6 never ends a join that a member leaves: its group would not give anybody anything ever again.

        That another member is joining, a heartbeat tells: then it is too late here. docs/brokers.md has what remains.
        """
        deadline = time.monotonic() + JOIN
        with contextlib.suppress(LogError):
            while self._joining and self._broken is None and time.monotonic() < deadline:
                self._fetch(1, SLICE)

    def _own(self, partition: Partition) -> Partition:
        if partition not in self._positions:
            raise LogError(f"{partition} is not assigned to this consumer")
        return partition

    def _has_found(self) -> bool:
        return bool(self._errors or self._gone or self._broken)

    def _raise_found(self) -> None:
        """Raise what was found and not told yet; partitions out of range are told until they are sought."""
        if self._closed:
            raise LogError("the consumer is closed")
        if self._broken is not None:
            raise self._broken
        if self._errors:
            raise self._errors.pop(0)
        for partition, bounds in self._bounds(self._gone).items() if self._gone else ():
            wanted = self._positions[partition]
            if not bounds[0] <= wanted <= bounds[1]:
                raise out_of_range(partition, wanted, bounds)
            _log.warning("%s: offset %d is there again, reading on", partition, wanted)
            self._gone.discard(partition)
            self._restart(partition, wanted)

    def _fetch(self, limit: int, wait: float) -> list[Record]:
        """What the client has, after at most `wait` seconds for the first record. Runs the rebalance callbacks."""
        self._fetching = True
        try:
            # asked for several, the client waits until it has them all or the time is up
            messages = self._client.consume(1, wait)
            if messages and limit > 1:
                messages += self._client.consume(min(limit - 1, 100_000), 0)
        except KafkaException as error:
            raise to_log_error(code_of(error), "poll") from error
        finally:
            self._fetching = False
        return [record for message in messages if (record := self._accept(message)) is not None]

    def _accept(self, message: Message) -> Record | None:
        """The record, its partition moved past it; None for an event, or what was fetched for an earlier position."""
        topic, number, offset = message.topic(), message.partition(), message.offset()
        error = message.error()
        partition = None if topic is None or number is None else Partition(topic, number)
        if error is not None:
            self._note(error, partition)
        # a partition may have been sought or revoked between its fetch and here
        elif partition is not None and offset is not None and offset >= self._positions.get(partition, offset + 1):
            self._positions[partition] = offset + 1
            return to_record(message, partition, offset)
        return None

    def _note(self, error: KafkaError, partition: Partition | None) -> None:
        name = error.name()
        if name == "_MAX_POLL_EXCEEDED":
            _log.warning("left the group, and joining again: no poll within max.poll.interval.ms")
        elif (
            partition is not None
            and partition in self._positions
            and name in ("_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE")
        ):
            self._gone.add(partition)
        elif error.fatal():
            self._broken = to_log_error(error, "poll")
        elif is_passing(error):
            _log.warning("poll: %s", error.str())
        else:
            self._errors.append(to_log_error(error, f"poll {partition or ''}".rstrip()))

    def _assigned(self, client: Consumer, partitions: list[TopicPartition]) -> None:
        self._joining = False
        gained = to_partitions(partitions)
        starts: Mapping[Partition, int] = {}
        try:
            starts = self._find_starts(gained)
        except Exception as error:  # noqa: BLE001 - whatever it is, these partitions have no known place to start from
            self._broken = error
        self._positions.update(starts)
        # without an answer from here the client would assign by itself, at the committed offsets
        client.incremental_assign([at_offset(*item) for item in starts.items()])

    def _find_starts(self, gained: frozenset[Partition]) -> dict[Partition, int]:
        chosen: Mapping[Partition, int] = {}
        if self._on_assign is not None and gained:
            chosen = check_starts(self._on_assign(gained), gained)
        return {**self._committed(gained - chosen.keys()), **chosen}

    def _committed(self, partitions: frozenset[Partition]) -> dict[Partition, int]:
        """Where the group stands; OFFSET_BEGINNING where it never committed."""
        if not partitions:
            return {}
        try:
            answers = self._client.committed([at_offset(partition) for partition in partitions], timeout=_PATIENCE)
        except KafkaException as error:
            raise to_log_error(code_of(error), "read committed offsets") from error
        for answer in answers:
            if answer.error is not None:
                raise to_log_error(answer.error, f"read the committed offset of {answer.topic}[{answer.partition}]")
        return {
            Partition(answer.topic, answer.partition): answer.offset if answer.offset >= 0 else OFFSET_BEGINNING
            for answer in answers
        }

    def _revoked(self, client: Consumer, partitions: list[TopicPartition]) -> None:
        self._joining = self._joins
        lost = to_partitions(partitions) & self._positions.keys()
        self._tell(lost)
        client.incremental_unassign(partitions)
        self._forget(lost)

    def _lost(self, client: Consumer, partitions: list[TopicPartition]) -> None:
        self._joining = self._joins
        lost = to_partitions(partitions) & self._positions.keys()
        # forgotten first, so that a commit in the callback is refused: others may have these partitions by now
        self._forget(lost)
        self._tell(lost)
        client.incremental_unassign(partitions)

    def _tell(self, lost: frozenset[Partition]) -> None:
        if self._on_revoke is None or not lost:
            return
        try:
            self._on_revoke(lost)
        except Exception as error:  # noqa: BLE001 - it must not stop the rebalance; poll or close raises it
            self._errors.append(error)

    def _forget(self, lost: frozenset[Partition]) -> None:
        for partition in lost:
            self._positions.pop(partition, None)
        self._paused -= lost
        self._gone -= lost

    def _restart(self, partition: Partition, offset: int) -> None:
        """Begin anew at this offset: where a fetch failed, or has not begun, the client cannot seek."""
        self._client.incremental_unassign([at_offset(partition)])
        self._client.incremental_assign([at_offset(partition, offset)])
        if partition in self._paused:
            self._client.pause([at_offset(partition)])
