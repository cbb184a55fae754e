"""Weights as safetensors: under the names of a Hugging Face checkpoint, checked before anything live is touched.

    trainer: save_weights --> directory --> object store --> directory --> worker: read_weights (names, shapes, dtypes,
                                                                           length of every file) --> engine swaps

Tied weights (an output layer that is the embedding) are stored once, under the first of their names.
"""

import json
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..schemas import RollstreamError

if TYPE_CHECKING:
    from torch import Tensor, nn

Shapes = Mapping[str, tuple[int, ...]]
"""Name -> shape of every tensor of a checkpoint."""

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 2 << 30


class WeightsError(RollstreamError):
    """Weights that cannot be read, or do not fit the model; nothing was changed."""


def save_weights(model: "nn.Module", directory: Path, *, dtype: str | None = None) -> None:
    """Write the weights, as `dtype` ("bfloat16", say) or as they are; in shards of 2 GiB with an index where needed.

    The same weights give the same bytes. Files of an earlier call are replaced.
    """
    from huggingface_hub import save_torch_state_dict

    target = None if dtype is None else torch_dtype(dtype)
    state = {name: _detached(tensor, target) for name, tensor in _checkpoint_state(model).items()}
    directory.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(state, directory, max_shard_size=SHARD_BYTES, metadata={"format": "pt"})


def load_weights(model: "nn.Module", directory: Path) -> None:
    """Copy the weights in this directory into the model, in place, cast to its dtypes.

    Raises `WeightsError` before the first of them is touched.
    """
    copy_weights(model, read_model_weights(model, directory))


def copy_weights(model: "nn.Module", weights: "Mapping[str, Tensor]") -> None:
    """Copy what `read_model_weights` read into the model, in place."""
    import torch

    state = model.state_dict()
    with torch.no_grad():
        for name, tensor in weights.items():
            state[name].copy_(tensor)


def read_model_weights(model: "nn.Module", directory: Path) -> "dict[str, Tensor]":
    """Read weights for this model, under the names of its own state; the model itself is left as it is.

    Raises `WeightsError` where they cannot be read or do not fit.
    """
    own, expected = _state_shapes(model), checkpoint_shapes(model)
    tensors = read_weights(directory, expected, optional=_alias_names(model))
    if own.keys() == expected.keys():
        return tensors
    # Some architectures hold fused tensors under other names than their checkpoints: let transformers convert.
    source: Any = model
    kind: Any = type(model)
    fresh: nn.Module
    with silent_transformers():
        fresh = kind.from_pretrained(None, config=source.config, dtype=source.dtype, state_dict=tensors)
    return {name: tensor for name, tensor in fresh.state_dict().items() if name in own}


def read_weights(directory: Path, expected: Shapes, *, optional: Iterable[str] = ()) -> "dict[str, Tensor]":
    """Read every tensor of `expected`, on the CPU; `optional` names (tied duplicates) may be there and are left out.

    Raises `WeightsError` naming what is missing, surplus, of another shape or not a floating-point number.
    """
    tensors: dict[str, Tensor] = {}
    with _readable(directory):
        for path in weight_files(directory):
            tensors |= import_module("safetensors.torch").load_file(path)
    skipped = set(optional) - expected.keys()
    tensors = {name: tensor for name, tensor in tensors.items() if name not in skipped}
    _check_shapes(directory, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, expected)
    integers = sorted(name for name, tensor in tensors.items() if not tensor.is_floating_point())
    if integers:
        raise WeightsError(
            f"{directory}: floating-point weights expected, {tensors[integers[0]].dtype} in {integers[0]}"
        )
    return tensors


def directory_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights in a directory, from the files' headers alone. Raises `WeightsError`."""
    shapes: dict[str, tuple[int, ...]] = {}
    with _readable(directory):
        for path in weight_files(directory):
            file: Any
            with import_module("safetensors").safe_open(path, framework="pt") as file:
                names: list[str] = file.keys()
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
    return shapes


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model: those its index names, or all. Raises `WeightsError` where there are none."""
    index = directory / INDEX
    if index.is_file():
        files = sorted({directory / name for name in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = sorted(directory.glob("*.safetensors"))
    missing = [path.name for path in files if not path.is_file()]
    if missing or not files:
        raise WeightsError(f"{directory}: safetensors files expected, {', '.join(missing) or 'all of them'} missing")
    return files


def checkpoint_shapes(model: "nn.Module") -> dict[str, tuple[int, ...]]:
    """Names and shapes that a checkpoint of this model has; tied duplicates left out."""
    return {name: tuple(tensor.shape) for name, tensor in _checkpoint_state(model, device="meta").items()}


def torch_dtype(name: str) -> Any:
    """The torch dtype of this name ("float32", "bfloat16", "float16"). Raises `ValueError` for anything else."""
    import torch

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise ValueError(f"dtype: one of {', '.join(known)} expected, {name!r} given")
    return known[name]


@contextmanager
def silent_transformers() -> Generator[None]:
    """Without transformers' progress bars: a library prints nothing."""
    settings: Any = import_module("transformers.utils.logging")
    shown = settings.is_progress_bar_enabled()
    settings.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            settings.enable_progress_bar()


def _detached(tensor: "Tensor", dtype: Any) -> "Tensor":
    """On the CPU, and alone in its memory: a slice of a fused tensor would be written with all of it."""
    alone = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None)
    return alone if alone.untyped_storage().nbytes() == alone.nbytes else alone.clone()


@contextmanager
def _readable(directory: Path) -> Generator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{directory}: not readable as safetensors ({error}); fetch the checkpoint again") from error


def _checkpoint_state(model: "nn.Module", *, device: str | None = None) -> "dict[str, Tensor]":
    """The state under checkpoint names, tied duplicates left out; on the meta device for names and shapes alone."""
    aliases = _alias_names(model)
    state = {name: tensor.to(device) for name, tensor in model.state_dict().items() if name not in aliases}
    if not hasattr(model, "config"):
        return state
    revert: Any = import_module("transformers.core_model_loading").revert_weight_conversion
    return dict(revert(model, state))


def _state_shapes(model: "nn.Module") -> dict[str, tuple[int, ...]]:
    aliases = _alias_names(model)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in aliases}


def _alias_names(model: "nn.Module") -> set[str]:
    """Names whose tensor another name before them already holds."""
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    aliases: set[str] = set()
    for name, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if place in seen and tensor.numel():
            aliases.add(name)
        seen.add(place)
    return aliases


def _check_shapes(directory: Path, found: Shapes, expected: Shapes) -> None:
    missing, surplus = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or surplus:
        raise WeightsError(
            f"{directory}: other weights than the model's: {len(missing)} missing ({', '.join(missing[:3])}), "
            f"{len(surplus)} unknown ({', '.join(surplus[:3])}); is it a checkpoint of the same model?"
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise WeightsError(f"{directory}: {name} of shape {shape} expected, {found[name]} found")
