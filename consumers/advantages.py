"""Advantages: how much better a sample did than the others of its group. Pure functions over one group's rewards.

    kind        advantage of sample i in a group of n                 paper
    grpo        (r_i - mean(r)) / (std(r) + 1e-6)                     Shao et al. 2024, arXiv:2402.03300
    dr-grpo     r_i - mean(r)                                         Liu et al. 2025, arXiv:2503.20783
    rloo        r_i - mean(r without r_i)                             Ahmadian et al. 2024, arXiv:2402.14740

Only samples that may train belong in `rewards`: an empty or failed one would shift the mean of the others.
"""

import torch
from torch import Tensor

from .hyperparameters import Advantage

EPSILON = 1e-6


def group_advantages(rewards: Tensor, kind: Advantage) -> Tensor:
    """Advantages [n] of the samples of one group with these rewards [n].

    Exactly 0 for every sample where all rewards are equal (a group of one too): such a group teaches nothing.
    """
    if kind is Advantage.RLOO:
        return leave_one_out(rewards)
    return group_relative(rewards, normalise=kind is Advantage.GRPO)


def group_relative(rewards: Tensor, *, normalise: bool) -> Tensor:
    """Rewards [n] minus their mean, divided by their deviation when `normalise`: GRPO, or Dr. GRPO without.

    The deviation is the population's (divisor n), so that a group of one is 0 and not NaN.
    """
    if _flat(rewards):
        return torch.zeros_like(rewards)
    centred = rewards - rewards.mean()
    return centred / (rewards.std(correction=0) + EPSILON) if normalise else centred


def leave_one_out(rewards: Tensor) -> Tensor:
    """Rewards [n], each minus the mean of the other n - 1: RLOO. A group of one has no others and gets 0."""
    if _flat(rewards):
        return torch.zeros_like(rewards)
    others = (rewards.sum() - rewards) / (len(rewards) - 1)
    return rewards - others


def _flat(rewards: Tensor) -> bool:
    # Compared, not subtracted: the mean of n equal floats may differ from them in the last bit.
    return not len(rewards) or bool((rewards == rewards[0]).all())
