"""The object store, as the rest of rollstream sees it: whole objects, byte ranges, conditional writes.

    put(if_none_match=True)   created once: of any number of writers one wins, the others get `Lost`
    put(if_match=etag)        compare-and-set: moved by whoever saw the last value

`MemoryStore` here and `S3Store` (s3.py) both are an `ObjectStore`; the same tests hold for both. An ETag is opaque: it is
compared, never computed. `probe_store` proves at the start that a store keeps its word about conditional writes.
"""

import hashlib
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, Protocol

from ..schemas.errors import RollstreamError


class StoreError(RollstreamError):
    """The store could not do what was asked. `retriable` says whether the same call may work later."""

    def __init__(self, message: str, *, retriable: bool = False) -> None:
        super().__init__(message)
        self.retriable = retriable


class NotFound(StoreError):
    """There is no object of this key."""


class Lost(StoreError):
    """A conditional write that another one won: the key exists, or its ETag is another one, or it is gone."""


class Content(NamedTuple):
    """What was read, and the ETag of the whole object that it was read from."""

    data: bytes
    etag: str


class Entry(NamedTuple):
    """An object as listed."""

    key: str
    size: int
    etag: str
    modified: datetime
    """When it was written, UTC."""


class Upload(NamedTuple):
    """A multipart upload that was begun and not ended: under way, or abandoned."""

    key: str
    upload_id: str
    begun: datetime
    """UTC."""


class ObjectStore(Protocol):
    """Objects by key. Thread-safe. Calls raise `StoreError`; what can be retried was, before it is raised."""

    def put(self, key: str, data: bytes, *, if_none_match: bool = False, if_match: str | None = None) -> str:
        """Write an object whole and return its ETag. With a condition it is written only if that holds, or raises `Lost`.

        Where an answer was lost on the way, equal bytes at the key count as our own write: put something unique in them.
        """
        ...

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> Content:
        """Read an object, or `length` bytes from `start` on (fewer at its end). Raises `NotFound`."""
        ...

    def head(self, key: str) -> Entry:
        """Raises `NotFound`."""
        ...

    def list(self, prefix: str = "") -> list[Entry]:
        """Every object whose key starts with `prefix`, by key."""
        ...

    def delete(self, key: str) -> None:
        """Delete an object; fine where there is none."""
        ...

    def put_file(self, key: str, path: Path) -> str:
        """Write a file as an object without holding it in memory; returns the ETag. A failed one leaves no parts behind."""
        ...

    def get_file(self, key: str, path: Path) -> Entry:
        """Read an object into a file, which appears whole or not at all. Raises `NotFound`."""
        ...

    def uploads(self, prefix: str = "") -> list[Upload]:
        """Multipart uploads that were begun and not ended. Their parts take space until they are aborted."""
        ...

    def abort(self, upload: Upload) -> None:
        """Drop an upload and its parts; fine where it is gone."""
        ...
