"""`rollstream up | down | status`: the local stack in the background."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from .output import AsJson, examples, keep_quiet, print_json, tell

Folder = Annotated[Path, typer.Option("--dir", help="Folder of the stack: data, logs, configuration.")]
BrokerName = Literal["tansu", "kafka"]
HERE = Path(".rollstream")


def register(cli: typer.Typer) -> None:
    cli.command(
        epilog=examples(
            "rollstream up", "rollstream up --broker kafka --brokers 3", "rollstream up --dir /tmp/stack --json"
        )
    )(up)
    cli.command(epilog=examples("rollstream down", "rollstream down --dir /tmp/stack"))(down)
    cli.command(epilog=examples("rollstream status", "rollstream status --json"))(status)


def up(
    folder: Folder = HERE,
    broker: Annotated[BrokerName, typer.Option(help="Embedded, or Apache Kafka from $KAFKA_HOME.")] = "tansu",
    brokers: Annotated[int, typer.Option(help="Kafka only: 1 or 3.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Start the local stack, a broker and an object store, and leave it running.

    A stack that was down goes on with the log and the objects that it had; one that is up stays as it is. Its endpoints
    are written to DIR/rollstream.toml; commands find them there where DIR is the default, or with --config.
    """
    from ..infra import stack

    try:
        ends = stack.up(folder, broker=broker, brokers=brokers, progress=keep_quiet if as_json else tell)
    except stack.AlreadyUp as running:
        ends = running.endpoints
        if ends.broker != broker:
            raise
    config = folder / "rollstream.toml"
    if as_json:
        own = {"bootstrap": ends.bootstrap, "broker": ends.broker, "s3_url": ends.s3_url, "bucket": ends.bucket}
        print_json(own | {"config": str(config)})
    else:
        typer.echo(f"up: broker {ends.bootstrap} ({ends.broker}), S3 {ends.s3_url}")
        typer.echo(f"configuration in {config}; `rollstream down{_option(folder)}` ends it")


def down(folder: Folder = HERE, as_json: AsJson = False) -> None:
    """End the local stack; its log and objects stay."""
    from ..infra import stack

    ended = stack.down(folder, progress=keep_quiet if as_json else tell)
    if as_json:
        print_json({"ended": list(ended)})
    elif not ended:
        typer.echo(f"nothing was running in {folder}")


def status(folder: Folder = HERE, as_json: AsJson = False) -> None:
    """Show what of the local stack runs and answers. Exits 1 when something that should run does not."""
    from ..infra import stack

    components = stack.status(folder)
    if as_json:
        names = ("name", "pid", "port", "alive", "answering")
        rows = [{name: getattr(c, name) for name in names} for c in components]
        print_json({"up": bool(rows) and all(c.answering for c in components), "components": rows})
    elif not components:
        typer.echo(f"no stack in {folder}; `rollstream up{_option(folder)}` starts one")
    else:
        for c in components:
            state = "answers" if c.answering else "alive, does not answer" if c.alive else "DEAD"
            typer.echo(f"{c.name:<10} pid {c.pid or '-':<8} port {c.port:<6} {state}")
    if any(not c.answering for c in components):
        raise typer.Exit(1)


def _option(folder: Path) -> str:
    return "" if folder == HERE else f" --dir {folder}"
