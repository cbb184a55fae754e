"""The rules of the records, broken one by one: when written, and when read from bytes that broke them elsewhere."""

import io
import math
import struct
from dataclasses import replace
from typing import Any, cast

import fastavro
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.schemas import (
    Claim,
    Command,
    Consumed,
    Control,
    Floats,
    InvalidRecord,
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
    decode,
    decode_as,
    encode,
    validate,
)
from rollstream.schemas.bodies import to_body
from rollstream.schemas.registry import current_schemas

USER = Turn(role=Role.USER, tokens=2, sampled=False)
SAMPLED = Turn(role=Role.ASSISTANT, tokens=4, sampled=True)
TRAJECTORY = Trajectory(
    trajectory_id="t/0/0",
    group_id="t",
    group_size=4,
    sample_index=0,
    environment="e",
    tokens=np.arange(6, dtype=np.int32),
    logprobs=np.full(4, -0.5, np.float32),
    spans=(PolicySpan(version=3, count=4),),
    turns=(USER, SAMPLED),
)
TASK = Task(task_id="t", environment="e", seed=1, group_size=4)
POLICY = PolicyUpdate(run="r", version=4, incarnation="i", step=3, manifest="m", digest="0f" * 32, published_ms=1)
PART = Consumed(topic="x", partition=0, trained=np.array([7, 9]), dropped={"stale": np.array([8])})
RECEIPT = Receipt(run="r", incarnation="i", step=3, version=4, parent=3, consumed=(PART,), groups=("t",), loss=0.5)
CONTROL = Control(command=Command.CANCEL, target="t")
CLAIM = Claim(size=2_000_000, sha256="0f" * 32)


def logprobs(*values: float) -> Floats:
    return np.array(values, np.float32)


def spans(*pairs: tuple[Any, Any]) -> tuple[PolicySpan, ...]:
    return tuple(PolicySpan(version=version, count=count) for version, count in pairs)


BROKEN: list[tuple[WireRecord, dict[str, Any], str]] = [
    (TRAJECTORY, {"trajectory_id": ""}, "bad-id"),
    (TRAJECTORY, {"group_id": ""}, "bad-id"),
    (TRAJECTORY, {"environment": ""}, "bad-id"),
    (TRAJECTORY, {"group_size": 0}, "bad-group"),
    (TRAJECTORY, {"group_size": 2**40}, "bad-group"),
    (TRAJECTORY, {"sample_index": 4}, "bad-group"),
    (TRAJECTORY, {"sample_index": -1}, "bad-group"),
    (TRAJECTORY, {"temperature": math.nan}, "bad-float"),
    (TRAJECTORY, {"temperature": -0.1}, "bad-float"),
    (TRAJECTORY, {"started_ms": -1}, "bad-int"),
    (TRAJECTORY, {"reward": math.nan}, "bad-reward"),
    (TRAJECTORY, {"reward": -math.inf}, "bad-reward"),
    (TRAJECTORY, {"rewards": {"win": math.nan}}, "bad-reward"),
    (TRAJECTORY, {"turns": (USER, replace(SAMPLED, reward=math.nan))}, "bad-reward"),
    (TRAJECTORY, {"turns": (USER, replace(SAMPLED, tokens=3))}, "bad-lengths"),
    (TRAJECTORY, {"turns": (replace(USER, tokens=3), SAMPLED)}, "bad-lengths"),
    (TRAJECTORY, {"turns": (USER, replace(SAMPLED, tokens=2**40))}, "bad-int"),
    (TRAJECTORY, {"turns": (replace(USER, tokens=-2), replace(SAMPLED, tokens=8))}, "bad-int"),
    (TRAJECTORY, {"logprobs": logprobs(), "turns": (USER, replace(SAMPLED, sampled=False))}, "bad-lengths"),
    (TRAJECTORY, {"turns": (replace(USER, sampled=True), SAMPLED)}, "bad-lengths"),
    (TRAJECTORY, {"turns": ()}, "bad-lengths"),
    (TRAJECTORY, {"logprobs": logprobs(-1, -1, -1)}, "bad-lengths"),
    (TRAJECTORY, {"tokens": np.array([0, 1, -2, 3, 4, 5], np.int32)}, "bad-tokens"),
    (TRAJECTORY, {"spans": spans((3, 3))}, "bad-lengths"),
    (TRAJECTORY, {"spans": spans((3, 4), (4, 1))}, "bad-lengths"),
    (TRAJECTORY, {"spans": spans((0, 4))}, "bad-versions"),
    (TRAJECTORY, {"spans": spans((3, 5), (4, -1))}, "bad-versions"),
    (TRAJECTORY, {"spans": spans((3, 0), (4, 4))}, "bad-versions"),
    (TRAJECTORY, {"spans": spans((3, 1)) * 70_000}, "bad-lengths"),
    (TASK, {"task_id": ""}, "bad-id"),
    (TASK, {"group_size": 0}, "bad-group"),
    (TASK, {"max_turns": -1}, "bad-int"),
    (TASK, {"attempt": 2**40}, "bad-int"),
    (POLICY, {"version": 0}, "bad-versions"),
    (POLICY, {"digest": "0F" * 32}, "bad-digest"),
    (POLICY, {"manifest": ""}, "bad-id"),
    (POLICY, {"step": -1}, "bad-int"),
    (RECEIPT, {"version": 0}, "bad-versions"),
    (RECEIPT, {"parent": 5}, "bad-versions"),
    (RECEIPT, {"groups": ("t", "t")}, "bad-group"),
    (RECEIPT, {"groups": ("",)}, "bad-id"),
    (RECEIPT, {"consumed": (replace(PART, partition=-1),)}, "bad-int"),
    (RECEIPT, {"consumed": (PART, PART)}, "bad-offsets"),
    (RECEIPT, {"consumed": (replace(PART, trained=np.array([9, 7])),)}, "bad-offsets"),
    (RECEIPT, {"consumed": (replace(PART, trained=np.array([7, 7])),)}, "bad-offsets"),
    (RECEIPT, {"consumed": (replace(PART, trained=np.array([-1, 7])),)}, "bad-offsets"),
    (RECEIPT, {"consumed": (replace(PART, trained=np.array([7, 8])),)}, "bad-offsets"),
    (RECEIPT, {"consumed": (replace(PART, dropped={"a": np.array([1]), "b": np.array([1])}),)}, "bad-offsets"),
    (CONTROL, {"target": ""}, "bad-id"),
    (CLAIM, {"size": 0}, "bad-int"),
    (CLAIM, {"sha256": "0F" * 32}, "bad-digest"),
    (CLAIM, {"sha256": "../" * 21 + "a"}, "bad-digest"),
]
"""Record, what is wrong with it, reason: Avro can carry each of these."""


def broken(turn: Turn, **changes: Any) -> Turn:
    """The turn with values of types that a type checker would refuse."""
    return replace(turn, **changes)


UNWRITABLE: list[tuple[WireRecord, dict[str, Any], str]] = [
    (TRAJECTORY, {"group_size": 4.0}, "bad-group"),
    (TRAJECTORY, {"sample_index": True}, "bad-group"),
    (TRAJECTORY, {"seed": 2**63}, "bad-int"),
    (TRAJECTORY, {"seed": np.int64(3)}, "bad-int"),
    (TRAJECTORY, {"tokens": [0, 1, 2, 3, 4, 5]}, "bad-column"),
    (TRAJECTORY, {"tokens": np.arange(6)}, "bad-column"),
    (TRAJECTORY, {"tokens": np.zeros((2, 3), np.int32)}, "bad-column"),
    (TRAJECTORY, {"logprobs": np.full(4, -0.5)}, "bad-column"),
    (TRAJECTORY, {"logprobs": None}, "bad-column"),
    (TRAJECTORY, {"turns": [USER, SAMPLED]}, "bad-type"),
    (TRAJECTORY, {"turns": (USER, {"tokens": 4})}, "bad-type"),
    (TRAJECTORY, {"turns": (USER, broken(SAMPLED, role="ASSISTANT"))}, "bad-enum"),
    (TRAJECTORY, {"turns": (USER, broken(SAMPLED, sampled=1))}, "bad-type"),
    (TRAJECTORY, {"turns": (USER, broken(SAMPLED, tokens=4.0))}, "bad-int"),
    (TRAJECTORY, {"turns": (USER, replace(SAMPLED, text="\ud800"))}, "bad-text"),
    (TRAJECTORY, {"turns": (USER, broken(SAMPLED, tool_calls=({},)))}, "bad-type"),
    (TRAJECTORY, {"spans": spans((3.0, 4))}, "bad-versions"),
    (TRAJECTORY, {"spans": ((3, 4),)}, "bad-type"),
    (TRAJECTORY, {"reward": "1"}, "bad-reward"),
    (TRAJECTORY, {"reward": 10**400}, "bad-reward"),
    (TRAJECTORY, {"reward": np.float32(1)}, "bad-reward"),
    (TRAJECTORY, {"reward": True}, "bad-reward"),
    (TRAJECTORY, {"status": "COMPLETED"}, "bad-enum"),
    (TRAJECTORY, {"status": Role.USER}, "bad-enum"),
    (TRAJECTORY, {"cause": b"oops"}, "bad-text"),
    (TRAJECTORY, {"metadata": {"a": 1}}, "bad-text"),
    (TRAJECTORY, {"metadata": {"\udfff": "a"}}, "bad-text"),
    (TRAJECTORY, {"metadata": None}, "bad-type"),
    (TRAJECTORY, {"metrics": {"a": "1"}}, "bad-float"),
    (TASK, {"seed": 1.7}, "bad-int"),
    (TASK, {"sampling": None}, "bad-type"),
    (TASK, {"payload": {"a": None}}, "bad-text"),
    (TASK, {"traceparent": 7}, "bad-text"),
    (POLICY, {"published_ms": 2**70}, "bad-int"),
    (CLAIM, {"size": 2**63}, "bad-int"),
    (CLAIM, {"size": 1.5}, "bad-int"),
    (CLAIM, {"sha256": None}, "bad-text"),
    (RECEIPT, {"consumed": (replace(PART, trained=np.array([7, 9], np.int32)),)}, "bad-column"),
    (RECEIPT, {"consumed": ("x",)}, "bad-type"),
    (RECEIPT, {"groups": "t"}, "bad-type"),
    (RECEIPT, {"loss": None}, "bad-float"),
    (CONTROL, {"command": "CANCEL"}, "bad-enum"),
]
"""What no body could hold: refused on the way out."""


def forged(record: WireRecord, **changes: object) -> bytes:
    """The record's bytes, its rules unchecked and fields of its body changed."""
    schema_id, schema = current_schemas()[type(record).__name__]
    stream = io.BytesIO(struct.pack(">BI", 0, schema_id))
    stream.seek(0, io.SEEK_END)
    avro: Any = fastavro
    avro.schemaless_writer(stream, schema, to_body(record) | changes)
    return stream.getvalue()


def broken_id(value: object) -> str | None:
    if isinstance(value, dict):
        return "+".join(cast(dict[str, object], value))
    return None if isinstance(value, str) else type(value).__name__


@pytest.mark.parametrize(("record", "changes", "reason"), BROKEN + UNWRITABLE, ids=broken_id)
def test_refused_when_written(record: WireRecord, changes: dict[str, Any], reason: str) -> None:
    encode(record)
    with pytest.raises(InvalidRecord, match=r"\w+.*: expected .*, found ") as refused:
        encode(replace(record, **changes))
    assert refused.value.reason == reason


@pytest.mark.parametrize(("record", "changes", "reason"), BROKEN, ids=broken_id)
def test_refused_when_read(record: WireRecord, changes: dict[str, Any], reason: str) -> None:
    decode(forged(record))
    with pytest.raises(InvalidRecord, match=r"\w+.*: expected .*, found ") as refused:
        decode(forged(replace(record, **changes)))
    assert refused.value.reason == reason


@pytest.mark.parametrize("value", [2**40, 1.7, True, "1", None])
def test_case_6_wrong_int(value: Any) -> None:
    """fastavro writes 2**40 and 1.7 for an `int` without a word; here they are refused."""
    for record in (replace(TASK, max_turns=value), replace(TASK, sampling=replace(TASK.sampling, top_k=value))):
        with pytest.raises(InvalidRecord, match="expected an int from 0 to 2147483647") as refused:
            encode(record)
        assert refused.value.reason == "bad-int"


def test_case_6_wrong_int_read() -> None:
    with pytest.raises(InvalidRecord, match=f"max_turns: expected an int from 0 to 2147483647, found {2**40}"):
        decode(forged(TASK, max_turns=2**40))


@pytest.mark.parametrize("sampling", [{"top_p": 0.0}, {"top_p": 1.5}, {"max_tokens": 0}, {"temperature": math.inf}])
def test_bad_sampling(sampling: dict[str, Any]) -> None:
    task = replace(TASK, sampling=replace(Sampling(), **sampling))
    for refuse in (lambda: encode(task), lambda: decode(forged(task))):
        with pytest.raises(InvalidRecord, match=f"sampling.{next(iter(sampling))}"):
            refuse()


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf, -9999.0, -1e6, 0.5, 1e-30])
@pytest.mark.parametrize("at", [0, 3])
def test_case_9_bad_logprobs(value: float, at: int) -> None:
    """One bad log-probability makes the whole sequence invalid, with its place and reason; nothing is replaced."""
    column = logprobs(-1, -1, -1, -1)
    column[at] = value
    bad = replace(TRAJECTORY, logprobs=column)
    for refuse in (lambda: encode(bad), lambda: decode(forged(bad))):
        with pytest.raises(
            InvalidRecord, match=rf"logprobs\[{at}\]: expected a number from above -9999 to 0"
        ) as refused:
            refuse()
        assert refused.value.reason == "bad-logprobs"


def test_case_9_all_together() -> None:
    bad = replace(TRAJECTORY, logprobs=logprobs(math.nan, -math.inf, -9999.0, 0.5))
    with pytest.raises(InvalidRecord, match=r"logprobs\[0\].*found nan"):
        encode(bad)


def test_edge_logprobs() -> None:
    """Certainty (0, -0) and what is barely possible are fine."""
    column = logprobs(0.0, -0.0, -9998.0, -1e-45)
    assert decode_as(Trajectory, encode(replace(TRAJECTORY, logprobs=column))).logprobs.tobytes() == column.tobytes()


@pytest.mark.parametrize("column", ["tokens", "logprobs", "span_versions", "span_counts"])
def test_torn_column(column: str) -> None:
    with pytest.raises(InvalidRecord, match=column) as refused:
        decode(forged(TRAJECTORY, **{column: bytes(13)}))
    assert refused.value.reason == "bad-column"


def test_span_columns_disagree() -> None:
    with pytest.raises(InvalidRecord, match="as many versions as counts") as refused:
        decode(forged(TRAJECTORY, span_versions=bytes(16)))
    assert refused.value.reason == "bad-lengths"


def test_unknown_command_read() -> None:
    """A command of a newer release is refused, not guessed."""
    with pytest.raises(InvalidRecord, match="CANCEL, PAUSE, RESUME, found 'UNKNOWN'") as refused:
        decode(forged(CONTROL, command="UNKNOWN"))
    assert refused.value.reason == "bad-enum"


def test_huge_values_shown_short() -> None:
    """The message of a refusal stays short, whatever was found."""
    huge: tuple[Any, ...] = (10**5000, "x" * 10**6, np.arange(10**6))
    for value in huge:
        with pytest.raises(InvalidRecord) as refused:
            encode(replace(TASK, seed=value))
        assert len(str(refused.value)) < 200


def test_foreign_record() -> None:
    with pytest.raises(InvalidRecord, match="expected a Trajectory, Task"):
        validate({"task_id": "t"})


names = st.text(min_size=1, max_size=8)
longs = st.integers(0, 2**63 - 1)
finites = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Any valid trajectory."""
    turns: list[Turn] = []
    for _ in range(draw(st.integers(0, 4))):
        turns.append(
            Turn(
                role=draw(st.sampled_from(Role)),
                tokens=draw(st.integers(0, 5)),
                sampled=draw(st.booleans()),
                masked=draw(st.booleans()),
                reward=draw(st.none() | finites),
                text=draw(st.none() | st.text(max_size=8)),
                tool_calls=tuple(draw(st.lists(st.text(max_size=4), max_size=2))),
                finish_reason=draw(st.none() | names),
                started_ms=draw(longs),
                finished_ms=draw(longs),
            )
        )
    sampled = sum(turn.tokens for turn in turns if turn.sampled)
    known = sampled > 0 and draw(st.booleans())
    cut = draw(st.integers(1, sampled)) if known else 0
    parts = [count for count in (cut, sampled - cut) if known and count]
    size = draw(st.integers(1, 2**31 - 1))
    return Trajectory(
        trajectory_id=draw(names),
        group_id=draw(names),
        group_size=size,
        sample_index=draw(st.integers(0, size - 1)),
        environment=draw(names),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        temperature=draw(st.floats(0, 100)),
        tokens=np.array([draw(st.integers(0, 2**31 - 1)) for turn in turns for _ in range(turn.tokens)], np.int32),
        logprobs=logprobs(*(draw(st.floats(-9998, 0, width=32)) for _ in range(sampled if known else 0))),
        spans=spans(*((draw(st.integers(1, 2**63 - 1)), count) for count in parts)),
        turns=tuple(turns),
        reward=draw(finites),
        rewards=draw(st.dictionaries(names, finites, max_size=3)),
        status=draw(st.sampled_from(Status)),
        cause=draw(st.none() | st.text(max_size=8)),
        metrics=draw(st.dictionaries(names, st.floats(allow_nan=False), max_size=3)),
        metadata=draw(st.dictionaries(names, st.text(max_size=8), max_size=3)),
        started_ms=draw(longs),
        finished_ms=draw(longs),
    )


@settings(deadline=None)
@given(trajectories())
def test_any_trajectory_round_trip(record: Trajectory) -> None:
    found = decode_as(Trajectory, encode(record))
    assert encode(found) == encode(record)
    for name in record.__dataclass_fields__:
        before, after = getattr(record, name), getattr(found, name)
        assert before.tobytes() == after.tobytes() if isinstance(before, np.ndarray) else before == after


@settings(deadline=None)
@given(
    st.dictionaries(names, st.sets(st.integers(0, 2**62), max_size=5), max_size=3),
    st.sets(st.integers(0, 2**62), max_size=5),
)
def test_any_offsets_round_trip(dropped: dict[str, set[int]], trained: set[int]) -> None:
    """Offsets ascend and are disjoint, or the receipt is refused."""
    part = Consumed(
        topic="x",
        partition=0,
        trained=np.array(sorted(trained), np.int64),
        dropped={reason: np.array(sorted(offsets), np.int64) for reason, offsets in dropped.items()},
    )
    receipt = replace(RECEIPT, consumed=(part,))
    every = [*trained, *(offset for offsets in dropped.values() for offset in offsets)]
    if len(set(every)) < len(every):
        with pytest.raises(InvalidRecord, match="every offset in one column only"):
            encode(receipt)
        return
    found = decode_as(Receipt, encode(receipt)).consumed[0]
    assert set(found.trained.tolist()) == trained
    assert {reason: set(offsets.tolist()) for reason, offsets in found.dropped.items()} == dropped
