"""`rollstream lineage | replay`: from an offset to its step and checkpoints and back, and a step made again."""

import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..infra.deadletters import parse_position
from ..schemas.errors import RollstreamError
from .context import Context, opened
from .output import AsJson, examples, print_json

if TYPE_CHECKING:
    from ..consumers.replay import Replay
    from ..consumers.tracing import Deed, Fate, Tracer, Track

Version = Annotated[int | None, typer.Option(help="Seen from this policy version's checkpoint; else the latest.")]

BRANCHES = {
    "lineage": "",
    "left": "  dead branch: published, but a later start went on from an older policy",
    "unpublished": "  dead branch: never published (crashed, fenced, or under way right now)",
}


def register(cli: typer.Typer) -> None:
    cli.command(
        epilog=examples(
            "rollstream lineage 'rollstream.trajectories.number[0]@7'",
            "rollstream lineage demo.number.00000012/3/0",
            "rollstream lineage step 12",
            "rollstream lineage policy 40 --json",
        )
    )(lineage)
    cli.command(
        epilog=examples(
            "rollstream replay --step 12",
            "rollstream replay --step 12 --version 40",
            "rollstream replay --step 3 --json",
        )
    )(replay)


def lineage(
    context: typer.Context,
    what: Annotated[
        list[str],
        typer.Argument(help="TOPIC[PARTITION]@OFFSET, a trajectory id, 'step N', or 'policy V'.", show_default=False),
    ],
    version: Version = None,
    as_json: AsJson = False,
) -> None:
    """Tell where a trajectory went: its step, and the checkpoints that contain it; or what a step or policy consumed.

    Receipts of trainers that crashed or were fenced, and of steps that a restart went back behind, are told as dead
    branches: they trained nothing that counts.
    """
    from ..consumers.ledger import Ledger
    from ..consumers.tracing import Tracer

    words = " ".join(what)
    with opened(context) as here:
        tracer = Tracer(
            here.log, Ledger(here.log, here.names, here.run, here.reader_schemas), here.checkpoints, version=version
        )
        deeds = re.fullmatch(r"(step|policy) (\d+)", words)
        if deeds:
            _tell_deeds(_find_deeds(tracer, deeds[1], int(deeds[2])), as_json=as_json)
        else:
            _tell_tracks(_find_tracks(here, tracer, words), as_json=as_json)


def replay(
    context: typer.Context,
    step: Annotated[int, typer.Option(min=0, help="The step to make again.")],
    version: Version = None,
    as_json: AsJson = False,
) -> None:
    """Make a step again from its receipt, and compare: the same batch, the same loss, the same weights, bit for bit.

    Reads the very records that the receipt names, and restores the state before the step. Where that checkpoint holds
    weights only, the steps since the last one with the state are made again first. Changes nothing. Exits 1 when
    anything differs.
    """
    with opened(context) as here, tempfile.TemporaryDirectory(prefix="rollstream-replay-") as scratch:
        from ..consumers.ledger import Ledger
        from ..consumers.replay import Replayer

        ledger = Ledger(here.log, here.names, here.run, here.reader_schemas)
        replayer = Replayer(here.log, ledger, here.checkpoints, here.claims, here.reader_schemas, scratch=Path(scratch))
        found = replayer.replay(step, version=version)
    if as_json:
        print_json(found.as_json())
    else:
        _tell_replay(found)
    if not found.faithful:
        raise typer.Exit(1)


def _find_deeds(tracer: "Tracer", kind: str, number: int) -> "list[Deed]":
    deeds = tracer.step(number) if kind == "step" else tracer.policy(number)
    if not deeds:
        raise RollstreamError(f"the ledger has no receipt of {kind} {number}; `rollstream checkpoints` lists policies")
    return deeds


def _find_tracks(here: Context, tracer: "Tracer", words: str) -> "list[Track]":
    position = parse_position(words)
    if position is not None:
        return [tracer.track(position)]
    partitions = [p for topic in here.environment_topics().values() for p in here.log.partitions(topic)]
    positions = tracer.find(partitions, words)
    if not positions:
        raise RollstreamError(
            f"no trajectory {words!r} on this log; expected its id, TOPIC[PARTITION]@OFFSET, 'step N' or 'policy V'"
        )
    return [tracer.track(position) for position in positions]


def _tell_tracks(tracks: "list[Track]", *, as_json: bool) -> None:
    if as_json:
        print_json([track.as_json() for track in tracks])
        return
    for track in tracks:
        typer.echo(f"{track.position}  {track.state}  {track.trajectory_id or ''}".rstrip())
        for fate in track.fates:
            typer.echo(f"  {_fate_line(fate)}")
        if track.policies:
            typer.echo(f"  contained in policies {_spans(track.policies)}")


def _fate_line(fate: "Fate") -> str:
    what = "trained" if fate.outcome == "trained" else f"dropped, {fate.outcome},"
    return f"{what} by step {fate.step}, policy {fate.version}, trainer {fate.incarnation}{BRANCHES[fate.branch]}"


def _tell_deeds(deeds: "list[Deed]", *, as_json: bool) -> None:
    if as_json:
        print_json([deed.as_json() for deed in deeds])
        return
    for deed in deeds:
        receipt = deed.receipt
        typer.echo(
            f"policy {receipt.version}  step {receipt.step}  loss {receipt.loss:+.4f}  {len(receipt.groups)} groups  "
            f"trainer {receipt.incarnation}{BRANCHES[deed.branch]}"
        )
        typer.echo(f"  parents {_spans(deed.parents) or '-'}")
        for consumed in receipt.consumed:
            columns = {"trained": consumed.trained, **consumed.dropped}
            for name, offsets in columns.items():
                if len(offsets):
                    typer.echo(f"  {consumed.topic}[{consumed.partition}]  {name} {_spans(offsets.tolist())}")


def _tell_replay(found: "Replay") -> None:
    typer.echo(f"step {found.step}  policy {found.version}  from the state of policy {found.start}")
    rows = {
        "samples": f"{found.samples:,}",
        "batch": found.batch,
        "loss, receipt": repr(found.receipt_loss),
        "loss, replay": repr(found.replay_loss),
        "identical": str(found.identical).lower(),
    }
    for name, value in rows.items():
        typer.echo(f"{name:<14} {value}")
    for difference in found.differences:
        typer.echo(f"differs: {difference}")
    for remark in found.remarks:
        typer.echo(f"note: {remark}")
    if found.faithful and not found.identical:
        typer.echo(f"note: {found.ranks} ranks made this step; the batch is the same, the loss within rounding")


def _spans(numbers: "list[int] | tuple[int, ...]") -> str:
    """Whole numbers as "1-3, 7"."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
