"""Checkpoints in an object store: content-addressed objects, manifests created once, a pointer that moves forward only.

    publish:  <run>/objects/<sha256>  -->  <run>/checkpoints/<version>/manifest.json  -->  <run>/latest.json
              in parallel                  If-None-Match: *                                If-Match
              crash: orphans               crash: a version that is no longer free         crash: published

`latest` never shows anything of a publish that did not reach the end. Policy versions are never used again: the next
one lies above every manifest there ever was, which is why manifests stay when their objects are collected.
"""

import contextlib
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from .cursors import Cursors
from .manifest import (
    CheckpointError,
    DigestMismatch,
    Manifest,
    StoredFile,
    decode_manifest,
    encode_manifest,
    manifest_digest,
)
from .pointer import Fenced, LatestPointer, Pointer
from .store import Lost, NotFound, ObjectStore, probe
from .transfer import Objects

WEIGHTS = "weights/"
"""Where in a checkpoint the files of the policy lie: weights, config, tokenizer."""

__all__ = [
    "WEIGHTS",
    "CheckpointError",
    "Checkpoints",
    "Collected",
    "DigestMismatch",
    "Fenced",
    "Manifest",
    "StoredFile",
    "manifest_digest",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What a collection removed."""

    objects: int
    size: int
    """Bytes of them."""
    uploads: int
    """Abandoned multipart uploads."""


class Checkpoints:
    """The checkpoints of one run. Thread-safe but for two publishes of one trainer at once."""

    def __init__(self, store: ObjectStore, run: str) -> None:
        """Raises `ValueError` for a name that is no single part of a key."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", run):
            raise ValueError(f"run: expected a name of letters, digits, '.', '_' and '-', found {run!r}")
        self.run = run
        self._store = store
        self._prefix = f"{run}/checkpoints/"
        self._objects = Objects(store, run)
        self._pointer = LatestPointer(store, run)
        self._last: Manifest | None = None

    @property
    def store(self) -> ObjectStore:
        """Where they lie."""
        return self._store

    def manifest_key(self, version: int) -> str:
        return f"{self._prefix}{version}/manifest.json"

    def probe(self) -> None:
        """Raises `StoreError` where the store ignores conditional writes."""
        probe(self._store, f"{self.run}/")

    def claim(self, incarnation: str) -> Pointer:
        """Take the run over: an older trainer is fenced at its next publish. Returns where the run stands."""
        return self._pointer.claim(incarnation)

    def check(self, incarnation: str) -> None:
        """Does this trainer still have the run? One small request. Raises `Fenced`, `StoreError`."""
        self._pointer.check(incarnation)

    def publish(
        self,
        version: int,
        files: Mapping[str, Path | bytes],
        *,
        parent: int | None,
        incarnation: str,
        step: int,
        cursors: Cursors | None = None,
        model_config: Mapping[str, object] | None = None,
        tokenizer: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> Manifest:
        """Make a policy visible: objects, then manifest, then pointer. May be called again after a failure.

        Raises `Fenced` where another trainer has the run or this version, `CheckpointError` for a version that is not
        above the latest one, `StoreError`; then `latest` is unchanged.
        """
        held = self._pointer.admit(incarnation, version)
        manifest = Manifest(
            run=self.run,
            version=version,
            parent=parent,
            incarnation=incarnation,
            step=step,
            published_ms=time.time_ns() // 1_000_000,
            files=self._objects.upload(files, kept=self._kept(held)),
            cursors=cursors or Cursors(),
            model_config=model_config or {},
            tokenizer=tokenizer,
            metadata=metadata or {},
        )
        manifest = self._create(manifest)
        self._pointer.advance(manifest)
        self._last = manifest
        return manifest

    def latest(self) -> Manifest | None:
        """The newest published checkpoint; None before the first. Raises `CheckpointError` for a damaged one."""
        pointer = self._pointer.read()
        return self.manifest(pointer.version, digest=pointer.digest) if pointer and pointer.version else None

    def manifest(self, version: int, *, digest: str | None = None) -> Manifest:
        """The manifest of this version, published or left over from a publish that did not reach the end.

        `digest`: what a PolicyUpdate says of it. Raises `CheckpointError`, `DigestMismatch` where it differs.
        """
        key = self.manifest_key(version)
        try:
            data = self._store.get(key).data
        except NotFound as error:
            raise CheckpointError(
                f"run {self.run} has no checkpoint of policy {version} ({key}); `rollstream checkpoints` lists them"
            ) from error
        manifest = decode_manifest(data, key=key)
        if (manifest.run, manifest.version) != (self.run, version):
            raise CheckpointError(
                f"{key} belongs to run {manifest.run}, policy {manifest.version}: it was copied there"
            )
        if digest is not None and manifest_digest(manifest) != digest:
            raise DigestMismatch(key, expected=f"SHA-256 {digest}", found=manifest_digest(manifest))
        return manifest

    def versions(self) -> list[int]:
        """Every version that has a manifest, ascending; the highest may not be published yet."""
        pattern = re.compile(re.escape(self._prefix) + r"([1-9][0-9]*)/manifest\.json")
        found = (pattern.fullmatch(entry.key) for entry in self._store.list(self._prefix))
        return sorted(int(match[1]) for match in found if match)

    def next_version(self) -> int:
        """The lowest version above all that were ever used, those of failed publishes too."""
        return max(self.versions(), default=0) + 1

    def lineage(self, version: int) -> Iterator[Manifest]:
        """A checkpoint and its parents, newest first, each read when it is asked for. Raises `CheckpointError`."""
        parent: int | None = version
        while parent is not None:
            manifest = self.manifest(parent)
            yield manifest
            parent = manifest.parent

    def fetch(self, manifest: Manifest, prefix: str, directory: Path) -> None:
        """Put the files under `prefix` ("weights/"; "" for all) into `directory`, under their whole paths.

        The directory appears whole and verified, or is left as it was. Raises `DigestMismatch` naming the file,
        `CheckpointError` where an object is gone, `StoreError`.
        """
        files = {name: file for name, file in manifest.files.items() if name.startswith(prefix)}
        if not files:
            raise CheckpointError(
                f"policy {manifest.version} of run {manifest.run} has no files under {prefix!r}, only "
                f"{', '.join(sorted(manifest.files))}"
            )
        self._objects.download(files, directory, keep=(file.sha256 for file in manifest.files.values()))

    def collect(self, keep: Iterable[int], *, grace: float = 3600.0) -> Collected:
        """Delete the objects that no kept checkpoint needs, and abort uploads that nobody ended. Manifests stay.

        The latest checkpoint is always kept, and one being published right now too: objects and uploads younger than
        `grace` (s) are left alone. `keep` is gone through after the objects were listed. Safe beside a running trainer
        from half an hour plus the time of a publish on.
        Raises `CheckpointError`, before anything is deleted, where a manifest to keep cannot be read.
        """
        limit = datetime.now(UTC) - timedelta(seconds=grace)
        # Listed before the manifests are read: an object that a later manifest needs is then either younger than the
        # grace or in a manifest that is read below.
        old = [entry for entry in self._store.list(self._objects.prefix) if entry.modified < limit]
        latest = self.latest()
        kept = [self.manifest(version) for version in set(keep)] + ([latest] if latest else [])
        needed = {self._objects.key(file.sha256) for manifest in kept for file in manifest.files.values()}
        orphans = [entry for entry in old if entry.key not in needed]
        for entry in orphans:
            self._store.delete(entry.key)
        uploads = [upload for upload in self._store.uploads(self._objects.prefix) if upload.begun < limit]
        for upload in uploads:
            self._store.abort(upload)
        return Collected(objects=len(orphans), size=sum(entry.size for entry in orphans), uploads=len(uploads))

    def _kept(self, pointer: Pointer | None) -> set[str]:
        """Digests that the latest checkpoint needs, if this object published it: they stay in the store."""
        if self._last is None or pointer is None or pointer.digest != manifest_digest(self._last):
            return set()
        return {file.sha256 for file in self._last.files.values()}

    def _create(self, manifest: Manifest) -> Manifest:
        """Create the manifest, or find the one that an earlier call of the same publish created."""
        with contextlib.suppress(Lost):
            self._store.put(self.manifest_key(manifest.version), encode_manifest(manifest), if_none_match=True)
            return manifest
        there = self.manifest(manifest.version)
        # The clock has moved on since that call; nothing else may differ.
        if replace(there, published_ms=manifest.published_ms) == manifest:
            return there
        raise Fenced(
            f"run {self.run}: policy {there.version} was created by trainer {there.incarnation} at {there.published} "
            f"(step {there.step}); trainer {manifest.incarnation} cannot use this version. Start it anew: it goes on "
            f"from the latest checkpoint with the next free version",
            incarnation=there.incarnation,
            version=there.version,
            at_ms=there.published_ms,
        )
