"""A trajectory as text: one line, one line a turn, or an object for JSON."""

from collections.abc import Iterator

from ..infra.log import Record
from ..schemas import Trajectory, Turn


def as_line(record: Record, trajectory: Trajectory) -> str:
    """Where it lies, its id, and how it went."""
    return f"{record.position}  {_summary(trajectory)}"


def as_lines(record: Record, trajectory: Trajectory) -> Iterator[str]:
    """The same, then turn by turn."""
    yield as_line(record, trajectory)
    yield from _turns(trajectory)


def as_outline(trajectory: Trajectory) -> Iterator[str]:
    """Its id and how it went, then turn by turn; wherever it lies."""
    yield _summary(trajectory)
    yield from _turns(trajectory)


def _summary(trajectory: Trajectory) -> str:
    return (
        f"{trajectory.trajectory_id}  {trajectory.status.lower()}  reward {trajectory.reward:g}  "
        f"policy {policy_range(trajectory) or '-'}  {len(trajectory.turns)} turns  {trajectory.tokens.size} tokens"
    )


def _turns(trajectory: Trajectory) -> Iterator[str]:
    versions = trajectory.versions()
    for turn, part in sampled_parts(trajectory):
        note = f"{turn.tokens} tokens"
        if versions[part].size:
            note += f", policy {versions[part].min()}"
        if trajectory.logprobs[part].size:
            note += f", log p {float(trajectory.logprobs[part].sum()):.3f}"
        if turn.reward is not None:
            note += f", reward {turn.reward:g}"
        yield f"  {turn.role.lower():<10} {turn.text or ''}   [{note}]"
    if trajectory.cause:
        yield f"cause: {trajectory.cause} {trajectory.metadata.get('error', '')}".rstrip()


def as_object(record: Record, trajectory: Trajectory, *, turns: bool) -> dict[str, object]:
    """For JSON; with `turns` everything that was sampled, too."""
    value: dict[str, object] = {
        "position": str(record.position),
        "trajectory_id": trajectory.trajectory_id,
        "group_id": trajectory.group_id,
        "environment": trajectory.environment,
        "seed": trajectory.seed,
        "status": trajectory.status.value,
        "cause": trajectory.cause,
        "reward": trajectory.reward,
        "versions": trajectory.version_range(),
        "tokens": int(trajectory.tokens.size),
        "model": trajectory.model,
    }
    if turns:
        value["token_ids"] = trajectory.tokens.tolist()
        value["logprobs"] = trajectory.logprobs.tolist()
        value["turns"] = [
            {"role": t.role.value, "tokens": t.tokens, "sampled": t.sampled, "text": t.text, "reward": t.reward}
            for t in trajectory.turns
        ]
    return value


def policy_range(trajectory: Trajectory) -> str:
    """Policy versions of its sampled tokens, "7" or "7-9"; empty where no policy sampled any."""
    versions = trajectory.version_range()
    if versions is None:
        return ""
    return str(versions[0]) if versions[0] == versions[1] else f"{versions[0]}-{versions[1]}"


def sampled_parts(trajectory: Trajectory) -> Iterator[tuple[Turn, slice]]:
    """Each turn with its place in the columns of sampled tokens; an empty one for a turn that was not sampled."""
    place = 0
    for turn in trajectory.turns:
        end = place + turn.tokens * turn.sampled
        yield turn, slice(place, end)
        place = end
