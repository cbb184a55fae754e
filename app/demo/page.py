"""The page of the demo's report: one HTML file with its style inside; beside it lies `curves.png`."""

import html
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...schemas import Trajectory, Turn
from ..trajectories import policy_range, sampled_parts

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2330; background: #f6f7f9; margin: 0 auto; max-width: 66rem;
  padding: 2rem }
h1 { font-size: 1.6rem; margin: 0 }
h2 { font-size: 1.1rem; margin: 2rem 0 .6rem }
.lead { color: #5a6475; margin: .2rem 0 1.4rem }
.cards { display: grid; grid-template-columns: repeat(4, 1fr); gap: .8rem }
.card, .box, details, img { background: #fff; border: 1px solid #e1e5eb; border-radius: 8px }
.card { padding: .7rem 1rem }
.card b { display: block; font-size: 1.25rem }
.card span { color: #5a6475; font-size: .82rem }
.good b, .win { color: #147a4b }
.bad b, .loss { color: #b3261e }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: .8rem; align-items: start }
.box { padding: .4rem 1rem }
img { width: 100%; box-sizing: border-box; padding: .6rem }
table { border-collapse: collapse; width: 100% }
td, th { padding: .3rem 0; text-align: right; border-top: 1px solid #eef0f3; font-variant-numeric: tabular-nums }
tr:first-child > * { border-top: 0 }
th { color: #5a6475; font-weight: 500; font-size: .82rem }
th:first-child, td:first-child { text-align: left }
td.bar { width: 50%; padding-left: 1rem }
td.bar div { background: #8256b5; height: .7rem; border-radius: 2px; min-width: 1px }
details { margin: .5rem 0; padding: .5rem 1rem }
summary { cursor: pointer }
details pre { overflow-x: auto; font-size: .82rem }
.turn { display: grid; grid-template-columns: 7rem 1fr auto; gap: .8rem; padding: .25rem 0;
  border-top: 1px solid #eef0f3 }
.turn:first-of-type { margin-top: .5rem }
.turn pre { margin: 0; white-space: pre-wrap; font-size: .9rem }
.turn.sampled pre { font-weight: 700 }
.turn div { color: #5a6475; font-size: .82rem; padding-top: .1rem }
"""


def write_page(summary: Mapping[str, Any], trajectories: Sequence[Trajectory], path: Path) -> Path:
    """Write the page; returns its path. Whatever an environment or a model said is escaped."""
    path.write_text(_page(summary, trajectories), encoding="utf-8")
    return path


def _page(summary: Mapping[str, Any], trajectories: Sequence[Trajectory]) -> str:
    shown = "".join(_trajectory(t, opened=number == 0) for number, t in enumerate(trajectories))
    lead = f"Rollouts through {summary['broker']}, sampled by {summary['engine']}, into gradients and back as weights."
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>rollstream demo</title><style>{STYLE}</style></head><body>
<h1>rollstream demo</h1>
<p class="lead">{_text(lead)}</p>
<div class="cards">{_cards(summary)}</div>
<div class="pair"><div><h2>Reward on held-out tasks, {summary["evaluation_episodes"]} each</h2>{_rewards(summary)}</div>
<div><h2>Staleness of trained samples, in policy versions</h2>{_staleness(summary)}</div></div>
<h2>Online steps</h2><img src="curves.png" alt="reward, staleness and seconds over the steps">
<h2>Trajectories, turn by turn: of the first online steps, then of the last</h2>{shown}
<h2>Everything measured</h2>
<details><summary>summary.json</summary><pre>{_text(json.dumps(summary, indent=2))}</pre></details>
</body></html>
"""


def _cards(summary: Mapping[str, Any]) -> str:
    audit = summary["audit"]
    rows = [
        ("mean reward before", f"{summary['reward_before']:.3f}", ""),
        (
            "mean reward after",
            f"{summary['reward_after']:.3f}",
            _judge(summary["reward_before"], summary["reward_after"]),
        ),
        ("lost / trained twice", f"{audit['lost']} / {audit['twice']}", _judge(audit["lost"] + audit["twice"], 0)),
        ("of its time the trainer waits", f"{summary['trainer_idle_share']:.0%}", ""),
        ("trajectories", f"{summary['trajectories']:,}", ""),
        ("tokens", f"{summary['tokens']:,}", ""),
        ("online steps", f"{summary['steps']:,}", ""),
        ("altogether", f"{summary['seconds']:.0f} s", ""),
    ]
    return "".join(
        f'<div class="card {kind}"><b>{_text(value)}</b><span>{name}</span></div>' for name, value, kind in rows
    )


def _judge(before: float, after: float) -> str:
    return "good" if after >= before else "bad"


def _rewards(summary: Mapping[str, Any]) -> str:
    rows = [
        (_text(name), f"{r['before']:.3f}", f"{r['after']:.3f}", f"{r['after'] - r['before']:+.3f}")
        for name, r in summary["environments"].items()
    ]
    return _table((("environment", "before", "after", "gain"), *rows))


def _staleness(summary: Mapping[str, Any]) -> str:
    counts = summary["staleness"]
    most = max(counts.values(), default=1) or 1
    rows = "".join(
        f"<tr><td>{_text(value)}</td><td>{count:,}</td>"
        f'<td class="bar"><div style="width:{count / most:.1%}"></div></td></tr>'
        for value, count in counts.items()
    )
    return f'<div class="box"><table><tr><th>versions</th><th>samples</th><th></th></tr>{rows}</table></div>'


def _table(rows: Iterable[Sequence[str]]) -> str:
    head, *body = rows
    lines = [f"<tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>"]
    lines += [f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in body]
    return f'<div class="box"><table>{"".join(lines)}</table></div>'


def _trajectory(trajectory: Trajectory, *, opened: bool) -> str:
    policy = policy_range(trajectory)
    kind = "win" if trajectory.reward >= 1 else "loss"
    facts = (
        f"seed {trajectory.seed}, {f'policy {policy}' if policy else 'scripted'}, {trajectory.tokens.size} tokens, "
        f"{trajectory.status.lower()}"
    )
    return (
        f"<details{' open' if opened else ''}><summary><b>{_text(trajectory.environment)}</b> "
        f'<span class="{kind}">reward {trajectory.reward:g}</span>, {_text(facts)}</summary>'
        f"{''.join(_turns(trajectory))}</details>"
    )


def _turns(trajectory: Trajectory) -> Iterator[str]:
    for turn, part in sampled_parts(trajectory):
        logprobs = trajectory.logprobs[part]
        yield _turn(turn, f"log p {float(logprobs.sum()):.2f}" if logprobs.size else "")


def _turn(turn: Turn, note: str) -> str:
    kind = "turn sampled" if turn.sampled else "turn"
    who = turn.role.lower().replace("_", " ")
    return f'<div class="{kind}"><div>{_text(who)}</div><pre>{_text(turn.text or "")}</pre><div>{note}</div></div>'


def _text(text: object) -> str:
    return html.escape(str(text))
