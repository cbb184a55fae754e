"""Records to bytes and back.

    encode:  validate --> body --> Avro, this release's schema --> 0x00, schema id (4 bytes, big-endian), body
    decode:  size --> framing --> schema by id --> Avro, writer's schema to this release's --> nothing left over?
             --> record (columns are views) --> validate

Bytes are not trusted: no length or count in them takes memory that they do not themselves fill, and whatever is wrong
with them is a `WireError`.
"""

import copy
import io
import struct
from typing import Any, TypeVar

import fastavro

from .bodies import from_body, to_body
from .errors import InvalidRecord, MalformedBytes
from .records import WireRecord
from .registry import Current, Resolved, Schemas, shipped_only
from .validate import validate

MAX_BYTES = 64 << 20
"""Largest frame that is written or read unless the caller says otherwise."""
READS = 1 << 20
"""Most values in one body; each costs the reader an object of some 50 bytes at most beside its own content."""

_FRAME = struct.Struct(">BI")
_MAGIC = 0
_avro: Any = fastavro  # its annotations leave the type of a stream half open

R = TypeVar("R", bound=WireRecord)


def encode(
    record: WireRecord,
    *,
    schemas: Schemas | None = None,
    vocabulary: int | None = None,
    max_bytes: int = MAX_BYTES,
) -> bytes:
    """The record in its frame. Raises `InvalidRecord` where it breaks a rule, or is too large to be read again.

    `schemas` says by which id: the registry's, where there is one, else this release's own (the default).
    """
    validate(record, vocabulary=vocabulary)
    current = (schemas or shipped_only()).current(type(record).__name__)
    stream = io.BytesIO()
    stream.write(_FRAME.pack(_MAGIC, current.id))
    _avro.schemaless_writer(stream, current.schema, to_body(record))
    data = stream.getvalue()
    if len(data) > min(READS, max_bytes):
        _check_readable(data, current, max_bytes)
    return data


def decode(
    data: bytes,
    *,
    schemas: Schemas | None = None,
    max_bytes: int = MAX_BYTES,
    vocabulary: int | None = None,
) -> WireRecord:
    """The record in this frame. Its columns are read-only views of the decoded bytes.

    `schemas` resolves ids that this release does not know (none by default); `vocabulary` bounds the token ids.
    Raises `MalformedBytes`, `UnknownSchema` or `InvalidRecord`; `SchemaAway`, or what else the lookup behind `schemas`
    raises, where it does not answer.
    """
    stream, schema_id = _unframe(data, max_bytes)
    resolved = (schemas or shipped_only()).resolve(schema_id)
    record = from_body(resolved.kind, _read_body(stream, resolved, len(data)))
    validate(record, vocabulary=vocabulary)
    return record


def decode_as(
    kind: type[R],
    data: bytes,
    *,
    schemas: Schemas | None = None,
    max_bytes: int = MAX_BYTES,
    vocabulary: int | None = None,
) -> R:
    """`decode`, where only a record of one kind is expected; another is `MalformedBytes`, reason "wrong-record"."""
    record = decode(data, schemas=schemas, max_bytes=max_bytes, vocabulary=vocabulary)
    if not isinstance(record, kind):
        raise MalformedBytes(f"expected a {kind.__name__}, found a {type(record).__name__}", reason="wrong-record")
    return record


def framed_id(data: bytes) -> int | None:
    """The schema id in a frame; None for what is no frame."""
    return _FRAME.unpack_from(data)[1] if len(data) >= _FRAME.size and data[0] == _MAGIC else None


def _check_readable(data: bytes, current: Current, max_bytes: int) -> None:
    """What the reader's bounds would refuse must not be written. Only a large frame can break them."""
    try:
        stream, _ = _unframe(data, max_bytes)
        _read_body(stream, Resolved(kind="record", writer=current.schema, reader=None), len(data))
    except MalformedBytes as error:
        raise InvalidRecord(f"the record is too large to be read again: {error}", reason="too-large") from error


class _Metered(io.BytesIO):
    """Bounds how many values are read from it. Only a large frame can hold too many, so only that one counts them."""

    left = READS

    def read(self, size: int | None = -1, /) -> bytes:
        self.left -= 1
        if self.left < 0:
            raise ValueError(f"more than {READS} values")
        return super().read(size)


def _unframe(data: bytes, max_bytes: int) -> tuple[io.BytesIO, int]:
    """The stream, standing at the body, and the schema id."""
    if len(data) > max_bytes:
        raise MalformedBytes(f"expected at most {max_bytes} bytes, found {len(data)}", reason="too-large")
    if len(data) < _FRAME.size or data[0] != _MAGIC:
        raise MalformedBytes(
            f"expected a zero byte and a schema id of 4 bytes, found {data[: _FRAME.size]!r}", reason="bad-framing"
        )
    stream = io.BytesIO(data) if len(data) <= READS else _Metered(data)
    stream.seek(_FRAME.size)
    return stream, _FRAME.unpack_from(data)[1]


def _read_body(stream: io.BytesIO, resolved: Resolved, size: int) -> dict[str, Any]:
    try:
        body: dict[str, Any] = _avro.schemaless_reader(stream, resolved.writer, resolved.reader)
    except MemoryError:  # the machine's state, not the record's: a good record must not be dead-lettered for it
        raise
    except Exception as error:  # whatever foreign bytes provoke in the decoder comes to the same: they are malformed
        raise MalformedBytes(f"expected the body of a {resolved.kind}: {type(error).__name__}: {error}") from error
    if stream.tell() != size:
        raise MalformedBytes(
            f"expected a {resolved.kind} to end at byte {size}, found its end at {stream.tell()}",
            reason="trailing-bytes",
        )
    # Defaults filled in are the reader's schema itself, not copies of it.
    return body if resolved.reader is None else copy.deepcopy(body)
