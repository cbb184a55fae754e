"""How to learn, as values. Free of torch, so that a command line can name them before anything heavy is loaded."""

from dataclasses import dataclass
from enum import StrEnum


class Objective(StrEnum):
    """What a step optimises."""

    GRPO = "grpo"
    """Reinforce samples by their advantage."""
    CLONE = "clone"
    """Imitate the sampled tokens, whoever sampled them: a warm start."""


class Advantage(StrEnum):
    """Which baseline and scale a sample's reward is compared with; formulas and papers in advantages.py."""

    GRPO = "grpo"
    """Over the group's deviation."""
    DR_GRPO = "dr-grpo"
    """Centred only: the deviation weighs easy and hard tasks unevenly."""
    RLOO = "rloo"
    """Against the mean of the others: an unbiased baseline."""


class Aggregation(StrEnum):
    """How the terms of single tokens become one number."""

    TOKEN_MEAN = "token-mean"
    """Every token of the step weighs the same (DAPO)."""
    SEQUENCE_MEAN = "sequence-mean"
    """Every sequence weighs the same, its tokens share its weight (GRPO)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """The defaults suit fine-tuning a language model; tiny models from scratch want a larger `lr`.

    Raises `ValueError` for a value out of range, naming the field.
    """

    objective: Objective = Objective.GRPO
    advantage: Advantage = Advantage.GRPO
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    lr: float = 1e-6
    warmup: int = 0
    """Optimizer updates over which `lr` rises linearly from 0."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay of the first and second moment."""
    weight_decay: float = 0.0
    """On matrices and embeddings; never on norms and biases."""
    grad_clip: float = 1.0
    """Largest norm of a gradient."""
    clip_low: float = 0.2
    """The ratio to the proximal policy is clipped below at 1 - clip_low ..."""
    clip_high: float = 0.28
    """... and above at 1 + clip_high."""
    importance_cap: float = 2.0
    """The weight proximal / behaviour of a token is truncated here."""
    entropy: float = 0.0
    """Coefficient of the entropy bonus."""
    kl: float = 0.0
    """Coefficient of the penalty for leaving the weights that the learner began with; above 0 it keeps a copy."""
    minibatches: int = 1
    """Optimizer updates in one pass over the samples."""
    epochs: int = 1
    """Passes over the samples of a step."""
    min_informative: float = 0.1
    """A step is skipped where a smaller share of its samples has an advantage: few samples make a noisy update."""
    micro_batch_tokens: int = 8192
    """Padded tokens in one forward and backward pass: a bound on memory, not on the result."""
    bf16: bool = False
    """Multiply matrices in bfloat16 (autocast); weights, optimizer and losses stay float32."""
    seed: int = 0
    """Of the shuffle into minibatches."""

    @property
    def reinforces(self) -> bool:
        """Samples are weighed by their advantage; one without any teaches nothing."""
        return self.objective is Objective.GRPO

    def __post_init__(self) -> None:
        for name, least in {"warmup": 0, "minibatches": 1, "epochs": 1, "micro_batch_tokens": 1}.items():
            self._require(name, f"a whole number >= {least}", least=least)
        for name in ("lr", "grad_clip", "importance_cap"):
            self._require(name, "a number > 0", above=0)
        for name in ("weight_decay", "clip_high", "entropy", "kl"):
            self._require(name, "a number >= 0", least=0)
        for name in ("clip_low", "min_informative"):
            self._require(name, "a number from 0 to 1", least=0, most=1)

    def _require(
        self,
        name: str,
        expected: str,
        *,
        least: float | None = None,
        above: float | None = None,
        most: float | None = None,
    ) -> None:
        found: float = getattr(self, name)
        # Spelled so that NaN fails too.
        fine = (
            (least is None or found >= least) and (above is None or found > above) and (most is None or found <= most)
        )
        if not fine:
            raise ValueError(f"learner setting {name}: expected {expected}, found {found!r}")
