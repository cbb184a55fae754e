"""No bias against long rollouts: they arrive last in their groups, and restarts must not cost them more than others."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from rollstream.consumers import LearnerSettings, Ledger, Trainer, TrainerSettings
from rollstream.consumers.audit import audit
from rollstream.consumers.history import read_history
from rollstream.infra.checkpoints import Checkpoints
from rollstream.infra.log import Partition, Position
from rollstream.infra.memory import MemoryLog
from rollstream.infra.store import MemoryStore
from rollstream.infra.topics import Names, declared
from rollstream.schemas import Receipt, Trajectory, encode, trajectory_headers

Episode = Callable[..., Trajectory]
RUN = "run"
SIZE, LONG = 4, 20
"""Samples of a group, and tokens of its long ones."""
RESTARTS = 10


class Crash(Exception):
    """Ends a trainer at once."""


@dataclass
class Rig:
    """A run whose rollouts go on while its trainer comes and goes."""

    model: Path
    scratch: Path
    log: MemoryLog = field(default_factory=MemoryLog)
    names: Names = field(default_factory=lambda: Names("m"))
    store: MemoryStore = field(default_factory=MemoryStore)
    long: dict[Position, bool] = field(default_factory=dict[Position, bool])
    """Every acknowledged record -> whether it is a long one."""

    def __post_init__(self) -> None:
        for topic in declared("m", {"maze": 3}):
            self.log.create(topic)

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.store, RUN)

    def send(self, trajectory: Trajectory) -> None:
        with self.log.writer() as writer:
            future = writer.append(
                self.names.trajectories("maze"),
                encode(trajectory),
                key=trajectory.group_id.encode(),
                headers=trajectory_headers(trajectory),
            )
            self.long[future.result()] = len(trajectory.tokens) > LONG

    def life(self, steps: int, *, crash: bool) -> None:
        """A trainer that makes so many steps, then stops in order or dies; it waits for what is not there yet."""
        made: list[Receipt] = []

        def on_step(receipt: Receipt) -> None:
            made.append(receipt)
            if len(made) >= steps:
                if crash:
                    raise Crash
                trainer.stop()

        settings = TrainerSettings(
            environments={"maze": 1.0},
            learner=LearnerSettings(lr=1e-3, min_informative=0.0),
            groups_per_step=2,
            max_staleness=1000,
            group_timeout=1000.0,
        )
        trainer = Trainer(self.log, self.names, RUN, self.checkpoints, settings, scratch=self.scratch, on_step=on_step)
        # A step that never fills would wait for ever: the test is to fail then, not to hang.
        guard = threading.Timer(60, trainer.stop)
        guard.start()
        try:
            trainer.run(self.model)
        except Crash:
            pass
        finally:
            guard.cancel()

    def trained(self) -> list[bool]:
        """Of every trained record: whether it is a long one."""
        history = read_history(Ledger(self.log, self.names, RUN), self.checkpoints, self.checkpoints.latest())
        return [
            self.long[Position(Partition(c.topic, c.partition), offset)]
            for receipt in history.receipts
            for c in receipt.consumed
            for offset in c.trained.tolist()
        ]


def rollouts(episode: Episode, groups: int, random: np.random.Generator) -> list[Trajectory]:
    """Samples of many groups as they arrive: a short one after 1 to 3 ticks, each group's long one after 10 to 40."""
    ready: list[tuple[float, int, int]] = []
    for group in range(groups):
        slow = int(random.integers(SIZE))
        for index in range(SIZE):
            lasts = random.uniform(10, 40) if index == slow else random.uniform(1, 3)
            ready.append((group + lasts, group, index))
    late = {(g, i) for t, g, i in ready if t - g > 3}
    return [
        episode(f"g{g}", i, size=SIZE, sampled=LONG + 4 if (g, i) in late else 4, reward=float(i % 2))
        for _, g, i in sorted(ready)
    ]


def share(long: list[bool]) -> float:
    return sum(long) / len(long)


@pytest.mark.parametrize("seed", [0, 1])
def test_ten_restarts_in_a_row_train_as_many_long_ones_as_were_acknowledged(
    policy_dir: Path, tmp_path: Path, episode: Episode, seed: int
) -> None:
    """While all rollouts are on their way a trainer is ended ten times, in order or not, after 0 to 3 steps."""
    random = np.random.default_rng(seed)
    rig = Rig(policy_dir, tmp_path)
    stream = rollouts(episode, 60, random)
    cuts = np.linspace(0, len(stream), RESTARTS + 2, dtype=int)[1:].tolist()
    before = 0
    for life, cut in enumerate(cuts):
        for trajectory in stream[before:cut]:
            rig.send(trajectory)
        before = cut
        complete = finished(stream[:cut]) - len(set(groups_of(rig)))
        # The first policy of a run counts as a step of its life, too.
        steps = int(random.integers(0, complete // 2 + 1)) + (life == 0)
        if life == RESTARTS:
            steps = complete // 2
        if steps:
            rig.life(steps, crash=bool(random.integers(2)))
        if trained := rig.trained():
            assert share(trained) == 1 / SIZE, "groups train whole, whatever came last"
    trained, acknowledged = rig.trained(), list(rig.long.values())
    assert len(trained) == len(acknowledged) == 60 * SIZE
    assert share(trained) == share(acknowledged) == 1 / SIZE
    verdict = audit(rig.log, rig.names, RUN, rig.checkpoints)
    assert (verdict.trained, verdict.pending, verdict.lost, verdict.twice) == (60 * SIZE, 0, 0, 0)
    assert dict(verdict.dropped) == {}


def finished(stream: list[Trajectory]) -> int:
    """Groups of which every sample has come."""
    counts: dict[str, int] = {}
    for trajectory in stream:
        counts[trajectory.group_id] = counts.get(trajectory.group_id, 0) + 1
    return sum(count == SIZE for count in counts.values())


def groups_of(rig: Rig) -> list[str]:
    if rig.checkpoints.latest() is None:
        return []
    history = read_history(Ledger(rig.log, rig.names, RUN), rig.checkpoints, rig.checkpoints.latest())
    return [group for receipt in history.receipts for group in receipt.groups]
