"""`rollstream audit | checkpoints | checkpoints collect`: what the books of a run say, and which of them stay."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from .context import opened
from .output import AsJson, Pace, examples, print_json

if TYPE_CHECKING:
    from ..consumers.audit import Audit
    from ..infra.checkpoints import Manifest

books = typer.Typer(invoke_without_command=True)


def register(cli: typer.Typer) -> None:
    cli.command(
        epilog=examples(
            "rollstream audit", "rollstream audit --version 40", "rollstream audit --json && echo nothing is missing"
        )
    )(audit)
    cli.add_typer(books, name="checkpoints")


def audit(
    context: typer.Context,
    version: Annotated[
        int | None, typer.Option(help="Audit this policy version's checkpoint; else the latest.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tell what became of every acknowledged trajectory: trained once, dropped and why, or pending.

    Works on a live run, too. Exits 1 when one was lost or trained twice.
    """
    from ..consumers.audit import audit as make_audit

    with opened(context) as here:
        here.environment_topics()
        with _counting() as progress:
            verdict = make_audit(
                here.log,
                here.names,
                here.run,
                here.checkpoints,
                version=version,
                schemas=here.reader_schemas,
                progress=progress,
            )
    if as_json:
        print_json(verdict.as_json())
    else:
        _tell_verdict(verdict)
    if not verdict.clean:
        raise typer.Exit(1)


@books.callback(
    epilog=examples(
        "rollstream checkpoints -n 5", "rollstream checkpoints --json", "rollstream checkpoints collect --keep 20"
    )
)
def checkpoints(
    context: typer.Context,
    count: Annotated[int, typer.Option("-n", "--count", min=0, help="The newest so many; 0 for all.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List the published policies of the run, newest last."""
    if context.invoked_subcommand is not None:
        return
    with opened(context) as here:
        latest = here.checkpoints.latest()
        manifests = [here.checkpoints.manifest(v) for v in here.checkpoints.versions()[-count:]]
    current = latest.version if latest else None
    if as_json:
        print_json([_manifest_json(m, current) for m in manifests])
        return
    if not manifests:
        typer.echo(f"run {here.run} has no checkpoint yet; `rollstream train` publishes them")
        return
    typer.echo(f"{'policy':>7} {'step':>7} {'parent':>7} {'MB':>9}  {'holds':<10}{'published':<22}by")
    for manifest in manifests:
        typer.echo(_manifest_line(manifest, current))


@books.command(
    epilog=examples("rollstream checkpoints collect --keep 20", "rollstream checkpoints collect --keep 5 --yes --json")
)
def collect(
    context: typer.Context,
    keep: Annotated[int, typer.Option(min=1, help="Newest checkpoints whose objects stay.")],
    grace: Annotated[float, typer.Option(min=0, help="Leave objects alone that are younger, in seconds.")] = 3600.0,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete the objects of old checkpoints: weights and state go, manifests stay. Asks first.

    The newest checkpoint that a restart can go on from stays, too. Beside a running trainer, leave --grace above 1,800
    seconds plus the time of a publish. The trainer itself collects what trainer.keep says.
    """
    from ..consumers.retention import collect_old

    with opened(context) as here:
        question = f"delete the objects of all but the {keep} newest checkpoints of run {here.run}?"
        if not yes and not typer.confirm(question, err=True):
            raise typer.Exit(1)
        collected = collect_old(here.checkpoints, keep, grace=grace)
    if as_json:
        print_json({"objects": collected.objects, "bytes": collected.size, "uploads": collected.uploads})
    else:
        typer.echo(f"deleted {collected.objects:,} objects, {collected.size / 1e6:.1f} MB")
        typer.echo(f"aborted {collected.uploads:,} abandoned uploads")


@contextmanager
def _counting() -> "Generator[Callable[[int], None] | None]":
    """Counts records on one line of the terminal; None where standard error is none."""
    if not sys.stderr.isatty():
        yield None
        return
    pace = Pace(0.2)

    def show(records: int) -> None:
        if pace.due():
            typer.echo(f"\r{records:,} records read", nl=False, err=True)

    try:
        yield show
    finally:
        typer.echo("\r\x1b[K", nl=False, err=True)


def _tell_verdict(verdict: "Audit") -> None:
    rows = [("acknowledged", verdict.acknowledged), ("trained", verdict.trained)]
    rows += [(f"dropped, {reason}", number) for reason, number in sorted(verdict.dropped.items())]
    rows += [("pending", verdict.pending), ("lost", verdict.lost), ("twice", verdict.twice)]
    rows += [("untold, receipts removed by retention", verdict.untold)] if verdict.untold else []
    rows += [("expired", verdict.expired)] if verdict.expired else []
    width = max(len(name) for name, _ in rows)
    typer.echo(f"policy {verdict.version}" if verdict.version else "no checkpoint yet")
    for name, number in rows:
        typer.echo(f"{name:<{width}} {number:>12,}")
    for problem in verdict.problems:
        typer.echo(problem)


def _manifest_line(manifest: "Manifest", current: int | None) -> str:
    holds = "all" if _resumable(manifest) else "weights"
    mark = "  <- latest" if manifest.version == current else ""
    return (
        f"{manifest.version:>7} {manifest.step:>7} {manifest.parent or '-':>7} {_size(manifest) / 1e6:>9.1f}  "
        f"{holds:<10}{str(manifest.published)[:19]:<22}{manifest.incarnation}{mark}"
    )


def _manifest_json(manifest: "Manifest", current: int | None) -> dict[str, object]:
    return {
        "version": manifest.version,
        "parent": manifest.parent,
        "step": manifest.step,
        "incarnation": manifest.incarnation,
        "published_ms": manifest.published_ms,
        "bytes": _size(manifest),
        "resumable": _resumable(manifest),
        "latest": manifest.version == current,
    }


def _size(manifest: "Manifest") -> int:
    return sum(file.size for file in manifest.files.values())


def _resumable(manifest: "Manifest") -> bool:
    """Whether a trainer can go on from it; else it holds weights only."""
    return any(name.startswith("trainer/") for name in manifest.files)
