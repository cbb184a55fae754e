"""Publishing when things are away: waited for, with the same version; given up with a word; half of it is nothing."""

import errno
import logging
import resource
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollstream.consumers import Learner, LearnerSettings, Ledger, Seen
from rollstream.consumers.publisher import Companions, Publisher
from rollstream.consumers.watch import Watch
from rollstream.infra.checkpoints import CheckpointError, Checkpoints, Fenced
from rollstream.infra.cursors import Cursors
from rollstream.infra.log import LogError
from rollstream.infra.memory import MemoryLog
from rollstream.infra.models import open_model
from rollstream.infra.scan import scan
from rollstream.infra.store import Content, MemoryStore, StoreError
from rollstream.infra.topics import Names, declared
from rollstream.schemas import PolicyUpdate, Receipt, decode_as

RUN = "run"
NAMES = Names("m")
SECONDS = 60.0
RECEIPT = Receipt(run="", incarnation="", step=0, version=0, parent=0)


class Away(MemoryStore):
    """Does not answer `count` calls, once `key` is written; `lasting` answers none from then on."""

    key, count, lasting = "nothing", 0, False
    refused = 0

    def put(self, key: str, data: bytes, *, if_none_match: bool = False, if_match: str | None = None) -> str:
        if key.endswith(self.key) or self.refused:
            self._answer()
        return super().put(key, data, if_none_match=if_none_match, if_match=if_match)

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> Content:
        if self.refused:
            self._answer()
        return super().get(key, start=start, length=length)

    def _answer(self) -> None:
        if self.lasting or self.refused < self.count:
            self.refused += 1
            raise StoreError("500 InternalError", retriable=True)


@dataclass
class Desk:
    """A publisher that has the run, and a step to publish."""

    log: MemoryLog
    store: MemoryStore
    publisher: Publisher
    learner: Learner

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.store, RUN)

    def publish(self) -> Receipt:
        companions = Companions(files={}, tokenizer="t")
        seen = Seen(max_staleness=1)
        return self.publisher.publish(RECEIPT, self.learner, companions, cursors=Cursors(), seen=seen)

    def receipts(self) -> list[int]:
        return [r.version for r in Ledger(self.log, NAMES, RUN).receipts()]

    def announced(self) -> list[int]:
        records = scan(self.log, self.log.partitions(NAMES.policy))
        return [decode_as(PolicyUpdate, r.value or b"").version for r in records]


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What a publish waits, without waiting."""
    waited: list[float] = []
    monkeypatch.setattr("rollstream.consumers.publisher.time.sleep", waited.append)
    return waited


Open = Callable[..., Desk]


@pytest.fixture
def opened(policy_dir: Path) -> Iterator[Open]:
    """`opened(store, patience=..., stopped=...)`: a desk whose publisher has claimed the run."""
    desks: list[Desk] = []

    def open_desk(store: MemoryStore | None = None, **options: object) -> Desk:
        log, store = MemoryLog(), store if store is not None else MemoryStore()
        for topic in declared(NAMES.namespace, {"maze": 1}):
            log.create(topic)
        publisher = Publisher(log, NAMES, RUN, Checkpoints(store, RUN), **options)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        publisher.claim()
        desks.append(Desk(log, store, publisher, Learner(open_model(policy_dir), LearnerSettings())))
        return desks[-1]

    yield open_desk
    for desk in desks:
        desk.publisher.close()


@pytest.mark.parametrize("key", ["manifest.json", "latest.json"])
def test_a_store_that_comes_back_costs_time_and_no_version(
    opened: Open, key: str, pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    store = Away()
    desk = opened(store)
    desk.publish()
    store.key, store.count = key, 4
    assert desk.publish().version == 2
    assert (desk.checkpoints.versions(), desk.receipts(), desk.announced()) == ([1, 2], [1, 2], [1, 2])
    assert pauses == [0.5, 1.0, 2.0, 4.0]
    assert caplog.messages.count("policy 2 of run run is not out yet, again in 1.0 s: 500 InternalError") == 1
    assert desk.publish().version == 3


def test_what_stays_away_is_given_up_after_a_while_and_nothing_is_half_there(opened: Open) -> None:
    store = Away()
    desk = opened(store, patience=0.0)
    desk.publish()
    store.key, store.lasting = "manifest.json", True
    with pytest.raises(
        StoreError, match=r"policy 2 of run run could not be published, and 0 s have passed: 500 .*Start the trainer"
    ) as caught:
        desk.publish()
    assert caught.value.retriable
    store.lasting = False
    latest = desk.checkpoints.latest()
    assert latest is not None
    assert (latest.version, desk.checkpoints.versions(), desk.announced()) == (1, [1], [1])


def test_whoever_is_asked_to_stop_does_not_wait(opened: Open, pauses: list[float]) -> None:
    store = Away()
    stop = threading.Event()
    desk = opened(store, stopped=stop.is_set)
    store.key, store.lasting = "manifest.json", True
    stop.set()
    with pytest.raises(StoreError, match="and the trainer was asked to stop: 500"):
        desk.publish()
    assert pauses == []


def test_what_does_not_pass_is_told_at_once(opened: Open, pauses: list[float]) -> None:
    class Refusing(MemoryStore):
        def put_file(self, key: str, path: Path) -> str:
            raise StoreError("403 AccessDenied")

    with pytest.raises(StoreError, match=r"^403 AccessDenied$"):
        opened(Refusing()).publish()
    assert pauses == []


@pytest.mark.parametrize("part", ["ledger", "announcement"])
def test_a_log_that_comes_back_costs_time(opened: Open, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    desk, refused = opened(), [3]

    def refuse(real: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: object, **options: object) -> None:
            refused[0] -= 1
            if refused[0] >= 0:
                raise LogError("no broker answers", retriable=True)
            real(*arguments, **options)

        return call

    if part == "ledger":
        monkeypatch.setattr(Ledger, "write", refuse(Ledger.write))
    else:
        monkeypatch.setattr(Publisher, "announce", refuse(Publisher.announce))
    assert desk.publish().version == 1
    assert (desk.receipts(), desk.announced()) == ([1], [1])


def test_an_announcement_that_is_given_up_leaves_the_policy_there(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise LogError("no broker answers", retriable=True)

    desk = opened(patience=0.0)
    monkeypatch.setattr(Publisher, "announce", refuse)
    with pytest.raises(LogError, match="the announcement of policy 1 of run run could not be published"):
        desk.publish()
    latest = desk.checkpoints.latest()
    assert latest is not None
    assert latest.version == 1


# ---------------------------------------------------------------------- a full disk


@contextmanager
def limited(size: int) -> "Generator[None]":
    """No file of this process grows beyond `size` bytes, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("part", ["weights", "state"])
def test_a_full_disk_publishes_nothing_and_leaves_nothing(
    opened: Open, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    desk = opened()
    desk.publish()
    before = desk.store.list()
    if part == "weights":
        size = 2000
    else:
        desk.learner.save(tmp_path / "probe")
        size = (tmp_path / "probe").stat().st_size - 100
        (tmp_path / "probe").unlink()
    with (
        limited(size),
        pytest.raises(
            CheckpointError, match=f"files of a checkpoint could not be written to {tmp_path}.*goes on from the last"
        ),
    ):
        desk.publish()
    assert desk.store.list() == before
    assert (desk.receipts(), list(tmp_path.iterdir())) == ([1], [])
    assert desk.publish().version == 2


def test_no_room_at_all_is_told_in_the_same_way(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    desk = opened()
    monkeypatch.setattr("rollstream.consumers.publisher.save_weights", refuse)
    with pytest.raises(CheckpointError, match="No space left on device"):
        desk.publish()
    assert desk.receipts() == []


# ---------------------------------------------------------------------- fencing


def check_on(check: Callable[[], None]) -> None:
    """Call it until it raises."""
    over = threading.Event()
    timer = threading.Timer(SECONDS, over.set)
    timer.start()
    try:
        while not over.wait(0.001):
            check()
    finally:
        timer.cancel()


def test_an_idle_publisher_learns_that_another_took_the_run(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollstream.consumers.watch.EVERY", 0.0)
    desk = opened()
    desk.publish()
    winner = opened(desk.store).publisher
    with pytest.raises(Fenced) as caught:
        check_on(desk.publisher.check)
    fenced = caught.value
    assert (fenced.incarnation, fenced.version) == (winner.incarnation, 1)
    assert f"trainer {winner.incarnation} took the run" in str(fenced)
    assert f"trainer {desk.publisher.incarnation} is fenced, nothing that it does" in str(fenced)
    with pytest.raises(Fenced):
        desk.publisher.check()
    winner.check()


def test_a_look_that_gets_no_answer_ends_nothing_and_the_next_one_counts(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[Exception] = [StoreError("503 SlowDown", retriable=True), ValueError("found")]
    looked = threading.Semaphore(0)

    def look() -> None:
        looked.release()
        raise answers.pop(0)

    watch = Watch(look, every=0.0)
    with caplog.at_level(logging.INFO, "rollstream"), pytest.raises(ValueError, match="found"):
        check_on(watch.check)
    assert looked.acquire(timeout=SECONDS)
    assert "not known: 503 SlowDown" in caplog.text


def test_a_look_that_takes_long_is_not_waited_for() -> None:
    release, begun = threading.Event(), threading.Semaphore(0)

    def look() -> None:
        begun.release()
        release.wait(SECONDS)

    watch = Watch(look, every=0.0)
    for _ in range(100):
        watch.check()
    assert begun.acquire(timeout=SECONDS)
    assert not begun.acquire(blocking=False), "one at a time"
    release.set()
