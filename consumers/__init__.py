"""The consuming side: reader, staleness, groups, losses, trainer, ledger. Lazy: torch is imported when it is used.

Add a name in both places: `_HOMES` for the running program, the TYPE_CHECKING block for checkers and editors.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .advantages import group_advantages
    from .arrivals import Admission, Arrival
    from .audit import Audit
    from .batch import Batch, Sample, collate, exclusion, score_group
    from .groups import Assembler, Group
    from .hyperparameters import Advantage, Aggregation, LearnerSettings, Objective
    from .learner import Learner, StepResult
    from .ledger import Ledger, Lineage, lineage
    from .progress import Progress
    from .publisher import Place, Publisher
    from .reader import Reader
    from .seen import Seen
    from .staleness import StalenessGate
    from .trainer import Trainer, TrainerSettings

_HOMES = {
    "Admission": "arrivals",
    "Advantage": "hyperparameters",
    "Aggregation": "hyperparameters",
    "Arrival": "arrivals",
    "Assembler": "groups",
    "Audit": "audit",
    "Batch": "batch",
    "Group": "groups",
    "Learner": "learner",
    "LearnerSettings": "hyperparameters",
    "Ledger": "ledger",
    "Lineage": "ledger",
    "Objective": "hyperparameters",
    "Place": "publisher",
    "Progress": "progress",
    "Publisher": "publisher",
    "Reader": "reader",
    "Sample": "batch",
    "Seen": "seen",
    "StalenessGate": "staleness",
    "StepResult": "learner",
    "Trainer": "trainer",
    "TrainerSettings": "trainer",
    "collate": "batch",
    "exclusion": "batch",
    "group_advantages": "advantages",
    "lineage": "ledger",
    "score_group": "batch",
}

__all__ = [
    "Admission",
    "Advantage",
    "Aggregation",
    "Arrival",
    "Assembler",
    "Audit",
    "Batch",
    "Group",
    "Learner",
    "LearnerSettings",
    "Ledger",
    "Lineage",
    "Objective",
    "Place",
    "Progress",
    "Publisher",
    "Reader",
    "Sample",
    "Seen",
    "StalenessGate",
    "StepResult",
    "Trainer",
    "TrainerSettings",
    "collate",
    "exclusion",
    "group_advantages",
    "lineage",
    "score_group",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
