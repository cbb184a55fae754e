"""The codec: what is written is read back, what cannot be read is refused quickly, and the bytes stay what they are."""

import math
import struct
from dataclasses import fields, is_dataclass, replace
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

import rollstream.schemas as wire
from rollstream.schemas import (
    Claim,
    Command,
    Consumed,
    Control,
    InvalidRecord,
    MalformedBytes,
    PolicySpan,
    PolicyUpdate,
    Receipt,
    Role,
    Sampling,
    Status,
    Task,
    Trajectory,
    Turn,
    UnknownSchema,
    WireRecord,
    decode,
    decode_as,
    encode,
    trajectory_headers,
)

TASK = Task(
    task_id="task-7",
    environment="guess",
    seed=-5,
    group_size=4,
    sampling=Sampling(temperature=0.7, max_tokens=64, top_p=0.9, top_k=40),
    max_turns=6,
    attempt=1,
    payload={"range": "1..50"},
    created_ms=1_700_000_000_000,
    traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
)
TRAJECTORY = Trajectory(
    trajectory_id="task-7/2/0",
    group_id="task-7",
    group_size=4,
    sample_index=2,
    environment="guess",
    environment_version="0.7.4",
    seed=-5,
    model="tiny",
    tokenizer="sha256:ab",
    temperature=0.5,
    tokens=np.array([1, 2, 3, 40_000, 5], np.int32),
    logprobs=np.array([-0.5, 0.0], np.float32),
    spans=(PolicySpan(version=3, count=1), PolicySpan(version=4, count=1)),
    turns=(
        Turn(role=Role.USER, tokens=3, sampled=False, text="Räte 1…50 🎲"),
        Turn(
            role=Role.ASSISTANT,
            tokens=2,
            sampled=True,
            masked=True,
            reward=0.25,
            tool_calls=('{"name": "guess"}',),
            finish_reason="stop",
            started_ms=1,
            finished_ms=2,
        ),
    ),
    reward=1.0,
    rewards={"win": 1.0},
    status=Status.TRUNCATED,
    cause="turn limit",
    metrics={"seconds": 0.5},
    metadata={"host": "a"},
    started_ms=1_700_000_000_000,
    finished_ms=1_700_000_000_500,
)
POLICY = PolicyUpdate(
    run="run-1",
    version=4,
    incarnation="i1",
    step=3,
    manifest="run-1/checkpoints/4/manifest.json",
    digest="0f" * 32,
    published_ms=1_700_000_000_000,
)
RECEIPT = Receipt(
    run="run-1",
    incarnation="i1",
    step=3,
    version=4,
    parent=3,
    parent_incarnation="i0",
    consumed=(
        Consumed(
            topic="rollstream.trajectories.guess",
            partition=1,
            trained=np.array([7, 9, 2**40], np.int64),
            dropped={"stale": np.array([8], np.int64), "duplicate": np.empty(0, np.int64)},
        ),
    ),
    groups=("task-7", "task-8"),
    loss=-0.125,
    metrics={"kl": 0.5},
    written_ms=1_700_000_000_000,
)
CONTROL = Control(command=Command.CANCEL, target="task-7", reason="superseded", issued_ms=1_700_000_000_000)
CLAIM = Claim(size=2_000_000, sha256="0f" * 32)
RECORDS: tuple[WireRecord, ...] = (TASK, TRAJECTORY, POLICY, RECEIPT, CONTROL, CLAIM)
GOLDEN = {
    "Task": (
        "003e6f91360c7461736b2d370a67756573730908666666666666e63f8001cdccccccccccec3f500c02020a72616e67650a31"
        "2e2e35300080a0abfef962026e30302d30616637363531393136636434336464383434386562323131633830333139632d62"
        "3761643662373136393230333333312d3031"
    ),
    "Trajectory": (
        "003fe90081147461736b2d372f322f300c7461736b2d3708040a67756573730a302e372e34090874696e7912736861323536"
        "3a6162000000000000e03f28010000000200000003000000409c00000500000010000000bf00000000200300000000000000"
        "0400000000000000100100000001000000040206000000022252c3a474652031e280a6353020f09f8eb20000000004040101"
        "02000000000000d03f0002227b226e616d65223a20226775657373227d00020873746f70020400000000000000f03f020677"
        "696e000000000000f03f000202147475726e206c696d6974020e7365636f6e6473000000000000e03f000208686f73740261"
        "0080a0abfef962e8a7abfef962"
    ),
    "PolicyUpdate": (
        "00042dfe470a72756e2d3108046931064272756e2d312f636865636b706f696e74732f342f6d616e69666573742e6a736f6e"
        "8001306630663066306630663066306630663066306630663066306630663066306630663066306630663066306630663066"
        "3066306630663066306630663066306680a0abfef962"
    ),
    "Receipt": (
        "002eca5fb90a72756e2d31046931060806046930023a726f6c6c73747265616d2e7472616a6563746f726965732e67756573"
        "730230070000000000000009000000000000000000000000010000040a7374616c65100800000000000000126475706c6963"
        "617465000000040c7461736b2d370c7461736b2d3800000000000000c0bf02046b6c000000000000e03f0080a0abfef962"
    ),
    "Control": ("000de94441020c7461736b2d37147375706572736564656480a0abfef962"),
    "Claim": (
        "0076007ac88092f40180013066306630663066306630663066306630663066306630663066306630663066306630663066"
        "3066306630663066306630663066306630663066306630663066"
    ),
}
EMPTY = Trajectory(trajectory_id="t/0/0", group_id="t", group_size=4, sample_index=0, environment="e")


def plain(value: object) -> object:
    """A record as values that compare with ==, arrays with their dtype and NaN equal to itself."""
    if isinstance(value, np.ndarray):
        array = cast(NDArray[Any], value)
        return str(array.dtype), array.tobytes()
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, dict):
        return {key: plain(part) for key, part in cast(dict[str, Any], value).items()}
    if isinstance(value, tuple):
        return tuple(plain(part) for part in cast(tuple[object, ...], value))
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return type(value).__name__, value


def name_of(record: WireRecord) -> str:
    return type(record).__name__


def test_face() -> None:
    shown = {name for name in vars(wire) if not name.startswith("_")}
    modules = {name for name in shown if isinstance(getattr(wire, name), ModuleType)}
    assert sorted(wire.__all__) == sorted(shown - modules)


@pytest.mark.parametrize("record", RECORDS, ids=name_of)
def test_round_trip(record: WireRecord) -> None:
    assert plain(decode(encode(record))) == plain(record)
    assert plain(decode_as(type(record), encode(record))) == plain(record)


@pytest.mark.parametrize("record", RECORDS, ids=name_of)
def test_golden(record: WireRecord) -> None:
    """The wire does not change by accident: these bytes stand in topics."""
    assert encode(record).hex() == GOLDEN[name_of(record)]
    assert plain(decode(bytes.fromhex(GOLDEN[name_of(record)]))) == plain(record)


def test_columns_views() -> None:
    trajectory = decode_as(Trajectory, encode(TRAJECTORY))
    receipt = decode_as(Receipt, encode(RECEIPT))
    part = receipt.consumed[0]
    for array in (trajectory.tokens, trajectory.logprobs, part.trained, part.dropped["stale"]):
        assert isinstance(array.base, bytes)
        assert np.shares_memory(array, np.frombuffer(array.base, array.dtype))
        assert array.flags.c_contiguous
        assert array.flags.aligned
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_columns_any_layout() -> None:
    """Strided and big-endian arrays of the right type are written as contiguous little-endian ones."""
    wide = np.array([1, 9, 2, 9, 3, 9, 40_000, 9, 5, 9], np.int32)
    assert encode(replace(TRAJECTORY, tokens=wide[::2])) == encode(TRAJECTORY)
    assert encode(replace(TRAJECTORY, tokens=TRAJECTORY.tokens.astype(">i4"))) == encode(TRAJECTORY)


def test_large_column_size() -> None:
    """8,192 tokens, all sampled: eight bytes a token, and little else."""
    turns = tuple(Turn(role=Role.ASSISTANT, tokens=4096, sampled=True) for _ in range(2))
    record = replace(
        TRAJECTORY,
        tokens=np.arange(8192, dtype=np.int32),
        logprobs=np.full(8192, -1.0, np.float32),
        spans=(PolicySpan(version=1, count=8192),),
        turns=turns,
    )
    assert len(encode(record)) < 8 * 8192 + 256


def test_measurements_nan() -> None:
    """Measurements are recorded as they were; only what is trained on must be finite."""
    metrics = {"grad": math.nan, "kl": math.inf}
    assert plain(decode(encode(replace(RECEIPT, loss=math.nan, metrics=metrics)))) == plain(
        replace(RECEIPT, loss=math.nan, metrics=metrics)
    )


def test_whole_number_for_float() -> None:
    assert decode_as(Trajectory, encode(replace(TRAJECTORY, reward=1, rewards={"win": 1}))).reward == 1.0


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        pytest.param(b"", "bad-framing", id="empty"),
        pytest.param(b"\x01junk", "bad-framing", id="junk"),
        pytest.param(b"\x00\x00\x00", "bad-framing", id="half a frame"),
        pytest.param(encode(TRAJECTORY) + b"abc", "trailing-bytes", id="three bytes more"),
        pytest.param(encode(TRAJECTORY)[:-1], "malformed", id="one byte less"),
        pytest.param(encode(TRAJECTORY)[:5], "malformed", id="no body"),
    ],
)
def test_case_1_poison_record(data: bytes, reason: str) -> None:
    with pytest.raises(MalformedBytes) as refused:
        decode(data)
    assert refused.value.reason == reason


@pytest.mark.parametrize("record", RECORDS, ids=name_of)
def test_case_1_every_cut(record: WireRecord) -> None:
    data = encode(record)
    for end in range(len(data)):
        with pytest.raises(MalformedBytes):
            decode(data[:end])


def test_unknown_id() -> None:
    for schema_id in (0, 1, 2**31, 2**32 - 1):
        with pytest.raises(UnknownSchema, match=str(schema_id)):
            decode(struct.pack(">BI", 0, schema_id) + b"body")


def test_wrong_record() -> None:
    with pytest.raises(MalformedBytes, match="expected a Task, found a Control") as refused:
        decode_as(Task, encode(CONTROL))
    assert refused.value.reason == "wrong-record"


def test_size_bound() -> None:
    data = encode(TRAJECTORY)
    assert plain(decode(data, max_bytes=len(data))) == plain(TRAJECTORY)
    with pytest.raises(MalformedBytes, match=str(len(data))) as refused:
        decode(data, max_bytes=len(data) - 1)
    assert refused.value.reason == "too-large"
    assert encode(TRAJECTORY, max_bytes=len(data)) == data
    with pytest.raises(InvalidRecord) as unwritten:
        encode(TRAJECTORY, max_bytes=len(data) - 1)
    assert unwritten.value.reason == "too-large"


def test_vocabulary_both_ways() -> None:
    data = encode(TRAJECTORY, vocabulary=40_001)
    assert decode_as(Trajectory, data, vocabulary=40_001).tokens.max() == 40_000
    for refuse in (lambda: encode(TRAJECTORY, vocabulary=40_000), lambda: decode(data, vocabulary=40_000)):
        with pytest.raises(
            InvalidRecord, match=r"tokens\[3\]: expected a token id from 0 to 39999, found 40000"
        ) as refused:
            refuse()
        assert refused.value.reason == "bad-tokens"


def test_values_bound_both_ways() -> None:
    """A million turns are neither written nor read, a long token column is."""
    turns = (Turn(role=Role.USER, tokens=0, sampled=False),) * 120_000
    with pytest.raises(InvalidRecord, match="more than 1048576 values") as refused:
        encode(replace(EMPTY, turns=turns))
    assert refused.value.reason == "too-large"
    tokens = np.zeros(1 << 20, np.int32)
    long = replace(EMPTY, tokens=tokens, turns=(Turn(role=Role.USER, tokens=1 << 20, sampled=False),))
    assert decode_as(Trajectory, encode(long)).tokens.size == 1 << 20


def test_case_10_strange_shapes() -> None:
    """No turns; a turn without sampled tokens; one EOS token; a group of one."""
    silent = Turn(role=Role.ASSISTANT, tokens=0, sampled=True)
    one = Turn(role=Role.ASSISTANT, tokens=1, sampled=True, finish_reason="stop")
    ended = replace(
        EMPTY,
        tokens=np.array([2], np.int32),
        logprobs=np.array([-0.0], np.float32),
        spans=(PolicySpan(version=1, count=1),),
        turns=(one,),
    )
    for record in (
        EMPTY,
        replace(EMPTY, turns=(silent,)),
        ended,
        replace(ended, turns=(silent, one, silent)),
        replace(ended, group_size=1),
    ):
        assert plain(decode(encode(record))) == plain(record)
        assert trajectory_headers(record)


def test_unknown_history() -> None:
    """A scripted player: tokens are there, log-probabilities and versions are not known."""
    scripted = replace(TRAJECTORY, logprobs=np.empty(0, np.float32), spans=())
    found = decode_as(Trajectory, encode(scripted))
    assert found.logprobs.size == 0
    assert found.version_range() is None
