"""`rollstream schemas check | list`: whether versions may live on one log, and where which schema is known.

check   files and what was shipped, nothing else: it needs no broker, so that a CI can run it
list    release x topic x registry, by the id that stands in the framing
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from ..schemas import Problem, Shipped, UnknownSchema, full_problems, record_schemas, schema_id
from ..schemas.errors import RollstreamError
from ..schemas.shape import parse_text
from .context import Context, opened
from .output import AsJson, examples, print_json

schemas = typer.Typer(help="Check the schemas of the wire, and list where they are known.", no_args_is_help=True)


def register(cli: typer.Typer) -> None:
    cli.add_typer(schemas, name="schemas")


class Pair(NamedTuple):
    """Two versions of one record."""

    first: str
    second: str
    problems: tuple[Problem, ...]


@schemas.command(
    epilog=examples(
        "rollstream schemas check",
        "rollstream schemas check trajectory.v2.avsc",
        "rollstream schemas check *.avsc --json | jq .compatible",
    )
)
def check(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[FILE.avsc]...", help="Candidates for a next version.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare every two versions of a record ever shipped, and every candidate with all of them: FULL_TRANSITIVE.

    Each has to read what the other wrote, since logs keep old records and old releases write beside new ones. Exits 1
    where one cannot, and tells what to do.
    """
    candidates = [_candidate(file) for file in files or ()]
    pairs = list(_pairs(candidates))
    compatible = not any(pair.problems for pair in pairs)
    if as_json:
        print_json({"compatible": compatible, "pairs": [_as_object(pair) for pair in pairs]})
    else:
        _tell(pairs, candidates)
    if not compatible:
        raise typer.Exit(1)


def _candidate(file: Path) -> Shipped:
    text = file.read_text("utf-8")
    try:
        parse_text(text)
    except UnknownSchema as error:
        raise RollstreamError(f"{file}: {error}") from error
    return Shipped(schema_id(text), str(file), text)


def _pairs(candidates: Sequence[Shipped]) -> Iterator[Pair]:
    versions = [*record_schemas(), *candidates]
    for first, second in combinations(versions, 2):
        if _record(first) == _record(second):
            names = (first.name, second.name)
            yield Pair(*names, full_problems(first.text, second.text, names))


def _record(schema: Shipped) -> str:
    return str(parse_text(schema.text)["name"])


def _as_object(pair: Pair) -> dict[str, object]:
    problems = [{"problem": problem.found, "advice": problem.advice} for problem in pair.problems]
    return {"first": pair.first, "second": pair.second, "problems": problems}


def _tell(pairs: Sequence[Pair], candidates: Sequence[Shipped]) -> None:
    for pair in pairs:
        typer.echo(f"{pair.first} and {pair.second}: {'NOT compatible' if pair.problems else 'compatible'}")
        for problem in pair.problems:
            typer.echo(f"  {problem.found}\n    -> {problem.advice}")
    known = {_record(shipped) for shipped in record_schemas()}
    for candidate in candidates:
        if _record(candidate) not in known:
            typer.echo(f"{candidate.name}: {_record(candidate)} is a new record, there is nothing to compare it with")
    if not pairs:
        typer.echo(f"{len(record_schemas())} records, one version each: nothing to compare yet")


@dataclass(slots=True)
class Known:
    """One id of the framing, and who knows it."""

    name: str
    places: list[str] = field(default_factory=list[str])


@schemas.command(name="list", epilog=examples("rollstream schemas list", "rollstream schemas list --json"))
def list_schemas(context: typer.Context, as_json: AsJson = False) -> None:
    """List every schema by the id that stands in the framing: its name, and where it is known.

    `release`: this one carries it; `topic`: it stands on the log; `registry`: the Schema Registry has it.
    """
    with opened(context) as here:
        found = _collect(here)
    if as_json:
        print_json([{"id": number, "name": known.name, "known": known.places} for number, known in found.items()])
        return
    width = max(len(known.name) for known in found.values())
    typer.echo(f"{'id':>10}  {'name':<{width}}  known in")
    for number, known in found.items():
        typer.echo(f"{number:>10}  {known.name:<{width}}  {', '.join(known.places)}")


def _collect(here: Context) -> dict[int, Known]:
    from ..infra.schemabook import LogSchemas

    found = {shipped.id: Known(shipped.name, ["release"]) for shipped in record_schemas()}
    for number, text in sorted(LogSchemas(here.log, here.names).known().items()):
        found.setdefault(number, Known(_name(text))).places.append("topic")
    for version in here.registry.versions() if here.registry is not None else ():
        found.setdefault(version.id, Known(_name(version.text))).places.append("registry")
    return found


def _name(text: str) -> str:
    """As this release calls it; else the record's, for a version that this release does not carry."""
    try:
        parsed = parse_text(text)
    except UnknownSchema as error:
        return f"no schema: {error}"
    names = [shipped.name for shipped in record_schemas() if parse_text(shipped.text) == parsed]
    return names[0] if names else f"{parsed['name']}, of another release"
