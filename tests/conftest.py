"""Fixtures for everybody: real servers, started when a test first asks for them, ended with the run however it ends.

stack_tansu, stack_kafka       a LocalStack each, for the whole run; leave it running (kafka: needs KAFKA_HOME)
tansu_address, kafka_address   their bootstrap servers; take topics and groups of your own
memory_store, s3_store         an empty object store for each test, in memory and on SeaweedFS
log                            the test runs three times: on the memory log, on Tansu, on Apache Kafka
names                          topics of the test's own on that log, for one environment, "maze", of two partitions
policy_dir                     a tiny Llama with a tokenizer of words
episode, send                  make a trajectory for it, append trajectories
"""

import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from rollstream.infra.kafka import KafkaLog
from rollstream.infra.log import Log, Position
from rollstream.infra.memory import MemoryLog
from rollstream.infra.models import tiny_llama
from rollstream.infra.s3 import S3Store
from rollstream.infra.stack import Broker, LocalStack, find_obstacle
from rollstream.infra.store import MemoryStore
from rollstream.infra.tokenizers import fingerprint, open_tokenizer, word_tokenizer
from rollstream.infra.topics import Names, declared
from rollstream.schemas import PolicySpan, Role, Trajectory, Turn, encode, trajectory_headers, trajectory_id


def run_stack(directory: Path, broker: Broker) -> Iterator[LocalStack]:
    if obstacle := find_obstacle(broker):
        pytest.skip(obstacle)
    with LocalStack(directory, broker=broker) as stack:
        yield stack
    shutil.rmtree(directory)


@pytest.fixture(scope="session")
def stack_tansu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """SeaweedFS and Tansu."""
    yield from run_stack(tmp_path_factory.mktemp("tansu"), "tansu")


@pytest.fixture(scope="session")
def stack_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """SeaweedFS and one broker of Apache Kafka."""
    yield from run_stack(tmp_path_factory.mktemp("kafka"), "kafka")


@pytest.fixture(scope="session")
def tansu_address(stack_tansu: LocalStack) -> str:
    return stack_tansu.endpoints.bootstrap


@pytest.fixture(scope="session")
def kafka_address(stack_kafka: LocalStack) -> str:
    return stack_kafka.endpoints.bootstrap


@pytest.fixture
def memory_store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def s3_store(stack_tansu: LocalStack) -> Iterator[S3Store]:
    """An S3Store on SeaweedFS, under a prefix of its own."""
    store = open_store(stack_tansu)
    yield store
    store.close()


def open_store(stack: LocalStack) -> S3Store:
    ends = stack.endpoints
    return S3Store(
        ends.bucket,
        url=ends.s3_url,
        access_key=ends.access_key,
        secret_key=ends.secret_key,
        prefix=f"test-{uuid.uuid4().hex}/",
    )


@pytest.fixture(params=("memory", "tansu", "kafka"))
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def log(backend: str, request: pytest.FixtureRequest) -> Iterator[Log]:
    found: Log = MemoryLog() if backend == "memory" else KafkaLog(request.getfixturevalue(f"{backend}_address"))
    yield found
    found.close()


@pytest.fixture
def names(log: Log) -> Names:
    return make_topics(log, 2)


def make_topics(log: Log, partitions: int) -> Names:
    names = Names(f"test-{uuid.uuid4()}")
    for topic in declared(names.namespace, {"maze": partitions}):
        log.create(topic)
    return names


WORDS = [f"w{number}" for number in range(24)]


@pytest.fixture(scope="session")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer, 24 words."""
    directory = tmp_path_factory.mktemp("policy")
    tiny_llama(directory, vocabulary=len(WORDS), hidden=32, layers=1, heads=1, intermediate=32, context=32)
    word_tokenizer(WORDS).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def episode(policy_dir: Path) -> Callable[..., Trajectory]:
    """`episode(group, index, size=2, version=1, reward=index, sampled=4)`: a prompt of two words, one sampled turn."""
    tokenizer = fingerprint(open_tokenizer(policy_dir))

    def make(
        group: str,
        index: int,
        *,
        size: int = 2,
        version: int = 1,
        reward: float | None = None,
        sampled: int = 4,
        attempt: int = 0,
    ) -> Trajectory:
        random = np.random.default_rng([*group.encode(), index])
        return Trajectory(
            trajectory_id=trajectory_id(group, index, attempt),
            group_id=group,
            group_size=size,
            sample_index=index,
            environment="maze",
            tokenizer=tokenizer,
            tokens=random.integers(0, len(WORDS), 2 + sampled, dtype=np.int32),
            logprobs=-random.uniform(2.5, 3.5, sampled).astype(np.float32),
            spans=(PolicySpan(version=version, count=sampled),) if sampled else (),
            turns=(
                Turn(role=Role.USER, tokens=2, sampled=False),
                Turn(role=Role.ASSISTANT, tokens=sampled, sampled=True),
            ),
            reward=float(index) if reward is None else reward,
        )

    return make


@pytest.fixture
def send(log: Log, names: Names) -> Callable[..., list[Position]]:
    """`send(trajectories, partition=None)`: append them as a worker does, and wait."""

    def append(trajectories: list[Trajectory], partition: int | None = None) -> list[Position]:
        with log.writer() as writer:
            futures = [
                writer.append(
                    names.trajectories(t.environment),
                    encode(t),
                    key=t.group_id.encode(),
                    headers=trajectory_headers(t),
                    partition=partition,
                )
                for t in trajectories
            ]
            return [future.result(40) for future in futures]

    return append
