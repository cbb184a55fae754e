"""`rollstream config show`: what the layers of configuration come to."""

import typer

from .context import opened
from .output import examples

config = typer.Typer(help="Look at the configuration.", no_args_is_help=True)


def register(cli: typer.Typer) -> None:
    cli.add_typer(config, name="config")


@config.command(epilog=examples("rollstream config show", "rollstream -c run.toml -s trainer.lr=1e-5 config show"))
def show(context: typer.Context) -> None:
    """Print every setting as TOML, as commands see it: file, environment and --set together; secrets hidden."""
    with opened(context) as here:
        typer.echo(here.config.show().rstrip())
