"""Receipts, lineages, and an audit that finds what was planted."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from rollstream.consumers import Ledger, lineage
from rollstream.consumers.audit import Audit, audit
from rollstream.consumers.ledger import Settlement
from rollstream.infra.checkpoints import CheckpointError, Checkpoints, Manifest
from rollstream.infra.cursors import Cursor, Cursors
from rollstream.infra.log import Log, LogError, Partition, Position
from rollstream.infra.memory import MemoryLog
from rollstream.infra.scan import scan
from rollstream.infra.store import MemoryStore
from rollstream.infra.topics import Names, declared
from rollstream.schemas import Receipt, Trajectory, encode, trajectory_headers

Episode = Callable[..., Trajectory]
Send = Callable[..., list[Position]]
RUN = "run"


def make_receipt(version: int, parent: int, *, incarnation: str = "i", run: str = RUN, **fields: object) -> Receipt:
    receipt = Receipt(
        run=run,
        incarnation=incarnation,
        step=version - 1,
        version=version,
        parent=parent,
        parent_incarnation="i" if parent else "",
    )
    for name, value in fields.items():
        object.__setattr__(receipt, name, value)
    return receipt


def settle(trained: list[Position], **dropped: list[Position]) -> Settlement:
    settlement = Settlement()
    settlement.trained += trained
    for reason, positions in dropped.items():
        settlement.drop(reason, positions)
    return settlement


@dataclass
class Books:
    """A run's ledger and checkpoints, written by hand."""

    log: Log
    names: Names
    checkpoints: Checkpoints = field(default_factory=lambda: Checkpoints(MemoryStore(), RUN))
    incarnation: str = "i"

    def step(self, version: int, parent: int, settlement: Settlement, cursors: dict[Partition, Cursor]) -> None:
        self.receive(make_receipt(version, parent, incarnation=self.incarnation, consumed=settlement.consumed()))
        self.checkpoints.publish(
            version,
            {"weights/x": b"x"},
            parent=parent or None,
            incarnation=self.incarnation,
            step=version - 1,
            cursors=Cursors(cursors),
        )

    def receive(self, *receipts: Receipt) -> None:
        ledger = Ledger(self.log, self.names, RUN)
        for receipt in receipts:
            ledger.write(receipt)
        ledger.close()

    def audit(self, version: int | None = None) -> Audit:
        return audit(self.log, self.names, RUN, self.checkpoints, version=version)


@pytest.fixture
def books(log: Log, names: Names) -> Books:
    return Books(log, names)


@pytest.fixture
def memory() -> Books:
    log, names = MemoryLog(), Names("m")
    for topic in declared("m", {"maze": 2}):
        log.create(topic)
    return Books(log, names)


def fill(books: Books, episode: Episode, count: int, partition: int = 0) -> list[Position]:
    with books.log.writer() as writer:
        return [
            writer.append(
                books.names.trajectories("maze"),
                encode(t),
                headers=trajectory_headers(t),
                partition=partition,
            ).result(40)
            for t in (episode(f"g{partition}", i, size=count) for i in range(count))
        ]


def test_a_settlement_becomes_sorted_columns_by_partition() -> None:
    p, q = Partition("a", 0), Partition("a", 1)
    settlement = settle([Position(p, 7), Position(q, 1), Position(p, 3)], late=[Position(p, 5)], stale=[Position(q, 0)])
    first, second = settlement.consumed()
    assert (first.topic, first.partition, first.trained.tolist()) == ("a", 0, [3, 7])
    assert {k: v.tolist() for k, v in first.dropped.items()} == {"late": [5]}
    assert second.trained.tolist() == [1]
    assert {k: v.tolist() for k, v in second.dropped.items()} == {"stale": [0]}
    assert len(settlement.positions()) == 5
    assert Settlement().consumed() == ()


def test_receipts_come_back_in_order_and_only_those_of_the_run(books: Books) -> None:
    books.receive(make_receipt(1, 0), make_receipt(2, 1, loss=float("nan")))
    other = Ledger(books.log, books.names, "other")
    other.write(make_receipt(9, 0, run="other"))
    other.close()
    ledger = Ledger(books.log, books.names, RUN)
    assert [r.version for r in ledger.receipts()] == [1, 2]
    assert (ledger.last_version(), other.last_version()) == (2, 9)
    assert Ledger(books.log, books.names, "third").last_version() == 0


def test_the_last_version_is_found_behind_any_number_of_others(memory: Books) -> None:
    memory.receive(make_receipt(7, 0), make_receipt(5, 0))
    other = Ledger(memory.log, memory.names, "other")
    for version in range(1, 60):
        other.write(make_receipt(version, 0, run="other"))
    other.close()
    assert Ledger(memory.log, memory.names, RUN).last_version(look_back=3) == 7


def test_junk_in_the_ledger_stops_nobody(memory: Books, caplog: pytest.LogCaptureFixture) -> None:
    memory.receive(make_receipt(1, 0))
    with memory.log.writer() as writer:
        for value in (b"\x01junk", b"", None):
            writer.append(memory.names.ledger, value, key=RUN.encode()).result(40)
    ledger = Ledger(memory.log, memory.names, RUN)
    assert [r.version for r in ledger.receipts()] == [1]
    assert ledger.last_version() == 1
    assert "is no receipt" in caplog.text


def test_a_receipt_that_cannot_be_written_is_an_error(memory: Books) -> None:
    ledger = Ledger(memory.log, memory.names, RUN)
    with pytest.raises(LogError):
        ledger.write(make_receipt(1, 0, groups=tuple(f"{i:01000}" for i in range(1100))))
    ledger.close()


def test_a_lineage_follows_parents_across_incarnations_and_passes_strays_over() -> None:
    receipts = {
        ("i", 1): make_receipt(1, 0),
        ("i", 2): make_receipt(2, 1),
        ("stray", 3): make_receipt(3, 2, incarnation="stray"),
        ("j", 4): make_receipt(4, 2, incarnation="j"),
    }
    line = lineage(receipts, ("j", 4))
    assert ([r.version for r in line.receipts], line.complete) == ([4, 2, 1], True)
    assert not lineage(receipts, ("gone", 5)).complete
    del receipts["i", 1]
    assert not lineage(receipts, ("j", 4)).complete


def test_a_lineage_that_bites_its_tail_ends() -> None:
    loop = {("i", 2): make_receipt(2, 2)}
    line = lineage(loop, ("i", 2))
    assert ([r.version for r in line.receipts], line.complete) == ([2], False)


def test_the_audit_of_a_run_that_has_not_begun(books: Books, send: Send, episode: Episode) -> None:
    assert books.audit() == Audit(acknowledged=0, trained=0)
    send([episode("g", 0), episode("g", 1)])
    assert books.audit() == Audit(acknowledged=2, trained=0, pending=2)
    with pytest.raises(CheckpointError, match="no checkpoint of policy 4"):
        books.audit(4)


def test_every_record_has_its_fate_now_and_at_a_past_version(books: Books, episode: Episode) -> None:
    a, b = fill(books, episode, 4, 0), fill(books, episode, 4, 1)
    p, q = a[0].partition, b[0].partition
    books.step(1, 0, Settlement(), {})
    books.step(2, 1, settle(a[:2], stale=[b[0]]), {p: Cursor(low=2), q: Cursor(low=1)})
    books.step(3, 2, settle([b[3]], late=[a[2]]), {p: Cursor(low=3), q: Cursor(low=1, above=((3, 4),))})
    now = books.audit()
    assert now == Audit(acknowledged=8, trained=3, dropped={"stale": 1, "late": 1}, pending=3, version=3)
    assert now.clean
    assert books.audit(2) == Audit(acknowledged=8, trained=2, dropped={"stale": 1}, pending=5, version=2)
    assert books.audit(1) == Audit(acknowledged=8, trained=0, pending=8, version=1)


def test_a_lost_record_is_found(memory: Books, episode: Episode) -> None:
    a = fill(memory, episode, 4)
    memory.step(1, 0, settle(a[:2]), {a[0].partition: Cursor(low=3, above=())})
    found = memory.audit()
    assert (found.lost, found.twice, found.pending, found.clean) == (1, 0, 1, False)
    assert found.problems == (f"{a[2]} is settled by the cursor and in no receipt",)
    assert found.as_json()["lost"] == 1


@pytest.mark.parametrize("again", ["trained", "dropped"])
def test_an_offset_settled_by_two_steps_is_found(memory: Books, episode: Episode, again: str) -> None:
    a = fill(memory, episode, 2)
    memory.step(1, 0, settle([a[0]]), {a[0].partition: Cursor(low=1)})
    second = settle([a[0], a[1]]) if again == "trained" else settle([a[1]], late=[a[0]])
    memory.step(2, 1, second, {a[0].partition: Cursor(low=2)})
    found = memory.audit()
    assert (found.trained, found.lost, found.twice, found.clean) == (2, 0, 1, False)
    assert found.problems == (f"{a[0]} was settled 2 times",)


@pytest.mark.parametrize("headers", [True, False])
def test_an_id_trained_from_two_positions_is_found(memory: Books, episode: Episode, headers: bool) -> None:
    trajectory = episode("g", 0)
    with memory.log.writer() as writer:
        a, b = (
            writer.append(
                memory.names.trajectories("maze"),
                encode(trajectory),
                headers=trajectory_headers(trajectory) if headers else None,
                partition=n,
            ).result(40)
            for n in (0, 1)
        )
    memory.step(1, 0, settle([a, b]), {a.partition: Cursor(low=1), b.partition: Cursor(low=1)})
    found = memory.audit()
    assert (found.trained, found.lost, found.twice) == (2, 0, 1)
    assert "both trained g/0/0" in found.problems[0]


def test_receipts_off_the_lineage_do_not_count(memory: Books, episode: Episode) -> None:
    a = fill(memory, episode, 3)
    memory.step(1, 0, settle([a[0]]), {a[0].partition: Cursor(low=1)})
    # A step whose checkpoint was never published, and one of a trainer that was fenced under the same version.
    memory.receive(make_receipt(2, 1, consumed=settle(a[1:]).consumed()))
    memory.receive(make_receipt(3, 1, incarnation="fenced", consumed=settle(a[1:]).consumed()))
    memory.step(3, 1, settle([a[1]]), {a[0].partition: Cursor(low=2)})
    assert memory.audit() == Audit(acknowledged=3, trained=2, pending=1, version=3)


def chain(books: Books, episode: Episode, steps: int) -> list[Position]:
    """A run that trains one record a step; policy 1 trains none."""
    a = fill(books, episode, steps + 1)
    books.step(1, 0, Settlement(), {})
    for step in range(1, steps + 1):
        books.step(step + 1, step, settle([a[step - 1]]), {a[0].partition: Cursor(low=step)})
    return a


@pytest.mark.parametrize("gone", [1, 3, 5])
def test_what_retention_removed_from_the_ledger_is_untold_and_not_lost(
    memory: Books, episode: Episode, gone: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Receipts of policies 1 to `gone`; policy 5 is the last."""
    chain(memory, episode, 4)
    assert isinstance(memory.log, MemoryLog)
    memory.log.expire(Partition(memory.names.ledger, 0), gone)
    found = memory.audit()
    assert (found.trained, found.untold, found.pending) == (5 - gone, gone - 1, 1)
    assert found.clean
    assert found.problems == ()
    assert f"receipts before policy {gone + 1} were removed" in caplog.text
    assert found.as_json()["untold"] == gone - 1


def test_behind_the_reach_of_the_ledger_a_lost_one_is_still_found(memory: Books, episode: Episode) -> None:
    a = fill(memory, episode, 4)
    memory.step(1, 0, settle([a[0]]), {a[0].partition: Cursor(low=1)})
    memory.step(2, 1, settle([a[1]]), {a[0].partition: Cursor(low=3)})
    assert isinstance(memory.log, MemoryLog)
    memory.log.expire(Partition(memory.names.ledger, 0), 1)
    found = memory.audit()
    assert (found.trained, found.untold, found.lost, found.pending) == (1, 1, 1, 1)
    assert found.problems == (f"{a[2]} is settled by the cursor and in no receipt",)


@pytest.mark.parametrize("removed", [2, 5])
@pytest.mark.parametrize("expired", [0, 1])
def test_a_receipt_that_somebody_removed_is_missed(memory: Books, episode: Episode, removed: int, expired: int) -> None:
    """The receipt of one policy, of five, is not there; retention took the first one at most."""
    a = chain(memory, episode, 4)
    memory.log = copy_log(memory, leave_out=removed)
    memory.log.expire(Partition(memory.names.ledger, 0), expired)
    found = memory.audit()
    if (removed, expired) == (2, 1):
        # Policy 1 is gone and 2 with it, as far as anybody can tell: the ledger begins with policy 3.
        assert (found.untold, found.lost, found.clean) == (1, 0, True)
        return
    assert (found.trained, found.lost, found.pending, found.clean) == (3, 1, 1, False)
    assert found.problems[0] == f"policy {removed} of trainer i has no receipt in the ledger"
    assert found.problems[1] == f"{a[removed - 2]} is settled by the cursor and in no receipt"


def copy_log(books: Books, *, leave_out: int) -> MemoryLog:
    """The same records and receipts, without the receipt of this policy."""
    log = MemoryLog()
    for topic in declared(books.names.namespace, {"maze": 2}):
        log.create(topic)
    with log.writer() as writer:
        for record in scan(books.log, books.log.partitions(books.names.trajectories("maze"))):
            partition = record.partition
            writer.append(partition.topic, record.value, headers=record.headers, partition=partition.number)
    ledger = Ledger(log, books.names, RUN)
    for receipt in Ledger(books.log, books.names, RUN).receipts():
        if receipt.version != leave_out:
            ledger.write(receipt)
    ledger.close()
    return log


def test_a_receipt_that_the_broker_stored_twice_counts_once_and_a_forged_one_twice(
    memory: Books, episode: Episode
) -> None:
    a = chain(memory, episode, 2)
    receipts = list(Ledger(memory.log, memory.names, RUN).receipts())
    memory.receive(receipts[1], receipts[2])
    assert memory.audit() == Audit(acknowledged=3, trained=2, pending=1, version=3)
    memory.receive(replace(receipts[1], consumed=settle([a[0], a[1]]).consumed()))
    found = memory.audit()
    assert (found.trained, found.lost, found.twice, found.clean) == (2, 0, 2, False)
    assert found.problems == (f"{a[0]} was settled 2 times", f"{a[1]} was settled 2 times")


def test_a_dead_branch_is_audited_by_its_own_lineage(memory: Books, episode: Episode) -> None:
    """Policies 2 and 3 were gone back behind; 4 went on from 1 and took the records in another way."""
    a = fill(memory, episode, 4)
    p = a[0].partition
    memory.step(1, 0, Settlement(), {})
    memory.step(2, 1, settle(a[:2]), {p: Cursor(low=2)})
    memory.step(3, 2, settle([a[2]]), {p: Cursor(low=3)})
    memory.step(4, 1, settle([a[0]], stale=[a[1]]), {p: Cursor(low=2)})
    assert memory.audit() == Audit(acknowledged=4, trained=1, dropped={"stale": 1}, pending=2, version=4)
    assert memory.audit(3) == Audit(acknowledged=4, trained=3, pending=1, version=3)


def test_what_happens_during_an_audit_is_pending_and_never_lost(memory: Books, episode: Episode) -> None:
    """Once the checkpoint was read, a record comes, is trained, and another comes."""
    a = fill(memory, episode, 2)
    p = a[0].partition
    memory.step(1, 0, settle([a[0]]), {p: Cursor(low=1)})

    class Live(Checkpoints):
        def latest(self) -> Manifest | None:
            found = super().latest()
            if found is not None and found.version == 1:
                memory.step(2, 1, settle([a[1]]), {p: Cursor(low=2)})
                fill(memory, episode, 1)
            return found

    found = audit(memory.log, memory.names, RUN, Live(memory.checkpoints._store, RUN))  # pyright: ignore[reportPrivateUsage]
    assert found == Audit(acknowledged=3, trained=1, pending=2, version=1)
    assert memory.audit() == Audit(acknowledged=3, trained=2, pending=1, version=2)


def test_many_twins_are_all_counted(memory: Books, episode: Episode) -> None:
    with memory.log.writer() as writer:
        topic = memory.names.trajectories("maze")
        sent = [
            writer.append(topic, encode(t), headers=trajectory_headers(t), partition=n % 2).result()
            for n in range(3)
            for t in (episode("g", i, size=40) for i in range(40))
        ]
    marks = {p: Cursor(low=sum(s.partition == p for s in sent)) for p in {s.partition for s in sent}}
    memory.step(1, 0, settle(sent), marks)
    found = memory.audit()
    assert (found.trained, found.twice, len(found.problems)) == (120, 80, 20)
    assert len({problem.rpartition(" ")[2] for problem in found.problems}) == 10


def test_tombstones_are_not_acknowledged_and_expired_ones_counted_apart(memory: Books, episode: Episode) -> None:
    a = fill(memory, episode, 2)
    with memory.log.writer() as writer:
        stone = writer.append(memory.names.trajectories("maze"), None, partition=0).result(40)
    memory.step(1, 0, settle(a, tombstone=[stone]), {a[0].partition: Cursor(low=3)})
    assert memory.audit() == Audit(acknowledged=2, trained=2, version=1)
    assert isinstance(memory.log, MemoryLog)
    memory.log.expire(a[0].partition, 1)
    assert memory.audit() == Audit(acknowledged=1, trained=1, expired=1, version=1)
