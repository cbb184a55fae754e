"""A worker process whose broker freezes: what it finished waits on its disk, whatever becomes of the worker."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollstream.app.wiring import open_log
from rollstream.consumers import Admission, Assembler, Seen, StalenessGate
from rollstream.infra.checkpoints import Checkpoints
from rollstream.infra.claims import Claims
from rollstream.infra.config import Config
from rollstream.infra.deadletters import DeadLetters
from rollstream.infra.kafka import KafkaLog
from rollstream.infra.log import Record
from rollstream.infra.s3 import S3Store
from rollstream.infra.scan import scan
from rollstream.infra.stack import Broker, LocalStack, find_obstacle
from rollstream.infra.topics import Names, apply, declared, plan
from rollstream.schemas import Sampling, Schemas, Task, encode

pytestmark = pytest.mark.slow

PATIENCE = 120.0
GROUPS, SIZE = 8, 4
ADAPTER = """
    import asyncio
    from pathlib import Path

    import rollstream.producers.delivery as delivery
    from rollstream.producers import Message, Outcome
    from rollstream.schemas import Role

    # One record under way at a time, so that few episodes fill the memory.
    delivery.WINDOW, delivery.STILL = 1, 0.2
    SAYS = (Message(role=Role.USER, content="w1"),)


    class Walk:
        name, version = "walk", "1"

        async def reset(self, payload, seed):
            Path(f"begun-{id(self)}").touch()
            while not Path("go").exists():
                await asyncio.sleep(0.05)
            return Outcome(messages=SAYS)

        async def step(self, action):
            return Outcome(messages=SAYS, done=True, reward=1.0)

        async def close(self):
            pass


    def make(name):
        return Walk()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A run on a stack of its own, with tasks and a policy, and a folder where its workers live."""

    stack: LocalStack
    folder: Path
    config: Path
    log: KafkaLog
    names: Names
    store: S3Store

    def files(self, pattern: str) -> list[Path]:
        return list(self.folder.rglob(pattern))

    def records(self) -> list[Record]:
        return list(scan(self.log, self.log.partitions(self.names.trajectories("walk"))))

    def finished(self) -> bool:
        """Is every task committed?"""
        partitions = self.log.partitions(self.names.tasks)
        ends = {p: end for p, (_, end) in self.log.bounds(partitions).items() if end}
        return self.log.committed(f"{self.names.namespace}.workers", partitions) == ends

    @contextmanager
    def worker(self) -> "Generator[subprocess.Popen[bytes]]":
        """`rollstream work`, killed at the end."""
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "rollstream.app.main", "-c", str(self.config), "work"]
        worker = subprocess.Popen(command, env=environment, cwd=self.folder)
        try:
            yield worker
        finally:
            worker.kill()
            worker.wait()

    @asynccontextmanager
    async def frozen(self) -> AsyncGenerator[None]:
        """Meanwhile the broker answers nobody; its connections stay open."""
        broker = self.stack.pid("broker-1")
        os.kill(broker, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(broker, signal.SIGCONT)


@pytest.fixture(params=["tansu", "kafka"])
def site(request: pytest.FixtureRequest, tmp_path: Path, policy_dir: Path) -> Iterator[Site]:
    broker: Broker = request.param
    if obstacle := find_obstacle(broker):
        pytest.skip(obstacle)
    names = Names(f"test-{uuid.uuid4().hex[:8]}")
    own = f"""
        [run]
        name = "run"
        namespace = "{names.namespace}"
        [sampling]
        max_tokens = 1
        [environments.walk]
        adapter = "waits:make"
        """
    with LocalStack(tmp_path / "stack", broker=broker) as stack:
        config = tmp_path / "rollstream.toml"
        config.write_text(stack.endpoints.to_toml() + textwrap.dedent(own))
        (tmp_path / "waits.py").write_text(textwrap.dedent(ADAPTER))
        loaded = Config.load(config)
        with closing(open_log(loaded)) as log, closing(S3Store.from_config(loaded.store)) as store:
            apply(log, plan(log, declared(names.namespace, {"walk": 2}, partitions=2)))
            publish(store, policy_dir)
            yield Site(stack=stack, folder=tmp_path, config=config, log=log, names=names, store=store)


def publish(store: S3Store, policy: Path) -> None:
    checkpoints = Checkpoints(store, "run")
    checkpoints.claim("one")
    files: dict[str, Path | bytes] = {f"weights/{path.name}": path for path in policy.iterdir()}
    checkpoints.publish(1, files, parent=None, incarnation="one", step=1)


def ask(site: Site) -> None:
    with site.log.writer() as writer:
        for number in range(GROUPS):
            task = Task(
                task_id=f"walk-{number}",
                environment="walk",
                seed=number,
                group_size=SIZE,
                sampling=Sampling(max_tokens=1),
            )
            writer.append(site.names.tasks, encode(task), key=task.task_id.encode()).result(PATIENCE)


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await asyncio.to_thread(done):  # noqa: ASYNC110 - another process does it
            await asyncio.sleep(0.1)


def train(site: Site) -> Counter[str]:
    """What a trainer makes of the records: how many it would train, and why it drops the others."""
    fates: Counter[str] = Counter()
    seen = Seen(max_staleness=2)
    assembler = Assembler(seen, timeout=PATIENCE)
    with closing(DeadLetters(site.log, site.names)) as letters:
        claims = Claims(lambda: site.store, site.names)
        admission = Admission(gate=StalenessGate(2, 1), dead_letters=letters, schemas=Schemas(), claims=claims)
        for record in site.records():
            assembler.add(admission.admit(record))
    for group in assembler.take(1000):
        fates["trained"] += len(group.members)
        fates.update(drop.reason for drop in group.dropped)
    return fates


ALL = sorted(f"walk-{number}/{index}/0" for number in range(GROUPS) for index in range(SIZE))


@pytest.mark.parametrize("killed", [False, True])
async def test_what_was_finished_while_the_broker_was_away_is_trained_once(site: Site, killed: bool) -> None:
    ask(site)
    total = GROUPS * SIZE
    with site.worker() as worker:
        await until(lambda: len(site.files("begun-*")) == total)
        async with site.frozen():
            (site.folder / "go").touch()
            # All but the one under way, which is in memory.
            await until(lambda: len(site.files("*.record")) >= total - 1)
            if killed:
                worker.kill()
                worker.wait()
        if not killed:
            await until(site.finished)
            worker.terminate()
            assert worker.wait(PATIENCE) == 0
    if killed:
        assert not site.finished(), "nothing was acknowledged, so nothing is committed"
        with site.worker() as heir:
            await until(lambda: site.finished() and not site.files("*.record"))
            heir.terminate()
            assert heir.wait(PATIENCE) == 0
    assert not site.files("*.record")
    found = [record.headers["rollstream.trajectory"].decode() for record in site.records()]
    assert sorted(set(found)) == ALL
    fates = train(site)
    assert fates == {"trained": total, **({"duplicate": len(found) - total} if len(found) > total else {})}
    if killed:
        assert len(found) >= 2 * total - 1, "the heir delivers what lay there, and plays its tasks again"
