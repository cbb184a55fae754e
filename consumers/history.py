"""The history of a checkpoint: the receipts on its lineage, those of dead branches, and how far back the ledger goes.

    manifest --> receipt --> parent's receipt --> ... --> the run's first         told
                                     |
                         receipt not there: go on with the manifests, which are never deleted
                             older receipts are there      -> a hole: what that step settled looks lost
                             retention has removed the end -> untold: settled, nobody can say how any more

Two receipts of one step that tell different things both count: what they both settle was settled twice.
"""

import logging
from dataclasses import dataclass, field

from ..infra.checkpoints import Checkpoints, Manifest
from ..infra.cursors import Cursors
from ..schemas import Consumed, Receipt
from .ledger import Ledger, Step, lineage

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What the ledger tells of one checkpoint."""

    receipts: tuple[Receipt, ...] = ()
    """On its lineage, newest first."""
    strays: tuple[Receipt, ...] = ()
    """On none or on another: of steps that crashed, of fenced trainers, of branches that a restart went back behind."""
    holes: tuple[Step, ...] = ()
    """Steps on the lineage without a receipt, although the ledger reaches back behind them; newest first."""
    untold: Cursors = field(default_factory=Cursors)
    """What was settled by steps whose receipts retention removed."""

    def at_step(self, step: int) -> Receipt | None:
        """The receipt of this step on the lineage."""
        return next((receipt for receipt in self.receipts if receipt.step == step), None)


def read_history(ledger: Ledger, checkpoints: Checkpoints, manifest: Manifest | None) -> History:
    """The history of this checkpoint; None: a run that has none yet, so that every receipt is a stray.

    Raises `CheckpointError` where a receipt is missing and the manifest of its step too, `LogError`.
    """
    receipts, rivals = _by_step(ledger)
    if manifest is None:
        return History(strays=(*receipts.values(), *rivals))
    reach = min((version for _, version in receipts), default=manifest.version + 1) if ledger.truncated() else 0

    def ask(step: Step) -> Step | None:
        return _parent(checkpoints, step[1]) if step[1] >= reach else None

    line = lineage(receipts, (manifest.incarnation, manifest.version), ask=ask)
    oldest = min((receipt.version for receipt in line.receipts), default=manifest.version + 1)
    gone = [step for step in line.missing if reach and step[1] < oldest]
    if gone:
        logger.warning("receipts before policy %d were removed from the ledger by retention", oldest)
    told = {(r.incarnation, r.version) for r in line.receipts}
    rest = [receipt for step, receipt in receipts.items() if step not in told]
    return History(
        receipts=(*line.receipts, *(r for r in rivals if (r.incarnation, r.version) in told)),
        strays=(*rest, *(r for r in rivals if (r.incarnation, r.version) not in told)),
        holes=tuple(step for step in line.missing if step not in gone),
        untold=checkpoints.manifest(gone[0][1]).cursors if gone else Cursors(),
    )


def _by_step(ledger: Ledger) -> tuple[dict[Step, Receipt], list[Receipt]]:
    """The first receipt of each step, and others of the same step that tell something else."""
    first: dict[Step, Receipt] = {}
    rivals: list[Receipt] = []
    for receipt in ledger.receipts():
        known = first.setdefault((receipt.incarnation, receipt.version), receipt)
        if known is not receipt and not _same(known, receipt):
            rivals.append(receipt)
    return first, rivals


def _same(one: Receipt, other: Receipt) -> bool:
    return [*map(_columns, one.consumed)] == [*map(_columns, other.consumed)]


def _columns(consumed: Consumed) -> tuple[object, ...]:
    dropped = {reason: offsets.tobytes() for reason, offsets in consumed.dropped.items()}
    return consumed.topic, consumed.partition, consumed.trained.tobytes(), dropped


def _parent(checkpoints: Checkpoints, version: int) -> Step | None:
    parent = checkpoints.manifest(version).parent
    return None if parent is None else (checkpoints.manifest(parent).incarnation, parent)
