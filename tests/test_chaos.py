"""The chaos bench: its judges find what is wrong, and runs under kill -9 are clean."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from havoc.games import find_moves, lake, pick_move
from havoc.journal import Journal, Play, Stored, lost_plays, played_again
from havoc.report import count_cost, judge_outcome
from havoc.witness import judge, read_lineage
from rollstream.app.crew import Crew
from rollstream.consumers.audit import Audit
from rollstream.infra.stack import find_obstacle
from rollstream.producers.environment import Action
from rollstream.schemas import Consumed, Receipt

CHAOS = Path(__file__).parents[1] / "bench" / "chaos.py"
NO_STACK = pytest.mark.skipif(bool(find_obstacle("tansu")), reason=find_obstacle("tansu") or "")


def wait_until(what: str, true: Callable[[], bool], patience: float = 120.0) -> None:
    """Looks at what other processes did, which no event tells of."""
    deadline = time.monotonic() + patience
    while not true():
        assert time.monotonic() < deadline, f"not in {patience:.0f} s: {what}"
        threading.Event().wait(0.05)


# ------------------------------------------------------------------ the witness


def receipt(version: int, trained: list[int], dropped: list[int] | None = None, incarnation: str = "a") -> Receipt:
    consumed = Consumed(
        topic="t",
        partition=0,
        trained=np.array(trained, np.int64),
        dropped={"stale": np.array(dropped, np.int64)} if dropped else {},
    )
    return Receipt(run="r", incarnation=incarnation, step=version, version=version, parent=0, consumed=(consumed,))


def manifest(version: int, low: int, *above: int, incarnation: str = "a", parent: int | None = None) -> dict[str, Any]:
    cursors = {"t": {"0": [low, *above]}}
    return {"version": version, "incarnation": incarnation, "parent": parent, "cursors": cursors}


def records(*names: str) -> list[Stored]:
    return [Stored(place=f"t[0]@{offset}", name=name, appended=float(offset)) for offset, name in enumerate(names)]


LINE = [manifest(2, 3, parent=1), manifest(1, 1)]


def test_witness_clean() -> None:
    verdict = judge(records("a", "b", "a", "c"), [receipt(1, [0]), receipt(2, [1], [2])], LINE)
    assert verdict.as_json() == {
        "acknowledged": 4,
        "trained": 2,
        "dropped": 1,
        "pending": 1,
        "doubles": 1,
        "lost": 0,
        "twice": 0,
        "lost_names": [],
        "twice_names": [],
    }


def test_witness_finds_the_lost() -> None:
    """Below the cursor or in a range above it, and in no receipt."""
    line = [manifest(2, 1, 2, 3), manifest(1, 0)]
    verdict = judge(records("a", "b", "c"), [receipt(1, [])], line)
    assert [text.split(":")[0] for text in verdict.lost] == ["t[0]@0 a", "t[0]@2 c"]
    assert (verdict.pending, verdict.trained) == (1, 0)


def test_witness_finds_what_is_twice() -> None:
    """A position in two receipts, and one id at two positions."""
    verdict = judge(records("a", "b", "a"), [receipt(1, [0, 1]), receipt(2, [1, 2])], LINE)
    assert sorted(verdict.twice) == ["a: trained 2 times", "t[0]@1: settled 2 times"]
    assert verdict.lost == []


def test_witness_ignores_dead_branches() -> None:
    """A receipt whose checkpoint was never published, and a receipt that was appended twice, count for nothing."""
    stray = receipt(2, [0, 1, 2], incarnation="dead")
    last = receipt(2, [1], [2])
    verdict = judge(records("a", "b", "c"), [receipt(1, [0]), stray, last, last], LINE)
    assert (verdict.trained, verdict.dropped, verdict.lost, verdict.twice) == (2, 1, [], [])


def test_witness_finds_what_the_log_does_not_have() -> None:
    """Acknowledged and gone, replaced, or never played."""
    told = {"t[0]@0": "a", "t[0]@1": "other", "t[0]@7": "gone"}
    verdict = judge(records("a", "b"), [], [], told=told, asked=["a", "b", "never"])
    assert [text.partition(":")[0] for text in verdict.lost] == ["t[0]@1 other", "t[0]@7 gone", "never"]
    assert verdict.pending == 2


def test_witness_reads_the_lineage_from_the_store() -> None:
    objects = {
        "r/latest.json": {"version": 5},
        "r/checkpoints/5/manifest.json": manifest(5, 0, parent=2),
        "r/checkpoints/4/manifest.json": manifest(4, 0, parent=2),
        "r/checkpoints/2/manifest.json": manifest(2, 0),
    }
    found = read_lineage(lambda key: json.dumps(objects[key]).encode(), "r")
    assert [m["version"] for m in found] == [5, 2]
    assert list(read_lineage(lambda key: b'{"version": 0}', "r")) == []


def test_disagreement_is_told() -> None:
    """What one of the two finds counts, whichever it is."""
    verdict = judge(records("a", "b"), [receipt(1, [0])], [manifest(1, 2)])
    careless = judge_outcome(Audit(acknowledged=2, trained=1, pending=1), verdict)
    assert (careless["agreed"], careless["lost"]) == (False, 1)
    same = judge_outcome(Audit(acknowledged=2, trained=1, lost=1), verdict)
    assert (same["agreed"], same["lost"]) == (True, 1)


# ------------------------------------------------------------------ the journal


class Logbook:
    """Writes a worker's log."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def say(self, moment: float, text: str) -> None:
        clock = datetime.fromtimestamp(moment).strftime("%Y-%m-%d %H:%M:%S,%f")[:-3]
        with self.path.open("a") as log:
            log.write(f"{clock} rollstream.producers.worker: {text}\n")


@pytest.fixture
def logbook(tmp_path: Path) -> Logbook:
    return Logbook(tmp_path / "worker-0.log")


def open_journal(logbook: Logbook) -> Journal:
    return Journal({"worker-0": logbook.path})


def test_journal_of_a_killed_worker(logbook: Logbook) -> None:
    """Two under way are lost with their seconds, one that was played too; the acknowledged one is not."""
    journal = open_journal(logbook)
    logbook.say(100.0, "sample r.lake.1/0/0 begins")
    logbook.say(101.0, "sample r.lake.1/1/0 begins")
    logbook.say(102.0, "sample r.lake.1/2/0 begins")
    logbook.say(104.0, "sample r.lake.1/0/0 is played")
    logbook.say(105.0, "sample r.lake.1/2/0 is played")
    logbook.say(106.0, "sample r.lake.1/0/0 is acknowledged at t[0]@0")
    assert journal.read() == set()
    journal.kill = 7
    journal.died("worker-0", 110.0, "killed")
    lost = {play.name: play for play in lost_plays(journal.plays, [])}
    assert {name: play.seconds for name, play in lost.items()} == {"r.lake.1/1/0": 9.0, "r.lake.1/2/0": 3.0}
    assert {play.kill for play in lost.values()} == {7}
    cost = count_cost(journal.plays, list(lost.values()), [])
    assert cost["generation_seconds_lost"] == 12.0
    assert cost["generation_seconds_lost_by_cause"] == {"killed": 12.0}
    assert cost["episodes_lost"] == {"under way": 1, "finished, unacknowledged": 1}


def test_record_of_a_killed_worker_is_not_lost(logbook: Logbook) -> None:
    """It reached the log before its worker heard of it, or from the disk later; a record of the re-run is not it."""
    journal = open_journal(logbook)
    logbook.say(100.0, "sample r.lake.1/0/0 begins")
    logbook.say(102.0, "sample r.lake.1/0/0 is played")
    journal.read()
    journal.died("worker-0", 103.0, "died")
    logbook.say(110.0, "sample r.lake.1/0/0 begins")
    logbook.say(112.0, "sample r.lake.1/0/0 is played")
    logbook.say(113.0, "sample r.lake.1/0/0 is acknowledged at t[0]@5")
    journal.read()
    again = Stored(place="t[0]@5", name="r.lake.1/0/0", appended=112.5)
    own = Stored(place="t[0]@4", name="r.lake.1/0/0", appended=102.5)
    assert [play.began for play in lost_plays(journal.plays, [again])] == [100.0]
    assert lost_plays(journal.plays, [again, own]) == []
    assert list(played_again(journal.plays)) == []


def test_task_that_went_to_another_worker(logbook: Logbook) -> None:
    journal = open_journal(logbook)
    logbook.say(100.0, "sample r.lake.1/0/0 begins")
    logbook.say(100.0, "sample r.lake.10/0/0 begins")
    logbook.say(103.0, "task r.lake.1 went to another worker")
    journal.read()
    (lost,) = lost_plays(journal.plays, [])
    assert (lost.name, lost.lost, lost.seconds, lost.cause) == ("r.lake.1/0/0", 103.0, 3.0, "moved")


def test_played_again() -> None:
    """Only what began after it had been acknowledged, and was played to its end."""
    first = Play(worker="worker-0", name="a", began=1.0, played=2.0, acknowledged=3.0, place="t[0]@0")
    beside = Play(worker="worker-1", name="a", began=2.5, played=4.0, acknowledged=5.0, place="t[0]@1")
    after = Play(worker="worker-1", name="a", began=6.0, played=8.0, acknowledged=9.0, place="t[0]@2")
    cut = Play(worker="worker-1", name="a", began=7.0, lost=7.5)
    assert list(played_again([cut, after, beside, first])) == [after]


def test_journal_tells_who_joins(logbook: Logbook) -> None:
    """Half a line waits for its other half; a log that was put aside is begun anew."""
    journal = open_journal(logbook)
    logbook.path.write_text("serving number, lake from")
    assert journal.read() == set()
    logbook.path.write_text("serving number, lake from policy 3\n")
    assert journal.read() == {"worker-0"}
    logbook.path.write_text("serving x\n")
    assert journal.read() == {"worker-0"}


# ------------------------------------------------------------------ the games


def test_every_word_is_a_move() -> None:
    moves = find_moves("<number> 3 48")
    assert (moves[0], moves[-1], len(moves)) == ("3", "48", 46)
    assert pick_move("17", moves) == "17"
    assert pick_move("lake", moves) == pick_move("lake", moves) in moves
    assert find_moves("<lake> r1c1 WFFW") == ("left", "down", "right", "up")


async def test_slow_game_has_many_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A word that is no move does not end it; each turn takes the time that is drawn."""
    slept: list[float] = []

    async def note(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", note)
    turns = [await count_turns(seed) for seed in range(10)]
    assert sum(turns) >= 20
    assert len(slept) == sum(turns)
    assert min(slept) > 0


async def count_turns(seed: int) -> int:
    game = lake("lake")
    outcome, turns = await game.reset({}, seed), 0
    while not (outcome.done or outcome.truncated):
        outcome, turns = await game.step(Action(text=f"word{turns}", tokens=np.zeros(1, np.int32))), turns + 1
    await game.close()
    return turns


# ------------------------------------------------------------------ the crew


def test_killed_is_no_failed_start(tmp_path: Path) -> None:
    """However often and young it is killed, it is started again; one failed start of its own is one too many here."""
    crew = Crew(tmp_path, most_failures=0)
    crew.start("server", "--help")
    for _ in range(3):
        crew.kill("server")
        assert not crew.alive("server")
        (death,) = crew.check()
        assert death.status == 137
        wait_until("it is started again", lambda: crew.check() == [] and crew.alive("server"))
    assert crew.restarts == 3
    wait_until("it ends by itself", lambda: crew.check() == [] and crew.done("server"))


# ------------------------------------------------------------------ runs


KEYS = {"kills", "acknowledged", "trained", "dropped", "pending", "lost", "twice", "generation_seconds_lost"}


RunChaos = Callable[..., dict[str, Any]]


@pytest.fixture
def run_chaos(pytestconfig: pytest.Config) -> RunChaos:
    """Runs the bench; its processes find their bytecode where the last run of the tests left it."""
    assert pytestconfig.cache is not None
    environment = os.environ | {"PYTHONPYCACHEPREFIX": str(pytestconfig.cache.mkdir("bytecode"))}

    def run(*options: str) -> dict[str, Any]:
        command = (sys.executable, str(CHAOS), "--json", *options)
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800, env=environment)
        assert done.returncode == 0, done.stderr[-6000:]
        report: dict[str, Any] = json.loads(done.stdout)
        return report

    return run


def check_report(report: dict[str, Any], kills: int) -> None:
    assert report.keys() >= KEYS
    assert report["kills"] == kills == len(report["each_kill"]) == sum(report["victims"].values())
    assert (report["lost"], report["twice"], report["agreed"], report["problems"]) == (0, 0, True, [])
    assert report["trained"] + sum(report["dropped"].values()) + report["pending"] == report["acknowledged"] > 0
    assert report["pending"] == 0
    assert report["steps"] > 0
    each = sum(kill["generation_seconds_lost"] for kill in report["each_kill"])
    each += report["generation_seconds_lost_before"]
    assert report["generation_seconds_lost"] == pytest.approx(each, abs=0.05 * (1 + kills))
    assert report["generation_seconds_lost"] <= report["generation_seconds"]


@NO_STACK
def test_few_kills(run_chaos: RunChaos) -> None:
    check_report(run_chaos("--kills", "3", "--seed", "15"), 3)


@pytest.mark.slow
@NO_STACK
def test_fifty_kills_embedded(run_chaos: RunChaos) -> None:
    report = run_chaos("--kills", "50", "--seed", "1")
    check_report(report, 50)
    assert set(report["victims"]) == {"trainer", "worker-0", "worker-1", "dispatcher", "broker-1", "store"}
    assert set(report["moments"]) == {"anytime", "publish", "rebalance", "restart"}


@pytest.mark.slow
@pytest.mark.skipif(bool(find_obstacle("kafka")), reason=find_obstacle("kafka") or "")
def test_fifty_kills_kafka(run_chaos: RunChaos) -> None:
    report = run_chaos("--kills", "50", "--seed", "2", "--broker", "kafka", "--brokers", "3")
    check_report(report, 50)
    assert {"broker-1", "broker-2", "broker-3"} <= set(report["victims"])


@pytest.mark.slow
@pytest.mark.skipif(bool(find_obstacle("kafka")), reason=find_obstacle("kafka") or "")
def test_trainer_kills_cost_no_generation(run_chaos: RunChaos) -> None:
    """Producers live alone: nothing is lost and nothing finished is played again for a trainer, a store, a
    dispatcher."""
    report = run_chaos("--kills", "8", "--seed", "5", "--broker", "kafka", "--victims", "trainer,store,dispatcher")
    check_report(report, 8)
    assert report["generation_seconds_lost"] == 0
    assert report["finished_again"]["episodes"] == 0
    assert report["witness"]["doubles"] == 0


@pytest.mark.slow
@NO_STACK
def test_killed_bench_leaves_nobody(tmp_path: Path) -> None:
    folder = tmp_path / "chaos"
    command = (sys.executable, str(CHAOS), "--kills", "1000", "--dir", str(folder))
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as bench:
        try:
            wait_until("the roles run", lambda: len(find_processes(folder)) > 6)
        finally:
            bench.send_signal(signal.SIGKILL)
    wait_until("everybody is gone", lambda: find_processes(folder) == [], 60.0)


def find_processes(folder: Path) -> list[int]:
    """Processes that were told of this folder, or work in it."""
    return [pid for pid, place in _places() if str(folder) in place]


def _places() -> Iterator[tuple[int, str]]:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            yield int(process.name), f"{command} {(process / 'cwd').readlink()}" if command else ""
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue


@pytest.mark.parametrize("options", [("--victims", "cat"), ("--broker", "mail")])
def test_mistakes_are_named(options: tuple[str, ...]) -> None:
    done = subprocess.run(
        (sys.executable, str(CHAOS), *options), capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 2
    assert options[1] in done.stderr
