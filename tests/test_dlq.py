"""`rollstream dlq`: what a person sees of dead letters, and what goes back."""

import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rollstream.app import main as app
from rollstream.app.context import Context
from rollstream.infra.deadletters import DeadLetters
from rollstream.infra.log import Record
from rollstream.infra.memory import MemoryLog
from rollstream.infra.scan import scan
from rollstream.infra.topics import Names, declared
from rollstream.schemas import Task, Trajectory, encode, trajectory_headers

Episode = Callable[..., Trajectory]
NAMES = Names("rollstream")
MAZE = NAMES.trajectories("maze")


class Told(NamedTuple):
    """What a command said."""

    status: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Told]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> MemoryLog:
    """What the commands take for the configured log."""
    memory = MemoryLog()
    for topic in declared(NAMES.namespace, {"maze": 1}):
        memory.create(topic)
    monkeypatch.setattr(Context, "log", memory)
    return memory


@pytest.fixture
def run(
    log: MemoryLog, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Run]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ROLLSTREAM_CONFIG", raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> Told:
        monkeypatch.setattr(sys, "argv", ["rollstream", "dlq", *arguments])
        with pytest.raises(SystemExit) as ended:
            app.main()
        told = capsys.readouterr()
        status = ended.value.code or 0
        assert isinstance(status, int)
        return Told(status, told.out, told.err)

    yield call
    logging.getLogger("rollstream").setLevel(logging.NOTSET)


def put(log: MemoryLog, topic: str, value: bytes, headers: dict[str, bytes] | None = None) -> Record:
    with log.writer() as writer:
        at = writer.append(topic, value, key=b"the-key", headers=headers).result(30)
    (record,) = scan(log, {at.partition: at.offset}, stop={at.partition: at.offset + 1})
    return record


@pytest.fixture
def letters(log: MemoryLog, episode: Episode) -> list[Record]:
    """Junk, a good trajectory, a good task, a trajectory cut short."""
    good = episode("g", 0)
    records = [
        put(log, MAZE, b"\x01junk\x00\xff", {"trace": b"kept"}),
        put(log, MAZE, encode(good), trajectory_headers(good)),
        put(log, NAMES.tasks, encode(Task(task_id="t-1", environment="maze", group_size=3, seed=5))),
        put(log, MAZE, encode(good)[:-1]),
    ]
    reasons = ["bad-framing", "unknown-schema", "unknown-topic", "malformed"]
    dead = DeadLetters(log, NAMES)
    for record, reason in zip(records, reasons, strict=True):
        dead.send(record, reason=reason, error=f"{reason} here")
    dead.close()
    return records


def ends(log: MemoryLog) -> dict[str, int]:
    return {p.topic: end for t in (MAZE, NAMES.tasks) for p, (_, end) in log.bounds(log.partitions(t)).items() if end}


def test_list(run: Run, letters: list[Record]) -> None:
    told = run("list")
    lines = told.out.splitlines()
    assert told.status == 0
    assert [line.split()[0] for line in lines[:4]] == ["0", "1", "2", "3"]
    for line, record in zip(lines, letters, strict=False):
        assert f"  {record.position}  " in line
    assert "bad-framing  bad-framing here" in lines[0]
    assert sorted(lines[4:]) == sorted(
        f"{1:>8} {r}" for r in ("bad-framing", "unknown-schema", "unknown-topic", "malformed")
    )


def test_list_for_scripts(run: Run, letters: list[Record]) -> None:
    told = run("list", "--json").json()
    assert [(x["place"], x["origin"], x["bytes"]) for x in told["letters"]] == [
        (str(n), str(r.position), len(r.value or b"")) for n, r in enumerate(letters)
    ]
    assert told["reasons"] == {"bad-framing": 1, "unknown-schema": 1, "unknown-topic": 1, "malformed": 1}
    assert {x["replayed"] for x in told["letters"]} == {None}


@pytest.mark.parametrize(
    ("arguments", "places"),
    [
        (("--reason", "malformed"), ["3"]),
        (("-r", "malformed", "-r", "bad-framing"), ["0", "3"]),
        (("--topic", "tasks"), ["2"]),
        (("--topic", MAZE), ["0", "1", "3"]),
        (("--topic", "trajectories.maze", "--reason", "unknown-schema"), ["1"]),
        (("--reason", "nothing"), []),
    ],
)
@pytest.mark.usefixtures("letters")
def test_list_selects(run: Run, arguments: tuple[str, ...], places: list[str]) -> None:
    assert [x["place"] for x in run("list", "--json", *arguments).json()["letters"]] == places


def test_list_of_none(run: Run) -> None:
    assert run("list") == (0, "no dead letter\n", "")
    assert run("list", "--json").json() == {"letters": [], "reasons": {}}


@pytest.mark.usefixtures("letters")
def test_show_what_cannot_be_read(run: Run) -> None:
    told = run("show", "0")
    assert told.status == 0
    for line in (
        f"origin    {MAZE}[0]@0",
        "reason    bad-framing",
        "error     bad-framing here",
        "key       the-key",
        "header    trace: kept",
        "7 bytes",
        "00000000  01 6a 75 6e 6b 00 ff                             .junk..",
    ):
        assert line in told.out.splitlines()
    assert "cannot be read (bad-framing): expected a zero byte" in told.out
    assert run("show", "0", "--json").json() | {"value": b"\x01junk\x00\xff".hex()} == run("show", "0", "--json").json()


@pytest.mark.usefixtures("letters")
def test_show_what_can_be_read_now(run: Run, episode: Episode) -> None:
    out = run("show", f"{NAMES.dead_letter}[0]@1").out
    assert "now       can be read" in out
    assert episode("g", 0).trajectory_id in out
    told = run("show", "1", "--json").json()["now"]
    assert (told["readable"], told["record"], told["fields"]["group_id"]) == (True, "Trajectory", "g")
    assert told["fields"]["tokens"] == episode("g", 0).tokens.tolist()
    assert "  task_id: t-1" in run("show", "2").out.splitlines()


def test_show_dumps_as_much_as_is_asked_for(run: Run, log: MemoryLog) -> None:
    dead = DeadLetters(log, NAMES)
    dead.send(put(log, MAZE, bytes(range(256)) * 20), reason="malformed", error="")
    dead.close()
    lines = run("show", "0").out.splitlines()
    assert "... 1,024 more; --whole dumps them" in lines
    assert sum(line.startswith("0000") for line in lines) == 4096 // 16
    whole = run("show", "0", "--whole").out.splitlines()
    assert whole[-1].startswith("000013f0  f0 f1")


@pytest.mark.parametrize("place", ["4", "1@0", f"{MAZE}[0]@0"])
@pytest.mark.usefixtures("letters")
def test_show_of_none(run: Run, place: str) -> None:
    told = run("show", place)
    assert (told.status, told.out) == (2, "")
    assert "no dead letter at" in told.err


def test_a_place_that_is_none(run: Run) -> None:
    told = run("show", "first")
    assert told.status == 2
    assert "expected the place of a dead letter, such as 7 or 1@7, found 'first'" in told.err


def test_replay_needs_a_choice(run: Run) -> None:
    told = run("replay")
    assert told.status == 2
    assert "name the letters" in told.err


def test_replay(run: Run, log: MemoryLog, letters: list[Record]) -> None:
    before = ends(log)
    told = run("replay", "--all", "--yes", "--json")
    assert told.status == 1, "some were left"
    assert [(x["place"], x["to"]) for x in told.json()["replayed"]] == [
        ("1", f"{MAZE}[0]@3"),
        ("2", f"{NAMES.tasks}[{letters[2].partition.number}]@1"),
    ]
    assert [(x["place"], x["refusal"].partition(":")[0]) for x in told.json()["left"]] == [
        ("0", "bad-framing"),
        ("3", "malformed"),
    ]
    assert ends(log) == {topic: end + 1 for topic, end in before.items()}
    assert "replayed to" in run("list").out
    again = run("replay", "1", "2", "-y")
    assert (again.status, "0 replayed, 2 left" in again.out) == (1, True)
    assert ends(log) == {topic: end + 1 for topic, end in before.items()}


def test_replay_rehearsed(run: Run, log: MemoryLog, letters: list[Record]) -> None:
    before = ends(log)
    told = run("replay", "-r", "unknown-schema", "--dry-run")
    assert (told.status, told.out.splitlines()) == (
        0,
        [f"      1  {letters[1].position}  would go", "1 would be replayed, 0 left"],
    )
    assert ends(log) == before


def test_replay_asks(run: Run, log: MemoryLog, letters: list[Record], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def refuse(question: str, **_: object) -> bool:
        asked.append(question)
        return False

    monkeypatch.setattr("typer.confirm", refuse)
    before = ends(log)
    assert run("replay", "--topic", "trajectories.maze").status == 1
    assert asked == ["replay 1 of 3 letters?"]
    assert ends(log) == before
    assert len(letters) == 4


@pytest.mark.usefixtures("letters")
def test_replay_by_force_and_again(run: Run) -> None:
    assert len(run("replay", "0", "--force", "-y", "--json").json()["replayed"]) == 1
    assert run("replay", "0", "--force", "-y").status == 1
    assert len(run("replay", "0", "--force", "--again", "-y", "--json").json()["replayed"]) == 1


@pytest.mark.usefixtures("letters")
def test_replay_of_a_place_that_is_not_there_does_nothing(run: Run, log: MemoryLog) -> None:
    before = ends(log)
    told = run("replay", "1", "9", "-y")
    assert told.status == 2
    assert f"no such dead letter: {NAMES.dead_letter}[0]@9" in told.err
    assert ends(log) == before
