"""How fast a trainer goes on: seconds from its start to its first new step, beyond loading the model.

    python bench/resume.py                               # starts the embedded broker in a folder of its own
    python bench/resume.py --broker kafka                # Apache Kafka from KAFKA_HOME
    python bench/resume.py --records 1000000 --json

A log of many small trajectories, of which a trainer has settled nearly half in steps; then it is ended, in order or by
kill -9, and started again. `resume` is what a restart takes less the model: claiming the run, finding the next version,
the cursors and what was seen, joining the group, seeking, and the first step, of 8 groups, until it is published.
`seek` is what a bare client takes to be assigned one partition at such an offset and to get a first record.
"""

import argparse
import json
import logging
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from confluent_kafka import Consumer, TopicPartition

from rollstream.consumers.hyperparameters import LearnerSettings
from rollstream.consumers.learner import Learner
from rollstream.consumers.retention import STATE
from rollstream.consumers.trainer import Trainer, TrainerSettings
from rollstream.infra.checkpoints import WEIGHTS, Checkpoints, Manifest
from rollstream.infra.kafka import KafkaLog
from rollstream.infra.kafka.settings import assemble
from rollstream.infra.models import open_model, tiny_llama
from rollstream.infra.s3 import S3Store
from rollstream.infra.stack import LocalStack
from rollstream.infra.stack.endpoints import Endpoints
from rollstream.infra.tokenizers import fingerprint, open_tokenizer, word_tokenizer
from rollstream.infra.topics import Names, declared
from rollstream.schemas import PolicySpan, Receipt, Role, Trajectory, Turn, encode, trajectory_headers

RUN = "bench"
GROUP = 8
WORDS = [f"w{number}" for number in range(24)]
BAR = 3.0
"""Seconds beyond loading the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """One restart."""

    after: str
    """"stop" or "kill"."""
    total: float
    """Seconds from the start to the first new step, published."""
    model: float
    """Of these, for the model, the optimizer and their files."""
    resume: float
    learn: float
    """Seconds of the step itself, in `resume` too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Where a trainer runs; travels to a child process."""

    endpoints: Endpoints
    names: Names
    scratch: Path

    def log(self) -> KafkaLog:
        return KafkaLog(self.endpoints.bootstrap, settings={"group.protocol": self.endpoints.group_protocol})

    def checkpoints(self) -> Checkpoints:
        ends = self.endpoints
        return Checkpoints(
            S3Store(ends.bucket, url=ends.s3_url, access_key=ends.access_key, secret_key=ends.secret_key), RUN
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--broker", choices=("tansu", "kafka"), default="tansu")
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO if os.environ.get("BENCH_VERBOSE") else logging.ERROR)
    with (
        tempfile.TemporaryDirectory() as directory,
        LocalStack(Path(directory, "stack"), broker=options.broker) as stack,
    ):
        scene = Scene(endpoints=stack.endpoints, names=Names("bench"), scratch=Path(directory))
        told = measure(scene, options.records, options.rounds)
    told = {"broker": options.broker, **told}
    print(json.dumps(told) if options.json else as_text(told))


def measure(scene: Scene, records: int, rounds: int) -> dict[str, Any]:
    model = make_model(scene.scratch / "model")
    fill_log(scene, records, model)
    train(scene, model, groups_per_step=max(1, records // GROUP // 25), steps=11)
    restarts = [restart(scene, model, after) for _ in range(rounds) for after in ("stop", "kill")]
    seek = statistics.median(seek_bare(scene) for _ in range(rounds))
    resume = {after: statistics.median(r.resume for r in restarts if r.after == after) for after in ("stop", "kill")}
    return {
        "records": records,
        "resume": resume,
        "bar": BAR,
        "seek": seek,
        "ratio": {after: seconds / seek for after, seconds in resume.items()},
        "restarts": [asdict(r) for r in restarts],
    }


def make_model(directory: Path) -> Path:
    tiny_llama(directory, vocabulary=len(WORDS), hidden=32, layers=1, heads=1, intermediate=32, context=32)
    word_tokenizer(WORDS).save_pretrained(directory)
    return directory


def fill_log(scene: Scene, records: int, model: Path) -> None:
    log, topic = scene.log(), scene.names.trajectories("maze")
    for declaration in declared(scene.names.namespace, {"maze": 4}):
        log.create(declaration)
    with log.writer() as writer:
        for trajectory in make_trajectories(records, fingerprint(open_tokenizer(model))):
            writer.append(
                topic, encode(trajectory), key=trajectory.group_id.encode(), headers=trajectory_headers(trajectory)
            )
        writer.flush(300)


def make_trajectories(records: int, tokenizer: str) -> Iterator[Trajectory]:
    random = np.random.default_rng(0)
    for number in range(records):
        group, index = f"demo.maze.{number // GROUP:08}", number % GROUP
        yield Trajectory(
            trajectory_id=f"{group}/{index}/0",
            group_id=group,
            group_size=GROUP,
            sample_index=index,
            environment="maze",
            tokenizer=tokenizer,
            tokens=random.integers(0, len(WORDS), 6, dtype=np.int32),
            logprobs=-random.uniform(2.5, 3.5, 4).astype(np.float32),
            spans=(PolicySpan(version=1, count=4),),
            turns=(
                Turn(role=Role.USER, tokens=2, sampled=False),
                Turn(role=Role.ASSISTANT, tokens=4, sampled=True),
            ),
            reward=float(index % 2),
        )


def train(
    scene: Scene,
    model: Path,
    *,
    on_step: Callable[[Receipt], None] | None = None,
    scratch: str = "train",
    **fields: Any,
) -> None:
    settings = TrainerSettings(
        environments={"maze": 1.0},
        learner=LearnerSettings(lr=1e-3),
        max_staleness=1_000_000,
        **fields,
    )
    log = scene.log()
    Trainer(log, scene.names, RUN, scene.checkpoints(), settings, scratch=scene.scratch / scratch, on_step=on_step).run(
        model
    )


def restart(scene: Scene, model: Path, after: str) -> Restart:
    """End a trainer in this way, and time the next one."""
    if after == "kill":
        kill_trainer(scene, model)
    latest = find_latest(scene)
    steps: list[tuple[float, Receipt]] = []
    began = time.perf_counter()
    train(
        scene,
        model,
        groups_per_step=8,
        steps=latest.step + 1,
        scratch=uuid.uuid4().hex,
        on_step=lambda receipt: steps.append((time.perf_counter() - began, receipt)),
    )
    ((total, receipt),) = steps
    loading = load_model(scene, latest)
    return Restart(
        after=after, total=total, model=loading, resume=total - loading, learn=receipt.metrics["seconds.learn"]
    )


def find_latest(scene: Scene) -> Manifest:
    latest = scene.checkpoints().latest()
    if latest is None:
        raise SystemExit("expected a checkpoint, found none: the first trainer made no step")
    return latest


def load_model(scene: Scene, manifest: Manifest) -> float:
    """Seconds to fetch and open the model and the optimizer's state."""
    began = time.perf_counter()
    folder = scene.scratch / uuid.uuid4().hex
    scene.checkpoints().fetch(manifest, "", folder)
    Learner(open_model(folder / WEIGHTS), LearnerSettings(lr=1e-3)).load(folder / STATE)
    return time.perf_counter() - began


def kill_trainer(scene: Scene, model: Path) -> None:
    """Start a trainer in a process of its own, and kill it once it has made a step."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=serve, args=(scene, model, theirs))
    child.start()
    ours.recv()
    if child.pid is not None:
        os.kill(child.pid, signal.SIGKILL)
    child.join()


def serve(scene: Scene, model: Path, told: Connection) -> None:
    """A trainer that tells of its first step and goes on."""
    train(scene, model, groups_per_step=8, on_step=lambda _: told.send(1), scratch=uuid.uuid4().hex)


def seek_bare(scene: Scene) -> float:
    """Seconds of a bare client to its first record in the middle of a partition."""
    partition, cursor = next((p, c) for p, c in find_latest(scene).cursors.items() if c.low)
    settings = assemble("consumer", scene.endpoints.bootstrap, {})
    began = time.perf_counter()
    consumer = Consumer({**settings, "group.id": f"bench-{uuid.uuid4()}"})
    consumer.assign([TopicPartition(partition.topic, partition.number, cursor.low)])
    while (message := consumer.poll(1.0)) is None or message.error():
        pass
    seconds = time.perf_counter() - began
    consumer.close()
    return seconds


def as_text(told: dict[str, Any]) -> str:
    lines = [f"{told['broker']}, {told['records']:,} records; bar {told['bar']:g} s beyond loading the model"]
    lines += [f"{'after':<6} {'total':>7} {'model':>7} {'resume':>7} {'learn':>7}"]
    lines += [
        f"{r['after']:<6} {r['total']:>7.2f} {r['model']:>7.2f} {r['resume']:>7.2f} {r['learn']:>7.2f}"
        for r in told["restarts"]
    ]
    lines += [
        f"bare seek {told['seek']:.3f} s; resume / seek: " + ", ".join(f"{a} {r:.1f}" for a, r in told["ratio"].items())
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
