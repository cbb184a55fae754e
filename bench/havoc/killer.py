"""Who is killed, and when: drawn from a seed, at random instants and at the worst ones.

    anytime     a moment drawn at random
    publish     a receipt has just been written, its checkpoint has not been published yet
    rebalance   a worker or the trainer is about to join its group
    restart     the last victim has just been started again

The pace follows the run. A patient kill waits for a step since the last kill, for `LONGEST` at most; a hasty one does
not. A moment that does not come within `PATIENCE` is told as "anytime".
"""

import random
import time
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from havoc.plan import KINDS, Kind
from havoc.scene import Scene

Moment = Literal["anytime", "publish", "rebalance", "restart"]
WEIGHTS: dict[Moment, dict[Kind, int]] = {
    "anytime": {"trainer": 3, "worker": 3, "dispatcher": 2, "broker": 3, "store": 2},
    "publish": {"trainer": 4, "store": 2, "broker": 2},
    "rebalance": {"worker": 3, "broker": 2, "trainer": 2},
}
MOMENTS: dict[Moment, int] = {"anytime": 4, "publish": 3, "rebalance": 2, "restart": 2}
SHORTEST, LONGEST = 1.5, 20.0
"""Seconds between two kills, whatever the run does; a restart's own kill apart."""
HASTE, HASTY = 0.4, 4.0
"""Share of the kills that wait for no step, and seconds that they wait at most."""
PATIENCE = 5.0
"""Seconds that a moment is waited for."""
JUST_NOW = 0.3
"""Seconds for which a receipt counts as just written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One kill that was done."""

    number: int
    victim: str
    moment: Moment
    at: float
    """Seconds since the epoch."""
    step: int
    """Receipts that had been written."""


@dataclass(slots=True)
class Order:
    """The kill that is next."""

    moment: Moment
    kind: Kind
    delay: float
    """Seconds from the moment to the kill."""
    longest: float
    """Seconds that a step is waited for."""
    drawn: float
    steps: int


class Killer:
    """Used by one thread."""

    def __init__(self, scene: Scene, rng: random.Random) -> None:
        self._scene, self._rng = scene, rng
        self._wanted: list[Kind] = [kind for kind in KINDS if not scene.plan.victims or kind in scene.plan.victims]
        self.done: list[Kill] = []
        self._due: float | None = None
        self._order = self._draw()

    def look(self) -> Kill | None:
        """Kill if it is time to. Returns what was done."""
        moment = self._ripe()
        if moment is None or (victim := self._choose()) is None:
            return None
        scene = self._scene
        scene.journal.kill = len(self.done) + 1
        at = scene.kill(victim)
        kill = Kill(number=len(self.done) + 1, victim=victim, moment=moment, at=at, step=scene.signs.steps)
        self.done.append(kill)
        self._order, self._due = self._draw(), None
        return kill

    def _draw(self) -> Order:
        moments: list[Moment] = [m for m in MOMENTS if self._kinds(m) and (m != "restart" or self.done)]
        (moment,) = self._rng.choices(moments, [MOMENTS[m] for m in moments])
        weights = self._kinds(moment)
        (kind,) = self._rng.choices(list(weights), list(weights.values()))
        delay = self._rng.uniform(0.0, {"publish": 0.15, "restart": 3.0, "rebalance": 3.0}.get(moment, 1.0))
        longest = self._rng.uniform(SHORTEST, HASTY) if self._rng.random() < HASTE else LONGEST
        return Order(moment, kind, delay, longest, time.monotonic(), self._scene.signs.steps)

    def _kinds(self, moment: Moment) -> dict[Kind, int]:
        weights = WEIGHTS["anytime"] if moment == "restart" else WEIGHTS[moment]
        return {kind: weight for kind, weight in weights.items() if kind in self._wanted}

    def _ripe(self) -> Moment | None:
        """The moment that it is now, if a kill is due."""
        order, now = self._order, time.monotonic()
        if self._due is None and (began := self._begun(now)) is not None:
            self._due = began + order.delay
        if self._due is not None and now >= self._due:
            return order.moment
        return "anytime" if now > order.drawn + order.longest + PATIENCE else None

    def _begun(self, now: float) -> float | None:
        """When the order's moment began; None where it has not."""
        order, signs = self._order, self._scene.signs
        if order.moment == "restart":
            last = self.done[-1].victim
            return now - self._scene.age(last) if self._scene.alive(last) else None
        waited = now - order.drawn
        if waited < SHORTEST or (signs.steps == order.steps and waited < order.longest):
            return None
        if order.moment == "anytime":
            return now
        if order.moment == "publish":
            return signs.receipt if now - signs.receipt < JUST_NOW else None
        return signs.join if signs.join > order.drawn or now - signs.join < JUST_NOW else None

    def _choose(self) -> str | None:
        """A process of the kind that is to die, who died least; the last victim where it is to die in its restart."""
        order, scene = self._order, self._scene
        if order.moment == "restart" and scene.expendable(self.done[-1].victim):
            return self.done[-1].victim
        kinds: list[Kind] = [order.kind, *self._rng.sample(self._wanted, len(self._wanted))]
        for kind in kinds:
            if ready := [name for name in scene.members(kind) if scene.expendable(name)]:
                times = Counter(kill.victim for kill in self.done)
                fewest = min(times[name] for name in ready)
                return self._rng.choice([name for name in ready if times[name] == fewest])
        return None
