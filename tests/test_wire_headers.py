"""Headers: what the gate judges by before it decodes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.schemas import (
    InvalidRecord,
    MalformedBytes,
    PolicySpan,
    Role,
    Trajectory,
    TrajectoryHeaders,
    Turn,
    WireError,
    parse_headers,
    trajectory_headers,
)

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRAJECTORY = Trajectory(
    trajectory_id="t/ü/0",
    group_id="t",
    group_size=4,
    sample_index=0,
    environment="guess",
    tokens=np.arange(6, dtype=np.int32),
    logprobs=np.full(5, -0.5, np.float32),
    spans=(PolicySpan(version=9, count=2), PolicySpan(version=4, count=1), PolicySpan(version=11, count=2)),
    turns=(
        Turn(role=Role.ASSISTANT, tokens=2, sampled=True),
        Turn(role=Role.USER, tokens=1, sampled=False),
        Turn(role=Role.ASSISTANT, tokens=3, sampled=True),
    ),
)


def test_golden_headers() -> None:
    """Names and spelling stand in topics, and other programs read them."""
    assert trajectory_headers(TRAJECTORY, TRACE) == {
        "rollstream.environment": b"guess",
        "rollstream.group": b"t",
        "rollstream.group-size": b"4",
        "rollstream.trajectory": b"t/\xc3\xbc/0",
        "rollstream.policy-lowest": b"4",
        "rollstream.policy-highest": b"11",
        "traceparent": TRACE.encode(),
    }


def test_round_trip() -> None:
    assert parse_headers(trajectory_headers(TRAJECTORY, TRACE)) == TrajectoryHeaders(
        environment="guess",
        group_id="t",
        group_size=4,
        trajectory_id="t/ü/0",
        lowest_version=4,
        highest_version=11,
        traceparent=TRACE,
    )


def test_masked_tokens_do_not_count() -> None:
    """Only what would be trained makes a sample stale."""
    first, user, last = TRAJECTORY.turns
    masked = replace(TRAJECTORY, turns=(first, user, replace(last, masked=True)))
    found = parse_headers(trajectory_headers(masked))
    assert (found.lowest_version, found.highest_version) == (9, 9)


def test_unknown_versions_absent() -> None:
    """Nothing sampled, or nothing known about it: no versions in the headers, so the body decides."""
    scripted = replace(TRAJECTORY, spans=(), logprobs=np.empty(0, np.float32))
    assert not any("policy" in name for name in trajectory_headers(scripted))
    found = parse_headers(trajectory_headers(scripted))
    assert found.lowest_version is None
    assert found.highest_version is None


def test_absent_headers() -> None:
    assert parse_headers({}) == TrajectoryHeaders()
    assert parse_headers({"foreign": b"\xff"}) == TrajectoryHeaders()


BAD = [
    ({"rollstream.environment": b"\xff"}, "rollstream.environment: expected UTF-8"),
    ({"rollstream.environment": b""}, "rollstream.environment: expected a name"),
    ({"rollstream.group": b"\xc3"}, "rollstream.group: expected UTF-8"),
    ({"rollstream.trajectory": b""}, "rollstream.trajectory: expected a name"),
    ({"rollstream.group-size": b"0"}, "rollstream.group-size: expected a decimal from 1 to 2147483647"),
    ({"rollstream.group-size": b"2147483648"}, "rollstream.group-size: expected a decimal"),
    ({"rollstream.policy-lowest": b"4"}, "both or neither"),
    ({"rollstream.policy-highest": b"4"}, "both or neither"),
    ({"rollstream.policy-lowest": b"5", "rollstream.policy-highest": b"4"}, "in order, found '5, 4'"),
    *(
        ({"rollstream.policy-lowest": value, "rollstream.policy-highest": b"9"}, "policy-lowest: expected a decimal")
        for value in (b"", b"0", b"-1", b"+1", b"01", b" 1", b"1 ", b"1\n", b"1.0", b"1e3", b"one", b"1_0", b"\xff")
    ),
    ({"rollstream.policy-lowest": b"\xd9\xa1", "rollstream.policy-highest": b"9"}, "expected a decimal"),
    ({"rollstream.policy-lowest": b"1", "rollstream.policy-highest": b"9" * 19}, "expected a decimal"),
    ({"rollstream.policy-lowest": b"1", "rollstream.policy-highest": b"9" * 10_000}, "expected a decimal"),
]


@pytest.mark.parametrize(("headers", "message"), BAD)
def test_bad_headers(headers: dict[str, bytes], message: str) -> None:
    with pytest.raises(MalformedBytes, match=message) as refused:
        parse_headers(headers)
    assert refused.value.reason == "bad-headers"
    assert len(str(refused.value)) < 300


BAD_TRACES = ["", "junk", TRACE.upper(), TRACE[:-1], f"{TRACE}\n", f"ff{TRACE[2:]}", f"00-{'0' * 32}-{TRACE[36:]}"]


@pytest.mark.parametrize("trace", BAD_TRACES)
def test_bad_traceparent(trace: str) -> None:
    """Refused when written; when read it costs the trace, never the trajectory."""
    with pytest.raises(InvalidRecord, match="traceparent: expected") as refused:
        trajectory_headers(TRAJECTORY, trace)
    assert refused.value.reason == "bad-headers"
    headers = trajectory_headers(TRAJECTORY) | {"traceparent": trace.encode()}
    assert parse_headers(headers) == parse_headers(trajectory_headers(TRAJECTORY))


def parsed(headers: dict[str, bytes]) -> TrajectoryHeaders | str:
    """The headers, or the reason of their refusal."""
    try:
        return parse_headers(headers)
    except WireError as error:
        return error.reason


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(trajectory_headers(TRAJECTORY, TRACE))), st.binary(max_size=24)))
def test_any_headers(headers: dict[str, bytes]) -> None:
    """Whatever the bytes, they are understood or refused."""
    found = parsed(headers)
    if isinstance(found, str):
        assert found == "bad-headers"
    else:
        assert (found.lowest_version is None) == ("rollstream.policy-lowest" not in headers)
