"""What the demo tells at its end: numbers from the ledger and the audit, and a few trajectories to look at."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ...consumers.audit import audit
from ...consumers.ledger import Ledger, lineage
from ...infra.claims import read_trajectory
from ...infra.log import Partition, Position
from ...infra.scan import scan
from ...schemas import Receipt, Trajectory, WireError
from ..context import Context


def read_receipts(here: Context) -> list[Receipt]:
    """The receipts on the lineage of the run's latest checkpoint, oldest first."""
    manifest = here.checkpoints.latest()
    if manifest is None:
        return []
    receipts = {(r.incarnation, r.version): r for r in Ledger(here.log, here.names, here.run).receipts()}
    return list(reversed(lineage(receipts, (manifest.incarnation, manifest.version)).receipts))


def summarize(
    here: Context, receipts: Sequence[Receipt], first_step: int, before: Mapping[str, float], after: Mapping[str, float]
) -> dict[str, Any]:
    """The measured part of `summary.json`; `first_step` is the last one of the warm start."""
    verdict = audit(here.log, here.names, here.run, here.checkpoints)
    online = [r for r in receipts if r.step > first_step]
    staleness: Counter[str] = Counter()
    for receipt in online:
        counts = {
            k.removeprefix("staleness."): int(v) for k, v in receipt.metrics.items() if k.startswith("staleness.")
        }
        staleness.update(counts)
    seconds = {k: _total(online, f"seconds.{k}") for k in ("idle", "learn", "publish")}
    return {
        "reward_before": sum(before.values()) / len(before),
        "reward_after": sum(after.values()) / len(after),
        "environments": {name: {"before": before[name], "after": after[name]} for name in before},
        "trajectories": verdict.acknowledged,
        "tokens": int(_total(receipts, "tokens")),
        "steps": len(online),
        "staleness": {value: staleness[value] for value in sorted(staleness, key=int)},
        "trainer_idle_share": round(seconds["idle"] / max(sum(seconds.values()), 1e-9), 4),
        "audit": verdict.as_json(),
    }


def pick_trajectories(here: Context, online: Sequence[Receipt]) -> list[Trajectory]:
    """The first one of each environment that an online step trained, then the last ones, to be compared with them."""
    first, last = _trained_by_topic(online), _trained_by_topic(list(reversed(online)))
    chosen = list(dict.fromkeys([*(first[t] for t in sorted(first)), *(last[t] for t in sorted(last))]))
    return [shown for position in chosen if (shown := _read(here, position)) is not None]


def _trained_by_topic(receipts: Sequence[Receipt]) -> dict[str, Position]:
    """Topic -> a trajectory that the first of these receipts with any of this topic trained."""
    found: dict[str, Position] = {}
    for receipt in receipts:
        for consumed in receipt.consumed:
            if consumed.topic not in found and len(consumed.trained):
                partition = Partition(consumed.topic, consumed.partition)
                found[consumed.topic] = Position(partition, int(consumed.trained[0]))
    return found


def _read(here: Context, position: Position) -> Trajectory | None:
    stop = {position.partition: position.offset + 1}
    for record in scan(here.log, {position.partition: position.offset}, stop=stop):
        try:
            return read_trajectory(record.value or b"", here.claims, schemas=here.reader_schemas)
        except WireError:
            return None
    return None


def _total(receipts: Sequence[Receipt], name: str) -> float:
    return sum(r.metrics.get(name, 0.0) for r in receipts)
