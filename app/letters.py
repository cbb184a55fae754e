"""A dead letter as text: one line, a page with a dump of its bytes, or an object for JSON."""

import string
from collections.abc import Iterator
from dataclasses import fields
from datetime import UTC, datetime

import numpy as np

from ..infra.deadletters import Letter
from ..infra.log import Position
from ..schemas import RollstreamError, Trajectory, WireError, WireRecord
from .trajectories import as_outline

WIDTH = 16
"""Bytes in a line of a dump."""
PRINTABLE = frozenset(string.printable.encode()) - frozenset(string.whitespace.encode()) | {0x20}


def short_place(position: Position) -> str:
    """As it is typed: the offset, before it the partition where that is not the first."""
    number = position.partition.number
    return f"{number}@{position.offset}" if number else str(position.offset)


def as_line(letter: Letter) -> str:
    """Where, when, from where, why."""
    error = f"replayed to {letter.replayed}" if letter.replayed else letter.error
    return f"{short_place(letter.position):>7}  {_moment(letter)}  {letter.origin or '-'}  {letter.reason}  {error}"


def as_object(letter: Letter) -> dict[str, object]:
    """For JSON, without its bytes."""
    return {
        "place": short_place(letter.position),
        "position": str(letter.position),
        "origin": str(letter.origin) if letter.origin else None,
        "reason": letter.reason,
        "error": letter.error,
        "time_ms": letter.time_ms,
        "bytes": len(letter.value or b""),
        "replayed": letter.replayed or None,
    }


def as_page(letter: Letter, record: WireRecord | RollstreamError, *, limit: int | None) -> Iterator[str]:
    """Everything about it. `record`: what it reads as now, or why it cannot be read. `limit`: bytes that are dumped."""
    yield f"letter    {letter.position}  {_moment(letter)}"
    yield f"origin    {letter.origin or 'not told'}"
    yield f"reason    {letter.reason}"
    yield f"error     {letter.error}"
    if letter.replayed:
        yield f"replayed  {letter.replayed}"
    yield f"key       {_quoted(letter.key)}"
    for name, value in sorted(letter.headers.items()):
        yield f"header    {name}: {_quoted(value)}"
    if isinstance(record, RollstreamError):
        yield f"now       cannot be read ({_reason(record)}): {record}"
    else:
        yield "now       can be read"
        yield from (f"  {line}" for line in _told(record))
    value = letter.value or b""
    yield f"{len(value):,} bytes" if letter.value is not None else "a tombstone"
    yield from dump(value[:limit])
    if limit is not None and len(value) > limit:
        yield f"... {len(value) - limit:,} more; --whole dumps them"


def as_reading(record: WireRecord | RollstreamError) -> dict[str, object]:
    """For JSON: what it reads as now."""
    if isinstance(record, RollstreamError):
        return {"readable": False, "reason": _reason(record), "error": str(record)}
    return {"readable": True, "record": type(record).__name__, "fields": dict(_fields(record))}


def _reason(error: RollstreamError) -> str:
    return error.reason if isinstance(error, WireError) else "away"


def dump(data: bytes) -> Iterator[str]:
    """Offset, hexadecimal, text: a line of it for each sixteen bytes."""
    for start in range(0, len(data), WIDTH):
        part = data[start : start + WIDTH]
        text = "".join(chr(byte) if byte in PRINTABLE else "." for byte in part)
        yield f"{start:08x}  {part.hex(' '):<{3 * WIDTH - 1}}  {text}"


def _told(record: WireRecord) -> Iterator[str]:
    if isinstance(record, Trajectory):
        yield from as_outline(record)
        return
    yield type(record).__name__
    for name, value in _fields(record):
        yield f"{name}: {value}"


def _fields(record: WireRecord) -> Iterator[tuple[str, object]]:
    for field in fields(record):
        value: object = getattr(record, field.name)
        yield field.name, value.tolist() if isinstance(value, np.ndarray) else value


def _moment(letter: Letter) -> str:
    return datetime.fromtimestamp(letter.time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _quoted(data: bytes | None) -> str:
    """As text where it is some; else in hexadecimal."""
    if data is None:
        return "none"
    text = data.decode("utf-8", "replace")
    return text if text.isprintable() and "\ufffd" not in text else f"0x{data.hex()}"
