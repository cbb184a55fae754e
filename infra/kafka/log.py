"""`KafkaLog`: the log on a Kafka cluster, or on a broker that speaks its protocol (Tansu)."""

import logging
import uuid
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

from confluent_kafka import Consumer, KafkaException, Producer

from ..log import LogError, OnAssign, OnRevoke, Partition, Topic
from .admin import Admin
from .consumer import KafkaConsumer
from .ends import SETTINGS as END_SETTINGS
from .ends import fetch_ends
from .errors import code_of
from .settings import assemble, check_settings, hide_secrets
from .writer import KafkaWriter

T = TypeVar("T")

_log = logging.getLogger("rollstream.infra.kafka.client")


class KafkaLog:
    """A `Log` on the cluster at `bootstrap` ("host:port,host:port").

    `settings` are librdkafka's, by its names, for every client that they concern: security, timeouts, buffers
    (`queue.buffering.max.kbytes` of a writer, `queued.max.messages.kbytes` of a consumer), `group.protocol`
    ("classic", or "consumer" for KIP-848 on Apache Kafka 4). Raises `LogError` for one that the log relies on.
    """

    def __init__(self, bootstrap: str, *, settings: Mapping[str, str] | None = None) -> None:
        self._bootstrap = bootstrap
        self._settings = dict(settings or {})
        check_settings(self._settings)
        self._admin = self._open(Admin, assemble("admin", bootstrap, self._settings))

    def __repr__(self) -> str:
        return f"KafkaLog({self._bootstrap!r}, settings={sorted(self._settings)})"

    def writer(self) -> KafkaWriter:
        settings = assemble("writer", self._bootstrap, self._settings)
        capacity = int(settings["queue.buffering.max.kbytes"]) * 1024
        max_bytes = int(settings["message.max.bytes"])
        # the writer keeps the bound itself; the client's own must never be the one that refuses
        settings["queue.buffering.max.kbytes"] = str(2 * max(capacity, max_bytes) // 1024)

        def connect(batch_bytes: int) -> Producer:
            return self._open(_producer, {**settings, "batch.size": str(batch_bytes)})

        return KafkaWriter(
            connect,
            self._admin.rules,
            capacity=capacity,
            max_bytes=max_bytes,
            batch_bytes=int(settings["batch.size"]),
        )

    def subscribe(
        self,
        topics: Iterable[str],
        *,
        group: str,
        on_assign: OnAssign | None = None,
        on_revoke: OnRevoke | None = None,
        instance: str | None = None,
    ) -> KafkaConsumer:
        names = list(topics)
        for name in names:
            self._admin.find(name)
        own = {"group.id": group} if instance is None else {"group.id": group, "group.instance.id": instance}
        consumer = KafkaConsumer(self._consumer(own), self.bounds, on_assign=on_assign, on_revoke=on_revoke)
        # A static member does not tell the group that it leaves, and KIP-848 knows no joins.
        joins = instance is None and self._settings.get("group.protocol", "classic") == "classic"
        consumer.subscribe(names, joins=joins)
        return consumer

    def read(self, start: Mapping[Partition, int], *, group: str | None = None) -> KafkaConsumer:
        for topic in {partition.topic for partition in start}:
            there = self.partitions(topic)
            if missing := sorted(
                partition for partition in start if partition.topic == topic and partition not in there
            ):
                raise LogError(f"there is no {missing[0]}: the topic has {len(there)} partitions")
        consumer = KafkaConsumer(self._consumer({} if group is None else {"group.id": group}), self.bounds)
        consumer.start(start, commits=group is not None)
        return consumer

    def partitions(self, topic: str) -> tuple[Partition, ...]:
        return tuple(Partition(topic, number) for number in self._admin.find(topic).numbers)

    def bounds(self, partitions: Iterable[Partition]) -> dict[Partition, tuple[int, int]]:
        chosen = list(dict.fromkeys(partitions))
        for topic in {partition.topic for partition in chosen}:
            self._admin.find(topic)
        earliest = self._admin.offsets(chosen, latest=False)
        latest = fetch_ends(partial(self._consumer, END_SETTINGS), self._admin.offsets(chosen, latest=True))
        return {partition: (earliest[partition], latest[partition]) for partition in chosen}

    def committed(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, int]:
        return self._admin.committed(group, partitions)

    def topics(self) -> dict[str, int]:
        return self._admin.topics()

    def describe(self, topic: str) -> Topic:
        return self._admin.describe(topic)

    def settings(self, topic: str) -> Mapping[str, str]:
        return self._admin.settings(topic)

    def create(self, topic: Topic) -> None:
        self._admin.create(topic)

    def grow(self, topic: str, partitions: int) -> None:
        self._admin.grow(topic, partitions)

    def alter(self, topic: str, config: Mapping[str, str]) -> None:
        self._admin.alter(topic, config)

    def close(self) -> None:
        """Nothing to release: writers and consumers are closed by whoever opened them."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _consumer(self, own: Mapping[str, str]) -> Consumer:
        """A consumer; the client wants a group even of one outside of any: its own, that it never joins."""
        # With KIP-848 the successor of a static member that was killed is refused until that one's session has run out,
        # 45 s by default; the classic protocol gives it the partitions at once.
        wanted = {**self._settings, "group.protocol": "classic"} if "group.instance.id" in own else self._settings
        settings = assemble("consumer", self._bootstrap, wanted)
        return self._open(_consumer, {"group.id": f"rollstream-{uuid.uuid4()}", **settings, **own})

    def _open(self, client: Callable[[dict[str, str]], T], settings: dict[str, str]) -> T:
        try:
            return client(settings)
        except KafkaException as error:
            text = hide_secrets(code_of(error).str(), self._settings)
        raise LogError(f"the client refuses its settings: {text}")


def _producer(settings: dict[str, str]) -> Producer:
    return Producer(settings, logger=_log)


def _consumer(settings: dict[str, str]) -> Consumer:
    return Consumer(settings, logger=_log)
