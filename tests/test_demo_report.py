"""What the demo shows: the page of its report, its curves, its live view."""

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from rollstream.app.demo.command import summary_lines
from rollstream.app.demo.page import write_page
from rollstream.app.demo.report import draw_curves, smooth
from rollstream.app.demo.view import LiveRun, View, as_line, draw_bars
from rollstream.app.monitor import Snapshot
from rollstream.schemas import PolicySpan, Receipt, Role, Trajectory, Turn

SUMMARY: dict[str, Any] = {
    "reward_before": 0.2,
    "reward_after": 0.9,
    "environments": {"number": {"before": 0.3, "after": 0.95}, "<b>lake": {"before": 0.1, "after": 0.85}},
    "trajectories": 51234,
    "tokens": 1234567,
    "steps": 120,
    "seconds": 200.4,
    "staleness": {"0": 10, "1": 30, "2": 20},
    "trainer_idle_share": 0.26,
    "broker": "tansu",
    "engine": "transformers",
    "audit": {
        "acknowledged": 51234,
        "trained": 50000,
        "dropped": {"zero-variance": 1000},
        "pending": 234,
        "lost": 0,
        "twice": 0,
    },
    "evaluation_episodes": 200,
    "restarts": 1,
}
HOSTILE = '<script>alert("x")</script>'
SNAPSHOT = Snapshot(
    step=12, version=19, reward={"number": 0.5, "lake": 1.0}, trajectories_per_s=812.4, tokens_per_s=9001.0, idle=0.25
)


def hostile_trajectory() -> Trajectory:
    return Trajectory(
        trajectory_id="t/0/0",
        group_id="t",
        group_size=1,
        sample_index=0,
        environment="lake",
        tokens=np.array([1, 2, 3], np.int32),
        logprobs=np.array([-0.25, -0.5], np.float32),
        spans=(PolicySpan(version=3, count=2),),
        turns=(
            Turn(role=Role.USER, tokens=1, sampled=False, text="who & where?"),
            Turn(role=Role.ASSISTANT, tokens=2, sampled=True, text=HOSTILE),
        ),
        reward=1.0,
    )


def test_page_escapes(tmp_path: Path) -> None:
    """Whatever was said in an episode is text: no tag of its own comes to life."""
    page = write_page(SUMMARY, [hostile_trajectory()], tmp_path / "index.html").read_text("utf-8")
    assert "<script" not in page
    assert "&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt;" in page
    assert "who &amp; where?" in page
    assert "<b>lake" not in page.replace("<b>lake</b>", "")
    assert "&lt;b&gt;lake" in page


def test_page_numbers(tmp_path: Path) -> None:
    page = write_page(SUMMARY, [hostile_trajectory()], tmp_path / "index.html").read_text("utf-8")
    for shown in ("0.200", "0.900", "51,234", "1,234,567", "0 / 0", "26%", "+0.650", "log p -0.75", "policy 3"):
        assert shown in page
    assert re.findall(r"width:([\d.]+)%", page) == ["33.3", "100.0", "66.7"]
    assert page.count('class="card good"') == 2


def test_page_says_what_is_bad(tmp_path: Path) -> None:
    worse = SUMMARY | {"reward_after": 0.1, "audit": SUMMARY["audit"] | {"lost": 2}}
    page = write_page(worse, [], tmp_path / "index.html").read_text("utf-8")
    assert page.count('class="card bad"') == 2
    assert "2 / 0" in page


def test_curves(tmp_path: Path) -> None:
    """Steps without a reward of an environment, and no steps at all, are drawn too."""
    metrics = ({"reward.lake": 0.5, "staleness": 1.0}, {"seconds.idle": 0.5}, {"reward.number": 0.2})
    receipts = [
        Receipt(run="r", incarnation="i", step=n, version=n, parent=n - 1, metrics=m)
        for n, m in enumerate(metrics, start=1)
    ]
    for given in (receipts, []):
        draw_curves(given, tmp_path / "curves.png")
        assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_smooth() -> None:
    assert smooth([None, 1.0, None, 0.0], keep=0.5) == [None, 1.0, 1.0, 0.5]


def test_bars() -> None:
    assert draw_bars([0.0, 0.49, 0.5, 1.0, 2.0, -1.0]) == "▁▄▅██▁"


def test_live_on_a_terminal() -> None:
    """A table of at most 100 columns, with units; nothing of it stays on the screen."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, color_system=None)
    with LiveRun(console, "online") as live:
        live.show(SNAPSHOT, note="3 of 75 s")
        shown = out.getvalue()
    lines = [re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", line) for line in shown.splitlines()]
    text = "\n".join(lines)
    for words in ("online  3 of 75 s", "reward lake", "trajectories/s", "tokens/s", "versions", "of its time"):
        assert words in text
    assert max(map(len, lines)) <= 100
    assert "…" not in text


def test_live_in_a_log() -> None:
    """Without a terminal: a line now and then, no escape sequences."""
    out = io.StringIO()
    view = View(Console(file=out, width=40))
    view.phase("a phase whose line is longer than the forty columns that it is given")
    with view.live("online") as live:
        for _ in range(50):
            live.show(SNAPSHOT, note="3 of 75 s")
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].endswith("that it is given")
    assert lines[1].strip() == as_line(SNAPSHOT, "3 of 75 s")
    assert "\x1b" not in out.getvalue()


def test_summary_lines() -> None:
    text = "\n".join(summary_lines(SUMMARY))
    for words in (
        "0.300 -> 0.950",
        "51,234 trajectories, 1,234,567 tokens",
        "1: 30",
        "1,000 zero-variance",
        "lost 0, twice 0",
    ):
        assert words in text
