"""The log path against the bare client: MB/s and records/s of `Writer` and `Consumer`, and of confluent-kafka alone.

    python bench/log.py                               # starts Tansu in a folder of its own
    python bench/log.py --broker kafka                # Apache Kafka from KAFKA_HOME
    python bench/log.py --bootstrap 127.0.0.1:9092    # a broker that runs
    python bench/log.py --json

Both sides get the same broker, the same client settings and the same records, half token ids and half log-probabilities
as they lie in a trajectory. Rounds alternate, and the side that begins alternates too; what is printed is medians, and
the ratio ours / bare (1.0: the log costs nothing).
"""

import argparse
import json
import logging
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition

from rollstream.infra.kafka import KafkaLog
from rollstream.infra.kafka.settings import assemble
from rollstream.infra.log import Topic
from rollstream.infra.stack import LocalStack

PARTITIONS = 4
LIMIT = 1_000_000
SIZES = {"16 KB": (16 * 1024, 3000), "128 KB": (128 * 1024, 500), "1 MB": (LIMIT - 200, 80)}
"""Name -> bytes of a record, records of a round. The last is just under the limit."""
BATCH = 500
"""Records asked for at once."""
QUIET = logging.getLogger("bench")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """What a side reached in the median round."""

    size: str
    direction: str
    """"write" or "read"."""
    ours_mb: float
    bare_mb: float
    """MB/s, 10^6 bytes."""
    ours_records: float
    bare_records: float
    """Records/s."""
    ratio: float
    """Median over the rounds of ours / bare."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--broker", choices=("tansu", "kafka"), default="tansu")
    parser.add_argument("--bootstrap", help="use this broker instead of starting one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with find_broker(options.bootstrap, options.broker) as bootstrap:
        rates = [rate for size in SIZES for rate in measure(bootstrap, size, options.rounds)]
    if options.json:
        print(json.dumps({"broker": options.bootstrap or options.broker, "rates": [asdict(rate) for rate in rates]}))
    else:
        print_table(rates)


@contextmanager
def find_broker(bootstrap: str | None, broker: str) -> Generator[str]:
    if bootstrap is not None:
        yield bootstrap
        return
    with (
        tempfile.TemporaryDirectory() as directory,
        LocalStack(Path(directory), broker="kafka" if broker == "kafka" else "tansu") as stack,
    ):
        yield stack.endpoints.bootstrap


def measure(bootstrap: str, size: str, rounds: int) -> list[Rate]:
    """Both directions for one size of record."""
    length, count = SIZES[size]
    values = make_values(length, count)
    log = KafkaLog(bootstrap)
    seconds: dict[tuple[str, str], list[float]] = {}
    sides: dict[str, tuple[Callable[[str, list[bytes]], float], Callable[[str, int], float]]] = {
        "ours": (lambda t, v: write_ours(log, t, v), lambda t, n: read_ours(log, t, n)),
        "bare": (lambda t, v: write_bare(bootstrap, t, v), lambda t, n: read_bare(bootstrap, t, n)),
    }
    for turn in range(rounds):
        for side in ("ours", "bare") if turn % 2 == 0 else ("bare", "ours"):
            write, read = sides[side]
            topic = f"bench-{uuid.uuid4()}"
            log.create(Topic(name=topic, partitions=PARTITIONS, config={"max.message.bytes": str(LIMIT)}))
            seconds.setdefault((side, "write"), []).append(write(topic, values))
            seconds.setdefault((side, "read"), []).append(read(topic, count + 1))
    return [summarize(size, direction, seconds) for direction in ("write", "read")]


def make_values(length: int, count: int) -> list[bytes]:
    """Records like a trajectory's hot columns: int32 token ids, then float32 log-probabilities."""
    random = np.random.default_rng(0)
    half = length // 8
    tokens = random.integers(0, 50_000, (count, half), dtype=np.int32)
    logprobs = -random.exponential(1.0, (count, half)).astype(np.float32)
    tail = bytes(length - 8 * half)
    return [row.tobytes() + probabilities.tobytes() + tail for row, probabilities in zip(tokens, logprobs, strict=True)]


def write_ours(log: KafkaLog, topic: str, values: list[bytes]) -> float:
    """Seconds until every record is acknowledged. One record before the clock starts, as on the other side."""
    with log.writer() as writer:
        writer.append(topic, b"first").result(60)
        started = time.perf_counter()
        for number, value in enumerate(values):
            writer.append(topic, value, key=b"%d" % number)
        writer.flush(300)
        return time.perf_counter() - started


def write_bare(bootstrap: str, topic: str, values: list[bytes]) -> float:
    producer = Producer(assemble("writer", bootstrap, {}), logger=QUIET)
    failed: list[KafkaError] = []

    def report(error: KafkaError | None, _: Message) -> None:
        if error is not None:
            failed.append(error)

    producer.produce(topic, b"first", on_delivery=report)
    producer.flush(60)
    started = time.perf_counter()
    for number, value in enumerate(values):
        while True:
            try:
                producer.produce(topic, value, b"%d" % number, on_delivery=report)
                break
            except BufferError:
                producer.poll(0.01)
        producer.poll(0)
    left = producer.flush(300)
    seconds = time.perf_counter() - started
    if left or failed:
        raise RuntimeError(f"{left} records left, {failed[:1]}")
    return seconds


def read_ours(log: KafkaLog, topic: str, count: int) -> float:
    start = dict.fromkeys(log.partitions(topic), 0)
    started = time.perf_counter()
    with log.read(start) as consumer:
        while count > 0:
            count -= len(consumer.poll(BATCH, 60))
        return time.perf_counter() - started


def read_bare(bootstrap: str, topic: str, count: int) -> float:
    started = time.perf_counter()
    consumer = Consumer({**assemble("consumer", bootstrap, {}), "group.id": f"bench-{uuid.uuid4()}"}, logger=QUIET)
    consumer.assign([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
    while count > 0:
        for message in consumer.consume(1, 60) + consumer.consume(BATCH, 0):
            if (error := message.error()) is not None:
                raise RuntimeError(error)
            # what `Record` holds, so that both sides have touched the same bytes
            _ = message.key(), message.value(), message.headers(), message.timestamp(), message.offset()
            count -= 1
    seconds = time.perf_counter() - started
    consumer.close()
    return seconds


def summarize(size: str, direction: str, seconds: dict[tuple[str, str], list[float]]) -> Rate:
    length, count = SIZES[size]
    ours, bare = seconds["ours", direction], seconds["bare", direction]
    megabytes = length * count / 1e6
    return Rate(
        size=size,
        direction=direction,
        ours_mb=round(megabytes / statistics.median(ours), 1),
        bare_mb=round(megabytes / statistics.median(bare), 1),
        ours_records=round(count / statistics.median(ours)),
        bare_records=round(count / statistics.median(bare)),
        ratio=round(statistics.median(b / o for o, b in zip(ours, bare, strict=True)), 3),
    )


def print_table(rates: list[Rate]) -> None:
    print(
        f"{'record':>8} {'':6} {'ours MB/s':>10} {'bare MB/s':>10} {'ours rec/s':>11} {'bare rec/s':>11} {'ratio':>6}"
    )
    for r in rates:
        print(
            f"{r.size:>8} {r.direction:6} {r.ours_mb:10.1f} {r.bare_mb:10.1f} "
            f"{r.ours_records:11.0f} {r.bare_records:11.0f} {r.ratio:6.2f}"
        )


if __name__ == "__main__":
    main()
