"""The trainer's side of the checkpoints: where a run goes on, and how a step becomes visible.

    step -> receipt to the ledger -> objects -> manifest -> pointer -> announcement on rollstream.policy
            (write-ahead: it counts only once the manifest with its incarnation and version is there)

Policy versions are never used again: the next one lies above every manifest and every receipt there ever was.

A store or a log that is away is waited for: each part of a publish may be repeated, with the same version.
"""

import logging
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError

from ..infra.checkpoints import WEIGHTS, CheckpointError, Checkpoints, Fenced, Manifest, manifest_digest
from ..infra.cursors import Cursors
from ..infra.log import Log, LogError, await_position
from ..infra.store import StoreError
from ..infra.topics import Names
from ..infra.weights import save_weights
from ..schemas import PolicyUpdate, Receipt, Schemas, encode
from .circumstances import tell_circumstances
from .learner import Learner
from .ledger import Ledger
from .retention import STATE, resumable
from .seen import Seen
from .watch import Watch

logger = logging.getLogger(__name__)

SEEN = "trainer/seen.npy"
PATIENCE = 600.0
"""Seconds for which a publish is tried again while the store or the log is away."""
LONGEST_PAUSE = 10.0

T = TypeVar("T")
Files = Mapping[str, Path | bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where on the lineage a run stands."""

    version: int
    incarnation: str
    step: int

    @classmethod
    def of(cls, receipt: Receipt) -> "Place":
        """Where the run stands once this receipt's policy is out."""
        return cls(version=receipt.version, incarnation=receipt.incarnation, step=receipt.step)


NOWHERE = Place(version=0, incarnation="", step=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Companions:
    """What goes into every checkpoint beside the weights, the same over a run."""

    files: Mapping[str, Path]
    """Name -> file: the model's configuration, the tokenizer."""
    tokenizer: str
    """Its fingerprint."""


class Publisher:
    """Publishes one incarnation's steps. Raises `Fenced` once another trainer took the run."""

    def __init__(
        self,
        log: Log,
        names: Names,
        run: str,
        checkpoints: Checkpoints,
        schemas: Schemas | None = None,
        *,
        patience: float = PATIENCE,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """`patience` (s): how long a publish waits for a store or a log that is away; not at all once `stopped`."""
        self.incarnation = uuid.uuid4().hex[:12]
        self._names, self._run, self._checkpoints, self._schemas = names, run, checkpoints, schemas
        self._patience, self._stopped = patience, stopped
        self._watch = Watch(lambda: checkpoints.check(self.incarnation))
        self._writer = log.writer()
        self._ledger = Ledger(log, names, run, schemas, writer=self._writer)
        self._next = 0

    def claim(self) -> Manifest | None:
        """Prove the store, take the run over from an older trainer, and find where the run goes on; None if it is new.

        Raises `StoreError`, `LogError`, `CheckpointError`.
        """
        self._checkpoints.probe()
        self._checkpoints.claim(self.incarnation)
        # Only now: before the claim the older trainer could still publish a step that this one would pass over.
        self._next = max(self._checkpoints.next_version(), self._ledger.last_version() + 1)
        return resumable(self._checkpoints)

    def check(self) -> None:
        """Call it while idle, as often as you like: it looks every few seconds, and never waits. Raises `Fenced`."""
        self._watch.check()

    def publish(
        self,
        receipt: Receipt,
        learner: Learner,
        companions: Companions,
        *,
        cursors: Cursors,
        seen: Seen | None,
    ) -> Receipt:
        """Make a step visible. `receipt` comes without run, version and incarnation.

        With `seen` the optimizer's state goes along, so that a restart can go on from here. Raises `Fenced`,
        `CheckpointError` where this machine's disk cannot take the files, `StoreError` and `LogError` for what does
        not pass in time; then the step is on no lineage, unless only its announcement is missing.
        """
        metadata = tell_circumstances(learner)
        with tempfile.TemporaryDirectory(prefix="rollstream-publish-") as folder:
            files = _write_files(Path(folder), learner, companions.files, seen)
            return self._publish(receipt, files, cursors=cursors, tokenizer=companions.tokenizer, metadata=metadata)

    def _publish(
        self, receipt: Receipt, files: Files, *, cursors: Cursors, tokenizer: str, metadata: Mapping[str, str]
    ) -> Receipt:
        deadline = time.monotonic() + self._patience
        receipt = replace(receipt, run=self._run, incarnation=self.incarnation, version=self._next, written_ms=_now())
        what = f"policy {receipt.version} of run {self._run}"
        self._persist(deadline, what, lambda: self._ledger.write(receipt))

        def create() -> Manifest:
            return self._checkpoints.publish(
                receipt.version,
                files,
                parent=receipt.parent or None,
                incarnation=self.incarnation,
                step=receipt.step,
                cursors=cursors,
                tokenizer=tokenizer,
                metadata=metadata,
            )

        try:
            manifest = self._persist(deadline, what, create)
        except Fenced as fenced:
            if receipt.version not in self._persist(deadline, what, self._checkpoints.versions):
                raise
            # The older trainer had this version's manifest under way when it lost the run. That fences nobody: the
            # next version is free, and if this trainer has lost the run too, the store says so again.
            logger.warning("policy %d is taken: %s", receipt.version, fenced)
            self._next = self._checkpoints.next_version()
            return self._publish(receipt, files, cursors=cursors, tokenizer=tokenizer, metadata=metadata)
        self._next += 1
        self._persist(deadline, f"the announcement of {what}", lambda: self.announce(manifest))
        return receipt

    def _persist(self, deadline: float, what: str, attempt: Callable[[], T]) -> T:
        """Try until it works, fails of what does not pass, or the time is up."""
        pause = 0.5
        while True:
            try:
                return attempt()
            except (StoreError, LogError) as error:
                if not error.retriable:
                    raise
                if self._stopped() or time.monotonic() + pause > deadline:
                    raise self._given_up(what, error) from error
                logger.warning("%s is not out yet, again in %.1f s: %s", what, pause, error)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _given_up(self, what: str, error: StoreError | LogError) -> StoreError | LogError:
        kind = StoreError if isinstance(error, StoreError) else LogError
        why = "the trainer was asked to stop" if self._stopped() else f"{self._patience:g} s have passed"
        return kind(
            f"{what} could not be published, and {why}: {error}. "
            f"Start the trainer again when it answers: it goes on from the last checkpoint, nothing is lost",
            retriable=True,
        )

    def announce(self, manifest: Manifest) -> None:
        """Tell the workers of a published policy; at start again, in case the last trainer could not.

        Raises `LogError`.
        """
        update = PolicyUpdate(
            run=self._run,
            version=manifest.version,
            incarnation=manifest.incarnation,
            step=manifest.step,
            manifest=self._checkpoints.manifest_key(manifest.version),
            digest=manifest_digest(manifest),
            published_ms=_now(),
        )
        future = self._writer.append(self._names.policy, encode(update, schemas=self._schemas), key=self._run.encode())
        await_position(future, 60.0, f"the announcement of policy {manifest.version}")

    def close(self) -> None:
        self._writer.close()


def _now() -> int:
    return time.time_ns() // 1_000_000


def _write_files(folder: Path, learner: Learner, static: Mapping[str, Path], seen: Seen | None) -> Files:
    """The files of a checkpoint, in this folder. Raises `CheckpointError` where its disk does not take them."""
    try:
        return _files(folder, learner, static, seen)
    except (OSError, RuntimeError, SafetensorError) as error:
        # Each library tells a full disk in its own way.
        raise CheckpointError(
            f"the files of a checkpoint could not be written to {folder.parent}: {error}. Make room there, or name "
            f"another folder in TMPDIR, and start the trainer again: it goes on from the last checkpoint"
        ) from error


def _files(folder: Path, learner: Learner, static: Mapping[str, Path], seen: Seen | None) -> dict[str, Path | bytes]:
    weights = folder / "weights"
    save_weights(learner.model, weights)
    files: dict[str, Path | bytes] = {WEIGHTS + name: path for name, path in static.items()}
    files |= {WEIGHTS + path.name: path for path in weights.iterdir()}
    if seen is not None:
        state = folder / "learner.pt"
        learner.save(state)
        files |= {STATE: state, SEEN: seen.to_bytes()}
    return files
