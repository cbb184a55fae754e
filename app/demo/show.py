"""The demo, from an empty folder to a report.

    topics -> model -> scripted players -> warm start (a replay) -> evaluate
           -> dispatcher + workers + trainer, live -> evaluate -> audit, report

Everything between the processes goes through the log and the store; which phases are done is written down in
`demo.json`, so that a demo that was interrupted anywhere goes on with `--resume`.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...infra.config import Config
from ...infra.stack import Endpoints, LocalStack
from ..context import Context
from ..crew import Crew
from ..monitor import RunMonitor
from ..topics import apply_topics
from .models import make_model
from .plan import overrides, write_config
from .report import Report, write_report
from .state import State
from .summary import pick_trajectories, read_receipts, summarize
from .view import View

LOOK = 0.25
"""Seconds between two looks at the run."""
SAVE_EVERY = 2.0


def run_demo(state: State, report: Path, view: View, crew: Crew | None = None) -> Mapping[str, Any]:
    """Start the stack and do what is not done yet; returns the summary.

    Every process it started is ended, however it ends. Raises `RollstreamError`.
    """
    crew = Crew(state.folder / "logs", threads=state.plan.threads) if crew is None else crew
    stack = LocalStack(state.folder, broker=state.broker)
    view.phase(f"local stack: {state.broker} and an object store on loopback, data in {state.folder}")
    try:
        return Demo(state, stack.start(view.note), crew, view).run(report)
    finally:
        crew.stop()
        stack.stop()


class Demo:
    """One demo in one folder, over a stack that runs."""

    def __init__(self, state: State, endpoints: Endpoints, crew: Crew, view: View) -> None:
        self._state, self._plan, self._crew, self._view = state, state.plan, crew, view
        self._config = write_config(state.plan, endpoints, state.folder)
        self._here = Context(Config.load(self._config, environ={}))
        self._earlier = (state.seconds, state.restarts)

    def run(self, report: Path) -> Mapping[str, Any]:
        """Do what is not done yet; returns the summary. Raises `RollstreamError`."""
        once = self._state.once
        try:
            apply_topics(self._here)
            once("model", lambda: str(make_model(self._plan, self._state.folder / "model")))
            once("scripted", self._play)
            first = int(once("warm", self._clone))
            before = once("before", lambda: self._evaluate("before"))
            once("online", lambda: self._learn(first))
            after = once("after", lambda: self._evaluate("after"))
            return self._finish(first, before, after, report)
        finally:
            self._save()
            self._here.close()

    def _save(self) -> None:
        self._state.seconds = self._earlier[0] + self._view.seconds
        self._state.restarts = self._earlier[1] + self._crew.restarts
        self._state.save()

    def _start(self, name: str, *arguments: str) -> None:
        self._crew.start(name, "-c", str(self._config), *arguments)

    def _check(self) -> None:
        for death in self._crew.check():
            self._view.note(str(death))

    def _await(self, *names: str) -> None:
        """Wait until these have ended by themselves."""
        while not all(self._crew.done(name) for name in names):
            self._check()
            time.sleep(0.1)

    def _play(self) -> None:
        total = sum(self._plan.scripted.values())
        self._view.phase(f"scripted players of mixed skill play {total:,} episodes onto the log")
        for game, episodes in self._plan.scripted.items():
            self._start(f"play-{game}", "demo-play", game, "--episodes", str(episodes))
        self._await(*(f"play-{game}" for game in self._plan.scripted))

    def _clone(self) -> int:
        """Returns the step that the online phase begins after."""
        self._view.phase("warm start: a fresh model replays them from the log")
        self._start("warm", *overrides("trainer", self._plan.clone), "train", "--until-end")
        self._await("warm")
        manifest = self._here.checkpoints.latest()
        return manifest.step if manifest else 0

    def _evaluate(self, when: str) -> dict[str, float]:
        """Held-out reward of the latest policy, measured by a process of its own."""
        self._view.phase(f"evaluation {when}: {self._plan.evaluation} held-out episodes of each game")
        found = self._state.folder / f"evaluation-{when}.json"
        split = [
            a for game in self._plan.scripted for a in overrides(f"environments.{game}.options", {"split": "eval"})
        ]
        episodes = ("--episodes", str(self._plan.evaluation), "--first-seed", "0")
        self._start(f"evaluation-{when}", *split, "evaluate", *episodes, "--output", str(found))
        self._await(f"evaluation-{when}")
        rewards: dict[str, float] = json.loads(found.read_text())["reward"]
        self._view.note("reward " + "  ".join(f"{game} {reward:.3f}" for game, reward in rewards.items()))
        return rewards

    def _learn(self, first: int) -> None:
        workers = f"{self._plan.workers} worker{'s' if self._plan.workers > 1 else ''}"
        self._view.phase(f"online: {workers} and a trainer, through {self._state.broker} and S3")
        limit = overrides("trainer", {"steps": first + self._plan.steps}) if self._plan.steps else []
        games = tuple(self._plan.scripted)
        monitor = RunMonitor(self._here.log, self._here.names, self._here.run, games, from_step=first + 1)
        self._start("dispatcher", "dispatch")
        for number in range(self._plan.workers):
            self._start(f"worker-{number}", "work")
        self._start("trainer", *limit, "train")
        try:
            self._watch(monitor)
        finally:
            monitor.close()
            self._crew.stop()

    def _watch(self, monitor: RunMonitor) -> None:
        """Show the run until its time is up or its trainer is done."""
        state, limit = self._state, self._plan.seconds
        last = saved = time.monotonic()
        started = False
        with self._view.live("online") as live:
            while not self._crew.done("trainer") and state.online_seconds < limit:
                self._check()
                # The clock begins with the first step of this life: starting Python and torch is not learning.
                started |= bool(monitor.poll(LOOK))
                now = time.monotonic()
                state.online_seconds += (now - last) * started
                last = now
                note = f"{state.online_seconds:.0f} of {limit:.0f} s" if started else "starting"
                live.show(monitor.snapshot(), note=note)
                if now - saved > SAVE_EVERY:
                    saved = now
                    self._save()

    def _finish(
        self, first: int, before: Mapping[str, float], after: Mapping[str, float], report: Path
    ) -> Mapping[str, Any]:
        self._view.phase("audit: what became of every acknowledged trajectory")
        receipts = read_receipts(self._here)
        summary = summarize(self._here, receipts, first, before, after)
        self._save()
        summary |= {
            "seconds": round(self._state.seconds, 1),
            "broker": self._state.broker,
            "engine": self._plan.engine,
            "model": self._plan.model,
            "seed": self._plan.seed,
            "evaluation_episodes": self._plan.evaluation,
            "restarts": self._state.restarts,
        }
        online = [r for r in receipts if r.step > first]
        shown = pick_trajectories(self._here, online)
        write_report(Report(summary=summary, receipts=online, trajectories=shown), report)
        return summary
