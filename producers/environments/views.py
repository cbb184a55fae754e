"""How an agent sees a game, how its words become a move, and what follows when they do not.

    observation --read--> text the agent reads          text the agent wrote --act--> move, or Invalid
                                                                                       |
                                             Rules: forgiven, and told why  <----------+----------> the episode ends

Every adapter has a view of its own that suits a language model; a demo with a small model brings one of few words.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from ...schemas import Role
from ..environment import Message, Outcome

Seen = TypeVar("Seen")
Move = TypeVar("Move")


@dataclass(frozen=True, slots=True, kw_only=True)
class Invalid:
    """The agent's words are no move."""

    reason: str
    """What the agent reads when it is forgiven."""


@dataclass(frozen=True, kw_only=True)  # no slots: Python 3.11 cannot call a generic class that has them and is frozen
class View(Generic[Seen, Move]):
    """What the agent reads and how its words are understood; what is left out, the adapter does in its own way.

    Both must be pure: many episodes share one view.
    """

    read: Callable[[Seen], str] | None = None
    act: Callable[[str], Move | Invalid] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What an invalid move costs."""

    forgive: int = 0
    """So many in an episode are answered with their reason; the next one ends the episode with a reward of 0."""
    penalty: float = 0.0
    """Taken off the terminal reward for each, forgiven or not."""


class Referee:
    """Keeps count of one episode's invalid moves."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._strikes = 0

    def refuse_move(self, invalid: Invalid) -> Outcome:
        """The answer to an invalid move: the reason, or the end."""
        self._strikes += 1
        if self._strikes > self._rules.forgive:
            return self.end_game(0.0, text=invalid.reason)
        return Outcome(messages=(say_text(invalid.reason),))

    def end_game(
        self,
        reward: float,
        *,
        text: str,
        truncated: bool = False,
        step_reward: float | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Outcome:
        """The last outcome: the game's reward less the penalties."""
        fine = self._rules.penalty * self._strikes
        return Outcome(
            messages=(say_text(text),) if text else (),
            done=not truncated,
            truncated=truncated,
            step_reward=step_reward,
            reward=reward - fine,
            rewards={"game": reward, "invalid": -fine} if fine else {},
            metrics={**(metrics or {}), "invalid_moves": float(self._strikes)},
        )


def say_text(text: str) -> Message:
    """What the environment says to the agent."""
    return Message(role=Role.USER, content=text)


def open_talk(system: str, text: str) -> tuple[Message, ...]:
    """The opening: a system message where there is one, and the first thing the agent reads."""
    opening = (say_text(text),)
    return (Message(role=Role.SYSTEM, content=system), *opening) if system else opening
