"""`rollstream dispatch | work | train | evaluate`: the long-running roles of a run, each a process of its own."""

import asyncio
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import wiring
from .context import Context, opened, print_json

if TYPE_CHECKING:
    from types import FrameType

    from ..schemas import Receipt, Task

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


def register(cli: typer.Typer) -> None:
    cli.command(epilog="Examples: rollstream dispatch  |  rollstream dispatch --groups 100")(dispatch)
    cli.command(epilog="Examples: rollstream work  |  rollstream -s worker.engine=vllm -s worker.device=cuda work")(
        work
    )
    cli.command(
        epilog="Examples: rollstream train --model DIR  |  rollstream -s trainer.objective=clone train --until-end"
    )(train)
    cli.command(epilog="Example: rollstream evaluate --episodes 200 --first-seed 1000000 --json")(evaluate)


def dispatch(
    context: typer.Context,
    groups: Annotated[int | None, typer.Option(help="Stop after so many groups; else dispatch.groups.")] = None,
) -> None:
    """Turn the configured environments into tasks, one group for every free slot.

    Groups in flight never exceed (trainer.max_staleness + 1) x trainer.groups_per_step.
    """
    from ..producers.dispatcher import Dispatcher

    with opened(context) as here:
        config = here.config
        dispatcher = Dispatcher(
            here.log,
            here.names,
            here.run,
            wiring.sources(config),
            max_staleness=config.trainer.max_staleness,
            groups_per_step=config.trainer.groups_per_step,
        )
        with on_signals(dispatcher.stop):
            sent = dispatcher.run(limit=groups or config.dispatch.groups, progress=_say_task)
        typer.echo(f"dispatched {sent} groups")


def work(context: typer.Context) -> None:
    """Serve tasks: play their episodes on one engine and append the trajectories to the log.

    Start as many as there are GPUs; they share the tasks. A worker that dies gives its unfinished tasks back.
    """
    with opened(context) as here, tempfile.TemporaryDirectory(prefix="rollstream-worker-") as scratch:
        asyncio.run(_serve(here, Path(scratch)))


async def _serve(here: Context, scratch: Path) -> None:
    from ..producers.policy import PolicyFollower
    from ..producers.worker import Worker

    follower = PolicyFollower(here.log, here.names, here.run, here.checkpoints, scratch)
    environments = wiring.environments(here.config)
    policy = await follower.first()
    engine = await asyncio.to_thread(wiring.open_engine, here.config, policy.directory, version=policy.version)
    try:
        settings = wiring.worker_settings(here.config)
        renderer = wiring.open_renderer(policy.directory)
        worker = Worker(here.log, here.names, environments, engine, renderer, follower, settings)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, worker.stop)
        typer.echo(f"serving {', '.join(environments)} from policy {policy.version}")
        await worker.run()
    finally:
        await engine.close()


def train(
    context: typer.Context,
    model: Annotated[Path | None, typer.Option(help="Hugging Face directory that a new run starts from.")] = None,
    until_end: Annotated[
        bool, typer.Option("--until-end", help="Stop at the present end of the log: a replay.")
    ] = False,
) -> None:
    """Train on the trajectories of the configured environments, and publish every policy.

    A run that has checkpoints goes on from the latest one, at the offsets inside it.
    """
    from ..consumers.trainer import Trainer

    with opened(context) as here, tempfile.TemporaryDirectory(prefix="rollstream-trainer-") as scratch:
        settings = wiring.trainer_settings(here.config, until_end=until_end)
        trainer = Trainer(
            here.log, here.names, here.run, here.checkpoints, settings, scratch=Path(scratch), on_step=_say_step
        )
        with on_signals(trainer.stop):
            place = trainer.run(model or here.config.trainer.model)
        typer.echo(f"run {here.run} stands at policy {place.version}, step {place.step}")


def evaluate(
    context: typer.Context,
    episodes: Annotated[int, typer.Option(help="Episodes of each environment, each with a seed of its own.")] = 200,
    first_seed: Annotated[int, typer.Option(help="Seeds go up from here; keep them apart from those of training.")] = 1
    << 30,
    version: Annotated[int | None, typer.Option(help="Policy version; else the latest.")] = None,
    as_json: AsJson = False,
) -> None:
    """Play episodes with a published policy, apart from training, and print the mean reward of each environment."""
    from ..producers.evaluation import evaluate_policy

    with opened(context) as here, tempfile.TemporaryDirectory(prefix="rollstream-evaluate-") as scratch:
        manifest = here.checkpoints.latest() if version is None else here.checkpoints.manifest(version)
        if manifest is None:
            raise typer.BadParameter(f"run {here.run} has no checkpoint yet")
        here.checkpoints.fetch(manifest, "weights/", Path(scratch) / "policy")
        scores = asyncio.run(
            evaluate_policy(
                lambda: wiring.open_engine(here.config, Path(scratch) / "policy/weights", version=manifest.version),
                wiring.open_renderer(Path(scratch) / "policy/weights"),
                wiring.environments(here.config),
                sampling=wiring.sampling(here.config),
                max_turns={name: e.max_turns for name, e in here.config.environments.items()},
                limits=wiring.limits(here.config.worker.timeouts),
                seeds=range(first_seed, first_seed + episodes),
                concurrency=here.config.worker.concurrency,
            )
        )
    if as_json:
        print_json({"version": manifest.version, "episodes": episodes, "reward": scores})
    else:
        for name, reward in scores.items():
            typer.echo(f"{name:<20} {reward:.4f}  ({episodes} episodes, policy {manifest.version})")


@contextmanager
def on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and Ctrl-C end the role in order; a second Ctrl-C ends it at once."""

    def handle(number: int, frame: "FrameType | None") -> None:
        stop()
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say_task(task: "Task") -> None:
    typer.echo(f"task {task.task_id} seed {task.seed}")


def _say_step(receipt: "Receipt") -> None:
    m = receipt.metrics
    typer.echo(
        f"step {receipt.step}  policy {receipt.version}  loss {receipt.loss:+.4f}  reward {m.get('reward', 0):.3f}  "
        f"samples {m.get('samples', 0):.0f}  staleness {m.get('staleness', 0):.2f}  "
        f"idle {m.get('seconds.idle', 0):.2f} s  learn {m.get('seconds.learn', 0):.2f} s"
    )
