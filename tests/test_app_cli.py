"""The command line: light to ask for help, short when something is wrong, exact where a script reads."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import pytest

from rollstream.app import main as app
from rollstream.app.context import Context
from rollstream.app.logs import CLIENT, Seldom
from rollstream.app.reach import Unreachable, reach_broker, reach_store
from rollstream.infra.checkpoints import Checkpoints
from rollstream.infra.claims import Claims
from rollstream.infra.cursors import Cursor, Cursors
from rollstream.infra.kafka import KafkaLog
from rollstream.infra.log import Partition
from rollstream.infra.s3 import S3Store
from rollstream.infra.stack import LocalStack
from rollstream.infra.store import MemoryStore
from rollstream.infra.topics import Names
from rollstream.schemas import (
    Consumed,
    PolicySpan,
    Receipt,
    Role,
    Status,
    Trajectory,
    Turn,
    WireRecord,
    encode,
    trajectory_headers,
)

COMMANDS = (
    ("demo",),
    ("demo-play",),
    ("up",),
    ("down",),
    ("status",),
    ("topics",),
    ("topics", "plan"),
    ("topics", "apply"),
    ("topics", "verify"),
    ("schemas", "check"),
    ("schemas", "list"),
    ("dispatch",),
    ("work",),
    ("train",),
    ("evaluate",),
    ("tail",),
    ("show",),
    ("audit",),
    ("lineage",),
    ("replay",),
    ("checkpoints",),
    ("checkpoints", "collect"),
    ("dlq", "list"),
    ("dlq", "show"),
    ("dlq", "replay"),
    ("config",),
    ("config", "show"),
)
HEAVY = (
    "torch",
    "vllm",
    "confluent_kafka",
    "boto3",
    "botocore",
    "transformers",
    "textarena",
    "gymnasium",
    "matplotlib",
)
NOBODY = "127.0.0.1:1"


class Told(NamedTuple):
    """What a command said."""

    status: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Told]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Run]:
    """Runs a command line in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ROLLSTREAM_CONFIG", raising=False)
    monkeypatch.setenv("COLUMNS", "100")

    def call(*arguments: str) -> Told:
        monkeypatch.setattr(sys, "argv", ["rollstream", *arguments])
        with pytest.raises(SystemExit) as ended:
            app.main()
        told = capsys.readouterr()
        status = ended.value.code or 0
        assert isinstance(status, int)
        return Told(status, told.out, told.err)

    yield call
    logging.getLogger("rollstream").setLevel(logging.NOTSET)
    for kept in [f for f in logging.getLogger(CLIENT).filters if isinstance(f, Seldom)]:
        logging.getLogger(CLIENT).removeFilter(kept)


# ------------------------------------------------------------------ help


def test_help_light() -> None:
    """The help of no command loads anything heavy."""
    code = f"""
import json, sys
from rollstream.app.main import cli
for command in {COMMANDS!r} + ((),):
    try:
        cli([*command, "--help"], standalone_mode=True)
    except SystemExit as end:
        assert not end.code, command
sys.stderr.write(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stderr) == []


def test_help_names_every_command(run: Run) -> None:
    told = run("--help")
    assert told.status == 0
    for command in {command[0] for command in COMMANDS} - {"demo-play"}:
        assert f" {command} " in told.out
    assert "demo-play" not in told.out


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in {("topics",), ("config",), ("demo-play",)}])
def test_examples_one_per_line(run: Run, command: tuple[str, ...]) -> None:
    """Each example stands on a line of its own, and is of this command."""
    told = run(*command, "--help")
    lines = [line.strip() for line in told.out.splitlines()]
    examples = [line for line in lines[lines.index("Examples:") + 1 :] if line]
    assert examples
    assert all(line.startswith(("$ rollstream ", "$ torchrun ")) for line in examples)
    assert all(" ".join(command) in line for line in examples)


def test_help_flows(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text fills the width that there is, instead of breaking where the source does."""
    monkeypatch.setenv("COLUMNS", "200")
    text = run("demo", "--help").out
    assert "Ctrl-C at any moment ends every process; --resume goes on from the last checkpoint." in text
    assert "DIR/rollstream.toml; commands find them there" in run("up", "--help").out


def test_version(run: Run) -> None:
    assert run("--version").out.startswith("rollstream 0.")


# ------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-c", "missing.toml", "audit"), ("missing.toml",)),
        (("-s", "nonsense", "audit"), ("--set", "section.key=value")),
        (("-s", "trainer.lrr=1", "audit"), ("trainer.lrr", "did you mean trainer.lr")),
        (("-s", "trainer.lr=fast", "audit"), ("trainer.lr", "number", "fast")),
        (("-s", f"kafka.bootstrap={NOBODY}", "tail"), ("kafka.bootstrap", NOBODY, "rollstream up")),
        (("-s", f"kafka.bootstrap={NOBODY}", "topics", "plan"), ("kafka.bootstrap", NOBODY, "rollstream up")),
        (("-s", "kafka.bootstrap=here:there", "tail"), ("kafka.bootstrap", "HOST:PORT", "here:there")),
        (("-s", f"store.url=http://{NOBODY}", "checkpoints"), ("store.url", NOBODY, "rollstream up")),
        (("dispatch",), ("no environment is configured", "environments.NAME.adapter")),
        (("work",), ("no environment is configured",)),
        (("train",), ("no environment is configured",)),
        (("evaluate",), ("no environment is configured",)),
        (("-s", "environments.a.adapter=textarena", "train", "--model", "nowhere"), ("--model", "nowhere")),
        (("demo", "--resume"), ("nothing to resume",)),
    ],
)
def test_mistakes_in_one_line(run: Run, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    """What is wrong, where, and what to do: one line, status 2, no traceback."""
    told = run(*arguments)
    assert told.status == 2
    assert told.out == ""
    assert told.err.startswith("rollstream: ")
    assert told.err.count("\n") == 1
    for word in words:
        assert word in told.err


def test_mistake_of_usage(run: Run) -> None:
    told = run("up", "--broker", "rabbit")
    assert told.status == 2
    assert "tansu" in told.err
    assert "Traceback" not in told.err


def test_missing_extra(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command whose packages are not installed names the extra."""
    monkeypatch.setitem(sys.modules, "torch", None)
    for module in [m for m in sys.modules if m.startswith(("rollstream.consumers", "rollstream.infra.models"))]:
        monkeypatch.delitem(sys.modules, module)
    told = run("-s", "environments.a.adapter=textarena", "train")
    assert told.status == 2
    assert "pip install 'rollstream[train]'" in told.err


def test_demo_asks_for_its_extra_first(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollstream.app.demo.command.NEEDED", ("no_such_module",))
    told = run("demo")
    assert (told.status, told.err.strip()) == (
        2,
        "rollstream: the demo needs the extra 'demo': pip install 'rollstream[demo]'",
    )
    assert not Path(".rollstream").exists()


def test_unwritable_folder(run: Run) -> None:
    told = run("up", "--dir", "/proc/nowhere")
    assert told.status == 2
    assert told.err.startswith("rollstream: /proc/nowhere: ")


def test_groups_of_errors(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that fail together are told as the first of them; a bug among them is not hidden."""

    def fail(*errors: Exception) -> Callable[[], None]:
        def command() -> None:
            raise ExceptionGroup("parts", errors)

        return command

    monkeypatch.setattr(app, "cli", fail(ExceptionGroup("inner", [Unreachable("gone")]), Unreachable("too")))
    assert run("work") == (2, "", "rollstream: gone\n")
    monkeypatch.setattr(app, "cli", fail(Unreachable("gone"), ZeroDivisionError()))
    with pytest.raises(ExceptionGroup):
        app.main()


def test_reach(tansu_address: str, stack_tansu: LocalStack) -> None:
    """One bootstrap server that answers is enough."""
    reach_broker(tansu_address)
    reach_broker(f"{NOBODY}, {tansu_address}")
    reach_broker(f"PLAINTEXT://{tansu_address}")
    reach_store(stack_tansu.endpoints.s3_url)
    reach_store(None)
    with pytest.raises(Unreachable, match="refused"):
        reach_broker(f"{NOBODY},127.0.0.1:2")


def test_client_lines_are_rare() -> None:
    """The client's complaint that repeats passes once; another kind passes too."""
    seldom = Seldom(60)

    def line(kind: str) -> logging.LogRecord:
        return logging.LogRecord(CLIENT, logging.ERROR, "", 0, "%s [%s] %s", (kind, "rdkafka#1", "refused"), None)

    assert [seldom.filter(line(kind)) for kind in ("FAIL", "FAIL", "ERROR", "FAIL", "ERROR")] == [
        True,
        False,
        True,
        False,
        False,
    ]


def test_config_show_hides_secrets(run: Run) -> None:
    told = run("-s", "store.secret_key=hush", "-s", "trainer.lr=1e-5", "config", "show")
    assert told.status == 0
    assert "hush" not in told.out
    assert "lr = 1e-05" in told.out


# ------------------------------------------------------------------ the local stack


def test_up_status_down(run: Run, tmp_path: Path) -> None:
    """Up, up again, status, down, through JSON; every process is gone at the end."""
    folder = tmp_path / "stack"
    assert run("status", "--dir", str(folder), "--json").json() == {"up": False, "components": []}
    first = run("up", "--dir", str(folder), "--json")
    try:
        assert first.status == 0, first.err
        ends = first.json()
        assert set(ends) == {"bootstrap", "broker", "s3_url", "bucket", "config"}
        assert (ends["broker"], Path(ends["config"])) == ("tansu", folder / "rollstream.toml")
        assert run("-c", ends["config"], "topics", "plan").status == 0
        assert run("up", "--dir", str(folder), "--json").json() == ends
        other = run("up", "--dir", str(folder), "--broker", "kafka")
        assert other.status == 2
        assert "up already" in other.err
        told = run("status", "--dir", str(folder), "--json").json()
        assert told["up"] is True
        assert [set(c) for c in told["components"]] == [{"name", "pid", "port", "alive", "answering"}] * 2
        pids = [c["pid"] for c in told["components"]]
        text = run("status", "--dir", str(folder))
        assert all(f"pid {pid}" in text.out for pid in pids)
    finally:
        ended = run("down", "--dir", str(folder), "--json")
    assert sorted(ended.json()["ended"]) == ["broker-1", "store"]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert run("down", "--dir", str(folder), "--json").json() == {"ended": []}
    assert run("status", "--dir", str(folder)).status == 0


# ------------------------------------------------------------------ a small log


class Place(NamedTuple):
    """A namespace of the test's own on the stack."""

    config: Path
    log: KafkaLog
    names: Names
    checkpoints: Checkpoints
    stack: LocalStack


@pytest.fixture
def place(stack_tansu: LocalStack, tmp_path: Path) -> Iterator[Place]:
    names = Names(f"cli-{uuid4().hex[:8]}")
    ends = stack_tansu.endpoints
    config = tmp_path / "run.toml"
    own = f'\n[run]\nname = "small"\nnamespace = "{names.namespace}"\n'
    environments = "".join(f'\n[environments.{e}]\nadapter = "textarena"\npartitions = 1\n' for e in ("guess", "lake"))
    config.write_text(ends.to_toml().replace("[store]", f'[store]\nprefix = "{names.namespace}/"') + own + environments)
    store = S3Store(
        ends.bucket,
        url=ends.s3_url,
        access_key=ends.access_key,
        secret_key=ends.secret_key,
        prefix=f"{names.namespace}/",
    )
    yield Place(config, KafkaLog(ends.bootstrap), names, Checkpoints(store, "small"), stack_tansu)
    store.close()


def make_trajectory(number: int, environment: str = "guess") -> Trajectory:
    return Trajectory(
        trajectory_id=f"t-{number}/0/0",
        group_id=f"t-{number}",
        group_size=1,
        sample_index=0,
        environment=environment,
        seed=number,
        model="tiny",
        tokens=np.array([1, 2, 3], np.int32),
        logprobs=np.array([-0.5, -0.25], np.float32),
        spans=(PolicySpan(version=4, count=1), PolicySpan(version=5, count=1)),
        turns=(
            Turn(role=Role.USER, tokens=1, sampled=False, text="guess a number"),
            Turn(role=Role.ASSISTANT, tokens=2, sampled=True, text="1 7", reward=0.5),
        ),
        reward=1.0,
        status=Status.TRUNCATED,
        cause="max-turns",
    )


def write(place: Place, *values: WireRecord | bytes) -> None:
    """Append to the topic where each belongs; bytes go where trajectories of guess are."""
    with place.log.writer() as writer:
        for value in values:
            if isinstance(value, Trajectory):
                topic, key, headers = (
                    place.names.trajectories(value.environment),
                    value.group_id,
                    trajectory_headers(value),
                )
            else:
                topic = place.names.ledger if isinstance(value, Receipt) else place.names.trajectories("guess")
                key, headers = "small", {}
            body = value if isinstance(value, bytes) else encode(value)
            writer.append(topic, body, key=key.encode(), headers=headers).result(30)


def settle(place: Place, *, trained: list[int], stale: list[int], low: int) -> None:
    """A step's receipt, and its checkpoint with a cursor."""
    topic = place.names.trajectories("guess")
    consumed = Consumed(
        topic=topic, partition=0, trained=np.array(trained, np.int64), dropped={"stale": np.array(stale, np.int64)}
    )
    write(place, Receipt(run="small", incarnation="one", step=1, version=1, parent=0, consumed=(consumed,)))
    place.checkpoints.claim("one")
    place.checkpoints.publish(
        1,
        {"weights/config.json": b"{}", "trainer/state": b"s"},
        parent=None,
        incarnation="one",
        step=1,
        cursors=Cursors({Partition(topic, 0): Cursor(low=low)}),
    )


def test_topics(run: Run, place: Place) -> None:
    """Verify finds what is missing, plan shows it, apply makes it, and then nothing is left to do."""
    base = ("-c", str(place.config), "topics")
    missing = run(*base, "verify", "--json")
    assert (missing.status, len(missing.json())) == (1, 8)
    planned = run(*base, "plan", "--json").json()
    assert [line.split()[0] for line in planned] == ["create"] * 8
    assert run(*base, "apply", "--json", "--yes").json() == planned
    assert run(*base, "plan").out.strip() == "nothing to do"
    assert run(*base, "verify", "--json") == (0, "[]\n", "")


def test_apply_asks(run: Run, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> bool:
        return False

    monkeypatch.setattr("typer.confirm", refuse)
    assert run("-c", str(place.config), "topics", "apply").status == 1
    assert place.names.tasks not in place.log.topics()


@pytest.mark.parametrize("command", [("tail",), ("audit",), ("show", "some-id")])
def test_no_topics(run: Run, place: Place, command: tuple[str, ...]) -> None:
    told = run("-c", str(place.config), *command)
    assert told.status == 2
    assert "`rollstream topics apply`" in told.err


def test_tail_and_show(run: Run, place: Place) -> None:
    base = ("-c", str(place.config))
    run(*base, "topics", "apply", "-y")
    write(place, make_trajectory(1), b"junk", make_trajectory(2), make_trajectory(3, "lake"))
    told = run(*base, "tail", "--json")
    rows = [json.loads(line) for line in told.out.splitlines()]
    assert sorted(row["trajectory_id"] for row in rows) == ["t-1/0/0", "t-2/0/0", "t-3/0/0"]
    assert "cannot be read" in told.err
    topic = place.names.trajectories("guess")
    first = rows[[row["trajectory_id"] for row in rows].index("t-1/0/0")]
    assert first == {
        "position": f"{topic}[0]@0",
        "trajectory_id": "t-1/0/0",
        "group_id": "t-1",
        "environment": "guess",
        "seed": 1,
        "status": "TRUNCATED",
        "cause": "max-turns",
        "reward": 1.0,
        "versions": [4, 5],
        "tokens": 3,
        "model": "tiny",
    }
    last = run(*base, "tail", "-n", "1", "-e", "guess").out
    assert last == f"{topic}[0]@2  t-2/0/0  truncated  reward 1  policy 4-5  2 turns  3 tokens\n"
    wrong = run(*base, "tail", "-e", "chess")
    assert (wrong.status, wrong.err) == (
        2,
        "rollstream: no environment 'chess' on this log; there are: guess, lake\n",
    )
    shown = run(*base, "show", "t-2/0/0", "--json").json()
    assert (shown["token_ids"], shown["logprobs"]) == ([1, 2, 3], [-0.5, -0.25])
    assert [turn["text"] for turn in shown["turns"]] == ["guess a number", "1 7"]
    assert run(*base, "show", f"{topic}[0]@2", "--json").json() == shown
    text = run(*base, "show", f"{topic}[0]@0").out.splitlines()
    assert text[1:] == [
        "  user       guess a number   [1 tokens]",
        "  assistant  1 7   [2 tokens, policy 4, log p -0.750, reward 0.5]",
        "cause: max-turns",
    ]
    for which in ("t-9/0/0", f"{topic}[0]@99"):
        gone = run(*base, "show", which)
        assert (gone.status, "rollstream tail" in gone.err) == (2, True)


def test_tail_and_show_read_what_lies_in_the_store(run: Run, place: Place) -> None:
    base = ("-c", str(place.config))
    run(*base, "topics", "apply", "-y")
    large = replace(make_trajectory(1), environment_version="v" * 2_000_000)
    claims = Claims(lambda: place.checkpoints.store, place.names)
    claim = claims.deposit(encode(large))
    with place.log.writer() as writer:
        topic = place.names.trajectories("guess")
        for reference in (claim, replace(claim, sha256="0" * 64)):
            writer.append(topic, encode(reference), key=b"t-1", headers=trajectory_headers(large)).result(30)
    told = run(*base, "tail", "--json")
    assert [json.loads(line)["trajectory_id"] for line in told.out.splitlines()] == ["t-1/0/0"]
    assert f"{topic}[0]@1  cannot be read (claim-missing)" in told.err
    shown = run(*base, "show", "t-1/0/0", "--json").json()
    assert (shown["token_ids"], shown["logprobs"]) == ([1, 2, 3], [-0.5, -0.25])
    away = (*base, "-s", f"store.url=http://{NOBODY}")
    assert "cannot be read (store)" in run(*away, "tail").out
    assert "no object store answers" in run(*away, "show", "t-1/0/0").err


KEYS = {"acknowledged", "trained", "dropped", "pending", "lost", "twice"}


def test_audit_clean(run: Run, place: Place) -> None:
    base = ("-c", str(place.config))
    run(*base, "topics", "apply", "-y")
    write(place, *(make_trajectory(n) for n in range(4)))
    nothing = run(*base, "audit", "--json")
    assert (nothing.status, nothing.json()["pending"]) == (0, 4)
    settle(place, trained=[0, 1], stale=[2], low=3)
    told = run(*base, "audit", "--json")
    assert told.status == 0
    assert told.json().keys() >= KEYS
    assert {key: told.json()[key] for key in KEYS} == {
        "acknowledged": 4,
        "trained": 2,
        "dropped": {"stale": 1},
        "pending": 1,
        "lost": 0,
        "twice": 0,
    }
    text = run(*base, "audit").out
    assert [line.split() for line in text.splitlines()][:3] == [
        ["policy", "1"],
        ["acknowledged", "4"],
        ["trained", "2"],
    ]
    (listed,) = run(*base, "checkpoints", "--json").json()
    assert listed == {
        "version": 1,
        "parent": None,
        "step": 1,
        "incarnation": "one",
        "published_ms": listed["published_ms"],
        "bytes": 3,
        "resumable": True,
        "latest": True,
    }
    assert "<- latest" in run(*base, "checkpoints").out
    unknown = run(*base, "audit", "--version", "7")
    assert (unknown.status, "no checkpoint of policy 7" in unknown.err) == (2, True)


@pytest.mark.parametrize(("trained", "low", "lost", "twice"), [([0], 2, 1, 0), ([0, 0], 1, 0, 1)])
def test_audit_finds(run: Run, place: Place, trained: list[int], low: int, lost: int, twice: int) -> None:
    """A settled offset without a receipt is lost; one that is trained twice is told: exit status 1."""
    base = ("-c", str(place.config))
    run(*base, "topics", "apply", "-y")
    write(place, make_trajectory(0), make_trajectory(1))
    if twice:
        # The same trajectory again, at another offset.
        write(place, make_trajectory(0))
        settle(place, trained=[0, 2], stale=[], low=1)
    else:
        settle(place, trained=trained, stale=[], low=low)
    told = run(*base, "audit", "--json")
    assert (told.status, told.json()["lost"], told.json()["twice"]) == (1, lost, twice)
    assert "guess[0]@" in run(*base, "audit").out


def test_checkpoints_of_a_new_run(run: Run, place: Place) -> None:
    assert run("-c", str(place.config), "checkpoints", "--json").json() == []
    assert "no checkpoint yet" in run("-c", str(place.config), "checkpoints").out
    told = run("-c", str(place.config), "evaluate")
    assert (told.status, "no checkpoint yet" in told.err) == (2, True)


def test_collect(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest stay and the one with the state; it asks, and deletes nothing without a yes."""
    store = MemoryStore()
    monkeypatch.setattr(Context, "checkpoints", Checkpoints(store, "default"))
    Checkpoints(store, "default").claim("one")
    for version in (1, 2, 3, 4):
        files = {"weights/x": b"w" * version} | ({"trainer/learner.pt": b"state"} if version == 2 else {})
        Checkpoints(store, "default").publish(
            version, files, parent=version - 1 or None, incarnation="one", step=version
        )
    store.begin("default/objects/abandoned")
    before = store.list()
    collect = ("checkpoints", "collect", "--keep", "1", "--json")

    def refuse(*_: object, **__: object) -> bool:
        return False

    monkeypatch.setattr("typer.confirm", refuse)
    assert run(*collect, "--grace", "0").status == 1
    assert run("checkpoints", "collect", "--keep", "0", "--yes").status == 2
    assert run(*collect, "--yes").json() == {"objects": 0, "bytes": 0, "uploads": 0}, "all are young"
    assert store.list() == before
    assert run(*collect, "--grace", "0", "--yes").json() == {"objects": 2, "bytes": 4, "uploads": 1}
    assert [c["version"] for c in run("checkpoints", "--json").json()] == [1, 2, 3, 4]
    assert "deleted 0 objects, 0.0 MB" in run(*collect[:-1], "--grace", "0", "-y").out


def test_module_runs() -> None:
    """`python -m rollstream.app.main` is the same command, and says one line without a broker."""
    command = [sys.executable, "-m", "rollstream.app.main", "-s", f"kafka.bootstrap={NOBODY}", "tail"]
    environment = {name: value for name, value in os.environ.items() if name != "ROLLSTREAM_CONFIG"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
