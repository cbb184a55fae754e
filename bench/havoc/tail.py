"""Every record of some topics, read with the bare client: nothing of rollstream's log stands between.

Tail            follows while the run goes on; what it saw once must still be there at the end
read_topics     from the first record to the end, once
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import NamedTuple, cast

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient

QUIET = 3.0
"""Seconds without a record after which the end that a broker tells is believed."""
PATIENCE = 120.0


class Seen(NamedTuple):
    """A record as the bare client gave it."""

    place: str
    """"topic[partition]@offset", as rollstream writes positions."""
    topic: str
    value: bytes | None
    headers: Mapping[str, bytes]
    timestamp_ms: int


class Tail:
    """Follows topics from their first record on. Used by one thread."""

    def __init__(self, bootstrap: str, partitions: Mapping[str, int]) -> None:
        """`partitions`: topic -> how many it has."""
        self._client = Consumer(_settings(bootstrap))
        self._client.assign([TopicPartition(t, n, 0) for t, count in partitions.items() for n in range(count)])

    def look(self, timeout: float) -> list[Seen]:
        """What came, after at most `timeout` seconds. A broker that is away is no error."""
        messages = self._client.consume(1, timeout) + self._client.consume(2000, 0)
        return [_seen(message) for message in messages if _usable(message)]

    def close(self) -> None:
        self._client.close()


def read_topics(bootstrap: str, partitions: Mapping[str, int]) -> Iterator[Seen]:
    """Every record up to the end: each partition has told its end, and nothing came for a while after that.

    Raises `TimeoutError` where a partition does not tell its end.
    """
    open_ = {(topic, number) for topic, count in partitions.items() for number in range(count)}
    with closing(Consumer({**_settings(bootstrap), "enable.partition.eof": "true"})) as client:
        client.assign([TopicPartition(topic, number, 0) for topic, number in sorted(open_)])
        began = last = time.monotonic()
        while open_ or time.monotonic() - last < QUIET:
            if time.monotonic() - began > PATIENCE:
                raise TimeoutError(f"{len(open_)} partitions did not tell their end within {PATIENCE:.0f} s")
            for message in client.consume(2000, 0.2):
                if _at_end(message):
                    open_.discard((str(message.topic()), message.partition() or 0))
                elif _usable(message):
                    last = time.monotonic()
                    yield _seen(message)


def count_partitions(bootstrap: str, chosen: Callable[[str], bool]) -> dict[str, int]:
    """Topics of a cluster, with how many partitions they have."""
    topics = AdminClient({"bootstrap.servers": bootstrap}).list_topics(timeout=20).topics
    return {name: len(topic.partitions) for name, topic in topics.items() if chosen(name)}


def lagging_replicas(bootstrap: str) -> int:
    """Replicas that are not in sync; -1 where nobody answers within a second."""
    try:
        topics = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0}).list_topics(timeout=1).topics
    except KafkaException:
        return -1
    partitions = [partition for topic in topics.values() for partition in topic.partitions.values()]
    return sum(len(partition.replicas) - len(partition.isrs) for partition in partitions)


def _settings(bootstrap: str) -> dict[str, str | int | bool]:
    return {
        "bootstrap.servers": bootstrap,
        "group.id": "chaos-witness",
        "enable.auto.commit": False,
        "auto.offset.reset": "error",
        "allow.auto.create.topics": False,
        "reconnect.backoff.max.ms": 500,
        "topic.metadata.refresh.interval.ms": 5000,
        "log_level": 0,
    }


def _at_end(message: Message) -> bool:
    error = message.error()
    return error is not None and error.code() == KafkaError._PARTITION_EOF


def _usable(message: Message) -> bool:
    """False for what the client tells of brokers that are away; raises where it cannot go on."""
    error = message.error()
    if error is None:
        return True
    if error.code() == KafkaError._AUTO_OFFSET_RESET:
        raise RuntimeError(f"the log does not have the place that was read next: {error.str()}")
    return False


def _seen(message: Message) -> Seen:
    topic = str(message.topic())
    return Seen(
        place=f"{topic}[{message.partition()}]@{message.offset()}",
        topic=topic,
        value=message.value(),
        headers=dict(cast("list[tuple[str, bytes]]", message.headers() or [])),
        timestamp_ms=message.timestamp()[1],
    )
