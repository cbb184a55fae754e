"""The demo on the real stack, small: it ends with a whole report, whoever is killed, and leaves nobody behind.

What a test starts is found again by the demo's folder, which every process of a demo has in its command line or as its
working directory.
"""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rollstream.app.crew import Crew, Death
from rollstream.app.demo.plan import Plan
from rollstream.app.demo.show import run_demo
from rollstream.app.demo.state import State, begin_demo, resume_demo
from rollstream.app.demo.view import LiveRun, View
from rollstream.app.monitor import Snapshot
from rollstream.infra.stack import LocalStack, StackError, find_obstacle
from rollstream.schemas.errors import RollstreamError

KEYS = {
    "reward_before",
    "reward_after",
    "trajectories",
    "tokens",
    "steps",
    "seconds",
    "environments",
    "staleness",
    "trainer_idle_share",
    "broker",
    "engine",
    "audit",
}
EXTRAS = {"model", "seed", "evaluation_episodes", "restarts"}
STEPS = 6

SMALL = Plan(
    scripted={"number": 150, "lake": 150},
    clone={"objective": "clone", "groups_per_step": 100, "minibatches": 4, "lr": 4e-3},
    online={"objective": "grpo", "groups_per_step": 4, "max_staleness": 2, "lr": 2e-4},
    group_size=4,
    concurrency=16,
    evaluation=10,
    steps=STEPS,
    seconds=300.0,
)

PROGRAM = """
import sys
from pathlib import Path
from rich.console import Console
from rollstream.app.demo.plan import Plan
from rollstream.app.demo.show import run_demo
from rollstream.app.demo.state import State
from rollstream.app.demo.view import View
state = State.load(Path(sys.argv[1]))
try:
    run_demo(state, Path(sys.argv[2]), View(Console()))
except KeyboardInterrupt:
    sys.exit(130)
"""

pytestmark = pytest.mark.skipif(bool(find_obstacle("tansu")), reason=find_obstacle("tansu") or "")


class Assassin(View):
    """Kills -9 a worker after the first online step, and the trainer after the second."""

    def __init__(self, console: Console, crew: Crew) -> None:
        super().__init__(console)
        self.victims = ["trainer", "worker-0"]
        self.crew = crew
        self.noted: list[str] = []

    def note(self, text: str) -> None:
        self.noted.append(text)
        super().note(text)

    def live(self, title: str) -> LiveRun:
        return Knife(Console(file=io.StringIO()), title, self)


class Knife(LiveRun):
    def __init__(self, console: Console, title: str, assassin: Assassin) -> None:
        super().__init__(console, title)
        self.assassin, self.last = assassin, 0

    def show(self, snapshot: Snapshot, *, note: str = "") -> None:
        super().show(snapshot, note=note)
        if snapshot.step > self.last and self.assassin.victims:
            self.last = snapshot.step
            os.kill(self.assassin.crew.pid(self.assassin.victims.pop()), signal.SIGKILL)


class Finished:
    """A demo that went to its end although two of its processes were killed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.report = folder / "demo", folder / "report"
        self.crew = Crew(self.folder / "logs")
        self.said = io.StringIO()
        self.view = Assassin(Console(file=self.said, width=100), self.crew)
        self.summary: Mapping[str, Any] = run_demo(
            begin_demo(self.folder, SMALL, "tansu"), self.report, self.view, self.crew
        )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return Finished(tmp_path_factory.mktemp("finished"))


def find_processes(folder: Path) -> dict[int, str]:
    """Processes that work in this folder or were told of it."""
    found: dict[int, str] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            place = f"{command} {(process / 'cwd').readlink()}"
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if str(folder) in place and command:
            found[int(process.name)] = command
    return found


def wait_until(what: str, true: Callable[[], bool], patience: float = 120.0) -> None:
    """Looks at what other processes did, which no event tells of."""
    deadline = time.monotonic() + patience
    while not true():
        assert time.monotonic() < deadline, f"not in {patience:.0f} s: {what}"
        threading.Event().wait(0.05)


# ------------------------------------------------------------------ to the end


def test_summary(finished: Finished) -> None:
    summary = json.loads((finished.report / "summary.json").read_text())
    assert summary == finished.summary
    assert summary.keys() == KEYS | EXTRAS
    assert summary["environments"].keys() == {"number", "lake"}
    rewards = [summary["environments"][game] for game in ("number", "lake")]
    assert all(reward.keys() == {"before", "after"} for reward in rewards)
    assert summary["reward_before"] == pytest.approx(sum(r["before"] for r in rewards) / 2)
    assert summary["reward_after"] == pytest.approx(sum(r["after"] for r in rewards) / 2)
    assert (summary["steps"], summary["broker"], summary["engine"]) == (STEPS, "tansu", "transformers")
    assert 0 <= summary["trainer_idle_share"] <= 1
    assert all(int(value) <= 2 and count > 0 for value, count in summary["staleness"].items())
    assert summary["tokens"] > 300


def test_audit_after_kills(finished: Finished) -> None:
    """A worker and the trainer were killed: both came back, nothing was lost, nothing was trained twice."""
    audit = finished.summary["audit"]
    assert finished.view.victims == []
    assert finished.summary["restarts"] >= 2
    assert (audit["lost"], audit["twice"], audit["problems"]) == (0, 0, [])
    assert audit["trained"] + sum(audit["dropped"].values()) + audit["pending"] == audit["acknowledged"]
    assert finished.summary["trajectories"] == audit["acknowledged"] >= 300
    deaths = [text for text in finished.view.noted if "died" in text]
    assert any(text.startswith("worker-0 died (killed by signal 9)") for text in deaths)
    assert any(text.startswith("trainer died (killed by signal 9)") for text in deaths)


def test_report_folder(finished: Finished) -> None:
    assert {file.name for file in finished.report.iterdir()} == {"curves.png", "index.html", "summary.json"}
    assert (finished.report / "curves.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    page = (finished.report / "index.html").read_text("utf-8")
    assert re.findall(r"https?:|//[a-z]|@import|url\(", page) == []
    assert re.findall(r'src="([^"]*)"', page) == ["curves.png"]
    assert "<script" not in page


def test_nobody_stays(finished: Finished) -> None:
    assert find_processes(finished.folder) == {}


def test_resume_when_done(finished: Finished) -> None:
    """A demo that ended only writes its report again."""
    state = resume_demo(finished.folder)
    assert state.plan == SMALL
    assert state.done.keys() == {"model", "scripted", "warm", "before", "online", "after"}
    again = run_demo(state, finished.folder / "again", View(Console(file=io.StringIO())))
    assert again["audit"] == finished.summary["audit"]
    assert again["reward_after"] == finished.summary["reward_after"]
    assert again["seconds"] > finished.summary["seconds"]


# ------------------------------------------------------------------ interrupted


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A demo's folder; whatever a failed test leaves running in it is ended."""
    place = tmp_path / "demo"
    yield place
    for pid in find_processes(place):
        os.kill(pid, signal.SIGKILL)


def launch(*command: str) -> "subprocess.Popen[str]":
    # A session of its own: a signal to it must not reach the tests.
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def launch_demo(folder: Path, *options: str) -> "subprocess.Popen[str]":
    command = (sys.executable, "-m", "rollstream.app.main", "demo", "--dir", str(folder), *options)
    return launch(*command, "--report", str(folder.parent / "report"))


def test_interrupted_by_hand(folder: Path) -> None:
    """Ctrl-C ends every process, and says how to go on; meanwhile the folder is nobody else's."""
    demo = launch_demo(folder)
    wait_until("scripted players at work", (folder / "logs" / "play-lake.log").exists)
    with pytest.raises(RollstreamError, match="a stack runs in"):
        begin_demo(folder, SMALL, "tansu")
    with pytest.raises(RollstreamError, match="a stack runs in"):
        resume_demo(folder)
    started = find_processes(folder)
    assert len(started) >= 6
    demo.send_signal(signal.SIGINT)
    said, _ = demo.communicate(timeout=90)
    assert demo.returncode == 130
    assert f"rollstream demo --resume --dir {folder}" in said
    assert "Traceback" not in said
    assert find_processes(folder) == {}
    state = resume_demo(folder)
    assert state.done.keys() == {"model"}
    assert state.seconds > 0


def test_killed(folder: Path) -> None:
    """SIGKILL gives the demo no chance to end anybody; its guards do."""
    demo = launch_demo(folder)
    wait_until("scripted players at work", (folder / "logs" / "play-lake.log").exists)
    assert len(find_processes(folder)) >= 6
    demo.kill()
    demo.communicate(timeout=30)
    wait_until("everybody gone", lambda: find_processes(folder) == {}, patience=60)
    resume_demo(folder)


@pytest.mark.slow
def test_interrupted_online_and_resumed(folder: Path) -> None:
    """Ctrl-C while it learns; a second start goes on from the last checkpoint, and the audit finds nothing."""
    state = begin_demo(folder, SMALL, "tansu")
    demo = launch(sys.executable, "-c", PROGRAM, str(folder), str(folder.parent / "report"))
    trainer = folder / "logs" / "trainer.log"
    wait_until("first online step", lambda: trainer.exists() and "step" in trainer.read_text(), patience=400)
    demo.send_signal(signal.SIGINT)
    demo.communicate(timeout=90)
    assert demo.returncode == 130
    assert find_processes(folder) == {}
    before = state.load(folder)
    assert before.done.keys() == {"model", "scripted", "warm", "before"}
    summary = run_demo(resume_demo(folder), folder.parent / "report", View(Console(file=io.StringIO())))
    assert (summary["steps"], summary["audit"]["lost"], summary["audit"]["twice"]) == (STEPS, 0, 0)
    assert summary["environments"]["number"]["before"] == before.done["before"]["number"]
    assert summary["seconds"] > before.seconds
    assert find_processes(folder) == {}


# ------------------------------------------------------------------ folders


def test_foreign_folder(tmp_path: Path) -> None:
    """Somebody else's files are never removed."""
    (tmp_path / "thesis.tex").write_text("all my work")
    with pytest.raises(RollstreamError, match="holds files that are no demo's"):
        begin_demo(tmp_path, SMALL, "tansu")
    assert (tmp_path / "thesis.tex").read_text() == "all my work"


def test_folder_emptied(tmp_path: Path) -> None:
    """A new demo does not go on with what an older one left."""
    begin_demo(tmp_path / "demo", SMALL, "tansu")
    (tmp_path / "demo" / "old").mkdir()
    state = begin_demo(tmp_path / "demo", SMALL, "kafka")
    assert [file.name for file in state.folder.iterdir()] == ["demo.json"]


def test_state_round_trip(tmp_path: Path) -> None:
    state = begin_demo(tmp_path / "demo", SMALL, "tansu")
    assert state.once("before", lambda: {"number": 0.5}) == {"number": 0.5}
    state.online_seconds = 7.5
    state.save()
    again = State.load(tmp_path / "demo")
    assert again == state
    assert again.once("before", lambda: pytest.fail("done already")) == {"number": 0.5}
    with pytest.raises(RollstreamError, match="nothing to resume"):
        State.load(tmp_path)


# ------------------------------------------------------------------ the crew


def settle(crew: Crew, name: str) -> list[Death]:
    """Look after the crew until this one is done; returns the deaths on the way."""
    deaths: list[Death] = []

    def done() -> bool:
        deaths.extend(crew.check())
        return crew.done(name)

    wait_until(f"{name} done", done)
    return deaths


def test_crew_done(tmp_path: Path) -> None:
    crew = Crew(tmp_path)
    crew.start("version", "--version")
    assert settle(crew, "version") == []
    assert crew.restarts == 0
    assert "rollstream 0." in (tmp_path / "version.log").read_text()


def test_crew_gives_up(tmp_path: Path) -> None:
    """What fails at every start is started again with longer pauses, and then given up with its own words."""
    crew = Crew(tmp_path, most_failures=2)
    crew.start("mistaken", "-c", str(tmp_path / "missing.toml"), "audit")
    with pytest.raises(StackError, match="mistaken died 3 times in a row; the end of") as error:
        settle(crew, "mistaken")
    assert "missing.toml" in str(error.value)
    assert crew.restarts == 2
    crew.stop()


def test_crew_tells_deaths(tmp_path: Path) -> None:
    crew = Crew(tmp_path)
    crew.start("mistaken", "-c", str(tmp_path / "missing.toml"), "audit")
    deaths: list[Death] = []

    def died() -> bool:
        deaths.extend(crew.check())
        return bool(deaths)

    wait_until("a death", died)
    crew.stop()
    assert (deaths[0].name, deaths[0].status) == ("mistaken", 2)
    assert "missing.toml" in deaths[0].last_words
    assert crew.done("mistaken")


def test_stack_of_a_demo_is_found(stack_tansu: LocalStack) -> None:
    """A folder in which any stack runs is refused, whoever started it."""
    with pytest.raises(RollstreamError, match="a stack runs in"):
        begin_demo(stack_tansu.directory, SMALL, "tansu")
