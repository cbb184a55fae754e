"""What a stack's folder fixes once and keeps over restarts: ports, keys, the Kafka cluster's id and its broker count.

DIRECTORY/
  plan.json         this
  state.json        what runs now (state.py)
  rollstream.toml   endpoints of what runs now, for the other commands
  logs/NAME.log     output of each server
  NAME/             its data
"""

import json
import os
import secrets
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from .endpoints import StackError
from .ports import is_free, pick_ports

FILE = "plan.json"
STORE_PORTS = ("s3", "s3-grpc", "master", "master-grpc", "volume", "volume-grpc", "filer", "filer-grpc")


def broker_name(node: int) -> str:
    """Name of a broker's component, `broker-1` the first."""
    return f"broker-{node}"


def _port_names(brokers: int) -> tuple[str, ...]:
    names = (broker_name(node) for node in range(1, brokers + 1))
    return STORE_PORTS + tuple(part for name in names for part in (name, f"{name}-controller"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The lasting choices of one folder."""

    ports: Mapping[str, int]
    access_key: str
    secret_key: str = field(repr=False)
    cluster: str
    """16 random bytes, url-safe base64 without padding, as Kafka wants it."""
    kafka_brokers: int = 0
    """Brokers of the Kafka whose data lie here; 0: none yet."""


def new_plan() -> Plan:
    return Plan(
        ports={},
        access_key=secrets.token_hex(10),
        secret_key=secrets.token_hex(20),
        # The first byte keeps it from beginning with a dash, which every command line takes for an option.
        cluster=urlsafe_b64encode(b"\0" + secrets.token_bytes(15)).decode().rstrip("="),
    )


def load_plan(directory: Path) -> Plan | None:
    """The folder's plan; None where none was made yet."""
    try:
        return Plan(**json.loads((directory / FILE).read_text()))
    except FileNotFoundError:
        return None


def settle_plan(directory: Path, *, kafka_brokers: int) -> Plan:
    """Read the folder's plan or make one, and give it free ports, the old ones where they are still free.

    `kafka_brokers` is 0 for Tansu. Raises `StackError` where it differs from the Kafka that the folder already holds.
    """
    plan = load_plan(directory) or new_plan()
    if kafka_brokers and plan.kafka_brokers not in (0, kafka_brokers):
        raise StackError(
            f"{directory} holds the data of a Kafka with {plan.kafka_brokers} broker(s), {kafka_brokers} asked for: "
            f"start it with {plan.kafka_brokers}, or take another directory"
        )
    plan = replace(
        plan,
        ports=_settle_ports(plan.ports, _port_names(kafka_brokers or 1)),
        kafka_brokers=kafka_brokers or plan.kafka_brokers,
    )
    write_private(directory / FILE, json.dumps(asdict(plan), indent=2))
    return plan


def _settle_ports(old: Mapping[str, int], names: tuple[str, ...]) -> dict[str, int]:
    kept = {name: old[name] for name in names if name in old and is_free(old[name])}
    missing = [name for name in names if name not in kept]
    fresh = dict(zip(missing, pick_ports(len(missing), avoid=set(old.values())), strict=True))
    return {**old, **kept, **fresh}


def write_private(path: Path, text: str) -> None:
    """Replace a file at once, readable by its owner only: it holds keys."""
    draft = path.with_name(path.name + ".draft")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(text)
    draft.replace(path)
