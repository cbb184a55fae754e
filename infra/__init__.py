"""The ground: configuration, the log, the object store, the local stack. Lazy, so that only what is used is imported.

Add a name in both places: `_HOMES` for the running program, the TYPE_CHECKING block for checkers and editors.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checkpoints import CheckpointError, Checkpoints, DigestMismatch, Fenced, Manifest, StoredFile
    from .config import Config, ConfigError
    from .cursors import Cursor, Cursors, CursorTracker
    from .kafka import KafkaLog
    from .log import (
        Consumer,
        Log,
        LogError,
        OffsetExpired,
        Partition,
        Position,
        Record,
        RecordTooLarge,
        Topic,
        UnknownTopic,
        Writer,
    )
    from .memory import MemoryLog
    from .models import export_smollm2, open_model, tiny_llama
    from .s3 import S3Store
    from .schemabook import LogSchemas, publish_schemas
    from .stack import AlreadyUp, Endpoints, LocalStack, StackError
    from .store import Lost, MemoryStore, NotFound, ObjectStore, StoreError, probe
    from .topics import Names
    from .weights import WeightsError, load_weights, save_weights

_HOMES = {
    "AlreadyUp": "stack",
    "CheckpointError": "checkpoints",
    "Checkpoints": "checkpoints",
    "Config": "config",
    "ConfigError": "config",
    "Consumer": "log",
    "Cursor": "cursors",
    "CursorTracker": "cursors",
    "Cursors": "cursors",
    "DigestMismatch": "checkpoints",
    "Endpoints": "stack",
    "Fenced": "checkpoints",
    "KafkaLog": "kafka",
    "LocalStack": "stack",
    "Log": "log",
    "LogError": "log",
    "LogSchemas": "schemabook",
    "Lost": "store",
    "Manifest": "checkpoints",
    "MemoryLog": "memory",
    "MemoryStore": "store",
    "Names": "topics",
    "NotFound": "store",
    "ObjectStore": "store",
    "OffsetExpired": "log",
    "Partition": "log",
    "Position": "log",
    "Record": "log",
    "RecordTooLarge": "log",
    "S3Store": "s3",
    "StackError": "stack",
    "StoreError": "store",
    "StoredFile": "checkpoints",
    "Topic": "log",
    "UnknownTopic": "log",
    "WeightsError": "weights",
    "Writer": "log",
    "export_smollm2": "models",
    "load_weights": "weights",
    "open_model": "models",
    "probe": "store",
    "publish_schemas": "schemabook",
    "save_weights": "weights",
    "tiny_llama": "models",
}

__all__ = [
    "AlreadyUp",
    "CheckpointError",
    "Checkpoints",
    "Config",
    "ConfigError",
    "Consumer",
    "Cursor",
    "CursorTracker",
    "Cursors",
    "DigestMismatch",
    "Endpoints",
    "Fenced",
    "KafkaLog",
    "LocalStack",
    "Log",
    "LogError",
    "LogSchemas",
    "Lost",
    "Manifest",
    "MemoryLog",
    "MemoryStore",
    "Names",
    "NotFound",
    "ObjectStore",
    "OffsetExpired",
    "Partition",
    "Position",
    "Record",
    "RecordTooLarge",
    "S3Store",
    "StackError",
    "StoreError",
    "StoredFile",
    "Topic",
    "UnknownTopic",
    "WeightsError",
    "Writer",
    "export_smollm2",
    "load_weights",
    "open_model",
    "probe",
    "publish_schemas",
    "save_weights",
    "tiny_llama",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
