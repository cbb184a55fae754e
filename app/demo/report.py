"""The demo's report: a folder with `summary.json`, `curves.png` and an `index.html` that needs no network.

rollstream demo --report demo-report
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...schemas import Receipt, Trajectory
from .page import write_page


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the report shows."""

    summary: dict[str, Any]
    receipts: Sequence[Receipt]
    """The online steps on the lineage, oldest first."""
    trajectories: Sequence[Trajectory]
    """A few to show turn by turn."""


def write_report(report: Report, directory: Path) -> Path:
    """Write the folder; returns the page's path."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "summary.json").write_text(json.dumps(report.summary, indent=2) + "\n")
    draw_curves(report.receipts, directory / "curves.png")
    return write_page(report.summary, report.trajectories, directory / "index.html")


def draw_curves(receipts: Sequence[Receipt], path: Path) -> None:
    """Reward by environment, staleness and time of each step, over the steps."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(11, 3.3), layout="constrained")
    reward, staleness, seconds = figure.subplots(1, 3)
    steps = [r.step for r in receipts]
    names = sorted({k for r in receipts for k in r.metrics if k.startswith("reward.")})
    for name in names:
        reward.plot(steps, smooth([r.metrics.get(name) for r in receipts]), label=name.removeprefix("reward."))
    reward.set(title="reward of trained groups (smoothed)", xlabel="step", ylim=(0, 1.02))
    staleness.plot(steps, [r.metrics.get("staleness", 0.0) for r in receipts], color="tab:purple")
    staleness.set(title="staleness (versions, mean)", xlabel="step", ylim=(0, None))
    for key, label in (("seconds.idle", "waiting"), ("seconds.learn", "learning"), ("seconds.publish", "publishing")):
        seconds.plot(steps, [r.metrics.get(key, 0.0) for r in receipts], label=label, linewidth=1)
    seconds.set(title="time of a step (s)", xlabel="step", ylim=(0, None))
    for axes in (reward, staleness, seconds):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.xaxis.get_major_locator().set_params(integer=True)
    for axes in (reward, seconds) if names else (seconds,):
        axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


def smooth(values: Sequence[float | None], keep: float = 0.8) -> list[float | None]:
    """Exponential moving average; a step without the value repeats the last one."""
    smoothed: list[float | None] = []
    last: float | None = None
    for value in values:
        if value is not None:
            last = value if last is None else keep * last + (1 - keep) * value
        smoothed.append(last)
    return smoothed
