"""The rollout worker: exactly one record a sample, nothing committed before it, one bad thing stays one bad thing."""

import asyncio
import math
import struct
import threading
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rollstream.infra.checkpoints import Checkpoints, manifest_digest
from rollstream.infra.claims import Claims, read_trajectory
from rollstream.infra.deadletters import OFFSET, REASON
from rollstream.infra.kafka import KafkaLog
from rollstream.infra.log import Log, LogError, Record, UnknownTopic
from rollstream.infra.memory import MemoryLog
from rollstream.infra.store import MemoryStore, StoreError
from rollstream.infra.topics import Names, apply, declared, plan
from rollstream.producers import Limits, PolicyFollower, Worker, WorkerSettings, learning
from rollstream.producers import worker as worker_module
from rollstream.producers.engine import Completion, Engine, EngineLost
from rollstream.producers.engines.backend import Delta, Request
from rollstream.producers.engines.threaded import ThreadedEngine
from rollstream.producers.environment import Action, Message, Outcome
from rollstream.producers.intake import AT_ONCE
from rollstream.schemas import (
    Command,
    Control,
    PolicySpan,
    PolicyUpdate,
    Role,
    Sampling,
    SchemaAway,
    Schemas,
    Status,
    Task,
    Trajectory,
    decode_as,
    encode,
    parse_headers,
    record_schemas,
)

PATIENCE = 60.0
SAYS = (Message(role=Role.USER, content="well?"),)


class Letters:
    """A renderer: one token for whatever is said."""

    fingerprint = "letters"

    def opening(self, messages: Sequence[Message]) -> list[int]:
        return [1, 2]

    def extend(self, sampled_ended: bool, messages: Sequence[Message]) -> list[int]:
        return [2]

    def decode(self, ids: Sequence[int]) -> str:
        return "x" * len(ids)


class Parrot:
    """An engine that always says the same, with its version; it takes any weights."""

    model, context = "parrot", 64

    def __init__(self) -> None:
        self.version = 1

    async def generate(self, prompt: Sequence[int] | NDArray[np.int32], sampling: Sampling) -> Completion:
        await asyncio.sleep(0)
        return Completion(
            tokens=np.array([3], np.int32),
            logprobs=np.array([-0.5], np.float32),
            spans=(PolicySpan(version=self.version, count=1),),
            finish_reason="stop",
        )

    async def load(self, weights: Path, version: int) -> None:
        self.version = version

    async def close(self) -> None:
        """Nothing to release."""


class Torn:
    """A backend that samples nothing, and whose swap fails."""

    context, vocabulary = 64, 8

    def __init__(self) -> None:
        self.requests: set[int] = set()
        self.reading = threading.Event()

    def add(self, request: Request) -> None:
        self.requests.add(request.key)

    def abort(self, key: int) -> None:
        self.requests.discard(key)

    def step(self) -> list[Delta]:
        # Short waits: other requests come in meanwhile.
        self.reading.wait(0.01)
        return []

    def read(self, directory: Path) -> Mapping[str, Any]:
        self.reading.set()
        return {}

    def swap(self, weights: Mapping[str, Any]) -> None:
        raise MemoryError("no room")

    def close(self) -> None:
        """Nothing to release."""


@dataclass
class Game:
    """Two turns; before the first it waits for its gate, and it fails as it is told."""

    name: str = "game"
    version: str = "1"
    open: asyncio.Event | None = None
    reward: float = 1.0
    broken: bool = False
    words: str = "well?"
    turns: int = 0

    async def reset(self, payload: Mapping[str, str], seed: int) -> Outcome:
        if self.open is not None:
            await self.open.wait()
        return Outcome(messages=(Message(role=Role.USER, content=self.words),))

    async def step(self, action: Action) -> Outcome:
        self.turns += 1
        if self.broken:
            raise RuntimeError("the board fell over")
        return Outcome(messages=SAYS, done=self.turns == 2, reward=self.reward)

    async def close(self) -> None:
        """Nothing to release."""


@dataclass
class Desk:
    """A log with the topics of a namespace, and workers on it."""

    log: Log
    scratch: Path
    names: Names = field(default_factory=lambda: Names(f"test-{uuid.uuid4().hex[:8]}"))
    engine: Parrot = field(default_factory=Parrot)
    checkpoints: Checkpoints = field(default_factory=lambda: Checkpoints(MemoryStore(), "run"))
    followers: list[PolicyFollower] = field(default_factory=list[PolicyFollower])

    def __post_init__(self) -> None:
        topics = declared(self.names.namespace, {"game": 2, "still": 1, "nowhere": 1}, partitions=2)
        apply(self.log, plan(self.log, [t for t in topics if not t.name.endswith("nowhere")]))

    def write(self, topic: str, values: Iterable[tuple[bytes, bytes | None]], partition: int | None = None) -> None:
        with self.log.writer() as writer:
            for future in [writer.append(topic, value, key=key, partition=partition) for key, value in values]:
                future.result(PATIENCE)

    def ask(self, *tasks: Task, partition: int | None = None) -> None:
        self.write(self.names.tasks, [(t.task_id.encode(), encode(t)) for t in tasks], partition)

    def order(self, command: Command, target: str = "") -> None:
        self.write(self.names.control, [(b"order", encode(Control(command=command, target=target)))])

    def publish(self, version: int) -> None:
        """A policy, announced."""
        self.checkpoints.claim("one")
        files: Mapping[str, Path | bytes] = {"weights/model.safetensors": b"weights"}
        manifest = self.checkpoints.publish(version, files, parent=None, incarnation="one", step=version)
        update = PolicyUpdate(
            run="run",
            version=version,
            incarnation="one",
            step=version,
            manifest=self.checkpoints.manifest_key(version),
            digest=manifest_digest(manifest),
            published_ms=1,
        )
        self.write(self.names.policy, [(b"run", encode(update))])

    def worker(
        self,
        settings: WorkerSettings | None = None,
        engine: Engine | None = None,
        claims: Claims | None = None,
        schemas: Schemas | None = None,
        **games: Callable[[], Game],
    ) -> Worker:
        scratch = self.scratch / str(len(self.followers))
        follower = PolicyFollower(self.log, self.names, "run", self.checkpoints, scratch)
        self.followers.append(follower)
        settings = settings or WorkerSettings(concurrency=8)
        return Worker(
            self.log,
            self.names,
            games or {"game": Game},
            engine or self.engine,
            Letters(),
            follower,
            settings,
            schemas,
            claims,
        )

    async def read(self, topic: str, count: int) -> list[Record]:
        """At least `count` records of a topic, from its start."""
        records: list[Record] = []
        with self.log.read(dict.fromkeys(self.log.partitions(topic), 0)) as consumer:
            async with asyncio.timeout(PATIENCE):
                while len(records) < count:
                    records += await asyncio.to_thread(consumer.poll, 1000, 0.1)
        return records

    async def played(self, count: int, environment: str = "game") -> list[Trajectory]:
        records = await self.read(self.names.trajectories(environment), count)
        return [decode_as(Trajectory, record.value or b"") for record in records]

    async def buried(self, count: int) -> dict[int, str]:
        """Reasons of dead tasks by offset."""
        records = await self.read(self.names.dead_letter, count)
        return {int(r.headers[OFFSET]): r.headers[REASON].decode() for r in records}

    def committed(self) -> dict[int, int]:
        partitions = self.log.partitions(self.names.tasks)
        return {p.number: at for p, at in self.log.committed(f"{self.names.namespace}.workers", partitions).items()}

    def ends(self) -> dict[int, int]:
        bounds = self.log.bounds(self.log.partitions(self.names.tasks))
        return {p.number: end for p, (_, end) in bounds.items()}


@asynccontextmanager
async def working(worker: Worker) -> AsyncGenerator["asyncio.Task[None]"]:
    """A worker at work; stopped at the end, and it must come to its end by itself."""
    running = asyncio.create_task(worker.run())
    try:
        yield running
        worker.stop()
        async with asyncio.timeout(PATIENCE):
            await running
    finally:
        running.cancel()
        await asyncio.wait([running])


async def until(done: Callable[[], bool], pause: float = 0.05) -> None:
    async with asyncio.timeout(PATIENCE):
        while not done():  # noqa: ASYNC110 - nothing of this loop tells of it
            await asyncio.sleep(pause)


def task(name: str, size: int = 4, environment: str = "game", attempt: int = 0, trace: str | None = None) -> Task:
    return Task(task_id=name, environment=environment, seed=1, group_size=size, attempt=attempt, traceparent=trace)


def ids(*tasks: str, size: int = 4) -> list[str]:
    return sorted(f"{name}/{index}/0" for name in tasks for index in range(size))


@pytest.fixture(params=("memory", "tansu", "kafka"))
def desk(request: pytest.FixtureRequest, tmp_path: Path) -> Desk:
    log = MemoryLog() if request.param == "memory" else KafkaLog(request.getfixturevalue(f"{request.param}_address"))
    return Desk(log, tmp_path)


@pytest.fixture
def quiet(tmp_path: Path) -> Desk:
    """In memory only."""
    return Desk(MemoryLog(), tmp_path)


async def test_one_record_a_sample_and_every_task_is_committed(desk: Desk) -> None:
    desk.ask(task("a"), task("b"), partition=0)
    desk.write(desk.names.tasks, [(b"poison", b"\x01junk"), (b"tombstone", None), (b"empty", b"")], partition=0)
    desk.ask(task("lost", environment="nowhere"), task("c", environment="still"), task("a"), task("d"), partition=0)
    desk.ask(task("e"), partition=1)
    async with working(desk.worker()):
        played = await desk.played(16)
        assert sorted(t.trajectory_id for t in await desk.played(4, "still")) == ids("c")
        assert await desk.buried(3) == {2: "bad-framing", 4: "bad-framing", 5: "unknown-topic"}
        await until(lambda: desk.committed() == desk.ends())
    seen = Counter(t.trajectory_id for t in await desk.played(16))
    assert sorted(seen) == ids("a", "b", "d", "e")
    assert sum(seen.values()) - 16 in (0, 4), "the task that was dispatched twice may be played twice, no other"
    assert {t.status for t in played} == {Status.COMPLETED}
    assert all(t.reward == 1.0 and t.versions().tolist() == [1, 1] for t in played)


async def test_what_is_not_finished_is_given_back_and_played_by_the_next(desk: Desk) -> None:
    gate = asyncio.Event()
    desk.ask(task("first"), task("stuck", environment="still"), task("last"), partition=0)
    async with working(desk.worker(game=Game, still=lambda: Game(name="still", open=gate))):
        await desk.played(8)
    assert desk.committed() == {0: 1}, "not beyond the task without its records, though the one behind it is finished"
    async with working(desk.worker(game=Game, still=lambda: Game(name="still"))):
        stuck = await desk.played(4, "still")
        await desk.played(12)
    assert sorted(t.trajectory_id for t in stuck) == ids("stuck")
    assert desk.committed() == {0: 3}
    seen = Counter(t.trajectory_id for t in await desk.played(12))
    assert seen == Counter(ids("first")) + Counter(ids("last")) + Counter(ids("last")), (
        "the ids tell it is a repetition"
    )


async def test_a_second_worker_takes_its_share_and_no_task_is_lost(desk: Desk) -> None:
    gate = asyncio.Event()
    began: list[str] = []

    def waits(who: str) -> Callable[[], Game]:
        def make() -> Game:
            began.append(who)
            return Game(open=gate)

        return make

    for partition in (0, 1):
        desk.ask(*(task(f"{partition}-{n}", size=2) for n in range(3)), partition=partition)
    settings = WorkerSettings(concurrency=16)
    async with asyncio.timeout(PATIENCE), working(desk.worker(settings, game=waits("old"))):
        await until(lambda: len(began) == 12)
        async with working(desk.worker(settings, game=waits("new"))):
            await until(lambda: len(began) == 18)
            gate.set()
            await until(lambda: desk.committed() == {0: 3, 1: 3})
    assert Counter(began) == {"old": 12, "new": 6}, "the tasks of one partition moved"
    seen = Counter(t.trajectory_id for t in await desk.played(12))
    assert sorted(seen) == ids(*(f"{p}-{n}" for p in (0, 1) for n in range(3)), size=2)


async def test_three_of_eight_samples_fail_each_in_its_way(quiet: Desk) -> None:
    games = iter([Game(broken=True), Game(open=asyncio.Event()), Game(reward=math.nan), *(Game() for _ in range(5))])
    quiet.ask(task("group", size=8), task("next", size=1))
    settings = WorkerSettings(concurrency=8, limits=Limits(init_timeout=0.05))
    async with working(quiet.worker(settings, game=lambda: next(games, Game()))):
        played = [t for t in await quiet.played(9) if t.group_id == "group"]
    causes = {t.sample_index: t.cause for t in played if t.status is Status.FAILED}
    assert causes == {0: "step-error", 1: "init-timeout", 2: "bad-reward"}
    assert Counter(t.status for t in played) == {Status.FAILED: 3, Status.COMPLETED: 5}


async def test_an_environment_that_cannot_be_made_fails_its_samples_only(quiet: Desk) -> None:
    def broken() -> Game:
        raise KeyError("no such board")

    quiet.ask(task("here"), task("there", environment="still"))
    async with working(quiet.worker(game=broken)):
        here, there = await quiet.played(4), await quiet.played(4, "still")
    assert {(t.status, t.cause) for t in here + there} == {(Status.FAILED, "init-error")}
    assert "no such board" in here[0].metadata["error"]
    assert "no environment 'still' here" in there[0].metadata["error"]


async def test_a_record_over_the_limit_becomes_a_failed_one_and_its_group_is_complete(quiet: Desk) -> None:
    games = iter([Game(words="w" * 5000), Game(), Game()])
    quiet.log.alter(quiet.names.trajectories("game"), {"max.message.bytes": "4000"})
    quiet.ask(task("group", size=3))
    async with working(quiet.worker(game=lambda: next(games))):
        played = {t.sample_index: t for t in await quiet.played(3)}
    assert [played[index].cause for index in range(3)] == ["oversize", None, None]
    assert played[0].status is Status.FAILED
    assert not played[0].tokens.size


async def test_a_record_over_the_limit_travels_as_a_claim_where_there_is_a_store(desk: Desk) -> None:
    store = MemoryStore()
    claims = Claims(lambda: store, desk.names)
    games = iter([Game(words="w" * 2_000_000), Game(), Game()])
    desk.ask(task("group", size=3), partition=0)
    async with working(desk.worker(claims=claims, game=lambda: next(games))):
        records = await desk.read(desk.names.trajectories("game"), 3)
        await until(lambda: desk.committed().get(0) == 1)
    played = sorted((read_trajectory(r.value or b"", claims) for r in records), key=lambda t: t.sample_index)
    assert [len(t.turns[0].text or "") for t in played] == [2_000_000, 5, 5]
    assert {t.status for t in played} == {Status.COMPLETED}
    assert len(store.list("")) == 1


async def test_a_store_that_refuses_for_good_ends_the_worker_and_gives_its_tasks_back(quiet: Desk) -> None:
    class Closed(MemoryStore):
        def put(self, key: str, data: bytes, *, if_none_match: bool = False, if_match: str | None = None) -> str:
            raise StoreError("wrong credentials")

    quiet.ask(task("group", size=2))
    settings = WorkerSettings(concurrency=8, spill=quiet.scratch / "spill")
    worker = quiet.worker(settings, claims=Claims(Closed, quiet.names), game=lambda: Game(words="w" * 2_000_000))
    with pytest.raises(StoreError, match="wrong credentials"):
        async with asyncio.timeout(PATIENCE):
            await worker.run()
    assert set(quiet.committed().values()) <= {0}
    assert len(list((quiet.scratch / "spill").rglob("*.record"))) == 2, "what was finished waits for the next worker"


async def test_tasks_that_no_worker_can_serve_are_dead_letters(quiet: Desk) -> None:
    quiet.ask(task("huge", size=2**31 - 1), task("shouting", environment="LOUD!"), task("good"), partition=1)
    async with working(quiet.worker()):
        assert len(await quiet.played(4)) == 4
        assert await quiet.buried(2) == {0: "bad-group", 1: "bad-environment"}
    assert quiet.committed() == {1: 3}


async def test_a_broken_trace_costs_no_trajectory(quiet: Desk) -> None:
    good = f"00-{'a' * 32}-{'b' * 16}-01"
    quiet.ask(task("traced", size=1, trace=good), task("untraced", size=1, trace="nonsense"))
    async with working(quiet.worker()):
        records = await quiet.read(quiet.names.trajectories("game"), 2)
    traces = {headers.group_id: headers.traceparent for headers in (parse_headers(r.headers) for r in records)}
    assert traces == {"traced": good, "untraced": None}
    assert {t.status for t in await quiet.played(2)} == {Status.COMPLETED}


async def test_the_same_task_again_at_a_higher_attempt_is_another_one(quiet: Desk) -> None:
    gate = asyncio.Event()
    quiet.ask(task("again", size=1), task("again", size=1, attempt=1), task("again", size=1), partition=0)
    async with asyncio.timeout(PATIENCE), working(quiet.worker(game=lambda: Game(open=gate))) as running:
        gate.set()
        played = await quiet.played(2)
        while quiet.committed() != {0: 3}:
            assert not running.done()
            await asyncio.sleep(0.05)
    assert {"again/0/0", "again/0/1"} == {t.trajectory_id for t in played}


async def test_cancel_aborts_the_group_whether_it_has_begun_or_not(quiet: Desk) -> None:
    gate, begun = asyncio.Event(), asyncio.Event()

    def make() -> Game:
        begun.set()
        return Game(open=gate)

    quiet.ask(task("now", size=2), task("later", size=2), task("other", size=2), partition=0)
    async with working(quiet.worker(WorkerSettings(concurrency=2), game=make)):
        await begun.wait()
        quiet.order(Command.CANCEL, "later")
        quiet.order(Command.CANCEL, "now")
        quiet.write(quiet.names.control, [(b"order", b"\x01junk")])
        cancelled = await quiet.played(4)
        gate.set()
        played = await quiet.played(6)
    assert {(t.group_id, t.status, t.cause) for t in cancelled} == {
        ("now", Status.ABORTED, "cancelled"),
        ("later", Status.ABORTED, "cancelled"),
    }
    assert {t.status for t in played if t.group_id == "other"} == {Status.COMPLETED}


async def test_a_paused_environment_waits_without_the_places_of_others(quiet: Desk) -> None:
    gate = asyncio.Event()
    worker = quiet.worker(WorkerSettings(concurrency=2), game=lambda: Game(open=gate), still=lambda: Game(name="still"))
    async with working(worker):
        await give(quiet, Command.PAUSE, "still")
        quiet.ask(*(task(f"s{n}", environment="still") for n in range(5)), task("g"), partition=1)
        gate.set()
        assert len(await quiet.played(5)) == 5
        assert not await quiet.read(quiet.names.trajectories("still"), 0)
        quiet.order(Command.RESUME)
        assert len(await quiet.played(20, "still")) == 20


async def test_everything_paused_takes_no_more_tasks_and_plays_on(quiet: Desk) -> None:
    gate = asyncio.Event()
    quiet.ask(task("before"), partition=0)
    async with working(quiet.worker(game=lambda: Game(open=gate))):
        await give(quiet, Command.PAUSE)
        quiet.ask(task("after"), partition=0)
        gate.set()
        assert {t.group_id for t in await quiet.played(5)} == {"sign", "before"}
        await asyncio.sleep(0.3)
        assert len(await quiet.played(5)) == 5
        quiet.order(Command.RESUME)
        assert len(await quiet.played(9)) == 9


async def give(desk: Desk, command: Command, target: str = "") -> None:
    """Give an order and wait until it is in force: until a later one is. Its game must wait at a gate."""
    desk.ask(task("sign", size=1), partition=0)
    await until(lambda: desk.committed().get(0) is not None)
    desk.order(command, target)
    desk.order(Command.CANCEL, "sign")
    assert [(t.group_id, t.cause) for t in await desk.played(1)] == [("sign", "cancelled")]


async def test_no_task_begins_while_the_policy_lags_too_far(quiet: Desk) -> None:
    worker = quiet.worker(WorkerSettings(concurrency=8, max_lag=1))
    follower = quiet.followers[0]
    async with working(worker):
        await follower.following.wait()
        follower.announced = 3
        quiet.ask(task("waits"), partition=0)
        await asyncio.sleep(0.5)
        assert not await quiet.read(quiet.names.trajectories("game"), 0)
        quiet.engine.version = 2
        quiet.order(Command.RESUME)
        assert len(await quiet.played(4)) == 4


async def test_an_environment_that_stands_still_leaves_room_for_the_others(quiet: Desk) -> None:
    gate = asyncio.Event()
    quiet.ask(*(task(f"s{n}", size=8, environment="still") for n in range(100)), task("g", size=8), partition=0)
    worker = quiet.worker(WorkerSettings(concurrency=4), game=Game, still=lambda: Game(name="still", open=gate))
    async with working(worker):
        assert len(await quiet.played(8)) == 8
        assert not await quiet.read(quiet.names.trajectories("still"), 0)


async def test_no_more_tasks_are_read_ahead_than_its_backlog_while_their_schemas_are_sought(
    quiet: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registry that is away for hours must not make a worker read all tasks there are into its memory."""

    class Shelf:
        away = True

        def __init__(self) -> None:
            self.asked = Counter[int]()

        def fetch(self, schema_id: int) -> str:
            self.asked[schema_id] += 1
            if self.away:
                raise SchemaAway("the registry is away")
            return next(shipped.text for shipped in record_schemas() if shipped.name == "task.v1")

    monkeypatch.setattr(learning, "RETRY", 0.05)
    monkeypatch.setattr(worker_module, "BACKLOG", 8)
    shelf, tasks = Shelf(), [task(f"t{n}", size=1) for n in range(200)]
    foreign = [struct.pack(">BI", 0, 1000 + n) + encode(t)[5:] for n, t in enumerate(tasks)]
    quiet.write(quiet.names.tasks, [(b"key", value) for value in foreign])
    async with working(quiet.worker(schemas=Schemas(shelf))):
        await until(lambda: max(shelf.asked.values(), default=0) >= 20)
        assert len(shelf.asked) <= 8 + AT_ONCE
        shelf.away = False
        assert len({t.trajectory_id for t in await quiet.played(200)}) == 200


async def test_a_cancelled_worker_ends_and_commits_nothing_unfinished(quiet: Desk) -> None:
    began = asyncio.Event()

    def make() -> Game:
        began.set()
        return Game(open=asyncio.Event())

    quiet.ask(task("a"), partition=0)
    running = asyncio.create_task(quiet.worker(game=make).run())
    await began.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert quiet.committed().get(0, 0) == 0


async def test_a_dead_letter_that_cannot_be_written_ends_the_worker(tmp_path: Path) -> None:
    desk = Desk(MemoryLog(), tmp_path)
    desk.log.alter(desk.names.dead_letter, {"max.message.bytes": "10"})
    desk.write(desk.names.tasks, [(b"poison", b"\x01junk")], partition=0)
    with pytest.raises(LogError):
        async with asyncio.timeout(PATIENCE):
            await desk.worker().run()
    assert desk.committed().get(0, 0) == 0


async def test_topics_that_are_not_there_end_the_worker_by_name(tmp_path: Path) -> None:
    log, names = MemoryLog(), Names("empty")
    follower = PolicyFollower(log, names, "run", Checkpoints(MemoryStore(), "run"), tmp_path)
    worker = Worker(log, names, {"game": Game}, Parrot(), Letters(), follower, WorkerSettings())
    with pytest.raises(UnknownTopic, match="empty"):
        await worker.run()


async def test_a_stage_runs_no_more_calls_than_its_pool_has_places(quiet: Desk) -> None:
    busy, most = 0, 0

    class Counting(Game):
        async def reset(self, payload: Mapping[str, str], seed: int) -> Outcome:
            nonlocal busy, most
            busy += 1
            most = max(most, busy)
            # Others would come in here, if the pool let them.
            await asyncio.sleep(0)
            busy -= 1
            return await super().reset(payload, seed)

    quiet.ask(task("group", size=12))
    settings = WorkerSettings(concurrency=12, pools={"init": 3, "step": 0})
    async with working(quiet.worker(settings, game=Counting)):
        played = await quiet.played(12)
    assert {t.status for t in played} == {Status.COMPLETED}
    assert most == 3


async def test_a_worker_whose_swap_fails_ends_and_the_other_plays_all_its_tasks(quiet: Desk) -> None:
    for partition in (0, 1):
        quiet.ask(*(task(f"{partition}-{n}") for n in range(3)), partition=partition)
    backend = Torn()
    torn = ThreadedEngine(lambda: backend, model="torn", version=1)
    running = asyncio.create_task(quiet.worker(WorkerSettings(concurrency=16), torn).run())
    await until(lambda: len(backend.requests) == 16)
    async with working(quiet.worker()):
        quiet.publish(2)
        with pytest.raises(EngineLost, match=r"swapped weights: MemoryError\('no room'\)"):
            async with asyncio.timeout(PATIENCE):
                await running
        await until(lambda: quiet.committed() == quiet.ends())
    await torn.close()
    played = await quiet.played(24)
    assert sorted(t.trajectory_id for t in played) == ids(*(f"{p}-{n}" for p in (0, 1) for n in range(3)))
    assert {(t.model, t.status) for t in played} == {("parrot", Status.COMPLETED)}


async def test_a_lost_engine_gives_back_what_is_not_finished_and_nothing_else(quiet: Desk) -> None:
    class Failing(Parrot):
        lost = False

        async def generate(self, prompt: Sequence[int] | NDArray[np.int32], sampling: Sampling) -> Completion:
            if self.lost:
                raise EngineLost("the engine failed")
            return await super().generate(prompt, sampling)

    failing = Failing()
    quiet.ask(task("before"), partition=0)
    running = asyncio.create_task(quiet.worker(engine=failing).run())
    await until(lambda: quiet.committed() == {0: 1})
    failing.lost = True
    quiet.ask(task("after"), task("later"), partition=0)
    with pytest.raises(EngineLost, match="the engine failed"):
        async with asyncio.timeout(PATIENCE):
            await running
    assert quiet.committed() == {0: 1}
    assert [t.group_id for t in await quiet.played(4)] == ["before"] * 4
    assert not await quiet.read(quiet.names.dead_letter, 0)
    async with working(quiet.worker()):
        await until(lambda: quiet.committed() == {0: 3})
    played = await quiet.played(12)
    assert sorted(t.trajectory_id for t in played) == ids("after", "before", "later")
    assert {t.status for t in played} == {Status.COMPLETED}
