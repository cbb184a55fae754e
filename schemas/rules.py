"""The small checks that rules are made of. Each raises `InvalidRecord` naming field, expected and found.

    reason         what was wrong
    bad-type       a value of another class than the field's
    bad-int        no int, or one that does not fit (a bool, 1.7, 2**40 in 32 bits)
    bad-float      no number, or NaN or infinite where a measurement must be finite
    bad-text       no str, or one with lone surrogates, which UTF-8 cannot carry
    bad-id         empty text where something must be named, or a name that is too long
    bad-column     an array of another dtype or shape
    bad-enum       none of the symbols

validate.py adds the reasons of single fields: bad-group, bad-lengths, bad-tokens, bad-logprobs, bad-versions,
bad-reward, bad-offsets, bad-digest.
"""

import math
import reprlib
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from .errors import InvalidRecord

INT = 2**31 - 1
LONG = 2**63 - 1
NAME = 1024
"""Most bytes, in UTF-8, of the names that a step tells of in its receipt, which must fit into one record."""
SPANS = 1 << 16
"""Most policy spans of a trajectory."""

T = TypeVar("T")


def refusal(reason: str, field: str, expected: str, found: object) -> InvalidRecord:
    """The error for one field, to be raised by the caller."""
    return InvalidRecord(f"{field}: expected {expected}, found {shown(found)}", reason=reason)


def shown(value: object) -> str:
    """A short repr; a huge int shows its size, since Python refuses to print it."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an int of {value.bit_length()} bits"
    if isinstance(value, np.ndarray | np.generic):
        array = cast(NDArray[Any], value)
        return f"{reprlib.repr(array.ravel()[:8].tolist())} (numpy {array.dtype} {array.shape})"
    return reprlib.repr(value)


def instance(value: object, kind: type[T], field: str) -> T:
    """`value` as a `kind`."""
    if not isinstance(value, kind):
        raise refusal("bad-type", field, f"a {kind.__name__}", value)
    return value


def whole(value: object, field: str, low: int = 0, high: int = INT, reason: str = "bad-int") -> None:
    """An int from `low` to `high`; numpy ints and bools are none."""
    if type(value) is not int or not low <= value <= high:
        raise refusal(reason, field, f"an int from {low} to {high}", value)


def number(value: object, field: str, reason: str = "bad-float") -> float:
    """Any float, NaN too: a measurement is recorded as it was."""
    if isinstance(value, float):
        return value
    if type(value) is int:
        try:
            return float(value)
        except OverflowError:
            pass
    raise refusal(reason, field, "a number that fits a double", value)


def finite(value: object, field: str, reason: str = "bad-float", low: float = -math.inf) -> None:
    """A number that is neither NaN nor infinite, nor below `low`."""
    if not math.isfinite(found := number(value, field, reason)) or found < low:
        raise refusal(reason, field, "a finite number" if low == -math.inf else f"a finite number >= {low:g}", value)


def text(value: object, field: str) -> None:
    """Text that UTF-8 can carry."""
    if not isinstance(value, str):
        raise refusal("bad-text", field, "a str", value)
    if value.isascii():
        return
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise refusal("bad-text", field, "text without lone surrogates", value[error.start]) from None


def ident(value: object, field: str) -> None:
    """Text that names something, so not empty."""
    text(value, field)
    if not value:
        raise refusal("bad-id", field, "a name", value)


def name(value: object, field: str) -> None:
    """A short name, of a group or an environment."""
    ident(value, field)
    if len(cast(str, value).encode()) > NAME:
        raise refusal("bad-id", field, f"a name of at most {NAME} bytes", value)


def maybe(value: object, field: str) -> None:
    """Text or None."""
    if value is not None:
        text(value, field)


def flag(value: object, field: str) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise refusal("bad-type", field, "True or False", value)


def member(value: object, kind: type[StrEnum], field: str) -> None:
    """A member of the enum; its plain text is none."""
    if not isinstance(value, kind):
        raise refusal("bad-enum", field, " or ".join(f"{kind.__name__}.{m.name}" for m in kind), value)


def several(values: object, kind: type[T], field: str) -> tuple[T, ...]:
    """`values` as a tuple of `kind`."""
    if not isinstance(values, tuple):
        raise refusal("bad-type", field, "a tuple", values)
    for index, value in enumerate(cast(tuple[object, ...], values)):
        instance(value, kind, f"{field}[{index}]")
    return cast(tuple[T, ...], values)


def mapping(values: object, field: str, check: Callable[[object, str], object]) -> None:
    """A mapping from text to what `check` accepts."""
    if not isinstance(values, Mapping):
        raise refusal("bad-type", field, "a mapping", values)
    for key, value in cast(Mapping[object, object], values).items():
        text(key, field)
        check(value, f"{field}[{shown(key)}]")


def reward(value: object, field: str) -> None:
    """A finite number: what was rewarded with NaN cannot be compared with anything."""
    finite(value, field, "bad-reward")


def column(value: object, dtype: type[np.generic], field: str) -> NDArray[Any]:
    """A one-dimensional array of exactly this dtype, in either byte order: nothing is cast behind the caller's back."""
    wanted = np.dtype(dtype)
    if not isinstance(value, np.ndarray):
        raise refusal("bad-column", field, f"a 1-D array of {wanted}", value)
    array = cast(NDArray[Any], value)
    if array.ndim != 1 or not np.can_cast(array.dtype, wanted, "equiv"):
        raise refusal("bad-column", field, f"a 1-D array of {wanted}", f"{array.dtype} {array.shape}")
    return array
