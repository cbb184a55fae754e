"""Engines by name: `open_engine` imports what it opens and nothing else."""

from importlib import import_module
from pathlib import Path
from typing import Any

from ..engine import Engine

__all__ = ["ENGINES", "open_engine"]

ENGINES = {"transformers": (".hf", "TransformersEngine"), "vllm": (".vllm", "VllmEngine")}
"""Name -> module and class."""


def open_engine(kind: str, model: Path, **options: Any) -> Engine:
    """Open an engine over a model directory; `options` are those of its class.

    Blocks while the model loads, for seconds. Raises `ValueError` for a kind that there is not, `MissingExtra`,
    `EngineError`.
    """
    if kind not in ENGINES:
        raise ValueError(f"engine: one of {', '.join(ENGINES)} expected, {kind!r} given")
    module, name = ENGINES[kind]
    engine: Engine = getattr(import_module(module, __name__), name)(model, **options)
    return engine
