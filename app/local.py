"""`rollstream up | down | status`: the local stack in the background."""

from pathlib import Path
from typing import Annotated

import typer

from .context import print_json

Folder = Annotated[Path, typer.Option("--dir", help="Folder of the stack: data, logs, configuration.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
HERE = Path(".rollstream")


def register(cli: typer.Typer) -> None:
    cli.command(
        epilog="Examples: rollstream up  |  rollstream up --broker kafka --brokers 3  |  rollstream up --dir /tmp/a --json"
    )(up)
    cli.command(epilog="Example: rollstream down --dir .rollstream")(down)
    cli.command(epilog="Examples: rollstream status  |  rollstream status --json")(status)


def up(
    folder: Folder = HERE,
    broker: Annotated[str, typer.Option(help="tansu (embedded), or kafka (from $KAFKA_HOME).")] = "tansu",
    brokers: Annotated[int, typer.Option(help="Kafka only: 1 or 3.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Start the local stack, a broker and an object store, and leave it running.

    A stack that was down goes on with the log and the objects that it had. Its endpoints are written to
    DIR/rollstream.toml, where the other commands find them.
    """
    from ..infra import stack

    if broker not in ("tansu", "kafka"):
        raise typer.BadParameter(f"expected tansu or kafka, found {broker!r}", param_hint="--broker")
    say = (lambda _: None) if as_json else typer.echo
    endpoints = stack.up(folder, broker=broker, brokers=brokers, progress=say)
    if as_json:
        print_json(
            {
                "bootstrap": endpoints.bootstrap,
                "broker": endpoints.broker,
                "s3_url": endpoints.s3_url,
                "bucket": endpoints.bucket,
                "config": str(folder / "rollstream.toml"),
            }
        )
    else:
        typer.echo(f"up: broker {endpoints.bootstrap} ({endpoints.broker}), S3 {endpoints.s3_url}")
        typer.echo(f"configuration in {folder / 'rollstream.toml'}; `rollstream down` ends it")


def down(folder: Folder = HERE, as_json: AsJson = False) -> None:
    """End the local stack; its log and objects stay."""
    from ..infra import stack

    ended = stack.down(folder, progress=(lambda _: None) if as_json else typer.echo)
    if as_json:
        print_json({"ended": list(ended)})
    elif not ended:
        typer.echo(f"nothing was running in {folder}")


def status(folder: Folder = HERE, as_json: AsJson = False) -> None:
    """Show what of the local stack runs and answers. Exits 1 when something that should run does not."""
    from ..infra import stack

    components = stack.status(folder)
    rows = [
        {"name": c.name, "pid": c.pid, "port": c.port, "alive": c.alive, "answering": c.answering} for c in components
    ]
    if as_json:
        print_json({"up": bool(rows), "components": rows})
    elif not rows:
        typer.echo(f"no stack in {folder}; `rollstream up` starts one")
    for row in rows if not as_json else ():
        state = "answers" if row["answering"] else "alive, does not answer" if row["alive"] else "DEAD"
        typer.echo(f"{row['name']:<12} pid {row['pid']:<8} port {row['port']:<6} {state}")
    if any(not row["answering"] for row in rows):
        raise typer.Exit(1)
