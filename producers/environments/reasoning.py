"""Items of reasoning-gym (https://github.com/open-thought/reasoning-gym), for `open_environment("reasoning-gym", ...)`.

The seed makes the item, its question opens the episode, and the dataset's own score of the answer (0 to 1) is the
reward. With `tries` above 1 the agent is told that an answer was wrong and may give another one; the last one counts.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

from ..environment import Action, EnvironmentFactory, Outcome
from .games import host_game
from .options import (
    Common,
    Options,
    UnusableEnvironment,
    check_options,
    read_common,
    read_option,
    refuse_payload,
    tell_version,
    unknown_name,
)
from .views import Invalid, Referee, open_talk, say_text

_OPTIONS = ("tries",)
_OURS = ("seed", "size")
"""Settings of every dataset that are set here: the item is made by the episode's seed."""

_KEPT = 256
"""Items kept, so that the samples of a group, and groups under way together, share theirs."""


class Asked(NamedTuple):
    """What a view's `read` gets: the question, before the first answer and after each wrong one."""

    question: str
    tries: int
    """Answers that may still be given."""
    score: float | None
    """Score of the answer before; None before the first."""


class Item(NamedTuple):
    """A question and the dataset that scores the answers to it."""

    dataset: Any
    entry: Mapping[str, Any]


def open_game(name: str, options: Options) -> EnvironmentFactory:
    """A factory of one dataset. Raises `UnusableEnvironment`.

    Options: `tries` (answers an episode), the common ones, and the fields of the dataset's configuration but for `seed`
    and `size`.
    """
    datasets: Mapping[str, tuple[Any, Any]] = import_module("reasoning_gym.factory").DATASETS
    if name not in datasets:
        raise unknown_name("dataset of reasoning-gym", name, sorted(datasets))
    fields = {field.name for field in dataclasses.fields(datasets[name][1])}.difference(_OURS)
    check_options(name, options, {*_OPTIONS, *fields})
    common = read_common(name, options, threads=True)
    tries = read_option(options, "tries", int, 1)
    if tries < 1:
        raise UnusableEnvironment(f"option 'tries': expected 1 or more, found {tries}")
    settings = {key: value for key, value in options.items() if key in fields}
    create = import_module("reasoning_gym").create_dataset

    @lru_cache(_KEPT)
    def make_item(seed: int) -> Item:
        dataset = create(name, seed=seed, size=1, **settings)
        return Item(dataset, dataset[0])

    return host_game(lambda: ReasoningGame(common, make_item, tries), threads=common.threads)


class ReasoningGame:
    """One question of a reasoning-gym dataset as a `Game`."""

    def __init__(self, common: Common, make_item: Callable[[int], Item], tries: int) -> None:
        self.name = common.label
        self.version = tell_version("reasoning-gym")
        self._common = common
        self._make_item = make_item
        self._tries = tries
        self._read: Callable[[Asked], str] = common.view.read or read_question
        self._act: Callable[[str], str | Invalid] = common.view.act or take_answer

    def reset(self, payload: Mapping[str, str], seed: int) -> Outcome:
        refuse_payload(payload)
        self._item = self._make_item(seed)
        self._left = self._tries
        self._referee = Referee(self._common.rules)
        return Outcome(messages=open_talk(self._common.system, self._read(self._ask(None))))

    def step(self, action: Action) -> Outcome:
        answer = self._act(action.text)
        if isinstance(answer, Invalid):
            return self._referee.refuse_move(answer)
        self._left -= 1
        score = score_answer(self._item, answer)
        if score < 1 and self._left:
            return Outcome(messages=(say_text(self._read(self._ask(score))),))
        used = float(self._tries - self._left)
        text = "Right." if score >= 1 else f"Wrong. The answer was: {self._item.entry['answer']}"
        return self._referee.end_game(score, text=text, metrics={"tries": used})

    def close(self) -> None:
        """Nothing to release."""

    def _ask(self, score: float | None) -> Asked:
        return Asked(str(self._item.entry["question"]), self._left, score)


def score_answer(item: Item, answer: str) -> float:
    """The dataset's score of an answer, 0 to 1; 0 for one that its scorer cannot read."""
    try:
        return float(item.dataset.score_answer(answer, item.entry))
    except Exception:  # noqa: BLE001 - several scorers parse the answer and raise whatever their parser does
        return 0.0


def read_question(asked: Asked) -> str:
    """The default view: the question, later that the answer was wrong."""
    if asked.score is None:
        return asked.question
    return f"That is not right. Try again; tries left: {asked.tries}."


def take_answer(text: str) -> str | Invalid:
    """The default move: what stands between the last <answer> tags, or else the whole text."""
    _, opened, rest = text.rpartition("<answer>")
    return rest.partition("</answer>")[0].strip() if opened else text
