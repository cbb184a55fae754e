"""`rollstream tail | show`: look at the trajectories on the log."""

import json
import re
import sys
from typing import Annotated

import typer

from ..infra.claims import read_trajectory
from ..infra.log import Partition, Position, Record
from ..infra.scan import scan
from ..infra.store import StoreError
from ..schemas import WireError, parse_headers
from ..schemas.errors import RollstreamError
from .context import Context, opened
from .output import AsJson, examples, print_json
from .reach import Unreachable
from .trajectories import as_line, as_lines, as_object

Only = Annotated[str | None, typer.Option("--environment", "-e", help="One environment; else all.")]


def register(cli: typer.Typer) -> None:
    cli.command(
        epilog=examples("rollstream tail -n 50", "rollstream tail -f -e number", "rollstream tail --json | jq .reward")
    )(tail)
    cli.command(
        epilog=examples(
            "rollstream show demo.number.00000012/3/0", "rollstream show 'rollstream.trajectories.number[0]@7' --json"
        )
    )(show)


def tail(
    context: typer.Context,
    environment: Only = None,
    count: Annotated[int, typer.Option("-n", "--count", min=0, help="The last so many of each partition.")] = 10,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as new ones come, until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the newest trajectories, one line each (with --json one object a line)."""
    with opened(context) as here:
        bounds = here.log.bounds(_partitions(here, environment))
        ends = {p: end for p, (_, end) in bounds.items()}
        start = {p: max(first, end - count) for p, (first, end) in bounds.items()}
        for record in scan(here.log, start, stop=ends):
            _print_record(here, record, as_json=as_json)
        if follow:
            _follow(here, ends, as_json=as_json)


def show(
    context: typer.Context,
    which: Annotated[str, typer.Argument(help="A trajectory id, or a position: TOPIC[PARTITION]@OFFSET.")],
    as_json: AsJson = False,
) -> None:
    """Show one trajectory turn by turn: who spoke, what, with which policy and log-probability."""
    with opened(context) as here:
        record = _find(here, which)
        trajectory = read_trajectory(record.value or b"", here.claims, schemas=here.reader_schemas)
    if as_json:
        print_json(as_object(record, trajectory, turns=True))
        return
    for line in as_lines(record, trajectory):
        typer.echo(line)


def _follow(here: Context, start: dict[Partition, int], *, as_json: bool) -> None:
    with here.log.read(start) as consumer:
        try:
            while True:
                for record in consumer.poll(100, 1.0):
                    _print_record(here, record, as_json=as_json)
                sys.stdout.flush()
        except KeyboardInterrupt:
            return


def _partitions(here: Context, environment: str | None) -> list[Partition]:
    found = here.environment_topics()
    if environment is not None and environment not in found:
        raise RollstreamError(f"no environment {environment!r} on this log; there are: {', '.join(found)}")
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


def _print_record(here: Context, record: Record, *, as_json: bool) -> None:
    """What cannot be read is told, beside the JSON where that is asked for."""
    if record.value is None:
        typer.echo(f"{record.position}  tombstone", err=as_json)
        return
    try:
        trajectory = read_trajectory(record.value, here.claims, schemas=here.reader_schemas)
    except (WireError, StoreError, Unreachable) as error:
        reason = error.reason if isinstance(error, WireError) else "store"
        typer.echo(f"{record.position}  cannot be read ({reason}): {error}", err=as_json)
        return
    if as_json:
        sys.stdout.write(json.dumps(as_object(record, trajectory, turns=False)) + "\n")
    else:
        typer.echo(as_line(record, trajectory))
