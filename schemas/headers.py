"""Kafka headers of a trajectory record, so that a reader judges staleness and duplicates before it decodes a body.

    rollstream.environment       name of the environment, UTF-8
    rollstream.group             group id, UTF-8
    rollstream.group-size        samples in the group, decimal
    rollstream.trajectory        trajectory id, UTF-8
    rollstream.policy-lowest     lowest policy version among the trainable tokens, decimal; left out if unknown
    rollstream.policy-highest    highest one
    traceparent                  W3C Trace Context

They repeat what the body says, and the body wins.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import InvalidRecord, MalformedBytes
from .records import Trajectory
from .rules import INT, LONG, NAME, shown

ENVIRONMENT = "rollstream.environment"
GROUP = "rollstream.group"
GROUP_SIZE = "rollstream.group-size"
TRAJECTORY = "rollstream.trajectory"
POLICY_LOWEST = "rollstream.policy-lowest"
POLICY_HIGHEST = "rollstream.policy-highest"
TRACEPARENT = "traceparent"

_WHOLE = re.compile(rb"[1-9][0-9]{0,18}")
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryHeaders:
    """What the headers of a trajectory record tell; None where they do not."""

    environment: str | None = None
    group_id: str | None = None
    group_size: int | None = None
    trajectory_id: str | None = None
    lowest_version: int | None = None
    """Lowest policy version among the trainable tokens."""
    highest_version: int | None = None
    traceparent: str | None = None


def trajectory_headers(trajectory: Trajectory, traceparent: str | None = None) -> dict[str, bytes]:
    """The headers of a valid trajectory. Raises `InvalidRecord` for a `traceparent` that is none."""
    headers = {
        ENVIRONMENT: trajectory.environment.encode(),
        GROUP: trajectory.group_id.encode(),
        GROUP_SIZE: b"%d" % trajectory.group_size,
        TRAJECTORY: trajectory.trajectory_id.encode(),
    }
    if versions := trajectory.version_range():
        headers[POLICY_LOWEST], headers[POLICY_HIGHEST] = b"%d" % versions[0], b"%d" % versions[1]
    if traceparent is not None:
        if not _TRACEPARENT.fullmatch(traceparent):
            raise InvalidRecord(
                f"traceparent: expected version-trace-parent-flags in hex, found {shown(traceparent)}",
                reason="bad-headers",
            )
        headers[TRACEPARENT] = traceparent.encode()
    return headers


def parse_headers(headers: Mapping[str, bytes]) -> TrajectoryHeaders:
    """What these headers tell; headers of others are ignored.

    Raises `MalformedBytes` (reason "bad-headers") for a value that cannot be meant. Only a `traceparent` that is none
    reads as None, as W3C Trace Context asks: a broken trace must not cost a trajectory.
    """
    lowest, highest = _whole(headers, POLICY_LOWEST, LONG), _whole(headers, POLICY_HIGHEST, LONG)
    if (lowest is None) != (highest is None) or (lowest is not None and highest is not None and lowest > highest):
        raise _refusal(f"{POLICY_LOWEST}, {POLICY_HIGHEST}", "both or neither, in order", f"{lowest}, {highest}")
    return TrajectoryHeaders(
        environment=_name(headers, ENVIRONMENT),
        group_id=_name(headers, GROUP),
        group_size=_whole(headers, GROUP_SIZE, INT),
        trajectory_id=_name(headers, TRAJECTORY),
        lowest_version=lowest,
        highest_version=highest,
        traceparent=_trace(headers),
    )


def _name(headers: Mapping[str, bytes], header: str) -> str | None:
    value = headers.get(header)
    if value is None:
        return None
    try:
        name = value.decode()
    except UnicodeDecodeError as error:
        raise _refusal(header, "UTF-8", value) from error
    if not name or (header in (ENVIRONMENT, GROUP) and len(value) > NAME):
        raise _refusal(header, f"a name of at most {NAME} bytes", value)
    return name


def _whole(headers: Mapping[str, bytes], header: str, high: int) -> int | None:
    value = headers.get(header)
    if value is None:
        return None
    if not _WHOLE.fullmatch(value) or int(value) > high:
        raise _refusal(header, f"a decimal from 1 to {high}", value)
    return int(value)


def _trace(headers: Mapping[str, bytes]) -> str | None:
    value = headers.get(TRACEPARENT, b"").decode("ascii", "replace")
    return value if _TRACEPARENT.fullmatch(value) else None


def _refusal(header: str, expected: str, found: object) -> MalformedBytes:
    return MalformedBytes(f"header {header}: expected {expected}, found {shown(found)}", reason="bad-headers")
