"""The scripted phase: players fill the topic of one game with trajectories, for a warm start by replay.

    rollstream demo-play number --episodes 30000

Ids follow from the episode's number, so that a second run goes on where the first one ended, and nothing is there
twice.
"""

import asyncio
import time
from typing import Annotated

import typer

from ...infra.scan import scan
from ...producers.delivery import Delivery
from ...producers.limits import Limits
from ...producers.players import play_scripted
from ...producers.rendering import Renderer
from ...schemas import Task, WireError, parse_headers
from ...schemas.errors import RollstreamError
from .. import wiring
from ..context import Context, opened
from .players import PLAYERS

FIRST_SEED = 1_000_000
"""Seeds of the scripted phase lie above those of the online phase."""
AT_ONCE = 64


def play(
    context: typer.Context,
    game: Annotated[str, typer.Argument(help="number or lake.")],
    episodes: Annotated[int, typer.Option(min=1, help="Episodes on the topic at the end.")] = 1000,
) -> None:
    """Let scripted players fill a game's topic."""
    with opened(context) as here:
        asyncio.run(_fill(here, game, episodes))


async def _fill(here: Context, game: str, episodes: int) -> None:
    model, environments = here.config.worker.model, wiring.environments(here.config)
    if model is None:
        raise RollstreamError("worker.model: the scripted players need the directory of the model's tokenizer")
    if game not in PLAYERS or game not in environments:
        raise RollstreamError(f"no scripted players for {game!r}: expected one of {', '.join(PLAYERS)}, configured")
    renderer, factory = Renderer.open(model), environments[game]
    limits = Limits(max_turns=here.config.environments[game].max_turns)
    there = _found(here, game)
    todo = iter([n for n in range(episodes) if _task(here.run, game, n).task_id not in there])
    began = time.monotonic()
    with here.log.writer() as writer:
        delivery = Delivery(writer, here.names, schemas=here.role_schemas, claims=here.claims)

        async def player() -> None:
            for number in todo:
                task = _task(here.run, game, number)
                trajectory = await play_scripted(task, 0, factory(), PLAYERS[game](task, 0), renderer, limits)
                await delivery.deliver(trajectory)

        await asyncio.gather(*(player() for _ in range(AT_ONCE)))
    states = ", ".join(f"{count:,} {state}" for state, count in sorted(delivery.counts.items())) or "nothing to do"
    typer.echo(f"{game}: {states} in {time.monotonic() - began:.1f} s")


def _task(run: str, game: str, number: int) -> Task:
    return Task(task_id=f"{run}-scripted.{game}.{number:08d}", environment=game, seed=FIRST_SEED + number, group_size=1)


def _found(here: Context, game: str) -> set[str]:
    """Group ids that are on the topic already."""
    found: set[str] = set()
    for record in scan(here.log, here.log.partitions(here.names.trajectories(game))):
        try:
            found.add(parse_headers(record.headers).group_id or "")
        except WireError:
            continue
    return found
