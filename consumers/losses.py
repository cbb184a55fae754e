"""Losses as pure functions over log-probabilities [b, t] and a loss mask [b, t].

Three policies meet in one token's term:

    behaviour   the sampler's, per token whatever version sampled it      given with the trajectory
    proximal    the weights at the start of this optimisation step        recomputed by the trainer, no gradient
    current     the weights being optimised                               carries the gradient

    term = w * min(u * A, clip(u, 1 - low, 1 + high) * A)
    u = current / proximal            the ratio that is CLIPPED     (PPO, Schulman et al. 2017, arXiv:1707.06347;
                                                                     separate low and high: DAPO, arXiv:2503.14476)
    w = min(proximal / behaviour, cap)  the weight that is TRUNCATED, no gradient
                                                                    (decoupled objective: AReaL, arXiv:2505.24298)

In the first pass over the first minibatch the proximal policy is the current one: u is 1 there and only its gradient
counts. Staleness and numerical differences between sampler and trainer go into w, never into the clip range.

Masked positions may hold anything, NaN too: they reach neither a value nor a gradient. Log-ratios are clamped to
+-20 before they are exponentiated; a clamped token has no gradient through that ratio.
"""

import torch
from torch import Tensor

from .hyperparameters import Aggregation

MAX_LOG_RATIO = 20.0


def policy_loss(
    logprobs: Tensor,
    proximal: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    importance_cap: float,
) -> Tensor:
    """The loss of each token [b, t]: minus the truncated weight times the clipped surrogate; 0 where masked.

    `logprobs` (current), `proximal` and `behaviour` [b, t]; `advantages` [b]; `mask` [b, t] bool.
    """
    weights = importance_weights(proximal, behaviour, mask, cap=importance_cap)
    return -weights * clipped_surrogate(logprobs, proximal, advantages, mask, clip_low=clip_low, clip_high=clip_high)


def importance_weights(proximal: Tensor, behaviour: Tensor, mask: Tensor, *, cap: float) -> Tensor:
    """min(proximal / behaviour, cap) for each token [b, t], without gradient; 1 where masked."""
    return log_ratio(proximal, behaviour, mask).exp().clamp(max=cap).detach()


def clipped_surrogate(
    logprobs: Tensor, proximal: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """PPO's surrogate of each token [b, t], to be maximised: min(u A, clip(u, 1 - low, 1 + high) A); 0 where masked.

    `advantages` [b] hold for every token of their row.
    """
    ratio = log_ratio(logprobs, proximal.detach(), mask).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    gain = advantages.unsqueeze(-1)
    return torch.where(mask, torch.minimum(ratio * gain, clipped * gain), 0.0)


def log_ratio(new: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """log(new / old) of each token [b, t], clamped to +-20; 0 where masked."""
    # Chosen before anything else is computed: 0 times a NaN would still be one.
    return torch.where(mask, new - old, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_penalty(logprobs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """An estimate of KL(current || reference) from each sampled token [b, t], never negative; 0 where masked.

    k3 of Schulman, "Approximating KL divergence" (2020): r - 1 - log r with r = reference / current; GRPO's penalty.
    """
    ratio = log_ratio(reference.detach(), logprobs, mask)
    # expm1 keeps the digits of small log-ratios, which exp(x) - 1 - x loses.
    return torch.expm1(ratio) - ratio


def cross_entropy(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Behaviour cloning: minus the log-probability of each token [b, t]; 0 where masked."""
    return torch.where(mask, -logprobs, 0.0)


def aggregate(values: Tensor, mask: Tensor, how: Aggregation, *, total: float | None = None) -> Tensor:
    """One number from the values of the tokens [b, t]: their mean over tokens, or over sequences.

    `total` is the number of tokens (or of sequences that have any) of the whole step where this is only a part of it,
    so that parts add up to the step's mean. Without it, this is the whole. An empty mask gives 0.
    """
    total = denominator(mask, how) if total is None else total
    kept = torch.where(mask, values, 0.0)
    if how is Aggregation.SEQUENCE_MEAN:
        kept = kept / mask.sum(-1, keepdim=True).clamp(min=1)
    return kept.sum() / max(total, 1)


def denominator(mask: Tensor, how: Aggregation) -> int:
    """What a mean over this mask [b, t] divides by: its tokens, or its sequences that have any."""
    counted = mask if how is Aggregation.TOKEN_MEAN else mask.any(-1)
    return int(counted.sum())
