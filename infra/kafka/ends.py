"""Exact end offsets, from the high watermark that comes with the answer to a fetch.

ListOffsets is exact on Apache Kafka. On Tansu 0.6 it answers with the first offset of some batch written earlier, plus
one; the watermark in the answer to a fetch is exact on both. So each partition is fetched from once, at what
ListOffsets says, and that watermark is taken, whatever else the answer holds.
"""

import time
from collections.abc import Callable, Mapping

from confluent_kafka import Consumer, KafkaException, TopicPartition

from ..log import LogError, Partition
from .errors import code_of, is_passing, to_log_error

SETTINGS = {"fetch.wait.max.ms": "1", "max.partition.fetch.bytes": "1024", "queued.min.messages": "1"}
"""For the consumer: be answered at once, also at the end, and with as little data as may be."""
PATIENCE = 20.0
"""Seconds until a partition that does not answer is an error."""


def fetch_ends(connect: Callable[[], Consumer], starts: Mapping[Partition, int]) -> dict[Partition, int]:
    """The offset that the next record of each partition gets. `starts` must not lie beyond it.

    The client keeps the last watermark it saw, so each call takes a client of its own: what that one knows is fresh.
    """
    if not starts:
        return {}
    client = connect()
    try:
        client.assign([TopicPartition(partition.topic, partition.number, at) for partition, at in starts.items()])
        return _await_watermarks(client, starts)
    finally:
        client.close()


def _await_watermarks(client: Consumer, starts: Mapping[Partition, int]) -> dict[Partition, int]:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        for message in client.consume(1000, 0.002):
            if (error := message.error()) is not None and not is_passing(error):
                raise to_log_error(error, "find the end of the log")
        ends = {partition: _watermark(client, partition) for partition in starts}
        if all(end >= 0 for end in ends.values()):
            return ends
    raise LogError(f"no answer about {', '.join(map(str, sorted(starts)))} within {PATIENCE} s", retriable=True)


def _watermark(client: Consumer, partition: Partition) -> int:
    """The high watermark that the client saw; negative before it saw one."""
    try:
        return client.get_watermark_offsets(TopicPartition(partition.topic, partition.number), cached=True)[1]
    except KafkaException as error:
        raise to_log_error(code_of(error), f"find the end of {partition}") from error
