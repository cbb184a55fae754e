"""`<run>/latest.json`: the newest checkpoint, and the trainer that may move on from it. Compare-and-set, forward only.

trainer A claims --> A publishes 1, 2 --> trainer B claims --> B publishes 3
                                               A publishes --> Fenced: B took the run at ...
"""

import json
import time
from dataclasses import asdict, dataclass, replace

from .manifest import (
    CheckpointError,
    Manifest,
    canonical_json,
    json_object,
    json_text,
    json_whole,
    manifest_digest,
    moment,
)
from .store import Lost, NotFound, ObjectStore

ATTEMPTS = 50
"""A write is lost only to another writer's success, so this many losses in a row mean many claims at once."""


class Fenced(CheckpointError):
    """Another trainer has the run. This one stops: nothing that it computes from here on can become visible."""

    def __init__(self, message: str, *, incarnation: str, version: int, at_ms: int) -> None:
        super().__init__(message)
        self.incarnation, self.version, self.at_ms = incarnation, version, at_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """The content of `latest.json`."""

    run: str
    incarnation: str
    """The trainer that has the run."""
    claimed_ms: int
    version: int = 0
    """The newest published policy; 0 before the first."""
    digest: str = ""
    """SHA-256 (hex) of its manifest."""
    published_ms: int = 0


class LatestPointer:
    """Reads and moves the pointer of one run."""

    def __init__(self, store: ObjectStore, run: str) -> None:
        self.key = f"{run}/latest.json"
        self._store, self._run = store, run

    def read(self) -> Pointer | None:
        """None where nobody has claimed the run yet. Raises `CheckpointError` for a broken one."""
        return self._read()[0]

    def claim(self, incarnation: str) -> Pointer:
        """Take the run over, whoever has it. Raises `CheckpointError` where too many claim at once."""
        for _ in range(ATTEMPTS):
            pointer, etag = self._read()
            pointer = pointer or Pointer(run=self._run, incarnation="", claimed_ms=0)
            claimed = replace(pointer, incarnation=incarnation, claimed_ms=_now())
            if self._write(claimed, etag):
                return claimed
        raise self._contested()

    def admit(self, incarnation: str, version: int) -> Pointer | None:
        """May this trainer publish this version? Raises `Fenced`, or `CheckpointError` for a step back."""
        pointer, _ = self._read()
        self._judge(pointer, incarnation, version)
        return pointer

    def check(self, incarnation: str) -> None:
        """Does this trainer still have the run? Raises `Fenced`."""
        pointer, _ = self._read()
        if pointer is not None and pointer.incarnation != incarnation:
            raise self._fenced(pointer, incarnation, "nothing that it does from here on is published")

    def advance(self, manifest: Manifest) -> None:
        """Move to this checkpoint. Idempotent. Raises `Fenced`, or `CheckpointError` for a step back."""
        digest = manifest_digest(manifest)
        for _ in range(ATTEMPTS):
            pointer, etag = self._read()
            # Moved by an earlier attempt whose answer was lost; since then another trainer may have claimed the run.
            if pointer is not None and (pointer.version, pointer.digest) == (manifest.version, digest):
                return
            self._judge(pointer, manifest.incarnation, manifest.version)
            moved = Pointer(
                run=self._run,
                incarnation=manifest.incarnation,
                claimed_ms=pointer.claimed_ms if pointer else manifest.published_ms,
                version=manifest.version,
                digest=digest,
                published_ms=manifest.published_ms,
            )
            if self._write(moved, etag):
                return
        raise self._contested()

    def _judge(self, pointer: Pointer | None, incarnation: str, version: int) -> None:
        if pointer is None:
            return
        if pointer.incarnation != incarnation:
            raise self._fenced(pointer, incarnation, f"its policy {version} was not published")
        if version < pointer.version:
            raise CheckpointError(
                f"run {self._run}: expected a policy version above {pointer.version}, found {version}; next_version() "
                f"has the next"
            )

    def _fenced(self, pointer: Pointer, incarnation: str, loss: str) -> Fenced:
        return Fenced(
            f"run {self._run}: trainer {pointer.incarnation} took the run at {moment(pointer.claimed_ms)}, now at "
            f"policy {pointer.version}; trainer {incarnation} is fenced, {loss}. "
            f"Stop this one, or start it anew to take the run back",
            incarnation=pointer.incarnation,
            version=pointer.version,
            at_ms=pointer.claimed_ms,
        )

    def _read(self) -> tuple[Pointer | None, str | None]:
        try:
            content = self._store.get(self.key)
        except NotFound:
            return None, None
        return _decode(content.data, self.key), content.etag

    def _write(self, pointer: Pointer, etag: str | None) -> bool:
        data = canonical_json(asdict(pointer))
        try:
            self._store.put(self.key, data, if_none_match=etag is None, if_match=etag)
        except Lost:
            return False
        return True

    def _contested(self) -> CheckpointError:
        return CheckpointError(
            f"{self.key}: lost {ATTEMPTS} writes in a row to others; how many trainers were started?"
        )


def _decode(data: bytes, key: str) -> Pointer:
    try:
        body = json_object(json.loads(data), "pointer")
        return Pointer(
            run=json_text(body, "run"),
            incarnation=json_text(body, "incarnation"),
            claimed_ms=json_whole(body, "claimed_ms"),
            version=json_whole(body, "version"),
            digest=json_text(body, "digest"),
            published_ms=json_whole(body, "published_ms"),
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{key} is no pointer to a checkpoint ({error}); the checkpoints beside it are untouched, write it "
            f"anew from the newest manifest"
        ) from error


def _now() -> int:
    return time.time_ns() // 1_000_000
