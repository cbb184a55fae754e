"""Bytes and schemas made to hurt: bombs in a process with little memory, and a hundred thousand mutated records."""

import random
import subprocess
import sys
from collections import Counter

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollstream.schemas import (
    Claim,
    Command,
    Consumed,
    Control,
    PolicySpan,
    PolicyUpdate,
    Receipt,
    Role,
    Task,
    Trajectory,
    Turn,
    WireError,
    WireRecord,
    decode,
    encode,
    validate,
)

RECORDS: tuple[WireRecord, ...] = (
    Task(task_id="t", environment="e", seed=1, group_size=4, payload={"a": "b"}),
    Trajectory(
        trajectory_id="t/0/0",
        group_id="t",
        group_size=4,
        sample_index=0,
        environment="e",
        tokens=np.arange(6, dtype=np.int32),
        logprobs=np.full(4, -0.5, np.float32),
        spans=(PolicySpan(version=3, count=1), PolicySpan(version=4, count=3)),
        turns=(
            Turn(role=Role.USER, tokens=2, sampled=False, text="hé"),
            Turn(role=Role.ASSISTANT, tokens=4, sampled=True, reward=0.5, tool_calls=("{}",), finish_reason="stop"),
        ),
        reward=1.0,
        rewards={"win": 1.0},
        metrics={"seconds": 0.5},
    ),
    PolicyUpdate(run="r", version=4, incarnation="i", step=3, manifest="m", digest="0f" * 32, published_ms=1),
    Receipt(
        run="r",
        incarnation="i",
        step=3,
        version=4,
        parent=3,
        consumed=(Consumed(topic="x", partition=0, trained=np.array([7, 9]), dropped={"stale": np.array([8])}),),
        groups=("t",),
        loss=0.5,
    ),
    Control(command=Command.PAUSE, target="e"),
    Claim(size=2_000_000, sha256="0f" * 32),
)
OUTCOMES = {
    *("decoded", "malformed", "trailing-bytes", "bad-framing", "unknown-schema", "bad-int", "bad-float", "bad-id"),
    *("bad-column", "bad-enum", "bad-group", "bad-lengths", "bad-tokens", "bad-logprobs", "bad-versions"),
    *("bad-reward", "bad-offsets", "bad-digest"),
}
"""What may become of damaged bytes."""

BOMBS = """
import random, resource, struct

from rollstream.schemas import Trajectory, WireError, decode, encode

def number(n):
    n = (n << 1) ^ (n >> 63)
    digits = []
    while n > 0x7F:
        digits.append(n & 0x7F | 0x80)
        n >>= 7
    return bytes([*digits, n])

empty = encode(Trajectory(trajectory_id="t", group_id="t", group_size=1, sample_index=0, environment="e"))
columns, turns, rewards = len(empty) - 20, len(empty) - 16, len(empty) - 7
assert empty[columns : turns + 1] == bytes(5)
noise = random.Random(2)

def swap(at, count):
    return empty[:at] + count + empty[at + 1 :]

bombs = [
    *(swap(at, number(n)) for at in (5, columns, turns, rewards) for n in (2**40, 2**31, 2**62, -1, -(2**62))),
    *(swap(at, number(-(2**31)) + number(2**40)) for at in (turns, rewards)),
    *(empty[:at] + bytes([b]) * 200_000 for at in (5, columns, turns, rewards) for b in (2, 128, 255, 91)),
    *(empty[:at] + noise.randbytes(200_000) for at in (5, columns, turns, rewards)),
    empty[: turns - 2] + number(24 << 20) + bytes(24 << 20) + number(12 << 20) + bytes(12 << 20) + empty[turns:],
    empty[:turns] + number(3_000_000) + bytes(10) * 3_000_000 + empty[turns:],
]
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (96 << 20), used + (96 << 20)))
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
refused = 0
for bomb in bombs:
    try:
        decode(bomb)
    except WireError:
        refused += 1
print(refused, len(bombs), decode(empty).trajectory_id)
"""


def test_case_2_decode_bombs() -> None:
    """Lengths of 2**40, counts of 2**31, 200 KB of garbage, 30 MB of empty turns or spans: refused within 96 MiB."""
    done = subprocess.run([sys.executable, "-c", BOMBS], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    refused, bombs, alive = done.stdout.split()
    assert refused == bombs
    assert alive == "t"


def mutate(data: bytes, noise: random.Random) -> bytes:
    """One small damage, anywhere behind the framing's first byte."""
    at = noise.randrange(1, len(data))
    match noise.randrange(6):
        case 0:
            return data[:at] + bytes([data[at] ^ 1 << noise.randrange(8)]) + data[at + 1 :]
        case 1:
            return data[:at] + noise.randbytes(1) + data[at + 1 :]
        case 2:
            return data[:at] + noise.randbytes(noise.randrange(1, 9)) + data[at:]
        case 3:
            return data[:at] + data[at + noise.randrange(1, 9) :]
        case 4:
            return (
                data[:at] + noise.choice((b"\x80\x80\x80\x80\x80\x40", b"\xff" * 9 + b"\x01", b"\x01")) + data[at + 1 :]
            )
        case _:
            other = noise.randrange(1, len(data))
            return data[:at] + data[other:]


def outcome(data: bytes) -> str:
    """What became of these bytes. Anything but a record that could be written again, or a WireError, fails the test."""
    try:
        record = decode(data)
    except WireError as error:
        return error.reason
    validate(record)
    encode(record)
    return "decoded"


def test_mutated_records() -> None:
    """100,000 damaged records: each is refused for a reason or is a valid record, and nothing else happens."""
    noise = random.Random(20)
    frames = [encode(record) for record in RECORDS]
    reasons = Counter(outcome(mutate(noise.choice(frames), noise)) for _ in range(100_000))
    assert reasons.total() == 100_000
    assert reasons.keys() <= OUTCOMES
    assert reasons.keys() >= {"decoded", "malformed", "trailing-bytes", "unknown-schema", "bad-lengths", "bad-logprobs"}


@settings(deadline=None)
@given(st.sampled_from([encode(record)[:5] for record in RECORDS]), st.binary(max_size=300))
@example(b"\x00\x00\x00\x00\x01", b"")
def test_garbage_bodies(frame: bytes, body: bytes) -> None:
    assert outcome(frame + body) in OUTCOMES


@settings(deadline=None)
@given(st.binary(max_size=64))
def test_garbage_frames(data: bytes) -> None:
    assert outcome(data) in OUTCOMES
