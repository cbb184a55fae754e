"""From trajectories to tensors: token for token, and case 10 of the hard cases."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.consumers.batch import (
    Batch,
    Sample,
    collate,
    exclusion,
    loss_mask,
    microbatches,
    minibatches,
    ordered,
    score_group,
)
from rollstream.consumers.hyperparameters import Advantage, Objective
from rollstream.schemas import PolicySpan, Role, Status, Trajectory, Turn

PAD = 63


def episode(*turns: tuple[int, bool, bool], index: int = 0, reward: float = 0.0, seed: int = 0) -> Trajectory:
    """A trajectory of turns (tokens, sampled, masked) with random tokens, log-probabilities and two versions."""
    random = np.random.default_rng((seed, index))
    n, sampled = sum(t[0] for t in turns), sum(t[0] for t in turns if t[1])
    return Trajectory(
        trajectory_id=f"task/{index}/0",
        group_id="task",
        group_size=4,
        sample_index=index,
        environment="test",
        temperature=0.7,
        tokens=random.integers(0, 60, n, dtype=np.int32),
        logprobs=-random.random(sampled, dtype=np.float32),
        spans=tuple(
            PolicySpan(version=3 + i, count=c) for i, c in enumerate((sampled // 2, sampled - sampled // 2)) if c
        ),
        turns=tuple(
            Turn(role=Role.ASSISTANT if sampled else Role.USER, tokens=tokens, sampled=sampled, masked=masked)
            for tokens, sampled, masked in turns
        ),
        reward=reward,
    )


turn_shapes = st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans()), max_size=6)


@settings(deadline=None)
@given(st.lists(turn_shapes, max_size=5), st.integers(0, 3))
def test_what_the_trajectory_has_is_what_the_batch_has(shapes: list[list[tuple[int, bool, bool]]], seed: int) -> None:
    trajectories = [episode(*turns, index=i, seed=seed) for i, turns in enumerate(shapes)]
    batch = collate([Sample(trajectory=t, advantage=float(i)) for i, t in enumerate(trajectories)], pad_id=PAD)
    width = max((len(t.tokens) for t in trajectories), default=0)
    for row, trajectory in enumerate(trajectories):
        expect_row(batch, row, trajectory, width)
        assert float(batch.advantages[row]) == row
        assert float(batch.temperatures[row]) == np.float32(0.7)


def expect_row(batch: Batch, row: int, trajectory: Trajectory, width: int) -> None:
    """Walk the turns token by token."""
    versions = [span.version for span in trajectory.spans for _ in range(span.count)]
    column = sampled = 0
    for turn in trajectory.turns:
        for _ in range(turn.tokens):
            assert int(batch.tokens[row, column]) == trajectory.tokens[column]
            assert bool(batch.attention[row, column])
            assert bool(batch.mask[row, column]) is (turn.sampled and not turn.masked and column > 0)
            expected = (trajectory.logprobs[sampled], versions[sampled]) if turn.sampled else (0.0, -1)
            assert (float(batch.behaviour[row, column]), int(batch.versions[row, column])) == expected
            column, sampled = column + 1, sampled + turn.sampled
    for padded in range(column, width):
        assert (int(batch.tokens[row, padded]), bool(batch.attention[row, padded])) == (PAD, False)
        assert not bool(batch.mask[row, padded])


def test_dtypes_and_shapes() -> None:
    batch = collate([Sample(trajectory=episode((3, False, False), (2, True, False)))])
    assert {name: (tuple(getattr(batch, name).shape), getattr(batch, name).dtype) for name in Batch.__slots__} == {
        "tokens": ((1, 5), torch.int64),
        "attention": ((1, 5), torch.bool),
        "mask": ((1, 5), torch.bool),
        "behaviour": ((1, 5), torch.float32),
        "versions": ((1, 5), torch.int64),
        "advantages": ((1,), torch.float32),
        "temperatures": ((1,), torch.float32),
    }
    assert batch.to(torch.device("cpu")) is batch


def test_greedy_rows_are_scored_at_temperature_one() -> None:
    greedy = replace(episode((3, False, False), (2, True, False)), temperature=0.0)
    assert float(collate([Sample(trajectory=greedy)]).temperatures[0]) == 1.0


def test_a_group_with_strange_members_scores_without_them() -> None:
    """Case 10: no turns, no sampled token, one EOS token; the mean is that of the two that can train."""
    prompt = (3, False, False)
    group = [
        episode(index=0, reward=100.0),
        episode(prompt, (0, True, False), index=1, reward=100.0),
        episode(prompt, (1, True, False), index=2, reward=1.0),
        episode(prompt, (4, True, False), index=3, reward=0.0),
    ]
    samples = score_group(group, Advantage.DR_GRPO)
    assert [(s.trajectory.sample_index, s.advantage) for s in samples] == [(2, 0.5), (3, -0.5)]
    batch = collate(samples)
    assert [int(row.sum()) for row in batch.mask] == [1, 4]
    assert int(batch.mask[0].nonzero()) == 3


def test_a_group_of_one_scores_zero() -> None:
    samples = score_group([episode((3, False, False), (2, True, False), reward=1.0)], Advantage.GRPO)
    assert [s.advantage for s in samples] == [0.0]
    assert score_group([], Advantage.GRPO) == ()


def test_why_a_trajectory_cannot_train() -> None:
    good = episode((3, False, False), (2, True, False))
    scripted = replace(good, logprobs=np.empty(0, np.float32), spans=())
    first_token_only = episode((1, True, False), (4, False, False))
    found = {
        "good": good,
        "failed": replace(good, status=Status.FAILED),
        "aborted": replace(good, status=Status.ABORTED),
        "truncated": replace(good, status=Status.TRUNCATED),
        "masked": episode((3, False, False), (2, True, True)),
        "first token": first_token_only,
        "scripted": scripted,
    }
    assert {name: exclusion(t, Objective.GRPO) for name, t in found.items()} == {
        "good": None,
        "failed": "failed",
        "aborted": "aborted",
        "truncated": None,
        "masked": "empty",
        "first token": "empty",
        "scripted": "unscored",
    }
    assert exclusion(scripted, Objective.CLONE) is None
    assert not loss_mask(first_token_only).any()
    assert first_token_only.trainable_mask().any()


def of_lengths(*lengths: int) -> list[Sample]:
    return [Sample(trajectory=episode((n - 1, False, False), (1, True, False), index=i)) for i, n in enumerate(lengths)]


def indices(samples: list[Sample]) -> list[int]:
    return [s.trajectory.sample_index for s in samples]


def test_order_does_not_depend_on_arrival() -> None:
    samples = of_lengths(4, 2, 9, 3)
    assert indices(ordered(reversed(samples))) == indices(ordered(samples)) == [0, 1, 2, 3]


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(1, 6), st.integers(0, 5))
def test_minibatches_part_the_samples_evenly(n: int, count: int, seed: int) -> None:
    samples = of_lengths(*[3] * n)
    parts = minibatches(samples, count, torch.Generator().manual_seed(seed))
    again = minibatches(samples, count, torch.Generator().manual_seed(seed))
    assert [indices(p) for p in parts] == [indices(p) for p in again]
    assert sorted(i for p in parts for i in indices(p)) == list(range(n))
    sizes = [len(p) for p in parts]
    assert len(sizes) == min(n, count)
    assert max(sizes) - min(sizes) <= 1


@settings(deadline=None)
@given(st.lists(st.integers(2, 30), max_size=20), st.integers(1, 60))
def test_microbatches_keep_to_the_budget(lengths: list[int], budget: int) -> None:
    parts = microbatches(of_lengths(*lengths), budget)
    assert sorted(i for p in parts for i in indices(p)) == list(range(len(lengths)))
    assert all(len(p) == 1 or len(p) * max(s.length for s in p) <= budget for p in parts)


def test_microbatches_pad_little() -> None:
    parts = microbatches(of_lengths(3, 30, 4, 29, 3, 28), 90)
    assert [[s.length for s in p] for p in parts] == [[30, 29, 28], [4, 3, 3]]


@pytest.mark.parametrize("pad_id", [0, 62])
def test_an_empty_batch_has_no_rows(pad_id: int) -> None:
    batch = collate([], pad_id=pad_id)
    assert tuple(batch.tokens.shape) == (0, 0)
