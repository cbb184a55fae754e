"""One server of the stack: what to run, where, and how to see that it answers."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

Progress = Callable[[str], None]
"""Called with a line for people each time something happened."""

KEPT_VARIABLES = ("PATH", "HOME", "TMPDIR", "LANG", "TZ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One server."""

    name: str
    port: int
    """Where its clients connect."""
    directory: Path
    """Its data and its working directory."""
    log: Path
    command: tuple[str, ...]
    answers: Callable[[], bool]
    """Whether it serves its clients now. Never raises; takes a few seconds at most."""
    env: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """On top of a few variables of this process; a proxy or a foreign AWS profile must not reach a server."""
    patience: float = 60.0
    """Seconds that its start may take."""
    grace: float = 10.0
    """Seconds between SIGTERM and SIGKILL."""

    def environment(self) -> dict[str, str]:
        return {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ} | dict(self.env)
