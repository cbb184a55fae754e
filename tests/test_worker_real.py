"""The worker with real parts: a model that samples, and processes that are killed."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollstream.app.wiring import open_log
from rollstream.infra.checkpoints import Checkpoints, Manifest, manifest_digest
from rollstream.infra.config import Config
from rollstream.infra.log import Log
from rollstream.infra.memory import MemoryLog
from rollstream.infra.models import tiny_llama
from rollstream.infra.s3 import S3Store
from rollstream.infra.scan import scan
from rollstream.infra.stack import LocalStack
from rollstream.infra.store import MemoryStore
from rollstream.infra.tokenizers import word_tokenizer
from rollstream.infra.topics import Names, apply, declared, plan
from rollstream.producers import (
    Action,
    Message,
    Outcome,
    PolicyFollower,
    Renderer,
    Worker,
    WorkerSettings,
    open_engine,
)
from rollstream.schemas import PolicyUpdate, Role, Sampling, Status, Task, Trajectory, decode_as, encode

PATIENCE = 120.0
WORDS = ("look", "left", "right")


class Walk:
    """Three turns."""

    name, version = "walk", "1"

    def __init__(self) -> None:
        self._turns = 0

    async def reset(self, payload: Mapping[str, str], seed: int) -> Outcome:
        return Outcome(messages=(Message(role=Role.USER, content="look"),))

    async def step(self, action: Action) -> Outcome:
        self._turns += 1
        return Outcome(
            messages=(Message(role=Role.USER, content="look"),),
            done=self._turns == 3,
            reward=float(action.text == "left"),
        )

    async def close(self) -> None:
        """Nothing to release."""


def make_model(directory: Path, seed: int) -> Path:
    tiny_llama(directory, vocabulary=len(WORDS), hidden=32, layers=1, heads=1, intermediate=32, context=32, seed=seed)
    word_tokenizer(WORDS).save_pretrained(directory)
    return directory


def publish(checkpoints: Checkpoints, version: int, model: Path) -> Manifest:
    files: dict[str, Path | bytes] = {f"weights/{path.name}": path for path in model.iterdir()}
    parent = version - 1 or None
    return checkpoints.publish(version, files, parent=parent, incarnation="one", step=version)


def ask(log: Log, names: Names, tasks: list[Task]) -> None:
    with log.writer() as writer:
        for task in tasks:
            writer.append(names.tasks, encode(task), key=task.task_id.encode()).result(PATIENCE)


def trajectories(log: Log, names: Names) -> list[Trajectory]:
    records = scan(log, log.partitions(names.trajectories("walk")))
    return [decode_as(Trajectory, record.value or b"") for record in records]


def walk(number: int, size: int = 4) -> Task:
    return Task(
        task_id=f"walk-{number}", environment="walk", seed=number, group_size=size, sampling=Sampling(max_tokens=1)
    )


async def played(log: Log, names: Names, count: int) -> list[Trajectory]:
    await until(lambda: len(trajectories(log, names)) >= count)
    return trajectories(log, names)


async def test_a_model_plays_and_takes_a_new_policy_on_the_way(tmp_path: Path) -> None:
    log, names = MemoryLog(), Names("real")
    apply(log, plan(log, declared("real", {"walk": 1})))
    checkpoints = Checkpoints(MemoryStore(), "run")
    checkpoints.claim("one")
    publish(checkpoints, 1, make_model(tmp_path / "one", seed=1))
    follower = PolicyFollower(log, names, "run", checkpoints, tmp_path / "scratch")
    first = await follower.first()
    engine = await asyncio.to_thread(open_engine, "transformers", first.directory, version=1, seed=0)
    renderer = Renderer.open(first.directory)
    worker = Worker(log, names, {"walk": Walk}, engine, renderer, follower, WorkerSettings(concurrency=8))
    running = asyncio.create_task(worker.run())
    try:
        ask(log, names, [walk(number) for number in range(4)])
        before = await played(log, names, 16)
        newer = publish(checkpoints, 2, make_model(tmp_path / "two", seed=2))
        update = PolicyUpdate(
            run="run",
            version=2,
            incarnation="one",
            step=2,
            manifest=checkpoints.manifest_key(2),
            digest=manifest_digest(newer),
            published_ms=1,
        )
        with log.writer() as writer:
            writer.append(names.policy, encode(update), key=b"run").result(PATIENCE)
        await until(lambda: engine.version == 2)
        ask(log, names, [walk(number) for number in range(4, 8)])
        after = (await played(log, names, 32))[16:]
    finally:
        worker.stop()
        await asyncio.wait([running])
        await engine.close()
    running.result()
    for found, version in ((before, 1), (after, 2)):
        assert {t.status for t in found} == {Status.COMPLETED}
        assert all(t.versions().tolist() == [version] * 3 for t in found)
        assert all(len(t.logprobs) == 3 and t.tokenizer == renderer.fingerprint for t in found)
    assert sorted({t.group_id for t in before}) == [f"walk-{number}" for number in range(4)]


async def until(done: Callable[[], bool], pause: float = 0.2) -> None:
    async with asyncio.timeout(PATIENCE):
        while not done():  # noqa: ASYNC110 - nothing of this loop tells of it
            await asyncio.sleep(pause)


@contextmanager
def process(config: Path, folder: Path) -> "Generator[subprocess.Popen[bytes]]":
    """`rollstream work`, ended at the end."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "rollstream.app.main", "-c", str(config), "work"]
    worker = subprocess.Popen(command, env=environment, cwd=folder)
    try:
        yield worker
    finally:
        worker.kill()
        worker.wait()


def configure(stack: LocalStack, folder: Path) -> Path:
    """A configuration with one environment, whose odd seeds wait until the folder has a file `go`."""
    (folder / "waits.py").write_text(
        textwrap.dedent(
            """
            import asyncio
            from pathlib import Path

            from rollstream.producers import Message, Outcome
            from rollstream.schemas import Role

            SAYS = (Message(role=Role.USER, content="look"),)


            class Walk:
                name, version = "walk", "1"

                async def reset(self, payload, seed):
                    while seed % 2 and not Path("go").exists():
                        await asyncio.sleep(0.05)
                    return Outcome(messages=SAYS)

                async def step(self, action):
                    return Outcome(messages=SAYS, done=True, reward=1.0)

                async def close(self):
                    pass


            def make(name):
                return Walk()
            """
        )
    )
    config = folder / "rollstream.toml"
    own = f"""
        [run]
        name = "run"
        namespace = "test-{uuid.uuid4().hex[:8]}"
        [sampling]
        max_tokens = 1
        [worker]
        concurrency = 64
        [environments.walk]
        adapter = "waits:make"
        """
    servers = stack.endpoints.to_toml().replace('group_protocol = "consumer"', 'group_protocol = "classic"')
    config.write_text(servers + f'\nprefix = "{uuid.uuid4().hex}/"\n' + textwrap.dedent(own))
    return config


@pytest.mark.parametrize("broker", ["tansu", pytest.param("kafka", marks=pytest.mark.slow)])
async def test_what_a_killed_worker_held_is_played_by_the_next(
    broker: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    path = configure(request.getfixturevalue(f"stack_{broker}"), tmp_path)
    config = Config.load(path)
    log, names = open_log(config), Names(config.run.namespace)
    apply(log, plan(log, declared(names.namespace, {"walk": 2}, partitions=2)))
    store = S3Store.from_config(config.store)
    checkpoints = Checkpoints(store, "run")
    checkpoints.claim("one")
    publish(checkpoints, 1, make_model(tmp_path / "model", seed=1))
    ask(log, names, [walk(number) for number in range(12)])
    with process(path, tmp_path) as first:
        await played(log, names, 24)
        first.send_signal(signal.SIGKILL)
        first.wait(PATIENCE)
    assert {t.seed % 2 for t in trajectories(log, names)} == {0}
    (tmp_path / "go").touch()
    partitions = log.partitions(names.tasks)
    ends = {p: end for p, (_, end) in log.bounds(partitions).items()}
    with process(path, tmp_path) as second:
        await until(lambda: log.committed(f"{names.namespace}.workers", partitions) == ends)
        second.terminate()
        assert second.wait(PATIENCE) == 0
    store.close()
    found = trajectories(log, names)
    assert sorted({t.trajectory_id for t in found}) == sorted(f"walk-{n}/{i}/0" for n in range(12) for i in range(4))
    assert {t.status for t in found} == {Status.COMPLETED}
    odd = [t.trajectory_id for t in found if t.seed % 2]
    assert len(odd) == len(set(odd)), "what nobody had finished is there once"
