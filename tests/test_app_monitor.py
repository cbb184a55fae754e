"""The monitor tells a run from its topics alone: what was before it is counted, what is new is returned."""

from collections.abc import Iterator

import numpy as np
import pytest

from rollstream.app.monitor import RunMonitor
from rollstream.infra.log import Topic
from rollstream.infra.memory import MemoryLog
from rollstream.infra.topics import Names
from rollstream.schemas import Consumed, Receipt, encode

NAMES = Names("watched")


@pytest.fixture
def log() -> Iterator[MemoryLog]:
    log = MemoryLog()
    for topic in (NAMES.ledger, NAMES.trajectories("lake")):
        log.create(Topic(name=topic, partitions=1))
    with log.writer() as writer:
        for _ in range(10):
            writer.append(NAMES.trajectories("lake"), b"x").result(5)
    yield log
    log.close()


def write(log: MemoryLog, step: int, offsets: list[int], *, run: str = "mine", **metrics: float) -> None:
    consumed = Consumed(topic=NAMES.trajectories("lake"), partition=0, trained=np.array(offsets, np.int64))
    receipt = Receipt(
        run=run,
        incarnation="one",
        step=step,
        version=step,
        parent=step - 1,
        consumed=(consumed,),
        metrics={name.replace("_", "."): value for name, value in metrics.items()},
        written_ms=step * 1000,
    )
    with log.writer() as writer:
        writer.append(NAMES.ledger, encode(receipt), key=run.encode()).result(5)


def test_monitor(log: MemoryLog) -> None:
    write(log, 1, [0, 1], reward_lake=0.0)
    write(log, 2, [2], reward_lake=0.5, staleness=1.0)
    monitor = RunMonitor(log, NAMES, "mine", ["lake"], from_step=2)
    try:
        first = monitor.snapshot()
        assert (first.step, first.reward, first.lag) == (2, {"lake": 0.5}, 7)
        assert monitor.poll(0.05) == []
        write(
            log,
            3,
            [3, 4],
            reward_lake=1.0,
            staleness=2.0,
            trajectories=2.0,
            tokens=20.0,
            seconds_idle=3,
            seconds_learn=1,
        )
        write(log, 9, [5], run="other")
        with log.writer() as writer:
            writer.append(NAMES.ledger, b"junk").result(5)
        assert [receipt.step for receipt in monitor.poll(1.0)] == [3]
        now = monitor.snapshot()
        assert (now.step, now.version, now.reward, now.staleness) == (3, 3, {"lake": 0.75}, 1.5)
        assert (now.trajectories_per_s, now.tokens_per_s, now.idle) == (2.0, 20.0, 0.75)
    finally:
        monitor.close()


def test_nothing_yet(log: MemoryLog) -> None:
    monitor = RunMonitor(log, NAMES, "mine", ["lake"])
    try:
        assert (monitor.snapshot().step, monitor.snapshot().lag) == (0, 10)
    finally:
        monitor.close()
