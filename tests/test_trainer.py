"""The trainer as a whole: poison, copies, crashes, rivals. What it leaves behind must add up, whatever happened."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.consumers import LearnerSettings, Ledger, Objective, Place, Trainer, TrainerSettings, lineage
from rollstream.consumers.audit import audit
from rollstream.infra import deadletters
from rollstream.infra.checkpoints import CheckpointError, Checkpoints, Fenced, Manifest
from rollstream.infra.log import Log, LogError, Position, Record
from rollstream.infra.manifest import encode_manifest
from rollstream.infra.memory import MemoryLog
from rollstream.infra.scan import scan
from rollstream.infra.store import Entry, MemoryStore, ObjectStore, StoreError
from rollstream.infra.topics import Names, declared
from rollstream.schemas import (
    PolicyUpdate,
    Receipt,
    Role,
    RollstreamError,
    Status,
    Trajectory,
    Turn,
    decode_as,
    encode,
    trajectory_headers,
)

Episode = Callable[..., Trajectory]
RUN = "run"
WEIGHTS = "weights/model.safetensors"
GRPO = LearnerSettings(lr=1e-2, min_informative=0.0)
CLONE = replace(GRPO, objective=Objective.CLONE)


@dataclass
class Rig:
    """A run on a log and a store, trained as often as a test likes."""

    log: Log
    names: Names
    model: Path
    scratch: Path
    store: ObjectStore = field(default_factory=MemoryStore)
    receipts: list[Receipt] = field(default_factory=list[Receipt])
    """Published, of all lives."""

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.store, RUN)

    def trainer(
        self, *, on_step: Callable[[Receipt], None] | None = None, learner: LearnerSettings = GRPO, **settings: Any
    ) -> Trainer:
        def step(receipt: Receipt) -> None:
            self.receipts.append(receipt)
            if on_step is not None:
                on_step(receipt)

        defaults: dict[str, Any] = {
            "environments": {"maze": 1.0},
            "groups_per_step": 2,
            "max_staleness": 100,
            "until_end": True,
        }
        chosen = TrainerSettings(learner=learner, **(defaults | settings))
        return Trainer(self.log, self.names, RUN, self.checkpoints, chosen, scratch=self.scratch, on_step=step)

    def train(self, **settings: Any) -> Place:
        trainer = self.trainer(**settings)
        # A step that never fills would wait for ever: the test is to fail then, not to hang.
        guard = threading.Timer(60, trainer.stop)
        guard.start()
        try:
            return trainer.run(self.model)
        finally:
            guard.cancel()

    def send(self, *trajectories: Trajectory, partition: int | None = None) -> list[Position]:
        return [self.put(encode(t), trajectory_headers(t), t.group_id, partition) for t in trajectories]

    def put(
        self, value: bytes | None, headers: dict[str, bytes] | None, key: str, partition: int | None = 0
    ) -> Position:
        with self.log.writer() as writer:
            topic = self.names.trajectories("maze")
            return writer.append(topic, value, key=key.encode(), headers=headers, partition=partition).result(40)

    def lineage(self) -> list[Receipt]:
        """The receipts on the lineage of the latest checkpoint, oldest first."""
        latest = self.latest()
        receipts = {(r.incarnation, r.version): r for r in Ledger(self.log, self.names, RUN).receipts()}
        line = lineage(receipts, (latest.incarnation, latest.version))
        assert line.complete
        return list(reversed(line.receipts))

    def latest(self) -> Manifest:
        latest = self.checkpoints.latest()
        assert latest is not None
        return latest

    def groups(self) -> list[str]:
        return [group for receipt in self.lineage() for group in receipt.groups]

    def verdict(self) -> dict[str, Any]:
        verdict: dict[str, Any] = dict(audit(self.log, self.names, RUN, self.checkpoints).as_json())
        assert (verdict["lost"], verdict["twice"]) == (0, 0), verdict["problems"]
        return verdict

    def dead_letters(self) -> list[Record]:
        return list(scan(self.log, self.log.partitions(self.names.dead_letter)))


@pytest.fixture
def rig(log: Log, names: Names, policy_dir: Path, tmp_path: Path) -> Rig:
    return Rig(log, names, policy_dir, tmp_path)


@pytest.fixture
def memory(policy_dir: Path, tmp_path: Path) -> Rig:
    return make_rig(policy_dir, tmp_path)


def make_rig(policy_dir: Path, scratch: Path) -> Rig:
    log, names = MemoryLog(), Names("m")
    for topic in declared("m", {"maze": 2}):
        log.create(topic)
    return Rig(log, names, policy_dir, scratch)


def pairs(episode: Episode, *groups: str, **fields: Any) -> list[Trajectory]:
    return [episode(group, index, **fields) for group in groups for index in (0, 1)]


def reasons(receipts: list[Receipt]) -> Counter[str]:
    return Counter(
        {
            reason: sum(len(c.dropped.get(reason, ())) for r in receipts for c in r.consumed)
            for reason in {name for r in receipts for c in r.consumed for name in c.dropped}
        }
    )


def test_the_whole_loop_adds_up(rig: Rig, episode: Episode) -> None:
    sent = rig.send(*pairs(episode, "a", "b", "c", "d", "e"))
    place = rig.train()
    assert (place.version, place.step) == (4, 3)
    assert [r.step for r in rig.receipts] == [0, 1, 2, 3]
    assert sorted(rig.groups()) == ["a", "b", "c", "d", "e"]
    assert rig.verdict() | {"version": 4} == rig.verdict()
    assert (rig.verdict()["trained"], rig.verdict()["pending"]) == (10, 0)
    partitions = {p.partition for p in sent}
    assert {p: c.low for p, c in rig.latest().cursors.items() if p in partitions} == {
        p: sum(s.partition == p for s in sent) for p in partitions
    }
    updates = [decode_as(PolicyUpdate, r.value or b"") for r in scan(rig.log, rig.log.partitions(rig.names.policy))]
    assert [u.version for u in updates] == [1, 2, 3, 4]
    assert rig.checkpoints.manifest(4, digest=updates[-1].digest) == rig.latest()
    assert len({rig.checkpoints.manifest(v).files[WEIGHTS].sha256 for v in (1, 2, 3, 4)}) == 4
    ends = {p: end for p, (_, end) in rig.log.bounds(partitions).items()}
    assert rig.log.committed(f"{rig.names.namespace}.trainer.{RUN}", partitions) == ends


def test_case_1_poison_is_set_aside_untouched_and_the_rest_trains(rig: Rig, episode: Episode) -> None:
    good = encode(episode("poison", 0))
    poison = [b"\x01junk", good + b"\x00\x01\x02", good[:-1], b""]
    rig.send(*pairs(episode, "a"), partition=0)
    positions = [rig.put(value, {"trace": b"kept"}, "the-key") for value in poison]
    stone = rig.put(None, None, "the-key")
    rig.send(*pairs(episode, "b"), partition=0)
    rig.train()

    letters = rig.dead_letters()
    assert [letter.value for letter in letters] == poison
    assert [letter.key for letter in letters] == [b"the-key"] * 4
    for letter, position in zip(letters, positions, strict=True):
        assert letter.headers["trace"] == b"kept"
        assert letter.headers[deadletters.TOPIC].decode() == position.partition.topic
        assert letter.headers[deadletters.PARTITION] == b"0"
        assert int(letter.headers[deadletters.OFFSET]) == position.offset
        assert letter.headers[deadletters.ERROR]
    found = [letter.headers[deadletters.REASON].decode() for letter in letters]
    assert found == ["bad-framing", "trailing-bytes", "malformed", "bad-framing"]
    assert reasons(rig.receipts) == Counter(found) + Counter({"tombstone": 1})
    assert rig.groups() == ["a", "b", "the-key"]
    assert rig.latest().cursors[stone.partition].to_json() == [9]
    assert rig.verdict()["trained"] == 4
    assert rig.verdict()["acknowledged"] == 8


def test_poison_whose_headers_can_be_read_does_not_hold_its_group_up(memory: Rig, episode: Episode) -> None:
    bad = episode("a", 1, size=3)
    memory.send(episode("a", 0, size=3), partition=0)
    memory.put(encode(bad)[:-1], trajectory_headers(bad), "a")
    memory.send(episode("a", 2, size=3), partition=0)
    memory.train(until_end=False, steps=1, groups_per_step=1)
    assert (memory.groups(), reasons(memory.receipts)) == (["a"], Counter({"malformed": 1}))
    assert memory.verdict()["trained"] == 2


def test_a_group_of_poison_alone_frees_its_slot(memory: Rig, episode: Episode) -> None:
    """Two records that tell nothing but their key: both are settled, and a receipt names their group."""
    poison = [memory.put(b"\x01junk", None, "gone"), memory.put(b"", {"rollstream.group": b"\xff"}, "gone")]
    memory.put(None, None, "stone")
    memory.train(until_end=False, steps=1, groups_per_step=1, group_timeout=0.2)
    assert memory.groups() == ["gone"]
    assert reasons(memory.receipts) == Counter({"bad-framing": 1, "bad-headers": 1, "tombstone": 1})
    assert memory.latest().cursors[poison[0].partition].to_json() == [3]
    memory.put(b"\x01junk", None, "gone")
    memory.send(*pairs(episode, "a"), partition=0)
    memory.train(until_end=False, steps=2, groups_per_step=1)
    assert memory.groups() == ["gone", "a"], "after a restart, too"
    assert memory.verdict() | {"trained": 2, "dropped": {"bad-framing": 2, "bad-headers": 1}} == memory.verdict()


def test_case_1_where_the_dead_letter_cannot_be_written_consumption_stops(
    policy_dir: Path, tmp_path: Path, episode: Episode
) -> None:
    log, names = MemoryLog(), Names("m")
    topics = {t.name: t for t in declared("m", {"maze": 2})}
    for name in topics.keys() - {names.dead_letter}:
        log.create(topics[name])
    rig = Rig(log, names, policy_dir, tmp_path)
    rig.send(*pairs(episode, "a"), partition=0)
    rig.put(b"", None, "k")
    rig.send(*pairs(episode, "b"), partition=0)
    with pytest.raises(LogError, match="dead-letter"):
        rig.train(groups_per_step=1)
    assert rig.verdict() | {"trained": 2, "pending": 3, "dropped": {}} == rig.verdict()
    log.create(topics[names.dead_letter])
    rig.train()
    assert rig.verdict() | {"trained": 4, "pending": 0, "dropped": {"bad-framing": 1}} == rig.verdict()
    assert [letter.value for letter in rig.dead_letters()] == [b""]


def test_case_5_a_trajectory_trains_once_however_often_it_is_sent(rig: Rig, episode: Episode) -> None:
    first = pairs(episode, "a", "b")
    rig.send(*first, *first, partition=0)
    rig.send(*first, partition=1)
    rig.train()
    assert rig.verdict() | {"trained": 4, "dropped": {"duplicate": 8}} == rig.verdict()
    rig.send(*first, *pairs(episode, "c"), partition=1)
    rig.train()
    assert rig.verdict() | {"trained": 6, "dropped": {"duplicate": 12}} == rig.verdict()
    assert sorted(rig.groups()) == ["a", "b", "c"]


def test_case_10_strange_shapes_break_nothing(memory: Rig, episode: Episode) -> None:
    none = replace(
        episode("a", 0, size=4),
        tokens=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        spans=(),
        turns=(),
        reward=1000.0,
    )
    zero = replace(episode("a", 1, size=4, reward=1.0), turns=(*episode("a", 1).turns, empty_turn()))
    memory.send(none, zero, episode("a", 2, size=4, sampled=1, reward=0.0), episode("a", 3, size=4, reward=1.0))
    memory.send(episode("one", 0, size=1, sampled=1))
    memory.train()
    assert reasons(memory.receipts) == Counter({"empty": 1, "zero-variance": 1})
    assert memory.verdict()["trained"] == 3
    (step,) = memory.receipts[1:]
    assert step.metrics["trained_tokens"] == 9
    assert sorted(step.groups) == ["a", "one"]
    # Three rewards 1, 0, 1 and that of the group of one: the empty one's 1000 is in no mean.
    assert step.metrics["reward"] == pytest.approx(0.5)


def empty_turn() -> Turn:
    return Turn(role=Role.ASSISTANT, tokens=0, sampled=True)


def test_case_12_a_failed_rollout_leaves_the_other_seven_to_train(memory: Rig, episode: Episode) -> None:
    group = [episode("a", index, size=8) for index in range(8)]
    failed = replace(group[3], status=Status.FAILED, cause="environment-raised", reward=0.0)
    memory.send(*group[:3], failed, *group[4:])
    memory.train(until_end=False, steps=1, groups_per_step=1)
    assert memory.verdict() | {"trained": 7, "dropped": {"failed": 1}} == memory.verdict()


def test_a_split_group_and_a_partial_one_settle(memory: Rig, episode: Episode) -> None:
    split, partial = pairs(episode, "split"), [episode("partial", i, size=4) for i in range(2)]
    memory.send(split[0], *partial, partition=0)
    memory.send(split[1], episode("alone", 0), partition=1)
    memory.train()
    assert sorted(memory.groups()) == ["alone", "partial", "split"]
    assert memory.verdict() | {"trained": 4, "dropped": {"group-timeout": 1}} == memory.verdict()


def test_a_straggler_costs_its_group_the_timeout_and_arrives_late(memory: Rig, episode: Episode) -> None:
    memory.send(episode("slow", 0, size=3), episode("slow", 1, size=3), *pairs(episode, "a"), partition=0)
    memory.train(until_end=False, steps=1, groups_per_step=1, group_timeout=1000.0)
    assert memory.groups() == ["a"], "nobody waits for the slow group"
    memory.train(until_end=False, steps=2, groups_per_step=1, group_timeout=0.5)
    assert memory.groups() == ["a", "slow"]
    memory.send(episode("slow", 2, size=3), partition=0)
    memory.train()
    assert memory.verdict() | {"trained": 4, "dropped": {"late": 1}} == memory.verdict()


def test_the_bound_is_strict_for_what_waits_in_the_log(memory: Rig, episode: Episode) -> None:
    """Policies 1 and 2 train samples of version 1; from policy 3 on they are older than the bound of 1."""
    memory.send(*pairs(episode, "a", "b", "c", "d", version=1), *pairs(episode, "e", version=4), partition=0)
    memory.train(groups_per_step=1, max_staleness=1)
    trained = {group: reasons([r]) for r in memory.receipts for group in r.groups}
    assert trained == {"a": {}, "b": {}, "c": {"stale": 2}, "d": {"stale": 2}, "e": {}}


def test_a_sample_without_versions_cannot_be_bounded(memory: Rig, episode: Episode) -> None:
    memory.send(*(replace(t, spans=()) for t in pairs(episode, "a")))
    memory.train()
    assert memory.verdict()["dropped"] == {"unversioned": 2}


class Crash(Exception):
    """Ends a trainer at once."""


class FlakyStore(MemoryStore):
    """Fails at the first write to a key that ends like this."""

    fail: str | None = None

    def put(self, key: str, data: bytes, *, if_none_match: bool = False, if_match: str | None = None) -> str:
        if self.fail is not None and key.endswith(self.fail):
            self.fail = None
            raise StoreError(f"no answer for {key}")
        return super().put(key, data, if_none_match=if_none_match, if_match=if_match)


GROUPS = [f"g{n}" for n in range(6)]
SHUFFLING = replace(GRPO, minibatches=2)


@pytest.fixture(scope="module")
def whole(policy_dir: Path, episode: Episode, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    """A run over six groups in three steps that nothing disturbs."""
    rig = make_rig(policy_dir, tmp_path_factory.mktemp("whole"))
    rig.send(*pairs(episode, *GROUPS), partition=0)
    rig.train(learner=SHUFFLING)
    return rig


@pytest.mark.parametrize("crash", ["between-steps", "after-publish", "objects", "manifest.json", "latest.json"])
def test_a_restart_goes_on_as_if_nothing_had_happened(memory: Rig, whole: Rig, episode: Episode, crash: str) -> None:
    memory.send(*pairs(episode, *GROUPS), partition=0)
    store = FlakyStore()
    memory.store = store

    def on_step(receipt: Receipt) -> None:
        if receipt.step == 1 and crash == "after-publish":
            raise Crash
        if receipt.step == 1:
            store.fail = crash

    if crash == "between-steps":
        memory.train(learner=SHUFFLING, steps=1)
    elif crash == "objects":
        memory.train(learner=SHUFFLING, steps=1)
        break_uploads(memory)
    else:
        with pytest.raises((Crash, StoreError)):
            memory.train(learner=SHUFFLING, on_step=on_step)
    memory.train(learner=SHUFFLING)
    assert memory.latest().files[WEIGHTS] == whole.latest().files[WEIGHTS]
    ours, theirs = memory.lineage(), whole.lineage()
    assert [(r.step, r.loss, r.groups) for r in ours] == [(r.step, r.loss, r.groups) for r in theirs]
    assert [[c.trained.tolist() for c in r.consumed] for r in ours] == [
        [c.trained.tolist() for c in r.consumed] for r in theirs
    ]
    written = [r.version for r in Ledger(memory.log, memory.names, RUN).receipts()]
    assert len(set(written)) == len(written), "a version is never used again"
    assert memory.verdict()["trained"] == 12


def break_uploads(rig: Rig) -> None:
    """A step of which the receipt is written and not one object."""

    class NoUploads(MemoryStore):
        def put_file(self, key: str, path: Path) -> str:
            raise StoreError("no space left")

    broken = NoUploads()
    for entry in rig.store.list():
        broken.put(entry.key, rig.store.get(entry.key).data)
    good, rig.store = rig.store, broken
    with pytest.raises(StoreError):
        rig.train(learner=SHUFFLING)
    rig.store = good


def test_state_every_other_step_goes_back_and_still_adds_up(memory: Rig, whole: Rig, episode: Episode) -> None:
    def on_step(receipt: Receipt) -> None:
        if receipt.step == 1:
            raise Crash

    memory.send(*pairs(episode, *GROUPS), partition=0)
    with pytest.raises(Crash):
        memory.train(learner=SHUFFLING, state_every=2, on_step=on_step)
    assert memory.latest().step == 1
    memory.train(learner=SHUFFLING, state_every=2)
    assert [(r.step, r.version, r.parent) for r in memory.lineage()] == [(0, 1, 0), (1, 3, 1), (2, 4, 3), (3, 5, 4)]
    assert memory.latest().files[WEIGHTS] == whole.latest().files[WEIGHTS]
    assert memory.verdict()["trained"] == 12


@pytest.mark.parametrize("how", ["steps", "stop"])
def test_an_orderly_end_keeps_the_state_whatever_state_every_says(memory: Rig, episode: Episode, how: str) -> None:
    memory.send(*pairs(episode, "a", "b", "c"), partition=0)
    if how == "steps":
        memory.train(groups_per_step=1, state_every=7, steps=2)
    else:
        trainer = memory.trainer(groups_per_step=1, state_every=7, on_step=lambda _: trainer.stop())
        trainer.run(memory.model)
    left = memory.latest()
    memory.train(groups_per_step=1, state_every=7)
    assert [r.parent for r in memory.lineage()].count(left.version) == 1, "it went on from there"
    assert memory.verdict()["trained"] == 6


class OldStore(MemoryStore):
    """Lists everything as written long ago, so that no grace protects it."""

    def list(self, prefix: str = "") -> Sequence[Entry]:
        return [e._replace(modified=e.modified - timedelta(days=1)) for e in super().list(prefix)]


class DumbStore(MemoryStore):
    """Does not tell which objects it has."""

    def list(self, prefix: str = "") -> Sequence[Entry]:
        if "/objects/" in prefix:
            raise StoreError("no answer")
        return super().list(prefix)


def fetch_weights(rig: Rig, version: int) -> None:
    rig.checkpoints.fetch(rig.checkpoints.manifest(version), "weights/", rig.scratch / f"try-{version}" / "policy")


@pytest.mark.parametrize(("keep", "kept"), [(2, [8, 10, 11, 12]), (0, [*range(1, 13)])])
def test_old_checkpoints_are_collected_and_the_one_to_go_on_from_stays(
    memory: Rig, episode: Episode, keep: int, kept: list[int]
) -> None:
    def on_step(receipt: Receipt) -> None:
        if receipt.step == 11:
            raise Crash

    memory.store = OldStore()
    memory.send(*pairs(episode, *(f"g{n}" for n in range(12))), partition=0)
    with pytest.raises(Crash):
        memory.train(groups_per_step=1, state_every=7, keep=keep, on_step=on_step)
    assert memory.checkpoints.versions() == [*range(1, 13)]
    for version in kept:
        fetch_weights(memory, version)
    for version in {*range(1, 13)} - {*kept}:
        with pytest.raises(CheckpointError, match="is not in the store: this checkpoint was collected"):
            fetch_weights(memory, version)
    assert memory.verdict()["trained"] == 22
    memory.train(groups_per_step=1, state_every=7, keep=keep)
    assert memory.lineage()[8].parent == 8, "it went back to the state in policy 8"
    assert memory.verdict()["trained"] == 24


def test_a_collection_that_fails_ends_nothing(memory: Rig, episode: Episode, caplog: pytest.LogCaptureFixture) -> None:
    memory.store = DumbStore()
    memory.send(*pairs(episode, *(f"g{n}" for n in range(11))), partition=0)
    assert memory.train(groups_per_step=1, keep=2).step == 11
    assert "old checkpoints of run run not collected: no answer" in caplog.text
    assert memory.verdict()["trained"] == 22


def test_a_second_trainer_fences_the_first_and_is_named(rig: Rig, episode: Episode) -> None:
    ready = threading.Event()
    first = rig.trainer(until_end=False, groups_per_step=1, on_step=lambda _: ready.set())
    errors: list[BaseException] = []

    def run() -> None:
        try:
            first.run(rig.model)
        except BaseException as error:  # noqa: BLE001 - looked at below
            errors.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(40)
    rig.train(steps=0)
    rig.send(*pairs(episode, "a"))
    thread.join(60)
    (error,) = errors
    winner = json.loads(rig.store.get(f"{RUN}/latest.json").data)["incarnation"]
    assert isinstance(error, Fenced)
    assert error.incarnation == winner
    assert winner in str(error)
    rig.train()
    assert rig.groups() == ["a"]
    assert rig.verdict()["trained"] == 2


class LateRival(Checkpoints):
    """The older trainer publishes one more step just before it loses the run."""

    def claim(self, incarnation: str) -> Any:
        latest = self.latest()
        if latest is not None:
            files = {name: self._store.get(self._objects.key(f.sha256)).data for name, f in latest.files.items()}
            self.publish(
                latest.version + 1,
                files,
                parent=latest.version,
                incarnation=latest.incarnation,
                step=latest.step + 1,
                cursors=latest.cursors,
                metadata=latest.metadata,
            )
        return super().claim(incarnation)


def test_a_step_published_just_before_the_claim_is_not_passed_over(memory: Rig) -> None:
    memory.train()
    settings = TrainerSettings(environments={"maze": 1.0}, steps=0)
    rival = LateRival(memory.store, RUN)
    place = Trainer(memory.log, memory.names, RUN, rival, settings, scratch=memory.scratch).run()
    assert (place.version, place.step) == (2, 1)


def test_a_version_that_a_fenced_trainer_left_behind_is_stepped_over(memory: Rig, episode: Episode) -> None:
    memory.send(*pairs(episode, "a"))
    memory.train(steps=0)

    class Leftover(Checkpoints):
        def publish(self, version: int, *args: Any, **fields: Any) -> Manifest:
            if version == 2:
                left = replace(self.manifest(1), version=2, parent=1, incarnation="fenced")
                memory.store.put(self.manifest_key(2), encode_manifest(left))
            return super().publish(version, *args, **fields)

    settings = TrainerSettings(environments={"maze": 1.0}, learner=GRPO, until_end=True)
    rival = Leftover(memory.store, RUN)
    place = Trainer(memory.log, memory.names, RUN, rival, settings, scratch=memory.scratch).run()
    assert place.version == 3
    assert [(r.version, r.parent) for r in memory.lineage()] == [(1, 0), (3, 1)]
    assert memory.verdict()["trained"] == 2


def test_cloning_and_reinforcing_are_one_run(memory: Rig, episode: Episode) -> None:
    scripted = [replace(t, spans=(), logprobs=np.empty(0, np.float32)) for t in pairs(episode, "a", "b", "c")]
    memory.send(*scripted, episode("single", 0, size=8))
    memory.train(learner=CLONE, max_staleness=None)
    assert memory.verdict() | {"trained": 7, "dropped": {}} == memory.verdict()
    version = memory.latest().version
    memory.send(scripted[0], *pairs(episode, "d", version=version))
    memory.train(max_staleness=0)
    assert memory.verdict() | {"trained": 9, "dropped": {"duplicate": 1}} == memory.verdict()
    assert [r.step for r in memory.lineage()] == list(range(len(memory.lineage())))
    objectives = [m.metadata["objective"] for m in memory.checkpoints.lineage(memory.latest().version)]
    assert objectives[0] == "grpo"
    assert set(objectives[1:]) == {"clone"}


def test_the_penalty_needs_a_reference_and_keeps_to_it(memory: Rig, episode: Episode) -> None:
    pulled = replace(GRPO, kl=0.1)
    with pytest.raises(RollstreamError, match=r"kl 0\.1.*expected that model's directory"):
        memory.trainer(learner=pulled).run()
    assert memory.store.list() == [], "a start by mistake claims nothing"
    memory.send(*pairs(episode, "a", "b"))
    memory.train(learner=replace(GRPO, lr=0.1))
    with pytest.raises(RollstreamError, match=r"kl 0\.1"):
        memory.trainer(learner=pulled).run()
    memory.send(*pairs(episode, "c"))
    memory.train(learner=pulled)
    assert memory.receipts[-1].metrics["kl"] > 1e-3, "it left the model given before the penalty was switched on"


def test_a_new_run_needs_a_model(memory: Rig) -> None:
    with pytest.raises(RollstreamError, match="no checkpoint yet"):
        memory.trainer().run()
    assert memory.store.list() == []


def test_stop_returns_from_an_endless_wait(memory: Rig) -> None:
    trainer = memory.trainer(until_end=False, on_step=lambda _: trainer.stop())
    assert trainer.run(memory.model) == Place(version=1, incarnation=memory.receipts[0].incarnation, step=0)


def test_the_audit_is_clean_at_every_moment_of_a_live_run(memory: Rig, episode: Episode) -> None:
    memory.send(*pairs(episode, *GROUPS))
    seen: list[tuple[int, int]] = []

    def look(_: Receipt) -> None:
        verdict = memory.verdict()
        seen.append((verdict["trained"], verdict["pending"]))

    memory.train(on_step=look)
    assert seen == [(0, 12), (4, 8), (8, 4), (12, 0)]


def test_a_real_store_holds_the_same_run(memory: Rig, whole: Rig, episode: Episode, s3_store: ObjectStore) -> None:
    memory.store = s3_store
    memory.send(*pairs(episode, *GROUPS), partition=0)
    memory.train(learner=SHUFFLING, steps=2)
    memory.train(learner=SHUFFLING)
    assert memory.latest().files[WEIGHTS] == whole.latest().files[WEIGHTS]
    assert memory.verdict()["trained"] == 12


@pytest.mark.parametrize("seed", range(3))
def test_chaos_adds_up(memory: Rig, episode: Episode, seed: int) -> None:
    """Copies, poison, failures, splits and crashes at random: each group is named once, each record settled once."""
    random = np.random.default_rng(seed)
    stream = list(records(episode, random))
    store = FlakyStore()
    memory.store = store
    for chunk in range(4):
        for value, headers, key in stream[chunk::4]:
            memory.put(value, headers, key, int(random.integers(2)))
        store.fail = [None, "manifest.json", "latest.json", None][int(random.integers(4))]
        try:
            memory.train(groups_per_step=3, steps=int(random.integers(1, 6)) + chunk, until_end=True)
        except StoreError:
            continue
    store.fail = None
    memory.train(groups_per_step=3)
    verdict = memory.verdict()
    assert verdict["pending"] == 0
    assert verdict["trained"] > 0
    named = Counter(memory.groups())
    assert named.keys() == {f"g{n}" for n in range(10)}
    assert set(named.values()) == {1}


def records(
    episode: Episode, random: np.random.Generator
) -> Iterator[tuple[bytes | None, dict[str, bytes] | None, str]]:
    """Of ten groups of three, shuffled: good ones, failed ones, copies, poison with and without headers, tombstones."""
    chosen = [(f"g{n}", index) for n in range(10) for index in range(3)] * 2
    for at in random.permutation(len(chosen)):
        group, index = chosen[int(at)]
        trajectory = episode(group, index, size=3)
        kind = random.integers(8)
        if kind == 0:
            yield None, None, group
        if kind == 1:
            yield b"\x01junk", None, group
        if kind == 2:
            yield encode(trajectory)[:-1], trajectory_headers(trajectory), group
        elif kind == 3:
            failed = replace(trajectory, status=Status.FAILED, cause="raised")
            yield encode(failed), trajectory_headers(failed), group
        else:
            yield encode(trajectory), trajectory_headers(trajectory), group
