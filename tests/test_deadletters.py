"""Dead letters: what is sent is read as it was, and after a fix goes back to its topic once, untouched."""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from io import BytesIO
from typing import Any

import fastavro
import pytest

from rollstream.infra.claims import Claims
from rollstream.infra.deadletters import (
    OWN,
    REPLAYED,
    REPLAYED_FROM,
    DeadLetters,
    Letter,
    parse_position,
    read_letters,
)
from rollstream.infra.log import Log, LogError, Partition, Position, Record
from rollstream.infra.memory import MemoryLog
from rollstream.infra.replay import Outcome, Replay
from rollstream.infra.scan import scan
from rollstream.infra.schemabook import LogSchemas
from rollstream.infra.store import MemoryStore
from rollstream.infra.topics import Names, declared
from rollstream.schemas import Task, Trajectory, encode, record_schemas, schema_id, trajectory_headers
from rollstream.schemas.bodies import to_body
from rollstream.schemas.registry import Schemas

Episode = Callable[..., Trajectory]
STORE = MemoryStore()


def newer_schema() -> str:
    """Trajectory, with a field more than this release knows."""
    text = next(shipped.text for shipped in record_schemas() if shipped.name == "trajectory.v1")
    schema = json.loads(text)
    schema["fields"].append({"name": "mood", "type": "string", "default": ""})
    return json.dumps(schema)


def encode_newer(trajectory: Trajectory) -> bytes:
    text, stream = newer_schema(), BytesIO()
    stream.write(b"\0" + schema_id(text).to_bytes(4))
    avro: Any = fastavro
    avro.schemaless_writer(stream, avro.parse_schema(json.loads(text)), to_body(trajectory) | {"mood": "glad"})
    return stream.getvalue()


def publish_newer(log: Log, names: Names) -> None:
    text = newer_schema()
    with log.writer() as writer:
        writer.append(names.schemas, text.encode(), key=str(schema_id(text)).encode()).result(30)


def put(
    log: Log, topic: str, value: bytes | None, headers: dict[str, bytes] | None = None, key: bytes = b"k"
) -> Record:
    """Append a record and return it as it is read."""
    with log.writer() as writer:
        at = writer.append(topic, value, key=key, headers=headers).result(40)
    (record,) = scan(log, {at.partition: at.offset}, stop={at.partition: at.offset + 1})
    return record


def bury(log: Log, names: Names, *records: Record, reason: str = "malformed") -> None:
    letters = DeadLetters(log, names)
    for record in records:
        letters.send(record, reason=reason, error=f"no good: {record.offset}")
    letters.close()


def replaying(log: Log, names: Names, **options: bool) -> Replay:
    claims = Claims(lambda: STORE, names)
    return Replay(log=log, names=names, schemas=Schemas(lookup=LogSchemas(log, names)), claims=claims, **options)


def replay(log: Log, names: Names, letters: Iterable[Letter] | None = None, **options: bool) -> list[Outcome]:
    return list(replaying(log, names, **options).append(read_letters(log, names) if letters is None else letters))


@pytest.fixture
def memory() -> MemoryLog:
    log = MemoryLog()
    for topic in declared("m", {"maze": 2}):
        log.create(topic)
    return log


NAMES = Names("m")
MAZE = NAMES.trajectories("maze")


def test_a_letter_is_read_as_it_was_sent(log: Log, names: Names) -> None:
    sent = [
        put(log, names.trajectories("maze"), b"\x01junk\xff", {"trace": b"\x00\xff"}, key=b"\xfe"),
        put(log, names.tasks, b"", {}, key=b"task"),
    ]
    bury(log, names, *sent)
    letters = list(read_letters(log, names))
    assert [(x.origin, x.key, x.value, x.headers) for x in letters] == [
        (r.position, r.key, r.value, r.headers) for r in sent
    ]
    assert [x.error for x in letters] == [f"no good: {r.offset}" for r in sent]
    assert {x.reason for x in letters} == {"malformed"}
    assert all(x.position.partition.topic == names.dead_letter and x.time_ms > 0 for x in letters)


def test_after_the_fix_the_original_goes_back_to_its_partition_once(log: Log, names: Names, episode: Episode) -> None:
    topic = names.trajectories("maze")
    good = [episode("g", index) for index in (0, 1)]
    sent = [put(log, topic, encode_newer(t), trajectory_headers(t) | {"trace": b"kept"}, key=b"g") for t in good]
    bury(log, names, *sent, reason="unknown-schema")
    refused = replay(log, names)
    assert [o.position for o in refused] == [None, None]
    assert all(o.refusal.startswith("unknown-schema: ") for o in refused)

    publish_newer(log, names)
    done = replay(log, names)
    assert [o.refusal for o in done] == ["", ""]
    for original, outcome in zip(sent, done, strict=True):
        assert outcome.position is not None
        partition, offset = outcome.position
        (again,) = scan(log, {partition: offset}, stop={partition: offset + 1})
        assert (again.partition, again.key, again.value) == (original.partition, original.key, original.value)
        mark = {REPLAYED_FROM: str(outcome.letter.position).encode()}
        assert again.headers == {**original.headers, **mark}

    assert [x.replayed for x in read_letters(log, names)] == [str(o.position) for o in done]
    end = {p: end for p, (_, end) in log.bounds(log.partitions(topic)).items()}
    second = replay(log, names)
    assert [o.refusal for o in second] == [f"it was replayed to {o.position}" for o in done]
    assert {p: end for p, (_, end) in log.bounds(log.partitions(topic)).items()} == end
    assert [o.refusal for o in replay(log, names, again=True)] == ["", ""], "on purpose it goes once more"


def test_a_task_goes_back_to_the_tasks(memory: MemoryLog) -> None:
    task = Task(task_id="t", environment="nowhere", group_size=2, seed=1)
    sent = put(memory, NAMES.tasks, encode(task), key=b"t")
    bury(memory, NAMES, sent, reason="unknown-topic")
    (done,) = replay(memory, NAMES)
    assert done.position == Position(sent.partition, sent.offset + 1)


def test_letters_of_one_record_are_one(memory: MemoryLog, episode: Episode) -> None:
    """Two groups sent it, and one of them sends it again after a replay: it goes back once."""
    record = put(memory, MAZE, encode(episode("g", 0)))
    bury(memory, NAMES, record, record)
    assert [o.refusal for o in replay(memory, NAMES)] == ["", "another letter of the same record"]
    bury(memory, NAMES, record)
    letters = list(read_letters(memory, NAMES))
    assert len({x.replayed for x in letters}) == 1
    assert all(x.replayed for x in letters)
    assert not any(o.position for o in replay(memory, NAMES))


def test_what_is_refused_stays_and_force_takes_what_cannot_be_read(memory: MemoryLog) -> None:
    junk = put(memory, MAZE, b"\x01junk")
    named = put(memory, MAZE, b"\x01", {"rollstream.group": b"\xff"})
    foreign = replace(junk, partition=Partition("gone", 0))
    bury(memory, NAMES, junk, named, foreign, replace(junk, value=None, offset=77))
    with memory.writer() as writer:
        writer.append(NAMES.dead_letter, b"somebody else's", key=b"k").result(30)
    told = [o.refusal for o in replay(memory, NAMES)]
    assert [text.partition(":")[0] for text in told] == [
        "bad-framing",
        "bad-headers",
        "bad-framing",
        "it is a tombstone",
        "its headers name no topic of origin",
    ]
    forced = replay(memory, NAMES, force=True)
    assert [bool(o.position) for o in forced] == [True, True, False, False, False]
    assert "gone" in forced[2].refusal, "the topic is not there"
    assert [bool(x.replayed) for x in read_letters(memory, NAMES)] == [True, True, False, False, False]


def test_a_rehearsal_says_the_same_and_does_nothing(memory: MemoryLog, episode: Episode) -> None:
    bury(memory, NAMES, put(memory, MAZE, encode(episode("g", 0))), put(memory, MAZE, b"\x01junk"))
    before = memory.bounds([*memory.partitions(MAZE), *memory.partitions(NAMES.dead_letter)])
    rehearsed = list(replaying(memory, NAMES).judge(read_letters(memory, NAMES)))
    assert memory.bounds(before) == before
    assert [(o.letter, o.refusal) for o in rehearsed] == [(o.letter, o.refusal) for o in replay(memory, NAMES)]


def test_a_replayed_record_that_is_bad_again_is_a_letter_of_its_own(memory: MemoryLog) -> None:
    bury(memory, NAMES, put(memory, MAZE, b"\x01junk", {"trace": b"kept"}))
    (first,) = replay(memory, NAMES, force=True)
    assert first.position is not None
    (back,) = scan(memory, {first.position.partition: first.position.offset})
    bury(memory, NAMES, back)
    old, new = read_letters(memory, NAMES)
    assert (bool(old.replayed), new.replayed, new.origin) == (True, "", first.position)
    _, second = replay(memory, NAMES, force=True)
    assert second.position is not None
    (again,) = scan(memory, {second.position.partition: second.position.offset})
    assert again.headers == {"trace": b"kept", REPLAYED_FROM: str(new.position).encode()}


def test_more_letters_than_go_at_once(memory: MemoryLog, episode: Episode) -> None:
    records = [put(memory, MAZE, encode(episode("g", index, size=230))) for index in range(230)]
    bury(memory, NAMES, *records)
    outcomes = replaying(memory, NAMES).append(read_letters(memory, NAMES))
    for _ in range(101):
        next(outcomes)
    outcomes.close()
    marked = [x for x in read_letters(memory, NAMES) if x.replayed]
    assert len(marked) == 200, "whoever ends it in between finds what was done marked"
    assert sum(bool(o.position) for o in replay(memory, NAMES)) == 30
    partition = records[0].partition
    assert memory.bounds([partition])[partition][1] == 460


def test_a_claim_goes_back_once_its_body_is_there(memory: MemoryLog, episode: Episode) -> None:
    frame = encode(episode("g", 0))
    claim = Claims(MemoryStore, NAMES).deposit(frame)
    bury(memory, NAMES, put(memory, MAZE, encode(claim)), reason="claim-missing")
    assert [o.refusal.partition(":")[0] for o in replay(memory, NAMES)] == ["claim-missing"]
    Claims(lambda: STORE, NAMES).deposit(frame)
    (done,) = replay(memory, NAMES)
    assert done.position is not None
    (again,) = scan(memory, {done.position.partition: done.position.offset})
    assert again.value == encode(claim)


def test_marks_are_no_letters(memory: MemoryLog, episode: Episode) -> None:
    bury(memory, NAMES, put(memory, MAZE, encode(episode("g", 0))))
    replay(memory, NAMES)
    marks = [r for r in scan(memory, memory.partitions(NAMES.dead_letter)) if REPLAYED in r.headers]
    assert [(m.value, m.key) for m in marks] == [(None, b"k")]
    assert not OWN & marks[0].headers.keys(), "a dispatcher takes it for no dead task"
    assert len(list(read_letters(memory, NAMES))) == 1


def test_a_log_that_is_away_ends_it(episode: Episode) -> None:
    log = MemoryLog()
    for topic in declared("m", {"maze": 2}):
        if topic.name != NAMES.schemas:
            log.create(topic)
    bury(log, NAMES, put(log, MAZE, encode_newer(episode("g", 0))))
    with pytest.raises(LogError, match="schemas"):
        replay(log, NAMES)


@pytest.mark.parametrize("text", ["", "7", "t@7", "t[x]@7", "t[0]@", "t[0]@-1", "[0]@7"])
def test_no_position(text: str) -> None:
    assert parse_position(text) is None


def test_positions_are_read_as_they_are_shown() -> None:
    position = Position(Partition("a.b[1]-c", 12), 345)
    assert parse_position(str(position)) == position
