"""Two releases on one topic: a trainer of this one, and producers of this and of a next one, on every log.

The next release is made up here. It adds a field with a default, a symbol to an enum that has a default one, and a
better name for a field, as an alias of the old one: what a release may do, and all of it at once.
"""

import io
import json
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import fastavro
import pytest

from rollstream.consumers.audit import audit
from rollstream.consumers.trainer import Trainer, TrainerSettings
from rollstream.infra import deadletters
from rollstream.infra.checkpoints import Checkpoints
from rollstream.infra.log import Log, LogError, Position, Record
from rollstream.infra.scan import scan
from rollstream.infra.schemabook import LogSchemas, publish_schemas
from rollstream.infra.store import MemoryStore
from rollstream.infra.topics import Names
from rollstream.schemas import (
    Receipt,
    Schemas,
    Trajectory,
    encode,
    full_problems,
    record_schemas,
    schema_id,
    trajectory_headers,
)
from rollstream.schemas.bodies import to_body

Episode = Callable[..., Trajectory]
V1 = next(shipped.text for shipped in record_schemas() if shipped.name == "trajectory.v1")
AVRO: Any = fastavro


def make_next() -> str:
    schema = json.loads(V1)
    for field in schema["fields"]:
        if field["name"] == "status":
            field["type"]["symbols"].append("EXPIRED")
        if field["name"] == "seed":
            field["aliases"] = ["starting_point"]
    schema["fields"].insert(3, {"name": "judge", "type": ["null", "string"], "default": None, "doc": "Who scored it."})
    return json.dumps(schema)


def make_incompatible() -> str:
    """A field renamed without a thought for old readers."""
    schema = json.loads(V1)
    for field in schema["fields"]:
        if field["name"] == "tokens":
            field["name"] = "ids"
    return json.dumps(schema)


V2, BROKEN = make_next(), make_incompatible()


class Run(NamedTuple):
    """One run on a log, with producers of several releases."""

    log: Log
    names: Names
    store: MemoryStore

    def put(self, trajectory: Trajectory, text: str | None = None, **changes: object) -> Position:
        """Append as this release does, or as one whose schema is `text`."""
        value = encode(trajectory) if text is None else write_by(text, to_body(trajectory) | changes)
        with self.log.writer() as writer:
            topic, key = self.names.trajectories("maze"), trajectory.group_id.encode()
            return writer.append(topic, value, key=key, headers=trajectory_headers(trajectory), partition=0).result(40)

    def publish(self, text: str) -> None:
        with self.log.writer() as writer:
            writer.append(self.names.schemas, text.encode(), key=str(schema_id(text)).encode()).result(40)

    def train(self, model: Path, scratch: Path, steps: int, on_step: Callable[[Receipt], None]) -> list[Receipt]:
        receipts = list[Receipt]()

        def step(receipt: Receipt) -> None:
            receipts.append(receipt)
            on_step(receipt)

        trainer = Trainer(
            self.log,
            self.names,
            "run",
            Checkpoints(self.store, "run"),
            TrainerSettings(environments={"maze": 1.0}, groups_per_step=1, max_staleness=100, steps=steps),
            scratch=scratch,
            on_step=step,
            schemas=Schemas(LogSchemas(self.log, self.names), retry_after=0),
        )
        # A step that never fills would wait for ever: the test is to fail then, not to hang.
        guard = threading.Timer(60, trainer.stop)
        guard.start()
        trainer.run(model)
        guard.cancel()
        return receipts

    def letters(self) -> list[Record]:
        return list(scan(self.log, self.log.partitions(self.names.dead_letter)))


def write_by(text: str, body: dict[str, Any]) -> bytes:
    stream = io.BytesIO(struct.pack(">BI", 0, schema_id(text)))
    stream.seek(0, io.SEEK_END)
    AVRO.schemaless_writer(stream, AVRO.parse_schema(json.loads(text)), body)
    return stream.getvalue()


@pytest.fixture
def run(log: Log, names: Names) -> Run:
    publish_schemas(log, names)
    return Run(log, names, MemoryStore())


def test_case_6_two_releases_on_one_topic(run: Run, episode: Episode, policy_dir: Path, tmp_path: Path) -> None:
    """A v2 record before its schema is known is a dead letter; once that is published both releases train."""
    assert full_problems(V1, V2) == ()
    early = run.put(episode("early", 0, size=1), V2, judge="ann")

    def go_on(receipt: Receipt) -> None:
        if receipt.step == 0:
            run.put(episode("first", 0))
            run.put(episode("first", 1))
        if receipt.step == 1:
            run.publish(V2)
            for group in ("second", "third"):
                run.put(episode(group, 0), V2, judge="ann")
                run.put(episode(group, 1))
        if receipt.step == 3:
            # A status that this release does not know is never trained on; its group is told so.
            run.put(episode("fourth", 0), V2, judge=None, status="EXPIRED")
            run.put(episode("fourth", 1), V2, judge=None)
            run.put(episode("fourth", 2, size=3))

    receipts = run.train(policy_dir, tmp_path, 4, go_on)
    trained = [receipt.groups for receipt in receipts if receipt.step]
    assert [group for groups in trained for group in groups if group != "early"][:3] == ["first", "second", "third"]
    (letter,) = run.letters()
    assert letter.headers[deadletters.REASON] == b"unknown-schema"
    assert letter.headers[deadletters.OFFSET] == str(early.offset).encode()
    assert str(schema_id(V2)).encode() in letter.headers[deadletters.ERROR]
    verdict = audit(run.log, run.names, "run", Checkpoints(run.store, "run"))
    assert (verdict.trained, verdict.lost, verdict.twice) == (6, 0, 0)
    assert verdict.dropped["unknown-schema"] == 1


def test_case_6_incompatible_release(run: Run, episode: Episode, policy_dir: Path, tmp_path: Path) -> None:
    """Its schema came to the topic past every check, and is no use: each record is a dead letter; others train."""
    assert full_problems(V1, BROKEN)
    run.publish(BROKEN)

    def go_on(receipt: Receipt) -> None:
        if receipt.step == 0:
            body = to_body(episode("broken", 0))
            run.put(episode("broken", 0), BROKEN, ids=body["tokens"])
            run.put(episode("good", 0))
            run.put(episode("good", 1))

    receipts = run.train(policy_dir, tmp_path, 1, go_on)
    assert "good" in receipts[-1].groups
    (letter,) = run.letters()
    assert letter.headers[deadletters.REASON] == b"unknown-schema"
    assert b"cannot be read by this release: Trajectory.tokens" in letter.headers[deadletters.ERROR]


def test_case_6_incompatible_refused_when_published(log: Log, names: Names) -> None:
    """A release that cannot live beside what is on the log publishes nothing, and is told what is wrong with it."""
    with log.writer() as writer:
        writer.append(names.schemas, BROKEN.encode(), key=str(schema_id(BROKEN)).encode()).result(40)
    with pytest.raises(LogError, match=r"trajectory\.v1 cannot live beside .*Trajectory\.tokens: is") as refused:
        publish_schemas(log, names)
    assert "Nothing was published" in str(refused.value)
    assert LogSchemas(log, names).known() == {schema_id(BROKEN): BROKEN}
