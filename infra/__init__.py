"""The ground: configuration, the log, the object store, the local stack. Lazy, so that only what is used is imported.

Add a name in both places: `_HOMES` for the running program, the TYPE_CHECKING block for checkers and editors.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import Config, ConfigError
    from .s3 import S3Store
    from .stack import AlreadyUp, Endpoints, LocalStack, StackError
    from .store import Lost, MemoryStore, NotFound, ObjectStore, StoreError, probe

_HOMES = {
    "AlreadyUp": "stack",
    "Config": "config",
    "ConfigError": "config",
    "Endpoints": "stack",
    "LocalStack": "stack",
    "Lost": "store",
    "MemoryStore": "store",
    "NotFound": "store",
    "ObjectStore": "store",
    "S3Store": "s3",
    "StackError": "stack",
    "StoreError": "store",
    "probe": "store",
}

__all__ = [
    "AlreadyUp",
    "Config",
    "ConfigError",
    "Endpoints",
    "LocalStack",
    "Lost",
    "MemoryStore",
    "NotFound",
    "ObjectStore",
    "S3Store",
    "StackError",
    "StoreError",
    "probe",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
