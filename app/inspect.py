"""`rollstream tail | show | audit | checkpoints`: look at what a run has written."""

import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from ..infra.log import Partition, Position, Record
from ..infra.scan import scan
from ..schemas import Trajectory, WireError, decode_as, parse_headers
from ..schemas.errors import RollstreamError
from .context import Context, opened, print_json

if TYPE_CHECKING:
    from ..infra.checkpoints import Manifest

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
Only = Annotated[str | None, typer.Option("--environment", "-e", help="One environment; else all.")]


def register(cli: typer.Typer) -> None:
    cli.command(epilog="Examples: rollstream tail -n 50  |  rollstream tail -f -e number")(tail)
    cli.command(
        epilog="Examples: rollstream show demo.number.00000012/3/0  |  rollstream show 'rollstream.trajectories.number[0]@7'"
    )(show)
    cli.command(epilog="Examples: rollstream audit  |  rollstream audit --json  |  rollstream audit --version 40")(
        audit
    )
    cli.command(epilog="Example: rollstream checkpoints --json")(checkpoints)


def tail(
    context: typer.Context,
    environment: Only = None,
    count: Annotated[int, typer.Option("-n", "--count", help="The last so many of each partition.")] = 10,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as new ones come, until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the newest trajectories, one line each (with --json one object a line)."""
    with opened(context) as here:
        bounds = here.log.bounds(_partitions(here, environment))
        start = {p: max(first, end - count) for p, (first, end) in bounds.items()}
        for record in scan(here.log, start, stop={p: end for p, (_, end) in bounds.items()}):
            _print_record(record, as_json=as_json)
        if follow:
            with here.log.read({p: end for p, (_, end) in bounds.items()}) as consumer:
                while True:
                    for record in consumer.poll(100, 1.0):
                        _print_record(record, as_json=as_json)


def show(
    context: typer.Context,
    which: Annotated[str, typer.Argument(help="A trajectory id, or a position: TOPIC[PARTITION]@OFFSET.")],
    as_json: AsJson = False,
) -> None:
    """Show one trajectory turn by turn: who spoke, what, with which policy and log-probability."""
    with opened(context) as here:
        record = _find(here, which)
        trajectory = decode_as(Trajectory, record.value or b"")
    if as_json:
        print_json(_as_json(record, trajectory, turns=True))
        return
    typer.echo(_line(record, trajectory))
    for line in _turn_lines(trajectory):
        typer.echo(line)
    if trajectory.cause:
        typer.echo(f"cause: {trajectory.cause} {trajectory.metadata.get('error', '')}".rstrip())


def audit(
    context: typer.Context,
    version: Annotated[
        int | None, typer.Option(help="Audit this policy version's checkpoint; else the latest.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tell what became of every acknowledged trajectory: trained once, dropped and why, or pending.

    Exits 1 when one was lost or trained twice. Works on a live run, too.
    """
    from ..consumers.audit import audit as make_audit

    with opened(context) as here:
        verdict = make_audit(here.log, here.names, here.run, here.checkpoints, version=version)
    if as_json:
        print_json(verdict.as_json())
    else:
        for name in ("acknowledged", "trained", "pending", "lost", "twice"):
            typer.echo(f"{name:<14} {getattr(verdict, name):>10,}")
        for reason, number in sorted(verdict.dropped.items()):
            typer.echo(f"dropped: {reason:<5} {number:>10,}")
        for problem in verdict.problems:
            typer.echo(problem)
    if not verdict.clean:
        raise typer.Exit(1)


def checkpoints(
    context: typer.Context,
    count: Annotated[int, typer.Option("-n", "--count", help="The newest so many; 0 for all.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List the published policies of the run, newest last."""
    with opened(context) as here:
        latest = here.checkpoints.latest()
        versions = here.checkpoints.versions()[-count:]
        manifests = [here.checkpoints.manifest(v) for v in versions]
    if as_json:
        print_json([_manifest_json(m, latest) for m in manifests])
        return
    if not manifests:
        typer.echo(f"run {here.run} has no checkpoint")
    for manifest in manifests:
        size = sum(f.size for f in manifest.files.values())
        mark = "  <- latest" if latest and manifest.version == latest.version else ""
        state = "resumable" if any(n.startswith("trainer/") for n in manifest.files) else "weights"
        typer.echo(
            f"policy {manifest.version:<6} step {manifest.step:<6} parent {manifest.parent or '-':<6} {size / 1e6:8.1f} MB  "
            f"{state}  by {manifest.incarnation} at {manifest.published}{mark}"
        )


def _partitions(here: Context, environment: str | None) -> list[Partition]:
    topics = here.log.topics()
    found = {e: t for t in sorted(topics) if (e := here.names.environment(t)) is not None}
    if environment is not None and environment not in found:
        raise RollstreamError(f"no environment {environment!r} on this log; there are: {', '.join(found) or 'none'}")
    return [p for e, t in found.items() if environment in (None, e) for p in here.log.partitions(t)]


def _find(here: Context, which: str) -> Record:
    place = re.fullmatch(r"(.+)\[(\d+)\]@(\d+)", which)
    if place:
        position = Position(Partition(place[1], int(place[2])), int(place[3]))
        stop = {position.partition: position.offset + 1}
        found = next(iter(scan(here.log, {position.partition: position.offset}, stop=stop)), None)
    else:
        found = next((r for r in scan(here.log, _partitions(here, None)) if _id(r) == which), None)
    if found is None or found.value is None:
        raise RollstreamError(f"no trajectory {which!r} on this log; `rollstream tail` lists the newest")
    return found


def _id(record: Record) -> str | None:
    try:
        return parse_headers(record.headers).trajectory_id
    except WireError:
        return None


def _print_record(record: Record, *, as_json: bool) -> None:
    if record.value is None:
        typer.echo(f"{record.position}  tombstone", err=as_json)
        return
    try:
        trajectory = decode_as(Trajectory, record.value)
    except WireError as error:
        typer.echo(f"{record.position}  cannot be read ({error.reason}): {error}", err=as_json)
        return
    if as_json:
        import json

        sys.stdout.write(json.dumps(_as_json(record, trajectory, turns=False)) + "\n")
    else:
        typer.echo(_line(record, trajectory))


def _line(record: Record, trajectory: Trajectory) -> str:
    versions = trajectory.version_range()
    policy = (
        "-" if versions is None else str(versions[0]) if versions[0] == versions[1] else f"{versions[0]}-{versions[1]}"
    )
    return (
        f"{record.position}  {trajectory.trajectory_id}  {trajectory.status.lower()}  reward {trajectory.reward:g}  "
        f"policy {policy}  {len(trajectory.turns)} turns  {trajectory.tokens.size} tokens"
    )


def _turn_lines(trajectory: Trajectory) -> Iterator[str]:
    sampled = 0
    versions = trajectory.versions()
    for turn in trajectory.turns:
        note = f"{turn.tokens} tokens"
        if turn.sampled and turn.tokens and trajectory.logprobs.size:
            part = slice(sampled, sampled + turn.tokens)
            note += f", policy {versions[part].min()}, log p {float(trajectory.logprobs[part].sum()):.3f}"
        sampled += turn.tokens if turn.sampled else 0
        reward = "" if turn.reward is None else f", reward {turn.reward:g}"
        yield f"  {turn.role.lower():<10} {turn.text or ''}   [{note}{reward}]"


def _as_json(record: Record, trajectory: Trajectory, *, turns: bool) -> dict[str, object]:
    value: dict[str, object] = {
        "position": str(record.position),
        "trajectory_id": trajectory.trajectory_id,
        "group_id": trajectory.group_id,
        "environment": trajectory.environment,
        "seed": trajectory.seed,
        "status": trajectory.status.value,
        "cause": trajectory.cause,
        "reward": trajectory.reward,
        "versions": trajectory.version_range(),
        "tokens": int(trajectory.tokens.size),
        "model": trajectory.model,
    }
    if turns:
        value["token_ids"] = trajectory.tokens.tolist()
        value["logprobs"] = trajectory.logprobs.tolist()
        value["turns"] = [
            {"role": t.role.value, "tokens": t.tokens, "sampled": t.sampled, "text": t.text, "reward": t.reward}
            for t in trajectory.turns
        ]
    return value


def _manifest_json(manifest: "Manifest", latest: "Manifest | None") -> dict[str, object]:
    return {
        "version": manifest.version,
        "parent": manifest.parent,
        "step": manifest.step,
        "incarnation": manifest.incarnation,
        "published_ms": manifest.published_ms,
        "bytes": sum(f.size for f in manifest.files.values()),
        "resumable": any(name.startswith("trainer/") for name in manifest.files),
        "latest": latest is not None and manifest.version == latest.version,
    }
