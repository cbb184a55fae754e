"""The parts of the `transformers` engine one by one: the row that a request goes on from, and what is drawn."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollstream.producers.engines.cache import FIRST_CAPACITY, RowCache, RowPool
from rollstream.producers.engines.sampling import draw_tokens, row_logprobs
from rollstream.schemas import Sampling


def ids(*tokens: int) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def test_a_conversation_finds_its_row() -> None:
    pool = RowPool(4)
    row, filled = pool.claim(ids(1, 2))
    assert filled == 0
    pool.release(row, ids(1, 2, 3))
    assert pool.claim(ids(1, 2, 3, 4, 5)) == (row, 3)


def test_the_longest_prefix_wins_and_is_taken_once() -> None:
    pool = RowPool(4)
    short, _ = pool.claim(ids(1))
    long, _ = pool.claim(ids(1))
    pool.release(short, ids(1, 2))
    pool.release(long, ids(1, 2, 3))
    assert pool.claim(ids(1, 2, 3, 4)) == (long, 3)
    assert pool.claim(ids(1, 2, 3, 4)) == (short, 2)
    assert pool.claim(ids(1, 2, 3, 4))[1] == 0


def test_a_row_that_holds_the_whole_prompt_is_of_no_use() -> None:
    """One token must be left to compute, or there are no logits."""
    pool = RowPool(2)
    row, _ = pool.claim(ids(1, 2))
    pool.release(row, ids(1, 2))
    assert pool.claim(ids(1, 2))[1] == 0


def test_tokens_are_compared_whole() -> None:
    pool = RowPool(2)
    row, _ = pool.claim(ids(1))
    pool.release(row, ids(1, 256))
    assert pool.claim(ids(1, 1, 0, 7))[1] == 0


def test_the_row_idle_for_longest_goes_first() -> None:
    pool = RowPool(2)
    first, second = pool.claim(ids(1))[0], pool.claim(ids(2))[0]
    pool.release(first, ids(1, 1))
    pool.release(second, ids(2, 2))
    assert pool.claim(ids(9)) == (first, 0)
    assert pool.claim(ids(2, 2, 2)) == (second, 2)


def test_forgetting_leaves_rows_in_use_alone() -> None:
    pool = RowPool(2)
    used, idle = pool.claim(ids(1))[0], pool.claim(ids(2))[0]
    pool.release(idle, ids(2, 2))
    pool.forget()
    assert pool.claim(ids(2, 2, 2)) == (idle, 0)
    pool.release(used, ids(1, 1))
    assert pool.claim(ids(1, 1, 1)) == (used, 2)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=40), st.integers(1, 4))
def test_a_row_is_never_two_requests_and_never_holds_other_tokens(prompts: Sequence[Sequence[int]], rows: int) -> None:
    pool, used, held = RowPool(rows), list[int](), dict[int, bytes]()
    for place, prompt in enumerate(prompts):
        if len(used) == rows:
            pool.release(used[0], held[used.pop(0)])
        row, filled = pool.claim(ids(*prompt))
        assert row not in used
        assert filled < len(prompt)
        assert not filled or held[row] == ids(*prompt[:filled])
        used.append(row)
        held[row] = ids(*prompt, place % 3)


def test_memory_grows_with_the_longest_row_and_keeps_what_it_held() -> None:
    cache = RowCache(rows=2, context=100, layers=1)
    layer = cache.as_transformers().layers[0]

    def run(row: int, start: int, values: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(start, start + len(values)).unsqueeze(0)
        cache.place(torch.tensor([row]), positions, torch.ones_like(positions, dtype=torch.bool))
        keys: torch.Tensor = layer.update(values.view(1, 1, -1, 1), values.view(1, 1, -1, 1))[0]
        return keys.flatten()

    first, rest = torch.rand(FIRST_CAPACITY), torch.rand(100 - FIRST_CAPACITY)
    assert torch.equal(run(1, 0, first), first)
    assert cache.capacity == FIRST_CAPACITY
    assert torch.equal(run(1, FIRST_CAPACITY, rest), torch.cat([first, rest]))
    assert cache.capacity == 100
    assert torch.equal(run(0, 0, rest), rest)
    cache.forget()
    assert not run(1, 1, rest)[:1].any()


def test_padding_is_written_to_nobodys_row() -> None:
    cache = RowCache(rows=2, context=8, layers=1)
    layer = cache.as_transformers().layers[0]
    positions = torch.tensor([[0, 0, 1], [0, 1, 2]])
    real = torch.tensor([[False, True, True], [True, True, True]])
    cache.place(torch.tensor([0, 1]), positions, real)
    values = torch.tensor([[9.0, 1, 2], [3, 4, 5]]).view(2, 1, 3, 1)
    keys, _ = layer.update(values, values)
    assert keys.flatten(1).tolist() == [[1, 2, 0], [3, 4, 5]]


LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]])


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=2), [0, 1]),
        (Sampling(top_k=9), [0, 1, 2, 3]),
        (Sampling(top_p=1e-6), [0]),
        (Sampling(top_p=0.7), [0, 1]),
        (Sampling(top_p=0.6), [0]),
        (Sampling(top_k=3, top_p=0.9), [0, 1]),
        (Sampling(temperature=100, top_p=0.7), [0, 1, 2]),
        (Sampling(temperature=0, top_k=1, top_p=0.1), [0, 1, 2, 3]),
    ],
)
def test_what_is_left_to_draw_from(sampling: Sampling, kept: list[int]) -> None:
    logprobs = row_logprobs(LOGITS, [sampling])[0]
    assert np.flatnonzero(np.isfinite(logprobs.numpy())).tolist() == kept
    expected = (LOGITS[0, kept] / (sampling.temperature or 1)).log_softmax(-1)
    torch.testing.assert_close(logprobs[kept], expected)


def test_rows_do_not_mix() -> None:
    samplings = [Sampling(temperature=0), Sampling(top_k=1), Sampling(temperature=0.5), Sampling(top_p=0.7)]
    together = row_logprobs(LOGITS.expand(4, -1), samplings)
    for row, sampling in enumerate(samplings):
        assert torch.equal(together[row], row_logprobs(LOGITS, [sampling])[0])


def test_what_cannot_be_is_never_drawn() -> None:
    logits = torch.full((512, 1000), -torch.inf)
    logits[:, 7] = 0.0
    logits[:, 993] = -80.0
    tokens, logprobs = draw_tokens(logits, [Sampling()] * 512, torch.Generator().manual_seed(0))
    assert set(tokens) <= {7, 993}
    assert all(np.isfinite(logprobs))


def test_the_same_seed_draws_the_same() -> None:
    logits = torch.randn(32, 100, generator=torch.Generator().manual_seed(1))
    first, second, other = (
        draw_tokens(logits, [Sampling()] * 32, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4)
    )
    assert first == second
    assert first != other


def test_a_temperature_near_zero_is_nearly_greedy() -> None:
    tokens, logprobs = draw_tokens(LOGITS, [Sampling(temperature=0.01)], torch.Generator().manual_seed(0))
    assert tokens == [0]
    assert logprobs == [0.0]
