"""Consumer groups of the memory log: who should hold which partition, and who still does.

    join, leave, grow --> wanted is levelled --> in its own poll each member gives up what it no longer wants
                                                                  --> and takes what it wants and nobody holds

That is how Kafka's cooperative rebalancing ends: what a member keeps is never taken away in between. Nothing here
locks: it is used under the lock of the store.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..log import Partition


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    """One consumer in a group."""

    topics: frozenset[str]
    instance: str | None = None
    wanted: set[Partition] = field(default_factory=set[Partition])
    held: set[Partition] = field(default_factory=set[Partition])
    kept_until: float | None = None
    """A static member that went: its place is kept until then (s, monotonic)."""
    fenced: bool = False
    """Another member took over with the same instance."""

    def surplus(self) -> frozenset[Partition]:
        """Held, and to be given up."""
        return frozenset(self.held - self.wanted)


class Group:
    """The members and the committed offsets of one group."""

    def __init__(self, patience: float) -> None:
        self.offsets: dict[Partition, int] = {}
        self._members: list[Member] = []
        self._patience = patience

    def join(self, topics: frozenset[str], instance: str | None, counts: Mapping[str, int]) -> Member:
        """A new member; with an `instance` known here it takes over that one's place."""
        member = Member(topics=topics, instance=instance)
        for former in [m for m in self._members if instance is not None and m.instance == instance]:
            member.wanted = former.wanted
            former.fenced = True
            self._members.remove(former)
        self._members.append(member)
        self.level(counts)
        return member

    def leave(self, member: Member, now: float, counts: Mapping[str, int]) -> None:
        """Give up everything; a static member's place is kept for a while."""
        member.held.clear()
        if member.instance is not None and not member.fenced:
            member.kept_until = now + self._patience
        elif member in self._members:
            self._members.remove(member)
            self.level(counts)

    def expire(self, now: float, counts: Mapping[str, int]) -> float | None:
        """Drop the places kept too long. Returns when the next one ends, if any."""
        late = [m for m in self._members if m.kept_until is not None and m.kept_until <= now]
        for member in late:
            self._members.remove(member)
        if late:
            self.level(counts)
        return min((m.kept_until for m in self._members if m.kept_until is not None), default=None)

    def free(self, member: Member) -> frozenset[Partition]:
        """Wanted by this member and held by nobody."""
        held = {partition for other in self._members for partition in other.held}
        return frozenset(member.wanted - held)

    def level(self, counts: Mapping[str, int]) -> None:
        """Spread the partitions evenly, moving as few as possible. `counts` are the partitions of each topic."""
        self._place(counts)
        while move := self._find_move():
            giver, taker, partition = move
            giver.wanted.remove(partition)
            taker.wanted.add(partition)

    def _place(self, counts: Mapping[str, int]) -> None:
        everything = {Partition(topic, number) for topic, count in counts.items() for number in range(count)}
        for member in self._members:
            member.wanted = {p for p in member.wanted & everything if p.topic in member.topics}
        taken = {partition for member in self._members for partition in member.wanted}
        for partition in sorted(everything - taken):
            if readers := [m for m in self._members if partition.topic in m.topics]:
                min(readers, key=lambda m: len(m.wanted)).wanted.add(partition)

    def _find_move(self) -> tuple[Member, Member, Partition] | None:
        ranked = sorted(self._members, key=lambda m: len(m.wanted))
        for giver in reversed(ranked):
            for taker in ranked:
                if len(giver.wanted) - len(taker.wanted) < 2:
                    break
                if shared := [p for p in giver.wanted if p.topic in taker.topics]:
                    return giver, taker, max(shared)
        return None
