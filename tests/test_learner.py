"""The learner against references without padding, batching or tricks; determinism, resuming, skipping."""

import copy
import math
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rollstream.consumers.batch import Sample, collate, minibatches, ordered, score_group
from rollstream.consumers.forward import score_tokens
from rollstream.consumers.hyperparameters import Advantage, Aggregation, LearnerSettings, Objective
from rollstream.consumers.learner import Learner
from rollstream.schemas import PolicySpan, Role, Trajectory, Turn

transformers: Any = import_module("transformers")

VOCABULARY = 40
SETTINGS = LearnerSettings(lr=1e-3)


def tiny_model(seed: int = 0, **config: Any) -> nn.Module:
    transformers.set_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model: nn.Module = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY, num_key_value_heads=2, max_position_embeddings=64, **(shape | config)
        )
    )
    return model


def episode(index: int, *turns: tuple[int, bool], temperature: float = 0.8, advantage: float = 0.0) -> Sample:
    """Turns (tokens, sampled) of random tokens with random log-probabilities."""
    random = np.random.default_rng(index)
    sampled = sum(n for n, s in turns if s)
    trajectory = Trajectory(
        trajectory_id=f"task-{index // 4}/{index}/0",
        group_id=f"task-{index // 4}",
        group_size=4,
        sample_index=index % 4,
        environment="test",
        temperature=temperature,
        tokens=random.integers(0, VOCABULARY, sum(n for n, _ in turns), dtype=np.int32),
        logprobs=-3 - random.random(sampled, dtype=np.float32),
        spans=(PolicySpan(version=1, count=sampled),) if sampled else (),
        turns=tuple(Turn(role=Role.ASSISTANT if s else Role.USER, tokens=n, sampled=s) for n, s in turns),
    )
    return Sample(trajectory=trajectory, advantage=advantage)


def some_samples(n: int = 12) -> list[Sample]:
    """Samples of many lengths, one token, several turns, greedy, and advantages of both signs."""
    random = np.random.default_rng(1)
    return [
        episode(
            i,
            (int(random.integers(1, 6)), False),
            (int(random.integers(1, 5)), True),
            (int(random.integers(0, 4)), False),
            (int(random.integers(0, 6)), True),
            temperature=[0.8, 1.0, 0.0][i % 3],
            advantage=float(random.normal()),
        )
        for i in range(n)
    ]


def weights(learner: Learner) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in learner.model.state_dict().items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def by_hand(model: nn.Module, sample: Sample) -> list[tuple[Tensor, Tensor]]:
    """Log-probability and entropy of each token in the loss: one sequence, full logits."""
    tokens = torch.tensor(sample.trajectory.tokens[None], dtype=torch.int64)
    logits = model(input_ids=tokens).logits[0] / (sample.trajectory.temperature or 1.0)
    found = list[tuple[Tensor, Tensor]]()
    for j in np.flatnonzero(sample.trajectory.trainable_mask()):
        probabilities = torch.softmax(logits[j - 1], -1)
        entropy = -(probabilities * probabilities.log()).sum()
        found.append((probabilities[tokens[0, j]].log(), entropy))
    return found


def loss_by_hand(model: nn.Module, start: nn.Module, samples: list[Sample], settings: LearnerSettings) -> Tensor:
    """The loss of one minibatch, a mean over its own tokens or sequences, in float64, token by token."""
    sequences = list[list[Tensor]]()
    for sample in samples:
        with torch.no_grad():
            proximal = by_hand(start, sample)
        terms = list[Tensor]()
        for k, (logprob, entropy) in enumerate(by_hand(model, sample)):
            if settings.objective is Objective.CLONE:
                terms.append(-logprob)
                continue
            before, behaviour = proximal[k][0], float(sample.trajectory.logprobs[k])
            weight = min(math.exp(float(before) - behaviour), settings.importance_cap)
            ratio = torch.exp(logprob - before)
            clipped = torch.clamp(ratio, 1 - settings.clip_low, 1 + settings.clip_high)
            term = -weight * torch.minimum(ratio * sample.advantage, clipped * sample.advantage)
            term = term - settings.entropy * entropy
            difference = before - logprob
            terms.append(term + settings.kl * (torch.exp(difference) - difference - 1))
        sequences.append(terms)
    if settings.aggregation is Aggregation.SEQUENCE_MEAN:
        return sum((sum(t, torch.zeros(())) / len(t) for t in sequences), torch.zeros(())) / len(sequences)
    return sum((term for t in sequences for term in t), torch.zeros(())) / sum(len(t) for t in sequences)


@contextmanager
def watched_updates() -> Generator[list[tuple[dict[str, Tensor], list[Tensor]]]]:
    """Parameters and gradients as they are when an optimizer is about to step."""
    seen = list[tuple[dict[str, Tensor], list[Tensor]]]()

    def watch(optimizer: torch.optim.Optimizer, *_: object) -> None:
        parameters: list[nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
        seen.append(({}, [p.grad.clone() for p in parameters if p.grad is not None]))
        seen[-1][0].update({str(i): p.detach().clone() for i, p in enumerate(parameters)})

    handle = register_optimizer_step_pre_hook(watch)
    try:
        yield seen
    finally:
        handle.remove()


def gradients_by_hand(
    model: nn.Module, start: nn.Module, samples: list[Sample], settings: LearnerSettings
) -> list[Tensor]:
    """In the optimizer's order: matrices, then the rest. `start`: proximal policy and reference."""
    model, start = copy.deepcopy(model).double(), copy.deepcopy(start).double()
    loss = loss_by_hand(model, start, samples, settings)
    parameters = sorted(model.parameters(), key=lambda p: p.ndim < 2)
    return [g.float() for g in torch.autograd.grad(loss, parameters)]


SHAPES = {
    "one pass": {},
    "micro-batches": {"micro_batch_tokens": 20},
    "one by one": {"micro_batch_tokens": 1},
    "sequences": {"aggregation": Aggregation.SEQUENCE_MEAN, "micro_batch_tokens": 30},
    "entropy": {"entropy": 0.05},
    "kl": {"kl": 0.3, "micro_batch_tokens": 30},
    "cloning": {"objective": Objective.CLONE, "micro_batch_tokens": 30},
    "cloning sequences": {"objective": Objective.CLONE, "aggregation": Aggregation.SEQUENCE_MEAN},
}


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_the_gradient_equals_that_of_whole_sequences_one_by_one(changes: dict[str, Any]) -> None:
    settings = replace(SETTINGS, grad_clip=1e9, **changes)
    learner, samples = Learner(tiny_model(), settings), some_samples()
    start = copy.deepcopy(learner.model)
    expected = gradients_by_hand(start, start, samples, settings)
    with watched_updates() as seen:
        result = learner.step(samples)
    (update,) = seen
    for found, wanted in zip(update[1], expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        loss = loss_by_hand(start.double(), start.double(), samples, settings)
    assert result.loss == pytest.approx(float(loss), abs=1e-5)


@pytest.mark.parametrize("changes", [{}, {"aggregation": Aggregation.SEQUENCE_MEAN}, {"kl": 0.3}])
def test_later_minibatches_keep_the_proximal_policy_of_the_start(changes: dict[str, Any]) -> None:
    """Every minibatch weighs as much as its share of the step's tokens; ratios are to the weights before the step."""
    settings = replace(SETTINGS, grad_clip=1e9, minibatches=3, epochs=2, micro_batch_tokens=30, lr=3e-3, **changes)
    learner, samples = Learner(tiny_model(), settings), some_samples()
    start = copy.deepcopy(learner.model)
    parts = minibatches(ordered(samples), 3, torch.Generator().manual_seed(settings.seed))
    with watched_updates() as seen:
        result = learner.step(samples)
    assert len(seen) == learner.updates == 6
    assert result.metrics["clipped"] > 0
    for index, (parameters, gradients) in enumerate(seen):
        then, part = copy.deepcopy(start), parts[index % 3]
        for parameter, value in zip(
            sorted(then.parameters(), key=lambda p: p.ndim < 2), parameters.values(), strict=True
        ):
            parameter.data.copy_(value)
        share = weight_of(part, settings.aggregation) / (weight_of(samples, settings.aggregation) / 3)
        for found, wanted in zip(gradients, gradients_by_hand(then, start, part, settings), strict=True):
            torch.testing.assert_close(found, wanted * share, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("objective", Objective)
def test_the_loss_is_that_of_the_whole_batch(objective: Objective) -> None:
    """At a rate that moves nothing, however the step is cut."""
    still = replace(SETTINGS, lr=1e-12, objective=objective)
    whole = Learner(tiny_model(), still).step(some_samples()).loss
    cut = Learner(tiny_model(), replace(still, minibatches=5, epochs=2, micro_batch_tokens=30)).step(some_samples())
    assert cut.loss == pytest.approx(whole, abs=1e-5)


def weight_of(samples: list[Sample], how: Aggregation) -> int:
    return len(samples) if how is Aggregation.SEQUENCE_MEAN else sum(len(s.trajectory.logprobs) for s in samples)


def test_logprobs_equal_those_of_each_sequence_alone() -> None:
    learner, samples = Learner(tiny_model(), SETTINGS), some_samples()
    batch = collate(samples, pad_id=VOCABULARY - 1)
    found = learner.logprobs(batch)
    for row, sample in enumerate(samples):
        with torch.no_grad():
            wanted = torch.stack([logprob for logprob, _ in by_hand(learner.model, sample)])
        torch.testing.assert_close(found[row][batch.mask[row]], wanted, atol=1e-5, rtol=1e-5)
    assert found[~batch.mask].eq(0).all()


@torch.no_grad()
def sampled(
    model: nn.Module, prompt: list[int], n: int, *, temperature: float, random: torch.Generator
) -> tuple[list[int], list[float]]:
    """Decode with a cache, token by token, as an engine does."""
    tokens, logprobs, cache = list(prompt), list[float](), None
    step = torch.tensor([prompt])
    for _ in range(n):
        output = model(input_ids=step, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        distribution = torch.log_softmax(output.logits[0, -1] / temperature, -1)
        token = int(torch.multinomial(distribution.exp(), 1, generator=random))
        tokens.append(token)
        logprobs.append(float(distribution[token]))
        step = torch.tensor([[token]])
    return tokens, logprobs


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_logprobs_equal_the_samplers(temperature: float) -> None:
    learner = Learner(tiny_model(), SETTINGS)
    random = torch.Generator().manual_seed(0)
    tokens, logprobs = sampled(learner.model, [1, 2, 3, 4], 20, temperature=temperature, random=random)
    sample = episode(0, (4, False), (20, True), temperature=temperature)
    sample = replace(sample, trajectory=replace(sample.trajectory, tokens=np.array(tokens, np.int32)))
    batch = collate([sample, episode(1, (30, False), (4, True))])
    found = [float(logprob) for logprob in learner.logprobs(batch)[0][batch.mask[0]]]
    assert found == pytest.approx(logprobs, abs=1e-5)


class Masking(nn.Module):
    """A model that forbids some tokens, as a player of a game does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def get_output_embeddings(self) -> nn.Module:
        layer: nn.Module = getattr(self.inner, "get_output_embeddings")()  # noqa: B009 - not a member that nn.Module declares
        return layer

    def forward(self, **inputs: Any) -> SimpleNamespace:
        logits: Tensor = self.inner(**inputs).logits
        forbidden = torch.arange(logits.shape[-1]) >= 10
        return SimpleNamespace(logits=logits.masked_fill(forbidden, -math.inf))


def test_forbidden_tokens_leave_entropy_and_gradients_finite() -> None:
    sample = episode(0, (3, False), (4, True))
    sample = replace(sample, trajectory=replace(sample.trajectory, tokens=np.arange(7, dtype=np.int32)))
    model = Masking(tiny_model())
    assert not score_tokens(model, collate([sample])).entropy.requires_grad
    scores = score_tokens(model, collate([sample]), entropy_gradient=True)
    assert float(scores.entropy[0, 3:].detach().max()) <= math.log(10) + 1e-5
    gradients = torch.autograd.grad(scores.entropy.sum() + scores.logprobs.sum(), list(model.parameters()))
    assert all(g.isfinite().all() for g in gradients)
    assert any(g.ne(0).any() for g in gradients)


def test_a_model_without_an_output_layer_is_named() -> None:
    with pytest.raises(TypeError, match=r"Linear: expected a causal language model with get_output_embeddings\(\)"):
        score_tokens(nn.Linear(2, 2), collate([episode(0, (3, False), (4, True))]))


MANY = replace(SETTINGS, minibatches=2, epochs=2, micro_batch_tokens=40, warmup=3, weight_decay=0.1, kl=0.01)


def test_a_step_is_bit_equal_however_the_samples_came() -> None:
    samples = some_samples()
    left, right = Learner(tiny_model(), MANY), Learner(tiny_model(), MANY)
    for _ in range(3):
        assert left.step(samples) == right.step(list(reversed(samples)))
    assert same(weights(left), weights(right))
    other = Learner(tiny_model(), replace(MANY, seed=1))
    other.step(samples)
    assert not same(weights(left), weights(other))


def batches() -> Iterator[list[Sample]]:
    samples = some_samples(20)
    return iter([samples[:8], samples[4:12], samples[8:16], samples[12:], samples[:12]])


@pytest.mark.parametrize("settings", [MANY, replace(MANY, objective=Objective.CLONE, kl=0.0)])
def test_a_resumed_learner_goes_on_bit_exactly(settings: LearnerSettings, tmp_path: Path) -> None:
    straight, first = Learner(tiny_model(), settings), Learner(tiny_model(), settings)
    results = [straight.step(samples) for samples in batches()]
    source = batches()
    again = [first.step(next(source)) for _ in range(2)]
    first.save(tmp_path / "state.pt")
    first.step(some_samples(4))
    resumed = Learner(tiny_model(seed=9), settings)
    resumed.load(tmp_path / "state.pt")
    again += [resumed.step(samples) for samples in source]
    assert again == results
    assert same(weights(straight), weights(resumed))
    assert (resumed.steps, resumed.updates) == (straight.steps, straight.updates) == (5, 20)


def test_a_resumed_learner_obeys_its_new_settings(tmp_path: Path) -> None:
    Learner(tiny_model(), SETTINGS).save(tmp_path / "state.pt")
    resumed = Learner(tiny_model(), replace(SETTINGS, lr=1e-5))
    resumed.load(tmp_path / "state.pt")
    decaying = Learner(tiny_model(), replace(SETTINGS, lr=1e-5, weight_decay=100.0))
    decaying.load(tmp_path / "state.pt")
    assert resumed.step(some_samples()).metrics["lr"] == 1e-5
    decaying.step(some_samples())
    assert not same(weights(resumed), weights(decaying))


def test_a_foreign_state_is_refused(tmp_path: Path) -> None:
    learner = Learner(tiny_model(), SETTINGS)
    with pytest.raises(ValueError, match="expected format 1, found None"):
        learner.load_state_dict({})
    Learner(tiny_model(hidden_size=16), SETTINGS).save(tmp_path / "state.pt")
    with pytest.raises(ValueError, match="belongs to another model"):
        learner.load(tmp_path / "state.pt")


@pytest.mark.parametrize(
    ("samples", "offered", "skipped", "share"),
    [
        ([], None, "empty", 0.0),
        ([episode(0, (3, False), (0, True), advantage=1.0)], None, "empty", 0.0),
        ([episode(i, (3, False), (2, True)) for i in range(4)], None, "uninformative", 0.0),
        ([episode(0, (3, False), (2, True), advantage=1.0)], 20, "uninformative", 0.05),
        ([episode(0, (3, False), (2, True), advantage=1.0)], 10, None, 0.1),
    ],
)
def test_a_step_that_few_samples_inform_is_skipped(
    samples: list[Sample], offered: int | None, skipped: str | None, share: float
) -> None:
    learner = Learner(tiny_model(), SETTINGS)
    before = weights(learner)
    result = learner.step(samples, offered=offered)
    assert (result.updated, result.skipped) == (skipped is None, skipped)
    assert result.metrics["informative"] == pytest.approx(share)
    assert same(weights(learner), before) is (skipped is not None)
    assert (learner.steps, learner.updates) == ((0, 0) if skipped else (1, 1))
    assert (result.loss == 0) is (skipped is not None)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_single_token_trains(advantage: float) -> None:
    """Case 10: a completion of one token, among empty ones, moves in the direction of its advantage."""
    learner = Learner(tiny_model(), SETTINGS)
    one = episode(0, (3, False), (1, True), advantage=advantage)
    batch = collate([one])
    before = float(learner.logprobs(batch).sum())
    result = learner.step([one, episode(1, (3, False), (0, True)), episode(2)], offered=3)
    assert (result.samples, result.tokens) == (1, 1)
    assert (float(learner.logprobs(batch).sum()) - before) * advantage > 0


def test_what_cannot_be_reinforced_is_named() -> None:
    scripted = episode(0, (3, False), (2, True), advantage=1.0)
    scripted = replace(scripted, trajectory=replace(scripted.trajectory, logprobs=np.empty(0, np.float32), spans=()))
    with pytest.raises(ValueError, match="trajectory task-0/0/0 is unscored and cannot train with objective grpo"):
        Learner(tiny_model(), SETTINGS).step([scripted])
    assert Learner(tiny_model(), replace(SETTINGS, objective=Objective.CLONE)).step([scripted]).updated


def test_a_gradient_that_is_not_finite_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model()
    with torch.no_grad():
        next(model.parameters())[:] = math.nan
    learner = Learner(model, SETTINGS)
    kept = [p.clone() for p in learner.model.parameters()]
    result = learner.step(some_samples())
    assert (result.updated, result.skipped, result.metrics["nonfinite"]) == (False, "nonfinite", 1.0)
    assert all(torch.equal(a, b) for a, b in zip(kept[1:], list(learner.model.parameters())[1:], strict=True))
    assert "the gradient's norm is nan" in caplog.text


def test_warmup_and_clipping() -> None:
    learner = Learner(tiny_model(), replace(SETTINGS, warmup=4, grad_clip=1e-3))
    with watched_updates() as seen:
        rates = [learner.step(some_samples()).metrics["lr"] for _ in range(5)]
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])
    norms = [math.sqrt(sum(float(g.square().sum()) for g in gradients)) for _, gradients in seen]
    assert norms == pytest.approx([1e-3] * 5, rel=1e-3)


def test_metrics_of_the_two_ratios() -> None:
    """A sampler that was less sure by log 3 on every token: all weights 3, truncated at 2; nothing clipped."""
    learner = Learner(tiny_model(), SETTINGS)
    sample = episode(0, (3, False), (4, True), advantage=1.0)
    batch = collate([sample])
    behaviour = learner.logprobs(batch)[batch.mask].numpy() - np.float32(math.log(3))
    result = learner.step([replace(sample, trajectory=replace(sample.trajectory, logprobs=behaviour))])
    wanted = {"importance": 2.0, "truncated": 1.0, "clipped": 0.0, "behaviour_gap": math.log(3), "informative": 1.0}
    assert {name: result.metrics[name] for name in wanted} == pytest.approx(wanted, abs=1e-5)
    assert result.metrics["behaviour_kl"] == pytest.approx(-math.log(3), abs=1e-5)
    assert 0 < result.metrics["entropy"] < math.log(VOCABULARY)


def test_bf16_is_close_to_float32() -> None:
    samples = some_samples()
    exact, fast = Learner(tiny_model(), SETTINGS), Learner(tiny_model(), replace(SETTINGS, bf16=True))
    assert fast.step(samples).loss == pytest.approx(exact.step(samples).loss, abs=0.02)
    assert {p.dtype for p in fast.model.parameters()} == {torch.float32}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("bf16", [False, True])
def test_cuda_agrees_with_the_cpu(bf16: bool, tmp_path: Path) -> None:
    cpu, gpu = Learner(tiny_model(), MANY), Learner(tiny_model().cuda(), replace(MANY, bf16=bf16))
    for samples in batches():
        assert gpu.step(samples).loss == pytest.approx(cpu.step(samples).loss, abs=0.05 if bf16 else 1e-3)
    gpu.save(tmp_path / "state.pt")
    back = Learner(tiny_model(seed=3), MANY)
    back.load(tmp_path / "state.pt")
    assert same(weights(back), {name: value.cpu() for name, value in weights(gpu).items()})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 0.0}, "lr: expected a number > 0, found 0.0"),
        ({"lr": math.nan}, "lr: expected a number > 0"),
        ({"clip_low": 1.5}, "clip_low: expected a number from 0 to 1, found 1.5"),
        ({"minibatches": 0}, "minibatches: expected a whole number >= 1, found 0"),
        ({"entropy": -0.1}, "entropy: expected a number >= 0"),
    ],
)
def test_a_setting_out_of_range_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LearnerSettings(**changes)


def taught(learner: Learner, score: Callable[[int], float], *, steps: int) -> float:
    """Sample one token after a prompt, in groups of 8; returns the mean reward of the last step."""
    reward, random = 0.0, torch.Generator().manual_seed(0)
    for step in range(steps):
        groups = [
            [sampled(learner.model, [5, g], 1, temperature=1.0, random=random) for _ in range(8)] for g in range(4)
        ]
        samples = list[Sample]()
        for number, group in enumerate(groups):
            trajectories = [
                replace(
                    episode(number * 4, (2, False), (1, True), temperature=1.0).trajectory,
                    trajectory_id=f"{step}/{number}/{i}",
                    sample_index=i,
                    tokens=np.array(tokens, np.int32),
                    logprobs=np.array(logprobs, np.float32),
                    reward=score(tokens[-1]),
                )
                for i, (tokens, logprobs) in enumerate(group)
            ]
            samples += score_group(trajectories, Advantage.GRPO)
            reward += sum(t.reward for t in trajectories) / 32 if step == steps - 1 else 0.0
        learner.step(samples)
    return reward


def test_it_learns_what_is_rewarded() -> None:
    learner = Learner(tiny_model(), replace(SETTINGS, lr=5e-3, minibatches=2))
    assert taught(learner, lambda token: float(token < 10), steps=25) > 0.9
