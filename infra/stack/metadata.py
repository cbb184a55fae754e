"""Asking a broker who is in its cluster: the proof that it serves clients."""

from collections.abc import Mapping
from typing import Protocol, cast

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from .ports import LOOPBACK, is_open

TIMEOUT = 3.0


class _Metadata(Protocol):
    cluster_id: str
    brokers: Mapping[int, object]


def cluster_nodes(port: int, cluster: str) -> frozenset[int]:
    """Node ids that the broker on this port knows to be up; empty if none of this cluster answers there."""
    if not is_open(port):
        return frozenset()
    client = AdminClient({"bootstrap.servers": f"{LOOPBACK}:{port}", "log_level": 0})
    try:
        metadata = cast(_Metadata, client.list_topics(timeout=TIMEOUT))
    except KafkaException:
        return frozenset()
    return frozenset(metadata.brokers if metadata.cluster_id == cluster else ())


def broker_answers(port: int, cluster: str, node: int) -> bool:
    """Whether the broker on this port answers, and counts itself (`node`) as a member of its cluster."""
    return node in cluster_nodes(port, cluster)
