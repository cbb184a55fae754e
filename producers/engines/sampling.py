"""Drawing tokens: from logits to ids and the log-probabilities of the distribution they were drawn from.

Temperature first, then top-k, then top-p over what is left, as vLLM does it (nucleus sampling: Holtzman et al. 2020,
https://arxiv.org/abs/1904.09751). Greedy rows (temperature 0) take the largest logit; top-k and top-p do not touch
them, and their log-probability is that at temperature 1.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...schemas import Sampling


def draw_tokens(
    logits: Tensor, samplings: Sequence[Sampling], generator: torch.Generator
) -> tuple[list[int], list[float]]:
    """One token for each row of `logits` [b, vocabulary], and its log-probability."""
    logprobs = row_logprobs(logits, samplings)
    tokens = _invert_cdf(logprobs, generator)
    if any(not sampling.temperature for sampling in samplings):
        greedy = torch.tensor([not sampling.temperature for sampling in samplings], device=logits.device)
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
    chosen = logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return tokens.cpu().numpy().tolist(), chosen.cpu().numpy().tolist()


def row_logprobs(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """[b, vocabulary] float32: log-probabilities of the distribution that each row is drawn from; -inf: cannot be."""
    temperatures = torch.tensor([sampling.temperature or 1.0 for sampling in samplings], device=logits.device)
    logits = logits.float() / temperatures.unsqueeze(-1)
    cut = [row for row, s in enumerate(samplings) if s.temperature and (s.top_k or s.top_p < 1)]
    if cut:
        logits[cut] = _cut_tail(logits[cut], [samplings[row] for row in cut])
    return logits.log_softmax(-1)


def _cut_tail(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Logits with -inf for what top-k and top-p leave out."""
    width = logits.shape[-1]
    largest, order = logits.sort(-1, descending=True)
    kept = torch.tensor([min(s.top_k, width) or width for s in samplings], device=logits.device)
    rank = torch.arange(width, device=logits.device)
    largest = largest.masked_fill(rank >= kept.unsqueeze(-1), -torch.inf)
    mass = torch.tensor([s.top_p for s in samplings], device=logits.device)
    probabilities = largest.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    largest = largest.masked_fill((before >= mass.unsqueeze(-1)) & (rank > 0), -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter(-1, order, largest)


def _invert_cdf(logprobs: Tensor, generator: torch.Generator) -> Tensor:
    """[b]: one draw a row. In float64, so that rounding neither favours nor invents a token."""
    cumulative = logprobs.double().exp().cumsum(-1)
    uniform = torch.rand(len(logprobs), 1, dtype=torch.float64, device=logprobs.device, generator=generator)
    return (
        torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
        .squeeze(-1)
        .clamp_(max=logprobs.shape[-1] - 1)
    )
