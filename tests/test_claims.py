"""Claim check: what exceeds its topic's limit comes back whole or not at all, and never costs more than it claims."""

import base64
import hashlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from rollstream.consumers import Admission, Arrival, StalenessGate
from rollstream.infra.claims import Claims, read_trajectory
from rollstream.infra.deadletters import REASON, DeadLetters
from rollstream.infra.log import Log, Record
from rollstream.infra.memory import MemoryLog
from rollstream.infra.scan import scan
from rollstream.infra.store import Content, MemoryStore, ObjectStore, StoreError
from rollstream.infra.topics import Names, declared
from rollstream.producers import Delivery
from rollstream.producers import delivery as delivery_module
from rollstream.schemas import (
    MAX_BYTES,
    Claim,
    Schemas,
    Status,
    Task,
    Trajectory,
    WireError,
    decode,
    encode,
    parse_headers,
    trajectory_headers,
)

Episode = Callable[..., Trajectory]
NAMES = Names("m")
FRAME = b"frame" * 1000
LARGE = 2_000_000


class Shaky(MemoryStore):
    """A store that is away for a number of calls, and counts the bytes that were read from it."""

    def __init__(self, away: int = 0) -> None:
        super().__init__()
        self.away, self.read = away, 0

    def put(self, key: str, data: bytes, *, if_none_match: bool = False, if_match: str | None = None) -> str:
        self._knock()
        return super().put(key, data, if_none_match=if_none_match, if_match=if_match)

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> Content:
        self._knock()
        content = super().get(key, start=start, length=length)
        self.read += len(content.data)
        return content

    def _knock(self) -> None:
        if self.away:
            self.away -= 1
            raise StoreError("not now", retriable=True)


@pytest.fixture
def shaky() -> Shaky:
    return Shaky()


@pytest.fixture(params=("memory_store", "s3_store"))
def store(request: pytest.FixtureRequest) -> ObjectStore:
    found: ObjectStore = request.getfixturevalue(request.param)
    return found


def claims_in(store: ObjectStore, names: Names = NAMES) -> Claims:
    return Claims(lambda: store, names)


def refused(claims: Claims, claim: Claim, max_bytes: int = MAX_BYTES) -> str:
    with pytest.raises(WireError) as error:
        claims.fetch(claim, max_bytes=max_bytes)
    return error.value.reason


def test_a_frame_comes_back_and_is_stored_once(store: ObjectStore) -> None:
    claims = claims_in(store)
    claim = claims.deposit(FRAME)
    assert claim == Claim(size=len(FRAME), sha256=hashlib.sha256(FRAME).hexdigest())
    (first,) = store.list("m/claims/")
    assert first.key == f"m/claims/{claim.sha256}"
    assert claims.deposit(FRAME) == claim
    assert store.list("") == [first], "sent again it is not written again"
    assert claims.fetch(claim) == claims.fetch(claim, max_bytes=len(FRAME)) == FRAME


def test_what_is_not_as_claimed_is_refused(store: ObjectStore) -> None:
    claims = claims_in(store)
    claim = claims.deposit(FRAME)
    assert refused(claims, claim, len(FRAME) - 1) == "claim-too-large"
    assert refused(claims, replace(claim, sha256="0" * 64)) == "claim-missing"
    assert refused(claims_in(store, Names("other")), claim) == "claim-missing"
    assert refused(claims, replace(claim, size=len(FRAME) - 1)) == "claim-mismatch"
    assert refused(claims, replace(claim, size=len(FRAME) + 1)) == "claim-mismatch"
    for damaged in (FRAME[:-1], FRAME + b"x", b"", FRAME[:-1] + b"X"):
        store.put(claims.key(claim), damaged)
        assert refused(claims, claim) == "claim-mismatch"


def test_no_more_is_fetched_than_was_claimed(shaky: Shaky) -> None:
    claims = claims_in(shaky)
    claim = claims.deposit(FRAME)
    shaky.put(claims.key(claim), b"bomb" * (1 << 20))
    assert refused(claims, replace(claim, size=1 << 62)) == "claim-too-large"
    assert shaky.read == 0
    assert refused(claims, claim) == "claim-mismatch"
    assert shaky.read == len(FRAME) + 1


def test_a_store_that_is_away_is_no_fault_of_the_record(shaky: Shaky) -> None:
    claims = claims_in(shaky)
    claim = claims.deposit(FRAME)
    shaky.away = 1
    with pytest.raises(StoreError) as error:
        claims.fetch(claim)
    assert error.value.retriable
    assert claims.fetch(claim) == FRAME


def test_one_function_reads_both_and_nothing_else(memory_store: MemoryStore, episode: Episode) -> None:
    claims, sent = claims_in(memory_store), encode(episode("g", 1))
    claim = claims.deposit(sent)
    assert encode(read_trajectory(sent, claims)) == encode(read_trajectory(encode(claim), claims)) == sent
    nested = claims.deposit(encode(claim))
    task = encode(Task(task_id="t", environment="maze", seed=1, group_size=1))
    for value in (encode(nested), task, encode(claims.deposit(task))):
        with pytest.raises(WireError) as error:
            read_trajectory(value, claims)
        assert error.value.reason == "wrong-record"
    with pytest.raises(WireError) as error:
        read_trajectory(encode(claim), claims, vocabulary=1)
    assert error.value.reason == "bad-tokens", "the bounds of the caller hold for what was fetched, too"
    with pytest.raises(WireError) as error:
        read_trajectory(encode(claim), claims, max_bytes=len(sent) - 1)
    assert error.value.reason == "claim-too-large"


def test_a_log_without_claims_needs_no_store(episode: Episode) -> None:
    def no_store() -> ObjectStore:
        raise AssertionError("nobody asked for it")

    sent = encode(episode("g", 1))
    assert encode(read_trajectory(sent, Claims(no_store, NAMES))) == sent


# ------------------------------------------------------------------ the trainer's side


@pytest.fixture
def memory() -> MemoryLog:
    log = MemoryLog()
    for topic in declared("m", {"maze": 1}):
        log.create(topic)
    return log


def admit(log: Log, names: Names, store: ObjectStore, record: Record, version: int = 1) -> Arrival:
    with closing(DeadLetters(log, names)) as letters:
        gate = StalenessGate(2, version)
        return Admission(gate=gate, dead_letters=letters, schemas=Schemas(), claims=claims_in(store, names)).admit(
            record
        )


def reference(log: MemoryLog, claim: Claim, trajectory: Trajectory) -> Record:
    with log.writer() as writer:
        topic = NAMES.trajectories("maze")
        writer.append(topic, encode(claim), key=b"g", headers=trajectory_headers(trajectory)).result()
    return list(scan(log, log.partitions(topic)))[-1]


def test_admission_buries_what_can_never_be_had_with_the_reference_untouched(
    memory: MemoryLog, shaky: Shaky, episode: Episode
) -> None:
    sent = episode("g", 1)
    good = claims_in(shaky).deposit(encode(sent))
    record = reference(memory, good, sent)
    assert admit(memory, NAMES, shaky, record).reason is None
    bad = {
        "claim-missing": replace(good, sha256="0" * 64),
        "claim-mismatch": replace(good, size=good.size - 1),
        "claim-too-large": replace(good, size=MAX_BYTES + 1),
    }
    for reason, claim in bad.items():
        arrival = admit(memory, NAMES, shaky, reference(memory, claim, sent))
        assert (arrival.reason, arrival.group_id, arrival.trajectory_id) == (reason, "g", sent.trajectory_id)
    letters = list(scan(memory, memory.partitions(NAMES.dead_letter)))
    assert [letter.headers[REASON].decode() for letter in letters] == [*bad]
    assert [letter.value for letter in letters] == [encode(claim) for claim in bad.values()]


def test_admission_waits_for_a_store_that_is_away_and_buries_nothing(
    memory: MemoryLog, shaky: Shaky, episode: Episode
) -> None:
    sent = episode("g", 1)
    record = reference(memory, claims_in(shaky).deposit(encode(sent)), sent)
    shaky.away = 1
    with pytest.raises(StoreError) as error:
        admit(memory, NAMES, shaky, record)
    assert error.value.retriable
    assert not list(scan(memory, memory.partitions(NAMES.dead_letter)))
    assert admit(memory, NAMES, shaky, record).reason is None


def test_a_stale_claim_is_not_fetched(memory: MemoryLog, shaky: Shaky, episode: Episode) -> None:
    sent = episode("g", 1, version=1)
    record = reference(memory, claims_in(shaky).deposit(encode(sent)), sent)
    assert admit(memory, NAMES, shaky, record, version=9).reason == "stale"
    assert shaky.read == 0


# ------------------------------------------------------------------ case 3: from the worker to the trainer


def large(episode: Episode) -> list[Trajectory]:
    """2 MB that do not compress, 2 MB that do, and a small one, of one group."""
    noise = base64.b64encode(np.random.default_rng(0).bytes(LARGE * 3 // 4)).decode()
    texts = (noise, "w" * LARGE, "small")
    whole = [episode("g", index, size=3) for index in range(3)]
    return [
        replace(t, turns=(replace(t.turns[0], text=text), *t.turns[1:])) for t, text in zip(whole, texts, strict=True)
    ]


async def test_two_megabytes_arrive_with_the_default_limit(
    log: Log, names: Names, store: ObjectStore, episode: Episode
) -> None:
    sent = large(episode)
    delivery = Delivery(log.writer(), names, claims=claims_in(store, names))
    for trajectory in sent:
        await delivery.deliver(trajectory)
    await delivery.close()
    assert delivery.counts == {"completed": 3}
    records = list(scan(log, log.partitions(names.trajectories("maze"))))
    assert [type(decode(record.value or b"")) for record in records] == [Claim, Claim, Trajectory]
    for record, trajectory in zip(records, sent, strict=True):
        assert record.key == b"g"
        assert parse_headers(record.headers) == parse_headers(trajectory_headers(trajectory)), "the gate can judge"
        arrival = admit(log, names, store, record)
        assert arrival.reason is None
        assert arrival.trajectory is not None
        assert encode(arrival.trajectory) == encode(trajectory), "token-exact"
    assert not list(scan(log, log.partitions(names.dead_letter)))
    assert len(store.list(f"{names.namespace}/claims/")) == 2


async def test_without_a_store_or_past_the_hard_bound_it_is_a_counted_refusal(
    memory: MemoryLog, memory_store: MemoryStore, episode: Episode
) -> None:
    sent = large(episode)
    huge = replace(sent[2], environment_version="v" * MAX_BYTES, trajectory_id="huge")
    without, within = Delivery(memory.writer(), NAMES), Delivery(memory.writer(), NAMES, claims=claims_in(memory_store))
    for trajectory in (*sent, huge):
        await without.deliver(trajectory)
    await within.deliver(huge)
    await without.close()
    await within.close()
    assert (without.counts, within.counts) == ({"oversize": 3, "completed": 1}, {"oversize": 1})
    records = list(scan(memory, memory.partitions(NAMES.trajectories("maze"))))
    found = [read_trajectory(record.value or b"", claims_in(memory_store)) for record in records]
    assert [t.cause for t in found] == ["oversize", "oversize", None, "oversize", "oversize"]
    assert [t.status for t in found].count(Status.FAILED) == 4
    assert not memory_store.list("")
    for record in (records[0], records[-1]):
        assert parse_headers(record.headers).lowest_version is None
        assert admit(memory, NAMES, memory_store, record).reason == "failed", "its group knows of it"


async def test_a_body_waits_for_its_store_and_small_ones_do_not_wait_for_it(
    memory: MemoryLog, shaky: Shaky, episode: Episode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery_module, "PAUSE", 0.01)
    sent = large(episode)
    shaky.away = 10**9
    delivery = Delivery(memory.writer(), NAMES, claims=claims_in(shaky))
    places: list[str] = []
    waiting = [delivery.deliver(trajectory, appended=lambda: places.append("left")) for trajectory in sent[:2]]
    await delivery.deliver(sent[2])
    assert not any(one.done() for one in waiting)
    assert not places, "a body without a home holds its place: episodes stop before memory is full"
    shaky.away = 0
    for one in waiting:
        await one
    await delivery.close()
    assert len(places) == 2
    assert delivery.counts == {"completed": 3}


async def test_a_store_that_refuses_for_good_is_told(memory: MemoryLog, episode: Episode) -> None:
    class Closed(MemoryStore):
        def put(self, key: str, data: bytes, *, if_none_match: bool = False, if_match: str | None = None) -> str:
            raise StoreError("wrong credentials")

    delivery = Delivery(memory.writer(), NAMES, claims=claims_in(Closed()))
    with pytest.raises(StoreError, match="wrong credentials"):
        await delivery.deliver(large(episode)[0])
    await delivery.close()
    assert not list(scan(memory, memory.partitions(NAMES.trajectories("maze"))))
