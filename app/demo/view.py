"""The demo's live view: one line a phase, and a table that moves while the run learns. Plain lines where no terminal is."""

import time
from collections import deque
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from ..monitor import Snapshot

BARS = " ▁▂▃▄▅▆▇█"
QUIET_EVERY = 5.0
"""Seconds between two lines where the output is no terminal."""


class View:
    """Shows how far the demo is."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._said = 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def phase(self, text: str) -> None:
        """Announce what happens next."""
        self._console.print(f"[dim]{self.seconds:6.1f} s[/dim]  {text}", highlight=False)

    def live(self, title: str) -> "LiveRun":
        return LiveRun(self._console, title)


class LiveRun:
    """The moving table; a context manager."""

    def __init__(self, console: Console, title: str) -> None:
        self._console, self._title = console, title
        self._rewards: dict[str, deque[float]] = {}
        self._said = 0.0
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None

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
        for name, value in snapshot.reward.items():
            self._rewards.setdefault(name, deque(maxlen=48)).append(value)
        if self._live is not None:
            self._live.update(self._table(snapshot, note))
        elif time.monotonic() - self._said >= QUIET_EVERY:
            self._said = time.monotonic()
            self._console.print(_line(snapshot, note), highlight=False, soft_wrap=True)

    def _table(self, snapshot: Snapshot, note: str) -> Table:
        table = Table(title=f"{self._title} {note}", title_justify="left", show_header=False, box=None, pad_edge=False)
        table.add_column(style="dim", min_width=14)
        table.add_column()
        for name, values in sorted(self._rewards.items()):
            table.add_row(f"reward {name}", f"{values[-1]:.2f} {_bars(values)}")
        table.add_row("policy", f"version {snapshot.version}, step {snapshot.step}")
        table.add_row(
            "throughput", f"{snapshot.trajectories_per_s:,.0f} trajectories/s, {snapshot.tokens_per_s:,.0f} tokens/s"
        )
        table.add_row("staleness", f"{snapshot.staleness:.2f} versions (mean)")
        table.add_row("lag", f"{snapshot.lag:,} trajectories")
        table.add_row("trainer idle", f"{snapshot.idle:.0%}")
        return table


def _bars(values: deque[float]) -> str:
    return "".join(BARS[min(len(BARS) - 1, max(0, round(v * (len(BARS) - 1))))] for v in values)


def _line(snapshot: Snapshot, note: str) -> str:
    rewards = "  ".join(f"{name} {value:.2f}" for name, value in sorted(snapshot.reward.items()))
    return (
        f"  step {snapshot.step}  policy {snapshot.version}  reward {rewards or '-'}  "
        f"{snapshot.trajectories_per_s:.0f} traj/s  {snapshot.tokens_per_s:.0f} tok/s  staleness {snapshot.staleness:.2f}  "
        f"lag {snapshot.lag}  idle {snapshot.idle:.0%}  {note}"
    )
