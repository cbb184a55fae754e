"""Fixtures for everybody: real servers, started when the first test asks for them and ended with the run, however it ends.

    stack_tansu, stack_kafka       a LocalStack each, for the whole run; leave it running (kafka: needs KAFKA_HOME)
    tansu_address, kafka_address   their bootstrap servers; take topics and groups of your own
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.infra.stack import Broker, LocalStack, find_obstacle


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
