"""The object store, as the rest of rollstream sees it: whole objects, byte ranges, conditional writes.

    put(if_none_match=True)   created once: of any number of writers one wins, the others get `Lost`
    put(if_match=etag)        compare-and-set: moved by whoever saw the last value

`MemoryStore` here and `S3Store` (s3.py) both are an `ObjectStore`; the same tests hold for both. An ETag is opaque:
it is compared, never computed. `probe` proves at the start that a store keeps its word about conditional writes.
"""

import hashlib
import threading
import uuid
from collections.abc import Callable, Sequence
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
        """Write an object whole and return its ETag. Raises `Lost` where the condition does not hold.

        Where an answer was lost on the way, equal bytes at the key count as our own: put something unique in them.
        """
        ...

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> Content:
        """Read an object, or `length` bytes from `start` on (fewer at its end). Raises `NotFound`."""
        ...

    def head(self, key: str) -> Entry:
        """Raises `NotFound`."""
        ...

    def list(self, prefix: str = "") -> Sequence[Entry]:
        """Every object whose key starts with `prefix`, by key."""
        ...

    def delete(self, key: str) -> None:
        """Delete an object; fine where there is none."""
        ...

    def put_file(self, key: str, path: Path) -> str:
        """Write a file as an object, in parts if it is large; returns the ETag. A failed one leaves no parts behind."""
        ...

    def get_file(self, key: str, path: Path) -> Entry:
        """Read an object into a file, which appears whole or not at all. Raises `NotFound`."""
        ...

    def uploads(self, prefix: str = "") -> Sequence[Upload]:
        """Multipart uploads that were begun and not ended. Their parts take space until they are aborted."""
        ...

    def abort(self, upload: Upload) -> None:
        """Drop an upload and its parts; fine where it is gone."""
        ...


class MemoryStore:
    """An object store in memory: for tests, and for runs of one process."""

    def __init__(self) -> None:
        self._objects: dict[str, tuple[bytes, Entry]] = {}
        self._uploads: dict[str, Upload] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"MemoryStore({len(self._objects)} objects)"

    def put(self, key: str, data: bytes, *, if_none_match: bool = False, if_match: str | None = None) -> str:
        body = bytes(data)
        etag = f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'
        with self._lock:
            present = self._objects.get(key)
            if if_none_match and present is not None:
                raise Lost(f"{key} exists already")
            if if_match is not None and (present is None or present[1].etag != if_match):
                raise Lost(f"{key} is not {if_match} any more, it is {present[1].etag if present else 'gone'}")
            self._objects[key] = (body, Entry(key, len(body), etag, datetime.now(UTC)))
        return etag

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> Content:
        data, entry = self._find(key)
        return Content(data[start : None if length is None else start + length], entry.etag)

    def head(self, key: str) -> Entry:
        return self._find(key)[1]

    def list(self, prefix: str = "") -> Sequence[Entry]:
        with self._lock:
            return [entry for key, (_, entry) in sorted(self._objects.items()) if key.startswith(prefix)]

    def delete(self, key: str) -> None:
        with self._lock:
            self._objects.pop(key, None)

    def put_file(self, key: str, path: Path) -> str:
        return self.put(key, path.read_bytes())

    def get_file(self, key: str, path: Path) -> Entry:
        data, entry = self._find(key)
        draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}.draft")
        draft.write_bytes(data)
        draft.replace(path)
        return entry

    def begin(self, key: str) -> Upload:
        """Begin an upload and leave it so, as a writer does that is killed in the middle of `put_file`."""
        upload = Upload(key, uuid.uuid4().hex, datetime.now(UTC))
        with self._lock:
            self._uploads[upload.upload_id] = upload
        return upload

    def uploads(self, prefix: str = "") -> Sequence[Upload]:
        with self._lock:
            return [upload for upload in self._uploads.values() if upload.key.startswith(prefix)]

    def abort(self, upload: Upload) -> None:
        with self._lock:
            self._uploads.pop(upload.upload_id, None)

    def _find(self, key: str) -> tuple[bytes, Entry]:
        with self._lock:
            found = self._objects.get(key)
        if found is None:
            raise NotFound(f"there is no object {key}")
        return found


RACERS = 8


def probe(store: ObjectStore, prefix: str = "") -> None:
    """Prove that the store honours conditional writes, also in a race of eight threads. Takes about 20 small requests.

    Raises `StoreError` where it does not: checkpoints would overwrite each other there, silently.
    """
    key = f"{prefix}probe-{uuid.uuid4().hex}"
    try:
        _probe_create(store, f"{key}-create")
        _probe_replace(store, f"{key}-replace")
    finally:
        for name in ("create", "replace"):
            store.delete(f"{key}-{name}")


def _probe_create(store: ObjectStore, key: str) -> None:
    won = _race(lambda racer: store.put(key, b"%d" % racer, if_none_match=True))
    _expect(store, len(won) == 1, f"of {RACERS} concurrent writes with If-None-Match: * one wins", f"{len(won)} did")
    late = _race(lambda _: store.put(key, b"late", if_none_match=True), racers=1)
    _expect(store, not late, "a write with If-None-Match: * to a key that exists is refused", "it was done")


def _probe_replace(store: ObjectStore, key: str) -> None:
    missing = _race(lambda _: store.put(key, b"missing", if_match='"00000000000000000000000000000000"'), racers=1)
    _expect(store, not missing, "a write with If-Match to a key that does not exist is refused", "it was done")
    first = store.put(key, b"first")
    won = _race(lambda racer: store.put(key, b"%d" % racer, if_match=first))
    _expect(store, len(won) == 1, f"of {RACERS} concurrent writes with one If-Match one wins", f"{len(won)} did")
    stale = _race(lambda _: store.put(key, b"stale", if_match=first), racers=1)
    _expect(store, not stale, "a write with the If-Match of an older value is refused", "it was done")


def _race(write: Callable[[int], str], racers: int = RACERS) -> Sequence[str]:
    """ETags of the writers that won."""

    def run(racer: int) -> str | None:
        try:
            return write(racer)
        except Lost:
            return None

    with ThreadPoolExecutor(racers) as pool:
        return [etag for etag in pool.map(run, range(racers)) if etag is not None]


def _expect(store: ObjectStore, held: bool, promise: str, found: str) -> None:
    if not held:
        raise StoreError(
            f"{store!r} ignores conditional writes: expected that {promise}, found that {found}. "
            "Checkpoints need a store that honours If-None-Match and If-Match (S3, SeaweedFS, MinIO, Ceph)"
        )
