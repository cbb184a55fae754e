"""How commands speak: the options and habits that they share.

standard output     what was asked for: lines for people, or with --json one document for scripts
standard error      progress, log lines, errors
"""

import inspect
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


def examples(*lines: str) -> str:
    """The end of a command's help: one example a line."""
    return "\n".join(("Examples:", *(f"$ {line}" for line in lines)))


def flow_help(cli: typer.Typer) -> None:
    """Let the paragraphs of every command's docstring fill the terminal, whatever the width of the source."""
    for command in cli.registered_commands:
        paragraphs = inspect.cleandoc(getattr(command.callback, "__doc__", None) or "").split("\n\n")
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    for group in cli.registered_groups:
        if group.typer_instance is not None:
            flow_help(group.typer_instance)


def print_json(value: Mapping[str, object] | Sequence[object]) -> None:
    """One JSON document on standard output, for scripts."""
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")


def tell(message: str) -> None:
    """A line for people on standard output."""
    typer.echo(message)


def keep_quiet(message: str) -> None:
    """Takes the place of `tell` where a script reads."""


class Pace:
    """Says when the next line of progress is due, so that fast work does not flood the terminal."""

    def __init__(self, seconds: float, *, at_once: bool = False) -> None:
        """`at_once`: the first line need not wait."""
        self._seconds = seconds
        self._last = float("-inf") if at_once else time.monotonic()

    def due(self) -> bool:
        """Whether `seconds` passed since the last time this was true."""
        now = time.monotonic()
        if now - self._last < self._seconds:
            return False
        self._last = now
        return True
