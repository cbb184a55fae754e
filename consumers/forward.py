"""The model's side of a loss: log-probabilities of the tokens in a batch, computed only where they are needed.

The output layer is by far the widest matrix of a language model, and most tokens of an agent's episode were not
sampled. So its input is cut down to the positions that predict a token in the loss; everything the model does with its
logits afterwards (scaling, soft caps) then happens to those alone.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .batch import Batch

LOWEST_LOGPROB = -1e4
"""A token that a model forbids (logit -inf) adds nothing to an entropy; 0 * -inf would be NaN."""


class Scores(NamedTuple):
    """What a model says of the tokens in the loss; float32, 0 elsewhere."""

    logprobs: Tensor
    """[b, t]: log-probability of each token, after its row's temperature: what a sampler with these weights reports."""
    entropy: Tensor
    """[b, t]: entropy (nats) of the distribution that the token stands in."""


def score_tokens(model: nn.Module, batch: Batch, *, entropy_gradient: bool = False) -> Scores:
    """Score the tokens in the loss. The entropy carries a gradient only on demand: it would hold memory.

    `model` is a causal language model in the manner of Hugging Face: right padding, `.logits` [b, t, vocabulary].
    Raises `TypeError` for a model without an output layer.
    """
    needed = batch.mask[:, 1:]
    rows = needed.nonzero()[:, 0]
    logits = selected_logits(model, batch, needed) / batch.temperatures[rows].unsqueeze(-1)
    every = logits.log_softmax(-1)
    chosen = every.gather(-1, batch.tokens[:, 1:][needed].unsqueeze(-1)).squeeze(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(every.exp() * every.clamp(min=LOWEST_LOGPROB)).sum(-1)
    return Scores(_scatter(chosen, batch.mask), _scatter(entropy, batch.mask))


def selected_logits(model: nn.Module, batch: Batch, needed: Tensor) -> Tensor:
    """Logits [k, vocabulary] in float32 at the k positions of `needed` [b, t - 1] bool."""
    index = nn.functional.pad(needed, (0, 1)).flatten().nonzero().squeeze(-1)
    with _narrowed(_part(model, "get_output_embeddings"), index):
        output = model(input_ids=batch.tokens, attention_mask=batch.attention, use_cache=False)
    logits: Tensor = output.logits
    return logits.squeeze(0).float()


def vocabulary_size(model: nn.Module) -> int:
    """Number of tokens that the model can be given."""
    weight: object = getattr(_part(model, "get_input_embeddings"), "weight", None)
    if not isinstance(weight, Tensor):
        raise TypeError(f"{type(model).__name__}: expected an embedding with one row a token")
    return len(weight)


@contextmanager
def _narrowed(layer: nn.Module, index: Tensor) -> Generator[None]:
    """Within, this layer sees [1, k, h] for [b, t, h]: its input at these positions of the flattened [b * t]."""

    def narrow(_layer: nn.Module, arguments: tuple[Any, ...]) -> tuple[Tensor]:
        hidden: Tensor = arguments[0]
        return (hidden.flatten(0, 1)[index].unsqueeze(0),)

    handle = layer.register_forward_pre_hook(narrow)
    try:
        yield
    finally:
        handle.remove()


def _part(model: nn.Module, getter: str) -> nn.Module:
    part: object = getattr(model, getter, lambda: None)()
    if not isinstance(part, nn.Module):
        raise TypeError(
            f"{type(model).__name__}: expected a causal language model with {getter}(), as AutoModelForCausalLM gives"
        )
    return part


def _scatter(values: Tensor, mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)
