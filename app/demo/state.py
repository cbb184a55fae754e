"""How far a demo is, in `demo.json` of its folder: what `--resume` goes on from."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from ...infra import stack
from ...infra.stack import Broker
from ...schemas.errors import RollstreamError
from .plan import Plan

FILE = "demo.json"


@dataclass(slots=True, kw_only=True)
class State:
    """One demo's progress; `save` after every change that must survive."""

    folder: Path
    plan: Plan
    broker: Broker
    done: dict[str, Any] = field(default_factory=dict[str, Any])
    """Phase -> what it found."""
    seconds: float = 0.0
    """Of all its lives so far."""
    online_seconds: float = 0.0
    """Of the online phase so far, from its first step."""
    restarts: int = 0
    """Processes that died and were started again."""

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Raises `RollstreamError` where no demo was begun."""
        try:
            told: dict[str, Any] = json.loads((folder / FILE).read_text())
        except FileNotFoundError:
            raise RollstreamError(f"there is nothing to resume in {folder}: start without --resume") from None
        rest: dict[str, Any] = {**told, "folder": folder, "plan": Plan(**told["plan"])}
        return cls(**rest)

    def save(self) -> None:
        told = asdict(self)
        del told["folder"]
        fresh = self.folder / f"{FILE}.new"
        fresh.write_text(json.dumps(told, indent=2))
        fresh.replace(self.folder / FILE)

    def once(self, phase: str, do: Callable[[], Any]) -> Any:
        """What the phase found, now or in an earlier life."""
        if phase not in self.done:
            self.done[phase] = do()
            self.save()
        return self.done[phase]


def begin_demo(folder: Path, plan: Plan, broker: Broker) -> State:
    """An empty folder for a new demo; what an earlier demo left there is removed, never somebody else's files.

    Raises `RollstreamError`.
    """
    refuse_running(folder)
    if folder.exists() and any(folder.iterdir()):
        if not (folder / FILE).exists():
            raise RollstreamError(f"--dir: {folder} holds files that are no demo's: choose another folder")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = State(folder=folder.absolute(), plan=plan, broker=broker)
    state.save()
    return state


def resume_demo(folder: Path) -> State:
    """The demo that was interrupted in this folder. Raises `RollstreamError`."""
    refuse_running(folder)
    return State.load(folder.absolute())


def refuse_running(folder: Path) -> None:
    """Raises `RollstreamError` where a stack runs in this folder."""
    if any(component.alive for component in stack.status(folder)):
        raise RollstreamError(
            f"--dir: a stack runs in {folder}, another demo's? choose another folder, "
            f"or end it: rollstream down --dir {folder}"
        )
