"""The consuming side: reader, staleness, groups, losses, trainer, ledger. Lazy: torch is imported when it is used.

Add a name in both places: `_HOMES` for the running program, the TYPE_CHECKING block for checkers and editors.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .advantages import group_advantages
    from .batch import Batch, Sample, collate, exclusion, score_group
    from .hyperparameters import Advantage, Aggregation, LearnerSettings, Objective
    from .learner import Learner, StepResult

_HOMES = {
    "Advantage": "hyperparameters",
    "Aggregation": "hyperparameters",
    "Batch": "batch",
    "Learner": "learner",
    "LearnerSettings": "hyperparameters",
    "Objective": "hyperparameters",
    "Sample": "batch",
    "StepResult": "learner",
    "collate": "batch",
    "exclusion": "batch",
    "group_advantages": "advantages",
    "score_group": "batch",
}

__all__ = [
    "Advantage",
    "Aggregation",
    "Batch",
    "Learner",
    "LearnerSettings",
    "Objective",
    "Sample",
    "StepResult",
    "collate",
    "exclusion",
    "group_advantages",
    "score_group",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
