"""A delivery cut off from the log, or the store: what is finished waits on the disk, in its order, and is not lost."""

import asyncio
import errno
import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from rollstream.infra.claims import Claims, read_trajectory
from rollstream.infra.log import Headers, Log, LogError, Position, Writer
from rollstream.infra.memory import MemoryLog
from rollstream.infra.scan import scan
from rollstream.infra.store import MemoryStore, StoreError
from rollstream.infra.topics import Names, declared
from rollstream.producers import Delivery
from rollstream.producers import delivery as delivery_module
from rollstream.producers.spill import Spill
from rollstream.schemas import Status, Trajectory

Episode = Callable[..., Trajectory]
NAMES = Names("m")
PATIENCE = 60.0


class Cable:
    """A writer whose way to the log can be cut: then records wait in its buffer, unacknowledged."""

    def __init__(self, log: Log, *, cut: bool = True) -> None:
        self._writer, self.cut = log.writer(), cut
        self.buffered: list[tuple[Future[Position], tuple[Any, ...], dict[str, Any]]] = []

    def append(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Headers | None = None,
        partition: int | None = None,
    ) -> "Future[Position]":
        options: dict[str, Any] = {"key": key, "headers": headers, "partition": partition}
        if not self.cut:
            return self._writer.append(topic, value, **options)
        future: Future[Position] = Future()
        future.set_running_or_notify_cancel()
        self.buffered.append((future, (topic, value), options))
        return future

    def mend(self) -> None:
        """The way is free again: what waited goes first."""
        self.cut, buffered, self.buffered = False, self.buffered, []
        for future, record, options in buffered:
            future.set_result(self._writer.append(*record, **options).result())

    def flush(self, timeout: float) -> None:
        """Nothing to wait for."""

    def close(self, timeout: float = 30.0) -> None:
        self._writer.close()
        if self.buffered:
            raise LogError(f"closed with {len(self.buffered)} records not acknowledged")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Shut(MemoryStore):
    """A store that is away while it is told to be."""

    away = True

    def put(self, key: str, data: bytes, *, if_none_match: bool = False, if_match: str | None = None) -> str:
        if self.away:
            raise StoreError("not now", retriable=True)
        return super().put(key, data, if_none_match=if_none_match, if_match=if_match)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """One record under way at a time, and a log that has not answered at once stands still."""
    monkeypatch.setattr(delivery_module, "WINDOW", 1)
    monkeypatch.setattr(delivery_module, "STILL", 0.0)
    monkeypatch.setattr(delivery_module, "PAUSE", 0.01)


@pytest.fixture
def memory() -> MemoryLog:
    log = MemoryLog()
    for topic in declared("m", {"maze": 1}):
        log.create(topic)
    return log


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "spill"


Deliver = Callable[..., Delivery]


@pytest.fixture
def delivery(folder: Path) -> Deliver:
    """`delivery(writer, limit=..., claims=None)`: with a spill in the folder."""

    def make(writer: Writer, *, limit: int = 1 << 20, claims: Claims | None = None) -> Delivery:
        return Delivery(writer, NAMES, claims=claims, spill=Spill(folder, limit=limit))

    return make


def spilled(folder: Path, kind: str = "record") -> list[Path]:
    return sorted(folder.rglob(f"*.{kind}"))


def read(log: Log, store: MemoryStore | None = None) -> list[Trajectory]:
    claims = Claims(lambda: store or MemoryStore(), NAMES)
    records = scan(log, log.partitions(NAMES.trajectories("maze")))
    return [read_trajectory(record.value or b"", claims) for record in records]


def ids(count: int, start: int = 0) -> list[str]:
    return [f"g/{index}/0" for index in range(start, count)]


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not done():  # noqa: ASYNC110 - nothing of this loop tells of it
            await asyncio.sleep(0.01)


async def test_what_waits_is_on_the_disk_only_and_its_places_are_free(
    memory: MemoryLog, folder: Path, delivery: Deliver, episode: Episode
) -> None:
    cable, freed = Cable(memory), list[int]()
    sending = delivery(cable)
    # A trajectory has no weak references; its array does.
    alive: list[weakref.ref[Any]] = []
    waiting: list[asyncio.Future[Position]] = []

    def play(index: int) -> None:
        trajectory = episode("g", index, size=6)
        alive.append(weakref.ref(trajectory.tokens))
        waiting.append(sending.deliver(trajectory, appended=lambda: freed.append(index)))

    for index in range(6):
        play(index)
    await until(lambda: len(freed) == 6)
    assert len(spilled(folder)) == 5, "the one under way is in memory"
    assert not any(one() is not None for one in alive), "bounded in memory"
    assert not any(one.done() for one in waiting), "nothing counts before the log acknowledged it"
    assert not read(memory)
    cable.mend()
    async with asyncio.timeout(PATIENCE):
        positions = [await one for one in waiting]
    assert [position.offset for position in positions] == [*range(6)], "in order"
    assert [t.trajectory_id for t in read(memory)] == ids(6)
    assert not spilled(folder)
    assert sending.counts == {"completed": 6}
    await sending.close()


async def test_a_log_that_answers_sees_no_disk(
    memory: MemoryLog, folder: Path, delivery: Deliver, episode: Episode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written(*_: object) -> None:
        raise AssertionError("something went to the disk")

    monkeypatch.setattr(delivery_module, "STILL", 30.0)
    monkeypatch.setattr(os, "fsync", written)
    cable = Cable(memory)
    sending = delivery(cable)
    waiting = [sending.deliver(episode("g", index, size=6)) for index in range(6)]
    await until(lambda: len(cable.buffered) == 1)
    cable.mend()
    for one in waiting:
        await one
    await sending.close()
    assert spilled(folder) == []


async def test_a_full_spill_holds_the_places_and_loses_nothing(
    memory: MemoryLog, folder: Path, delivery: Deliver, episode: Episode
) -> None:
    cable, freed = Cable(memory), list[int]()
    sending = delivery(cable, limit=2 * 4096)
    waiting = [
        sending.deliver(episode("g", index, size=6), appended=partial(freed.append, index)) for index in range(6)
    ]
    await until(lambda: len(freed) == 3)
    for _ in range(50):
        await asyncio.sleep(0)
    assert (len(freed), len(spilled(folder))) == (3, 2), "one under way, two on the disk, three hold their places"
    cable.mend()
    for one in waiting:
        await one
    assert sorted(t.trajectory_id for t in read(memory)) == ids(6)
    assert (len(freed), spilled(folder)) == (6, [])
    await sending.close()


async def test_a_full_disk_holds_the_places_until_it_has_room(
    memory: MemoryLog, folder: Path, delivery: Deliver, episode: Episode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        refused.append(1)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    refused, freed = list[int](), list[int]()
    cable = Cable(memory)
    sending = delivery(cable)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        waiting = [
            sending.deliver(episode("g", index, size=3), appended=partial(freed.append, index)) for index in range(3)
        ]
        await until(lambda: len(refused) >= 4)
        assert (freed, spilled(folder)) == ([0], [])
    await until(lambda: len(freed) == 3)
    assert len(spilled(folder)) == 2
    cable.mend()
    for one in waiting:
        await one
    assert [t.trajectory_id for t in read(memory)] == ids(3)
    await sending.close()


async def test_what_is_not_acknowledged_at_the_end_is_delivered_by_the_next(
    memory: MemoryLog, folder: Path, delivery: Deliver, episode: Episode
) -> None:
    first = delivery(Cable(memory))
    waiting = [first.deliver(episode("g", index, size=6)) for index in range(6)]
    await until(lambda: len(spilled(folder)) == 5)
    await first.close()
    assert len(spilled(folder)) == 6, "the one under way, too"
    assert all(one.cancelled() for one in waiting), "and nobody takes it for acknowledged"
    assert not read(memory)
    second = delivery(memory.writer())
    await second.recover()
    assert [t.trajectory_id for t in read(memory)] == ids(6), "in order"
    assert second.counts == {"recovered": 6}
    await second.close()
    assert not spilled(folder)
    third = delivery(memory.writer())
    await third.recover()
    await third.close()
    assert len(read(memory)) == 6


async def test_without_a_disk_the_end_says_what_is_lost(memory: MemoryLog, episode: Episode) -> None:
    cable = Cable(memory)
    sending = Delivery(cable, NAMES)
    sending.deliver(episode("g", 0))
    await until(lambda: len(cable.buffered) == 1)
    with pytest.raises(LogError, match="closed with 1 records"):
        await sending.close()


async def test_what_was_never_appended_is_told_although_the_log_came_back_at_the_end(
    memory: MemoryLog, episode: Episode
) -> None:
    class Late(Cable):
        def close(self, timeout: float = 30.0) -> None:
            self.mend()
            super().close(timeout)

    cable = Late(memory)
    sending = Delivery(cable, NAMES)
    for index in range(3):
        sending.deliver(episode("g", index, size=3))
    await until(lambda: len(cable.buffered) == 1)
    with pytest.raises(LogError, match="2 records of finished episodes"):
        await sending.close()
    assert len(read(memory)) == 1


async def test_a_damaged_file_of_a_living_worker_leaves_a_failed_sample(
    memory: MemoryLog, folder: Path, delivery: Deliver, episode: Episode
) -> None:
    cable = Cable(memory)
    sending = delivery(cable)
    waiting = [sending.deliver(episode("g", index, size=4)) for index in range(4)]
    await until(lambda: len(spilled(folder)) == 3)
    torn, flipped, _ = spilled(folder)
    torn.write_bytes(torn.read_bytes()[:-1])
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"?")
    cable.mend()
    for one in waiting:
        await one
    found = {t.trajectory_id: (t.status, t.cause) for t in read(memory)}
    failed, good = (Status.FAILED, "spill-damaged"), (Status.COMPLETED, None)
    assert [found[name] for name in ids(4)] == [good, failed, failed, good]
    assert sending.counts == {"completed": 2, "spill-damaged": 2}
    await sending.close()
    assert (len(spilled(folder, "damaged")), spilled(folder)) == (2, [])


async def test_a_damaged_file_of_a_dead_worker_is_told_and_the_others_arrive(
    memory: MemoryLog, folder: Path, delivery: Deliver, episode: Episode, caplog: pytest.LogCaptureFixture
) -> None:
    first = delivery(Cable(memory))
    for index in range(4):
        first.deliver(episode("g", index, size=4))
    await until(lambda: len(spilled(folder)) == 3)
    await first.close()
    bad = spilled(folder)[1]
    bad.write_bytes(b"")
    second = delivery(memory.writer())
    await second.recover()
    await second.close()
    assert len(read(memory)) == 3
    assert bad.stem in caplog.text
    assert [path.stem for path in spilled(folder, "damaged")] == [bad.stem]


async def test_a_leftover_that_has_no_topic_any_more_stays(
    memory: MemoryLog, folder: Path, delivery: Deliver, episode: Episode, caplog: pytest.LogCaptureFixture
) -> None:
    first = delivery(Cable(memory))
    for index in range(2):
        first.deliver(replace(episode("g", index), environment="gone"))
    await until(lambda: len(spilled(folder)) == 1)
    await first.close()
    second = delivery(memory.writer())
    await second.recover()
    await second.deliver(episode("h", 0))
    await second.close()
    assert [t.trajectory_id for t in read(memory)] == ["h/0/0"]
    assert len(spilled(folder)) == 2
    assert "m.trajectories.gone was not delivered" in caplog.text


async def test_a_body_whose_store_is_away_waits_on_the_disk_too(
    memory: MemoryLog, folder: Path, delivery: Deliver, episode: Episode
) -> None:
    store, freed = Shut(), list[int]()
    large = [replace(episode("g", index, size=3), environment_version="v" * 1_500_000) for index in range(3)]
    first = delivery(memory.writer(), limit=1 << 30, claims=Claims(lambda: store, NAMES))
    for index, trajectory in enumerate(large):
        first.deliver(trajectory, appended=partial(freed.append, index))
    await until(lambda: len(freed) == 3)
    await first.close()
    assert len(spilled(folder)) == 3
    assert not read(memory, store)
    second = delivery(memory.writer(), limit=1 << 30, claims=Claims(lambda: store, NAMES))
    recovering = asyncio.create_task(second.recover())
    await second.deliver(episode("h", 0))
    assert not recovering.done()
    store.away = False
    await recovering
    await second.close()
    found = read(memory, store)
    assert sorted(t.trajectory_id for t in found) == [*ids(3), "h/0/0"]
    assert sorted(len(t.environment_version) for t in found) == [0, *[1_500_000] * 3]
    assert not spilled(folder)


async def test_a_leftover_over_the_limit_without_a_store_is_a_failed_sample(
    memory: MemoryLog, folder: Path, delivery: Deliver, episode: Episode
) -> None:
    first = delivery(Cable(memory))
    first.deliver(replace(episode("g", 0, size=2), environment_version="v" * 100_000))
    first.deliver(replace(episode("g", 1, size=2), environment_version="v" * 100_000))
    await until(lambda: len(spilled(folder)) == 1)
    await first.close()
    memory.alter(NAMES.trajectories("maze"), {"max.message.bytes": "50000"})
    second = delivery(memory.writer())
    await second.recover()
    await second.close()
    assert [(t.trajectory_id, t.cause) for t in read(memory)] == [("g/0/0", "oversize"), ("g/1/0", "oversize")]
    assert second.counts == {"oversize": 2}


async def test_a_refusal_for_good_keeps_what_is_finished(
    memory: MemoryLog, folder: Path, delivery: Deliver, episode: Episode
) -> None:
    class Refusing(Cable):
        def append(self, *_: Any, **__: Any) -> "Future[Position]":
            future: Future[Position] = Future()
            future.set_exception(LogError("not allowed"))
            return future

    first = delivery(Refusing(memory))
    with pytest.raises(LogError, match="not allowed"):
        await first.deliver(episode("g", 0))
    await first.close()
    second = delivery(memory.writer())
    await second.recover()
    await second.close()
    assert [t.trajectory_id for t in read(memory)] == ["g/0/0"]
