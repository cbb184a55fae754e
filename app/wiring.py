"""From the configuration to the parts: one function a part, each importing what it opens and nothing else."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..infra.config import Config, EnvironmentSection, TimeoutSection
from ..schemas import Sampling

if TYPE_CHECKING:
    from ..consumers.hyperparameters import LearnerSettings
    from ..consumers.trainer import TrainerSettings
    from ..infra.kafka import KafkaLog
    from ..producers import EnvironmentFactory
    from ..producers.dispatcher import Source
    from ..producers.engine import Engine
    from ..producers.limits import Limits
    from ..producers.rendering import Renderer
    from ..producers.worker import WorkerSettings


def open_log(config: Config) -> "KafkaLog":
    """The log of the `[kafka]` section; its `settings` win over everything derived here."""
    from ..infra.kafka import KafkaLog

    kafka = config.kafka
    settings = {
        "group.protocol": kafka.group_protocol,
        "compression.type": kafka.compression,
        "queue.buffering.max.kbytes": str(max(1, kafka.buffer_bytes // 1024)),
        "message.max.bytes": str(kafka.max_record_bytes),
    }
    return KafkaLog(kafka.bootstrap, settings=settings | dict(kafka.settings))


def sampling(config: Config) -> Sampling:
    return Sampling(
        temperature=config.sampling.temperature,
        max_tokens=config.sampling.max_tokens,
        top_p=config.sampling.top_p,
        top_k=config.sampling.top_k,
    )


def sources(config: Config) -> "dict[str, Source]":
    """What the dispatcher makes tasks of."""
    from ..producers.dispatcher import Source

    return {
        name: Source(
            environment=name,
            ratio=section.ratio,
            group_size=section.group_size,
            first_seed=section.seeds[0],
            last_seed=section.seeds[1],
            sampling=sampling(config),
            max_turns=section.max_turns,
        )
        for name, section in config.environments.items()
    }


def environments(config: Config) -> "dict[str, EnvironmentFactory]":
    """A factory for each environment. Raises `UnusableEnvironment`, `MissingExtra`."""
    from ..producers.environments import open_environment

    def opened(name: str, section: EnvironmentSection) -> "EnvironmentFactory":
        return open_environment(section.adapter, section.game or name, section.options)

    return {name: opened(name, section) for name, section in config.environments.items()}


def open_engine(config: Config, model: Path, *, version: int) -> "Engine":
    """The engine of the `[worker]` section over a model directory.

    Its seed differs from process to process: workers of one run must not draw the same numbers.
    """
    from ..producers.engines import open_engine

    worker = config.worker
    options: dict[str, object] = {
        "device": worker.device,
        "dtype": worker.dtype,
        "version": version,
        "seed": (config.run.seed * 1_000_003 + os.getpid()) % (1 << 31),
        "max_batch": worker.concurrency,
        "end_ids": open_renderer(model).end_ids,
    }
    if worker.context is not None:
        options["context"] = worker.context
    return open_engine(worker.engine, model, **options)


def open_renderer(model: Path) -> "Renderer":
    from ..producers.rendering import Renderer

    return Renderer.open(model)


def limits(timeouts: TimeoutSection) -> "Limits":
    from ..producers.limits import Limits

    return Limits(
        init_timeout=timeouts.init,
        step_timeout=timeouts.step,
        generate_timeout=timeouts.generate,
        close_timeout=timeouts.close,
    )


def worker_settings(config: Config) -> "WorkerSettings":
    from ..producers.worker import WorkerSettings

    worker = config.worker
    own = {n: limits(e.timeouts) for n, e in config.environments.items() if e.timeouts is not None}
    return WorkerSettings(
        concurrency=worker.concurrency,
        limits=limits(worker.timeouts),
        own_limits=own,
        pools=worker.pools.model_dump(),
        max_lag=worker.max_lag,
        spill=worker.spill / f"{config.run.namespace}.{config.run.name}",
        spill_bytes=worker.spill_bytes,
    )


def learner_settings(config: Config) -> "LearnerSettings":
    from ..consumers.hyperparameters import Advantage, Aggregation, LearnerSettings, Objective

    trainer = config.trainer
    return LearnerSettings(
        objective=Objective(trainer.objective),
        advantage=Advantage(trainer.advantage),
        aggregation=Aggregation(trainer.aggregation),
        lr=trainer.lr,
        warmup=trainer.warmup,
        betas=trainer.betas,
        weight_decay=trainer.weight_decay,
        grad_clip=trainer.grad_clip,
        clip_low=trainer.clip_low,
        clip_high=trainer.clip_high,
        importance_cap=trainer.importance_cap,
        entropy=trainer.entropy,
        kl=trainer.kl,
        minibatches=trainer.minibatches,
        epochs=trainer.epochs,
        min_informative=trainer.min_informative,
        micro_batch_tokens=trainer.micro_batch_tokens,
        bf16=trainer.bf16,
        seed=trainer.seed,
    )


def trainer_settings(config: Config, *, until_end: bool = False) -> "TrainerSettings":
    from ..consumers.hyperparameters import Objective
    from ..consumers.trainer import TrainerSettings

    trainer, learner = config.trainer, learner_settings(config)
    return TrainerSettings(
        environments={name: e.ratio * e.group_size for name, e in config.environments.items()},
        learner=learner,
        groups_per_step=trainer.groups_per_step,
        max_staleness=None if learner.objective is Objective.CLONE else trainer.max_staleness,
        group_timeout=trainer.group_timeout,
        steps=trainer.steps,
        until_end=until_end,
        state_every=trainer.checkpoint_every,
        keep=trainer.keep,
        patience=trainer.patience,
        buffer_bytes=trainer.buffer_bytes,
        device=trainer.device,
    )
