"""From trajectories to tensors, token for token.

    group of trajectories --score_group--> samples --ordered, minibatches--> one optimizer step each
                                                         --microbatches--> what fits into memory --collate--> Batch

Nothing is re-tokenized, re-ordered within a sequence or replaced. Everything at column j of a batch is about token j:
its log-probability is that of token j given the tokens before it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from ..schemas import Status, Trajectory
from ..schemas.records import Mask
from .advantages import group_advantages
from .hyperparameters import Advantage, Objective

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """A trajectory that trains, and how much better than its group it was."""

    trajectory: Trajectory
    advantage: float = 0.0
    """Cloning does not look at it."""

    @property
    def length(self) -> int:
        """Tokens, prompt and all turns."""
        return len(self.trajectory.tokens)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Samples as tensors: b rows, right-padded to the longest, t columns."""

    tokens: Tensor
    """[b, t] int64."""
    attention: Tensor
    """[b, t] bool: real tokens, not padding."""
    mask: Tensor
    """[b, t] bool: tokens in the loss. Sampled, not loss-masked, and with at least one token before them."""
    behaviour: Tensor
    """[b, t] float32: log-probability of each sampled token as its sampler computed it; 0 elsewhere or if unknown."""
    versions: Tensor
    """[b, t] int64: policy version of each sampled token; -1 elsewhere or if unknown."""
    advantages: Tensor
    """[b] float32."""
    temperatures: Tensor
    """[b] float32: what the logits are divided by; 1 for greedy rows, as their log-probabilities are."""

    def to(self, device: torch.device) -> "Batch":
        """The same batch on another device; itself where it is there already."""
        if self.tokens.device == device:
            return self
        columns = ("tokens", "attention", "mask", "behaviour", "versions", "advantages", "temperatures")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in columns})


def loss_mask(trajectory: Trajectory) -> Mask:
    """[n] bool: the tokens that count in a loss. The very first token of all has no context that could predict it."""
    mask = trajectory.trainable_mask()
    mask[:1] = False
    return mask


def exclusion(trajectory: Trajectory, objective: Objective) -> str | None:
    """Why a trajectory cannot train, as a word that can be counted, or None if it can.

    "failed" and "aborted": its reward says nothing about the policy. "empty": no token is in the loss. "unscored": its
    sampler's log-probabilities are unknown, so it can be cloned but not reinforced.
    """
    if trajectory.status in {Status.FAILED, Status.ABORTED}:
        return trajectory.status.value.lower()
    if not loss_mask(trajectory).any():
        return "empty"
    if objective is Objective.GRPO and not len(trajectory.logprobs):
        return "unscored"
    return None


def score_group(
    group: Iterable[Trajectory], kind: Advantage, objective: Objective = Objective.GRPO
) -> tuple[Sample, ...]:
    """The samples of one group with their advantages, in the group's order.

    Trajectories with an `exclusion` are left out, and out of the group's mean too.
    """
    kept = [t for t in group if exclusion(t, objective) is None]
    rewards = torch.tensor([t.reward for t in kept], dtype=torch.float64)
    advantages = group_advantages(rewards, kind)
    return tuple(Sample(trajectory=t, advantage=float(a)) for t, a in zip(kept, advantages, strict=True))


Key = tuple[str, int, str]
"""What samples are ordered by: group, sample index, trajectory id."""


def sample_key(sample: Sample) -> Key:
    return (sample.trajectory.group_id, sample.trajectory.sample_index, sample.trajectory.trajectory_id)


def ordered(samples: Iterable[Sample]) -> list[Sample]:
    """The samples in the one order that does not depend on how they arrived."""
    return sorted(samples, key=sample_key)


def minibatches(samples: Sequence[T], count: int, generator: torch.Generator) -> list[list[T]]:
    """The samples, or whatever stands for them, shuffled, in `count` parts whose sizes differ by one at most; never an
    empty part."""
    count = max(1, min(count, len(samples)))
    shuffled = [samples[int(i)] for i in torch.randperm(len(samples), generator=generator)]
    # Strided: the sizes differ by one at most, and no part is empty.
    return [shuffled[part::count] for part in range(count)]


def microbatches(samples: Sequence[Sample], max_tokens: int) -> list[list[Sample]]:
    """The samples by length, in parts of at most `max_tokens` padded tokens; a longer sample stands alone."""
    # Longest first: the largest allocation comes first, and where memory is too small it fails at once.
    parts: list[list[Sample]] = []
    for sample in sorted(samples, key=lambda s: -s.length):
        longest = parts[-1][0].length if parts else 0
        if parts and longest * (len(parts[-1]) + 1) <= max_tokens:
            parts[-1].append(sample)
        else:
            parts.append([sample])
    return parts


def collate(samples: Sequence[Sample], *, pad_id: int = 0) -> Batch:
    """The samples as one batch, a row each, in the order given.

    `pad_id` is any token of the vocabulary: padding is neither attended to nor in the loss.
    """
    shape = (len(samples), max((s.length for s in samples), default=0))
    tokens = np.full(shape, pad_id, np.int64)
    attention, mask = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
    behaviour, versions = np.zeros(shape, np.float32), np.full(shape, -1, np.int64)
    for row, sample in enumerate(samples):
        trajectory, n = sample.trajectory, sample.length
        sampled = trajectory.sampled_mask()
        tokens[row, :n] = trajectory.tokens
        attention[row, :n] = True
        mask[row, :n] = loss_mask(trajectory)
        if len(trajectory.logprobs):
            behaviour[row, :n][sampled] = trajectory.logprobs
        if trajectory.spans:
            versions[row, :n][sampled] = trajectory.versions()
    return Batch(
        tokens=torch.as_tensor(tokens),
        attention=torch.as_tensor(attention),
        mask=torch.as_tensor(mask),
        behaviour=torch.as_tensor(behaviour),
        versions=torch.as_tensor(versions),
        advantages=torch.tensor([s.advantage for s in samples], dtype=torch.float32),
        temperatures=torch.tensor([s.trajectory.temperature or 1.0 for s in samples], dtype=torch.float32),
    )
