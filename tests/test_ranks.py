"""Many ranks are one trainer: the same step whoever has which partition, nothing twice, and they end together."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from rollstream.consumers import Learner, LearnerSettings, Ledger, Place, Sample, Trainer, TrainerSettings
from rollstream.consumers.audit import audit
from rollstream.consumers.gatherer import share_out
from rollstream.consumers.ranks import RankLost, Ranks, open_ranks
from rollstream.infra.checkpoints import Checkpoints
from rollstream.infra.kafka import KafkaLog
from rollstream.infra.log import Log, LogError, Position
from rollstream.infra.memory import MemoryLog
from rollstream.infra.models import open_model
from rollstream.infra.s3 import S3Store
from rollstream.infra.stack import LocalStack
from rollstream.infra.store import MemoryStore, ObjectStore
from rollstream.infra.topics import Names, declared
from rollstream.schemas import Receipt, Trajectory, encode, trajectory_headers

safetensors: Any = import_module("safetensors.numpy")
training = import_module("rollstream.consumers.trainer")
joining = import_module("rollstream.consumers.ranks")
T = TypeVar("T")
Episode = Callable[..., Trajectory]
GRPO = LearnerSettings(lr=1e-2, min_informative=0.0)
PATIENCE = 60.0


class Room:
    """Where the ranks of one process meet: a thread each."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=PATIENCE)
        self.values: list[Any] = [None] * size

    def meet(self, rank: int, value: T) -> list[T]:
        try:
            self.values[rank] = value
            self.barrier.wait()
            everyone: list[T] = list(self.values)
            self.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise RankLost("another rank is gone") from error
        return everyone


@dataclass(frozen=True)
class ThreadRanks:
    """`Ranks` of one process, for faults and orders that several processes would not give on demand."""

    room: Room
    rank: int

    @property
    def size(self) -> int:
        return self.room.size

    def exchange(self, value: T) -> list[T]:
        return self.room.meet(self.rank, value)

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        everyone = self.room.meet(self.rank, [tensor.clone() for tensor in tensors])
        for tensor, *parts in zip(tensors, *everyone, strict=True):
            tensor.copy_(torch.stack(parts).sum(0))


OPENING = threading.Lock()


def open_alone(*arguments: Any, **options: Any) -> Any:
    """transformers opens one model at a time: it swaps torch's defaults meanwhile, for every thread."""
    with OPENING:
        return open_model(*arguments, **options)


@pytest.fixture(autouse=True)
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "open_model", open_alone)


def together(size: int, work: Callable[[Ranks], T]) -> list[T]:
    """Run `work` on every rank; raises the first error that is not merely the loss of another rank."""
    room = Room(size)

    def guarded(rank: int) -> T:
        try:
            return work(ThreadRanks(room, rank))
        except BaseException:
            room.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(guarded, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda e: isinstance(e, RankLost)):
        raise error
    return [future.result() for future in futures]


# ---------------------------------------------------------------------------------------------------------- the learner


def make_samples(episode: Episode, count: int) -> list[Sample]:
    random = np.random.default_rng(7)
    return [
        Sample(
            trajectory=episode(f"g{n // 4}", n % 4, size=4, sampled=int(random.integers(1, 8))),
            advantage=float(random.normal()),
        )
        for n in range(count)
    ]


def learn(policy_dir: Path, samples: Sequence[Sample], size: int, settings: LearnerSettings) -> list[Learner]:
    def work(ranks: Ranks) -> Learner:
        learner = Learner(open_alone(policy_dir), settings, ranks)
        for _ in range(2):
            # The last rank has nothing at all where there are three.
            share = max(1, size - 1)
            learner.step(samples[ranks.rank :: share] if ranks.rank < share else ())
        return learner

    return together(size, work)


def weights(learner: Learner) -> np.ndarray[Any, Any]:
    return torch.cat([p.detach().reshape(-1) for p in learner.model.parameters()]).numpy()


@pytest.mark.parametrize(
    "changes",
    [{}, {"minibatches": 3, "epochs": 2}, {"aggregation": "sequence-mean", "micro_batch_tokens": 16}, {"kl": 0.1}],
)
def test_one_two_and_three_ranks_learn_the_same(policy_dir: Path, episode: Episode, changes: dict[str, Any]) -> None:
    settings, samples = replace(GRPO, **changes), make_samples(episode, 24)
    (alone,) = learn(policy_dir, samples, 1, settings)
    for size in (2, 3):
        ranks = learn(policy_dir, samples, size, settings)
        assert all(np.array_equal(weights(ranks[0]), weights(other)) for other in ranks[1:])
        np.testing.assert_allclose(weights(ranks[0]), weights(alone), atol=1e-5)
    assert np.abs(weights(alone) - weights(Learner(open_model(policy_dir), settings))).max() > 1e-3


def test_a_step_is_skipped_by_all_or_by_none(policy_dir: Path, episode: Episode) -> None:
    """Rank 1 has no informative sample; judged alone it would skip what rank 0 takes."""
    flat = [replace(s, advantage=0.0) for s in make_samples(episode, 8)]

    def work(ranks: Ranks) -> tuple[str | None, int]:
        learner = Learner(open_alone(policy_dir), replace(GRPO, min_informative=0.5), ranks)
        result = learner.step(make_samples(episode, 8) if ranks.rank == 0 else flat)
        return result.skipped, result.samples

    assert together(2, work) == [(None, 16), (None, 16)]


# ---------------------------------------------------------------------------------------------------------- the trainer


@dataclass
class Rig:
    log: Log
    names: Names
    model: Path
    scratch: Path
    store: ObjectStore = field(default_factory=MemoryStore)
    receipts: list[Receipt] = field(default_factory=list[Receipt])

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.store, "run")

    def train(self, size: int, *, on_step: Callable[[Trainer, Receipt], None] | None = None, **settings: Any) -> Place:
        defaults: dict[str, Any] = {"groups_per_step": 4, "max_staleness": 100, "until_end": True}
        chosen = TrainerSettings(environments={"maze": 1.0}, learner=GRPO, **(defaults | settings))

        def work(ranks: Ranks) -> Place:
            def step(receipt: Receipt) -> None:
                self.receipts.append(receipt)
                if on_step is not None:
                    on_step(trainer, receipt)

            trainer = Trainer(
                self.log,
                self.names,
                "run",
                self.checkpoints,
                chosen,
                scratch=self.scratch / f"{len(self.receipts)}-{ranks.rank}",
                on_step=step,
                ranks=ranks,
            )
            guard = threading.Timer(PATIENCE, trainer.stop)
            guard.start()
            try:
                return trainer.run(self.model)
            finally:
                guard.cancel()

        places = together(size, work)
        assert len(set(places)) == 1
        return places[0]

    def send(self, *trajectories: Trajectory, partition: int | None = None) -> list[Position]:
        with self.log.writer() as writer:
            futures = [
                writer.append(
                    self.names.trajectories(t.environment),
                    encode(t),
                    key=t.group_id.encode(),
                    headers=trajectory_headers(t),
                    partition=partition,
                )
                for t in trajectories
            ]
            return [future.result(PATIENCE) for future in futures]

    def verdict(self) -> dict[str, Any]:
        verdict = audit(self.log, self.names, "run", self.checkpoints).as_json()
        assert (verdict["lost"], verdict["twice"]) == (0, 0), verdict["problems"]
        return dict(verdict)

    def weights(self) -> np.ndarray[Any, Any]:
        manifest = self.checkpoints.latest()
        assert manifest is not None
        target = self.scratch / f"weights-{manifest.version}"
        shutil.rmtree(target, ignore_errors=True)
        self.checkpoints.fetch(manifest, "weights/", target)
        tensors = safetensors.load_file(target / "weights" / "model.safetensors")
        return np.concatenate([tensors[name].reshape(-1) for name in sorted(tensors)])


def make_rig(policy_dir: Path, scratch: Path, partitions: int = 4) -> Rig:
    log, names = MemoryLog(), Names("m")
    for topic in declared("m", {"maze": partitions}):
        log.create(topic)
    return Rig(log, names, policy_dir, scratch)


@pytest.fixture
def rig(policy_dir: Path, tmp_path: Path) -> Rig:
    return make_rig(policy_dir, tmp_path)


def groups(episode: Episode, *names: str, size: int = 2) -> list[Trajectory]:
    return [episode(name, index, size=size) for name in names for index in range(size)]


def test_ranks_share_the_groups_and_come_to_the_checkpoint_of_one(
    policy_dir: Path, tmp_path: Path, episode: Episode
) -> None:
    found: dict[int, tuple[Any, Any, Any]] = {}
    for size in (1, 2, 3):
        rig = make_rig(policy_dir, tmp_path / str(size))
        rig.send(*groups(episode, *(f"g{n}" for n in range(12))))
        assert rig.train(size, groups_per_step=12).step == 1
        manifest = rig.checkpoints.latest()
        assert manifest is not None
        assert rig.verdict()["trained"] == 24
        found[size] = (manifest.cursors.to_json(), sorted(rig.receipts[-1].groups), rig.weights())
    for size in (2, 3):
        assert found[size][:2] == found[1][:2]
        np.testing.assert_allclose(found[size][2], found[1][2], atol=1e-5)


def test_a_rank_without_a_partition_takes_part(policy_dir: Path, tmp_path: Path, episode: Episode) -> None:
    rig = make_rig(policy_dir, tmp_path, partitions=1)
    rig.send(*groups(episode, *(f"g{n}" for n in range(8))))
    assert rig.train(3).step == 2
    assert rig.verdict()["trained"] == 16


def test_copies_that_reach_two_ranks_train_once(rig: Rig, episode: Episode) -> None:
    """The same group whole in every partition, so that each rank settles a copy of it in the same step."""
    for partition in range(4):
        rig.send(*groups(episode, "same", "other"), partition=partition)
    rig.train(4, groups_per_step=8)
    verdict = rig.verdict()
    assert (verdict["trained"], verdict["dropped"], verdict["pending"]) == (4, {"duplicate": 12}, 0)


def test_copies_of_an_earlier_step_are_known_to_every_rank(rig: Rig, episode: Episode) -> None:
    rig.send(*groups(episode, "first", "second"), partition=0)
    rig.train(2, groups_per_step=2)
    for partition in range(1, 4):
        rig.send(*groups(episode, "first"), partition=partition)
    rig.train(3, groups_per_step=2)
    verdict = rig.verdict()
    assert (verdict["trained"], verdict["dropped"], verdict["pending"]) == (4, {"duplicate": 6}, 0)


def test_a_group_split_over_ranks_is_settled_once(rig: Rig, episode: Episode) -> None:
    """As by added partitions: two samples of four at each of two ranks, both settled by the replay's end."""
    split = groups(episode, "split", size=4)
    rig.send(*split[:2], partition=0)
    rig.send(*split[2:], partition=1)
    rig.send(*groups(episode, "whole"), partition=2)
    rig.train(4)
    verdict = rig.verdict()
    assert (verdict["trained"], verdict["dropped"]) in ((4, {"late": 2}), (6, {}))


def test_it_goes_on_with_another_number_of_ranks(rig: Rig, episode: Episode) -> None:
    names = [f"g{n}" for n in range(24)]
    for at, size in enumerate((1, 3, 2, 4)):
        rig.send(*groups(episode, *names[6 * at : 6 * at + 6]))
        rig.train(size, groups_per_step=4)
    verdict = rig.verdict()
    assert (verdict["trained"], verdict["pending"], verdict["dropped"]) == (48, 0, {})
    assert Counter(g for r in rig.receipts for g in r.groups) == Counter(names)
    versions = [receipt.version for receipt in rig.receipts]
    assert versions == sorted(set(versions))


def test_a_stop_on_any_rank_stops_all(rig: Rig, episode: Episode) -> None:
    rig.send(*groups(episode, *(f"g{n}" for n in range(8))))
    place = rig.train(3, until_end=False, on_step=lambda trainer, receipt: trainer.stop())
    assert place.step <= 1
    rig.train(2)
    assert rig.verdict()["trained"] == 16


def test_what_ends_one_rank_ends_the_others_and_a_restart_loses_nothing(
    rig: Rig, episode: Episode, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.send(*groups(episode, *(f"g{n}" for n in range(8))))
    step = Learner.step

    def fail(self: Learner, *arguments: Any, **options: Any) -> Any:
        if self._ranks.rank == 1:  # pyright: ignore[reportPrivateUsage]
            raise LogError("the log is away")
        return step(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "step", fail)
        with pytest.raises(LogError, match="the log is away"):
            rig.train(3)
    assert rig.verdict()["pending"] == 16
    rig.train(3)
    assert rig.verdict()["trained"] == 16


def test_partitions_may_change_hands_between_steps(rig: Rig, episode: Episode) -> None:
    """A stranger joins the group in mid-run and leaves again: everything is reassigned twice."""
    rig.send(*groups(episode, *(f"g{n}" for n in range(16))))
    topic = rig.names.trajectories("maze")

    def disturb(trainer: Trainer, receipt: Receipt) -> None:
        if receipt.step == 1:
            with rig.log.subscribe([topic], group="m.trainer.run") as stranger:
                for _ in range(20):
                    stranger.poll(1, 0.05)
        if receipt.step == 4:
            trainer.stop()

    rig.train(2, until_end=False, on_step=disturb)
    rig.train(2)
    verdict = rig.verdict()
    assert (verdict["trained"], verdict["pending"]) == (32, 0)


@pytest.mark.parametrize(
    ("settled", "wanted", "expected"),
    [
        ([5, 5], 4, [2, 2]),
        ([0, 9, 1], 4, [0, 3, 1]),
        ([1, 1], 9, [1, 1]),
        ([], 3, []),
        ([3, 3, 3], 4, [2, 1, 1]),
    ],
)
def test_shares_are_as_even_as_they_can_be(settled: list[int], wanted: int, expected: list[int]) -> None:
    assert share_out(settled, wanted) == expected


def test_the_ranks_wait_for_a_publish_as_long_as_it_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits for a store as long as `trainer.patience` says; the others must not give up before."""

    class Process:
        limits: ClassVar[list[timedelta]] = []

        def init_process_group(self, backend: str, timeout: timedelta) -> None:
            """Nobody else is there."""

        def new_group(self, backend: str, timeout: timedelta) -> None:
            self.limits.append(timeout)

        def get_rank(self) -> int:
            return 1

        def get_world_size(self) -> int:
            return 2

        def destroy_process_group(self) -> None:
            """Nothing to release."""

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(joining, "_dist", Process())
    with open_ranks("cpu", publish=7200.0) as (ranks, device):
        assert (ranks.rank, ranks.size, device) == (1, 2, "cpu")
    assert min(Process.limits) > timedelta(seconds=7200)


# ---------------------------------------------------------------------------------------------------- real processes


@dataclass
class Cluster:
    """torchrun over a real log and store."""

    rig: Rig
    folder: Path

    def command(self, size: int, *arguments: str) -> list[str]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        return [*torchrun, "-m", "rollstream.app.main", "-c", str(self.folder / "run.toml"), "train", *arguments]

    def start(self, size: int, *arguments: str) -> "subprocess.Popen[str]":
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        return subprocess.Popen(
            self.command(size, *arguments),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.fixture
def cluster(stack_tansu: LocalStack, policy_dir: Path, tmp_path: Path) -> Iterator[Cluster]:
    ends, name = stack_tansu.endpoints, f"ranks-{uuid.uuid4().hex[:8]}"
    log, names = KafkaLog(ends.bootstrap), Names(name)
    for topic in declared(name, {"maze": 4}):
        log.create(topic)
    store = S3Store(
        ends.bucket, url=ends.s3_url, access_key=ends.access_key, secret_key=ends.secret_key, prefix=f"{name}/"
    )
    tables: dict[str, dict[str, object]] = {
        "run": {"name": "run", "namespace": name},
        "trainer": {
            "model": str(policy_dir),
            "groups_per_step": 4,
            "lr": 1e-2,
            "min_informative": 0.0,
            "max_staleness": 99,
        },
        "environments.maze": {"adapter": "textarena", "group_size": 2},
    }
    text = ends.to_toml().replace("[store]", f"[store]\nprefix = {json.dumps(f'{name}/')}")
    for title, table in tables.items():
        text += f"\n[{title}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
    (tmp_path / "run.toml").write_text(text)
    yield Cluster(Rig(log, names, policy_dir, tmp_path, store=store), tmp_path)
    log.close()
    store.close()


def test_torchrun_trains_over_a_real_log(cluster: Cluster, episode: Episode) -> None:
    cluster.rig.send(*groups(episode, *(f"g{n}" for n in range(12))))
    process = cluster.start(2, "--until-end")
    said, _ = process.communicate(timeout=180)
    assert process.returncode == 0, said
    assert said.count("stands at policy") == 1
    verdict = cluster.rig.verdict()
    assert (verdict["trained"], verdict["pending"]) == (24, 0)


@pytest.mark.slow
def test_a_rank_killed_in_mid_run_takes_the_others_along_and_three_go_on(cluster: Cluster, episode: Episode) -> None:
    cluster.rig.send(*groups(episode, *(f"g{n}" for n in range(12))))
    with cluster.start(2) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 1 "):
                break
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        said = process.stdout.read()
        assert process.wait(120) != 0
    assert "SIGKILL" in said or "Signal 9" in said, said
    cluster.rig.send(*groups(episode, *(f"h{n}" for n in range(4))))
    process = cluster.start(3, "--until-end")
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    verdict = cluster.rig.verdict()
    assert (verdict["trained"], verdict["pending"]) == (32, 0)


def test_ledger_has_one_receipt_a_step_whatever_the_ranks(rig: Rig, episode: Episode) -> None:
    rig.send(*groups(episode, *(f"g{n}" for n in range(12))))
    rig.train(3)
    receipts = list(Ledger(rig.log, rig.names, "run").receipts())
    assert [receipt.step for receipt in receipts] == [0, 1, 2, 3]
    assert len({receipt.incarnation for receipt in receipts}) == 1
