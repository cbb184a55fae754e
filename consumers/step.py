"""One optimizer step over gathered groups: judged again, scored, learned, and every record of it settled.

The same groups on the same learner give the same receipt, loss and weights: nothing here depends on time or arrival.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..schemas import Trajectory
from .batch import Sample, score_group
from .gatherer import Gathered
from .groups import Group, Member
from .learner import Learner, StepResult
from .ledger import Settlement
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


def make_step(gathered: Gathered, learner: Learner, gate: StalenessGate, seen: Seen) -> Step:
    """Train on what may still train at the gate's version; remember all of it as settled.

    Drop reasons that arise here: "stale" (it aged while it waited), "zero-variance" (all rewards of the group are
    equal, so it tells nothing), "skipped-..." (the whole update was skipped, see `StepResult.skipped`).
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
    _remember(groups, seen, gate.version)
    metrics = _outcomes([m.trajectory for members in fresh for m in members]) | dict(result.metrics)
    metrics |= _staleness((m.trajectory for m, _ in chosen), gate)
    metrics |= {"samples": float(result.samples), "trained_tokens": float(result.tokens)}
    names = tuple(g.group_id for g in groups if g.group_id)
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


def _remember(groups: Iterable[Group], seen: Seen, version: int) -> None:
    for group in groups:
        if group.group_id:
            for _, trajectory in group.members:
                oldest, _ = trajectory.version_range() or (version, version)
                seen.add(group.group_id, trajectory.trajectory_id, max(version, oldest))
            for drop in group.dropped:
                seen.add(group.group_id, drop.trajectory_id or str(drop.position), version)
    seen.evict(version)


def _outcomes(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Mean reward over all and by environment, and how much there was, samples that inform nobody included."""
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        rewards["reward"].append(trajectory.reward)
        rewards[f"reward.{trajectory.environment}"].append(trajectory.reward)
    means = {name: sum(values) / len(values) for name, values in rewards.items()}
    tokens = sum(t.tokens.size for t in trajectories)
    return means | {"trajectories": float(len(trajectories)), "tokens": float(tokens)}


def _staleness(trajectories: Iterable[Trajectory], gate: StalenessGate) -> dict[str, float]:
    """Mean staleness of the trained samples, and how many had each value."""
    ranges = [t.version_range() for t in trajectories]
    values = Counter(gate.staleness(r[0]) for r in ranges if r is not None)
    if not values:
        return {}
    mean = sum(value * count for value, count in values.items()) / values.total()
    return {"staleness": mean} | {f"staleness.{value}": float(count) for value, count in values.items()}
