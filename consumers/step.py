"""One optimizer step over gathered groups: judged again, scored, learned, and every record of it settled.

The same groups on the same learner give the same receipt, loss and weights: nothing here depends on time or arrival.
With several ranks each brings its own groups, and all come to the same account of the step.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..schemas import Trajectory
from .batch import Sample, score_group
from .gatherer import Gathered
from .groups import Group, Member
from .learner import Learner, StepResult
from .ledger import Settlement
from .ranks import ALONE, Ranks
from .seen import Seen
from .staleness import StalenessGate


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a step did, before it is published."""

    settlement: Settlement
    groups: tuple[str, ...]
    """Ids of the groups whose slots it frees."""
    result: StepResult
    metrics: dict[str, float]
    """The receipt's: see docs/ledger.md."""


class _Row(NamedTuple):
    """A settled trajectory, as `Seen` remembers it."""

    group_id: str
    trajectory_id: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Account:
    """What one rank did in a step."""

    settlement: Settlement
    groups: tuple[str, ...]
    rows: list[_Row]
    rewards: dict[str, tuple[float, int]]
    """Sum and number, over all and by environment."""
    tokens: int
    ages: Counter[int]
    """Staleness -> trained samples."""


def make_step(gathered: Gathered, learner: Learner, gate: StalenessGate, seen: Seen, ranks: Ranks = ALONE) -> Step:
    """Train on what may still train at the gate's version; remember all of it as settled, that of other ranks too.

    Drop reasons that arise here: "stale" (it aged while it waited), "zero-variance" (all rewards of the group are
    equal, so it tells nothing), "skipped-..." (the whole update was skipped, see `StepResult.skipped`).
    Raises `RankLost`.
    """
    settlement = Settlement()
    groups = sorted(gathered.groups, key=lambda g: g.group_id)
    for drop in (d for g in groups for d in g.dropped):
        settlement.drop(drop.reason, [drop.position])
    fresh = [_fresh(group.members, gate, settlement) for group in groups]
    chosen = [pair for members in fresh for pair in _score(members, learner, settlement)]
    result = learner.step([sample for _, sample in chosen], offered=sum(map(len, fresh)))
    positions = [member.position for member, _ in chosen]
    if result.updated:
        settlement.trained += positions
    elif positions:
        settlement.drop(f"skipped-{result.skipped}", positions)
    account = _Account(
        settlement=settlement,
        groups=tuple(g.group_id for g in groups if g.group_id),
        rows=_rows(groups, gate.version),
        rewards=_rewards([m.trajectory for members in fresh for m in members]),
        tokens=sum(m.trajectory.tokens.size for members in fresh for m in members),
        ages=_ages((m.trajectory for m, _ in chosen), gate),
    )
    return _close(ranks.exchange(account), result, seen, gate.version)


def _close(accounts: Sequence[_Account], result: StepResult, seen: Seen, version: int) -> Step:
    settlement = Settlement()
    for account in accounts:
        settlement.add(account.settlement)
        for row in account.rows:
            seen.add(*row)
    seen.evict(version)
    metrics = _outcomes(accounts) | dict(result.metrics) | _staleness(accounts)
    metrics |= {"samples": float(result.samples), "trained_tokens": float(result.tokens)}
    names = tuple(name for account in accounts for name in account.groups)
    return Step(settlement=settlement, groups=names, result=result, metrics=metrics)


def _fresh(members: Sequence[Member], gate: StalenessGate, settlement: Settlement) -> list[Member]:
    judged = [(m, gate.judge_trajectory(m.trajectory)) for m in members]
    for member, reason in judged:
        if reason is not None:
            settlement.drop(reason, [member.position])
    return [m for m, reason in judged if reason is None]


def _score(members: Sequence[Member], learner: Learner, settlement: Settlement) -> list[tuple[Member, Sample]]:
    settings = learner.settings
    samples = score_group([m.trajectory for m in members], settings.advantage, settings.objective)
    if not members:
        return []
    if settings.reinforces and not any(s.advantage for s in samples):
        settlement.drop("zero-variance", [m.position for m in members])
        return []
    return list(zip(members, samples, strict=True))


def _rows(groups: Iterable[Group], version: int) -> list[_Row]:
    rows: list[_Row] = []
    for group in groups:
        if group.group_id:
            for _, trajectory in group.members:
                oldest, _ = trajectory.version_range() or (version, version)
                rows.append(_Row(group.group_id, trajectory.trajectory_id, max(version, oldest)))
            for drop in group.dropped:
                rows.append(_Row(group.group_id, drop.trajectory_id or str(drop.position), version))
    return rows


def _rewards(trajectories: Iterable[Trajectory]) -> dict[str, tuple[float, int]]:
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        rewards["reward"].append(trajectory.reward)
        rewards[f"reward.{trajectory.environment}"].append(trajectory.reward)
    return {name: (sum(values), len(values)) for name, values in rewards.items()}


def _ages(trajectories: Iterable[Trajectory], gate: StalenessGate) -> Counter[int]:
    ranges = (t.version_range() for t in trajectories)
    return Counter(gate.staleness(r[0]) for r in ranges if r is not None)


def _outcomes(accounts: Sequence[_Account]) -> dict[str, float]:
    """Mean reward over all and by environment, and how much there was, samples that inform nobody included."""
    sums: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
    for account in accounts:
        for name, part in account.rewards.items():
            sums[name].append(part)
    counts = {name: sum(count for _, count in parts) for name, parts in sums.items()}
    means = {name: sum(total for total, _ in parts) / counts[name] for name, parts in sums.items()}
    tokens = sum(account.tokens for account in accounts)
    return means | {"trajectories": float(counts.get("reward", 0)), "tokens": float(tokens)}


def _staleness(accounts: Sequence[_Account]) -> dict[str, float]:
    """Mean staleness of the trained samples, and how many had each value."""
    ages = sum((account.ages for account in accounts), Counter[int]())
    if not ages:
        return {}
    mean = sum(value * count for value, count in ages.items()) / ages.total()
    return {"staleness": mean} | {f"staleness.{value}": float(count) for value, count in ages.items()}
