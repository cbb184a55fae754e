"""Advantages against formulas spelled out in plain Python, sample by sample."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.consumers.advantages import group_advantages, group_relative, leave_one_out
from rollstream.consumers.hyperparameters import Advantage

rewards_of_a_group = st.lists(st.floats(-100, 100).map(lambda r: round(r, 3)), min_size=1, max_size=12)


def by_hand(rewards: list[float], kind: Advantage) -> list[float]:
    n, found = len(rewards), list[float]()
    if n == 1:
        return [0.0]
    for i in range(n):
        if kind is Advantage.RLOO:
            others = [rewards[j] for j in range(n) if j != i]
            found.append(rewards[i] - sum(others) / (n - 1))
            continue
        mean = sum(rewards) / n
        deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / n)
        found.append((rewards[i] - mean) / (deviation + 1e-6 if kind is Advantage.GRPO else 1.0))
    return found


@pytest.mark.parametrize("kind", Advantage)
@settings(deadline=None)
@given(rewards=rewards_of_a_group)
def test_equals_the_formula(kind: Advantage, rewards: list[float]) -> None:
    found = group_advantages(torch.tensor(rewards, dtype=torch.float64), kind)
    torch.testing.assert_close(found, torch.tensor(by_hand(rewards, kind), dtype=torch.float64), atol=1e-5, rtol=1e-5)


def test_known_values() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    root = math.sqrt(3)
    expected = {
        Advantage.GRPO: [root, -1 / root, -1 / root, -1 / root],
        Advantage.DR_GRPO: [0.75, -0.25, -0.25, -0.25],
        Advantage.RLOO: [1.0, -1 / 3, -1 / 3, -1 / 3],
    }
    for kind, values in expected.items():
        torch.testing.assert_close(
            group_advantages(rewards, kind), torch.tensor(values, dtype=torch.float64), atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("kind", Advantage)
@pytest.mark.parametrize("rewards", [[], [3.0], [0.1] * 3, [0.1] * 7, [-1e30] * 5])
def test_equal_rewards_teach_exactly_nothing(kind: Advantage, rewards: list[float]) -> None:
    assert [float(a) for a in group_advantages(torch.tensor(rewards), kind)] == [0.0] * len(rewards)


@settings(deadline=None)
@given(rewards=rewards_of_a_group, shift=st.integers(-50, 50))
def test_a_constant_added_to_all_rewards_changes_nothing(rewards: list[float], shift: int) -> None:
    values = torch.tensor(rewards, dtype=torch.float64)
    for kind in (Advantage.DR_GRPO, Advantage.RLOO):
        torch.testing.assert_close(
            group_advantages(values + shift, kind), group_advantages(values, kind), atol=1e-9, rtol=0
        )


@settings(deadline=None)
@given(rewards=rewards_of_a_group)
def test_leave_one_out_is_centred_over_one_less(rewards: list[float]) -> None:
    values = torch.tensor(rewards, dtype=torch.float64)
    scale = len(rewards) / max(len(rewards) - 1, 1)
    torch.testing.assert_close(
        leave_one_out(values), group_relative(values, normalise=False) * scale, atol=1e-9, rtol=1e-9
    )
