"""What the demo tells at its end: numbers from the ledger and the audit, and a few trajectories to look at."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ...consumers.audit import audit
from ...consumers.ledger import Ledger, lineage
from ...infra.log import Partition
from ...infra.scan import scan
from ...schemas import Receipt, Trajectory, WireError, decode_as
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
    """One of each environment from the first online steps, and one from the last."""
    shown: list[Trajectory] = []
    for receipt in [*online[:1], *online[-1:]]:
        topics: set[str] = set()
        for consumed in receipt.consumed:
            if consumed.topic in topics or not len(consumed.trained):
                continue
            topics.add(consumed.topic)
            partition, offset = Partition(consumed.topic, consumed.partition), int(consumed.trained[0])
            for record in scan(here.log, {partition: offset}, stop={partition: offset + 1}):
                try:
                    shown.append(decode_as(Trajectory, record.value or b""))
                except WireError:
                    continue
    return shown


def _total(receipts: Sequence[Receipt], name: str) -> float:
    return sum(r.metrics.get(name, 0.0) for r in receipts)
