"""A step made again from its receipt: the same bits, after crashes too; and what was tampered with is told.

And the way of each record: to its step and the checkpoints that contain it, and back.
"""

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from rollstream.app import main as app
from rollstream.app.context import Context
from rollstream.consumers import LearnerSettings, Ledger, Objective, Trainer, TrainerSettings
from rollstream.consumers.recall import GAP, ReplayError
from rollstream.consumers.replay import Replay, Replayer
from rollstream.consumers.retention import collect_old
from rollstream.consumers.tracing import Branch, Tracer
from rollstream.infra.checkpoints import CheckpointError, Checkpoints
from rollstream.infra.claims import Claims
from rollstream.infra.config import Config
from rollstream.infra.log import Log, Partition, Position, Record
from rollstream.infra.manifest import encode_manifest
from rollstream.infra.memory import MemoryLog
from rollstream.infra.scan import scan
from rollstream.infra.schemabook import LogSchemas
from rollstream.infra.store import MemoryStore, ObjectStore, StoreError
from rollstream.infra.topics import Names, declared
from rollstream.schemas import Receipt, Schemas, Trajectory, decode_as, encode, trajectory_headers

Episode = Callable[..., Trajectory]
RUN = "run"
GRPO = LearnerSettings(lr=1e-2, min_informative=0.0)
SHUFFLING = replace(GRPO, minibatches=2, epochs=2)
CLONE = replace(GRPO, objective=Objective.CLONE)


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


@dataclass
class Rig:
    """A run, trained and replayed."""

    log: Log
    names: Names
    model: Path
    scratch: Path
    store: ObjectStore = field(default_factory=FlakyStore)

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.store, RUN)

    def send(self, *trajectories: Trajectory, partition: int | None = None) -> list[Position]:
        topic = self.names.trajectories("maze")
        with self.log.writer() as writer:
            futures = [
                writer.append(
                    topic, encode(t), key=t.group_id.encode(), headers=trajectory_headers(t), partition=partition
                )
                for t in trajectories
            ]
            return [future.result(40) for future in futures]

    def train(
        self, learner: LearnerSettings = GRPO, *, on_step: Callable[[Receipt], None] | None = None, **settings: Any
    ) -> None:
        defaults: dict[str, Any] = {"groups_per_step": 2, "max_staleness": 100, "until_end": True}
        chosen = TrainerSettings(environments={"maze": 1.0}, learner=learner, **(defaults | settings))
        trainer = Trainer(
            self.log, self.names, RUN, self.checkpoints, chosen, scratch=self.scratch / "train", on_step=on_step
        )
        trainer.run(self.model)

    def train_and_crash(self, step: int, learner: LearnerSettings = GRPO, **settings: Any) -> None:
        """Up to the moment when this step is published."""

        def crash(receipt: Receipt) -> None:
            if receipt.step == step:
                raise Crash

        with pytest.raises(Crash):
            self.train(learner, on_step=crash, **settings)

    def replay(self, step: int, *, version: int | None = None) -> Replay:
        folder = tempfile.mkdtemp(prefix=f"replay-{step}-", dir=self.scratch)
        claims, schemas = Claims(lambda: self.store, self.names), Schemas(LogSchemas(self.log, self.names))
        ledger = Ledger(self.log, self.names, RUN)
        replayer = Replayer(self.log, ledger, self.checkpoints, claims, schemas, scratch=Path(folder))
        return replayer.replay(step, version=version)

    def receipts(self) -> list[Receipt]:
        return list(Ledger(self.log, self.names, RUN).receipts())

    def elsewhere(self, change: Callable[[Record], Record | None]) -> "Rig":
        """The same run on a log whose records were tampered with; None leaves one out."""
        log = MemoryLog()
        for topic in declared(self.names.namespace, {"maze": 2}):
            log.create(topic)
            with log.writer() as writer:
                for record in scan(self.log, self.log.partitions(topic.name)):
                    if (told := change(record)) is not None:
                        where = told.partition.number
                        writer.append(topic.name, told.value, key=told.key, headers=told.headers, partition=where)
        return replace(self, log=log)


@pytest.fixture
def rig(log: Log, names: Names, policy_dir: Path, tmp_path: Path) -> Rig:
    return Rig(log, names, policy_dir, tmp_path)


@pytest.fixture
def memory(policy_dir: Path, tmp_path: Path) -> Rig:
    log, names = MemoryLog(), Names("m")
    for topic in declared("m", {"maze": 2}):
        log.create(topic)
    return Rig(log, names, policy_dir, tmp_path)


def pairs(episode: Episode, *groups: str, **fields: Any) -> list[Trajectory]:
    return [episode(group, index, **fields) for group in groups for index in (0, 1)]


GROUPS = tuple(f"g{n}" for n in range(6))


def unchanged(replay: Replay) -> bool:
    return replay.identical and replay.faithful and replay.receipt_loss == replay.replay_loss


@pytest.mark.parametrize("learner", [GRPO, SHUFFLING, CLONE], ids=["grpo", "minibatches", "clone"])
def test_every_step_replays_bit_for_bit(rig: Rig, episode: Episode, learner: LearnerSettings) -> None:
    rig.send(*pairs(episode, *GROUPS, sampled=9), *pairs(episode, "flat", reward=1.0), episode("g0", 0))
    rig.train(learner, max_staleness=None if learner.objective is Objective.CLONE else 100)
    for receipt in rig.receipts()[1:]:
        replay = rig.replay(receipt.step)
        assert unchanged(replay), replay.differences
        assert (replay.version, replay.start, replay.steps) == (receipt.version, receipt.parent, 1)
        assert replay.remarks == ()
        assert replay.batch == rig.replay(receipt.step).batch


def test_the_weights_are_those_that_were_published(memory: Rig, episode: Episode) -> None:
    memory.send(*pairs(episode, *GROUPS))
    memory.train(SHUFFLING)
    assert unchanged(memory.replay(2))
    (folder,) = memory.scratch.glob("replay-2-*")
    found = hashlib.sha256((folder / "replayed" / "model.safetensors").read_bytes()).hexdigest()
    assert found == memory.checkpoints.manifest(3).files["weights/model.safetensors"].sha256


@pytest.mark.parametrize("crash", ["objects", "manifest.json", "latest.json", "between"])
def test_steps_around_a_crash_replay(rig: Rig, episode: Episode, crash: str) -> None:
    """The step that a crash left behind has the same number; the one on the lineage is found."""
    rig.send(*pairs(episode, *GROUPS))
    store = rig.store
    assert isinstance(store, FlakyStore)

    def on_step(receipt: Receipt) -> None:
        if receipt.step == 1:
            if crash == "between":
                raise Crash
            store.fail = "manifest.json" if crash == "objects" else crash

    with pytest.raises((Crash, StoreError)):
        rig.train(SHUFFLING, on_step=on_step)
    rig.train(SHUFFLING)
    steps = [r.step for r in rig.receipts()]
    assert max(steps) == 3
    for step in (1, 2, 3):
        replay = rig.replay(step)
        assert unchanged(replay), replay.differences


def test_state_in_every_third_checkpoint_makes_the_steps_between_again(memory: Rig, episode: Episode) -> None:
    memory.send(*pairs(episode, *(f"g{n}" for n in range(14))))
    memory.train_and_crash(5, SHUFFLING, state_every=3)
    memory.train(SHUFFLING, state_every=3)
    found = {step: memory.replay(step) for step in range(1, 8)}
    assert all(map(unchanged, found.values())), [r.differences for r in found.values()]
    # The first life made steps 4 and 5 too; the second went back to the state of step 3.
    assert [(r.start, r.steps) for r in found.values()] == [(1, 1), (1, 2), (1, 3), (4, 1), (4, 2), (4, 3), (9, 1)]
    dead = memory.replay(5, version=6)
    assert unchanged(dead)
    assert (dead.version, dead.replay_loss) == (6, found[5].replay_loss)


def test_a_change_of_objective_starts_a_fresh_optimizer_in_the_replay_too(memory: Rig, episode: Episode) -> None:
    memory.send(*pairs(episode, *GROUPS[:4]))
    memory.train(CLONE, max_staleness=None)
    memory.send(*pairs(episode, "h0", "h1", "h2", "h3"))
    memory.train(replace(SHUFFLING, lr=3e-3), state_every=2)
    for step in (1, 2, 3, 4):
        assert unchanged(memory.replay(step))


def test_a_penalty_is_replayed_with_its_reference(memory: Rig, episode: Episode) -> None:
    pulled = replace(GRPO, kl=0.1)
    memory.send(*pairs(episode, *GROUPS[:4]))
    memory.train(replace(GRPO, lr=0.1))
    memory.send(*pairs(episode, "h0", "h1", "h2", "h3"))
    memory.train(pulled)
    memory.send(*pairs(episode, "i0", "i1", "i2", "i3", "i4", "i5"))
    memory.train(pulled, state_every=3)
    for step in range(1, 7):
        replay = memory.replay(step)
        assert unchanged(replay), (step, replay.differences)


def test_a_reference_that_no_checkpoint_holds_is_said_to_be_missing(memory: Rig, episode: Episode) -> None:
    memory.send(*pairs(episode, *GROUPS[:2]))
    memory.train()
    memory.send(*pairs(episode, "h0", "h1"))
    memory.train(replace(GRPO, kl=0.1), state_every=100)
    with pytest.raises(ReplayError, match="reference model that stands in no checkpoint"):
        memory.replay(2)


def test_steps_that_change_nothing_replay(memory: Rig, episode: Episode) -> None:
    """A group without variance, an update skipped for few informative samples, one of drops alone."""
    memory.send(*pairs(episode, "a", reward=0.5), *pairs(episode, "b"))
    memory.train(replace(GRPO, min_informative=0.9))
    memory.send(*(replace(t, spans=()) for t in pairs(episode, "c")))
    memory.train()
    first, second = memory.replay(1), memory.replay(2)
    reasons = [{k for c in r.consumed for k in c.dropped} for r in memory.receipts()]
    assert reasons == [set(), {"zero-variance", "skipped-uninformative"}, {"unversioned"}]
    assert unchanged(first)
    assert unchanged(second)
    assert (first.samples, second.samples) == (4, 0)


def test_stale_and_late_samples_stay_out_of_the_replay(memory: Rig, episode: Episode) -> None:
    old = [episode("a", 0, size=3), episode("a", 1, size=3, version=4), episode("a", 2, size=3, version=4)]
    memory.send(*pairs(episode, "b", "c", "d"), *old, *pairs(episode, "e", version=4), *pairs(episode, "b"))
    memory.train(groups_per_step=1, max_staleness=3)
    for receipt in memory.receipts()[1:]:
        assert unchanged(memory.replay(receipt.step)), receipt.step


def test_records_far_apart_are_found(memory: Rig, episode: Episode) -> None:
    memory.send(episode("a", 0), partition=0)
    with memory.log.writer() as writer:
        for _ in range(GAP + 10):
            writer.append(memory.names.trajectories("maze"), None, partition=0)
    memory.send(episode("a", 1), *pairs(episode, "b"), partition=0)
    memory.train()
    assert unchanged(memory.replay(1))


def test_the_trainers_threads_are_taken_and_given_back(memory: Rig, episode: Episode) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        memory.send(*pairs(episode, *GROUPS[:2]))
        memory.train()
        torch.set_num_threads(1)
        assert unchanged(memory.replay(1))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def tampered(trajectory: Trajectory, what: str) -> Trajectory:
    changes: dict[str, dict[str, Any]] = {
        "token": {"tokens": (trajectory.tokens + np.int32(1)) % np.int32(24)},
        "logprob": {"logprobs": trajectory.logprobs - np.float32(0.25)},
        "reward": {"reward": trajectory.reward + 0.5},
        "temperature": {"temperature": 0.5},
    }
    return replace(trajectory, **changes[what])


@pytest.mark.parametrize("what", ["token", "logprob", "reward", "temperature"])
def test_a_record_that_was_tampered_with_is_told(memory: Rig, episode: Episode, what: str) -> None:
    memory.send(episode("a", 0, size=3), episode("a", 1, size=3), episode("a", 2, size=3), *pairs(episode, "b"))
    memory.train()
    good = memory.replay(1)

    def change(record: Record) -> Record:
        if record.partition.topic != memory.names.trajectories("maze"):
            return record
        trajectory = decode_as(Trajectory, record.value or b"")
        return replace(record, value=encode(tampered(trajectory, what))) if trajectory.sample_index == 1 else record

    bad = memory.elsewhere(change).replay(1)
    assert unchanged(good)
    assert not bad.identical
    assert not bad.faithful
    assert bad.batch != good.batch
    assert "weights/model.safetensors" in bad.differences


def forge(what: str) -> Callable[[Receipt], Receipt]:
    def change(receipt: Receipt) -> Receipt:
        (consumed,) = receipt.consumed
        if what == "loss":
            return replace(receipt, loss=float(np.nextafter(receipt.loss, 1.0)))
        if what == "metric":
            return replace(receipt, metrics={**receipt.metrics, "entropy": 1.0})
        trained, left = consumed.trained[:-1], consumed.trained[-1:]
        dropped = {"late": left} if what == "dropped" else {"zero-variance": left}
        return replace(receipt, consumed=(replace(consumed, trained=trained, dropped=dropped),))

    return change


@pytest.mark.parametrize(
    ("what", "difference"),
    [
        ("loss", "loss"),
        ("metric", "entropy"),
        ("dropped", "trajectories"),
        ("no-variance", "the records that were trained and dropped"),
    ],
)
def test_a_receipt_that_was_tampered_with_is_told(memory: Rig, episode: Episode, what: str, difference: str) -> None:
    memory.send(*(episode("a", i, size=3) for i in range(3)), *pairs(episode, "b"), partition=0)
    memory.train()

    def change(record: Record) -> Record:
        if record.partition.topic != memory.names.ledger:
            return record
        receipt = decode_as(Receipt, record.value or b"")
        return replace(record, value=encode(forge(what)(receipt))) if receipt.step == 1 else record

    replay = memory.elsewhere(change).replay(1)
    assert not replay.identical
    assert difference in replay.differences


@pytest.mark.parametrize(("off", "faithful"), [(1e-7, True), (1e-2, False)])
def test_what_several_ranks_made_is_held_to_rounding(memory: Rig, episode: Episode, off: float, faithful: bool) -> None:
    memory.send(*pairs(episode, "a", "b"), partition=0)
    memory.train()
    told = memory.checkpoints.manifest(2)
    two = replace(told, metadata={**told.metadata, "ranks": "2"})
    memory.store.put(memory.checkpoints.manifest_key(2), encode_manifest(two))

    def change(record: Record) -> Record:
        if record.partition.topic != memory.names.ledger:
            return record
        receipt = decode_as(Receipt, record.value or b"")
        return replace(record, value=encode(replace(receipt, loss=receipt.loss + off))) if receipt.step else record

    replay = memory.elsewhere(change).replay(1, version=2)
    assert (replay.identical, replay.faithful) == (False, faithful)
    assert replay.remarks == ("ranks: 2 then, 1 now",)


def test_what_cannot_be_replayed_says_why(memory: Rig, episode: Episode) -> None:
    with pytest.raises(ReplayError, match="no checkpoint yet"):
        memory.replay(1)
    memory.send(*pairs(episode, *GROUPS), partition=0)
    memory.train()
    with pytest.raises(ReplayError, match="step 0 published the first weights"):
        memory.replay(0)
    with pytest.raises(
        ReplayError, match=r"step 9 has no receipt on the lineage of policy 4; there are those of steps 0"
    ):
        memory.replay(9)
    with pytest.raises(ReplayError, match="step 3 has no receipt on the lineage of policy 3"):
        memory.replay(3, version=3)
    with pytest.raises(CheckpointError, match="no checkpoint of policy 7"):
        memory.replay(1, version=7)


def test_what_retention_removed_is_named(memory: Rig, episode: Episode) -> None:
    memory.send(*pairs(episode, *GROUPS), partition=0)
    memory.train()
    assert isinstance(memory.log, MemoryLog)
    partition = Partition(memory.names.trajectories("maze"), 0)
    memory.log.expire(partition, 5)
    with pytest.raises(ReplayError, match=r"\[0\]@4, which retention has removed: the log starts at 5"):
        memory.replay(2)
    assert unchanged(memory.replay(3))
    memory.log.expire(Partition(memory.names.ledger, 0), 3)
    with pytest.raises(ReplayError, match=r"step 2 has no receipt .* there are those of steps 3 to 3"):
        memory.replay(2)
    collect_old(memory.checkpoints, 1, grace=0)
    with pytest.raises(CheckpointError, match="this checkpoint was collected"):
        memory.replay(3)


def test_another_log_or_an_old_checkpoint_is_refused(memory: Rig, episode: Episode) -> None:
    memory.send(*pairs(episode, "a", "b"), partition=0)
    memory.train()
    empty = memory.elsewhere(lambda r: None if r.partition.topic.endswith("maze") else r)
    with pytest.raises(ReplayError, match="the log ends at 0: is it the log that this run was trained from"):
        empty.replay(1)
    stoned = memory.elsewhere(lambda r: replace(r, value=None) if r.partition.topic.endswith("maze") else r)
    with pytest.raises(ReplayError, match="holds no record any more"):
        stoned.replay(1)
    junk = memory.elsewhere(lambda r: replace(r, value=b"\x01") if r.partition.topic.endswith("maze") else r)
    with pytest.raises(ReplayError, match="cannot be read any more"):
        junk.replay(1)
    old = replace(memory.checkpoints.manifest(2), metadata={"objective": "grpo"})
    memory.store.put(memory.checkpoints.manifest_key(2), encode_manifest(old))
    with pytest.raises(CheckpointError, match="written by another release"):
        memory.replay(1, version=2)


# ------------------------------------------------------------------ where something went


def tracer(rig: Rig, version: int | None = None) -> Tracer:
    return Tracer(rig.log, Ledger(rig.log, rig.names, RUN), rig.checkpoints, version=version)


def test_an_offset_leads_to_its_step_and_the_policies_that_contain_it(rig: Rig, episode: Episode) -> None:
    first = rig.send(*pairs(episode, "a", "b"), partition=0)
    rig.train()
    second = rig.send(*pairs(episode, "c", reward=0.5), episode("a", 0), *pairs(episode, "d"), partition=1)
    rig.train()
    third = rig.send(episode("e", 0), partition=0)
    trace = tracer(rig)
    tracks = [trace.track(p) for p in (*first, *second, *third)]
    assert [t.state for t in tracks] == ["trained"] * 4 + ["dropped"] * 3 + ["trained"] * 2 + ["pending"]
    assert [f.outcome for t in tracks for f in t.fates] == (
        ["trained"] * 4 + ["zero-variance"] * 2 + ["duplicate"] + ["trained"] * 2
    )
    assert [t.policies for t in tracks] == [(2, 3)] * 4 + [(3,)] * 5 + [()]
    assert {f.branch for t in tracks for f in t.fates} == {Branch.LINEAGE}
    assert (tracks[0].trajectory_id, tracks[0].group_id) == ("a/0/0", "a")
    partitions = rig.log.partitions(rig.names.trajectories("maze"))
    assert trace.find(partitions, "a/0/0") == [first[0], second[2]]
    assert trace.find(partitions, "z/0/0") == []
    past = tracer(rig, 2).track(second[2])
    assert (past.state, past.policies, [f.branch for f in past.fates]) == ("pending", (), [Branch.LEFT])


def test_a_policy_leads_back_to_its_parents_and_offsets(memory: Rig, episode: Episode) -> None:
    sent = memory.send(*pairs(episode, "a", "b"), episode("a", 0), *pairs(episode, "c", "d"), partition=0)
    memory.train()
    (deed,) = tracer(memory).policy(3)
    assert (deed.receipt.step, deed.branch, deed.parents) == (2, Branch.LINEAGE, (2, 1))
    told = [d.as_json() for d in tracer(memory).step(1) + tracer(memory).step(2)]
    trained = [d["trained"] for d in told]
    assert trained == [{"m.trajectories.maze[0]": [0, 1, 2, 3]}, {"m.trajectories.maze[0]": [5, 6, 7, 8]}]
    assert told[1]["dropped"] == {"m.trajectories.maze[0]": {"duplicate": [sent[4].offset]}}
    assert tracer(memory).policy(9) == []


def test_dead_branches_are_named_as_such(memory: Rig, episode: Episode) -> None:
    """Policy 3 was published and gone back behind; policy 5 crashed between its receipt and its manifest."""
    sent = memory.send(*pairs(episode, *GROUPS), partition=0)
    store = memory.store
    assert isinstance(store, FlakyStore)
    memory.train_and_crash(1, state_every=2)

    def crash(_: Receipt) -> None:
        store.fail = "manifest.json"

    with pytest.raises(StoreError):
        memory.train(state_every=2, on_step=crash)
    memory.train(state_every=2)
    trace = tracer(memory)
    track = trace.track(sent[0])
    assert track.state == "trained"
    assert len(track.fates) > 1
    assert track.fates[0].branch is Branch.LINEAGE
    assert {f.branch for f in track.fates} == {Branch.LINEAGE, Branch.LEFT}
    branches = {r.version: d.branch for r in memory.receipts() for d in trace.policy(r.version)}
    assert Branch.UNPUBLISHED in branches.values()
    assert {v for v, b in branches.items() if b is Branch.UNPUBLISHED}.isdisjoint(memory.checkpoints.versions())
    dead = [v for v, b in branches.items() if b is not Branch.LINEAGE]
    assert not {v for t in map(trace.track, sent) for v in t.policies} & {*dead}


def test_what_is_not_there_is_told_apart(memory: Rig, episode: Episode) -> None:
    sent = memory.send(*pairs(episode, *GROUPS[:4]), partition=0)
    assert tracer(memory).track(sent[0]).state == "pending"
    memory.train()
    assert isinstance(memory.log, MemoryLog)
    assert tracer(memory).track(Position(sent[0].partition, 99)).state == "unwritten"
    hidden = memory.elsewhere(lambda r: None if r.partition.topic == memory.names.ledger and r.offset == 2 else r)
    memory.log.expire(sent[0].partition, 1)
    gone = tracer(memory).track(sent[0])
    assert (gone.state, gone.trajectory_id, gone.policies) == ("trained", None, (2, 3))
    memory.log.expire(Partition(memory.names.ledger, 0), 2)
    assert tracer(memory).track(sent[0]).state == "expired"
    assert tracer(memory).track(sent[1]).state == "untold"
    assert tracer(hidden).track(sent[7]).state == "lost"


# ------------------------------------------------------------------ the commands


class Told(NamedTuple):
    """What a command said."""

    status: int
    out: str
    err: str


@pytest.fixture
def command(memory: Rig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Told]:
    """Runs a command line in this process over the rig's log and store."""

    @contextmanager
    def opened(_: object) -> Generator[Context]:
        here = Context(Config.load(None, overrides=("run.name=run", "run.namespace=m")))
        here.__dict__.update(log=memory.log, store=memory.store)
        yield here

    monkeypatch.chdir(memory.scratch)
    monkeypatch.delenv("ROLLSTREAM_CONFIG", raising=False)
    monkeypatch.setattr("rollstream.app.lineage.opened", opened)
    monkeypatch.setattr("rollstream.app.books.opened", opened)

    def run(*arguments: str) -> Told:
        monkeypatch.setattr(sys, "argv", ["rollstream", *arguments])
        with pytest.raises(SystemExit) as ended:
            app.main()
        told = capsys.readouterr()
        return Told(int(ended.value.code or 0), told.out, told.err)

    return run


def test_rollstream_replay(memory: Rig, episode: Episode, command: Callable[..., Told]) -> None:
    memory.send(*pairs(episode, *GROUPS))
    memory.train()
    told = command("replay", "--step", "2")
    assert (told.status, told.err) == (0, "")
    loss = next(r.loss for r in memory.receipts() if r.step == 2)
    assert told.out.count(repr(loss)) == 2
    assert "identical      true" in told.out
    found = json.loads(command("replay", "--step", "2", "--json").out)
    assert found["identical"] is True
    assert found["batch"] in told.out
    assert command("replay", "--step", "9").status == 2
    assert command("replay", "--step", "9").err.startswith("rollstream: step 9 has no receipt")


def test_rollstream_replay_exits_1_on_a_difference(memory: Rig, episode: Episode, command: Callable[..., Told]) -> None:
    memory.send(*pairs(episode, "a", "b"), partition=0)
    memory.train()

    def change(record: Record) -> Record:
        if record.partition.topic != memory.names.ledger:
            return record
        receipt = decode_as(Receipt, record.value or b"")
        return replace(record, value=encode(forge("loss")(receipt))) if receipt.step else record

    memory.log = memory.elsewhere(change).log
    told = command("replay", "--step", "1")
    assert told.status == 1
    assert "identical      false" in told.out
    assert "differs: loss" in told.out
    assert json.loads(command("replay", "--step", "1", "--json").out)["differences"] == ["loss"]


def test_rollstream_lineage(memory: Rig, episode: Episode, command: Callable[..., Told]) -> None:
    sent = memory.send(*pairs(episode, "a", "b"), episode("a", 0), *pairs(episode, "c", "d"), partition=0)
    memory.train()
    told = command("lineage", str(sent[0]))
    assert (told.status, told.err) == (0, "")
    assert told.out.splitlines()[0] == "m.trajectories.maze[0]@0  trained  a/0/0"
    assert "trained by step 1, policy 2, trainer " in told.out
    assert "contained in policies 2-3" in told.out
    both = json.loads(command("lineage", "a/0/0", "--json").out)
    assert [(t["position"], t["state"]) for t in both] == [(str(sent[0]), "trained"), (str(sent[4]), "dropped")]
    assert command("lineage", "step", "2").out == command("lineage", "policy 3").out
    assert "parents 1-2" in command("lineage", "policy", "3").out
    assert "[0]  trained 5-8" in command("lineage", "policy", "3").out
    assert command("lineage", "nobody").status == 2
    assert command("lineage", "policy", "77").err.startswith("rollstream: the ledger has no receipt of policy 77")


@pytest.mark.parametrize("what", ["twice", "lost"])
def test_rollstream_audit_exits_1_on_forged_books(
    memory: Rig, episode: Episode, command: Callable[..., Told], what: str
) -> None:
    memory.send(*pairs(episode, *GROUPS[:4]), partition=0)
    memory.train()
    assert command("audit").status == 0

    def change(record: Record) -> Record | None:
        if record.partition.topic != memory.names.ledger:
            return record
        receipt = decode_as(Receipt, record.value or b"")
        if receipt.step != 2:
            return record
        if what == "lost":
            return None
        (consumed,) = receipt.consumed
        return replace(record, value=encode(replace(receipt, consumed=(replace(consumed, trained=EARLY),))))

    memory.log = memory.elsewhere(change).log
    told = command("audit", "--json")
    found = json.loads(told.out)
    assert told.status == 1
    # The forged receipt settles offset 3 again, and leaves 4 out.
    assert (found["lost"], found["twice"]) == ((4, 0) if what == "lost" else (1, 1))


EARLY = np.array([3, 5, 6, 7], np.int64)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
