"""What a checkpoint is: its files by digest, where it stands on the lineage, and how far it had read.

A manifest is canonical JSON: the same manifest gives the same bytes, one flipped byte is found (`sha256` is the digest
of everything else), and the digest of those bytes names the policy in a PolicyUpdate.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import cast

from ..schemas.errors import RollstreamError
from .cursors import Cursors

FORMAT = 1


class CheckpointError(RollstreamError):
    """A checkpoint that is not there, not whole, or not what was expected."""


class DigestMismatch(CheckpointError):
    """A file of a checkpoint is not what its manifest says; nothing of it was put to use."""

    def __init__(self, file: str, *, expected: str, found: str) -> None:
        super().__init__(
            f"{file}: expected {expected}, found {found}; the object in the store is damaged or was cut short. "
            f"Nothing of this checkpoint is used; take another version"
        )
        self.file, self.expected, self.found = file, expected, found


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """One file of a checkpoint: the object `<run>/objects/<sha256>`."""

    size: int
    """Bytes."""
    sha256: str
    """Hex."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One published policy. Raises `ValueError` for values that no checkpoint has."""

    run: str
    version: int
    """Policy version, 1 or more; never used again in this run."""
    parent: int | None
    """The version it was computed from; None for the first of a run."""
    incarnation: str
    """Of the trainer that published it."""
    step: int
    published_ms: int
    """Wall clock, milliseconds since the epoch."""
    files: Mapping[str, StoredFile]
    """By path, e.g. "weights/config.json"."""
    cursors: Cursors = field(default_factory=Cursors)
    """Up to where the log is settled."""
    model_config: Mapping[str, object] = field(default_factory=dict[str, object])
    """As JSON."""
    tokenizer: str = ""
    """Fingerprint of the tokenizer."""
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        if self.version < 1 or not (self.parent is None or 1 <= self.parent < self.version):
            raise ValueError(f"expected 1 <= parent < version, found parent {self.parent}, version {self.version}")
        if not self.files:
            raise ValueError("expected at least one file, found none")
        for name, file in self.files.items():
            _check_name(name)
            if file.size < 0 or len(file.sha256) != 64 or not set(file.sha256) <= set("0123456789abcdef"):
                raise ValueError(f"file {name!r}: expected a size and a SHA-256 in hex, found {file}")

    @property
    def published(self) -> str:
        """When, for people."""
        return moment(self.published_ms)


def encode_manifest(manifest: Manifest) -> bytes:
    """Canonical JSON with a digest of itself."""
    body: dict[str, object] = {
        "format": FORMAT,
        "run": manifest.run,
        "version": manifest.version,
        "parent": manifest.parent,
        "incarnation": manifest.incarnation,
        "step": manifest.step,
        "published_ms": manifest.published_ms,
        "files": {name: {"size": f.size, "sha256": f.sha256} for name, f in manifest.files.items()},
        "cursors": manifest.cursors.to_json(),
        "model_config": dict(manifest.model_config),
        "tokenizer": manifest.tokenizer,
        "metadata": dict(manifest.metadata),
    }
    return canonical_json(body | {"sha256": hashlib.sha256(canonical_json(body)).hexdigest()})


def decode_manifest(data: bytes, *, key: str) -> Manifest:
    """Read what `encode_manifest` wrote. Raises `CheckpointError` naming the object `key` and what is wrong in it."""
    try:
        body = json_object(json.loads(data), "manifest")
        if body.get("format") != FORMAT:
            raise ValueError(
                f"expected format {FORMAT}, found {body.get('format')!r}; it was written by another release"
            )
        claimed = body.pop("sha256", None)
        if claimed != hashlib.sha256(canonical_json(body)).hexdigest():
            raise ValueError("its content does not have the digest that it states")
        return Manifest(
            run=json_text(body, "run"),
            version=json_whole(body, "version"),
            parent=None if body.get("parent") is None else json_whole(body, "parent"),
            incarnation=json_text(body, "incarnation"),
            step=json_whole(body, "step"),
            published_ms=json_whole(body, "published_ms"),
            files={
                name: StoredFile(size=json_whole(file, "size"), sha256=json_text(file, "sha256"))
                for name, value in json_object(body.get("files"), "files").items()
                for file in [json_object(value, name)]
            },
            cursors=Cursors.from_json(body.get("cursors")),
            model_config=json_object(body.get("model_config"), "model_config"),
            tokenizer=json_text(body, "tokenizer"),
            metadata={k: json_text(m, k) for m in [json_object(body.get("metadata"), "metadata")] for k in m},
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{key} is no whole manifest: {error}") from error


def manifest_digest(manifest: Manifest) -> str:
    """SHA-256 (hex) of the manifest's bytes."""
    return hashlib.sha256(encode_manifest(manifest)).hexdigest()


def canonical_json(value: object) -> bytes:
    """Sorted keys, no spaces, UTF-8. Raises `ValueError` for NaN and infinities."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def moment(ms: int) -> str:
    """Milliseconds since the epoch, for people."""
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(sep=" ", timespec="seconds")


def json_object(value: object, name: str) -> dict[str, object]:
    """`value` as a JSON object. Raises `ValueError`."""
    if not isinstance(value, dict):
        raise ValueError(f"{name}: expected an object, found {type(value).__name__}")
    return cast("dict[str, object]", value)


def json_text(body: Mapping[str, object], name: str) -> str:
    """A member that is text. Raises `ValueError`."""
    value = body.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name}: expected text, found {value!r}")
    return value


def json_whole(body: Mapping[str, object], name: str) -> int:
    """A member that is a whole number, 0 or more. Raises `ValueError`."""
    value = body.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name}: expected a whole number >= 0, found {value!r}")
    return value


def _check_name(name: str) -> None:
    parts = name.split("/")
    if "\\" in name or "\0" in name or not {"", ".", ".."}.isdisjoint(parts):
        raise ValueError(f"expected a relative path of plain names, found {name!r}")
