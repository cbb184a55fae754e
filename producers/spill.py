"""Finished episodes on this machine's disk, while the log or the store does not take them.

    <folder>/0/lock           held by the worker that the place belongs to, and gone with its process
    <folder>/0/<n>.record     one record each, appears whole: magic, SHA-256 of the rest, topic, key, headers, value
    <folder>/0/<n>.damaged    did not read as it was written; set aside for people, never delivered
    <folder>/1/...            another worker of this machine

A worker takes the first place that nobody holds, and what dead workers left in any of them. A record leaves the disk
once the log acknowledged it: killed in between, it is delivered twice, and known by its trajectory id.
"""

import asyncio
import errno
import fcntl
import hashlib
import json
import logging
import os
import struct
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import BinaryIO, TypeVar

from ..schemas.errors import RollstreamError

logger = logging.getLogger(__name__)

BLOCK = 4096
"""Bytes by which a disk gives out its room."""
HEAD = 1024
"""Bytes of a file beside its value, about."""
WRITERS = 4
"""Records that are written at once: each waits for the disk."""
PASSING = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM))
"""What a process or machine may be short of for a while; the file itself is whole."""
PAUSE = 1.0
"""Seconds until it is read again then."""
_MAGIC = b"rsp1"
_DIGEST = 32
_LENGTH = struct.Struct("<I")

Result = TypeVar("Result")


class SpillError(RollstreamError):
    """A folder that cannot be used, or a record that does not read as it was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spilled:
    """A record as it goes to the log."""

    topic: str
    key: bytes
    headers: Mapping[str, bytes]
    value: bytes


@dataclass(frozen=True, slots=True)
class Kept:
    """Where a record lies, and what it takes there."""

    path: Path
    room: int
    """Bytes."""


class Spill:
    """One worker's place in a folder of spilled records. For one event loop, which it never stops; to be closed."""

    def __init__(self, folder: Path, *, limit: int) -> None:
        """`limit`: bytes on the disk, past which nothing is kept. Raises `SpillError` for a folder of no use."""
        self.limit, self.used = limit, 0
        self.damaged = 0
        """Records that were set aside."""
        try:
            self._place, self._lock = _take_place(folder)
            left = _gather(folder, self._place)
        except OSError as error:
            raise SpillError(
                f"worker.spill: expected a folder that can be written, found {folder}: {error.strerror or error}; "
                f"name another one, or set worker.spill_bytes to 0 to keep nothing on the disk"
            ) from error
        self.left = tuple(Kept(path, _room(path.stat().st_size)) for path in left)
        """What dead workers left, oldest first; whoever delivers it drops it."""
        self.used = sum(kept.room for kept in self.left)
        self._numbers = count(_number(left[-1]) + 1 if left else 0)
        self._pool = ThreadPoolExecutor(WRITERS, thread_name_prefix="rollstream-spill")

    def number(self) -> int:
        """A record's number in line, higher than any before: it keeps its place there whenever it goes to the disk."""
        return next(self._numbers)

    async def keep(self, number: int, record: Spilled) -> Kept | None:
        """Put a record on the disk, durably; None where there is no room. Raises `OSError` where the disk refuses."""
        kept = Kept(self._place / f"{number:020d}.record", _room(HEAD + len(record.value)))
        if self.used + kept.room > self.limit:
            return None
        self.used += kept.room
        try:
            await self._do(lambda: _write(kept.path, record))
        except OSError:
            self.used -= kept.room
            raise
        return kept

    async def read(self, kept: Kept) -> Spilled:
        """What was kept there. Raises `SpillError` where it is torn or altered, and sets it aside."""
        try:
            return await self._fetch(kept.path)
        except (OSError, ValueError, LookupError, struct.error) as error:
            self.damaged += 1
            self.used -= kept.room
            await self._do(lambda: _set_aside(kept.path))
            raise SpillError(f"{kept.path}: expected a record as it was written, found {error}; set aside") from error

    async def drop(self, kept: Kept) -> None:
        """The log has it."""
        try:
            await self._do(lambda: kept.path.unlink(missing_ok=True))
        except OSError as error:
            logger.warning("%s stays, and will be delivered once more: %s", kept.path, error)
        self.used -= kept.room

    def close(self) -> None:
        """Give the place back; what lies there stays for the next one."""
        self._pool.shutdown()
        self._lock.close()

    async def _fetch(self, path: Path) -> Spilled:
        while True:
            try:
                return await self._do(lambda: _unpack(path.read_bytes()))
            except OSError as error:
                if error.errno not in PASSING:
                    raise
                logger.warning("%s cannot be read just now, again in %g s: %s", path, PAUSE, error)
            await asyncio.sleep(PAUSE)

    async def _do(self, work: Callable[[], Result]) -> Result:
        return await asyncio.wrap_future(self._pool.submit(work))


def _take_place(folder: Path) -> tuple[Path, BinaryIO]:
    """The first place that nobody holds."""
    for number in count():
        place = folder / str(number)
        place.mkdir(parents=True, exist_ok=True)
        if (lock := _try_lock(place)) is not None:
            return place, lock
    raise AssertionError("there are always more numbers")


def _try_lock(place: Path) -> BinaryIO | None:
    """Held as long as the file is open; None where another one holds it."""
    lock = (place / "lock").open("wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


def _gather(folder: Path, own: Path) -> list[Path]:
    """Records of dead workers, all of them in our own place by now, oldest first."""
    found = list(_records(own))
    numbers = count(_number(found[-1]) + 1 if found else 0)
    others = sorted((p for p in folder.iterdir() if p.name.isdigit() and p != own), key=lambda p: int(p.name))
    for place in others:
        if (lock := _try_lock(place)) is not None:
            with lock:
                found += [path.rename(own / f"{next(numbers):020d}.record") for path in _records(place)]
    return found


def _records(place: Path) -> Iterator[Path]:
    """Whole records of a place that we hold, oldest first; drafts of a dead worker are of no use to anybody."""
    for draft in place.glob("*.draft"):
        draft.unlink(missing_ok=True)
    yield from sorted(place.glob("*.record"))


def _number(path: Path) -> int:
    return int(path.stem) if path.stem.isdigit() else 0


def _room(size: int) -> int:
    """Bytes on the disk of a record, or a file, of `size` bytes."""
    return (size // BLOCK + 1) * BLOCK


def _write(path: Path, record: Spilled) -> None:
    draft = path.with_name(f"{path.stem}.{uuid.uuid4().hex}.draft")
    try:
        with draft.open("wb") as file:
            file.write(_pack(record))
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
        _sync(path.parent)
    except OSError:
        draft.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise


def _sync(folder: Path) -> None:
    """Make names in it durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _set_aside(path: Path) -> None:
    try:
        path.rename(path.with_suffix(".damaged"))
    except OSError as error:
        logger.warning("%s cannot be set aside: %s", path, error)


def _pack(record: Spilled) -> bytes:
    told = {
        "topic": record.topic,
        "key": record.key.hex(),
        "headers": {name: value.hex() for name, value in record.headers.items()},
    }
    head = json.dumps(told).encode()
    rest = b"".join((_LENGTH.pack(len(head)), head, record.value))
    return b"".join((_MAGIC, hashlib.sha256(rest).digest(), rest))


def _unpack(data: bytes) -> Spilled:
    """Raises `ValueError` for anything but what `_pack` made."""
    start = len(_MAGIC) + _DIGEST
    rest = data[start:]
    if data[: len(_MAGIC)] != _MAGIC or data[len(_MAGIC) : start] != hashlib.sha256(rest).digest():
        raise ValueError(f"{len(data)} bytes without the digest that they state")
    (size,) = _LENGTH.unpack_from(rest)
    told = json.loads(rest[_LENGTH.size : _LENGTH.size + size])
    return Spilled(
        topic=told["topic"],
        key=bytes.fromhex(told["key"]),
        headers={name: bytes.fromhex(value) for name, value in told["headers"].items()},
        value=rest[_LENGTH.size + size :],
    )
