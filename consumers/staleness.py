"""The staleness bound, as the trainer applies it: from headers before a body is decoded, and again at the step.

    staleness of a sample = policy version being trained - OLDEST version among its trainable tokens

The version being trained is the one that the optimizer step starts from. The producing half of the same bound is
`rollstream.producers.slots`.
"""

from ..schemas import Trajectory


class StalenessGate:
    """Judges samples against the version being trained, which the trainer moves. Used by the trainer's thread."""

    def __init__(self, max_staleness: int | None, version: int = 0) -> None:
        """`max_staleness` None admits every version and unknown ones: behaviour cloning."""
        if max_staleness is not None and max_staleness < 0:
            raise ValueError(f"max_staleness is a whole number >= 0, found {max_staleness}")
        self.max_staleness = max_staleness
        self.version = version

    def staleness(self, lowest_version: int) -> int:
        return self.version - lowest_version

    def judge(self, lowest_version: int) -> str | None:
        """None if a sample whose oldest trainable token has this version may train now, else "stale"."""
        if self.max_staleness is None or self.staleness(lowest_version) <= self.max_staleness:
            return None
        return "stale"

    def judge_trajectory(self, trajectory: Trajectory) -> str | None:
        """The same for a decoded one; "unversioned" where its versions are unknown and a bound is set."""
        if self.max_staleness is None:
            return None
        versions = trajectory.version_range()
        return "unversioned" if versions is None else self.judge(versions[0])
