"""What became of each acknowledged trajectory, found without the audit's code: a second opinion in few lines.

    the log, by the bare client     every record and its id; what the tail saw and what workers were told must be there
    the store                       latest.json, and from manifest to manifest by `parent`: the lineage
    the ledger                      the receipts of exactly these manifests
    the tasks                       every sample that was ever asked for

The audit follows the parents that receipts name; this follows those that manifests name.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from havoc.journal import Stored
from havoc.tail import Seen
from rollstream.schemas import Receipt, Task, Trajectory, WireError, decode_as

TOLD = 10
"""Problems of a kind that are told by name."""


@dataclass(slots=True, kw_only=True)
class Verdict:
    """Counts, and names where something is wrong."""

    acknowledged: int = 0
    """Records on the trajectory topics."""
    trained: int = 0
    dropped: int = 0
    pending: int = 0
    doubles: int = 0
    """Records whose trajectory id lies earlier in the log as well: re-runs and re-sendings."""
    lost: list[str] = field(default_factory=list[str])
    """Settled by the cursor and by no receipt; or acknowledged, and not in the log; or asked for, and nowhere."""
    twice: list[str] = field(default_factory=list[str])
    """Positions that two receipts settled, and trajectory ids that were trained twice."""

    def as_json(self) -> dict[str, object]:
        told = {"lost_names": self.lost[:TOLD], "twice_names": self.twice[:TOLD]}
        counts = {n: getattr(self, n) for n in ("acknowledged", "trained", "dropped", "pending", "doubles")}
        return {**counts, "lost": len(self.lost), "twice": len(self.twice), **told}


def judge(
    records: Iterable[Stored],
    receipts: Iterable[Receipt],
    manifests: Iterable[Mapping[str, Any]],
    *,
    asked: Iterable[str] = (),
    told: Mapping[str, str] | None = None,
) -> Verdict:
    """`manifests`: a lineage, newest first. `asked`: trajectory ids of all tasks. `told`: position -> trajectory id,
    of what the tail saw and workers were told."""
    line = list(manifests)
    there = {record.place: record.name for record in records}
    trained, dropped = settled_places(receipts, {(m["incarnation"], m["version"]) for m in line})
    verdict = Verdict(acknowledged=len(there), doubles=len(there) - len(set(there.values())))
    covered = cursor_of(line[0]["cursors"] if line else {})
    for place, name in there.items():
        verdict.trained += place in trained
        verdict.dropped += place in dropped
        if place not in trained and place not in dropped:
            verdict.pending += not covered(place)
            verdict.lost += [f"{place} {name}: below the cursor, in no receipt"] if covered(place) else []
    verdict.twice += [f"{p}: settled {n} times" for p, n in (trained + dropped).items() if n > 1]
    names = Counter(there.get(place, place) for place in trained)
    verdict.twice += [f"{name}: trained {count} times" for name, count in names.items() if count > 1]
    verdict.lost += [f"{p} {n}: acknowledged, not in the log" for p, n in (told or {}).items() if there.get(p) != n]
    present = set(there.values())
    verdict.lost += [f"{name}: asked for, nowhere in the log" for name in asked if name not in present]
    return verdict


def settled_places(receipts: Iterable[Receipt], line: set[tuple[str, int]]) -> tuple[Counter[str], Counter[str]]:
    """Place -> how often the receipts of this lineage trained it, and dropped it. A receipt that was appended twice
    counts once."""
    mine = {(r.incarnation, r.version): r for r in receipts if (r.incarnation, r.version) in line}
    trained, dropped = Counter[str](), Counter[str]()
    for consumed in (c for receipt in mine.values() for c in receipt.consumed):
        where = f"{consumed.topic}[{consumed.partition}]@"
        trained.update(f"{where}{offset}" for offset in consumed.trained)
        dropped.update(f"{where}{offset}" for offsets in consumed.dropped.values() for offset in offsets)
    return trained, dropped


def cursor_of(cursors: Mapping[str, Mapping[str, list[int]]]) -> Callable[[str], bool]:
    """Whether a place is settled, by a manifest's JSON: {topic: {partition: [low, start, stop, start, stop, ...]}}."""

    def settled(place: str) -> bool:
        where, _, offset = place.rpartition("@")
        topic, _, number = where.rstrip("]").rpartition("[")
        low, *edges = cursors.get(topic, {}).get(number, [0])
        at = int(offset)
        return at < low or any(a <= at < b for a, b in zip(edges[::2], edges[1::2], strict=True))

    return settled


def read_lineage(get: Callable[[str], bytes], run: str) -> Iterator[Mapping[str, Any]]:
    """The manifests from the latest one back to the first of the run. `get`: the object of a key."""
    version: int | None = json.loads(get(f"{run}/latest.json"))["version"] or None
    while version is not None:
        manifest = json.loads(get(f"{run}/checkpoints/{version}/manifest.json"))
        yield manifest
        version = manifest["parent"]


def stored(records: Iterable[Seen]) -> list[Stored]:
    """By the ids in their bodies; a body that cannot be read is known by its place alone."""
    return [
        Stored(place=r.place, name=_name(r.value, r.place), appended=r.timestamp_ms / 1000)
        for r in records
        if r.value is not None
    ]


def _name(value: bytes, place: str) -> str:
    try:
        return decode_as(Trajectory, value).trajectory_id
    except WireError:
        return place


def receipts_of(records: Iterable[Seen], run: str) -> list[Receipt]:
    """Raises `WireError` for what is no receipt."""
    receipts = [decode_as(Receipt, r.value) for r in records if r.value is not None]
    return [receipt for receipt in receipts if receipt.run == run]


def samples_asked(records: Iterable[Seen]) -> set[str]:
    """Trajectory ids of every sample of these tasks. Raises `WireError` for what is no task."""
    tasks = [decode_as(Task, r.value) for r in records if r.value is not None]
    return {f"{task.task_id}/{index}/{task.attempt}" for task in tasks for index in range(task.group_size)}
