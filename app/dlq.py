"""`rollstream dlq list | show | replay`: what nobody could read, why, and back to its topic after a fix."""

import re
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ..infra.deadletters import Letter, parse_position, read_letters
from ..infra.log import Partition, Position
from ..schemas import WireRecord
from ..schemas.errors import RollstreamError
from .context import Context, opened
from .output import AsJson, Pace, examples, print_json

if TYPE_CHECKING:
    from ..infra.replay import Outcome

dlq = typer.Typer(help="Look at dead letters, and replay them after a fix.", no_args_is_help=True)

Reasons = Annotated[list[str] | None, typer.Option("--reason", "-r", help="Only this reason. Repeatable.")]
Topics = Annotated[
    list[str] | None,
    typer.Option("--topic", "-t", help="Only from this topic, with or without the namespace. Repeatable."),
]
LONGEST = 4096
"""Bytes of a record that are dumped unless all are asked for."""


def register(cli: typer.Typer) -> None:
    cli.add_typer(dlq, name="dlq")


@dlq.command("list", epilog=examples("rollstream dlq list", "rollstream dlq list --reason unknown-schema --json"))
def list_letters(context: typer.Context, reason: Reasons = None, topic: Topics = None, as_json: AsJson = False) -> None:
    """List the dead letters: where each lies, when it came, from where, why; then how many of each reason."""
    counts: Counter[str] = Counter()
    letters: list[dict[str, object]] = []
    from .letters import as_line, as_object

    with opened(context) as here:
        for letter in _matching(here, reason, topic):
            counts[letter.reason] += 1
            if as_json:
                letters.append(as_object(letter))
            else:
                typer.echo(as_line(letter))
    if as_json:
        print_json({"letters": letters, "reasons": dict(counts)})
        return
    for name, number in counts.most_common():
        typer.echo(f"{number:>8,} {name}")
    if not counts:
        typer.echo("no dead letter")


@dlq.command(epilog=examples("rollstream dlq show 7", "rollstream dlq show 7 --whole", "rollstream dlq show 7 --json"))
def show(
    context: typer.Context,
    which: Annotated[str, typer.Argument(help="Its place, as `dlq list` tells it.")],
    whole: Annotated[bool, typer.Option("--whole", help=f"Dump every byte, not the first {LONGEST:,}.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show one dead letter: why it is here, its headers, what can be read of it, and its bytes."""
    from ..infra.replay import read_letter
    from .letters import as_object, as_page, as_reading

    with opened(context) as here:
        place = _place(which, here)
        letter = next((found for found in read_letters(here.log, here.names) if found.position == place), None)
        if letter is None:
            raise RollstreamError(f"no dead letter at {place}; `rollstream dlq list` tells the places")
        try:
            record: WireRecord | RollstreamError = read_letter(letter, here.names, here.reader_schemas, here.claims)
        except RollstreamError as error:
            record = error
    if as_json:
        value = None if letter.value is None else letter.value.hex()
        print_json(as_object(letter) | {"value": value, "now": as_reading(record)})
        return
    for line in as_page(letter, record, limit=None if whole else LONGEST):
        typer.echo(line)


@dlq.command(
    epilog=examples(
        "rollstream dlq replay --reason unknown-schema --dry-run",
        "rollstream dlq replay --reason unknown-schema --topic trajectories.number --yes",
        "rollstream dlq replay 7 9",
        "rollstream dlq replay --all --yes --json",
    )
)
def replay(  # one option a parameter is how commands are declared
    context: typer.Context,
    places: Annotated[list[str] | None, typer.Argument(help="Places, as `dlq list` tells them.")] = None,
    reason: Reasons = None,
    topic: Topics = None,
    everything: Annotated[bool, typer.Option("--all", help="Every letter.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tell what would be done, and do nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also what still cannot be read.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Also what was replayed before.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Append the original records to their topics again, after what was wrong with them is mended.

    Key, bytes and headers are the original ones; one header more tells the letter. What still cannot be read stays
    here, and so does what was replayed before. A sample that is replayed trains once, in a group of those replayed with
    it; one of a group that waits still joins it. Exits 1 when some were left.
    """
    from ..infra.replay import Replay

    if not (places or reason or topic or everything):
        raise typer.BadParameter("name the letters: places, --reason, --topic, or --all")
    with opened(context) as here:
        wanted = [_place(place, here) for place in places or ()]
        what = Replay(
            log=here.log,
            names=here.names,
            schemas=here.reader_schemas,
            claims=here.claims,
            force=force,
            again=again,
        )
        outcomes = _light(what.judge(_matching(here, reason, topic, wanted)))
        if missing := set(wanted) - {o.letter.position for o in outcomes}:
            raise RollstreamError(f"no such dead letter: {', '.join(map(str, sorted(missing)))}")
        ready = [o.letter.position for o in outcomes if not o.refusal]
        if ready and not dry_run:
            if not yes and not typer.confirm(f"replay {len(ready):,} of {len(outcomes):,} letters?", err=True):
                raise typer.Exit(1)
            left = [o for o in outcomes if o.refusal]
            outcomes = left + _light(_counted(what.append(_matching(here, None, None, ready)), len(ready)))
    _tell(outcomes, dry_run=dry_run, as_json=as_json)
    if any(o.refusal for o in outcomes):
        raise typer.Exit(1)


def _light(outcomes: "Iterator[Outcome]") -> "list[Outcome]":
    """Without the bytes: there may be many."""
    return [o._replace(letter=replace(o.letter, value=None)) for o in outcomes]


def _counted(outcomes: "Iterator[Outcome]", total: int) -> "Iterator[Outcome]":
    """Counts on one line of the terminal; nothing where standard error is none."""
    pace = Pace(0.2)
    for number, outcome in enumerate(outcomes, 1):
        if sys.stderr.isatty() and (pace.due() or number == total):
            typer.echo(f"\r{number:,} of {total:,} replayed" + "\n" * (number == total), nl=False, err=True)
        yield outcome


def _tell(outcomes: "list[Outcome]", *, dry_run: bool, as_json: bool) -> None:
    from .letters import as_object, short_place

    done, left = [o for o in outcomes if not o.refusal], [o for o in outcomes if o.refusal]
    if as_json:
        print_json(
            {
                "dry_run": dry_run,
                "replayed": [as_object(o.letter) | {"to": o.position and str(o.position)} for o in done],
                "left": [as_object(o.letter) | {"refusal": o.refusal} for o in left],
            }
        )
        return
    for outcome in done:
        where = f"-> {outcome.position}" if outcome.position else "would go"
        typer.echo(f"{short_place(outcome.letter.position):>7}  {outcome.letter.origin}  {where}")
    for outcome in left:
        typer.echo(
            f"{short_place(outcome.letter.position):>7}  {outcome.letter.origin or '-'}  left: {outcome.refusal}"
        )
    typer.echo(f"{len(done):,} {'would be replayed' if dry_run else 'replayed'}, {len(left):,} left")


def _matching(
    here: Context,
    reasons: Collection[str] | None,
    topics: Collection[str] | None,
    places: Collection[Position] = (),
) -> Iterator[Letter]:
    """The letters that all given criteria hold for."""
    wanted = set(places)
    for letter in read_letters(here.log, here.names):
        topic = letter.origin.partition.topic if letter.origin else ""
        if (
            (not wanted or letter.position in wanted)
            and (not reasons or letter.reason in reasons)
            and (not topics or topic in topics or topic.removeprefix(f"{here.names.namespace}.") in topics)
        ):
            yield letter


def _place(text: str, here: Context) -> Position:
    """Of a letter: OFFSET, PARTITION@OFFSET, or a whole position."""
    if match := re.fullmatch(r"(?:(\d{1,9})@)?(\d{1,18})", text):
        return Position(Partition(here.names.dead_letter, int(match[1] or 0)), int(match[2]))
    if position := parse_position(text):
        return position
    raise RollstreamError(f"expected the place of a dead letter, such as 7 or 1@7, found {text!r}")
