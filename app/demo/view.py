"""The demo's live view: a line a phase, and a table that moves while the run learns; plain lines without a terminal."""

import time
from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..monitor import Snapshot
from ..output import Pace

BARS = "▁▂▃▄▅▆▇█"
HISTORY = 48
"""Bars of a reward's history, the newest on the right."""
BAR_EVERY = 1.0
"""Seconds that a bar stands for."""
QUIET_EVERY = 5.0
"""Seconds between two lines where the output is no terminal."""


class View:
    """Shows how far the demo is."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the view was made."""
        return time.monotonic() - self._began

    def phase(self, text: str) -> None:
        """Announce what happens next."""
        self._say(f"{self.seconds:6.1f} s  ", text)

    def note(self, text: str) -> None:
        """Something that belongs to the phase under way."""
        self._say(" " * 10, text)

    def live(self, title: str) -> "LiveRun":
        return LiveRun(self._console, title)

    def _say(self, margin: str, text: str) -> None:
        self._console.print(Text.assemble((margin, "dim"), text), soft_wrap=True)


class LiveRun:
    """The moving table; a context manager."""

    def __init__(self, console: Console, title: str) -> None:
        self._console, self._title = console, title
        self._rewards: dict[str, deque[float]] = {}
        self._bar, self._line = Pace(BAR_EVERY, at_once=True), Pace(QUIET_EVERY, at_once=True)
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, snapshot: Snapshot, *, note: str = "") -> None:
        """Bring the view up to date; call it as often as you like."""
        if self._bar.due():
            for name, value in snapshot.reward.items():
                self._rewards.setdefault(name, deque(maxlen=HISTORY)).append(value)
        if self._live is not None:
            self._live.update(self._table(snapshot, note), refresh=True)
        elif self._line.due():
            self._console.print(f"          {as_line(snapshot, note)}", highlight=False, soft_wrap=True)

    def _table(self, snapshot: Snapshot, note: str) -> Table:
        table = Table(
            title=f"{self._title}  {note}", title_justify="left", title_style="bold", show_header=False, box=None
        )
        table.add_column(style="dim", min_width=18, no_wrap=True)
        table.add_column(justify="right", min_width=9, no_wrap=True)
        table.add_column(no_wrap=True)
        for name, values in sorted(self._rewards.items()):
            table.add_row(f"reward {name}", f"{snapshot.reward.get(name, values[-1]):.2f}", draw_bars(values))
        table.add_row("step", f"{snapshot.step:,}", f"policy version {snapshot.version:,}")
        table.add_row("trained", f"{snapshot.trajectories_per_s:,.0f}", "trajectories/s")
        table.add_row("", f"{snapshot.tokens_per_s:,.0f}", "tokens/s")
        table.add_row("staleness", f"{snapshot.staleness:.2f}", "versions, mean of the trained samples")
        table.add_row("lag", f"{snapshot.lag:,}", "trajectories not settled yet")
        table.add_row("trainer idle", f"{snapshot.idle:.0%}", "of its time, waiting for data")
        return table


def draw_bars(values: Iterable[float]) -> str:
    """Values from 0 to 1 as a line of bars."""
    return "".join(BARS[min(len(BARS) - 1, max(0, int(value * len(BARS))))] for value in values)


def as_line(snapshot: Snapshot, note: str) -> str:
    """The same for a log."""
    rewards = "  ".join(f"{name} {value:.2f}" for name, value in sorted(snapshot.reward.items()))
    return (
        f"step {snapshot.step}  policy {snapshot.version}  reward {rewards or '-'}  "
        f"{snapshot.trajectories_per_s:.0f} trajectories/s  {snapshot.tokens_per_s:.0f} tokens/s  "
        f"staleness {snapshot.staleness:.2f}  lag {snapshot.lag}  idle {snapshot.idle:.0%}  {note}"
    )
