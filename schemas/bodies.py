"""Records as the plain values that an Avro body holds, and back. Columns become bytes; bytes become views."""

from collections.abc import Callable
from enum import StrEnum
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from .errors import InvalidRecord
from .records import (
    Claim,
    Command,
    Consumed,
    Control,
    PolicySpan,
    PolicyUpdate,
    Receipt,
    Role,
    Sampling,
    Status,
    Task,
    Trajectory,
    Turn,
    WireRecord,
)
from .rules import SPANS, refusal

Body = dict[str, Any]
E = TypeVar("E", bound=StrEnum)

_INT32 = np.dtype("<i4")
_INT64 = np.dtype("<i8")
_FLOAT32 = np.dtype("<f4")


def to_body(record: WireRecord) -> Body:
    """What the current schema of its kind writes for this record, which must be valid."""
    match record:
        case Trajectory():
            return _trajectory_body(record)
        case Task():
            return _fields(record) | {"sampling": _fields(record.sampling), "payload": dict(record.payload)}
        case Receipt():
            return _fields(record) | {
                "consumed": [_consumed_body(part) for part in record.consumed],
                "groups": list(record.groups),
                "metrics": dict(record.metrics),
            }
        case PolicyUpdate() | Control() | Claim():
            return _fields(record)


def from_body(kind: str, body: Body) -> WireRecord:
    """The record of a body read with the current schema of `kind`, rules unchecked. Raises `InvalidRecord`."""
    return _READERS[kind](body)


def _fields(record: WireRecord | Turn | Sampling | Consumed) -> Body:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def _trajectory_body(record: Trajectory) -> Body:
    body = _fields(record)
    del body["spans"]
    return body | {
        "tokens": _bytes(record.tokens, _INT32),
        "logprobs": _bytes(record.logprobs, _FLOAT32),
        "span_versions": _bytes(np.array([span.version for span in record.spans], _INT64), _INT64),
        "span_counts": _bytes(np.array([span.count for span in record.spans], _INT32), _INT32),
        "turns": [_fields(turn) | {"tool_calls": list(turn.tool_calls)} for turn in record.turns],
        "rewards": dict(record.rewards),
        "metrics": dict(record.metrics),
        "metadata": dict(record.metadata),
    }


def _consumed_body(part: Consumed) -> Body:
    dropped = {reason: _bytes(offsets, _INT64) for reason, offsets in part.dropped.items()}
    return _fields(part) | {"trained": _bytes(part.trained, _INT64), "dropped": dropped}


def _read_trajectory(body: Body) -> Trajectory:
    versions, counts = body.pop("span_versions"), body.pop("span_counts")
    body["tokens"] = _view(body["tokens"], _INT32, "tokens")
    body["logprobs"] = _view(body["logprobs"], _FLOAT32, "logprobs")
    body["spans"] = _read_spans(_view(versions, _INT64, "span_versions"), _view(counts, _INT32, "span_counts"))
    body["turns"] = tuple(_read_turn(turn) for turn in body["turns"])
    body["status"] = _symbol(Status, body["status"], "status")
    return Trajectory(**body)


def _read_spans(versions: NDArray[Any], counts: NDArray[Any]) -> tuple[PolicySpan, ...]:
    # Counted before one is made: a span is twelve bytes there and a hundred here.
    if versions.size != counts.size or counts.size > SPANS:
        raise refusal(
            "bad-lengths", "spans", f"as many versions as counts, at most {SPANS}", (versions.size, counts.size)
        )
    pairs = zip(versions.tolist(), counts.tolist(), strict=True)
    return tuple(PolicySpan(version=version, count=count) for version, count in pairs)


def _read_turn(body: Body) -> Turn:
    body["role"] = _symbol(Role, body["role"], "role")
    body["tool_calls"] = tuple(body["tool_calls"])
    return Turn(**body)


def _read_task(body: Body) -> Task:
    body["sampling"] = Sampling(**body["sampling"])
    return Task(**body)


def _read_receipt(body: Body) -> Receipt:
    body["consumed"] = tuple(_read_consumed(part) for part in body["consumed"])
    body["groups"] = tuple(body["groups"])
    return Receipt(**body)


def _read_consumed(body: Body) -> Consumed:
    body["trained"] = _view(body["trained"], _INT64, "trained")
    body["dropped"] = {reason: _view(raw, _INT64, "dropped") for reason, raw in body["dropped"].items()}
    return Consumed(**body)


def _read_policy(body: Body) -> PolicyUpdate:
    return PolicyUpdate(**body)


def _read_control(body: Body) -> Control:
    body["command"] = _symbol(Command, body["command"], "command")
    return Control(**body)


def _read_claim(body: Body) -> Claim:
    return Claim(**body)


_READERS: dict[str, Callable[[Body], WireRecord]] = {
    "Trajectory": _read_trajectory,
    "Task": _read_task,
    "PolicyUpdate": _read_policy,
    "Receipt": _read_receipt,
    "Control": _read_control,
    "Claim": _read_claim,
}


def _bytes(values: NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    return values.astype(dtype, copy=False).tobytes()


def _view(raw: bytes, dtype: np.dtype[Any], field: str) -> NDArray[Any]:
    """A read-only array over the bytes themselves."""
    if len(raw) % dtype.itemsize:
        expected = f"whole items of {dtype.itemsize} bytes"
        raise InvalidRecord(f"{field}: expected {expected}, found {len(raw)} bytes", reason="bad-column")
    return np.frombuffer(raw, dtype)


def _symbol(kind: type[E], symbol: str, field: str) -> E:
    try:
        return kind(symbol)
    except ValueError:
        raise refusal("bad-enum", field, f"one of {', '.join(kind)}", symbol) from None
