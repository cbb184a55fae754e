"""What a step depends on besides its records and the state before it. Its checkpoint tells, so that the step replays.

objective   as the trainer compares it when it restores        learner   every setting, as JSON
device      "cpu", "cuda"                                      threads   of torch: sums are split among them
torch       its version                                        ranks     processes that made the step together
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ..infra.checkpoints import CheckpointError, Manifest
from .hyperparameters import Advantage, Aggregation, LearnerSettings, Objective
from .learner import Learner


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """Those of one checkpoint's step."""

    learner: LearnerSettings
    device: str
    threads: int
    torch: str
    ranks: int

    def differing(self) -> tuple[str, ...]:
        """In what this process differs, so that bits may too."""
        found = [("torch", self.torch, torch.__version__), ("ranks", str(self.ranks), "1")]
        return tuple(f"{name}: {there} then, {here} now" for name, there, here in found if there != here)


def tell_circumstances(learner: Learner) -> dict[str, str]:
    """The present ones, as a manifest's metadata."""
    return {
        "objective": learner.settings.objective.value,
        "learner": json.dumps(asdict(learner.settings), sort_keys=True),
        "device": learner.device.type,
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "ranks": str(dist.get_world_size() if dist.is_initialized() else 1),
    }


def read_circumstances(manifest: Manifest) -> Circumstances:
    """Those that a checkpoint tells. Raises `CheckpointError` where it does not."""
    told = manifest.metadata
    try:
        return Circumstances(
            learner=_settings(json.loads(told["learner"])),
            device=told["device"],
            threads=int(told["threads"]),
            torch=told["torch"],
            ranks=int(told["ranks"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"policy {manifest.version} of run {manifest.run} does not tell how it was learned ({error}): it was "
            f"written by another release, or not by a trainer"
        ) from error


def _settings(told: Mapping[str, Any]) -> LearnerSettings:
    settings = LearnerSettings(**told)
    return replace(
        settings,
        objective=Objective(settings.objective),
        advantage=Advantage(settings.advantage),
        aggregation=Aggregation(settings.aggregation),
        betas=(settings.betas[0], settings.betas[1]),
    )
