"""How much of everything the demo does, and the configuration that its processes get."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...infra.stack import Endpoints

RUN = "demo"
SEED_SPAN = 100_000
"""Task seeds of one demo seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Sizes that suit a model. The defaults are those of the small one, measured on two cores."""

    model: str = "tiny"
    """ "tiny", "smollm2", or a Hugging Face directory."""
    engine: str = "transformers"
    device: str = "cpu"
    words: str = "terse"
    scripted: Mapping[str, int] = field(default_factory=lambda: {"number": 14_400, "lake": 6_000})
    """Game -> episodes that scripted players put on its topic."""
    clone: Mapping[str, object] = field(
        default_factory=lambda: {
            "objective": "clone",
            "groups_per_step": 2550,
            "minibatches": 19,
            "lr": 4e-3,
            "warmup": 20,
            "betas": [0.9, 0.99],
            "weight_decay": 0.01,
        }
    )
    """`[trainer]` of the warm start; a group is one scripted episode there."""
    online: Mapping[str, object] = field(
        default_factory=lambda: {
            "objective": "grpo",
            "groups_per_step": 32,
            "max_staleness": 2,
            "minibatches": 2,
            "lr": 2e-4,
            "entropy": 0.001,
            "betas": [0.9, 0.95],
        }
    )
    """`[trainer]` of the online phase."""
    group_size: int = 8
    concurrency: int = 128
    max_tokens: int = 1
    """Sampled tokens of a turn."""
    max_turns: int = 0
    """Of an episode; 0 leaves it to the game."""
    threads: int = 1
    """Of each process. A small model's second thread would mostly wait for the first."""
    workers: int = 2
    evaluation: int = 200
    """Held-out episodes of each game, before and after."""
    seconds: float = 50.0
    """Of the online phase, unless `steps` ends it."""
    steps: int | None = None
    """Online steps."""
    seed: int = 0


def language_model(model: str, engine: str, **sizes: object) -> Plan:
    """A plan for a model that brings a language: English views, a few episodes, gentle steps."""
    shared = {"micro_batch_tokens": 2048, "betas": [0.9, 0.95]}
    defaults: dict[str, object] = {
        "words": "plain",
        "scripted": {"number": 12, "lake": 12},
        "clone": {"objective": "clone", "groups_per_step": 24, "minibatches": 3, "lr": 2e-5, **shared},
        "online": {"objective": "grpo", "groups_per_step": 4, "max_staleness": 1, "lr": 2e-6, **shared},
        "group_size": 4,
        "concurrency": 16,
        "max_tokens": 8,
        "max_turns": 6,
        "workers": 1,
        "evaluation": 16,
        "seconds": 1800.0,
        "threads": 2,
    }
    return Plan(model=model, engine=engine, **{**defaults, **sizes})  # type: ignore[arg-type]


def write_config(plan: Plan, endpoints: Endpoints, folder: Path) -> Path:
    """Write `<folder>/demo.toml`, what every process of the demo is started with."""
    first = plan.seed * SEED_SPAN
    tables: dict[str, Mapping[str, object]] = {
        "run": {"name": RUN, "seed": plan.seed},
        "sampling": {"temperature": 1.0, "max_tokens": plan.max_tokens},
        "worker": {
            "engine": plan.engine,
            "device": plan.device,
            "model": str(folder / "model"),
            "concurrency": plan.concurrency,
            # Gone with the demo: its ids come again in the next one.
            "spill": str(folder / "spill"),
        },
        "trainer": {"model": str(folder / "model"), "device": plan.device, "seed": plan.seed, **plan.online},
    }
    for game in plan.scripted:
        tables[f"environments.{game}"] = {
            "adapter": f"rollstream.app.demo.games:{game}",
            "group_size": plan.group_size,
            "max_turns": plan.max_turns,
            "seeds": [first, first + SEED_SPAN - 1],
        }
        tables[f"environments.{game}.options"] = {"words": plan.words}
    path = folder / "demo.toml"
    path.write_text(endpoints.to_toml() + "".join(_table(name, table) for name, table in tables.items()))
    path.chmod(0o600)
    return path


def overrides(section: str, values: Mapping[str, object]) -> list[str]:
    """`--set` arguments of the command line."""
    return [a for key, value in values.items() for a in ("--set", f"{section}.{key}={json.dumps(value)}")]


def _table(name: str, values: Mapping[str, object]) -> str:
    return f"\n[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
