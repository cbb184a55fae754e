"""From a trajectory to its record: one each, whatever is wrong with it; no more under way than there is room for."""

import asyncio
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType
from typing import Self

import numpy as np
import pytest

from rollstream.infra.kafka import KafkaLog
from rollstream.infra.log import Headers, Log, LogError, Partition, Position, RecordTooLarge, UnknownTopic
from rollstream.infra.memory import MemoryLog
from rollstream.infra.scan import scan
from rollstream.infra.topics import Names, apply, declared, plan
from rollstream.producers import Delivery
from rollstream.producers.delivery import WINDOW
from rollstream.schemas import PolicySpan, Role, Status, Trajectory, Turn, decode_as, parse_headers

PATIENCE = 60.0
GOOD = Trajectory(
    trajectory_id="group/0/0",
    group_id="group",
    group_size=4,
    sample_index=0,
    environment="game",
    environment_version="7",
    seed=3,
    tokens=np.arange(5, dtype=np.int32),
    logprobs=-np.ones(2, np.float32),
    spans=(PolicySpan(version=4, count=1), PolicySpan(version=5, count=1)),
    turns=(Turn(role=Role.USER, tokens=3, sampled=False), Turn(role=Role.ASSISTANT, tokens=2, sampled=True)),
    reward=1.0,
    started_ms=10,
    finished_ms=20,
)
TRACE = f"00-{'a' * 32}-{'b' * 16}-01"


class Hand:
    """A writer whose records are acknowledged by hand, or as it is told."""

    def __init__(self, *outcomes: LogError | None) -> None:
        self._outcomes = list(outcomes)
        self.open: list[Future[Position]] = []
        self.values: list[bytes] = []
        self.threads: list[str] = []

    def append(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Headers | None = None,
        partition: int | None = None,
    ) -> "Future[Position]":
        future: Future[Position] = Future()
        self.values.append(value or b"")
        self.threads.append(threading.current_thread().name)
        if not self._outcomes:
            self.open.append(future)
        elif (outcome := self._outcomes.pop(0)) is None:
            future.set_result(Position(Partition(topic, 0), len(self.values)))
        else:
            future.set_exception(outcome)
        return future

    def acknowledge(self) -> None:
        self.open.pop(0).set_result(Position(Partition("t", 0), 0))

    def flush(self, timeout: float) -> None:
        """Nothing to wait for."""

    def close(self, timeout: float = 30.0) -> None:
        """Nothing to release."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@pytest.fixture(params=("memory", "tansu", "kafka"))
def log(request: pytest.FixtureRequest) -> Log:
    return MemoryLog() if request.param == "memory" else KafkaLog(request.getfixturevalue(f"{request.param}_address"))


@pytest.fixture
def names(log: Log) -> Names:
    names = Names(f"test-{uuid.uuid4().hex[:8]}")
    topics = declared(names.namespace, {"game": 2}, max_bytes=20_000)
    apply(log, plan(log, [topic for topic in topics if "game" in topic.name]))
    return names


def spoilt() -> dict[str, Trajectory]:
    """Trajectories that cannot be written as they are, by the cause that their records give."""
    return {
        "unwritable": replace(GOOD, trajectory_id="bad", logprobs=np.array([np.nan, -1], np.float32), model="\ud800"),
        "oversize": replace(GOOD, trajectory_id="big", environment_version="v" * 30_000),
    }


async def test_what_can_be_written_is_and_what_cannot_leaves_a_failed_record(log: Log, names: Names) -> None:
    sent = {"": GOOD, **spoilt()}
    with log.writer() as writer:
        delivery = Delivery(writer, names)
        positions = await asyncio.gather(*[delivery.deliver(t, TRACE) for t in sent.values()])
    assert delivery.counts == {"completed": 1, "unwritable": 1, "oversize": 1}
    records = {r.position: r for r in scan(log, log.partitions(names.trajectories("game")))}
    assert records.keys() == set(positions), "one record each, in one partition"
    assert len({position.partition for position in positions}) == 1
    for (cause, trajectory), position in zip(sent.items(), positions, strict=True):
        read, headers = decode_as(Trajectory, records[position].value or b""), parse_headers(records[position].headers)
        assert (read.trajectory_id, read.group_id, read.group_size) == (trajectory.trajectory_id, "group", 4)
        assert (headers.trajectory_id, headers.traceparent) == (trajectory.trajectory_id, TRACE)
        assert (read.status, read.cause) == ((Status.FAILED, cause) if cause else (Status.COMPLETED, None))
        assert (read.seed, read.started_ms, read.finished_ms) == (3, 10, 20)
        assert read.tokens.tolist() == ([] if cause else [0, 1, 2, 3, 4])
        assert (headers.lowest_version, headers.highest_version) == ((None, None) if cause else (4, 5))


async def test_a_topic_that_is_not_there_is_told(log: Log, names: Names) -> None:
    with log.writer() as writer, pytest.raises(UnknownTopic):
        await Delivery(writer, names).deliver(replace(GOOD, environment="other"))


async def test_what_passes_is_tried_again_and_the_rest_is_raised() -> None:
    passing = LogError("no leader just now", retriable=True)
    writer = Hand(passing, passing, None, LogError("not allowed"))
    delivery = Delivery(writer, Names())
    await delivery.deliver(GOOD)
    assert (len(writer.values), len(set(writer.values))) == (3, 1)
    with pytest.raises(LogError, match="not allowed"):
        await delivery.deliver(GOOD)
    assert delivery.counts == {"completed": 1}


async def test_a_failed_record_that_is_refused_too_is_raised() -> None:
    with pytest.raises(RecordTooLarge):
        await Delivery(Hand(RecordTooLarge("too large"), RecordTooLarge("still")), Names()).deliver(GOOD)


async def test_the_loop_appends_itself_once_a_topic_is_known_and_the_record_is_small() -> None:
    writer = Hand(None, None, None)
    delivery = Delivery(writer, Names())
    here = threading.current_thread().name
    await delivery.deliver(GOOD)
    await delivery.deliver(GOOD)
    await delivery.deliver(replace(GOOD, environment_version="v" * (1 << 20)))
    assert [name == here for name in writer.threads] == [False, True, False]


async def test_appended_is_told_before_the_acknowledgement() -> None:
    writer, told = Hand(), asyncio.Event()
    delivering = Delivery(writer, Names()).deliver(GOOD, appended=told.set)
    await told.wait()
    assert not delivering.done()
    writer.acknowledge()
    await delivering


async def test_no_more_than_the_window_is_under_way_and_one_that_nobody_waits_for_goes_on() -> None:
    writer = Hand()
    delivery = Delivery(writer, Names())
    large = replace(GOOD, environment_version="v" * (WINDOW // 4))
    delivering = [delivery.deliver(large) for _ in range(6)]
    await until(lambda: len(writer.open) == 3)
    delivering[3].cancel()
    writer.acknowledge()
    await until(lambda: len(writer.open) == 3)
    assert [one.done() for one in delivering] == [True, False, False, True, False, False]
    while not all(one.done() for one in delivering):
        if writer.open:
            writer.acknowledge()
        await asyncio.sleep(0)
    await until(lambda: len(writer.values) == 6 and not writer.open)
    assert delivery.counts == {"completed": 6}, "what is finished is never given up"
    one = delivery.deliver(replace(GOOD, environment_version="v" * 2 * WINDOW))
    await until(lambda: len(writer.open) == 1)
    writer.acknowledge()
    await one


async def until(done: Callable[[], bool]) -> None:
    """Let the loop run until it is so, and then some more: it must stay so."""
    async with asyncio.timeout(PATIENCE):
        while not done():  # noqa: ASYNC110 - nothing of this loop tells of it
            await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)
    assert done()
