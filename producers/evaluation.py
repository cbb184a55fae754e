"""How good a policy is, apart from training: episodes of seeds of its own, on no topic."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from ..schemas import Sampling, Task, Trajectory
from .engine import Engine, EngineLost
from .environment import EnvironmentFactory
from .episode import Rendering, run_episode
from .limits import Limits
from .making import make_environment


async def evaluate_policy(
    open_engine: Callable[[], Engine],
    renderer: Rendering,
    environments: Mapping[str, EnvironmentFactory],
    *,
    sampling: Sampling,
    max_turns: Mapping[str, int],
    limits: Limits,
    seeds: Sequence[int],
    concurrency: int = 64,
) -> dict[str, float]:
    """Mean reward of each environment over one episode a seed. A failed episode counts as it is: reward 0.

    `open_engine` is called once; the engine is closed at the end. Raises `ValueError` where there are no seeds,
    `EngineLost` where the engine fails for good.
    """
    if not seeds:
        raise ValueError("expected at least one seed to evaluate on, found none")
    engine = await asyncio.to_thread(open_engine)
    places = asyncio.Semaphore(concurrency)

    async def play(name: str, seed: int) -> Trajectory:
        task = Task(
            task_id=f"evaluation.{name}.{seed}",
            environment=name,
            seed=seed,
            group_size=1,
            sampling=sampling,
            max_turns=max_turns.get(name, 0),
        )
        async with places:
            return await run_episode(task, 0, make_environment(environments, name), engine, renderer, limits)

    try:
        async with asyncio.TaskGroup() as group:
            played = {name: [group.create_task(play(name, seed)) for seed in seeds] for name in environments}
    except ExceptionGroup as errors:
        # All that play when it is lost raise it.
        for error in errors.exceptions:
            if isinstance(error, EngineLost):
                raise error from errors
        raise
    finally:
        await engine.close()
    return {name: sum(task.result().reward for task in tasks) / len(tasks) for name, tasks in played.items()}
