"""Files of a checkpoint to the store and back: by digest, in parallel, verified.

    upload     file --SHA-256--> there already? --no--> <run>/objects/<sha256>
    download   what is on this disk already --verified--+
               ranges of objects --> file --verified----+--> directory beside the target --rename--> target

A download appears whole or not at all. What was verified stays linked under its digest in `.objects` beside the target,
as long as the newest manifest downloaded there has it: the next checkpoint fetches only what changed.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

from .manifest import CheckpointError, DigestMismatch, StoredFile
from .store import NotFound, ObjectStore

THREADS = 8
RANGE = 8 << 20
"""Bytes of one download request."""
FRESH = timedelta(minutes=30)
"""An object that no checkpoint is known to need is written again once it is older: a collector might be at it."""
CACHE = ".objects"

Files = Mapping[str, StoredFile]


class Range(NamedTuple):
    """A piece of one file: one request."""

    name: str
    digest: str
    start: int
    stop: int


class Objects:
    """The content-addressed objects of one run."""

    def __init__(self, store: ObjectStore, run: str) -> None:
        self.prefix = f"{run}/objects/"
        self._store = store

    def key(self, digest: str) -> str:
        return self.prefix + digest

    def upload(self, files: Mapping[str, Path | bytes], *, kept: Iterable[str] = ()) -> dict[str, StoredFile]:
        """Store these files unless they are there. `kept`: digests that are there for certain and stay."""
        with ThreadPoolExecutor(THREADS) as pool:
            stored = dict(zip(files, pool.map(_describe, files.values()), strict=True))
            known = set(kept)
            # By digest: two files with one content are one object.
            missing = {file.sha256: name for name, file in stored.items() if file.sha256 not in known}
            names = missing.values()
            list(pool.map(self._put, [stored[name] for name in names], [files[name] for name in names]))
        return stored

    def download(self, files: Files, directory: Path, *, keep: Iterable[str]) -> None:
        """Put these files into `directory`, by their paths. Where all of them are there and whole, nothing happens.

        `keep`: digests that stay in the cache. Raises `DigestMismatch`, `CheckpointError` for an object that is gone,
        `StoreError`, `OSError` where the disk is full; then `directory` is as it was.
        """
        if directory.is_dir() and all(_holds(directory / name, file) for name, file in files.items()):
            return
        directory.parent.mkdir(parents=True, exist_ok=True)
        cache = directory.parent / CACHE
        fresh = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
        try:
            with ThreadPoolExecutor(THREADS) as pool:
                self._fill(pool, files, fresh, sources=(cache, directory))
            _remember(files, fresh, cache, keep=set(keep))
            _replace(fresh, directory, files)
        except OSError as error:
            if error.filename is not None:
                raise
            # A write does not tell where it was made.
            raise OSError(error.errno, error.strerror, str(directory)) from error
        finally:
            shutil.rmtree(fresh, ignore_errors=True)

    def _put(self, file: StoredFile, source: Path | bytes) -> None:
        key = self.key(file.sha256)
        try:
            entry = self._store.head(key)
            # A wrong size is a damaged object: writing it again mends it.
            if entry.size == file.size and datetime.now(UTC) - entry.modified < FRESH:
                return
        except NotFound:
            pass
        if isinstance(source, Path):
            self._store.put_file(key, source)
        else:
            self._store.put(key, source)

    def _fill(self, pool: ThreadPoolExecutor, files: Files, fresh: Path, *, sources: tuple[Path, Path]) -> None:
        for name in files:
            (fresh / name).parent.mkdir(parents=True, exist_ok=True)
        reused = pool.map(partial(_reuse, fresh=fresh, sources=sources), files, files.values())
        wanted = {name: files[name] for name, done in zip(files, reused, strict=True) if not done}
        list(pool.map(partial(self._prepare, fresh=fresh), wanted, wanted.values()))
        ranges = [piece for name, file in wanted.items() for piece in _ranges(name, file)]
        list(pool.map(partial(self._copy, fresh=fresh), ranges))
        list(pool.map(partial(_verify, fresh=fresh), wanted, wanted.values()))

    def _prepare(self, name: str, file: StoredFile, fresh: Path) -> None:
        """Refuse an object of the wrong size before any of it is read; make room for the rest."""
        try:
            found = self._store.head(self.key(file.sha256)).size
        except NotFound as error:
            raise CheckpointError(
                f"{name}: its object {self.key(file.sha256)} is not in the store: this checkpoint was collected, or "
                f"its objects were deleted. Take another version"
            ) from error
        if found != file.size:
            raise DigestMismatch(name, expected=f"{file.size} bytes", found=f"{found} bytes")
        with (fresh / name).open("wb") as target:
            target.truncate(file.size)

    def _copy(self, piece: Range, fresh: Path) -> None:
        data = self._store.get(self.key(piece.digest), start=piece.start, length=piece.stop - piece.start).data
        with (fresh / piece.name).open("r+b") as target:
            target.seek(piece.start)
            target.write(data)


def _describe(source: Path | bytes) -> StoredFile:
    if isinstance(source, bytes):
        return StoredFile(size=len(source), sha256=hashlib.sha256(source).hexdigest())
    return StoredFile(size=source.stat().st_size, sha256=_digest(source))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _holds(path: Path, file: StoredFile) -> bool:
    """Is this very file there, whole?"""
    return path.is_file() and path.stat().st_size == file.size and _digest(path) == file.sha256


def _verify(name: str, file: StoredFile, fresh: Path) -> None:
    found = _digest(fresh / name)
    if found != file.sha256:
        raise DigestMismatch(name, expected=f"SHA-256 {file.sha256}", found=found)


def _ranges(name: str, file: StoredFile) -> list[Range]:
    return [Range(name, file.sha256, start, min(start + RANGE, file.size)) for start in range(0, file.size, RANGE)]


def _reuse(name: str, file: StoredFile, fresh: Path, sources: tuple[Path, Path]) -> bool:
    """Link the file from the cache, or from the directory that is to be replaced, if it is there and whole."""
    cache, directory = sources
    for source in (cache / file.sha256, directory / name):
        if _link(source, fresh / name) and _holds(fresh / name, file):
            return True
        (fresh / name).unlink(missing_ok=True)
    return False


def _link(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except OSError:
        # Not there, gone this moment, or a file system without links: then it is fetched, or not cached.
        return False
    return True


def _remember(files: Files, fresh: Path, cache: Path, *, keep: set[str]) -> None:
    cache.mkdir(exist_ok=True)
    for path in cache.iterdir():
        if path.name not in keep:
            path.unlink(missing_ok=True)
    for name, file in files.items():
        # What was there under this digest may have been spoilt since, or it would have been used.
        (cache / file.sha256).unlink(missing_ok=True)
        _link(fresh / name, cache / file.sha256)


def _replace(fresh: Path, directory: Path, files: Files) -> None:
    """Rename `fresh` to `directory`; what was there goes. Another process may have been faster with the same files."""
    fresh.chmod(0o755)
    aside = fresh.with_name(f"{fresh.name}-old")
    try:
        if directory.exists():
            directory.rename(aside)
        fresh.rename(directory)
    except OSError:
        if not all(_holds(directory / name, file) for name, file in files.items()):
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
