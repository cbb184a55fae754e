"""The stack with its real servers: they are reached on loopback only, go on where they were, and never stay behind."""

import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from rollstream.infra import stack
from rollstream.infra.config import Config
from rollstream.infra.s3 import S3Store
from rollstream.infra.stack import AlreadyUp, Endpoints, LocalStack, StackError, find_obstacle
from rollstream.infra.stack.process import Process, await_ends, is_alive
from rollstream.infra.stack.state import load_state
from rollstream.infra.store import StoreError

TOPIC = "things"
OWNER = """
import sys, time
from pathlib import Path
from typing import Any
from rollstream.infra.stack import LocalStack
with LocalStack(Path(sys.argv[1])) as stack:
    print("up", flush=True)
    time.sleep(600)
"""

need_kafka = pytest.mark.skipif(find_obstacle("kafka") is not None, reason=find_obstacle("kafka") or "")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A folder for a stack; whatever a failing test leaves running there is ended."""
    yield tmp_path / "stack"
    stack.down(tmp_path / "stack")


# ---------------------------------------------------------------------- helpers


def open_bucket(ends: Endpoints) -> S3Store:
    return S3Store(ends.bucket, url=ends.s3_url, access_key=ends.access_key, secret_key=ends.secret_key, patience=5.0)


def make_topic(ends: Endpoints, replicas: int = 1) -> None:
    admin: Any = AdminClient({"bootstrap.servers": ends.bootstrap})
    for future in admin.create_topics([NewTopic(TOPIC, 1, replicas)]).values():
        future.result(30)


def write_records(ends: Endpoints, values: list[str]) -> None:
    """Append and wait until each is acknowledged by all in-sync replicas."""
    failures: list[object] = []
    settings = {"bootstrap.servers": ends.bootstrap, "acks": "all", "enable.idempotence": True, "log_level": 0}
    producer = Producer(settings)
    for value in values:
        producer.produce(TOPIC, value, on_delivery=lambda error, _: failures.append(error) if error else None)
    assert producer.flush(60) == 0
    assert failures == []


def read_records(ends: Endpoints, count: int) -> list[str]:
    consumer = Consumer({"bootstrap.servers": ends.bootstrap, "group.id": "reader", "log_level": 0})
    consumer.assign([TopicPartition(TOPIC, 0, 0)])
    try:
        messages = consumer.consume(count, timeout=60)
        assert all(message.error() is None for message in messages)
        return [(message.value() or b"").decode() for message in messages]
    finally:
        consumer.close()


def listening_addresses(pid: int) -> set[str]:
    """Addresses on which this process listens, as /proc tells it."""
    sockets = {link.name for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    inodes = {str(Path(f"/proc/{pid}/fd/{name}").readlink()) for name in sockets}
    found: set[str] = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add(spell_address(fields[1].split(":")[0]))
    return found


def spell_address(raw: str) -> str:
    words = [struct.pack("=I", int(raw[start : start + 8], 16)) for start in range(0, len(raw), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, b"".join(words))


def server_processes(directory: Path) -> list[Process]:
    state = load_state(directory)
    assert state is not None
    return [process for child in state.children.values() for process in (child.guard, child.server)]


# ---------------------------------------------------------------------- what is reachable


@pytest.mark.parametrize("fixture", ["stack_tansu", "stack_kafka"])
def test_every_server_listens_on_loopback_only(fixture: str, request: pytest.FixtureRequest) -> None:
    local: LocalStack = request.getfixturevalue(fixture)
    for name in local.components:
        addresses = listening_addresses(local.pid(name))
        assert addresses, f"{name} listens nowhere"
        assert addresses <= {"127.0.0.1", "::ffff:127.0.0.1"}


def test_keys_are_needed(stack_tansu: LocalStack) -> None:
    ends = stack_tansu.endpoints
    stranger = S3Store(ends.bucket, url=ends.s3_url, access_key="other", secret_key="other", patience=5.0)
    with pytest.raises(StoreError, match="refuses these credentials"):
        stranger.list()
    stranger.close()


def test_bucket_with_a_typing_error_is_not_made(stack_tansu: LocalStack) -> None:
    ends = stack_tansu.endpoints
    wrong = S3Store("rolstream", url=ends.s3_url, access_key=ends.access_key, secret_key=ends.secret_key, patience=5.0)
    with pytest.raises(StoreError, match="the bucket does not exist"):
        wrong.put("a", b"x")
    wrong.close()


# ---------------------------------------------------------------------- lives of a stack


def test_life_of_a_stack_in_the_foreground(home: Path, stack_tansu: LocalStack) -> None:
    """Beside another stack: start, crash of each server, stop, start again; nothing is lost, no port changes."""
    told: list[str] = []
    local = LocalStack(home)
    ends = local.start(told.append)
    assert [line.split(":")[0] for line in told if "answers on port" in line] == ["store", "broker-1"]
    assert ends.bootstrap != stack_tansu.endpoints.bootstrap
    assert ends.secret_key not in f"{ends!r} {local!r} {told}"
    store = open_bucket(ends)
    store.put("a", b"before")
    make_topic(ends)
    write_records(ends, ["1", "2"])

    with pytest.raises(AlreadyUp, match=r"started by process \d+"):
        LocalStack(home).start()

    crashed = local.pid("broker-1")
    local.kill("broker-1")
    assert [(c.name, c.alive, c.answering) for c in stack.status(home)] == [
        ("store", True, True),
        ("broker-1", False, False),
    ]
    local.restart("broker-1")
    assert local.pid("broker-1") != crashed
    write_records(ends, ["3"])

    local.kill("store")
    with pytest.raises(StoreError) as caught:
        open_bucket(ends).get("a")
    assert caught.value.retriable
    local.restart("store")
    assert store.get("a").data == b"before"
    write_records(ends, ["4"])
    assert read_records(ends, 4) == ["1", "2", "3", "4"]

    processes = server_processes(home)
    local.stop()
    local.stop()
    assert not [process for process in processes if is_alive(process)]
    assert stack.status(home) == ()

    with LocalStack(home) as again:
        assert again.endpoints == ends
        assert store.get("a").data == b"before"
        write_records(ends, ["5"])
        assert read_records(ends, 5) == ["1", "2", "3", "4", "5"]
    store.close()
    assert all(component.answering for component in stack.status(stack_tansu.directory))


def test_life_of_a_stack_in_the_background(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `rollstream up`, `status` and `down` do it, each a process of its own."""
    call = "import sys; from pathlib import Path; from rollstream.infra import stack; stack.{}(Path(sys.argv[1]))"
    subprocess.run((sys.executable, "-c", call.format("up"), str(home)), check=True, timeout=120)
    components = stack.status(home)
    assert [(c.name, c.alive, c.answering) for c in components] == [("store", True, True), ("broker-1", True, True)]
    with pytest.raises(AlreadyUp, match="in the background") as caught:
        stack.up(home)

    config = Config.load(home / "rollstream.toml", environ={})
    assert (config.kafka.bootstrap, config.kafka.group_protocol) == (caught.value.endpoints.bootstrap, "classic")
    store = S3Store.from_config(config.store)
    store.put("a", b"x")
    store.close()

    processes = server_processes(home)
    subprocess.run((sys.executable, "-c", call.format("down"), str(home)), check=True, timeout=60)
    assert not [process for process in processes if is_alive(process)]
    assert stack.status(home) == ()
    assert stack.down(home) == ()
    assert not (home / "rollstream.toml").exists()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_its_owner(home: Path, how: signal.Signals) -> None:
    owner = subprocess.Popen((sys.executable, "-c", OWNER, str(home)), stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout as told:
        assert told.readline() == "up\n"
    processes = server_processes(home)
    assert len(processes) == 4
    assert all(is_alive(process) for process in processes)
    owner.send_signal(how)
    owner.wait()
    assert await_ends(processes, 30) == ()
    assert not any(component.alive for component in stack.status(home))
    if how is signal.SIGKILL:
        with LocalStack(home) as again:
            assert all(component.answering for component in stack.status(home))
            assert load_state(home) is not None
            assert again.pid("store") not in [process.pid for process in processes]


def test_failed_start_leaves_nothing_and_quotes_the_log(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = home.parent / "tansu"
    script.write_text("#!/bin/sh\necho no storage today >&2\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr("rollstream.infra.stack.tansu.find_tansu", lambda: str(script))
    local = LocalStack(home)
    with pytest.raises(StackError, match=r"(?s)broker-1 ended.*broker-1\.log:.*no storage today"):
        local.start()
    assert stack.status(home) == ()
    log = (home / "logs" / "store.log").read_text()
    assert "guard: weed" in log, "the store had been started, and was ended"


# ---------------------------------------------------------------------- Apache Kafka


@need_kafka
def test_kafka_goes_on_after_a_restart(home: Path) -> None:
    with LocalStack(home, broker="kafka") as local:
        ends = local.endpoints
        assert (ends.broker, ends.group_protocol) == ("kafka", "consumer")
        make_topic(ends)
        write_records(ends, ["1"])
        local.kill("broker-1")
        local.restart("broker-1")
        write_records(ends, ["2"])
    with pytest.raises(StackError, match="a Kafka with 1 broker"):
        LocalStack(home, broker="kafka", brokers=3).start()
    with LocalStack(home, broker="kafka") as again:
        assert again.endpoints == ends
        assert read_records(ends, 2) == ["1", "2"]


@need_kafka
def test_three_brokers_survive_the_death_of_one(home: Path) -> None:
    with LocalStack(home, broker="kafka", brokers=3) as local:
        ends = local.endpoints
        assert len(ends.bootstrap.split(",")) == 3
        make_topic(ends, replicas=3)
        write_records(ends, ["1"])
        local.kill("broker-1")
        write_records(ends, ["2"])
        local.restart("broker-1")
        assert all(component.answering for component in stack.status(home))
        assert read_records(ends, 2) == ["1", "2"]
