"""A Schema Registry: its ids on the wire, and what happens when it is away, knows nothing, or forgets.

The same tests run against a small one in this process and, where REGISTRY_HOME has it, against Apicurio Registry.
"""

import base64
import json
import os
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import pytest

from rollstream.consumers.audit import audit
from rollstream.consumers.ledger import Ledger
from rollstream.consumers.trainer import Trainer, TrainerSettings
from rollstream.infra.checkpoints import Checkpoints
from rollstream.infra.config import Config, ConfigError, RegistrySection
from rollstream.infra.kafka import KafkaLog
from rollstream.infra.log import Log
from rollstream.infra.memory import MemoryLog
from rollstream.infra.registry import COMPATIBILITY, MISS_TRIES, Registry, RegistryError
from rollstream.infra.scan import scan
from rollstream.infra.schemabook import LogSchemas, open_schemas, publish_schemas
from rollstream.infra.stack import LocalStack
from rollstream.infra.stack.kafka import find_java
from rollstream.infra.stack.ports import LOOPBACK
from rollstream.infra.store import MemoryStore
from rollstream.infra.topics import Names, declared
from rollstream.schemas import (
    MissingExtra,
    SchemaAway,
    Schemas,
    Trajectory,
    UnknownSchema,
    decode_as,
    encode,
    framed_id,
    full_problems,
    record_schemas,
    schema_id,
    trajectory_headers,
)
from rollstream.schemas.shape import parse_text

pytest.importorskip("authlib", reason="the extra 'registry' is not installed: pip install 'rollstream[registry]'")

Episode = Callable[..., Trajectory]
Connect = Callable[..., Registry]
PATIENCE = 60.0
SHIPPED = {shipped.name: shipped for shipped in record_schemas()}


class Server(Protocol):
    """A registry that is started, killed and started again on its port. It keeps its schemas in memory only."""

    url: str

    def start(self) -> None: ...

    def kill(self) -> None: ...


# ------------------------------------------------------------------ a registry in this process


@dataclass
class Shelf:
    """What one life of it knows."""

    texts: list[str] = field(default_factory=list[str])
    subjects: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    levels: dict[str, str] = field(default_factory=dict[str, str])
    guard: Callable[[str | None], bool] = lambda _: True
    """Whether an Authorization header is let in."""

    def answer(self, method: str, path: list[str], body: dict[str, Any]) -> tuple[int, object]:
        answer: tuple[int, object] = 404, {"error_code": 404, "message": "HTTP 404 Not Found"}
        match method, path:
            case "PUT", ["config", subject]:
                self.levels[subject] = body["compatibility"]
                answer = 200, body
            case "GET", ["config", subject]:
                answer = 200, {"compatibilityLevel": self.levels[subject]}
            case "GET", ["schemas", "ids", number] if 0 < int(number) <= len(self.texts):
                answer = 200, {"schema": self.texts[int(number) - 1], "id": int(number)}
            case "GET", ["schemas", "ids", _]:
                answer = 404, {"error_code": 40403, "message": "Schema not found"}
            case "POST", ["subjects", subject, "versions"]:
                answer = self._register(subject, body["schema"])
            case _, ["subjects", subject, *_] if subject not in self.subjects:
                answer = 404, {"error_code": 40401, "message": f"Subject '{subject}' not found."}
            case "GET", ["subjects", subject, "versions"]:
                answer = 200, list(range(1, len(self.subjects[subject]) + 1))
            case "GET", ["subjects", subject, "versions", number]:
                answer = 200, self._described(subject, int(number))
            case "POST", ["subjects", subject]:
                answer = self._find(subject, body["schema"])
            case _:
                pass
        return answer

    def _find(self, subject: str, text: str) -> tuple[int, object]:
        for version, there in enumerate(self.subjects[subject], start=1):
            if schema_id(self.texts[there - 1]) == schema_id(text):
                return 200, self._described(subject, version)
        return 404, {"error_code": 40403, "message": "Schema not found"}

    def _described(self, subject: str, version: int) -> dict[str, object]:
        number = self.subjects[subject][version - 1]
        return {"subject": subject, "version": version, "id": number, "schema": self.texts[number - 1]}

    def _register(self, subject: str, text: str) -> tuple[int, object]:
        versions = self.subjects.setdefault(subject, [])
        for number in versions:
            if schema_id(self.texts[number - 1]) == schema_id(text):
                return 200, {"id": number}
            if problems := full_problems(self.texts[number - 1], text):
                return 409, {"error_code": 409, "message": f"incompatible: {problems[0]}"}
        self.texts.append(json.dumps(json.loads(text)))
        versions.append(len(self.texts))
        return 200, {"id": len(self.texts)}


class Small:
    """A registry of a few lines, for machines without a real one."""

    def __init__(self) -> None:
        self.shelf = Shelf()
        self._server: ThreadingHTTPServer | None = None
        self._port = 0
        self.start()
        self.url = f"http://{LOOPBACK}:{self._port}"

    def start(self) -> None:
        shelf = self.shelf = Shelf()

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                body: dict[str, Any] = json.loads(self.rfile.read(size)) if size else {}
                path = self.path.partition("?")[0].strip("/").split("/")
                status, told = shelf.answer(self.command, path, body)
                if not shelf.guard(self.headers.get("Authorization")):
                    status, told = 401, {"error_code": 401, "message": "no"}
                data = json.dumps(told).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = answer

            def log_message(self, format: str, *args: object) -> None:
                """Keep the tests' output quiet."""

        self._server = ThreadingHTTPServer((LOOPBACK, self._port), Handler)
        self._server.daemon_threads = True
        self._port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def kill(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


# ------------------------------------------------------------------ the real one


class Apicurio:
    """Apicurio Registry from REGISTRY_HOME."""

    def __init__(self, home: Path, java: str, scratch: Path, port: int) -> None:
        self._home, self._java, self._scratch, self._port = home, java, scratch, port
        self.url = f"http://{LOOPBACK}:{port}/apis/ccompat/v7"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {
            **os.environ,
            "APICURIO_STORAGE_KIND": "sql",
            "QUARKUS_HTTP_HOST": LOOPBACK,
            "QUARKUS_HTTP_PORT": str(self._port),
        }
        options = ("-Xmx400m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
        with (self._scratch / "registry.log").open("ab") as log:
            self._process = subprocess.Popen(
                (self._java, *options, "-jar", str(self._home / "quarkus-run.jar")),
                cwd=self._scratch,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        until = time.monotonic() + 2 * PATIENCE
        while not self._answers():
            assert self._process.poll() is None, (self._scratch / "registry.log").read_text()
            assert time.monotonic() < until, "the registry does not answer"
            time.sleep(0.1)

    def forget(self) -> None:
        """Run, and know nothing."""
        if self._process is None:
            self.start()
        with urllib.request.urlopen(f"{self.url}/subjects", timeout=30) as answer:
            subjects = json.load(answer)
        for subject in subjects:
            for permanent in ("false", "true"):
                place = f"{self.url}/subjects/{subject}?permanent={permanent}"
                with urllib.request.urlopen(urllib.request.Request(place, method="DELETE"), timeout=30):
                    pass

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/subjects", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@pytest.fixture(scope="module")
def apicurio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apicurio]:
    home = os.environ.get("REGISTRY_HOME")
    if not home:
        pytest.skip("REGISTRY_HOME is not set: point it at an unpacked Apicurio Registry 3")
    try:
        java = find_java(21)
    except MissingExtra as missing:
        pytest.skip(str(missing))
    server = Apicurio(Path(home).absolute(), java, tmp_path_factory.mktemp("registry"), free_port())
    yield server
    server.kill()


def free_port() -> int:
    with ThreadingHTTPServer((LOOPBACK, 0), BaseHTTPRequestHandler) as server:
        return server.server_port


@pytest.fixture(params=["small", "apicurio"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A registry that runs and knows nothing."""
    if request.param == "small":
        small = Small()
        yield small
        small.kill()
        return
    real: Apicurio = request.getfixturevalue("apicurio")
    real.forget()
    yield real


RESTARTED = pytest.mark.parametrize(
    "server", ["small", pytest.param("apicurio", marks=pytest.mark.slow)], indirect=True
)
"""Where a start of the real one costs the test tens of seconds."""


@pytest.fixture
def small() -> Iterator[Small]:
    server = Small()
    yield server
    server.kill()


@pytest.fixture
def connect() -> Iterator[Connect]:
    """`connect(server, **settings)`: a client of it, as the configuration makes one."""
    with ExitStack() as stack:

        def make(server: Server, **settings: Any) -> Registry:
            given: dict[str, Any] = {"patience": 0.0} | settings
            registry = Registry.from_config(RegistrySection(url=server.url, **given))
            assert registry is not None
            return stack.enter_context(closing(registry))

        yield make


@pytest.fixture
def registry(server: Server, connect: Connect) -> Registry:
    return connect(server)


def memory_log(namespace: str = "m") -> tuple[MemoryLog, Names]:
    log = MemoryLog()
    for topic in declared(namespace, {"maze": 2}):
        log.create(topic)
    return log, Names(namespace)


def edited(name: str, edit: Callable[[dict[str, Any]], object]) -> str:
    schema = json.loads(SHIPPED[name].text)
    edit(schema)
    return json.dumps(schema)


def add_field(schema: dict[str, Any]) -> None:
    schema["fields"].append({"name": "judge", "type": "string", "default": "", "doc": "x"})


def post(server: Server, subject: str, text: str) -> int:
    """What somebody else registers."""
    request = urllib.request.Request(
        f"{server.url}/subjects/{subject}/versions",
        json.dumps({"schema": text}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return int(json.load(answer)["id"])


def get(server: Server, path: str) -> Any:
    with urllib.request.urlopen(f"{server.url}/{path}", timeout=30) as answer:
        return json.load(answer)


# ------------------------------------------------------------------ registering and looking up


def test_register_then_look_up(server: Server, registry: Registry, connect: Connect) -> None:
    with pytest.raises(
        RegistryError, match=r"has no claim.v1, control.v1, .* `rollstream topics apply` registers them"
    ):
        registry.look_up()
    ids = registry.register()
    assert ids.keys() == {shipped.id for shipped in record_schemas()}
    assert len(set(ids.values())) == len(ids)
    assert registry.register() == ids
    assert connect(server).look_up() == ids
    for shipped in record_schemas():
        subject = f"rollstream.{parse_text(shipped.text)['name'].removeprefix('rollstream.')}"
        assert get(server, f"config/{subject}")["compatibilityLevel"] == COMPATIBILITY
        assert parse_text(registry.fetch(ids[shipped.id])) == parse_text(shipped.text)


def test_incompatible_refused(server: Server, registry: Registry) -> None:
    """Somebody registered a Task that this release's cannot live beside: nothing is written by a guess."""

    def rename(schema: dict[str, Any]) -> None:
        schema["fields"][0]["name"] = "renamed"

    post(server, "rollstream.Task", edited("task.v1", rename))
    with pytest.raises(RegistryError, match=r"not compatible with what is registered: .*`rollstream schemas check`"):
        registry.register()


def test_incompatible_next_version_refused(server: Server, registry: Registry) -> None:
    """Once `register` was there, nobody gets a version past it that old readers cannot read."""
    registry.register()
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(server, "rollstream.Trajectory", edited("trajectory.v1", lambda s: s["fields"].pop(0)))
    refused.value.close()
    assert refused.value.code == 409


def test_unknown_id(registry: Registry) -> None:
    with pytest.raises(UnknownSchema) as missed:
        registry.fetch(2**31 - 1)
    assert missed.value.reason == "unknown-schema"


def test_unknown_id_is_asked_for_again(small: Small, connect: Connect) -> None:
    """What was registered just now may not have come to the server that is asked: a miss is no miss at once."""
    text, waits = edited("task.v1", add_field), list[float]()

    def appear(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == MISS_TRIES - 1:
            post(small, "rollstream.Task", text)

    registry = connect(small)
    registry._sleep = appear  # pyright: ignore[reportPrivateUsage]
    assert schema_id(registry.fetch(1)) == schema_id(text)
    assert len(waits) == MISS_TRIES - 1


def test_wrong_address_is_no_miss(small: Small, connect: Connect) -> None:
    """A path that is none answers 404 to everything: to take that for a miss would dead-letter the whole log."""
    small.url += "/nowhere"
    with pytest.raises(RegistryError, match=r"expected Confluent's Schema Registry API at http://.*/nowhere"):
        connect(small).fetch(1)


# ------------------------------------------------------------------ away


def test_away_at_start(server: Server, connect: Connect) -> None:
    server.kill()
    with pytest.raises(SchemaAway, match=f"no answer of the Schema Registry at {server.url}"):
        connect(server).look_up()


@RESTARTED
def test_away_at_start_is_waited_for(server: Server, caplog: pytest.LogCaptureFixture, connect: Connect) -> None:
    server.kill()
    found = dict[int, int]()
    registry = connect(server, patience=2 * PATIENCE)
    asking = threading.Thread(target=lambda: found.update(registry.register()))
    with caplog.at_level("WARNING", "rollstream"):
        asking.start()
        server.start()
        asking.join(2 * PATIENCE)
    assert found.keys() == {shipped.id for shipped in record_schemas()}
    assert connect(server).look_up() == found


def test_away_is_left_alone_for_a_while(small: Small, connect: Connect) -> None:
    """Who asks meanwhile is told so at once, with nothing sent; each time the pause is longer, up to a bound."""
    now, asked = [0.0], list[float]()
    registry = connect(small)
    client: Any = registry._client  # pyright: ignore[reportPrivateUsage]
    real = client.get_schema

    def get_schema(schema_id: int) -> object:
        asked.append(now[0])
        return real(schema_id)

    client.get_schema = get_schema
    registry._clock = lambda: now[0]  # pyright: ignore[reportPrivateUsage]
    small.kill()
    while now[0] < 300:
        with pytest.raises(SchemaAway):
            registry.fetch(1)
        now[0] += 0.05
    gaps = [later - earlier for earlier, later in pairwise(asked)]
    assert len(asked) < 40
    assert gaps[0] <= 0.25 < max(gaps) <= 20.1
    small.start()
    ids = dict[int, int]()
    now[0] += 20
    ids = registry.register()
    assert registry.fetch(ids[SHIPPED["task.v1"].id])
    assert registry.fetch(ids[SHIPPED["task.v1"].id])


def test_away_in_mid_run(server: Server, registry: Registry, episode: Episode, connect: Connect) -> None:
    """What the process knows goes on; an id that it does not know is no miss, and is read once the registry is back."""
    log, names = memory_log()
    publish_schemas(log, names, registry.register())
    schemas = open_schemas(log, names, registry)
    known = encode(episode("a", 0), schemas=schemas)
    server.kill()
    assert decode_as(Trajectory, encode(episode("a", 1), schemas=schemas), schemas=schemas).sample_index == 1
    with pytest.raises(SchemaAway):
        schemas.resolve(7_000)
    assert decode_as(Trajectory, known, schemas=schemas).sample_index == 0

    server.start()
    again = connect(server)
    again.register()
    newer = post(server, "rollstream.Trajectory", edited("trajectory.v1", add_field))
    assert open_schemas(log, names, again).resolve(newer).kind == "Trajectory"
    with pytest.raises(UnknownSchema):
        open_schemas(log, names, again).resolve(7_000)


def test_reader_without_registry(server: Server, registry: Registry, episode: Episode, connect: Connect) -> None:
    """The log itself tells the registry's ids of what was shipped: tools read it while the registry is away."""
    log, names = memory_log()
    publish_schemas(log, names, registry.register())
    value = encode(episode("a", 0), schemas=open_schemas(log, names, registry))
    server.kill()
    assert framed_id(value) != SHIPPED["trajectory.v1"].id
    for schemas in (Schemas(LogSchemas(log, names)), Schemas(LogSchemas(log, names, connect(server)))):
        assert decode_as(Trajectory, value, schemas=schemas).group_id == "a"


# ------------------------------------------------------------------ a registry that forgets


@RESTARTED
def test_forgotten_ids_found_out(server: Server, registry: Registry, episode: Episode, connect: Connect) -> None:
    """Started again it knows nothing, and gives its ids away in another order. Nobody writes by them on this log."""
    log, names = memory_log()
    publish_schemas(log, names, registry.register())
    before = open_schemas(log, names, registry)
    old = encode(episode("a", 0), schemas=before)
    server.kill()
    server.start()
    for shipped in reversed(record_schemas()):
        post(server, parse_text(shipped.text)["name"], shipped.text)
    again = connect(server)
    with pytest.raises(RegistryError, match=r"lost its memory, or is another registry .* Restore its data"):
        open_schemas(log, names, again)
    with pytest.raises(RegistryError, match="lost its memory"):
        publish_schemas(log, names, again.register())
    # Neither those that run, nor those that only read, are misled by it.
    for schemas in (before, Schemas(LogSchemas(log, names, again))):
        assert decode_as(Trajectory, old, schemas=schemas).group_id == "a"


@RESTARTED
def test_forgotten_and_registered_alike(server: Server, episode: Episode, connect: Connect) -> None:
    """Where the ids come out as before, or as none that was ever used, the log goes on."""
    server.kill()
    server.start()
    registry = connect(server)
    log, names = memory_log()
    ids = registry.register()
    publish_schemas(log, names, ids)
    old = encode(episode("a", 0), schemas=open_schemas(log, names, registry))
    server.kill()
    server.start()
    again = connect(server)
    assert again.register() == ids
    assert decode_as(Trajectory, old, schemas=open_schemas(log, names, again)).group_id == "a"


# ------------------------------------------------------------------ the loop by the registry's ids


def test_switched_on_over_a_living_log(small: Small, episode: Episode, connect: Connect) -> None:
    """Records from before the registry, by ids of their own, are read beside those with its ids."""
    log, names = memory_log()
    publish_schemas(log, names)
    registry = connect(small)
    old = encode(episode("a", 0), schemas=open_schemas(log, names))
    publish_schemas(log, names, registry.register())
    schemas = open_schemas(log, names, registry)
    new = encode(episode("a", 1), schemas=schemas)
    assert [framed_id(value) for value in (old, new)] == [
        SHIPPED["trajectory.v1"].id,
        registry.look_up()[SHIPPED["trajectory.v1"].id],
    ]
    assert [decode_as(Trajectory, value, schemas=schemas).sample_index for value in (old, new)] == [0, 1]
    # And switched off again.
    assert decode_as(Trajectory, new, schemas=open_schemas(log, names)).sample_index == 1


def test_auto_register(small: Small, connect: Connect) -> None:
    log, names = memory_log()
    with pytest.raises(RegistryError, match=r"registry\.auto_register"):
        open_schemas(log, names, connect(small))
    schemas = open_schemas(log, names, connect(small), auto_register=True)
    assert schemas.current("Task").id == connect(small).look_up()[SHIPPED["task.v1"].id]


def train(log: Log, names: Names, schemas: Schemas, model: Path, scratch: Path, store: MemoryStore) -> Trainer:
    settings = TrainerSettings(environments={"maze": 1.0}, groups_per_step=2, max_staleness=100, until_end=True)
    trainer = Trainer(log, names, "run", Checkpoints(store, "run"), settings, scratch=scratch, schemas=schemas)
    trainer.run(model)
    return trainer


def ids_of(log: Log, topic: str) -> set[int | None]:
    return {framed_id(record.value or b"") for record in scan(log, log.partitions(topic))}


def test_trains_by_the_registrys_ids(
    log: Log, names: Names, small: Small, episode: Episode, policy_dir: Path, tmp_path: Path, connect: Connect
) -> None:
    """A step of trajectories, receipt and policy by the registry's ids, on every log; the audit reads them."""
    registry = connect(small)
    ids = registry.register()
    publish_schemas(log, names, ids)
    schemas, store = open_schemas(log, names, registry), MemoryStore()
    with log.writer() as writer:
        for trajectory in (episode(group, index) for group in "ab" for index in range(2)):
            writer.append(
                names.trajectories("maze"),
                encode(trajectory, schemas=schemas),
                key=trajectory.group_id.encode(),
                headers=trajectory_headers(trajectory),
            )
    train(log, names, schemas, policy_dir, tmp_path, store)
    expected = {
        "trajectory.v1": names.trajectories("maze"),
        "receipt.v1": names.ledger,
        "policy_update.v1": names.policy,
    }
    for name, topic in expected.items():
        assert ids_of(log, topic) == {ids[SHIPPED[name].id]}
    small.kill()
    verdict = audit(log, names, "run", Checkpoints(store, "run"))
    assert (verdict.acknowledged, verdict.trained, verdict.lost, verdict.twice) == (4, 4, 0, 0)
    assert [receipt.step for receipt in Ledger(log, names, "run").receipts()] == [0, 1]


def test_unknown_waits_and_others_train(
    small: Small, episode: Episode, policy_dir: Path, tmp_path: Path, connect: Connect
) -> None:
    """The registry is away when a record of a newer release comes: the others train, and then it does, too."""
    log, names = memory_log()
    registry = connect(small)
    publish_schemas(log, names, registry.register())
    schemas, store = open_schemas(log, names, registry), MemoryStore()
    newer = post(small, "rollstream.Trajectory", edited("trajectory.v1", add_field))
    small.kill()

    def put(trajectory: Trajectory, schema: int | None = None) -> None:
        value = encode(trajectory, schemas=schemas)
        if schema is not None:  # the field that was added is the last one, and an empty string is one zero byte
            value = struct.pack(">BI", 0, schema) + value[5:] + b"\0"
        with log.writer() as writer:
            topic, key = names.trajectories("maze"), trajectory.group_id.encode()
            writer.append(topic, value, key=key, headers=trajectory_headers(trajectory), partition=0).result(10)

    put(episode("new", 0), newer)
    put(episode("new", 1), newer)
    for group in "ab":
        for index in range(2):
            put(episode(group, index))
    settings = TrainerSettings(environments={"maze": 1.0}, groups_per_step=1, max_staleness=100, steps=3)
    groups = list[tuple[str, ...]]()

    def on_step(receipt: Any) -> None:
        groups.append(receipt.groups)
        if receipt.step == 2:
            small.start()
            for shipped in record_schemas():
                post(small, parse_text(shipped.text)["name"], shipped.text)
            post(small, "rollstream.Trajectory", edited("trajectory.v1", add_field))

    checkpoints = Checkpoints(store, "run")
    trainer = Trainer(log, names, "run", checkpoints, settings, scratch=tmp_path, on_step=on_step, schemas=schemas)
    guard = threading.Timer(PATIENCE, trainer.stop)
    guard.start()
    trainer.run(policy_dir)
    guard.cancel()
    assert groups == [(), ("a",), ("b",), ("new",)]
    assert list(scan(log, log.partitions(names.dead_letter))) == []
    assert audit(log, names, "run", checkpoints).trained == 6


# ------------------------------------------------------------------ settings


def test_basic_and_bearer(small: Small, connect: Connect) -> None:
    basic = "Basic " + base64.b64encode(b"ann:open sesame").decode()
    for header, settings in (
        (basic, {"user": "ann", "password": "open sesame"}),
        ("Bearer xyz.1", {"token": "xyz.1"}),
    ):
        small.shelf.guard = header.__eq__
        assert connect(small, **settings).register()
        with pytest.raises(RegistryError, match=r"refuses \(HTTP 401\)") as refused:
            connect(small, **{name: value[:-1] for name, value in settings.items()}).fetch(1)
        assert "sesam" not in str(refused.value)
        assert "xyz" not in str(refused.value)


def test_secrets_never_shown() -> None:
    config = Config.load(
        overrides=(
            "registry.url=http://registry:8081",
            "registry.user=ann",
            "registry.password=sesame",
            "registry.token=xyz1",
            'registry.settings={"ssl.key.password" = "sesame"}',
        ),
        environ={},
    )
    for text in (config.show(), repr(config), str(config.registry)):
        assert "sesame" not in text
        assert "xyz1" not in text
    assert 'user = "ann"' in config.show()


def test_credentials_in_the_url_refused() -> None:
    with pytest.raises(ConfigError, match=r"registry\.url: expected a URL without credentials") as refused:
        Config.load(overrides=("registry.url=http://ann:sesame@registry",), environ={})
    assert "sesame" not in str(refused.value)


def test_settings_of_the_client(small: Small, connect: Connect) -> None:
    with pytest.raises(RegistryError, match=r"does not take these settings: Unrecognized properties: no\.such"):
        connect(small, settings={"no.such": "1"})
    assert Registry.from_config(RegistrySection()) is None


def test_extra_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "confluent_kafka.schema_registry", None)
    with pytest.raises(MissingExtra, match=r"rollstream\[registry\]"):
        Registry.from_config(RegistrySection(url="http://registry"))


# ------------------------------------------------------------------ the roles, as processes

GAME = """
from rollstream.producers import Action, Message, Outcome
from rollstream.schemas import Role


class Look:
    name, version = "look", "1"

    async def reset(self, payload, seed):
        return Outcome(messages=(Message(role=Role.USER, content="w1"),))

    async def step(self, action):
        return Outcome(messages=(), done=True, reward=float(action.text == "w2"))

    async def close(self):
        pass


def make(name):
    return Look()
"""


@pytest.mark.slow
def test_the_whole_loop_by_the_registrys_ids(
    stack_tansu: LocalStack, small: Small, connect: Connect, policy_dir: Path, tmp_path: Path
) -> None:
    """Dispatcher, worker and trainer as a user starts them; a step is trained, and the tools read what they wrote."""
    names, config = Names(f"registry-{uuid4().hex[:8]}"), tmp_path / "run.toml"
    (tmp_path / "look_game.py").write_text(GAME)
    config.write_text(
        stack_tansu.endpoints.to_toml().replace("[store]", f'[store]\nprefix = "{names.namespace}/"')
        + f'\n[run]\nname = "small"\nnamespace = "{names.namespace}"\n\n[registry]\nurl = "{small.url}"\n'
        + '\n[environments.look]\nadapter = "look_game:make"\ngroup_size = 4\npartitions = 1\n'
        + "\n[sampling]\nmax_tokens = 1\n\n[trainer]\ngroups_per_step = 2\nmin_informative = 0.0\nsteps = 2\n"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = (sys.executable, "-m", "rollstream.app.main", "-c", str(config), *arguments)
        return subprocess.Popen(command, env=environment, cwd=tmp_path, text=True, stdout=subprocess.PIPE)

    def call(*arguments: str) -> str:
        process = start(*arguments)
        out, _ = process.communicate(timeout=2 * PATIENCE)
        assert process.returncode == 0, arguments
        return out

    call("topics", "apply", "--yes")
    ids = connect(small).look_up()
    roles = [start("train", "--model", str(policy_dir)), start("work"), start("dispatch")]
    try:
        told, _ = roles[0].communicate(timeout=4 * PATIENCE)
        assert roles[0].returncode == 0, told
        for role in roles[1:]:
            role.terminate()
            role.communicate(timeout=PATIENCE)
            assert role.returncode == 0
    finally:
        for role in roles:
            role.kill()
            role.communicate()
    with closing(KafkaLog(stack_tansu.endpoints.bootstrap)) as log:
        topics = {
            "task.v1": names.tasks,
            "trajectory.v1": names.trajectories("look"),
            "receipt.v1": names.ledger,
            "policy_update.v1": names.policy,
        }
        for name, topic in topics.items():
            assert ids_of(log, topic) == {ids[SHIPPED[name].id]}
    small.kill()  # nobody who only reads needs it
    rows = [json.loads(line) for line in call("tail", "--json").splitlines()]
    assert len(rows) >= 8
    assert rows[0]["trajectory_id"] in call("show", rows[0]["trajectory_id"])
    verdict = json.loads(call("audit", "--json"))
    assert (verdict["lost"], verdict["twice"]) == (0, 0)
    assert verdict["trained"] + sum(verdict["dropped"].values()) >= 16
