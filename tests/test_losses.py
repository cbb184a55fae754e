"""Losses against references written token by token in float64 Python, values and gradients."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rollstream.consumers import losses
from rollstream.consumers.hyperparameters import Aggregation

LOW, HIGH, CAP = 0.2, 0.28, 2.0
Rows = list[list[float]]


class Case:
    """Random log-probabilities [b, t] of three policies, with the shapes that break things."""

    def __init__(self, seed: int, *, b: int = 4, t: int = 6, spread: float = 0.4, share: float = 0.6) -> None:
        random = torch.Generator().manual_seed(seed)

        def drawn(scale: float) -> Tensor:
            return torch.randn(b, t, generator=random, dtype=torch.float64) * scale

        self.behaviour = drawn(1.0) - 3
        self.proximal = self.behaviour + drawn(spread)
        self.current = self.proximal + drawn(spread)
        self.reference = self.current + drawn(spread)
        self.advantages = torch.randn(b, generator=random, dtype=torch.float64)
        self.mask = torch.rand(b, t, generator=random) < share

    def loss(self, current: Tensor) -> Tensor:
        return losses.policy_loss(
            current,
            self.proximal,
            self.behaviour,
            self.advantages,
            self.mask,
            clip_low=LOW,
            clip_high=HIGH,
            importance_cap=CAP,
        )


def one_token() -> Case:
    case = Case(5)
    case.mask = torch.zeros_like(case.mask)
    case.mask[2, 3] = True
    return case


def one_empty_row() -> Case:
    case = Case(6)
    case.mask[1] = False
    return case


CASES = {
    "random": Case(0),
    "wide ratios": Case(1, spread=3.0),
    "extreme ratios": Case(2, spread=40.0),
    "nothing masked": Case(3, share=1.1),
    "all masked": Case(4, share=0.0),
    "one token": one_token(),
    "one empty row": one_empty_row(),
    "one by one": Case(7, b=1, t=1, share=1.1),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def bounded(x: float) -> float:
    return min(max(x, -20.0), 20.0)


def policy_by_hand(case: Case, current: Rows) -> Rows:
    found = [[0.0] * len(row) for row in current]
    for i, row in enumerate(current):
        for j, logprob in enumerate(row):
            if not case.mask[i, j]:
                continue
            proximal, behaviour = float(case.proximal[i, j]), float(case.behaviour[i, j])
            weight = min(math.exp(bounded(proximal - behaviour)), CAP)
            ratio = math.exp(bounded(logprob - proximal))
            clipped = min(max(ratio, 1 - LOW), 1 + HIGH)
            advantage = float(case.advantages[i])
            found[i][j] = -weight * min(ratio * advantage, clipped * advantage)
    return found


def kl_by_hand(case: Case, current: Rows) -> Rows:
    found = [[0.0] * len(row) for row in current]
    for i, row in enumerate(current):
        for j, logprob in enumerate(row):
            if case.mask[i, j]:
                difference = bounded(float(case.reference[i, j]) - logprob)
                found[i][j] = math.exp(difference) - difference - 1
    return found


def cloning_by_hand(case: Case, current: Rows) -> Rows:
    return [[-x if case.mask[i, j] else 0.0 for j, x in enumerate(row)] for i, row in enumerate(current)]


def mean_by_hand(values: Rows, mask: Tensor, how: Aggregation) -> float:
    kept = [[v for j, v in enumerate(row) if mask[i, j]] for i, row in enumerate(values)]
    kept = [row for row in kept if row]
    if not kept:
        return 0.0
    if how is Aggregation.TOKEN_MEAN:
        return sum(sum(row) for row in kept) / sum(len(row) for row in kept)
    return sum(sum(row) / len(row) for row in kept) / len(kept)


Computed = Callable[[Case, Tensor], Tensor]
ByHand = Callable[[Case, Rows], Rows]
KINDS: dict[str, tuple[Computed, ByHand]] = {
    "policy": (lambda case, x: case.loss(x), policy_by_hand),
    "kl": (lambda case, x: losses.kl_penalty(x, case.reference, case.mask), kl_by_hand),
    "cloning": (lambda case, x: losses.cross_entropy(x, case.mask), cloning_by_hand),
}
each_kind = pytest.mark.parametrize(("computed", "by_hand"), KINDS.values(), ids=KINDS.keys())


def rows(tensor: Tensor) -> Rows:
    return [[float(x) for x in row] for row in tensor]


@each_case
@each_kind
def test_values_equal_the_reference(computed: Computed, by_hand: ByHand, case: Case) -> None:
    expected = torch.tensor(by_hand(case, rows(case.current)), dtype=torch.float64)
    torch.testing.assert_close(computed(case, case.current), expected, atol=1e-5, rtol=1e-9)


@each_case
@each_kind
@pytest.mark.parametrize("how", Aggregation)
def test_gradients_equal_finite_differences_of_the_reference(
    computed: Computed, by_hand: ByHand, case: Case, how: Aggregation
) -> None:
    current = case.current.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(losses.aggregate(computed(case, current), case.mask, how), current)
    step = 1e-6
    for i in range(current.shape[0]):
        for j in range(current.shape[1]):
            ends = list[Rows]()
            for moved in (-step, step):
                around = rows(case.current)
                around[i][j] += moved
                ends.append(by_hand(case, around))
            # Only this token's term moves: its difference alone keeps the rounding of huge terms elsewhere out.
            rise = [[0.0] * len(row) for row in ends[0]]
            rise[i][j] = (ends[1][i][j] - ends[0][i][j]) / (2 * step)
            slope = mean_by_hand(rise, case.mask, how)
            assert math.isclose(float(gradient[i, j]), slope, rel_tol=1e-5, abs_tol=1e-5)


@pytest.mark.parametrize("name", ["random", "nothing masked", "one token"])
@each_kind
def test_gradcheck(computed: Computed, by_hand: ByHand, name: str) -> None:
    case = CASES[name]

    def values(current: Tensor) -> Tensor:
        return computed(case, current)

    assert torch.autograd.gradcheck(values, (case.current.clone().requires_grad_(),))


@each_case
@pytest.mark.parametrize("how", Aggregation)
def test_parts_add_up_to_the_whole(case: Case, how: Aggregation) -> None:
    values = case.loss(case.current)
    whole = losses.aggregate(values, case.mask, how)
    assert math.isclose(float(whole), mean_by_hand(rows(values), case.mask, how), rel_tol=1e-9, abs_tol=1e-12)
    total = losses.denominator(case.mask, how)
    parts = [losses.aggregate(values[i], case.mask[i], how, total=total) for i in ([0], list(range(1, len(values))))]
    torch.testing.assert_close(parts[0] + parts[1], whole)


@each_kind
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, -9999.0])
def test_masked_positions_may_hold_anything(computed: Computed, by_hand: ByHand, poison: float) -> None:
    clean, dirty = Case(8), Case(8)
    expected = clean.current.clone().requires_grad_()
    spoiled = clean.current.masked_fill(~clean.mask, poison).requires_grad_()
    dirty.behaviour = dirty.behaviour.masked_fill(~dirty.mask, poison)
    dirty.proximal = dirty.proximal.masked_fill(~dirty.mask, poison)
    dirty.reference = dirty.reference.masked_fill(~dirty.mask, poison)
    torch.testing.assert_close(computed(dirty, spoiled), computed(clean, expected), rtol=0, atol=0)
    (found,) = torch.autograd.grad(computed(dirty, spoiled).sum(), spoiled)
    (wanted,) = torch.autograd.grad(computed(clean, expected).sum(), expected)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert found[~clean.mask].eq(0).all()


def single(current: float, proximal: float, behaviour: float, advantage: float) -> tuple[float, float]:
    """Loss and gradient of one token."""
    logprob = torch.tensor([[current]], dtype=torch.float64, requires_grad=True)
    loss = losses.policy_loss(
        logprob,
        torch.tensor([[proximal]], dtype=torch.float64),
        torch.tensor([[behaviour]], dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
        torch.ones(1, 1, dtype=torch.bool),
        clip_low=LOW,
        clip_high=HIGH,
        importance_cap=CAP,
    )
    (gradient,) = torch.autograd.grad(loss.sum(), logprob)
    return float(loss.detach()), float(gradient)


def test_which_ratio_is_clipped_and_which_truncated() -> None:
    """Proximal against behaviour moves the weight alone; current against proximal alone meets the clip range."""
    log = math.log
    weighted = single(log(0.3), log(0.3), log(0.2), 1.0)
    assert weighted == pytest.approx((-1.5, -1.5))
    truncated = single(log(0.9), log(0.9), log(0.1), 1.0)
    assert truncated == pytest.approx((-CAP, -CAP))
    raised_past_the_clip = single(log(0.3), log(0.2), log(0.2), 1.0)
    assert raised_past_the_clip == pytest.approx((-(1 + HIGH), 0.0))
    inside_the_higher_clip = single(log(0.25), log(0.2), log(0.2), 1.0)
    assert inside_the_higher_clip == pytest.approx((-1.25, -1.25))
    lowered_past_the_clip = single(log(0.1), log(0.2), log(0.2), -1.0)
    assert lowered_past_the_clip == pytest.approx((1 - LOW, 0.0))
    pessimistic = single(log(0.1), log(0.2), log(0.2), 1.0)
    assert pessimistic == pytest.approx((-0.5, -0.5))


def test_the_first_pass_is_the_weighted_policy_gradient() -> None:
    case = Case(9)
    current = case.proximal.clone().requires_grad_()
    case.proximal = current.detach()
    (gradient,) = torch.autograd.grad(case.loss(current).sum(), current)
    weights = (case.proximal - case.behaviour).exp().clamp(max=CAP)
    expected = torch.where(case.mask, -weights * case.advantages.unsqueeze(-1), 0.0)
    torch.testing.assert_close(gradient, expected)


def test_only_the_current_policy_has_a_gradient() -> None:
    """Also where the very same tensor is given as the proximal policy or the reference."""
    case = Case(11)
    current = case.current.clone().requires_grad_()
    case.proximal = case.reference = current
    (gradient,) = torch.autograd.grad(case.loss(current).sum(), current)
    (penalty,) = torch.autograd.grad(losses.kl_penalty(current, case.reference, case.mask).sum(), current)
    weights = (case.current - case.behaviour).exp().clamp(max=CAP)
    torch.testing.assert_close(gradient, torch.where(case.mask, -weights * case.advantages.unsqueeze(-1), 0.0))
    assert penalty.eq(0).all()
    case.reference = (current.detach() + 1).requires_grad_()
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(losses.kl_penalty(current, case.reference, case.mask).sum(), case.reference)


@pytest.mark.parametrize("how", Aggregation)
def test_a_mean_leaves_out_what_is_masked_whatever_it_is(how: Aggregation) -> None:
    values = torch.tensor([[1.0, math.nan], [3.0, 5.0], [math.inf, math.nan]])
    mask = torch.tensor([[True, False], [True, True], [False, False]])
    expected = {Aggregation.TOKEN_MEAN: 3.0, Aggregation.SEQUENCE_MEAN: 2.5}
    assert float(losses.aggregate(values, mask, how)) == expected[how]
    assert float(losses.aggregate(values, mask & False, how)) == 0


def test_float32_survives_the_extremes() -> None:
    case = Case(10, spread=200.0)
    current = case.current.float().requires_grad_()
    mask = case.mask
    loss = losses.aggregate(case.loss(current).float(), mask, Aggregation.TOKEN_MEAN)
    loss = loss + losses.aggregate(
        losses.kl_penalty(current, case.reference.float(), mask), mask, Aggregation.TOKEN_MEAN
    )
    (gradient,) = torch.autograd.grad(loss, current)
    assert loss.isfinite()
    assert gradient.isfinite().all()
