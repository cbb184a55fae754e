"""`rollstream demo`: the whole design at work in one command."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...schemas.errors import RollstreamError
from ..context import print_json

if TYPE_CHECKING:
    from .plan import Plan

FOLDER = Path(".rollstream/demo")


def register(cli: typer.Typer) -> None:
    from .play import play

    cli.command(
        epilog="Examples: rollstream demo  |  rollstream demo --broker kafka --seed 3  |  "
        "rollstream demo --model smollm2 --engine vllm --steps 2"
    )(demo)
    cli.command("demo-play", hidden=True)(play)


def demo(
    folder: Annotated[Path, typer.Option("--dir", help="Data and logs; emptied unless --resume.")] = FOLDER,
    report: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("demo-report"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the demo that was interrupted.")] = False,
    model: Annotated[str, typer.Option(help="tiny, smollm2, or a Hugging Face directory.")] = "tiny",
    engine: Annotated[str, typer.Option(help="transformers or vllm.")] = "transformers",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    broker: Annotated[str, typer.Option(help="tansu (embedded), or kafka (from $KAFKA_HOME).")] = "tansu",
    steps: Annotated[int | None, typer.Option(help="Online steps; else as many as fit into the time.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Of the online phase, at most.")] = None,
    seed: Annotated[int, typer.Option(help="Of model, tasks and sampling.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Start a local stack, warm start a small model on scripted players, and let it learn two games online.

    Two workers and a trainer, through Kafka and S3. Shows the run live, audits it, and writes a report. Ctrl-C at any
    moment ends every process; --resume goes on from the last checkpoint.
    """
    from rich.console import Console

    from .view import View

    plan = _plan(model, engine, device, steps, seconds, seed)
    view = View(Console(stderr=as_json))
    _prepare(folder, resume=resume)
    try:
        summary = _run(plan, folder.absolute(), broker, report, view)
    except KeyboardInterrupt:
        view.phase(f"interrupted; every process is ended. `rollstream demo --resume --dir {folder}` goes on")
        raise typer.Exit(130) from None
    if as_json:
        print_json(summary)
    else:
        _tell(summary, report)
    if summary["audit"]["lost"] or summary["audit"]["twice"]:
        raise typer.Exit(1)


def _plan(model: str, engine: str, device: str, steps: int | None, seconds: float | None, seed: int) -> "Plan":
    from dataclasses import replace

    from .plan import Plan, language_model

    plan = Plan(engine=engine) if model == "tiny" else language_model(model, engine)
    return replace(plan, device=device, steps=steps, seed=seed, seconds=plan.seconds if seconds is None else seconds)


def _prepare(folder: Path, *, resume: bool) -> None:
    """An empty folder, or the one to go on in; never somebody else's files."""
    from ...infra import stack
    from .show import STATE

    if any(component.alive for component in stack.status(folder)):
        raise RollstreamError(
            f"a stack runs in {folder}: another demo? choose another --dir, or `rollstream down --dir {folder}`"
        )
    if resume and not (folder / STATE).exists():
        raise RollstreamError(f"there is nothing to resume in {folder}: start without --resume")
    if not resume and folder.exists() and any(folder.iterdir()):
        if not (folder / STATE).exists():
            raise RollstreamError(f"{folder} holds files that are no demo's: choose another --dir")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / STATE).exists():
        (folder / STATE).write_text("{}")


def _run(plan: "Plan", folder: Path, broker: str, report: Path, view: Any) -> Any:
    from ...infra.stack import LocalStack
    from .crew import Crew
    from .show import Demo

    if broker not in ("tansu", "kafka"):
        raise typer.BadParameter(f"expected tansu or kafka, found {broker!r}", param_hint="--broker")
    view.phase(f"local stack: {broker} on loopback, data in {folder}")
    crew = Crew(folder / "logs")
    with LocalStack(folder, broker=broker) as stack:
        try:
            return Demo(plan, folder, stack.endpoints, crew, view).run(report)
        finally:
            crew.stop()


def _tell(summary: Any, report: Path) -> None:
    audit = summary["audit"]
    for name, reward in summary["environments"].items():
        typer.echo(f"{name:<14} reward {reward['before']:.3f} -> {reward['after']:.3f}")
    typer.echo(f"{'mean':<14} reward {summary['reward_before']:.3f} -> {summary['reward_after']:.3f}")
    typer.echo(
        f"{summary['trajectories']:,} trajectories, {summary['tokens']:,} tokens, {summary['steps']} online steps"
    )
    typer.echo(
        f"staleness (versions: samples) {summary['staleness']}, trainer idle {summary['trainer_idle_share']:.0%}"
    )
    dropped = ", ".join(f"{reason} {count}" for reason, count in audit["dropped"].items()) or "none"
    typer.echo(
        f"audit: acknowledged {audit['acknowledged']}, trained {audit['trained']}, dropped: {dropped}; "
        f"pending {audit['pending']}, lost {audit['lost']}, twice {audit['twice']}"
    )
    typer.echo(f"{summary['seconds']:.0f} s; report in {report / 'index.html'}")
