"""`rollstream dispatch | work | train`: the long-running roles of a run, each a process of its own.

SIGTERM, Ctrl-C --> finish what is under way, give back the rest --> exit 0
a second Ctrl-C --> at once; nothing is lost by it
"""

import asyncio
import contextlib
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..schemas.errors import RollstreamError
from . import wiring
from .context import Context, opened
from .output import Pace, examples

if TYPE_CHECKING:
    from types import FrameType

    from ..producers.engine import Engine
    from ..producers.worker import Worker
    from ..schemas import Receipt, Schemas, Task

TELL_EVERY = 5.0
"""Seconds between two lines of progress."""


def register(cli: typer.Typer) -> None:
    cli.command(epilog=examples("rollstream dispatch", "rollstream dispatch --groups 100"))(dispatch)
    cli.command(epilog=examples("rollstream work", "rollstream -s worker.engine=vllm -s worker.device=cuda work"))(work)
    cli.command(
        epilog=examples(
            "rollstream train --model MODEL_DIRECTORY",
            "rollstream -s trainer.steps=500 train",
            "rollstream -s trainer.objective=clone train --until-end",
            "torchrun --nproc-per-node 4 -m rollstream.app.main -c run.toml train",
        )
    )(train)


def dispatch(
    context: typer.Context,
    groups: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many groups; else after dispatch.groups, or never.")
    ] = None,
) -> None:
    """Turn the configured environments into tasks, one group for every free slot.

    Groups in flight never exceed (trainer.max_staleness + 1) x trainer.groups_per_step.
    """
    from ..producers.dispatcher import Dispatcher

    with opened(context) as here:
        here.expect_environments()
        config = here.config
        dispatcher = Dispatcher(
            here.log,
            here.names,
            here.run,
            wiring.sources(config),
            max_staleness=config.trainer.max_staleness,
            groups_per_step=config.trainer.groups_per_step,
            schemas=here.role_schemas,
        )
        with on_signals(dispatcher.stop):
            sent = dispatcher.run(limit=groups or config.dispatch.groups, progress=_task_teller())
        typer.echo(f"dispatched {sent:,} groups")


def work(context: typer.Context) -> None:
    """Serve tasks: play their episodes on one engine and append the trajectories to the log.

    Start as many as there are GPUs; they share the tasks. A worker that dies gives its unfinished tasks back.
    """
    with opened(context) as here, tempfile.TemporaryDirectory(prefix="rollstream-worker-") as scratch:
        here.expect_environments()
        schemas = here.role_schemas
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(_serve(here, schemas, Path(scratch)))


async def _serve(here: Context, schemas: "Schemas", scratch: Path) -> None:
    from ..producers.policy import PolicyFollower
    from ..producers.worker import Worker

    _on_loop_signals(_canceller())
    follower = PolicyFollower(here.log, here.names, here.run, here.checkpoints, scratch, schemas)
    environments = wiring.environments(here.config)
    policy = await follower.first()
    engine = await asyncio.to_thread(wiring.open_engine, here.config, policy.directory, version=policy.version)
    try:
        settings = wiring.worker_settings(here.config)
        renderer = wiring.open_renderer(policy.directory)
        worker = Worker(here.log, here.names, environments, engine, renderer, follower, settings, schemas, here.claims)
        _on_loop_signals(worker.stop)
        typer.echo(f"serving {', '.join(environments)} from policy {policy.version}")
        teller = asyncio.create_task(_tell_work(worker, engine))
        try:
            await worker.run()
        finally:
            teller.cancel()
    finally:
        await engine.close()


def _canceller() -> Callable[[], object]:
    """Ends this task where it stands: before there is a worker nothing is under way."""
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("expected to run in an asyncio task, found none")
    return task.cancel


def _on_loop_signals(stop: Callable[[], object]) -> None:
    """As `on_signals`, for the running event loop."""
    loop = asyncio.get_running_loop()

    def handle() -> None:
        stop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle)


async def _tell_work(worker: "Worker", engine: "Engine") -> None:
    """A line every few seconds in which something was done."""
    before, began = 0, time.monotonic()
    while True:
        await asyncio.sleep(TELL_EVERY)
        done, now = sum(worker.counts.values()), time.monotonic()
        if done != before:
            states = ", ".join(f"{state} {count:,}" for state, count in sorted(worker.counts.items()))
            typer.echo(f"{(done - before) / (now - began):.1f} trajectories/s  policy {engine.version}  {states}")
        before, began = done, now


def train(
    context: typer.Context,
    model: Annotated[
        Path | None, typer.Option(help="Hugging Face directory that a new run starts from; else trainer.model.")
    ] = None,
    until_end: Annotated[
        bool, typer.Option("--until-end", help="Stop at the present end of the log: a replay.")
    ] = False,
) -> None:
    """Train on the trajectories of the configured environments, and publish every policy.

    A run that has checkpoints goes on from the latest one, at the offsets inside it. Prints a line a step.

    Under torchrun every rank is a member of the run's consumer group and has whole groups of its own; gradients are
    added up, and rank 0 publishes. A restart may have another number of ranks. Alone it reads every partition itself.
    """
    with opened(context) as here, tempfile.TemporaryDirectory(prefix="rollstream-trainer-") as scratch:
        here.expect_environments()
        start = model or here.config.trainer.model
        if start is not None and not (start / "config.json").is_file():
            key = "--model" if model else "trainer.model"
            raise RollstreamError(f"{key}: expected a Hugging Face directory with a config.json, found {start}")

        from ..consumers.ranks import open_ranks
        from ..consumers.trainer import Trainer

        settings = wiring.trainer_settings(here.config, until_end=until_end)
        with open_ranks(settings.device, publish=settings.patience) as (ranks, device):
            trainer = Trainer(
                here.log,
                here.names,
                here.run,
                here.checkpoints,
                replace(settings, device=device),
                scratch=Path(scratch),
                on_step=_tell_step,
                ranks=ranks,
                schemas=here.role_schemas,
            )
            with on_signals(trainer.stop):
                place = trainer.run(start)
            if ranks.rank == 0:
                typer.echo(f"run {here.run} stands at policy {place.version}, step {place.step}")


@contextlib.contextmanager
def on_signals(stop: Callable[[], None]) -> Generator[None]:
    """SIGTERM and Ctrl-C end the role in order; a second one ends it at once."""

    def handle(number: int, frame: "FrameType | None") -> None:
        stop()
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _task_teller() -> "Callable[[Task], None]":
    pace, counts = Pace(TELL_EVERY, at_once=True), Counter[str]()

    def tell(task: "Task") -> None:
        counts[task.environment] += 1
        if pace.due():
            shares = ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))
            typer.echo(f"dispatched {counts.total():,} groups ({shares}), last {task.task_id} with seed {task.seed}")

    return tell


def _tell_step(receipt: "Receipt") -> None:
    m = receipt.metrics
    typer.echo(
        f"step {receipt.step}  policy {receipt.version}  loss {receipt.loss:+.4f}  reward {m.get('reward', 0):.3f}  "
        f"samples {m.get('samples', 0):.0f}  staleness {m.get('staleness', 0):.2f}  "
        f"idle {m.get('seconds.idle', 0):.2f} s  learn {m.get('seconds.learn', 0):.2f} s"
    )
