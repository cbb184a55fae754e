"""Asking a broker who is in its cluster: the proof that it serves clients."""

from collections.abc import Mapping
from typing import Protocol, cast

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from .ports import LOOPBACK, is_open

TIMEOUT = 3.0


class _Metadata(Protocol):
    brokers: Mapping[int, object]


def cluster_nodes(port: int) -> frozenset[int]:
    """Node ids that the broker on this port knows to be up; empty if it does not answer."""
    if not is_open(port):
        return frozenset()
    client = AdminClient({"bootstrap.servers": f"{LOOPBACK}:{port}", "log_level": 0, "error_cb": lambda _error: None})
    try:
        metadata = cast(_Metadata, client.list_topics(timeout=TIMEOUT))
    except KafkaException:
        return frozenset()
    return frozenset(metadata.brokers)


def broker_answers(port: int, node: int | None = None) -> bool:
    """Whether the broker on this port answers, and counts itself (`node`) as a member of its cluster."""
    nodes = cluster_nodes(port)
    return bool(nodes) if node is None else node in nodes
