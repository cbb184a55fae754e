"""The command line: `rollstream COMMAND`. Nothing heavy is imported before a command runs.

main -> root options (--config, --set, --verbose) -> command -> Context (configuration, log, store) -> the floors below
"""

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from .. import __version__
from ..schemas.errors import MissingExtra, RollstreamError
from . import books, dlq, evaluate, inspect, lineage, local, roles, schemas, settings, topics
from .context import Options
from .demo import command as demo
from .logs import configure_logging
from .output import examples, flow_help

EXTRAS = {
    "torch": "train",
    "transformers": "train",
    "safetensors": "train",
    "vllm": "vllm",
    "textarena": "envs",
    "reasoning_gym": "envs",
    "gymnasium": "envs",
    "matplotlib": "plot",
}
"""Module -> the extra that brings it."""

cli = typer.Typer(
    name="rollstream",
    help="Rollouts for agent reinforcement learning, on a durable log.",
    epilog=examples(
        "rollstream demo",
        "rollstream up; rollstream topics apply -y; rollstream status",
        "rollstream -c run.toml -s trainer.lr=1e-5 train --model MODEL_DIRECTORY",
        "rollstream COMMAND --help",
    ),
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
            help="TOML file; else $ROLLSTREAM_CONFIG, else ./rollstream.toml. A local stack is found by itself.",
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
    configure_logging(verbose)
    context.obj = Options(config=config, overrides=tuple(overrides or ()))


for module in (demo, local, topics, schemas, roles, evaluate, inspect, lineage, books, dlq, settings):
    module.register(cli)
flow_help(cli)


def main() -> None:
    """Entry point of the console script. What can be foreseen to go wrong ends in one line and exit status 2."""
    try:
        cli()
    except RollstreamError as error:
        _fail(error)
    except ExceptionGroup as group:
        expected, others = group.split(RollstreamError)
        if others is not None or expected is None:
            raise
        _fail(_first(expected))
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRAS:
            raise
        _fail(MissingExtra(f"this command (module {module})", EXTRAS[module]))
    except OSError as error:
        if error.filename is None:
            raise
        _fail(f"{error.filename}: {error.strerror}")


def _first(group: ExceptionGroup[RollstreamError]) -> RollstreamError:
    """What the first of several parts failed of; the others ended with it."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, ExceptionGroup) else error


def _fail(error: object) -> NoReturn:
    sys.stderr.write(f"rollstream: {error}\n")
    sys.exit(2)


if __name__ == "__main__":
    main()
