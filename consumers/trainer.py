"""The trainer: replays trajectories into gradients under the staleness bound, and publishes every policy.

    reader -> admission -> assembler -> gatherer ==> step:
        judge again      staleness at this very step, per sample
        score            advantages within each group; groups without variance are dropped by name
        learn            minibatches, one deterministic optimisation
        settle           every offset that the step took, trained or dropped
        publish          receipt, weights, optimizer, cursors, pointer, announcement

Progress is the cursor inside the checkpoint and nothing else. A trainer that dies between two publishes has done nothing;
its successor reads the same offsets and does the same step again.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..infra.checkpoints import Checkpoints, Manifest
from ..infra.deadletters import DeadLetters
from ..infra.log import Log, Partition
from ..infra.models import open_model
from ..infra.schemabook import LogSchemas
from ..infra.tokenizers import fingerprint, open_tokenizer
from ..infra.topics import Names
from ..schemas import Receipt
from ..schemas.errors import RollstreamError
from ..schemas.registry import Schemas
from .arrivals import Admission
from .gatherer import Gathered, Gatherer
from .groups import Assembler
from .hyperparameters import LearnerSettings
from .learner import Learner
from .progress import Progress
from .publisher import NOWHERE, SEEN, STATE, WEIGHTS, Place, Publisher, resumable
from .reader import Reader
from .seen import Seen
from .staleness import StalenessGate
from .step import make_step

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """How a run is trained, besides how it learns."""

    environments: tuple[str, ...]
    """Whose trajectories are consumed."""
    learner: LearnerSettings = field(default_factory=LearnerSettings)
    groups_per_step: int = 32
    max_staleness: int | None = 2
    """None for cloning: any version, and none, trains."""
    group_timeout: float = 120.0
    """Seconds that a group waits for its missing samples."""
    steps: int | None = None
    """Stop when the run has made so many steps; None goes on."""
    until_end: bool = False
    """Stop at the present end of the log rather than wait for more: a replay."""
    state_every: int = 1
    """Optimizer and cursors go into every n-th checkpoint; a restart goes back to the last such one."""
    buffer_bytes: int = 64 << 20
    device: str = "cpu"


class Trainer:
    """One trainer process of a run. `run` blocks until it is done or `stop` was called."""

    def __init__(
        self,
        log: Log,
        names: Names,
        run: str,
        checkpoints: Checkpoints,
        settings: TrainerSettings,
        *,
        scratch: Path,
        on_step: Callable[[Receipt], None] | None = None,
    ) -> None:
        """`scratch`: a folder for fetched checkpoints. `on_step`: called with each receipt once its policy is public."""
        self._log, self._names, self._run, self._checkpoints = log, names, run, checkpoints
        self._settings, self._scratch, self._on_step = settings, scratch, on_step
        self._stop = threading.Event()
        self._place = NOWHERE
        self._seen = Seen(max_staleness=settings.max_staleness)
        self._gate = StalenessGate(settings.max_staleness)
        self._progress = Progress()
        self._publishing = 0.0

    def stop(self) -> None:
        """Finish the step under way, then return from `run`. Thread-safe; fine in a signal handler."""
        self._stop.set()

    def run(self, model: Path | None = None) -> Place:
        """Train; returns where the run stands. `model`: a Hugging Face directory that a new run starts from; a run that
        has checkpoints goes on from these.

        Raises `Fenced`, `OffsetExpired`, `LogError`, `StoreError`, `CheckpointError`.
        """
        manifest = resumable(self._checkpoints)
        directory = self._fetch(manifest) if manifest else _given(model, self._run)
        learner = Learner(open_model(directory, device=self._settings.device), self._settings.learner)
        static = {p.name: p for p in directory.iterdir() if p.is_file() and ".safetensors" not in p.name}
        tokenizer = fingerprint(open_tokenizer(directory))
        publisher = Publisher(
            self._log, self._names, self._run, self._checkpoints, static=static, fingerprint=tokenizer
        )
        with contextlib.closing(publisher):
            publisher.claim()
            if manifest:
                self._restore(manifest, learner)
                publisher.announce(manifest)
            else:
                self._publish(Receipt(run=self._run, incarnation="", step=0, version=0, parent=0), learner, publisher)
            self._train(learner, publisher, tokenizer)
        return self._place

    def _fetch(self, manifest: Manifest) -> Path:
        self._checkpoints.fetch(manifest, "", self._folder(manifest))
        return self._folder(manifest) / WEIGHTS

    def _folder(self, manifest: Manifest) -> Path:
        return self._scratch / f"policy-{manifest.version}"

    def _restore(self, manifest: Manifest, learner: Learner) -> None:
        self._place = Place(version=manifest.version, incarnation=manifest.incarnation, step=manifest.step)
        self._gate.version = manifest.version
        self._progress = Progress(manifest.cursors)
        if STATE in manifest.files:
            self._seen.load((self._folder(manifest) / SEEN).read_bytes())
            if manifest.metadata.get("objective") == self._settings.learner.objective.value:
                learner.load(self._folder(manifest) / STATE)
        logger.info("run %s goes on from policy %d, step %d", self._run, manifest.version, manifest.step)

    def _train(self, learner: Learner, publisher: Publisher, tokenizer: str) -> None:
        settings = self._settings
        topics = [self._names.trajectories(e) for e in settings.environments]
        partitions = [p for topic in topics for p in self._log.partitions(topic)]
        ends = {p: end for p, (_, end) in self._log.bounds(partitions).items()} if settings.until_end else None
        with contextlib.closing(DeadLetters(self._log, self._names)) as letters:
            admission = Admission(
                gate=self._gate,
                dead_letters=letters,
                schemas=Schemas(lookup=LogSchemas(self._log, self._names)),
                objective=settings.learner.objective,
                vocabulary=learner.vocabulary,
                tokenizer=tokenizer,
            )
            reader = Reader(
                self._log,
                topics,
                group=f"{self._names.namespace}.trainer.{self._run}",
                progress=self._progress,
                admit=admission.admit,
                buffer_bytes=settings.buffer_bytes,
            )
            with reader:
                self._loop(reader, ends, learner, publisher)

    def _loop(
        self, reader: Reader, ends: Mapping[Partition, int] | None, learner: Learner, publisher: Publisher
    ) -> None:
        settings = self._settings
        assembler = Assembler(self._seen, timeout=settings.group_timeout)
        gatherer = Gatherer(
            reader, assembler, groups_per_step=settings.groups_per_step, ends=ends, stopped=self._stop.is_set
        )
        while settings.steps is None or self._place.step < settings.steps:
            gathered = gatherer.gather()
            if gathered is None:
                return
            self._step(gathered, learner, publisher)

    def _step(self, gathered: Gathered, learner: Learner, publisher: Publisher) -> None:
        began = time.monotonic()
        step = make_step(gathered, learner, self._gate, self._seen)
        self._progress.settle(step.settlement.positions())
        seconds = {
            "seconds.idle": gathered.idle,
            "seconds.learn": time.monotonic() - began,
            "seconds.publish": self._publishing,
        }
        receipt = Receipt(
            run=self._run,
            incarnation="",
            step=self._place.step + 1,
            version=0,
            parent=self._place.version,
            parent_incarnation=self._place.incarnation,
            consumed=step.settlement.consumed(),
            groups=step.groups,
            loss=step.result.loss,
            metrics=step.metrics | seconds,
        )
        self._publish(receipt, learner, publisher)

    def _publish(self, receipt: Receipt, learner: Learner, publisher: Publisher) -> None:
        began = time.monotonic()
        published = publisher.publish(
            receipt,
            learner,
            cursors=self._progress.snapshot(),
            seen=self._seen,
            with_state=receipt.step % self._settings.state_every == 0,
        )
        self._place = Place(version=published.version, incarnation=published.incarnation, step=published.step)
        self._gate.version = published.version
        self._publishing = time.monotonic() - began
        if self._on_step is not None:
            self._on_step(published)


def _given(model: Path | None, run: str) -> Path:
    if model is None:
        raise RollstreamError(f"run {run} has no checkpoint yet: name a Hugging Face directory to start from")
    return model
