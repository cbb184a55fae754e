"""The command line: `rollstream COMMAND`. Nothing heavy is imported before a command runs.

main -> root options (--config, --set, --verbose) -> command -> Context (configuration, log, store) -> the floors below
"""

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from .. import __version__
from ..schemas.errors import RollstreamError
from . import inspect, local, roles, topics
from .context import Options
from .demo import command as demo

cli = typer.Typer(
    name="rollstream",
    help="Rollout-as-a-service for agent reinforcement learning, on a durable log.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rollstream {__version__}")
        raise typer.Exit


@cli.callback()
def root(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            help="TOML file; else $ROLLSTREAM_CONFIG, ./rollstream.toml, ./.rollstream/rollstream.toml.",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", "-s", metavar="KEY=VALUE", help="Override one setting, e.g. trainer.lr=1e-5. Repeatable."
        ),
    ] = None,
    verbose: Annotated[
        int, typer.Option("--verbose", "-v", count=True, help="More log lines; twice for debugging.")
    ] = 0,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options that every command takes."""
    level = {0: logging.WARNING, 1: logging.INFO}.get(verbose, logging.DEBUG)
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    logging.getLogger("rollstream").setLevel(level)
    context.obj = Options(config=config, overrides=tuple(overrides or ()))


for module in (demo, local, topics, roles, inspect):
    module.register(cli)


def main() -> None:
    """Entry point of the console script. What rollstream raises on purpose ends in one line and exit status 2."""
    try:
        cli()
    except RollstreamError as error:
        sys.stderr.write(f"rollstream: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
