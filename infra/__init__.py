"""The ground: configuration, the log, the object store, the local stack. Lazy, so that only what is used is imported.

Add a name in both places: `_HOMES` for the running program, the TYPE_CHECKING block for checkers and editors.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checkpoints import CheckpointError, Checkpoints, DigestMismatch, Fenced, Manifest, StoredFile
    from .config import Config, ConfigError
    from .cursors import Cursor, Cursors, CursorTracker
    from .models import open_model, tiny_llama, export_smollm2
    from .s3 import S3Store
    from .stack import AlreadyUp, Endpoints, LocalStack, StackError
    from .store import Lost, MemoryStore, NotFound, ObjectStore, StoreError, probe
    from .weights import WeightsError, load_weights, save_weights

_HOMES = {
    "AlreadyUp": "stack",
    "CheckpointError": "checkpoints",
    "Checkpoints": "checkpoints",
    "Config": "config",
    "ConfigError": "config",
    "Cursor": "cursors",
    "CursorTracker": "cursors",
    "Cursors": "cursors",
    "DigestMismatch": "checkpoints",
    "Endpoints": "stack",
    "Fenced": "checkpoints",
    "LocalStack": "stack",
    "Lost": "store",
    "Manifest": "checkpoints",
    "MemoryStore": "store",
    "NotFound": "store",
    "ObjectStore": "store",
    "S3Store": "s3",
    "StackError": "stack",
    "StoreError": "store",
    "StoredFile": "checkpoints",
    "WeightsError": "weights",
    "export_smollm2": "models",
    "load_weights": "weights",
    "open_model": "models",
    "probe": "store",
    "save_weights": "weights",
    "tiny_llama": "models",
}

__all__ = [
    "AlreadyUp",
    "CheckpointError",
    "Checkpoints",
    "Config",
    "ConfigError",
    "Cursor",
    "CursorTracker",
    "Cursors",
    "DigestMismatch",
    "Endpoints",
    "Fenced",
    "LocalStack",
    "Lost",
    "Manifest",
    "MemoryStore",
    "NotFound",
    "ObjectStore",
    "S3Store",
    "StackError",
    "StoreError",
    "StoredFile",
    "WeightsError",
    "export_smollm2",
    "load_weights",
    "open_model",
    "probe",
    "save_weights",
    "tiny_llama",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
