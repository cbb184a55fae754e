"""Mutated records through admission: each is an arrival or a dead letter, memory is bounded, nothing ends it."""

import random
import resource
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from rollstream.consumers import Admission, Arrival, Objective, StalenessGate
from rollstream.infra.claims import Claims
from rollstream.infra.deadletters import REASON, DeadLetters
from rollstream.infra.log import Partition, Record
from rollstream.infra.memory import MemoryLog
from rollstream.infra.store import MemoryStore
from rollstream.infra.topics import Names, declared
from rollstream.schemas import (
    Schemas,
    Status,
    Task,
    Trajectory,
    decode_as,
    encode,
    trajectory_headers,
    validate,
)

Episode = Callable[..., Trajectory]
NAMES = Names("m")
VOCABULARY = 24
CHUNK = 2000
"""Records between two looks at the dead letters, which then go: the log here is memory."""


@dataclass
class Bench:
    """Admission over a log of its own."""

    log: MemoryLog = field(default_factory=MemoryLog)
    seen: Counter[str] = field(default_factory=Counter[str])
    """Reason, or "admitted" -> arrivals."""
    letters: Counter[str] = field(default_factory=Counter[str])
    """Reason -> dead letters."""

    def __post_init__(self) -> None:
        for topic in declared("m", {"maze": 1}):
            self.log.create(topic)

    def run(self, stream: "Mutations", count: int) -> None:
        sender = DeadLetters(self.log, NAMES)
        admission = Admission(
            gate=StalenessGate(2, 4),
            dead_letters=sender,
            schemas=Schemas(),
            claims=stream.claims,
            objective=Objective.GRPO,
            vocabulary=VOCABULARY,
            max_bytes=1 << 20,
        )
        admission = replace(admission, tokenizer=stream.tokenizer)
        try:
            for start in range(0, count, CHUNK):
                self._admit(admission, [stream.next(offset) for offset in range(start, min(start + CHUNK, count))])
        finally:
            sender.close()

    def _admit(self, admission: Admission, records: list[Record]) -> None:
        (partition,) = self.log.partitions(NAMES.dead_letter)
        for record in records:
            before = self._end(partition)
            arrival = admission.admit(record)
            check_arrival(record, arrival)
            self.seen[arrival.reason or "admitted"] += 1
            if (after := self._end(partition)) != before:
                assert after == before + 1, "one dead letter at most"
                self._check_letter(partition, before, record, arrival)
        self.log.expire(partition, self._end(partition))

    def _end(self, partition: Partition) -> int:
        return self.log.bounds([partition])[partition][1]

    def _check_letter(self, partition: Partition, offset: int, record: Record, arrival: Arrival) -> None:
        with self.log.read({partition: offset}) as consumer:
            (letter,) = consumer.poll(1, 1.0)
        assert (letter.value, letter.key) == (record.value, record.key), "untouched"
        assert letter.headers[REASON].decode() == arrival.reason
        self.letters[arrival.reason or ""] += 1


def check_arrival(record: Record, arrival: Arrival) -> None:
    """It holds its place; what may train is a whole, valid record."""
    assert arrival.position == record.position
    if arrival.trajectory is None:
        assert arrival.reason
        return
    assert arrival.reason is None
    validate(arrival.trajectory, vocabulary=VOCABULARY)
    assert decode_as(Trajectory, encode(arrival.trajectory)).trajectory_id == arrival.trajectory_id
    assert arrival.trajectory.status in {Status.COMPLETED, Status.TRUNCATED}
    versions = arrival.trajectory.version_range()
    assert versions is not None
    assert versions[0] >= 2, "stale ones are kept out"


class Mutations:
    """Records of a trajectory topic, most with one damage in the body, the headers, the key or the schema id."""

    def __init__(self, episode: Episode, seed: int) -> None:
        self._random = random.Random(seed)
        good = [episode("g", i, size=3, version=2 + i) for i in range(3)]
        spare = replace(good[0], status=Status.FAILED, cause="raised")
        silent = replace(good[0], logprobs=np.empty(0, np.float32), spans=())
        self.tokenizer = good[0].tokenizer
        store = MemoryStore()
        self.claims = Claims(lambda: store, NAMES)
        self._sound = [(encode(t), trajectory_headers(t)) for t in (*good, spare, silent)]
        self._sound += [(encode(self.claims.deposit(value)), headers) for value, headers in self._sound]
        self._foreign = encode(Task(task_id="t", environment="maze", seed=1, group_size=3))

    def next(self, offset: int) -> Record:
        value, headers = self._random.choice(self._sound)
        key: bytes | None = b"g"
        match self._random.randrange(8):
            case 0:
                headers = self._header(headers)
            case 1:
                headers, value = {}, self._damage(value)
            case 2:
                key = self._random.choice((None, b"", b"\xff\xfe", self._random.randbytes(2000)))
                value = self._damage(value)
            case 3:
                value = self._random.choice((b"", self._foreign, self._random.randbytes(self._random.randrange(300))))
            case _:
                value = self._damage(value)
        stone = self._random.randrange(200) == 0
        return Record(
            partition=Partition("m.trajectories.maze", 0),
            offset=offset,
            key=key,
            value=None if stone else value,
            headers=headers,
        )

    def _damage(self, data: bytes) -> bytes:
        noise = self._random
        at = noise.randrange(len(data))
        match noise.randrange(6):
            case 0:
                return data[:at] + bytes([data[at] ^ 1 << noise.randrange(8)]) + data[at + 1 :]
            case 1:
                return data[:at] + noise.randbytes(noise.randrange(1, 9)) + data[at:]
            case 2:
                return data[:at] + data[at + noise.randrange(1, 9) :]
            case 3:
                bomb = noise.choice((b"\x80\x80\x80\x80\x80\x40", b"\xff" * 9 + b"\x01", b"\x01"))
                return data[:at] + bomb + data[at + 1 :]
            case 4:
                return data[:at] + data[noise.randrange(len(data)) :]
            case _:
                return data[:at]

    def _header(self, headers: dict[str, bytes]) -> dict[str, bytes]:
        name = self._random.choice(sorted(headers))
        damaged = self._random.choice((b"", b"\xff", b"-1", b"9" * 30, b"0", self._random.randbytes(8)))
        return {**headers, name: damaged}


QUIET = {"admitted", "tombstone", "stale", "failed", "aborted", "empty", "unscored", "unversioned"}
"""Not in the dead-letter topic: nothing is wrong with the record itself."""


def run_stream(episode: Episode, count: int, seed: int) -> Bench:
    bench = Bench()
    bench.run(Mutations(episode, seed), count)
    assert bench.seen.total() == count
    assert {r: n for r, n in bench.seen.items() if r not in QUIET} == dict(bench.letters)
    assert {
        "admitted",
        "tombstone",
        "malformed",
        "bad-headers",
        "unknown-schema",
        "wrong-record",
        "claim-missing",
    } <= bench.seen.keys()
    return bench


def test_ten_thousand_mutated_records(episode: Episode) -> None:
    first = run_stream(episode, 10_000, seed=7)
    assert run_stream(episode, 10_000, seed=7).seen == first.seen, "a seed tells the whole story"


@pytest.mark.slow
def test_a_million_mutated_records_in_bounded_memory(episode: Episode) -> None:
    run_stream(episode, 20_000, seed=1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run_stream(episode, 1_000_000, seed=2)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 64 * 1024, f"{grown:,} KiB more at the peak"
