"""Fixtures for everybody: real servers, started when a test first asks for them, ended with the run however it ends.

stack_tansu, stack_kafka       a LocalStack each, for the whole run; leave it running (kafka: needs KAFKA_HOME)
tansu_address, kafka_address   their bootstrap servers; take topics and groups of your own
memory_store, s3_store         an empty object store for each test, in memory and on SeaweedFS
"""

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from rollstream.infra.s3 import S3Store
from rollstream.infra.stack import Broker, LocalStack, find_obstacle
from rollstream.infra.store import MemoryStore


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
