"""A complete log in one process: the Kafka log's twin, for tests and for trying things out.

    log = MemoryLog()
    log.create(Topic(name="demo", partitions=2))
    with log.writer() as writer, log.subscribe(["demo"], group="g") as consumer:
        writer.append("demo", b"value", key=b"key").result()
        consumer.poll(10, timeout=1.0)

Consumer groups, static membership, committed offsets, record limits and headers behave as on a broker; retention is
what `expire` says. Topics are not compacted. Everything is thread-safe.
"""

from .consumer import MemoryConsumer
from .log import MemoryLog, MemoryWriter

__all__ = ["MemoryConsumer", "MemoryLog", "MemoryWriter"]
