"""The demo's report: a folder with `summary.json`, `curves.png` and an `index.html` that needs no network.

rollstream demo ... --report demo-report
"""

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...schemas import Receipt, Trajectory

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2330; background: #f6f7f9; margin: 0 auto; max-width: 68rem; padding: 2rem }
h1 { font-size: 1.6rem; margin: 0 } h2 { font-size: 1.15rem; margin: 2rem 0 .6rem }
.lead { color: #5a6475; margin: .2rem 0 1.4rem }
.cards { display: flex; flex-wrap: wrap; gap: .8rem }
.card { background: #fff; border: 1px solid #e1e5eb; border-radius: 8px; padding: .7rem 1rem; min-width: 8.5rem }
.card b { display: block; font-size: 1.25rem } .card span { color: #5a6475; font-size: .82rem }
.good b { color: #147a4b } .bad b { color: #b3261e }
img { max-width: 100%; background: #fff; border: 1px solid #e1e5eb; border-radius: 8px }
details { background: #fff; border: 1px solid #e1e5eb; border-radius: 8px; margin: .5rem 0; padding: .5rem .9rem }
summary { cursor: pointer } .win { color: #147a4b } .loss { color: #b3261e }
.turn { display: flex; gap: .8rem; padding: .25rem 0; border-top: 1px solid #eef0f3 }
.turn .who { width: 6rem; color: #5a6475; font-size: .8rem; padding-top: .15rem } .turn pre { margin: 0; white-space: pre-wrap; flex: 1 }
.turn.sampled pre { font-weight: 600 } .turn .p { color: #5a6475; font-size: .8rem; white-space: nowrap }
table { border-collapse: collapse; background: #fff } td, th { border: 1px solid #e1e5eb; padding: .25rem .7rem; text-align: right }
th:first-child, td:first-child { text-align: left }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the report shows."""

    summary: Mapping[str, object]
    receipts: Sequence[Receipt]
    """The online steps on the lineage, oldest first."""
    trajectories: Sequence[Trajectory]
    """A few to show turn by turn."""


def write_report(report: Report, directory: Path) -> Path:
    """Write the folder; returns the page's path."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "summary.json").write_text(json.dumps(report.summary, indent=2) + "\n")
    draw_curves(report.receipts, directory / "curves.png")
    page = directory / "index.html"
    page.write_text(_page(report), encoding="utf-8")
    return page


def draw_curves(receipts: Sequence[Receipt], path: Path) -> None:
    """Reward by environment, staleness and time of each step, over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4), layout="constrained")
    reward, staleness, seconds = figure.subplots(1, 3)
    steps = [r.step for r in receipts]
    names = sorted({k for r in receipts for k in r.metrics if k.startswith("reward.")})
    for name in names:
        reward.plot(steps, _smooth([r.metrics.get(name) for r in receipts]), label=name.removeprefix("reward."))
    if names:
        reward.legend(frameon=False)
    reward.set(title="reward of the trained groups", xlabel="step", ylim=(0, 1.02))
    staleness.plot(steps, [r.metrics.get("staleness", 0.0) for r in receipts], color="tab:purple")
    staleness.set(title="mean staleness (versions)", xlabel="step")
    for key, label in (("seconds.idle", "waiting"), ("seconds.learn", "learning"), ("seconds.publish", "publishing")):
        seconds.plot(steps, [r.metrics.get(key, 0.0) for r in receipts], label=label)
    seconds.set(title="seconds of each step", xlabel="step")
    seconds.legend(frameon=False)
    for axes in (reward, staleness, seconds):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=130)


def _smooth(values: Sequence[float | None], keep: float = 0.8) -> list[float | None]:
    """Exponential moving average; a step without the value repeats the last one."""
    smooth: list[float | None] = []
    last: float | None = None
    for value in values:
        if value is not None:
            last = value if last is None else keep * last + (1 - keep) * value
        smooth.append(last)
    return smooth


def _page(report: Report) -> str:
    shown = "".join(_trajectory(t) for t in report.trajectories)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>rollstream demo</title><style>{STYLE}</style></head><body>
<h1>rollstream demo</h1>
<p class="lead">Rollouts through {html.escape(str(report.summary["broker"]))}, sampled by
{html.escape(str(report.summary["engine"]))}, into gradients and back as weights.</p>
<div class="cards">{_cards(report.summary)}</div>
<h2>Environments</h2>{_environments(report.summary)}
<h2>Curves</h2><img src="curves.png" alt="reward, staleness and seconds over the steps">
<h2>Trajectories, turn by turn</h2>{shown}
<h2>Summary</h2><details><summary>summary.json</summary><pre>{html.escape(json.dumps(report.summary, indent=2))}</pre></details>
</body></html>
"""


def _cards(summary: Mapping[str, object]) -> str:
    audit = summary["audit"]
    assert isinstance(audit, Mapping)
    clean = "good" if not audit["lost"] and not audit["twice"] else "bad"
    rows = [
        ("reward before", f"{summary['reward_before']:.3f}", ""),
        ("reward after", f"{summary['reward_after']:.3f}", "good"),
        ("trajectories", f"{summary['trajectories']:,}", ""),
        ("tokens", f"{summary['tokens']:,}", ""),
        ("steps", f"{summary['steps']:,}", ""),
        ("seconds", f"{summary['seconds']:.0f}", ""),
        ("trainer idle", f"{summary['trainer_idle_share']:.0%}", ""),
        ("lost / twice", f"{audit['lost']} / {audit['twice']}", clean),
    ]
    return "".join(f'<div class="card {kind}"><b>{value}</b><span>{name}</span></div>' for name, value, kind in rows)


def _environments(summary: Mapping[str, object]) -> str:
    environments = summary["environments"]
    assert isinstance(environments, Mapping)
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{r['before']:.3f}</td><td>{r['after']:.3f}</td></tr>"
        for name, r in environments.items()
    )
    return f"<table><tr><th>environment</th><th>before</th><th>after</th></tr>{rows}</table>"


def _trajectory(trajectory: Trajectory) -> str:
    versions = trajectory.version_range()
    policy = f"policy {versions[0]}" if versions else "scripted"
    kind = "win" if trajectory.reward >= 1 else "loss"
    turns: list[str] = []
    sampled = 0
    for turn in trajectory.turns:
        note = ""
        if turn.sampled and trajectory.logprobs.size:
            p = trajectory.logprobs[sampled : sampled + turn.tokens]
            note = f"log p {float(p.sum()):.2f}, {turn.tokens} tok"
        sampled += turn.tokens if turn.sampled else 0
        turns.append(
            f'<div class="turn{" sampled" if turn.sampled else ""}"><div class="who">{turn.role.lower()}</div>'
            f'<pre>{html.escape(turn.text or "")}</pre><div class="p">{note}</div></div>'
        )
    return (
        f"<details><summary><b>{html.escape(trajectory.environment)}</b> seed {trajectory.seed}, {policy}, "
        f'<span class="{kind}">reward {trajectory.reward:g}</span>, {trajectory.tokens.size} tokens, '
        f"{trajectory.status.lower()}</summary>{''.join(turns)}</details>"
    )
