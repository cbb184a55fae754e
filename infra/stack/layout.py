"""Which servers a stack has, and what it offers once they run."""

from collections.abc import Sequence
from pathlib import Path

from ...schemas.errors import MissingExtra
from .component import Component
from .endpoints import Broker, Endpoints, StackError
from .kafka import find_java, find_kafka, kafka_components
from .plan import Plan, broker_name
from .ports import LOOPBACK
from .seaweed import RUN_BUCKET, STORE, find_weed, store_component, store_url
from .tansu import find_tansu, tansu_component


def component_names(brokers: int) -> tuple[str, ...]:
    """In the order of their start."""
    return (STORE, *(broker_name(node) for node in range(1, brokers + 1)))


def plan_components(directory: Path, plan: Plan, broker: Broker) -> Sequence[Component]:
    """The store first, then the brokers. Raises `StackError`, `MissingExtra` where something to run them is missing."""
    brokers = kafka_components(directory, plan) if broker == "kafka" else [tansu_component(directory, plan)]
    return [store_component(directory, plan), *brokers]


def find_obstacle(broker: Broker) -> str | None:
    """Why this machine cannot run such a stack, and what to do about it; None where nothing is missing."""
    try:
        find_weed()
        if broker == "kafka":
            find_kafka()
            find_java()
        else:
            find_tansu()
    except (StackError, MissingExtra) as error:
        return str(error)
    return None


def plan_endpoints(plan: Plan, broker: Broker) -> Endpoints:
    nodes = range(1, 1 + (plan.kafka_brokers if broker == "kafka" else 1))
    return Endpoints(
        bootstrap=",".join(f"{LOOPBACK}:{plan.ports[broker_name(node)]}" for node in nodes),
        broker=broker,
        s3_url=store_url(plan),
        access_key=plan.access_key,
        secret_key=plan.secret_key,
        bucket=RUN_BUCKET,
        group_protocol="consumer" if broker == "kafka" else "classic",
    )
