"""`rollstream topics plan | apply | verify`: what is declared, against what the cluster has."""

from typing import Annotated

import typer

from .context import Context, opened
from .output import AsJson, examples, print_json

topics = typer.Typer(help="Plan, apply and verify the topics that the configuration declares.", no_args_is_help=True)


def register(cli: typer.Typer) -> None:
    cli.add_typer(topics, name="topics")


@topics.command(epilog=examples("rollstream topics plan", "rollstream -c run.toml topics plan --json"))
def plan(context: typer.Context, as_json: AsJson = False) -> None:
    """Show what `apply` would change, and change nothing."""
    from ..infra.topics import plan as plan_changes

    with opened(context) as here:
        changes = plan_changes(here.log, here.topics())
    _show([str(change) for change in changes], as_json=as_json, empty="nothing to do")


@topics.command(epilog=examples("rollstream topics apply", "rollstream topics apply --yes"))
def apply(
    context: typer.Context,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Create and alter topics as declared, and publish the schemas (to the Schema Registry, too, if one is configured).

    Shows the plan first and asks.
    """
    from ..infra.topics import plan as plan_changes

    with opened(context) as here:
        changes = plan_changes(here.log, here.topics())
        _show([str(change) for change in changes], as_json=as_json, empty="topics are as declared")
        if changes and not yes and not typer.confirm("apply?", err=True):
            raise typer.Exit(1)
        apply_topics(here)


@topics.command(epilog=examples("rollstream topics verify", "rollstream topics verify --json"))
def verify(context: typer.Context, as_json: AsJson = False) -> None:
    """Compare only, for clusters that somebody else manages. Exits 1 on a difference."""
    from ..infra.topics import verify as find_differences

    with opened(context) as here:
        differences = find_differences(here.log, here.topics())
    _show([str(difference) for difference in differences], as_json=as_json, empty="topics are as declared")
    if differences:
        raise typer.Exit(1)


def apply_topics(here: Context) -> None:
    """Bring the cluster to what is declared, and publish the schemas of this release: first to the registry, if any.

    Raises `RegistryError` where it refuses one, or where its ids stand for other schemas on this log.
    """
    from ..infra.schemabook import publish_schemas
    from ..infra.topics import apply as apply_changes
    from ..infra.topics import plan as plan_changes

    apply_changes(here.log, plan_changes(here.log, here.topics()))
    ids = here.registry.register() if here.registry is not None else None
    publish_schemas(here.log, here.names, ids)


def _show(lines: list[str], *, as_json: bool, empty: str) -> None:
    if as_json:
        print_json(lines)
    else:
        typer.echo("\n".join(lines) or empty)
