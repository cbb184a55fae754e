"""Claim check: a record too large for its topic lies in the object store, and the log carries a reference to it.

    worker:   frame --deposit--> <namespace>/claims/<sha256>     Claim --append--> the same topic, key and headers
    reader:   Claim --size in bounds?--> fetch --size and SHA-256 as claimed?--> frame --decode--> Trajectory

The object is there before its reference is, and a frame that is sent again finds itself in place. Nothing here deletes
one: the bucket's lifecycle does (docs/delivery.md).
"""

import hashlib
from collections.abc import Callable
from contextlib import suppress

from ..schemas import MAX_BYTES, Claim, Schemas, Trajectory, WireError, decode
from ..schemas.errors import MalformedBytes
from .store import Lost, NotFound, ObjectStore
from .topics import Names


class Claims:
    """The frames of one namespace that lie in the store. Thread-safe where `find_store` is."""

    def __init__(self, find_store: Callable[[], ObjectStore], names: Names) -> None:
        """`find_store` is called when there is a frame to move: a log without claims is read without a store."""
        self._find_store, self._namespace = find_store, names.namespace

    def deposit(self, frame: bytes) -> Claim:
        """Put a record's frame into the store; free where it is there. Raises `StoreError`, retriable if it is away."""
        claim = Claim(size=len(frame), sha256=hashlib.sha256(frame).hexdigest())
        with suppress(Lost):  # what is there already has the same name, so the same content
            self._find_store().put(self.key(claim), frame, if_none_match=True)
        return claim

    def fetch(self, claim: Claim, *, max_bytes: int = MAX_BYTES) -> bytes:
        """The frame that was deposited; at most `max_bytes` are ever fetched.

        Raises `WireError` where it can never be had: reason "claim-too-large", "claim-missing" or "claim-mismatch";
        `StoreError` where the store is at fault, retriable if it is away.
        """
        if claim.size > max_bytes:
            raise WireError(
                f"expected a claim of at most {max_bytes} bytes, found {claim.size}", reason="claim-too-large"
            )
        try:
            # One byte more than claimed tells an object that is too long, however long it is.
            frame = self._find_store().get(self.key(claim), length=claim.size + 1).data
        except NotFound as error:
            raise WireError(
                f"expected the body of this record at {self.key(claim)}, found no such object; the bucket must keep "
                f"claims for as long as the topic keeps its records",
                reason="claim-missing",
            ) from error
        found = hashlib.sha256(frame).hexdigest()
        if len(frame) != claim.size or found != claim.sha256:
            raise WireError(
                f"{self.key(claim)}: expected {claim.size} bytes with that digest, found "
                f"{len(frame) if len(frame) <= claim.size else 'more'} with {found}; the object is damaged",
                reason="claim-mismatch",
            )
        return frame

    def key(self, claim: Claim) -> str:
        """Of its object."""
        return f"{self._namespace}/claims/{claim.sha256}"


def read_trajectory(
    value: bytes,
    claims: Claims,
    *,
    schemas: Schemas | None = None,
    max_bytes: int = MAX_BYTES,
    vocabulary: int | None = None,
) -> Trajectory:
    """The trajectory of a record, from its value or from where its claim lies: whoever reads trajectories calls this.

    Raises `WireError` for what can never be read, reasons as for `decode` and `Claims.fetch`; `StoreError` where the
    store is at fault, and what the lookup behind `schemas` raises when it is away.
    """
    record = decode(value, schemas=schemas, max_bytes=max_bytes, vocabulary=vocabulary)
    if isinstance(record, Claim):
        frame = claims.fetch(record, max_bytes=max_bytes)
        record = decode(frame, schemas=schemas, max_bytes=max_bytes, vocabulary=vocabulary)
    if not isinstance(record, Trajectory):
        raise MalformedBytes(f"expected a Trajectory, found a {type(record).__name__}", reason="wrong-record")
    return record
