"""`rollstream schemas check | list`."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rollstream.app import main as app
from rollstream.app.context import Context
from rollstream.infra.memory import MemoryLog
from rollstream.infra.schemabook import publish_schemas
from rollstream.infra.topics import Names, declared
from rollstream.schemas import record_schemas, schema_id

SHIPPED = {shipped.name: shipped for shipped in record_schemas()}


class Told(NamedTuple):
    """What a command said."""

    status: int
    out: str
    err: str


Run = Callable[..., Told]
Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Runs a command line in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ROLLSTREAM_CONFIG", raising=False)

    def call(*arguments: str) -> Told:
        monkeypatch.setattr(sys, "argv", ["rollstream", *arguments])
        with pytest.raises(SystemExit) as ended:
            app.main()
        told = capsys.readouterr()
        return Told(int(ended.value.code or 0), told.out, told.err)

    return call


def write(file: str, name: str, edit: Edit) -> str:
    schema = json.loads(SHIPPED[name].text)
    edit(schema)
    Path(file).write_text(json.dumps(schema))
    return file


def field(schema: dict[str, Any], name: str) -> dict[str, Any]:
    return next(found for found in schema["fields"] if found["name"] == name)


def test_what_was_shipped_is_compatible(run: Run) -> None:
    told = run("schemas", "check")
    assert told.status == 0
    assert json.loads(run("schemas", "check", "--json").out)["compatible"] is True


def test_compatible_candidate(run: Run) -> None:
    def add(schema: dict[str, Any]) -> None:
        schema["fields"].append({"name": "judge", "type": "string", "default": ""})

    file = write("next.avsc", "trajectory.v1", add)
    told = run("schemas", "check", file)
    assert told.status == 0
    assert "trajectory.v1 and next.avsc: compatible" in told.out


EDITS: dict[str, tuple[Edit, str, str]] = {
    "renamed without alias": (
        lambda s: field(s, "tokens").update(name="ids"),
        "next.avsc cannot read trajectory.v1: Trajectory.ids: is read, was not written, and has no default",
        "keep a field that has none, under its name",
    ),
    "renamed with alias, which old readers do not know": (
        lambda s: field(s, "tokens").update(name="ids", aliases=["tokens"]),
        "trajectory.v1 cannot read next.avsc: Trajectory.tokens: is read, was not written, and has no default",
        "keep a field that has none, under its name",
    ),
    "widened": (
        lambda s: field(s, "group_size").update(type="long"),
        "trajectory.v1 cannot read next.avsc: Trajectory.group_size: long was written, int is read",
        "keep the type that was shipped",
    ),
    "enum renamed": (
        lambda s: field(s, "status")["type"].update(name="State"),
        "State was written, rollstream.Status is read, and no alias joins them",
        "keep the name",
    ),
}


@pytest.mark.parametrize(("edit", "problem", "advice"), EDITS.values(), ids=EDITS)
def test_incompatible_candidate(run: Run, edit: Edit, problem: str, advice: str) -> None:
    file = write("next.avsc", "trajectory.v1", edit)
    told = run("schemas", "check", file)
    assert told.status == 1
    assert "trajectory.v1 and next.avsc: NOT compatible" in told.out
    assert problem in told.out
    assert advice in told.out
    as_json = run("schemas", "check", file, "--json")
    assert as_json.status == 1
    found = json.loads(as_json.out)
    assert found["compatible"] is False
    (bad,) = [pair for pair in found["pairs"] if pair["problems"]]
    assert (bad["first"], bad["second"]) == ("trajectory.v1", "next.avsc")
    assert all(each["advice"] for each in bad["problems"])


def test_symbol_without_default(run: Run) -> None:
    """Two candidates of a new record are compared with each other, too."""
    for file, symbols in (("a.avsc", ["A"]), ("b.avsc", ["A", "B"])):
        enum = {"type": "enum", "name": "E", "symbols": symbols}
        schema = {"type": "record", "name": "Score", "namespace": "rollstream", "fields": [{"name": "e", "type": enum}]}
        Path(file).write_text(json.dumps(schema))
    told = run("schemas", "check", "a.avsc", "b.avsc")
    assert told.status == 1
    assert "a.avsc cannot read b.avsc: Score.e: B may be written" in told.out
    assert "a.avsc: rollstream.Score is a new record" in told.out


def test_no_schema(run: Run) -> None:
    Path("bad.avsc").write_text('{"type": ')
    told = run("schemas", "check", "bad.avsc")
    assert (told.status, told.err.partition(":")[0]) == (2, "rollstream")
    assert "bad.avsc: expected an Avro schema" in told.err
    told = run("schemas", "check", "none.avsc")
    assert (told.status, told.err) == (2, "rollstream: none.avsc: No such file or directory\n")


def test_list(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    log, names = MemoryLog(), Names()
    for topic in declared(names.namespace, {}):
        log.create(topic)
    monkeypatch.setattr(Context, "log", log)
    publish_schemas(log, names)
    schema = json.loads(SHIPPED["task.v1"].text)
    schema["fields"].append({"name": "x", "type": "int", "default": 0})
    newer = json.dumps(schema)
    with log.writer() as writer:
        writer.append(names.schemas, newer.encode(), key=str(schema_id(newer)).encode())
        writer.append(names.schemas, SHIPPED["task.v1"].text.encode(), key=b"7")
        writer.append(names.schemas, b"{", key=b"8")
    rows = {row["id"]: row for row in json.loads(run("schemas", "list", "--json").out)}
    for shipped in record_schemas():
        assert rows[shipped.id] == {"id": shipped.id, "name": shipped.name, "known": ["release", "topic"]}
    assert rows[7] == {"id": 7, "name": "task.v1", "known": ["topic"]}
    assert rows[schema_id(newer)]["name"] == "rollstream.Task, of another release"
    assert rows[8]["name"].startswith("no schema: ")
    told = run("schemas", "list")
    assert f"{SHIPPED['task.v1'].id}  task.v1" in told.out
