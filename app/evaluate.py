"""`rollstream evaluate`: how good a published policy is, on seeds that training does not use."""

import asyncio
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..schemas.errors import RollstreamError
from . import wiring
from .context import Context, opened
from .output import AsJson, examples, print_json

if TYPE_CHECKING:
    from ..infra.checkpoints import Manifest

FIRST_SEED = 1 << 30


def register(cli: typer.Typer) -> None:
    cli.command(
        epilog=examples(
            "rollstream evaluate",
            "rollstream evaluate --episodes 500 --first-seed 1000000 --version 40 --json",
            "rollstream -s sampling.temperature=0 evaluate",
        )
    )(evaluate)


def evaluate(
    context: typer.Context,
    episodes: Annotated[
        int, typer.Option(min=1, help="Episodes of each environment, each with a seed of its own.")
    ] = 200,
    first_seed: Annotated[
        int, typer.Option(min=0, help="Seeds go up from here; keep them apart from those of training.")
    ] = FIRST_SEED,
    version: Annotated[int | None, typer.Option(help="Policy version; else the latest.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the JSON to this file as well.")] = None,
    as_json: AsJson = False,
) -> None:
    """Play episodes with a published policy, apart from training, and print the mean reward of each environment."""
    with opened(context) as here:
        here.expect_environments()
        manifest = here.checkpoints.latest() if version is None else here.checkpoints.manifest(version)
        if manifest is None:
            raise RollstreamError(f"run {here.run} has no checkpoint yet; `rollstream train` publishes them")
        scores = _play(here, manifest, range(first_seed, first_seed + episodes))
    value = {"version": manifest.version, "episodes": episodes, "reward": scores}
    if output is not None:
        output.write_text(json.dumps(value, indent=2) + "\n")
    if as_json:
        print_json(value)
    else:
        for name, reward in scores.items():
            typer.echo(f"{name:<20} {reward:.4f}  ({episodes} episodes, policy {manifest.version})")


def _play(here: Context, manifest: "Manifest", seeds: range) -> dict[str, float]:
    from ..infra.checkpoints import WEIGHTS
    from ..producers.evaluation import evaluate_policy

    config = here.config
    with tempfile.TemporaryDirectory(prefix="rollstream-evaluate-") as scratch:
        here.checkpoints.fetch(manifest, WEIGHTS, Path(scratch))
        weights = Path(scratch) / "weights"
        return asyncio.run(
            evaluate_policy(
                lambda: wiring.open_engine(config, weights, version=manifest.version),
                wiring.open_renderer(weights),
                wiring.environments(config),
                sampling=wiring.sampling(config),
                max_turns={name: e.max_turns for name, e in config.environments.items()},
                limits=wiring.limits(config.worker.timeouts),
                seeds=seeds,
                concurrency=config.worker.concurrency,
            )
        )
