"""The demo, from an empty folder to a report.

    topics -> model -> scripted players -> warm start (a replay) -> evaluate
           -> dispatcher + workers + trainer, live -> evaluate -> audit, report

Everything between the processes goes through the log and the store; which phases are done is written down in `demo.json`,
so that a demo that was interrupted anywhere goes on with `--resume`.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...infra.config import Config
from ...infra.stack import Endpoints
from ...schemas.errors import RollstreamError
from ..context import Context
from ..monitor import RunMonitor
from ..topics import apply_topics
from .crew import Crew, process_environment
from .models import make_model
from .plan import Plan, overrides, write_config
from .report import Report, write_report
from .summary import pick_trajectories, read_receipts, summarize
from .view import View

STATE = "demo.json"


class Demo:
    """One demo in one folder, over a stack that runs."""

    def __init__(self, plan: Plan, folder: Path, endpoints: Endpoints, crew: Crew, view: View) -> None:
        self._plan, self._folder, self._crew, self._view = plan, folder, crew, view
        self._broker = endpoints.broker
        self._config = write_config(plan, endpoints, folder)
        self._here = Context(Config.load(self._config, environ={}))
        self._state: dict[str, Any] = {"done": {}, "seconds": 0.0, "online_seconds": 0.0, "restarts": 0}
        if (folder / STATE).exists():
            self._state |= json.loads((folder / STATE).read_text())
        self._earlier = float(self._state["seconds"])

    def run(self, report: Path) -> Mapping[str, Any]:
        """Do what is not done yet; returns the summary. Raises `RollstreamError`."""
        try:
            apply_topics(self._here)
            self._once("model", lambda: str(make_model(self._plan, self._folder / "model")))
            self._once("scripted", self._play)
            self._once("warm", self._clone)
            before = self._once("before", lambda: self._evaluate("before"))
            self._once("online", self._learn)
            after = self._once("after", lambda: self._evaluate("after"))
            return self._finish(before, after, report)
        finally:
            self._here.close()

    def _once(self, phase: str, do: Callable[[], Any]) -> Any:
        if phase not in self._state["done"]:
            self._state["done"][phase] = do()
            self._save()
        return self._state["done"][phase]

    def _save(self) -> None:
        self._state["seconds"] = self._earlier + self._view.seconds
        fresh = self._folder / f"{STATE}.new"
        fresh.write_text(json.dumps(self._state, indent=2))
        fresh.replace(self._folder / STATE)

    def _play(self) -> None:
        total = sum(self._plan.scripted.values())
        self._view.phase(f"scripted players of mixed skill play {total:,} episodes onto the log")
        for game, episodes in self._plan.scripted.items():
            self._crew.start(f"play-{game}", "-c", str(self._config), "demo-play", game, "--episodes", str(episodes))
        self._await(*(f"play-{game}" for game in self._plan.scripted))

    def _clone(self) -> int:
        """Returns the step that the online phase begins after."""
        self._view.phase("warm start: a fresh model replays them from the log")
        self._crew.start(
            "warm", "-c", str(self._config), *overrides("trainer", self._plan.clone), "train", "--until-end"
        )
        self._await("warm")
        manifest = self._here.checkpoints.latest()
        return manifest.step if manifest else 0

    def _await(self, *names: str) -> None:
        """Wait until these have ended by themselves."""
        while not all(self._crew.done(name) for name in names):
            self._crew.check()
            time.sleep(0.1)

    def _evaluate(self, when: str) -> dict[str, float]:
        """Held-out reward of the latest policy, measured by a process of its own."""
        self._view.phase(f"evaluation {when}: {self._plan.evaluation} held-out episodes of each game")
        command = [sys.executable, "-m", "rollstream.app.main", "-c", str(self._config)]
        for game in self._plan.scripted:
            command += overrides(f"environments.{game}.options", {"split": "eval"})
        command += ["evaluate", "--episodes", str(self._plan.evaluation), "--first-seed", "0", "--json"]
        with (self._folder / f"evaluate-{when}.log").open("wb") as log:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, check=False, env=process_environment())
        if done.returncode != 0:
            raise RollstreamError(f"the evaluation failed, see {log.name}")
        rewards: dict[str, float] = json.loads(done.stdout)["reward"]
        self._view.phase("reward " + "  ".join(f"{game} {reward:.3f}" for game, reward in rewards.items()))
        return rewards

    def _learn(self) -> None:
        first = int(self._state["done"]["warm"])
        self._view.phase(f"online: {self._plan.workers} workers and a trainer, through {self._broker} and S3")
        base = ("-c", str(self._config))
        limit = overrides("trainer", {"steps": first + self._plan.steps}) if self._plan.steps else []
        self._crew.start("dispatcher", *base, "dispatch")
        for number in range(self._plan.workers):
            self._crew.start(f"worker-{number}", *base, "work")
        self._crew.start("trainer", *base, *limit, "train")
        games = tuple(self._plan.scripted)
        monitor = RunMonitor(self._here.log, self._here.names, self._here.run, games, from_step=first + 1)
        try:
            self._watch(monitor)
        finally:
            monitor.close()
            self._crew.stop()
            self._state["restarts"] += self._crew.restarts

    def _watch(self, monitor: RunMonitor) -> None:
        """Show the run until its time is up or its trainer is done."""
        last = saved = time.monotonic()
        started = self._state["online_seconds"] > 0
        with self._view.live("online") as live:
            while not self._crew.done("trainer") and self._state["online_seconds"] < self._plan.seconds:
                died = self._crew.check()
                # The clock begins with the first step: starting Python and torch is not learning.
                started |= bool(monitor.poll(0.25))
                now = time.monotonic()
                self._state["online_seconds"] += (now - last) * started
                last = now
                note = f"{self._state['online_seconds']:.0f} of {self._plan.seconds:.0f} s"
                live.show(monitor.snapshot(), note=f"{note}, {', '.join(died)} started again" if died else note)
                if now - saved > 2:
                    saved = now
                    self._save()

    def _finish(self, before: Mapping[str, float], after: Mapping[str, float], report: Path) -> Mapping[str, Any]:
        self._view.phase("audit: what became of every acknowledged trajectory")
        first = int(self._state["done"]["warm"])
        receipts = read_receipts(self._here)
        summary = summarize(self._here, receipts, first, before, after) | {
            "seconds": round(self._earlier + self._view.seconds, 1),
            "broker": self._broker,
            "engine": self._plan.engine,
            "model": self._plan.model,
            "seed": self._plan.seed,
            "evaluation_episodes": self._plan.evaluation,
            "restarts": self._state["restarts"],
        }
        online = [r for r in receipts if r.step > first]
        shown = pick_trajectories(self._here, online)
        write_report(Report(summary=summary, receipts=online, trajectories=shown), report)
        return summary
