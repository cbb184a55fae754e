"""Cost of the codec on one long trajectory, beside what it was chosen over.

    python bench/codec.py [--tokens 8192] [--turns 10] [--rounds 30] [--json]

    bytes     rollstream's codec: columns as bytes, rules checked in both directions
    arrays    the same record with Avro arrays in place of bytes, fastavro alone, no rules checked
    json      the same record as JSON text, no rules checked

Ways take turns within each round, so that a busy machine slows all of them alike. Times are microseconds, minimum and
median over the rounds; a ratio is a way's time over that of `bytes` within one round.
"""

import argparse
import io
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import fastavro
import numpy as np

from rollstream.schemas import PolicySpan, Role, Trajectory, Turn, decode, encode, record_schemas
from rollstream.schemas.bodies import to_body

COLUMNS = {"tokens": "int", "logprobs": "float", "span_versions": "long", "span_counts": "int"}
DTYPES = {"tokens": "<i4", "logprobs": "<f4", "span_versions": "<i8", "span_counts": "<i4"}
AVRO: Any = fastavro


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to write and read the record."""

    encode: Callable[[], bytes]
    decode: Callable[[bytes], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Microseconds of each round, and the size of what was written."""

    encode: list[float]
    decode: list[float]
    size: int


def make_trajectory(tokens: int, turns: int) -> Trajectory:
    """Turns of one length, environment and policy by turns, two policy versions."""
    noise = np.random.default_rng(0)
    lengths = [len(part) for part in np.array_split(np.arange(tokens), turns)]
    sampled = sum(lengths[1::2])
    return Trajectory(
        trajectory_id="task-000001/3/0",
        group_id="task-000001",
        group_size=8,
        sample_index=3,
        environment="guess-the-number",
        tokens=noise.integers(0, 150_000, tokens, np.int32),
        logprobs=-noise.exponential(1.0, sampled).astype(np.float32),
        spans=tuple(PolicySpan(version=7 + part, count=sampled // 2 + part * (sampled % 2)) for part in range(2)),
        turns=tuple(
            Turn(
                role=Role.ASSISTANT if index % 2 else Role.USER,
                tokens=length,
                sampled=index % 2 == 1,
                reward=0.0 if index % 2 else None,
                text="a line of text for people",
                finish_reason="stop" if index % 2 else None,
            )
            for index, length in enumerate(lengths)
        ),
        reward=1.0,
        rewards={"win": 1.0},
        metrics={"seconds": 1.5},
    )


def lists_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body with its columns as lists."""
    return dict(body) | {name: np.frombuffer(body[name], dtype).tolist() for name, dtype in DTYPES.items()}


def columns_of(body: dict[str, Any]) -> dict[str, Any]:
    """The body with its lists as columns again: the trainer wants arrays, whatever the wire had."""
    return body | {name: np.array(body[name], dtype) for name, dtype in DTYPES.items()}


def array_schema() -> Any:
    text = next(shipped.text for shipped in record_schemas() if shipped.name == "trajectory.v1")
    schema = json.loads(text)
    for field in schema["fields"]:
        if field["name"] in COLUMNS:
            field["type"] = {"type": "array", "items": COLUMNS[field["name"]]}
    return AVRO.parse_schema(schema)


def make_ways(trajectory: Trajectory) -> dict[str, Way]:
    schema = array_schema()

    def write_arrays() -> bytes:
        stream = io.BytesIO()
        AVRO.schemaless_writer(stream, schema, lists_of(to_body(trajectory)))
        return stream.getvalue()

    return {
        "bytes": Way(encode=lambda: encode(trajectory), decode=decode),
        "arrays": Way(
            encode=write_arrays,
            decode=lambda data: columns_of(AVRO.schemaless_reader(io.BytesIO(data), schema, None)),
        ),
        "json": Way(
            encode=lambda: json.dumps(lists_of(to_body(trajectory))).encode(),
            decode=lambda data: columns_of(json.loads(data)),
        ),
    }


def microseconds(call: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats * 1e6


def measure(ways: Mapping[str, Way], rounds: int) -> dict[str, Figures]:
    data = {name: way.encode() for name, way in ways.items()}
    figures = {name: Figures(encode=[], decode=[], size=len(data[name])) for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            written = microseconds(way.encode, 5)
            read = microseconds(lambda way=way, name=name: way.decode(data[name]), 5)
            if number:  # the first round warms up
                figures[name].encode.append(written)
                figures[name].decode.append(read)
    return figures


def summary(figures: Mapping[str, Figures]) -> dict[str, dict[str, float]]:
    """Per way: size, and for each direction the time and the ratio to `bytes`, minimum and median."""
    rows: dict[str, dict[str, float]] = {}
    for name, own in figures.items():
        row = rows[name] = {"bytes": own.size}
        for direction in ("encode", "decode"):
            times: list[float] = getattr(own, direction)
            base: list[float] = getattr(figures["bytes"], direction)
            ratios = [mine / theirs for mine, theirs in zip(times, base, strict=True)]
            row |= {f"{direction}_us_min": min(times), f"{direction}_us_median": median(times)}
            row |= {f"{direction}_ratio_min": min(ratios), f"{direction}_ratio_median": median(ratios)}
    return rows


def print_table(rows: Mapping[str, Mapping[str, float]]) -> None:
    heads = (f"  {f'{direction} us, min / median':>24}{'x bytes':>16}" for direction in ("encode", "decode"))
    print(f"{'way':<8}{'size':>10}{''.join(heads)}")
    for name, row in rows.items():
        cells = ""
        for direction in ("encode", "decode"):
            times = f"{row[f'{direction}_us_min']:.0f} / {row[f'{direction}_us_median']:.0f}"
            ratios = f"{row[f'{direction}_ratio_min']:.1f} / {row[f'{direction}_ratio_median']:.1f}"
            cells += f"  {times:>24}{ratios:>16}"
        print(f"{name:<8}{row['bytes']:>10.0f}{cells}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of the codec on one long trajectory.")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the trajectory")
    parser.add_argument("--turns", type=int, default=10, help="its turns, at least 2")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    rows = summary(measure(make_ways(make_trajectory(options.tokens, options.turns)), options.rounds))
    if options.json:
        print(json.dumps({"tokens": options.tokens, "turns": options.turns, "rounds": options.rounds, "ways": rows}))
    else:
        print(f"{options.tokens} tokens, {options.turns} turns, {options.rounds} rounds")
        print_table(rows)


if __name__ == "__main__":
    main()
