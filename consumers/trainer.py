"""The trainer: replays trajectories into gradients under the staleness bound, and publishes every policy.

    reader -> admission -> assembler -> gatherer ==> step, of all ranks together:
        judge again      staleness at this very step, per sample
        score            advantages within each group; groups without variance are dropped by name
        learn            minibatches, one deterministic optimisation
        settle           every offset that the step took, trained or dropped
        publish          receipt, weights, optimizer, cursors, pointer, announcement

Progress is the cursor inside the checkpoint and nothing else. A trainer that dies between two publishes has done
nothing; its successor reads the same offsets and does the same step again.

One rank reads every partition by hand. Several (torchrun) are one trainer: one incarnation, one receipt a step, one
checkpoint. Each of them is a member of the consumer group with partitions, a reader and an assembler of its own;
progress and what was seen are the same on all.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..infra.checkpoints import WEIGHTS, Checkpoints, Manifest
from ..infra.claims import Claims
from ..infra.deadletters import DeadLetters
from ..infra.log import Log, LogError, Partition
from ..infra.models import load_weights, open_model
from ..infra.scan import find_ends
from ..infra.schemabook import open_schemas
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
from .overlap import part_groups
from .progress import Progress
from .publisher import NOWHERE, PATIENCE, SEEN, Companions, Place, Publisher
from .ranks import ALONE, Ranks
from .reader import Reader
from .retention import STATE, Retention
from .seen import Seen
from .staleness import StalenessGate
from .step import make_step

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """How a run is trained, besides how it learns."""

    environments: Mapping[str, float]
    """Whose trajectories are consumed, each with its share of the samples on any positive scale."""
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
    """Optimizer state goes into every n-th checkpoint and the last one; a restart goes back to the last that has it."""
    keep: int = 20
    """Newest checkpoints whose objects stay, besides the one a restart goes back to; 0 keeps all."""
    patience: float = PATIENCE
    """Seconds for which a publish is tried again while the store or the log is away."""
    buffer_bytes: int = 64 << 20
    device: str = "cpu"


class Trainer:
    """The trainer of a run, or one rank of it. `run` blocks until it is done or `stop` was called on any rank."""

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
        ranks: Ranks = ALONE,
        schemas: Schemas | None = None,
    ) -> None:
        """`scratch`: a folder for fetched checkpoints, this rank's own. `on_step`: called with each receipt once its
        policy is out, on rank 0. `schemas`: how records are read and written; absent: by the log's own topic."""
        self._log, self._names, self._run, self._checkpoints = log, names, run, checkpoints
        self._settings, self._scratch, self._on_step, self._ranks = settings, scratch, on_step, ranks
        self._schemas = schemas or open_schemas(log, names)
        self._stop = threading.Event()
        self._place = NOWHERE
        self._seen = Seen(max_staleness=settings.max_staleness)
        self._gate = StalenessGate(settings.max_staleness)
        self._progress = Progress()
        self._retention = Retention(checkpoints, settings.keep)
        self._publishing = 0.0

    def stop(self) -> None:
        """Finish the step under way, then return from `run`. Thread-safe; fine in a signal handler."""
        self._stop.set()

    def run(self, model: Path | None = None) -> Place:
        """Train; returns where the run stands.

        `model`: the Hugging Face directory that a new run starts from, and the reference of `LearnerSettings.kl`. A run
        that has checkpoints goes on from these. Raises `RollstreamError` where a model is needed and none is given,
        `Fenced`, `OffsetExpired`, `LogError`, `StoreError`, `CheckpointError`; `RankLost` where that happened to
        another rank.
        """
        # Before the claim: a trainer started by mistake must fence nobody.
        self._check(model)
        publisher = Publisher(
            self._log,
            self._names,
            self._run,
            self._checkpoints,
            self._schemas,
            patience=self._settings.patience,
            stopped=self._stop.is_set,
        )
        with contextlib.ExitStack() as opened:
            opened.enter_context(contextlib.closing(publisher))
            manifest = self._claim(publisher)
            if manifest:
                self._resume(manifest)
            # Joining the group takes seconds, in which the model is loaded.
            reader = opened.enter_context(self._reader())
            directory = self._fetch(manifest) if manifest else _given(model, self._run)
            learner = self._open(directory, model)
            companions = _companions(directory)
            if manifest:
                self._restore(manifest, learner)
                if self._leads:
                    publisher.announce(manifest)
            session = _Session(publisher=publisher, learner=learner, companions=companions)
            if not manifest:
                self._publish(Receipt(run=self._run, incarnation="", step=0, version=0, parent=0), session)
            self._train(reader, session)
        return self._place

    @property
    def _leads(self) -> bool:
        return self._ranks.rank == 0

    def _claim(self, publisher: Publisher) -> Manifest | None:
        """Rank 0 takes the run over; every rank gets where it goes on."""
        manifest = publisher.claim() if self._leads else None
        version = self._ranks.exchange(manifest.version if manifest else 0)[0]
        return manifest if self._leads or not version else self._checkpoints.manifest(version)

    def _check(self, model: Path | None) -> None:
        if model is None and self._settings.learner.kl:
            raise RollstreamError(
                f"run {self._run} penalises leaving its reference model (kl {self._settings.learner.kl:g}): expected "
                f"that model's directory, found none; name it, or set kl to 0"
            )
        if self._checkpoints.latest() is None:
            _given(model, self._run)

    def _open(self, directory: Path, model: Path | None) -> Learner:
        """A learner with the weights in `directory`; with a penalty its reference is `model`."""
        settings = self._settings
        if not settings.learner.kl or model is None:
            return Learner(open_model(directory, device=settings.device), settings.learner, self._ranks)
        learner = Learner(open_model(model, device=settings.device), settings.learner, self._ranks)
        load_weights(learner.model, directory)
        return learner

    def _fetch(self, manifest: Manifest) -> Path:
        self._checkpoints.fetch(manifest, "", self._folder(manifest))
        return self._folder(manifest) / WEIGHTS

    def _folder(self, manifest: Manifest) -> Path:
        return self._scratch / f"policy-{manifest.version}"

    def _resume(self, manifest: Manifest) -> None:
        self._place = Place(version=manifest.version, incarnation=manifest.incarnation, step=manifest.step)
        self._gate.version = manifest.version
        self._progress = Progress(manifest.cursors)

    def _restore(self, manifest: Manifest, learner: Learner) -> None:
        if STATE in manifest.files:
            self._seen.load((self._folder(manifest) / SEEN).read_bytes())
            if manifest.metadata.get("objective") == self._settings.learner.objective.value:
                learner.load(self._folder(manifest) / STATE)
        logger.info("run %s goes on from policy %d, step %d", self._run, manifest.version, manifest.step)

    def _reader(self) -> Reader:
        settings = self._settings
        topics = {self._names.trajectories(name): ratio for name, ratio in settings.environments.items()}
        ends = self._ranks.exchange(self._ends(topics))[0] if settings.until_end else None
        return Reader(
            self._log,
            self._shares(topics, ends),
            group=f"{self._names.namespace}.trainer.{self._run}",
            progress=self._progress,
            ends=ends,
            instance=f"{self._run}-{self._ranks.rank}" if self._ranks.size > 1 else None,
            buffer_bytes=settings.buffer_bytes,
        )

    def _train(self, reader: Reader, session: "_Session") -> None:
        with contextlib.closing(DeadLetters(self._log, self._names)) as letters:
            admission = Admission(
                gate=self._gate,
                dead_letters=letters,
                schemas=self._schemas,
                claims=Claims(lambda: self._checkpoints.store, self._names),
                objective=self._settings.learner.objective,
                vocabulary=session.learner.vocabulary,
                tokenizer=session.companions.tokenizer,
            )
            try:
                self._loop(reader, admission, session)
            except LogError:
                if self._leads:
                    # Of several ranks, whoever took the run takes the places in the consumer group, too: say who it is.
                    self._checkpoints.check(session.publisher.incarnation)
                raise

    def _ends(self, topics: Iterable[str]) -> dict[Partition, int]:
        """Where the log ends now."""
        partitions = [p for topic in topics for p in self._log.partitions(topic)]
        return find_ends(self._log, partitions)

    def _shares(self, topics: Mapping[str, float], ends: Mapping[Partition, int] | None) -> Mapping[str, float]:
        """Live: by the environments' ratios. A replay takes each topic by what it has left: all end together."""
        if ends is None:
            return topics
        marks = self._progress.marks(ends)
        left = {p: max(0, end - marks.get(p, 0)) for p, end in ends.items()}
        return {t: max(1.0, sum(n for p, n in left.items() if p.topic == t)) for t in topics}

    def _loop(self, reader: Reader, admission: Admission, session: "_Session") -> None:
        settings = self._settings
        # A cloned sample is compared with nobody, so it need not wait for company.
        least = 2 if settings.learner.reinforces else 1
        gatherer = Gatherer(
            reader,
            admission.admit,
            Assembler(self._seen, timeout=settings.group_timeout, min_samples=least),
            groups_per_step=settings.groups_per_step,
            replay=settings.until_end,
            stopped=lambda: self._stopped(session.publisher),
            ranks=self._ranks,
        )
        while settings.steps is None or self._place.step < settings.steps:
            gathered = gatherer.gather()
            if gathered is None:
                return
            self._step(gathered, session)
            if self._leads:
                self._retention.tidy(self._place.step)

    def _stopped(self, publisher: Publisher) -> bool:
        """Asked for all the time while nothing is published: raises `Fenced`, too."""
        if self._leads:
            publisher.check()
        return self._stop.is_set()

    def _step(self, gathered: Gathered, session: "_Session") -> None:
        began = time.monotonic()
        for bridges in self._ranks.exchange(self._progress.bridges()):
            self._progress.follow(bridges)
        own = replace(gathered, groups=part_groups(gathered.groups, self._ranks, self._seen))
        step = make_step(own, session.learner, self._gate, self._seen, self._ranks)
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
        self._publish(receipt, session)

    def _publish(self, receipt: Receipt, session: "_Session") -> None:
        began = time.monotonic()
        if self._leads:
            receipt = session.publisher.publish(
                receipt,
                session.learner,
                session.companions,
                cursors=self._progress.snapshot(),
                seen=self._seen if self._keeps_state(receipt.step) else None,
            )
        published = self._ranks.exchange(Place.of(receipt))[0]
        self._place, self._gate.version = published, published.version
        self._publishing = time.monotonic() - began
        if self._leads and self._on_step is not None:
            self._on_step(receipt)

    def _keeps_state(self, step: int) -> bool:
        """Every n-th step, and the one that is known to be this life's last."""
        return step % self._settings.state_every == 0 or step == self._settings.steps or self._stop.is_set()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Session:
    """What one `run` opened."""

    publisher: Publisher
    learner: Learner
    companions: Companions


def _companions(directory: Path) -> Companions:
    files = {p.name: p for p in directory.iterdir() if p.is_file() and ".safetensors" not in p.name}
    return Companions(files=files, tokenizer=fingerprint(open_tokenizer(directory)))


def _given(model: Path | None, run: str) -> Path:
    if model is None:
        raise RollstreamError(f"run {run} has no checkpoint yet: name a Hugging Face directory to start from")
    return model
