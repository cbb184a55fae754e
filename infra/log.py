"""The log, as the rest of rollstream sees it: a few records and four small Protocols.

    Writer.append ---> [ broker ] ---> Consumer.poll      a member of a consumer group (tasks, trajectories)
                                  ---> Consumer.poll      partitions named by hand (policy, control, audit, datasets)

`MemoryLog` (memory/) and `KafkaLog` (kafka/) both are a `Log`; the same tests hold for both. Everything here is
synchronous and thread-safe where it says so; async callers wrap the futures.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from ..schemas.errors import RollstreamError

Headers = Mapping[str, bytes]

FRAMING = 97
"""Bytes of a batch of one record beside its content: 61 for the batch, at most 36 for the record's lengths."""


class LogError(RollstreamError):
    """The log could not do what was asked. `retriable` says whether the same call may work later."""

    def __init__(self, message: str, *, retriable: bool = False) -> None:
        super().__init__(message)
        self.retriable = retriable


class RecordTooLarge(LogError):
    """The record exceeds what the topic or the client accepts; nothing was written.

    Judged before compression, so that a record is accepted or not whatever its bytes are like.
    """

    def __init__(self, message: str, *, size: int = 0, limit: int = 0) -> None:
        super().__init__(message)
        self.size, self.limit = size, limit
        """Bytes as `record_size` counts them, and how many were allowed; 0 where only the broker knows."""


class OffsetExpired(LogError):
    """The offset asked for is no longer in the log: retention passed it."""

    def __init__(self, partition: "Partition", *, wanted: int, earliest: int) -> None:
        super().__init__(
            f"{partition}: offset {wanted} is gone, the log now starts at {earliest}; "
            f"{earliest - wanted} records were deleted by retention. "
            f"Lengthen retention.ms, or start from {earliest} on purpose"
        )
        self.partition, self.wanted, self.earliest = partition, wanted, earliest


def out_of_range(partition: "Partition", wanted: int, bounds: tuple[int, int]) -> LogError:
    """The error for a position outside of `bounds` (earliest, end): deleted by retention, or never written."""
    earliest, end = bounds
    if wanted < earliest:
        return OffsetExpired(partition, wanted=wanted, earliest=earliest)
    return LogError(
        f"{partition}: expected an offset from {earliest} to {end}, found {wanted}, which was never written; "
        f"was the topic created anew? Start from {earliest} or {end} on purpose"
    )


class UnknownTopic(LogError):
    """The topic does not exist. `rollstream topics apply` creates what is declared."""


class Partition(NamedTuple):
    """One partition of one topic."""

    topic: str
    number: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.number}]"


class Position(NamedTuple):
    """Where an acknowledged record lies."""

    partition: Partition
    offset: int

    def __str__(self) -> str:
        return f"{self.partition}@{self.offset}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A record as read. `value` None is a tombstone; its truth is never its length."""

    partition: Partition
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers = field(default_factory=dict[str, bytes])
    timestamp_ms: int = 0
    """When the producer (or the broker) stamped it, milliseconds since the epoch."""

    @property
    def position(self) -> Position:
        return Position(self.partition, self.offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """A topic as declared: what `topics plan` compares with the cluster."""

    name: str
    partitions: int = 1
    config: Mapping[str, str] = field(default_factory=dict[str, str])
    """Kafka topic settings, e.g. {"cleanup.policy": "compact", "max.message.bytes": "1000000"}."""
    replication: int = -1
    """Replication factor; -1 takes the cluster's default."""


def record_size(key: bytes | None, value: bytes | None, headers: Headers | None = None) -> int:
    """Bytes that a record takes alone in a batch, at most: what is compared with `max.message.bytes`."""
    named = sum(len(name.encode()) + len(content) + 10 for name, content in headers.items()) if headers else 0
    return FRAMING + len(key or b"") + len(value or b"") + named


def check_record(topic: Topic, key: bytes | None, size: int, limit: int) -> None:
    """Refuse what a broker would refuse together with the rest of its batch, or what exceeds `limit` bytes.

    Raises `RecordTooLarge`; `LogError` for a record without a key on a compacted topic.
    """
    if size > limit:
        raise RecordTooLarge(
            f"expected a record of at most {limit} bytes for {topic.name}, found {size} before compression; "
            f"store the body elsewhere and write a reference, or raise max.message.bytes of topic and client",
            size=size,
            limit=limit,
        )
    if key is None and "compact" in topic.config.get("cleanup.policy", ""):
        raise LogError(f"expected a key, found none: {topic.name} is compacted")


def await_position(future: "Future[Position]", timeout: float, what: str) -> Position:
    """Where the record `what` lies, once the log acknowledged it. Raises `LogError`, after `timeout` (s) too."""
    try:
        return future.result(timeout)
    except TimeoutError as late:
        raise LogError(f"{what}: not acknowledged within {timeout:g} s", retriable=True) from late


class Writer(Protocol):
    """Appends records. Thread-safe. Closing flushes; an unclosed one warns."""

    def append(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Headers | None = None,
        partition: int | None = None,
    ) -> "Future[Position]":
        """Append one record; the future resolves to its position once the log acknowledged it (all in-sync replicas).

        Blocks while the buffer is full (back-pressure), drops nothing. The partition is murmur2 of the key unless
        given. The future fails with `RecordTooLarge`, `UnknownTopic` or another `LogError`; it cannot be cancelled,
        since a record cannot be taken back. Its callbacks must be short: they run where reports are served.
        """
        ...

    def flush(self, timeout: float) -> None:
        """Wait until every appended record was acknowledged or failed. Raises `LogError` after `timeout` (s)."""
        ...

    def close(self, timeout: float = 30.0) -> None:
        """Flush, then release the client. Raises `LogError` when records are left unacknowledged."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Consumer(Protocol):
    """Reads records. One thread at a time, except `close`. `seek` wins over what was already fetched."""

    def poll(self, max_records: int, timeout: float) -> list[Record]:
        """Up to `max_records`, in offset order within a partition; empty when `timeout` (s) passed with none.

        Also serves assignment callbacks, so a group member must go on polling. Raises `OffsetExpired` where the
        position was deleted (never jumps; again at each poll until a `seek`), `LogError` for what cannot be retried
        inside.
        """
        ...

    def assignment(self) -> frozenset[Partition]: ...

    def position(self, partition: Partition) -> int:
        """The offset that the next poll reads from this partition."""
        ...

    def seek(self, partition: Partition, offset: int) -> None: ...

    def pause(self, partitions: Iterable[Partition]) -> None:
        """Stop delivering from these partitions without losing the place; polling (and so membership) goes on."""
        ...

    def resume(self, partitions: Iterable[Partition]) -> None: ...

    def commit(self, offsets: Mapping[Partition, int]) -> None:
        """Commit the NEXT offset to read for each partition, synchronously. Only with a group.

        Raises `LogError`, and commits nothing, where a partition is not assigned to this member (any more).
        """
        ...

    def close(self) -> None:
        """Leave the group and release the client. Thread-safe, idempotent.

        Calls `on_revoke` for what is still assigned, so that what is finished can be committed.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


OnAssign = Callable[[frozenset[Partition]], Mapping[Partition, int]]
"""Called inside poll with partitions just assigned (and only those: assignment is cooperative, what a member keeps is
never taken away in between); returns where to start for some or all of them.

A partition left out starts at its committed offset, or at the earliest where there is none. What the callback raises
ends the consumer: every later poll raises it."""


def check_starts(starts: Mapping[Partition, int], assigned: frozenset[Partition]) -> Mapping[Partition, int]:
    """What an `OnAssign` returned. Raises `LogError` where it names a partition that was not assigned."""
    if foreign := starts.keys() - assigned:
        raise LogError(
            f"on_assign: expected starts among {', '.join(map(str, sorted(assigned)))}, "
            f"found {', '.join(map(str, sorted(foreign)))}"
        )
    return starts


OnRevoke = Callable[[frozenset[Partition]], None]
"""Called inside poll, or close, with partitions about to be taken away (or already lost: then a commit raises)."""


class Log(Protocol):
    """A partitioned, append-only log: Kafka, or `MemoryLog`."""

    def writer(self) -> Writer: ...

    def subscribe(
        self,
        topics: Iterable[str],
        *,
        group: str,
        on_assign: OnAssign | None = None,
        on_revoke: OnRevoke | None = None,
        instance: str | None = None,
    ) -> Consumer:
        """Join a consumer group. `instance` gives static membership (`group.instance.id`). Raises `UnknownTopic`."""
        ...

    def read(self, start: Mapping[Partition, int], *, group: str | None = None) -> Consumer:
        """Read exactly these partitions from these offsets, without being a member of any group.

        `group`: commits go under this group's name, for lag tools; one with members refuses them. Raises
        `UnknownTopic`.
        """
        ...

    def partitions(self, topic: str) -> tuple[Partition, ...]:
        """Raises `UnknownTopic`."""
        ...

    def bounds(self, partitions: Iterable[Partition]) -> dict[Partition, tuple[int, int]]:
        """For each partition the earliest offset still there and the offset that the next record will get.

        Exact: a record acknowledged before the call lies below the second number.
        """
        ...

    def committed(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """The offsets a group committed; partitions without one are left out."""
        ...

    def topics(self) -> dict[str, int]:
        """Topics there now, with their partition counts."""
        ...

    def describe(self, topic: str) -> Topic:
        """One topic as it is, with the settings that differ from the broker's defaults. Raises `UnknownTopic`."""
        ...

    def settings(self, topic: str) -> Mapping[str, str]:
        """The settings in effect, defaults included as far as the log tells them. Raises `UnknownTopic`."""
        ...

    def create(self, topic: Topic) -> None:
        """Create it; fine where it is already there with the same partitions. Raises `LogError` otherwise."""
        ...

    def grow(self, topic: str, partitions: int) -> None:
        """Add partitions to a live topic up to this count. Raises `LogError` where the broker cannot (Tansu)."""
        ...

    def alter(self, topic: str, config: Mapping[str, str]) -> None:
        """Set these topic settings. Raises `LogError` where the broker cannot."""
        ...

    def close(self) -> None: ...
