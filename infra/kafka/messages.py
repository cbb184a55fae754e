"""Between the client's values and ours."""

from collections.abc import Iterable

from confluent_kafka import OFFSET_INVALID, Message, TopicPartition

from ..log import Partition, Record


def at_offset(partition: Partition, offset: int = OFFSET_INVALID) -> TopicPartition:
    """The client's name for a partition, and a position in it."""
    return TopicPartition(partition.topic, partition.number, offset)


def to_partitions(partitions: Iterable[TopicPartition]) -> frozenset[Partition]:
    """Ours for the client's."""
    return frozenset(Partition(partition.topic, partition.partition) for partition in partitions)


def to_record(message: Message, partition: Partition, offset: int) -> Record:
    """A message that is no error, as a record."""
    return Record(
        partition=partition,
        offset=offset,
        key=message.key(),
        value=message.value(),
        headers=_headers(message),
        timestamp_ms=message.timestamp()[1],
    )


def _headers(message: Message) -> dict[str, bytes]:
    """The last of several headers of one name; a header without a value is empty."""
    found = message.headers()
    if not found:
        return {}
    named = found.items() if isinstance(found, dict) else found
    return {name: value.encode() if isinstance(value, str) else value or b"" for name, value in named}
