"""How a worker comes by weights: the newest good policy, and on any failure the one it has."""

import asyncio
import threading
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from rollstream.infra.checkpoints import Checkpoints, Manifest, manifest_digest
from rollstream.infra.kafka import KafkaLog
from rollstream.infra.log import Log
from rollstream.infra.memory import MemoryLog
from rollstream.infra.store import Content, MemoryStore, StoreError
from rollstream.infra.topics import Names, apply, declared, plan
from rollstream.producers import PolicyFollower, policy
from rollstream.producers.engine import Completion, EngineError, EngineLost
from rollstream.schemas import PolicyUpdate, Sampling, encode

PATIENCE = 60.0


class Store(MemoryStore):
    """A store that can be out of order, or slow."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[StoreError] = []
        self.open = threading.Event()
        self.open.set()
        self.asked = 0

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> Content:
        self.asked += 1
        if "objects" in key:
            assert self.open.wait(PATIENCE)
        if self.faults:
            raise self.faults.pop(0)
        return super().get(key, start=start, length=length)


class Engine:
    """Reads a word where an engine would read weights."""

    model, context = "words", 8

    def __init__(self) -> None:
        self.version = 1
        self.words: list[str] = []

    async def load(self, weights: Path, version: int) -> None:
        word = (weights / "model.safetensors").read_text()
        if word == "foreign":
            raise EngineError("these weights do not fit the model")
        if word == "fatal":
            raise EngineLost("the engine failed while it swapped weights")
        self.words.append(word)
        self.version = version

    async def generate(self, prompt: Sequence[int] | NDArray[np.int32], sampling: Sampling) -> Completion:
        raise EngineError("words are not sampled")

    async def close(self) -> None:
        """Nothing to release."""


class Desk:
    """A run's topic, its checkpoints, and a follower of both."""

    def __init__(self, log: Log, scratch: Path) -> None:
        self.log, self.names = log, Names(f"test-{uuid.uuid4().hex[:8]}")
        apply(log, plan(log, [t for t in declared(self.names.namespace, {"game": 1}) if t.name == self.names.policy]))
        self.store, self.scratch, self.engine = Store(), scratch, Engine()
        self.checkpoints = Checkpoints(self.store, "run")
        self.checkpoints.claim("one")
        self.follower = PolicyFollower(log, self.names, "run", self.checkpoints, scratch)

    def publish(self, version: int, word: str = "") -> Manifest:
        files: dict[str, Path | bytes] = {
            "weights/model.safetensors": (word or f"word {version}").encode(),
            "weights/config.json": b"{}",
            "trainer/learner.pt": b"state",
        }
        parent = version - 1 or None
        return self.checkpoints.publish(version, files, parent=parent, incarnation="one", step=version)

    def announce(self, manifest: Manifest, *, run: str = "run", digest: str | None = None) -> None:
        update = PolicyUpdate(
            run=run,
            version=manifest.version,
            incarnation="one",
            step=manifest.step,
            manifest=self.checkpoints.manifest_key(manifest.version),
            digest=digest or manifest_digest(manifest),
            published_ms=1,
        )
        self.write(encode(update), run)

    def write(self, value: bytes | None, key: str = "run") -> None:
        with self.log.writer() as writer:
            writer.append(self.names.policy, value, key=key.encode()).result(PATIENCE)

    def spoil(self, manifest: Manifest, data: bytes | None) -> None:
        """Damage the object of the weights, or delete it."""
        key = f"run/objects/{manifest.files['weights/model.safetensors'].sha256}"
        self.store.delete(key)
        if data is not None:
            self.store.put(key, data)

    def folders(self) -> set[str]:
        return {path.name for path in self.scratch.glob("policy-*")}


@asynccontextmanager
async def following(desk: Desk, changed: Callable[[], None] = lambda: None) -> AsyncGenerator[None]:
    task = asyncio.create_task(desk.follower.follow(desk.engine, changed))
    try:
        await desk.follower.following.wait()
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not done():  # noqa: ASYNC110 - nothing of this loop tells of it
            await asyncio.sleep(0.02)


@pytest.fixture(params=("memory", "tansu", "kafka"))
def desk(request: pytest.FixtureRequest, tmp_path: Path) -> Desk:
    name = str(request.param)
    return Desk(MemoryLog() if name == "memory" else KafkaLog(request.getfixturevalue(f"{name}_address")), tmp_path)


@pytest.fixture
def quiet(tmp_path: Path) -> Desk:
    """In memory only."""
    return Desk(MemoryLog(), tmp_path)


async def test_first_waits_then_every_newer_policy_is_taken(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    waiting = asyncio.create_task(desk.follower.first(poll=0.01))
    await until(lambda: "no policy yet" in caplog.text)
    desk.announce(desk.publish(1))
    first = await waiting
    assert first.version == 1
    assert {path.name for path in first.directory.iterdir()} == {"model.safetensors", "config.json"}
    async with following(desk):
        desk.write(b"\x01junk")
        desk.write(None)
        desk.announce(desk.publish(2))
        await until(lambda: desk.engine.version == 2)
        desk.announce(desk.publish(3), run="other")
        desk.announce(desk.publish(4))
        await until(lambda: desk.engine.version == 4)
        await until(lambda: desk.folders() == {"policy-4"})
    assert desk.engine.words == ["word 2", "word 4"]
    assert (desk.follower.announced, desk.follower.refused) == (4, 0)


async def test_what_was_published_before_anybody_listened_is_heard_of(quiet: Desk) -> None:
    quiet.publish(1)
    await quiet.follower.first()
    quiet.publish(2)
    async with following(quiet):
        await until(lambda: quiet.engine.version == 2)


@pytest.mark.parametrize("fault", ["flipped", "missing", "cut", "digest", "foreign", "unknown"])
async def test_a_policy_that_is_not_whole_is_not_taken_and_the_next_good_one_is(
    quiet: Desk, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    quiet.publish(1)
    await quiet.follower.first()
    async with following(quiet):
        bad = quiet.publish(2, "foreign" if fault == "foreign" else "")
        match fault:
            case "flipped":
                quiet.spoil(bad, b"Word 2")
            case "cut":
                quiet.spoil(bad, b"word ")
            case "missing":
                quiet.spoil(bad, None)
            case "unknown":
                quiet.store.delete(quiet.checkpoints.manifest_key(2))
            case _:
                pass
        quiet.announce(bad, digest="0" * 64 if fault == "digest" else None)
        await until(lambda: quiet.follower.refused == 1)
        assert (quiet.engine.version, quiet.engine.words) == (1, [])
        assert "policy 2 was not taken, 1 stays" in caplog.text
        assert quiet.follower.lag(quiet.engine) == 0, "nobody may wait for what cannot be had"
        await until(lambda: "policy-2" not in quiet.folders())
        quiet.announce(quiet.publish(3))
        await until(lambda: quiet.engine.version == 3)
    assert quiet.engine.words == ["word 3"]


async def test_an_engine_that_is_lost_ends_the_following(quiet: Desk) -> None:
    quiet.publish(1)
    quiet.announce(quiet.publish(2, "fatal"))
    with pytest.RaisesGroup(pytest.RaisesExc(EngineLost, match="swapped weights")):
        async with asyncio.timeout(PATIENCE):
            await quiet.follower.follow(quiet.engine)
    assert (quiet.engine.version, quiet.follower.refused) == (1, 0)


async def test_a_failure_that_passes_is_tried_again(quiet: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "RETRY", 0.01)
    quiet.publish(1)
    await quiet.follower.first()
    async with following(quiet):
        newer = quiet.publish(2)
        quiet.store.faults = [StoreError("slow down", retriable=True) for _ in range(3)]
        quiet.announce(newer)
        await until(lambda: quiet.engine.version == 2)
    assert quiet.follower.refused == 3


async def test_the_loop_and_the_announcements_go_on_while_weights_are_fetched(quiet: Desk) -> None:
    quiet.publish(1)
    await quiet.follower.first()
    told: list[int] = []
    async with following(quiet, lambda: told.append(quiet.follower.lag(quiet.engine))):
        quiet.store.open.clear()
        for version in (2, 3, 4):
            quiet.announce(quiet.publish(version))
        await until(lambda: quiet.follower.announced == 4)
        assert quiet.engine.version == 1
        assert quiet.follower.lag(quiet.engine) == 3
        quiet.store.open.set()
        await until(lambda: quiet.engine.version == 4)
        await until(lambda: told[-1] == 0)
    assert quiet.engine.words[-1] == "word 4"
    assert "word 3" not in quiet.engine.words, "what lies between is not fetched"


async def test_first_goes_on_to_a_good_policy_and_raises_what_will_not_pass(
    quiet: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    quiet.spoil(quiet.publish(1), b"Word 1")
    waiting = asyncio.create_task(quiet.follower.first(poll=0.01))
    await until(lambda: "cannot be used" in caplog.text)
    quiet.store.faults = [StoreError("slow down", retriable=True)]
    await until(lambda: "waiting for the store" in caplog.text)
    quiet.publish(2)
    assert (await waiting).version == 2
    assert sum("cannot be used" in message for message in caplog.messages) < 5, "said once, not at every look"
    quiet.store.faults = [StoreError("the bucket is not yours")]
    with pytest.raises(StoreError, match="not yours"):
        await quiet.follower.first()
