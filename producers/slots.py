"""The staleness bound, as one object with one number.

The life of a slot:

    free --(a group's task is appended)--> in flight --(a receipt names the group, version v)--> settled at v
      ^                                        |                                                    |
      +--------(its task was dead-lettered)----+                                                    |
      +------------------------(policy v is announced)----------------------------------------------+

    groups in flight or settled <= (max staleness + 1) x groups per step

The trainer settles `groups per step` groups with each policy version. So when a group is dispatched, at most
max_staleness x groups_per_step others are ahead of it, and it trains at most max_staleness versions after the policy
that the workers have then: the bound holds without anybody waiting for a slow one, and an environment that stands
still uses up its own slots only.
"""

from collections.abc import Iterable, Mapping


class Slots:
    """Counts groups between dispatch and the publication of the policy that they led to, by environment."""

    def __init__(self, *, max_staleness: int, groups_per_step: int, ratios: Mapping[str, float]) -> None:
        """`ratios`: environment -> share of the groups, any positive scale.

        Each environment has at least one slot of its own; where slots are fewer than environments, they take turns.
        """
        if max_staleness < 0 or groups_per_step < 1:
            raise ValueError(
                f"expected max_staleness >= 0 and groups_per_step >= 1, found {max_staleness} and {groups_per_step}"
            )
        if not ratios or not min(ratios.values()) > 0:
            raise ValueError(f"expected a positive ratio for at least one environment, found {dict(ratios)}")
        self.total = (max_staleness + 1) * groups_per_step
        self._ratios = dict(ratios)
        self._quota = _shares(self.total, ratios)
        self._held: dict[str, str] = {}
        self._settled: dict[str, int] = {}
        self._used = dict.fromkeys(ratios, 0)
        self._taken = dict.fromkeys(ratios, 0)
        self._announced = 0

    def __repr__(self) -> str:
        return f"Slots({self.held} of {self.total} held, {len(self._settled)} of them settled)"

    @property
    def held(self) -> int:
        """Groups in flight or settled."""
        return len(self._held)

    def quota(self, environment: str) -> int:
        return self._quota[environment]

    def used(self, environment: str) -> int:
        """Slots that this environment holds."""
        return self._used.get(environment, 0)

    def pick(self) -> str | None:
        """The environment whose task is due; None if there is no free slot.

        It is the one with the smallest share of its quota in use; among equals, with the fewest tasks for its ratio.
        """
        free = [e for e in self._quota if self._used[e] < self._quota[e]] if self.held < self.total else []
        return min(free, key=self._share) if free else None

    def take(self, environment: str, group_id: str) -> None:
        """A group's task was appended. Also for groups found in the log at start, past the quota if need be."""
        if group_id not in self._held:
            self._held[group_id] = environment
            self._used[environment] = self._used.get(environment, 0) + 1
            self._taken[environment] = self._taken.get(environment, 0) + 1

    def settle(self, groups: Iterable[str], version: int) -> None:
        """A receipt named these groups; their slots are free once policy `version` is announced."""
        for group_id in groups:
            if group_id in self._held:
                self._settled[group_id] = version
        self._free()

    def announce(self, version: int) -> None:
        """Policy `version` was published."""
        self._announced = max(self._announced, version)
        self._free()

    def release(self, group_id: str) -> None:
        """Nothing will ever come of this group."""
        if (environment := self._held.pop(group_id, None)) is not None:
            self._settled.pop(group_id, None)
            self._used[environment] -= 1

    def _share(self, environment: str) -> tuple[float, float]:
        used = self._used[environment] / self._quota[environment]
        return used, self._taken[environment] / self._ratios[environment]

    def _free(self) -> None:
        for group_id in [g for g, version in self._settled.items() if version <= self._announced]:
            self.release(group_id)


def _shares(total: int, ratios: Mapping[str, float]) -> dict[str, int]:
    """Whole slots, at least one each, and else as near to the ratios as `total` allows."""
    scale = total / sum(ratios.values())
    shares = {e: max(1, int(r * scale)) for e, r in ratios.items()}
    while sum(shares.values()) < total:
        shares[max(ratios, key=lambda e: ratios[e] * scale - shares[e])] += 1
    while sum(shares.values()) > max(total, len(ratios)):
        above = [e for e in ratios if shares[e] > 1]
        shares[min(above, key=lambda e: ratios[e] * scale - shares[e])] -= 1
    return shares
