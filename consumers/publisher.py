"""The trainer's side of the checkpoints: where a run goes on, and how a step becomes visible.

    step -> receipt to the ledger -> objects -> manifest -> pointer -> announcement on rollstream.policy
            (write-ahead: it counts only once the manifest with its incarnation and version is there)

Policy versions are never used again: the next one lies above every manifest and every receipt there ever was.
"""

import logging
import tempfile
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ..infra.checkpoints import WEIGHTS, Checkpoints, Fenced, Manifest, manifest_digest
from ..infra.cursors import Cursors
from ..infra.log import Log, await_position
from ..infra.topics import Names
from ..infra.weights import save_weights
from ..schemas import PolicyUpdate, Receipt, encode
from .learner import Learner
from .ledger import Ledger
from .retention import STATE, resumable
from .seen import Seen

logger = logging.getLogger(__name__)

SEEN = "trainer/seen.npy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where on the lineage a run stands."""

    version: int
    incarnation: str
    step: int


NOWHERE = Place(version=0, incarnation="", step=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Companions:
    """What goes into every checkpoint beside the weights, the same over a run."""

    files: Mapping[str, Path]
    """Name -> file: the model's configuration, the tokenizer."""
    tokenizer: str
    """Its fingerprint."""


class Publisher:
    """Publishes one incarnation's steps. Raises `Fenced` from the first publish after another trainer took the run."""

    def __init__(self, log: Log, names: Names, run: str, checkpoints: Checkpoints) -> None:
        self.incarnation = uuid.uuid4().hex[:12]
        self._names, self._run, self._checkpoints = names, run, checkpoints
        self._ledger = Ledger(log, names, run)
        self._writer = log.writer()
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
        `StoreError`, `LogError`; then the step is on no lineage.
        """
        try:
            return self._publish(receipt, learner, companions, cursors, seen)
        except Fenced as fenced:
            if self._next not in self._checkpoints.versions():
                raise
            # The older trainer had this version's manifest under way when it lost the run. That fences nobody: the
            # next version is free, and if this trainer has lost the run too, the store says so again.
            logger.warning("policy %d is taken: %s", self._next, fenced)
            self._next = self._checkpoints.next_version()
            return self._publish(receipt, learner, companions, cursors, seen)

    def _publish(
        self, receipt: Receipt, learner: Learner, companions: Companions, cursors: Cursors, seen: Seen | None
    ) -> Receipt:
        receipt = replace(receipt, run=self._run, incarnation=self.incarnation, version=self._next, written_ms=_now())
        self._ledger.write(receipt)
        with tempfile.TemporaryDirectory(prefix="rollstream-publish-") as folder:
            manifest = self._checkpoints.publish(
                receipt.version,
                _files(Path(folder), learner, companions.files, seen),
                parent=receipt.parent or None,
                incarnation=self.incarnation,
                step=receipt.step,
                cursors=cursors,
                tokenizer=companions.tokenizer,
                metadata={"objective": learner.settings.objective.value},
            )
        self._next += 1
        self.announce(manifest)
        return receipt

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
        future = self._writer.append(self._names.policy, encode(update), key=self._run.encode())
        await_position(future, 60.0, f"the announcement of policy {manifest.version}")

    def close(self) -> None:
        try:
            self._writer.close()
        finally:
            self._ledger.close()


def _now() -> int:
    return time.time_ns() // 1_000_000


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
