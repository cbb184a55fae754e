"""How tasks come to workers, and how it is told which are finished, while workers come and go."""

import asyncio
import uuid

import pytest

from rollstream.infra.log import Log, Partition, Position
from rollstream.infra.topics import Names, declared
from rollstream.producers.intake import Intake
from rollstream.schemas import Task, encode

PATIENCE = 90.0
EACH = 6


@pytest.fixture
def names(log: Log) -> Names:
    """Tasks in two partitions, so that a second worker gets one of them."""
    names = Names(f"test-{uuid.uuid4()}")
    for topic in declared(names.namespace, (), partitions=2):
        log.create(topic)
    return names


@pytest.fixture
def tasks(log: Log, names: Names) -> list[Position]:
    """Six in each partition."""
    with log.writer() as writer:
        futures = [
            writer.append(names.tasks, encode(task), key=task.task_id.encode(), partition=partition)
            for partition in (0, 1)
            for task in (
                Task(task_id=f"{partition}-{n}", environment="maze", group_size=1, seed=n) for n in range(EACH)
            )
        ]
        return [future.result(40) for future in futures]


def committed(log: Log, names: Names, partitions: list[Partition]) -> dict[Partition, int]:
    return log.committed(f"{names.namespace}.workers", partitions)


async def test_case_4_a_second_worker_joins_in_mid_batch(log: Log, names: Names, tasks: list[Position]) -> None:
    """Finished, in every partition of the batch, is committed; what is not goes to the other; together it is all."""
    topic = names.tasks
    zero, one = Partition(topic, 0), Partition(topic, 1)
    done = {Position(zero, n) for n in (0, 1, 2)} | {Position(one, n) for n in (0, 2)}
    async with asyncio.timeout(PATIENCE), Intake(log, names) as first:
        held: set[Position] = set()
        while len(held) < len(tasks):
            held |= {record.position for record in await first.take(hold=False)}
        assert held == set(tasks)
        first.finish(done)
        async with Intake(log, names) as second:
            theirs: list[Position] = []
            gone: set[Partition] = set()
            while not (gone and len(theirs) >= sum(unfinished(p) for p in gone)):
                assert await first.take(hold=False) == [], "what it holds comes to it once"
                gone |= first.moved() & {zero, one}
                theirs += [record.position for record in await second.take(hold=False)]
            assert committed(log, names, [zero, one]) == {zero: 3, one: 1}
            assert sorted(theirs) == [Position(p, n) for p in sorted(gone) for n in range(EACH - unfinished(p), EACH)]
            first.finish(position for position in held if position.partition in gone)
            assert await first.take(hold=False) == []
            assert committed(log, names, [zero, one]) == {zero: 3, one: 1}, "no word in what it lost"
            second.finish(theirs)
            first.finish(position for position in held if position.partition not in gone)
    assert committed(log, names, [zero, one]) == {zero: EACH, one: EACH}


def unfinished(partition: Partition) -> int:
    """Tasks from the first unfinished one on."""
    return EACH - (3 if partition.number == 0 else 1)
