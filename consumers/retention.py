"""Retention: which checkpoints of a run keep their objects, so that a store does not grow for ever.

kept      the newest ones, and the newest that holds the trainer's state: a restart goes on from it
others    keep their manifest: policy versions are never used again, and lineages stay whole
"""

import logging
from collections.abc import Iterator

from ..infra.checkpoints import CheckpointError, Checkpoints, Collected, Manifest
from ..infra.store import StoreError

logger = logging.getLogger(__name__)

STATE = "trainer/learner.pt"
GRACE = 3600.0
"""Seconds for which a new object is left alone: a publish under way may need it."""
SELDOM = 10
"""Steps between two collections, at least."""


class Retention:
    """Collects old checkpoints beside the training. Used by the trainer's thread."""

    def __init__(self, checkpoints: Checkpoints, keep: int) -> None:
        """`keep`: newest checkpoints whose objects stay; 0 keeps all."""
        self._checkpoints, self._keep = checkpoints, keep

    def tidy(self, step: int) -> None:
        """Collect if it is due after this step. A failure is logged: what stays is collected another time."""
        if not self._keep or step % max(SELDOM, self._keep):
            return
        try:
            collected = collect_old(self._checkpoints, self._keep)
        except (StoreError, CheckpointError) as error:
            logger.warning("old checkpoints of run %s not collected: %s", self._checkpoints.run, error)
            return
        logger.info("collected %d objects of old checkpoints, %d bytes", collected.objects, collected.size)


def collect_old(checkpoints: Checkpoints, keep: int, *, grace: float = GRACE) -> Collected:
    """Delete the objects of all but the `keep` newest checkpoints and the one that a restart goes on from.

    Raises `StoreError`, `CheckpointError` as `Checkpoints.collect` does, `ValueError` for `keep` below 1.
    """
    if keep < 1:
        raise ValueError(f"keep: expected 1 or more checkpoints, found {keep}")
    return checkpoints.collect(_kept(checkpoints, keep), grace=grace)


def resumable(checkpoints: Checkpoints) -> Manifest | None:
    """The newest checkpoint on the lineage of the latest one that holds the trainer's state; None for a new run."""
    latest = checkpoints.latest()
    manifest = latest
    while manifest is not None and STATE not in manifest.files:
        manifest = checkpoints.manifest(manifest.parent) if manifest.parent else None
    return manifest or latest


def _kept(checkpoints: Checkpoints, keep: int) -> Iterator[int]:
    """Looked up when the collection asks for it, after it listed the objects: so none published since is missed."""
    yield from checkpoints.versions()[-keep:]
    if (manifest := resumable(checkpoints)) is not None:
        yield manifest.version
