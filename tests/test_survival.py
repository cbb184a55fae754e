"""The trainer lives on: brokers that restart or die, a store that is away, long steps, partitions that come and go.

Whatever happens, the audit finds nothing lost and nothing twice, and what was sent is trained.
"""

import json
import logging
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import SEEK_END, BytesIO
from pathlib import Path
from typing import Any

import fastavro
import pytest
from confluent_kafka.admin import AdminClient

from rollstream.consumers import LearnerSettings, Place, Trainer, TrainerSettings
from rollstream.consumers.audit import audit
from rollstream.consumers.progress import Progress
from rollstream.consumers.reader import Reader
from rollstream.infra.checkpoints import Checkpoints, Fenced
from rollstream.infra.claims import Claims
from rollstream.infra.deadletters import DeadLetters, read_letters
from rollstream.infra.kafka import KafkaLog
from rollstream.infra.log import Log, OffsetExpired, Partition, Position, Record
from rollstream.infra.memory import MemoryLog
from rollstream.infra.replay import Replay
from rollstream.infra.s3 import S3Store
from rollstream.infra.scan import scan
from rollstream.infra.schemabook import open_schemas
from rollstream.infra.stack import LocalStack, find_obstacle
from rollstream.infra.stack.seaweed import STORE
from rollstream.infra.store import MemoryStore, ObjectStore
from rollstream.infra.topics import Names, declared
from rollstream.schemas import (
    Receipt,
    Task,
    Trajectory,
    decode_as,
    encode,
    record_schemas,
    schema_id,
    trajectory_headers,
)
from rollstream.schemas.bodies import to_body

Episode = Callable[..., Trajectory]
RUN = "run"
SECONDS = 120.0
GRPO = LearnerSettings(lr=1e-2, min_informative=0.0)


@dataclass
class Life:
    """A run on a log and a store."""

    log: Log
    names: Names
    model: Path
    scratch: Path
    store: ObjectStore = field(default_factory=MemoryStore)
    on_step: Callable[[Receipt], None] = lambda _: None
    _steps: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Released with each step that is out."""

    def __post_init__(self) -> None:
        self.topic = self.names.trajectories("maze")

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.store, RUN)

    def trainer(self, **settings: Any) -> Trainer:
        chosen: dict[str, Any] = {"environments": {"maze": 1.0}, "learner": GRPO, "max_staleness": 100} | settings
        scratch = self.scratch / uuid.uuid4().hex

        def step(receipt: Receipt) -> None:
            self._steps.release()
            self.on_step(receipt)

        return Trainer(
            self.log, self.names, RUN, self.checkpoints, TrainerSettings(**chosen), scratch=scratch, on_step=step
        )

    @contextmanager
    def training(self, **settings: Any) -> "Generator[Future[Place]]":
        """A trainer at work, asked to stop at the end. What ended it is in the future."""
        trainer = self.trainer(groups_per_step=1, **settings)
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(trainer.run, self.model)
            try:
                self.await_steps(1, future)
                yield future
            finally:
                trainer.stop()
        future.result(0)

    def train(self, **settings: Any) -> Place:
        """Until the present end of the log."""
        trainer = self.trainer(groups_per_step=1, until_end=True, **settings)
        # A step that never fills would wait for ever: the test is to fail then, not to hang.
        guard = threading.Timer(SECONDS, trainer.stop)
        guard.start()
        try:
            return trainer.run(self.model)
        finally:
            guard.cancel()

    def await_steps(self, count: int, trainer: "Future[Place] | None" = None) -> None:
        """Until so many more steps are out. Raises what ended the trainer before."""
        for _ in range(count):
            left = SECONDS
            while not self._steps.acquire(timeout=0.2):
                left -= 0.2
                if trainer is not None and trainer.done():
                    trainer.result(0)
                assert left > 0, "no step came"

    def send(self, *trajectories: Trajectory, partition: int | None = None) -> list[Position]:
        with self.log.writer() as writer:
            futures = [
                writer.append(
                    self.topic, encode(t), key=t.group_id.encode(), headers=trajectory_headers(t), partition=partition
                )
                for t in trajectories
            ]
            return [future.result(SECONDS) for future in futures]

    def verdict(self) -> dict[str, Any]:
        verdict: dict[str, Any] = dict(audit(self.log, self.names, RUN, self.checkpoints).as_json())
        assert (verdict["lost"], verdict["twice"]) == (0, 0), verdict
        return verdict


def pairs(episode: Episode, *groups: str) -> list[Trajectory]:
    return [episode(group, index) for group in groups for index in (0, 1)]


@pytest.fixture
def life(log: Log, names: Names, policy_dir: Path, tmp_path: Path) -> Life:
    return Life(log, names, policy_dir, tmp_path)


@pytest.fixture
def memory(policy_dir: Path, tmp_path: Path) -> Life:
    log, names = MemoryLog(), Names("m")
    for topic in declared("m", {"maze": 2}):
        log.create(topic)
    return Life(log, names, policy_dir, tmp_path)


@pytest.fixture
def brokers(request: pytest.FixtureRequest, backend: str) -> LocalStack:
    """The servers of the log, to be restarted."""
    stack = request.getfixturevalue(f"stack_{backend}")
    assert isinstance(stack, LocalStack)
    return stack


ON_BROKERS = pytest.mark.parametrize("backend", ["tansu", "kafka"], indirect=True)
ON_KAFKA = pytest.mark.parametrize("backend", ["kafka"], indirect=True)


def restart(stack: LocalStack, component: str) -> "Callable[[Receipt], None]":
    """Kill it when step 1 is out, and start it again while step 2 is under way."""

    def on_step(receipt: Receipt) -> None:
        if receipt.step == 1:
            stack.kill(component)
            threading.Timer(3.0, stack.restart, (component,)).start()

    return on_step


@ON_BROKERS
def test_a_broker_that_restarts_costs_time(life: Life, brokers: LocalStack, episode: Episode) -> None:
    life.on_step = restart(brokers, brokers.components[1])
    with life.training() as trainer:
        life.send(*pairs(episode, "a", "b", "c"))
        life.await_steps(3, trainer)
        life.send(*pairs(episode, "d", "e"))
        life.await_steps(2, trainer)
    assert life.verdict() | {"trained": 10, "pending": 0, "dropped": {}} == life.verdict()
    assert life.checkpoints.versions() == [1, 2, 3, 4, 5, 6]


@ON_KAFKA
def test_a_store_that_is_away_costs_time(
    life: Life, brokers: LocalStack, episode: Episode, caplog: pytest.LogCaptureFixture
) -> None:
    ends = brokers.endpoints
    store = S3Store(
        ends.bucket,
        url=ends.s3_url,
        access_key=ends.access_key,
        secret_key=ends.secret_key,
        prefix=f"{uuid.uuid4().hex}/",
        patience=0.5,
    )
    life.store, life.on_step = store, restart(brokers, STORE)
    with life.training() as trainer:
        life.send(*pairs(episode, "a", "b", "c"))
        life.await_steps(3, trainer)
    assert "policy 3 of run run is not out yet" in caplog.text
    assert life.verdict() | {"trained": 6, "pending": 0} == life.verdict()
    assert life.checkpoints.versions() == [1, 2, 3, 4]
    store.close()


@pytest.mark.slow
def test_the_leader_of_a_partition_dies(policy_dir: Path, tmp_path: Path, episode: Episode) -> None:
    """Three brokers, every topic on all of them; the one that leads the records' partition is killed for good."""
    if obstacle := find_obstacle("kafka"):
        pytest.skip(obstacle)
    with LocalStack(tmp_path / "stack", broker="kafka", brokers=3) as stack:
        bootstrap = stack.endpoints.bootstrap
        log, names = KafkaLog(bootstrap, settings={"group.protocol": "consumer"}), Names("m")
        for topic in declared("m", {"maze": 2}, replication=3):
            log.create(topic)
        life = Life(log, names, policy_dir, tmp_path)

        def kill(receipt: Receipt) -> None:
            if receipt.step == 1:
                stack.kill(f"broker-{leader(bootstrap, Partition(life.topic, 0))}")

        life.on_step = kill
        with life.training() as trainer:
            life.send(*pairs(episode, "a", "b", "c"), partition=0)
            life.await_steps(3, trainer)
            life.send(*pairs(episode, "d"), partition=0)
            life.send(*pairs(episode, "e"), partition=1)
            life.await_steps(2, trainer)
        assert life.verdict() | {"trained": 10, "pending": 0, "dropped": {}} == life.verdict()
        log.close()


def leader(bootstrap: str, partition: Partition) -> int:
    admin: Any = AdminClient({"bootstrap.servers": bootstrap})
    return int(admin.list_topics(partition.topic, 30).topics[partition.topic].partitions[partition.number].leader)


LAZY = {"max.poll.interval.ms": "6000", "session.timeout.ms": "6000"}


@pytest.fixture
def strict(backend: str, request: pytest.FixtureRequest, policy_dir: Path, tmp_path: Path) -> Iterator[Life]:
    """On a log that takes a member's partitions away when it does not poll for six seconds."""
    log, names = KafkaLog(request.getfixturevalue(f"{backend}_address"), settings=LAZY), Names(f"t-{uuid.uuid4()}")
    for topic in declared(names.namespace, {"maze": 2}):
        log.create(topic)
    yield Life(log, names, policy_dir, tmp_path)
    log.close()


@ON_BROKERS
def test_case_14_a_step_longer_than_the_poll_interval_reads_nothing_twice(strict: Life, episode: Episode) -> None:
    def stall(receipt: Receipt) -> None:
        if receipt.step == 1:
            threading.Event().wait(10.0)

    strict.on_step = stall
    with strict.training() as trainer:
        strict.send(*pairs(episode, "a", "b"))
        strict.await_steps(2, trainer)
        strict.send(*pairs(episode, "c"))
        strict.await_steps(1, trainer)
    assert strict.verdict() | {"trained": 6, "dropped": {}} == strict.verdict()


@ON_BROKERS
def test_case_14_a_rank_that_is_at_a_long_step_keeps_its_membership(
    strict: Life, episode: Episode, caplog: pytest.LogCaptureFixture
) -> None:
    sent = strict.send(*pairs(episode, "a", "b", "c"))
    reader = Reader(strict.log, {strict.topic: 1.0}, group=f"g-{uuid.uuid4()}", progress=Progress(), instance="rank-0")
    with caplog.at_level(logging.INFO, "rollstream.consumers.reader"), reader:
        taken = [reader.take(SECONDS)]
        threading.Event().wait(10.0)
        taken += [reader.take(SECONDS) for _ in sent[1:]]
        sent += strict.send(*pairs(episode, "d"))
        taken += [reader.take(SECONDS) for _ in range(2)]
    assert all(isinstance(item, Record) for item in taken), "nothing was taken away"
    assert Counter(item.position for item in taken if isinstance(item, Record)) == Counter(sent)
    assert sum(message.startswith("assigned") for message in caplog.messages) == 1


@pytest.mark.parametrize("backend", ["memory", "kafka"], indirect=True)
def test_partitions_are_added_while_it_runs(life: Life, episode: Episode) -> None:
    """Those of a group that was begun may lie in a new partition: it is one group all the same."""
    split = pairs(episode, "split")
    with life.training() as trainer:
        life.send(split[0], partition=0)
        life.send(*pairs(episode, "a"), partition=1)
        life.await_steps(1, trainer)
        life.log.grow(life.topic, 4)
        life.send(split[1], partition=3)
        life.await_steps(1, trainer)
        life.send(*pairs(episode, "b"), partition=2)
        life.await_steps(1, trainer)
    latest = life.checkpoints.latest()
    assert latest is not None
    assert {p.number: cursor.low for p, cursor in latest.cursors.items()} == {0: 1, 1: 2, 2: 2, 3: 1}
    assert life.verdict() | {"trained": 6, "pending": 0, "dropped": {}} == life.verdict()


def test_an_expired_cursor_ends_it_with_what_is_gone(memory: Life, episode: Episode) -> None:
    memory.send(*pairs(episode, "a", "b", "c"), partition=0)
    memory.trainer(groups_per_step=1, steps=1).run(memory.model)
    log = memory.log
    assert isinstance(log, MemoryLog)
    log.expire(Partition(memory.topic, 0), 5)
    with pytest.raises(OffsetExpired, match=r"maze\[0\]: offset 2 is gone, the log now starts at 5; 3 records"):
        memory.trainer(groups_per_step=1, steps=2).run(memory.model)
    latest = memory.checkpoints.latest()
    assert latest is not None
    assert latest.step == 1, "nothing was passed over"


def test_an_idle_trainer_learns_that_it_is_fenced(
    life: Life, episode: Episode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither could fill a step otherwise: each would have a half of the group."""
    monkeypatch.setattr("rollstream.consumers.watch.EVERY", 0.2)
    first = life.trainer(groups_per_step=1)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(first.run, life.model)
        life.await_steps(1, future)
        life.send(*pairs(episode, "a")[:1], partition=0)
        life.trainer(steps=0).run(life.model)
        with pytest.raises(Fenced, match="is fenced, nothing that it does from here on is published") as caught:
            future.result(SECONDS)
    assert caught.value.incarnation == json.loads(life.store.get(f"{RUN}/latest.json").data)["incarnation"]
    life.send(*pairs(episode, "a")[1:], partition=1)
    life.trainer(groups_per_step=1, steps=1).run(life.model)
    assert life.verdict() | {"trained": 2, "pending": 0} == life.verdict()


# ---------------------------------------------------------------------- dead letters


def newer_schema() -> str:
    """Trajectory, with a field more than this release knows."""
    schema = json.loads(next(shipped.text for shipped in record_schemas() if shipped.name == "trajectory.v1"))
    schema["fields"].append({"name": "mood", "type": "string", "default": ""})
    return json.dumps(schema)


def send_newer(life: Life, *trajectories: Trajectory) -> None:
    """As a release would that knows this schema, and did not publish it."""
    avro: Any = fastavro
    text = newer_schema()
    with life.log.writer() as writer:
        for trajectory in trajectories:
            frame = BytesIO(b"\0" + schema_id(text).to_bytes(4))
            frame.seek(0, SEEK_END)
            avro.schemaless_writer(frame, avro.parse_schema(json.loads(text)), to_body(trajectory) | {"mood": "glad"})
            key, headers = trajectory.group_id.encode(), trajectory_headers(trajectory)
            writer.append(life.topic, frame.getvalue(), key=key, headers=headers).result(SECONDS)


def publish_newer(life: Life) -> None:
    text = newer_schema()
    with life.log.writer() as writer:
        writer.append(life.names.schemas, text.encode(), key=str(schema_id(text)).encode()).result(SECONDS)


def replay(life: Life, **options: bool) -> list[bool]:
    """Which of the dead letters went back to their topic."""
    what = Replay(
        log=life.log,
        names=life.names,
        schemas=open_schemas(life.log, life.names),
        claims=Claims(lambda: life.store, life.names),
        **options,
    )
    return [outcome.position is not None for outcome in what.append(read_letters(life.log, life.names))]


def test_replay_after_a_fix_trains_once(life: Life, episode: Episode) -> None:
    """A group of poison alone is settled, and its slot is free. Its schema comes later, and so does its step."""
    send_newer(life, *pairs(episode, "new"))
    life.send(*pairs(episode, "old"))
    life.train()
    assert life.verdict() | {"trained": 2, "dropped": {"unknown-schema": 2}} == life.verdict()
    assert replay(life) == [False, False], "nothing is mended yet"

    publish_newer(life)
    assert replay(life) == [True, True]
    assert replay(life) == [False, False], "they are remembered"
    life.train()
    assert life.verdict() | {"trained": 4, "dropped": {"unknown-schema": 2}, "pending": 0} == life.verdict()

    assert replay(life, again=True) == [True, True]
    life.train()
    dropped = {"unknown-schema": 2, "duplicate": 2}
    assert life.verdict() | {"trained": 4, "dropped": dropped, "pending": 0} == life.verdict()


def test_letters_that_come_back_too_early_can_be_replayed_again(memory: Life, episode: Episode) -> None:
    """A trainer that runs remembers for a while that nobody knew the schema: these are letters of their own then."""
    with memory.training(group_timeout=0.2) as trainer:
        send_newer(memory, *pairs(episode, "new"))
        memory.await_steps(1, trainer)
        publish_newer(memory)
        assert replay(memory) == [True, True]
        memory.send(*pairs(episode, "old"))
        memory.await_steps(1, trainer)
    memory.train()
    if memory.verdict()["trained"] == 2:
        assert replay(memory) == [False, False, True, True]
        memory.train()
    assert memory.verdict() | {"trained": 4, "pending": 0} == memory.verdict()


def test_a_task_that_nobody_could_serve_comes_back_to_the_tasks(memory: Life) -> None:
    topic = Partition(memory.names.tasks, 0)
    task = Task(task_id="run.maze.00000001", environment="maze", group_size=2, seed=1)
    with memory.log.writer() as writer:
        at = writer.append(topic.topic, encode(task), key=task.task_id.encode(), partition=0).result(SECONDS)
    (record,) = scan(memory.log, {topic: at.offset})
    letters = DeadLetters(memory.log, memory.names)
    letters.send(record, reason="unknown-topic", error="there is no such topic")
    letters.close()
    assert replay(memory) == [True]
    tasks = scan(memory.log, memory.log.partitions(topic.topic))
    assert [decode_as(Task, r.value or b"").task_id for r in tasks] == [task.task_id] * 2
