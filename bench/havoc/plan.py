"""How much of everything runs, and the configuration that its processes get."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rollstream.infra.stack import Broker, Endpoints

RUN = "chaos"
GAMES = ("number", "lake")
MODEL = "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run of the bench."""

    folder: Path
    kills: int
    seed: int
    broker: Broker
    brokers: int = 1
    victims: frozenset[str] = frozenset()
    """Kinds of processes that are killed."""
    workers: int = 2
    group_size: int = 4
    groups_per_step: int = 4
    max_staleness: int = 4
    concurrency: int = 10
    """Episodes at once, of one worker."""

    @property
    def config(self) -> Path:
        return self.folder / "chaos.toml"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"


def write_config(plan: Plan, endpoints: Endpoints) -> None:
    """Write what every process of the run is started with."""
    tables: dict[str, Mapping[str, object]] = {
        "run": {"name": RUN, "seed": plan.seed},
        "sampling": {"temperature": 1.0, "max_tokens": 1},
        "worker": {
            "model": str(plan.folder / MODEL),
            "concurrency": plan.concurrency,
            "spill": str(plan.folder / "spill"),
        },
        "trainer": {
            "model": str(plan.folder / MODEL),
            "groups_per_step": plan.groups_per_step,
            "max_staleness": plan.max_staleness,
            "lr": 2e-4,
            "min_informative": 0.0,
            "seed": plan.seed,
        },
    }
    for game in GAMES:
        tables[f"environments.{game}"] = {"adapter": f"havoc.games:{game}", "group_size": plan.group_size}
    text = endpoints.to_toml() + "".join(_table(name, values) for name, values in tables.items())
    plan.config.write_text(text)
    plan.config.chmod(0o600)


def _table(name: str, values: Mapping[str, object]) -> str:
    return f"\n[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())


Kind = Literal["trainer", "worker", "dispatcher", "broker", "store"]
KINDS: tuple[Kind, ...] = ("trainer", "worker", "dispatcher", "broker", "store")
