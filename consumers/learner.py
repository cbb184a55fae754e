"""The learner: a model, its optimizer, and one deterministic optimisation step over samples.

    samples --ordered--> minibatches (shuffled by the learner's own generator)
                           |  before the first update: proximal log-probabilities of every minibatch but the first
                           v
       for each minibatch: micro-batches --forward, loss / step's total, backward--> clip --> AdamW

The same samples on the same state give the same loss and the same weights, bit for bit on one machine, in whatever
order the samples came. A learner saved and loaded goes on as if nothing had happened.

Several ranks make one step together: the samples of all are ordered and dealt into minibatches as if they were one
rank's, each computes the gradient of its own, divided by what all have, and the sums are what every rank applies. So
the weights stay the same everywhere, and what a step does depends on its samples and not on who had them. A rank
without any takes part with zeros.
"""

import copy
import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import losses
from .batch import Batch, Key, Sample, collate, exclusion, loss_mask, microbatches, minibatches, ordered, sample_key
from .forward import Scores, score_tokens, vocabulary_size
from .hyperparameters import LearnerSettings, Objective
from .ranks import ALONE, Ranks

__all__ = ["Learner", "LearnerSettings", "StepResult"]

logger = logging.getLogger(__name__)

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step did."""

    updated: bool
    """The weights changed."""
    skipped: str | None
    """Why they did not: "empty", "uninformative" or "nonfinite"."""
    loss: float
    """Of the first pass over the whole batch; 0 where the step was skipped before it."""
    samples: int
    """Samples with at least one token in the loss."""
    tokens: int
    """Tokens in the loss."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """See docs/algorithms.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hand:
    """What one rank brings to a step."""

    keys: list[Key]
    """Of its samples that have a token in the loss, in order."""
    tokens: int
    informative: int
    offered: int


@dataclass(slots=True, kw_only=True)
class _Part:
    """A micro-batch and what does not change while the step optimises it."""

    batch: Batch
    proximal: Tensor | None = None
    """[b, t]; None until the first pass over the first minibatch, whose own log-probabilities it is."""
    reference: Tensor | None = None
    """[b, t]; None without a penalty for leaving the reference."""


class Learner:
    """Owns model, optimizer and randomness. Not thread-safe.

    The model is kept in evaluation mode: with dropout, recomputed log-probabilities would not be the sampler's.
    """

    def __init__(self, model: nn.Module, settings: LearnerSettings, ranks: Ranks = ALONE) -> None:
        """`model`: a causal language model (`forward.score_tokens`), trained in place, in float32, on its device; the
        same weights on every rank."""
        self.model, self.settings = model.eval(), settings
        self._ranks = ranks
        self.steps = self.updates = 0
        self._reference = copy.deepcopy(self.model) if settings.kl else None
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._optimizer: torch.optim.Optimizer = _adamw(self._parameters, settings)
        self._generator = torch.Generator().manual_seed(settings.seed)

    @property
    def device(self) -> torch.device:
        return self._parameters[0].device

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the model knows."""
        return vocabulary_size(self.model)

    def step(self, samples: Sequence[Sample], *, offered: int | None = None) -> StepResult:
        """Optimise over these samples and those of the other ranks: `minibatches` x `epochs` updates, or none where too
        few of them inform. The result tells of all ranks' samples, and is the same on each.

        Samples without a token in the loss are passed over. `offered` counts the samples that the step was offered,
        those that the caller dropped as uninformative included; without it, `samples` are all.
        Raises `ValueError` for a sample that the objective cannot train on, `RankLost`.
        """
        counted = [(s, int(loss_mask(s.trajectory).sum())) for s in ordered(samples)]
        kept = [s for s, count in counted if count]
        _check(kept, self.settings.objective)
        hand = _Hand(
            keys=[sample_key(s) for s in kept],
            tokens=sum(count for _, count in counted),
            informative=self._informative(kept),
            offered=offered or len(samples),
        )
        hands = self._ranks.exchange(hand)
        count, tokens = sum(len(h.keys) for h in hands), sum(h.tokens for h in hands)
        share = sum(h.informative for h in hands) / max(sum(h.offered for h in hands), 1)
        skipped = "empty" if not count else "uninformative" if share < self.settings.min_informative else None
        if skipped is not None:
            metrics = {"informative": share}
            return StepResult(updated=False, skipped=skipped, loss=0.0, samples=count, tokens=tokens, metrics=metrics)
        metrics, updates = self._optimise(self._plan(self._deal(kept, hands)))
        self.steps += 1
        return StepResult(
            updated=updates > 0,
            skipped=None if updates else "nonfinite",
            loss=metrics["loss"],
            samples=count,
            tokens=tokens,
            metrics={**metrics, "informative": share},
        )

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> Tensor:
        """Log-probabilities [b, t] of the tokens in the loss under the present weights, after temperature; else 0."""
        return self._score(self.model, batch.to(self.device)).logprobs

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on; tensors are shared with the learner, not copied."""
        return {
            "format": FORMAT,
            "model": self.model.state_dict(),
            "reference": None if self._reference is None else self._reference.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "generator": self._generator.get_state(),
            "steps": self.steps,
            "updates": self.updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from this state, under the settings given to this learner. Raises `ValueError` for a foreign state."""
        if state.get("format") != FORMAT:
            raise ValueError(f"learner state: expected format {FORMAT}, found {state.get('format')!r}")
        fresh = [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]
        try:
            self.model.load_state_dict(state["model"])
            if self._reference is not None and state["reference"] is not None:
                self._reference.load_state_dict(state["reference"])
            self._optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"learner state: it belongs to another model: {error}") from error
        # The saved state brings its rate and decay along; those of the settings given now count.
        for group, settings in zip(self._optimizer.param_groups, fresh, strict=True):
            group.update(settings)
        self._generator.set_state(state["generator"].cpu())
        self.steps, self.updates = int(state["steps"]), int(state["updates"])

    def save(self, path: Path) -> None:
        """Write the state to one file, which `load` reads without unpickling code."""
        torch.save(self.state_dict(), path)

    def load(self, path: Path) -> None:
        """Go on from a saved state. Raises `ValueError` for a foreign one."""
        self.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))

    def _informative(self, samples: Sequence[Sample]) -> int:
        return sum(s.advantage != 0 for s in samples) if self.settings.reinforces else len(samples)

    def _deal(self, kept: Sequence[Sample], hands: Sequence[_Hand]) -> list[list[Sample]]:
        """This rank's samples of every minibatch; some may have none."""
        everyone = sorted((key, rank, at) for rank, hand in enumerate(hands) for at, key in enumerate(hand.keys))
        parts = minibatches(everyone, self.settings.minibatches, self._generator)
        return [[kept[at] for _, rank, at in part if rank == self._ranks.rank] for part in parts]

    def _plan(self, dealt: Sequence[Sequence[Sample]]) -> list[list[_Part]]:
        """Minibatches of micro-batches, with all that must be computed before the first update."""
        settings = self.settings
        plan = [
            [_Part(batch=collate(part).to(self.device)) for part in microbatches(chosen, settings.micro_batch_tokens)]
            for chosen in dealt
        ]
        if settings.reinforces:
            # The first minibatch meets these weights itself, in its first forward pass.
            for part in (part for parts in plan[1:] for part in parts):
                part.proximal = self.logprobs(part.batch)
        if self._reference is not None:
            with torch.no_grad():
                for part in (part for parts in plan for part in parts):
                    part.reference = self._score(self._reference, part.batch).logprobs
        return plan

    def _optimise(self, plan: list[list[_Part]]) -> tuple[dict[str, float], int]:
        how = self.settings.aggregation
        mine = sum(losses.denominator(part.batch.mask, how) for parts in plan for part in parts)
        total = sum(self._ranks.exchange(mine)) / len(plan)
        before, norms, tally = self.updates, list[float](), _Tally()
        for epoch in range(self.settings.epochs):
            for parts in plan:
                for part in parts:
                    loss = self._loss(part, total, tally)
                    torch.autograd.backward(loss)
                    if epoch == 0:
                        tally.add(loss=loss.detach() / len(plan))
                norms.append(self._update())
        finite = [norm for norm in norms if math.isfinite(norm)]
        metrics = tally.means(self._ranks)
        metrics["grad_norm"] = sum(finite) / max(len(finite), 1)
        metrics["nonfinite"] = float(len(norms) - len(finite))
        metrics["lr"] = self._rate()
        return metrics, self.updates - before

    def _loss(self, part: _Part, total: float, tally: "_Tally") -> Tensor:
        """This micro-batch's share of its minibatch's loss."""
        settings, batch = self.settings, part.batch
        scores = self._score(self.model, batch)
        if not settings.reinforces:
            values = losses.cross_entropy(scores.logprobs, batch.mask)
        else:
            part.proximal = scores.logprobs.detach() if part.proximal is None else part.proximal
            values = losses.policy_loss(
                scores.logprobs,
                part.proximal,
                batch.behaviour,
                batch.advantages,
                batch.mask,
                clip_low=settings.clip_low,
                clip_high=settings.clip_high,
                importance_cap=settings.importance_cap,
            )
            tally.tokens(batch.mask, **self._ratios(scores.logprobs.detach(), part.proximal, batch))
        if part.reference is not None:
            penalty = losses.kl_penalty(scores.logprobs, part.reference, batch.mask)
            tally.tokens(batch.mask, kl=penalty.detach())
            values = values + settings.kl * penalty
        if settings.entropy:
            values = values - settings.entropy * scores.entropy
        tally.tokens(batch.mask, entropy=scores.entropy.detach())
        return losses.aggregate(values, batch.mask, settings.aggregation, total=total)

    def _ratios(self, logprobs: Tensor, proximal: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Metrics [b, t] of the two ratios."""
        low, high, cap = 1 - self.settings.clip_low, 1 + self.settings.clip_high, self.settings.importance_cap
        ratio = losses.log_ratio(logprobs, proximal, batch.mask).exp()
        shift = losses.log_ratio(proximal, batch.behaviour, batch.mask)
        return {
            "clipped": ((ratio < low) | (ratio > high)).float(),
            "truncated": (shift.exp() > cap).float(),
            "importance": shift.exp().clamp(max=cap),
            "behaviour_gap": shift.abs(),
            "behaviour_kl": -shift,
        }

    def _update(self) -> float:
        """Clip and apply the gradient that all ranks gathered; returns its norm. One that is not finite is dropped."""
        for parameter in self._parameters if self._ranks.size > 1 else ():
            # A rank without samples in this minibatch has none, and one may not reach every parameter.
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        self._ranks.add_up([p.grad for p in self._parameters if p.grad is not None])
        norm = float(nn.utils.clip_grad_norm_(self._parameters, self.settings.grad_clip))
        # One such update would turn every weight into NaN, in this checkpoint and all that follow.
        if math.isfinite(norm):
            self.updates += 1
            for group in self._optimizer.param_groups:
                group["lr"] = self._rate()
            self._optimizer.step()
        else:
            logger.warning("update %d dropped: the gradient's norm is %s", self.updates + 1, norm)
        self._optimizer.zero_grad()
        return norm

    def _rate(self) -> float:
        return self.settings.lr * min(1.0, self.updates / max(self.settings.warmup, 1))

    def _score(self, model: nn.Module, batch: Batch) -> Scores:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.bf16):
            return score_tokens(model, batch, entropy_gradient=self.settings.entropy > 0)


class _Tally:
    """Sums that stay on the device until the step is over."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, list[Tensor]] = defaultdict(list)
        self._counts: defaultdict[str, list[Tensor]] = defaultdict(list)

    def add(self, **values: Tensor) -> None:
        for name, value in values.items():
            self._sums[name].append(value.double())

    def tokens(self, mask: Tensor, **values: Tensor) -> None:
        """Values [b, t], to be averaged over the tokens of this mask."""
        for name, value in values.items():
            self._sums[name].append(value[mask].double().sum())
            self._counts[name].append(mask.sum())

    def means(self, ranks: Ranks) -> dict[str, float]:
        """Over all ranks."""
        mine = {name: (float(_total(parts)), int(_total(self._counts[name]))) for name, parts in self._sums.items()}
        everyone = ranks.exchange(mine)
        names = dict.fromkeys(name for sums in everyone for name in sums)
        found = {name: [sums[name] for sums in everyone if name in sums] for name in names}
        return {name: sum(s for s, _ in parts) / (sum(n for _, n in parts) or 1) for name, parts in found.items()}


def _total(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(parts)).sum() if parts else torch.zeros(())


def _adamw(parameters: Iterable[nn.Parameter], settings: LearnerSettings) -> torch.optim.AdamW:
    kept = list(parameters)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in kept if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in kept if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, fused=True)


def _check(samples: Iterable[Sample], objective: Objective) -> None:
    for sample in samples:
        reason = exclusion(sample.trajectory, objective)
        if reason is not None:
            raise ValueError(
                f"trajectory {sample.trajectory.trajectory_id} is {reason} and cannot train with objective "
                f"{objective.value}; batch.score_group leaves such ones out"
            )
