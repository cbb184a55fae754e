"""Admission: judged by headers first, decoded then, and whatever is wrong has a name and, where due, a dead letter."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rollstream.consumers import Admission, Arrival, Objective, StalenessGate
from rollstream.infra.claims import Claims
from rollstream.infra.deadletters import DeadLetters
from rollstream.infra.log import Log, LogError, Partition, Record
from rollstream.infra.memory import MemoryLog
from rollstream.infra.scan import scan
from rollstream.infra.store import MemoryStore
from rollstream.infra.topics import Names, declared
from rollstream.schemas import Schemas, Trajectory, encode, trajectory_headers

Episode = Callable[..., Trajectory]
NAMES = Names("m")
STORE = MemoryStore()
CLAIMS = Claims(lambda: STORE, NAMES)


@pytest.fixture
def memory() -> MemoryLog:
    log = MemoryLog()
    for topic in declared("m", {"maze": 1}):
        log.create(topic)
    return log


def record(value: bytes | None, headers: dict[str, bytes] | None = None, key: bytes | None = b"k") -> Record:
    return Record(partition=Partition("m.trajectories.maze", 0), offset=7, key=key, value=value, headers=headers or {})


def admit(log: Log, record: Record, *, version: int = 1, bound: int | None = 2, **settings: Any) -> Arrival:
    letters = DeadLetters(log, NAMES)
    try:
        admission = Admission(
            gate=StalenessGate(bound, version), dead_letters=letters, schemas=Schemas(), claims=CLAIMS
        )
        return replace(admission, **settings).admit(record)
    finally:
        letters.close()


def letters(log: Log) -> list[Record]:
    return list(scan(log, log.partitions(NAMES.dead_letter)))


def test_a_good_one_comes_whole(memory: MemoryLog, episode: Episode) -> None:
    sent = episode("g", 1, size=3)
    arrival = admit(memory, record(encode(sent), trajectory_headers(sent)))
    assert (arrival.group_id, arrival.trajectory_id, arrival.group_size) == ("g", "g/1/0", 3)
    assert arrival.reason is None
    assert arrival.trajectory is not None
    assert arrival.trajectory.tokens.tolist() == sent.tokens.tolist()
    assert admit(memory, record(encode(sent))).reason is None, "headers are a help, not a condition"


def test_a_stale_one_is_not_even_decoded(memory: MemoryLog, episode: Episode) -> None:
    headers = trajectory_headers(episode("g", 1, version=1))
    arrival = admit(memory, record(b"\x01junk", headers), version=4)
    assert (arrival.reason, arrival.group_id, arrival.trajectory_id) == ("stale", "g", "g/1/0")
    assert letters(memory) == []


def test_where_headers_are_silent_the_body_is_judged(memory: MemoryLog, episode: Episode) -> None:
    assert admit(memory, record(encode(episode("g", 1))), version=4).reason == "stale"
    assert admit(memory, record(encode(episode("g", 1))), version=4, bound=None).reason is None


@pytest.mark.parametrize("headers", [True, False])
def test_poison_is_set_aside_and_keeps_its_seat_where_headers_tell(
    memory: MemoryLog, episode: Episode, headers: bool
) -> None:
    sent = episode("g", 1, size=3)
    bad = record(encode(sent)[:-1], trajectory_headers(sent) if headers else None)
    arrival = admit(memory, bad)
    assert (arrival.trajectory, arrival.reason) == (None, "malformed")
    assert (arrival.group_id, arrival.group_size) == (("g", 3) if headers else ("k", 0))
    (letter,) = letters(memory)
    assert letter.value == bad.value


def test_what_another_model_made_is_set_aside(memory: MemoryLog, episode: Episode) -> None:
    sent = episode("g", 0)
    assert admit(memory, record(encode(sent)), tokenizer="other").reason == "foreign-tokenizer"
    assert admit(memory, record(encode(sent)), tokenizer=sent.tokenizer).reason is None
    top = int(sent.tokens.max())
    assert admit(memory, record(encode(sent)), vocabulary=top).reason == "bad-tokens"
    assert admit(memory, record(encode(sent)), vocabulary=top + 1).reason is None
    assert admit(memory, record(encode(sent)), max_bytes=10).reason == "too-large"
    assert len(letters(memory)) == 3


def test_headers_that_cannot_be_meant_are_poison(memory: MemoryLog, episode: Episode) -> None:
    sent = episode("g", 0)
    headers = trajectory_headers(sent) | {"rollstream.policy-lowest": b"-1"}
    assert admit(memory, record(encode(sent), headers)).reason == "bad-headers"
    assert len(letters(memory)) == 1


@pytest.mark.parametrize("headers", [{}, {"rollstream.trajectory": b""}, {"rollstream.group-size": b"3"}])
@pytest.mark.parametrize(
    ("key", "group"),
    [
        (b"k", "k"),
        ("\u00fc".encode(), "\u00fc"),
        (b"\xff", ""),
        (b"", ""),
        (None, ""),
        (b"k" * 1024, "k" * 1024),
        (b"k" * 1025, ""),
    ],
)
def test_where_headers_do_not_tell_the_group_the_key_does(
    memory: MemoryLog, headers: dict[str, bytes], key: bytes | None, group: str
) -> None:
    arrival = admit(memory, record(b"\x01junk", headers, key))
    assert (arrival.group_id, arrival.trajectory_id, arrival.trajectory) == (group, "", None)
    assert len(letters(memory)) == 1


def test_the_key_never_outvotes_headers_or_body(memory: MemoryLog, episode: Episode) -> None:
    sent = episode("g", 1, size=3)
    assert admit(memory, record(b"", trajectory_headers(sent), b"other")).group_id == "g"
    assert admit(memory, record(encode(sent), None, b"other")).group_id == "g"
    stale = admit(memory, record(b"", {"rollstream.policy-lowest": b"1", "rollstream.policy-highest": b"1"}), version=9)
    assert (stale.reason, stale.group_id) == ("stale", "k")


def test_a_tombstone_is_skipped_and_counted_and_the_empty_value_is_poison(memory: MemoryLog) -> None:
    stone = admit(memory, record(None))
    assert (stone.reason, stone.group_id) == ("tombstone", ""), "its key gives it no seat"
    assert letters(memory) == []
    assert admit(memory, record(b"")).reason == "bad-framing"
    assert [letter.value for letter in letters(memory)] == [b""]


def test_what_cannot_be_reinforced_can_be_cloned(memory: MemoryLog, episode: Episode) -> None:
    scripted = replace(episode("g", 0), spans=(), logprobs=episode("g", 0).logprobs[:0])
    assert admit(memory, record(encode(scripted))).reason == "unscored"
    assert admit(memory, record(encode(scripted)), bound=None, objective=Objective.CLONE).reason is None


def test_without_a_dead_letter_there_is_no_going_on(episode: Episode) -> None:
    with pytest.raises(LogError):
        admit(MemoryLog(), record(b"\x01junk"))
