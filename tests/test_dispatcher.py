"""The dispatcher: the bound holds in every life, no task id twice, and nobody else's records disturb it."""

import threading
import uuid
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from random import Random

import pytest

from rollstream.infra.deadletters import DeadLetters
from rollstream.infra.kafka import KafkaLog
from rollstream.infra.log import Log, Record
from rollstream.infra.memory import MemoryLog
from rollstream.infra.scan import scan
from rollstream.infra.topics import Names, apply, declared, plan
from rollstream.producers import Dispatcher, Slots, Source
from rollstream.schemas import PolicyUpdate, Receipt, Task, WireError, decode, encode

PATIENCE = 60.0


class Desk:
    """The topics of a namespace, and what a trainer would write there."""

    def __init__(self, log: Log) -> None:
        self.log, self.names = log, Names(f"test-{uuid.uuid4().hex[:8]}")
        apply(log, plan(log, declared(self.names.namespace, {"a": 1, "b": 1}, partitions=2)))

    def write(self, topic: str, value: bytes | None, key: bytes = b"run") -> None:
        with self.log.writer() as writer:
            writer.append(topic, value, key=key).result(PATIENCE)

    def settle(self, groups: list[str], version: int, run: str = "run") -> None:
        """One step: a receipt, then the policy that it led to."""
        receipt = Receipt(
            run=run, incarnation="one", step=version, version=version, parent=version - 1, groups=tuple(groups)
        )
        self.write(self.names.ledger, encode(receipt))
        self.announce(version, run)

    def announce(self, version: int, run: str = "run") -> None:
        update = PolicyUpdate(
            run=run,
            version=version,
            incarnation="one",
            step=version,
            manifest="m",
            digest="0" * 64,
            published_ms=1,
        )
        self.write(self.names.policy, encode(update))

    def records(self) -> list[tuple[Record, Task]]:
        found: list[tuple[Record, Task]] = []
        for record in scan(self.log, self.log.partitions(self.names.tasks)):
            try:
                task = decode(record.value or b"")
            except WireError:
                continue
            assert isinstance(task, Task)
            found.append((record, task))
        return found

    def tasks(self, run: str = "run") -> list[str]:
        return sorted(task.task_id for _, task in self.records() if task.task_id.startswith(f"{run}."))

    def dispatcher(self, run: str = "run", *, staleness: int = 1, groups: int = 2, **ratios: float) -> Dispatcher:
        sources = {name: Source(environment=name, ratio=ratio) for name, ratio in (ratios or {"a": 1.0}).items()}
        return Dispatcher(self.log, self.names, run, sources, max_staleness=staleness, groups_per_step=groups)


@pytest.fixture(params=("memory", "tansu", "kafka"))
def desk(request: pytest.FixtureRequest) -> Desk:
    return Desk(
        MemoryLog() if request.param == "memory" else KafkaLog(request.getfixturevalue(f"{request.param}_address"))
    )


@pytest.fixture
def quiet() -> Desk:
    """In memory only."""
    return Desk(MemoryLog())


class Sent:
    """What a dispatcher says it sent, awaited by number."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self._changed = threading.Condition()

    def __call__(self, task: Task) -> None:
        with self._changed:
            self.tasks.append(task)
            self._changed.notify_all()

    def wait(self, count: int) -> list[str]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.tasks) >= count, PATIENCE), f"{len(self.tasks)} came"
            return [task.task_id for task in self.tasks]


@contextmanager
def dispatching(dispatcher: Dispatcher) -> Generator[Sent]:
    """A dispatcher at work, stopped at the end."""
    sent = Sent()
    thread = threading.Thread(target=dispatcher.run, kwargs={"progress": sent})
    thread.start()
    try:
        yield sent
    finally:
        dispatcher.stop()
        thread.join(PATIENCE)
        assert not thread.is_alive()


def names(environment: str, *numbers: int, run: str = "run") -> list[str]:
    return [f"{run}.{environment}.{number:08d}" for number in numbers]


def test_slots_come_free_by_receipt_and_policy_and_a_new_life_goes_on(desk: Desk) -> None:
    with dispatching(desk.dispatcher()) as sent:
        first = sent.wait(4)
        assert first == names("a", 0, 1, 2, 3)
        desk.settle(first[:2], 1)
        assert sent.wait(6) == names("a", *range(6))
    assert desk.tasks() == names("a", *range(6))
    desk.settle(names("a", 2, 3), 2)
    with dispatching(desk.dispatcher()) as sent:
        assert sent.wait(2) == names("a", 6, 7)
    assert desk.tasks() == names("a", *range(8))
    with dispatching(again := desk.dispatcher()) as sent:
        desk.settle(names("a", 4, 5, 6, 7), 3)
        assert sent.wait(4) == names("a", 8, 9, 10, 11)
    assert again.slots.held == again.slots.total == 4


def test_a_receipt_alone_frees_nothing(quiet: Desk) -> None:
    with dispatching(dispatcher := quiet.dispatcher()) as sent:
        groups = sent.wait(4)
        receipt = Receipt(run="run", incarnation="one", step=1, version=1, parent=0, groups=tuple(groups))
        quiet.write(quiet.names.ledger, encode(receipt))
        quiet.write(quiet.names.policy, b"\x01junk")
        quiet.write(quiet.names.policy, None)
        quiet.write(quiet.names.ledger, b"\x01junk")
        quiet.announce(9, run="other")
        quiet.settle(groups, 9, run="other")
        quiet.announce(0 + 1)
        assert len(sent.wait(8)) == 8
    assert dispatcher.slots.held == 4


@pytest.mark.parametrize("other", ["other", "run.a", "ru", "run.a.b"])
def test_another_run_on_the_same_topics_is_another_one(quiet: Desk, other: str) -> None:
    for run in ("run", other):
        assert quiet.dispatcher(run).run(limit=3) == 3
    for run in ("run", other):
        with dispatching(quiet.dispatcher(run)) as sent:
            assert sent.wait(1) == names("a", 3, run=run)
    assert len(quiet.records()) == 8


def test_tasks_of_others_and_junk_among_the_tasks_hold_no_slot(quiet: Desk) -> None:
    for task_id in (
        "run.a.many",
        "run.a.",
        "run.a.1",
        "run.a.-0000001",
        "run.a.00000001.x",
        "run.a.\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0661",
        "run.",
    ):
        quiet.write(quiet.names.tasks, encode(Task(task_id=task_id, environment="a", seed=0, group_size=1)))
    quiet.write(quiet.names.tasks, b"\x01junk")
    quiet.write(quiet.names.tasks, None)
    with dispatching(quiet.dispatcher()) as sent:
        assert sent.wait(4) == names("a", 0, 1, 2, 3)


def test_an_environment_taken_out_still_holds_its_slots(quiet: Desk) -> None:
    with dispatching(quiet.dispatcher(a=1.0, b=1.0)) as sent:
        assert Counter(name.split(".")[1] for name in sent.wait(4)) == {"a": 2, "b": 2}
    with dispatching(dispatcher := quiet.dispatcher(b=1.0)) as sent:
        quiet.settle(names("b", 0), 1)
        assert sent.wait(1) == names("b", 2)
    assert (dispatcher.slots.held, dispatcher.slots.used("a")) == (4, 2)


def test_a_task_that_became_a_dead_letter_gives_its_slot_back(quiet: Desk) -> None:
    with dispatching(quiet.dispatcher()) as sent:
        sent.wait(4)
        letters = DeadLetters(quiet.log, quiet.names)
        record, task = quiet.records()[0]
        letters.send(record, reason="unknown-topic", error="no such topic")
        assert sent.wait(5)[-1:] == names("a", 4)
        foreign = replace(record, partition=quiet.log.partitions(quiet.names.control)[0])
        letters.send(foreign, reason="junk", error="not a task of the tasks topic")
        letters.close()
    with dispatching(dispatcher := quiet.dispatcher()) as sent:
        quiet.settle([t.task_id for _, t in quiet.records() if t.task_id != task.task_id], 1)
        assert len(sent.wait(4)) == 4
    assert dispatcher.slots.held == 4


def test_limit_and_stop_end_it(quiet: Desk) -> None:
    dispatcher = quiet.dispatcher()
    assert dispatcher.run(limit=3) == 3
    stopped = quiet.dispatcher()
    stopped.stop()
    assert stopped.run() == 0
    assert quiet.tasks() == names("a", 0, 1, 2)


def test_a_task_is_the_same_in_every_life_and_seeds_go_round() -> None:
    source = Source(environment="a", first_seed=5, last_seed=7, group_size=3, max_turns=2, payload={"level": "9"})
    tasks = [source.task("run", number) for number in range(5)]
    assert [task.seed for task in tasks] == [5, 6, 7, 5, 6]
    assert len({task.task_id for task in tasks}) == 5
    assert replace(source.task("run", 3), created_ms=0) == replace(tasks[3], created_ms=0)
    assert (tasks[0].group_size, tasks[0].max_turns, tasks[0].payload) == (3, 2, {"level": "9"})


def test_a_source_under_another_name_is_refused(quiet: Desk) -> None:
    with pytest.raises(ValueError, match="b"):
        Dispatcher(quiet.log, quiet.names, "run", {"b": Source(environment="a")}, max_staleness=0, groups_per_step=1)


@pytest.mark.parametrize("seed", range(20))
def test_the_bound_holds_however_things_interleave(seed: int) -> None:
    """Several lives of dispatcher and trainer, groups finished in any order, receipts and policies late."""
    random = Random(seed)
    staleness, step = random.randrange(4), random.randrange(1, 5)
    ratios = {name: random.uniform(0.01, 5) for name in "abc"[: random.randrange(1, 4)]}
    flying: set[str] = set()
    late: list[tuple[list[str], int]] = []
    slots, version, number, trained = Slots(max_staleness=staleness, groups_per_step=step, ratios=ratios), 1, 0, 0
    for _ in range(400):
        match random.randrange(4):
            case 0 if (environment := slots.pick()) is not None:
                number += 1
                slots.take(environment, group := f"{environment}.{number}")
                flying.add(group)
            case 1 if len(flying) >= step:
                version += 1
                settled = random.sample(sorted(flying), step)
                flying.difference_update(settled)
                late.append((settled, version))
            case 2 if late:
                settled, published = late.pop(0)
                slots.settle(settled, published)
                slots.announce(published)
                trained += step
            case 3 if random.random() < 0.05:
                held = [*flying, *(group for settled, _ in late for group in settled)]
                slots = Slots(max_staleness=staleness, groups_per_step=step, ratios=ratios)
                for group in held:
                    slots.take(group.split(".")[0], group)
            case _:
                pass
        unpublished = len(flying) + sum(len(settled) for settled, _ in late)
        assert slots.held == unpublished <= (staleness + 1) * step
    assert trained >= 20, "and it goes on"
