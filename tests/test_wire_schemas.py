"""Schemas: ids, lookups of other releases' schemas, evolution, and schemas made to hurt."""

import io
import json
import re
import struct
import threading
from collections.abc import Callable, Iterable
from dataclasses import fields
from itertools import combinations
from typing import Any, cast

import fastavro
import numpy as np
import pytest

from rollstream.schemas import (
    Claim,
    Command,
    Consumed,
    Control,
    PolicySpan,
    PolicyUpdate,
    Receipt,
    Role,
    Sampling,
    Schemas,
    Status,
    Task,
    Trajectory,
    Turn,
    UnknownSchema,
    decode,
    decode_as,
    encode,
    full_problems,
    reader_problems,
    record_schemas,
    schema_id,
)
from rollstream.schemas.bodies import to_body
from rollstream.schemas.registry import MISSES

Edit = Callable[[dict[str, Any]], object]

TRAJECTORY = Trajectory(
    trajectory_id="t/0/0",
    group_id="t",
    group_size=4,
    sample_index=0,
    environment="e",
    tokens=np.arange(6, dtype=np.int32),
    logprobs=np.full(4, -0.5, np.float32),
    spans=(PolicySpan(version=3, count=4),),
    turns=(Turn(role=Role.USER, tokens=2, sampled=False), Turn(role=Role.ASSISTANT, tokens=4, sampled=True)),
)
SHIPPED = {shipped.name: shipped for shipped in record_schemas()}
RECORDS = {
    "trajectory": Trajectory,
    "task": Task,
    "policy_update": PolicyUpdate,
    "receipt": Receipt,
    "control": Control,
    "claim": Claim,
}


class Shelf:
    """A lookup over texts by id, which notes what it was asked, and answers when `crowd` readers have come."""

    def __init__(self, texts: dict[int, str] | None = None, crowd: int = 0) -> None:
        self.texts = texts or {}
        self.crowd = crowd
        self.readers = threading.Semaphore(0)
        self.asked: list[int] = []
        self.away: Exception | None = None

    def fetch(self, schema_id: int) -> str:
        self.asked.append(schema_id)
        for _ in range(self.crowd):
            assert self.readers.acquire(timeout=30)
        self.crowd = 0
        if self.away is not None:
            raise self.away
        if schema_id not in self.texts:
            raise UnknownSchema("nobody published it")
        return self.texts[schema_id]


class Clock:
    """Seconds that pass when told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def edited(name: str, edit: Edit) -> str:
    """The text of a shipped schema after a change."""
    schema = json.loads(SHIPPED[name].text)
    edit(schema)
    return json.dumps(schema)


def field(schema: dict[str, Any], name: str) -> dict[str, Any]:
    return next(found for found in schema["fields"] if found["name"] == name)


def written(text: str, body: dict[str, Any]) -> bytes:
    stream = io.BytesIO(struct.pack(">BI", 0, schema_id(text)))
    stream.seek(0, io.SEEK_END)
    avro: Any = fastavro
    avro.schemaless_writer(stream, avro.parse_schema(json.loads(text)), body)
    return stream.getvalue()


def reading(text: str) -> Schemas:
    return Schemas(Shelf({schema_id(text): text}))


def inner_records(schema: Any) -> Iterable[dict[str, Any]]:
    if isinstance(schema, dict):
        parts = cast(dict[str, Any], schema)
        if parts.get("type") == "record":
            yield parts
        for part in parts.values():
            yield from inner_records(part)
    elif isinstance(schema, list):
        for part in cast(list[object], schema):
            yield from inner_records(part)


# What is shipped


def test_every_record_shipped() -> None:
    assert {name.partition(".")[0] for name in SHIPPED} == RECORDS.keys()
    assert len({shipped.id for shipped in record_schemas()}) == len(record_schemas())


def test_fields_equal_records() -> None:
    """The newest schema of a record has the fields of its Python value; only spans are two columns."""
    values = {
        **{kind.__name__: kind for kind in RECORDS.values()},
        "Turn": Turn,
        "Sampling": Sampling,
        "Consumed": Consumed,
    }
    for name in RECORDS:
        newest = [shipped for shipped in record_schemas() if shipped.name.startswith(f"{name}.v")][-1]
        for record in inner_records(json.loads(newest.text)):
            expected = {found.name for found in fields(values.pop(record["name"]))}
            if "spans" in expected:
                expected = expected - {"spans"} | {"span_versions", "span_counts"}
            assert {found["name"] for found in record["fields"]} == expected
    assert not values


def test_schemas_documented() -> None:
    """Docs on every record, field and enum; a default symbol on every enum; the namespace is one."""
    for shipped in record_schemas():
        schema = json.loads(shipped.text)
        assert schema["namespace"] == "rollstream"
        for record in inner_records(schema):
            assert record["doc"]
            assert all(found["doc"] for found in record["fields"])
        enums = re.findall(r'\{\s*"type": "enum".*?\}', shipped.text, re.DOTALL)
        assert all({"doc", "default"} <= json.loads(enum).keys() for enum in enums)


def test_symbols_equal_enums() -> None:
    def symbols(text: str, name: str) -> set[str]:
        found = re.search(rf'"name": "{name}",\s*"symbols": (\[.*?\])', text)
        assert found
        return set(json.loads(found[1]))

    assert symbols(SHIPPED["trajectory.v1"].text, "Role") == set(Role)
    assert symbols(SHIPPED["trajectory.v1"].text, "Status") == set(Status)
    assert symbols(SHIPPED["control.v1"].text, "Command") == {*Command, "UNKNOWN"}


def test_versions_shipped_compatible() -> None:
    """FULL_TRANSITIVE: every two versions of a record ever shipped read each other's data."""
    for name in RECORDS:
        versions = [shipped for shipped in record_schemas() if shipped.name.startswith(f"{name}.v")]
        assert versions
        for first, second in combinations(versions, 2):
            assert full_problems(first.text, second.text) == ()
        assert full_problems(versions[0].text, versions[0].text) == ()


# Ids


def test_id_of_full_text() -> None:
    text = SHIPPED["task.v1"].text
    assert schema_id(text) == SHIPPED["task.v1"].id
    assert schema_id(json.dumps(json.loads(text), indent=7)) == schema_id(text)
    reordered = dict(reversed(json.loads(text).items()))
    assert schema_id(json.dumps(reordered)) == schema_id(text)
    changes: list[Edit] = [
        lambda schema: schema.update(doc="other"),
        lambda schema: field(schema, "attempt").update(default=1),
        lambda schema: schema["fields"].reverse(),
    ]
    ids = {schema_id(edited("task.v1", change)) for change in changes}
    assert len({schema_id(text), *ids}) == 4
    assert all(0 < number < 2**31 for number in ids)


# Evolution


def v2(schema: dict[str, Any]) -> None:
    """What a next release may do: fields added with defaults, in another order, symbols and logical types added."""
    field(schema, "started_ms")["type"] = {"type": "long", "logicalType": "timestamp-millis"}
    field(schema, "status")["type"]["symbols"].append("EXPIRED")
    turn = field(schema, "turns")["type"]["items"]
    turn["fields"].insert(0, {"name": "mood", "type": ["null", "string"], "default": None})
    schema["fields"].append({"name": "judge", "type": {"type": "map", "values": "bytes"}, "default": {}})
    schema["fields"].reverse()


def v2_body(**changes: object) -> dict[str, Any]:
    body: dict[str, Any] = to_body(TRAJECTORY) | {"judge": {"model": b"x"}} | changes
    return body | {"turns": [turn | {"mood": "calm"} for turn in body["turns"]]}


def test_case_6_versions_interleaved() -> None:
    text = edited("trajectory.v1", v2)
    schemas = reading(text)
    newer = written(text, v2_body(trajectory_id="t/1/0", started_ms=1_700_000_000_000))
    found = [decode_as(Trajectory, data, schemas=schemas) for data in (encode(TRAJECTORY), newer) * 3]
    assert [trajectory.trajectory_id for trajectory in found] == ["t/0/0", "t/1/0"] * 3
    for trajectory in found:
        np.testing.assert_array_equal(trajectory.tokens, TRAJECTORY.tokens)
        np.testing.assert_array_equal(trajectory.logprobs, TRAJECTORY.logprobs)
        assert trajectory.turns == TRAJECTORY.turns
        assert trajectory.spans == TRAJECTORY.spans
    assert found[1].started_ms == 1_700_000_000_000


def test_case_6_unknown_symbol() -> None:
    """A status of a newer release reads as FAILED, never as something to train on."""
    text = edited("trajectory.v1", v2)
    data = written(text, v2_body(status="EXPIRED"))
    assert decode_as(Trajectory, data, schemas=reading(text)).status is Status.FAILED


def rename(schema: dict[str, Any]) -> None:
    field(schema, "tokens")["name"] = "ids"


def test_case_6_incompatible_refused() -> None:
    """A field renamed without alias: refused when compared, and the record when read."""
    text = edited("trajectory.v1", rename)
    problems = full_problems(SHIPPED["trajectory.v1"].text, text)
    assert tuple(map(str, problems)) == (
        "second cannot read first: Trajectory.ids: is read, was not written, and has no default",
        "first cannot read second: Trajectory.tokens: is read, was not written, and has no default",
    )
    body = to_body(TRAJECTORY)
    with pytest.raises(UnknownSchema, match=r"cannot be read by this release: Trajectory\.tokens") as refused:
        decode(written(text, body | {"ids": body["tokens"]}), schemas=reading(text))
    assert refused.value.reason == "unknown-schema"


EDITS: list[tuple[str, Edit, str | None]] = [
    ("defaulted field", lambda s: s["fields"].append({"name": "x", "type": "int", "default": 0}), None),
    (
        "field without default",
        lambda s: s["fields"].append({"name": "x", "type": "int"}),
        "second.*x: is read, was not",
    ),
    ("optional field gone", lambda s: s["fields"].remove(field(s, "seed")), None),
    ("required field gone", lambda s: s["fields"].remove(field(s, "tokens")), "first.*tokens: is read, was not"),
    ("fields reordered", lambda s: s["fields"].reverse(), None),
    ("doc changed", lambda s: s.update(doc="other"), None),
    ("int to long", lambda s: field(s, "group_size").update(type="long"), "first.*group_size: long was written, int"),
    ("long to int", lambda s: field(s, "seed").update(type="int"), "second.*seed: long was written, int is read"),
    ("bytes to string", lambda s: field(s, "tokens").update(type="string"), "bytes was written, string is read"),
    (
        "bytes to fixed",
        lambda s: field(s, "tokens").update(type={"type": "fixed", "name": "F", "size": 4}),
        "bytes was",
    ),
    ("made optional", lambda s: field(s, "model").update(type=["string", "null"]), "first.*model: null was written"),
    ("symbol added", lambda s: field(s, "status")["type"]["symbols"].append("LATE"), None),
    ("symbol gone", lambda s: field(s, "status")["type"]["symbols"].remove("ABORTED"), None),
    ("enum renamed", lambda s: field(s, "status")["type"].update(name="State"), "no alias joins them"),
    ("record renamed", lambda s: s.update(name="Episode"), "Trajectory was written, rollstream.Episode is read"),
    ("array to map", lambda s: field(s, "turns").update(type={"type": "map", "values": "int"}), "array was written"),
    ("inside a map", lambda s: field(s, "rewards")["type"].update(values="string"), r"rewards\[\]: double was written"),
    (
        "inside an array",
        lambda s: field(s, "turns")["type"]["items"]["fields"].append({"name": "x", "type": "int"}),
        r"turns\[\]\.x: is read",
    ),
]


@pytest.mark.parametrize(("edit", "problem"), [pytest.param(*edit[1:], id=edit[0]) for edit in EDITS])
def test_full_compatibility(edit: Edit, problem: str | None) -> None:
    shipped = SHIPPED["trajectory.v1"].text
    changed = edited("trajectory.v1", edit)
    problems = full_problems(shipped, changed)
    if problem is None:
        assert problems == ()
    else:
        assert re.search(problem, "\n".join(map(str, problems)))
    mirrored = full_problems(changed, shipped)
    assert bool(mirrored) == bool(problems)


def test_symbol_added_without_default() -> None:
    def bare(*symbols: str) -> str:
        enum = {"type": "enum", "name": "E", "symbols": list(symbols)}
        return json.dumps({"type": "record", "name": "R", "fields": [{"name": "e", "type": enum}]})

    assert reader_problems(bare("A", "B"), bare("A")) == ()
    assert [str(problem) for problem in reader_problems(bare("A"), bare("A", "B"))] == [
        "R.e: B may be written, which the reader does not know and has no default for",
    ]


def test_promotion_one_way() -> None:
    def holding(kind: str) -> str:
        return json.dumps({"type": "record", "name": "R", "fields": [{"name": "n", "type": kind}]})

    for narrow, wide in combinations(("int", "long", "float", "double"), 2):
        assert reader_problems(holding(wide), holding(narrow)) == ()
        assert reader_problems(holding(narrow), holding(wide)) != ()
        assert len(full_problems(holding(narrow), holding(wide))) == 1


def test_alias_joins_names() -> None:
    """An alias lets the new reader read old data; the old reader has none, so the pair is not FULL."""

    def renamed(schema: dict[str, Any]) -> None:
        field(schema, "tokens").update(name="ids", aliases=["tokens"])

    shipped, changed = SHIPPED["trajectory.v1"].text, edited("trajectory.v1", renamed)
    assert reader_problems(changed, shipped) == ()
    assert len(full_problems(shipped, changed)) == 1


@pytest.mark.parametrize("edit", [pytest.param(edit, id=name) for name, edit, problem in EDITS if problem is None])
def test_compatible_decodes(edit: Edit) -> None:
    """What the check lets pass is read."""
    text = edited("trajectory.v1", edit)
    found = decode_as(Trajectory, written(text, to_body(TRAJECTORY)), schemas=reading(text))
    assert found.turns == TRAJECTORY.turns
    np.testing.assert_array_equal(found.tokens, TRAJECTORY.tokens)


# Lookups


def test_known_never_asked() -> None:
    shelf = Shelf()
    schemas = Schemas(shelf)
    for shipped in record_schemas():
        assert schemas.resolve(shipped.id).reader is None
    assert shelf.asked == []


def test_found_once() -> None:
    text = edited("trajectory.v1", v2)
    shelf = Shelf({schema_id(text): text})
    schemas = Schemas(shelf)
    data = written(text, v2_body())
    assert len({decode_as(Trajectory, data, schemas=schemas).trajectory_id for _ in range(5)}) == 1
    assert shelf.asked == [schema_id(text)]


def test_miss_remembered_for_a_while() -> None:
    """A flood of records with an unknown id asks once; when the schema is published later, it is found."""
    text = edited("trajectory.v1", v2)
    shelf, clock = Shelf(), Clock()
    schemas = Schemas(shelf, retry_after=10, clock=clock)
    for _ in range(100):
        with pytest.raises(UnknownSchema, match=f"schema {schema_id(text)}: nobody published it"):
            schemas.resolve(schema_id(text))
    assert len(shelf.asked) == 1
    shelf.texts[schema_id(text)] = text
    clock.now = 9.9
    with pytest.raises(UnknownSchema):
        schemas.resolve(schema_id(text))
    clock.now = 10.0
    assert schemas.resolve(schema_id(text)).kind == "Trajectory"
    assert len(shelf.asked) == 2


def test_misses_bounded() -> None:
    """Random ids do not fill the memory: the oldest misses are forgotten, and asked for again."""
    shelf = Shelf()
    schemas = Schemas(shelf, clock=Clock())
    for number in range(1, MISSES + 2):
        with pytest.raises(UnknownSchema):
            schemas.resolve(number)
    for number in (MISSES + 1, 1):
        with pytest.raises(UnknownSchema):
            schemas.resolve(number)
    assert shelf.asked == [*range(1, MISSES + 2), 1]


def test_lookup_away() -> None:
    """That the registry is away says nothing about the record: the error passes through and is not remembered."""
    text = edited("trajectory.v1", v2)
    shelf = Shelf({schema_id(text): text})
    shelf.away = ConnectionError("registry is away")
    schemas = Schemas(shelf, clock=Clock())
    with pytest.raises(ConnectionError, match="registry is away"):
        decode(written(text, v2_body()), schemas=schemas)
    shelf.away = None
    assert decode_as(Trajectory, written(text, v2_body()), schemas=schemas).environment == "e"


def test_many_threads_ask_once() -> None:
    text = edited("trajectory.v1", v2)
    shelf = Shelf({schema_id(text): text}, crowd=8)
    schemas = Schemas(shelf)
    data = written(text, v2_body())
    found: list[str] = []

    def read() -> None:
        shelf.readers.release()
        found.append(decode_as(Trajectory, data, schemas=schemas).trajectory_id)

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["t/0/0"] * 8
    assert shelf.asked == [schema_id(text)]


# Schemas made to hurt


def record(*kinds: object, name: str = "rollstream.Task") -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": f"f{i}", "type": k} for i, k in enumerate(kinds)]}


def doubled(times: int) -> dict[str, Any]:
    """A record of 2**times empty records, in a few lines."""
    schema = record(name="R0")
    for number in range(1, times):
        schema = record(schema, f"R{number - 1}", name=f"R{number}")
    return record(schema)


def nested(times: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array", "items": "int"}
    for _ in range(times):
        schema = {"type": "array", "items": schema}
    return record(schema)


HURTING: dict[str, tuple[Any, str]] = {
    "recursive": (record(["null", "rollstream.Task"]), "no recursive types, found rollstream.Task > rollstream.Task"),
    "recursive below": (record(record({"type": "map", "values": "Node"}, name="Node")), "no recursive types"),
    "array of nulls": (record({"type": "array", "items": "null"}), "array items of at least one byte"),
    "array of nothing": (record({"type": "array", "items": record("null", name="N")}), "array items of at least"),
    "array of empty fixed": (
        record({"type": "array", "items": {"type": "fixed", "name": "F", "size": 0}}),
        "array items of at least",
    ),
    "exponential": (doubled(25), "at most 4096 parts"),
    "wide": (record(*["int"] * 5000), "at most 4096 parts"),
    "deep": (nested(100), "32 deep"),
    "foreign": (record("int", name="com.example.Order"), "a record of rollstream, found com.example.Order"),
    "enum": ({"type": "enum", "name": "rollstream.Task", "symbols": ["A"]}, "the schema of a record"),
    "union": (["null", "int"], "the schema of a record"),
    "unknown type": (record("quaternion"), "an Avro schema"),
    "nothing in it": ({}, "an Avro schema"),
    "empty union": (record([]), "an Avro schema"),
}


@pytest.mark.parametrize(("schema", "message"), HURTING.values(), ids=HURTING)
def test_hurting_schema(schema: object, message: str) -> None:
    schemas = Schemas(Shelf({7: json.dumps(schema)}))
    with pytest.raises(UnknownSchema, match=f"schema 7: .*{message}"):
        decode(struct.pack(">BI", 0, 7) + b"\x02" * 200_000, schemas=schemas)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "7", "null", '"' + "x" * 2_000_000, '{"type": ' * 500])
def test_hurting_text(text: str) -> None:
    with pytest.raises(UnknownSchema, match="schema 7: expected"):
        Schemas(Shelf({7: text})).resolve(7)


def test_default_of_reader_not_shared() -> None:
    """Two records that got the same default do not share it."""

    def bare(schema: dict[str, Any]) -> None:
        schema["fields"] = [found for found in schema["fields"] if found["name"] != "metadata"]

    text = edited("trajectory.v1", bare)
    schemas, data = reading(text), written(text, to_body(TRAJECTORY))
    first, second = (decode_as(Trajectory, data, schemas=schemas) for _ in range(2))
    assert first.metadata == {}
    assert first.metadata is not second.metadata
