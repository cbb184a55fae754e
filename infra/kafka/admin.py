"""What is asked of the cluster as a whole: topics, their settings, offsets. Passing conditions are waited out."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, NamedTuple, TypeVar

import confluent_kafka.admin
from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError, KafkaException, TopicPartition

from ..log import LogError, Partition, Topic, UnknownTopic
from .errors import UNKNOWN_TOPIC, code_of, is_passing, to_log_error

_api: Any = confluent_kafka.admin  # its annotations leave the futures untyped and most names unexported

T = TypeVar("T")

_log = logging.getLogger(__name__)

PATIENCE = 20.0
"""Seconds that passing conditions are waited out."""
_ANSWER = 10.0
"""Seconds for one answer."""
_TOPIC_SOURCE = 1
"""ConfigSource DYNAMIC_TOPIC_CONFIG: set on the topic itself."""
_FULL_LISTING = 20
"""Kafka lists every setting of a topic, over thirty. Tansu lists the few that were set, and calls them defaults."""


_EXISTS = frozenset({"TOPIC_ALREADY_EXISTS"})
_UNSUPPORTED = frozenset({"_UNSUPPORTED_FEATURE", "UNSUPPORTED_VERSION"})
_REFUSED = frozenset({"_AUTHENTICATION", "_SSL"})


class Found(NamedTuple):
    """What the cluster's metadata say of a topic."""

    numbers: tuple[int, ...]
    """Its partitions, ascending."""
    led: int
    """How many of them have a leader."""
    replication: int


class Admin:
    """The administration of one cluster. Thread-safe. Raises `KafkaException` where the client refuses its settings."""

    def __init__(self, settings: dict[str, str]) -> None:
        self._troubles: deque[KafkaError] = deque(maxlen=8)
        """What the client said of its connections, the latest last."""
        self._client: Any = _api.AdminClient({**settings, "error_cb": self._troubles.append})

    def topics(self) -> dict[str, int]:
        """Partition counts by topic, internal topics left out."""
        found = self._ask(lambda: self._client.list_topics(timeout=_ANSWER).topics, "list topics")
        return {name: len(topic.partitions) for name, topic in found.items() if not name.startswith("__")}

    def find(self, topic: str) -> Found:
        """Metadata of a topic. Asks a few times before it raises `UnknownTopic`: brokers learn of a new one in turn."""
        for pause in (0.05, 0.15, 0.3):
            if (found := self._look(topic)) is not None:
                return found
            time.sleep(pause)
        if (found := self._look(topic)) is None:
            raise UnknownTopic(f"there is no topic {topic!r}; `rollstream topics apply` creates what is declared")
        return found

    def describe(self, topic: str) -> Topic:
        """The topic with the settings that were set on it."""
        found, entries = self.find(topic), self._entries(topic)
        chosen = {
            name: entry.value
            for name, entry in entries.items()
            if entry.source == _TOPIC_SOURCE or len(entries) < _FULL_LISTING
        }
        return Topic(name=topic, partitions=len(found.numbers), config=chosen, replication=found.replication)

    def settings(self, topic: str) -> dict[str, str]:
        """The settings in effect, as far as the broker tells them."""
        self.find(topic)
        return {name: entry.value for name, entry in self._entries(topic).items()}

    def rules(self, topic: str) -> Topic:
        """The topic with its settings in effect; with none where this client may not read them."""
        partitions = len(self.find(topic).numbers)
        try:
            config = {name: entry.value for name, entry in self._entries(topic).items()}
        except LogError as error:
            if error.retriable:
                raise
            _log.warning("%s: its settings cannot be read (%s); only the client's own limits are checked", topic, error)
            config = {}
        return Topic(name=topic, partitions=partitions, config=config)

    def create(self, topic: Topic) -> None:
        """Create it; returns when it can be used."""
        new = _api.NewTopic(topic.name, topic.partitions, topic.replication, config=dict(topic.config))
        # a topic that is there is an answer here, not an error
        try:
            self._wait(lambda: self._client.create_topics([new])[topic.name], f"create {topic.name}", give_up=_EXISTS)
        except KafkaException:
            if (there := len(self.find(topic.name).numbers)) != topic.partitions:
                raise LogError(
                    f"{topic.name}: expected {topic.partitions} partitions, found it there with {there}"
                ) from None
        else:
            self._await_leaders(topic.name, topic.partitions)

    def grow(self, topic: str, partitions: int) -> None:
        """Add partitions; returns when they can be used."""
        there = len(self.find(topic).numbers)
        if partitions < there:
            raise LogError(f"{topic} has {there} partitions and cannot shrink to {partitions}")
        if partitions == there:
            return
        doing, wanted = f"grow {topic} to {partitions} partitions", _api.NewPartitions(topic, partitions)
        try:
            self._wait(lambda: self._client.create_partitions([wanted])[topic], doing, give_up=_UNSUPPORTED)
        except KafkaException:
            raise LogError(f"{doing}: this broker cannot add partitions; create the topic with enough") from None
        self._await_leaders(topic, partitions)

    def alter(self, topic: str, config: Mapping[str, str]) -> None:
        """Set these settings of a topic; others stay."""
        self.find(topic)
        changes = [
            _api.ConfigEntry(name, value, incremental_operation=_api.AlterConfigOpType.SET)
            for name, value in config.items()
        ]
        resource = _api.ConfigResource(_api.ResourceType.TOPIC, topic, incremental_configs=changes)
        self._wait(lambda: self._client.incremental_alter_configs([resource])[resource], f"alter {topic}")

    def offsets(self, partitions: Iterable[Partition], *, latest: bool) -> dict[Partition, int]:
        """What ListOffsets answers. The latest is too low on Tansu; see `fetch_ends`."""
        spec = _api.OffsetSpec.latest() if latest else _api.OffsetSpec.earliest()
        request = {TopicPartition(p.topic, p.number): spec for p in partitions}
        if not request:
            return {}

        def ask() -> dict[Partition, int]:
            answers = self._client.list_offsets(request, request_timeout=_ANSWER)
            found = {
                Partition(asked.topic, asked.partition): int(answer.result(_ANSWER).offset)
                for asked, answer in answers.items()
            }
            # A leader that has just been elected may not know yet, and says so by an offset below 0.
            if any(offset < 0 for offset in found.values()):
                raise KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE))
            return found

        return self._ask(ask, "list offsets")

    def committed(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """Committed offsets; partitions without one are left out."""
        asked = [TopicPartition(p.topic, p.number) for p in partitions]
        if not asked:
            return {}
        request = ConsumerGroupTopicPartitions(group, asked)
        answer = self._wait(
            lambda: self._client.list_consumer_group_offsets([request])[group], f"read the offsets of group {group}"
        )
        found: list[TopicPartition] = answer.topic_partitions
        return {Partition(p.topic, p.partition): p.offset for p in found if p.error is None and p.offset >= 0}

    def _look(self, topic: str) -> Found | None:
        doing = f"find {topic}"
        found = self._ask(lambda: self._client.list_topics(topic, timeout=_ANSWER).topics[topic], doing)
        if found.error is not None and found.error.name() not in UNKNOWN_TOPIC and not is_passing(found.error):
            raise to_log_error(found.error, doing)
        if found.error is not None or not found.partitions:
            return None
        partitions = found.partitions.values()
        return Found(
            numbers=tuple(sorted(found.partitions)),
            led=sum(partition.leader >= 0 for partition in partitions),
            replication=max(len(partition.replicas) for partition in partitions),
        )

    def _entries(self, topic: str) -> dict[str, Any]:
        resource = _api.ConfigResource(_api.ResourceType.TOPIC, topic)
        answer = self._wait(lambda: self._client.describe_configs([resource])[resource], f"describe {topic}")
        return {name: entry for name, entry in answer.items() if entry.value is not None}

    def _await_leaders(self, topic: str, partitions: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            found = self._look(topic)
            if found is not None and found.led >= partitions:
                return
            time.sleep(0.02)
        raise LogError(f"{topic}: expected {partitions} partitions with a leader within {PATIENCE} s", retriable=True)

    def _wait(self, call: "Callable[[], Future[Any]]", doing: str, give_up: frozenset[str] = frozenset()) -> Any:
        """The answer of an admin call; codes in `give_up` are raised as the client's own exception."""
        return self._ask(lambda: call().result(_ANSWER), doing, give_up)

    def _ask(self, call: Callable[[], T], doing: str, give_up: frozenset[str] = frozenset()) -> T:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return call()
            except FutureTimeout:
                raise self._explain(LogError(f"{doing}: no answer within {_ANSWER} s", retriable=True)) from None
            except KafkaException as error:
                code = code_of(error)
                if code.name() in give_up:
                    raise
                if not is_passing(code) or time.monotonic() > deadline:
                    raise self._explain(to_log_error(code, doing)) from error
            time.sleep(0.1)

    def _explain(self, error: LogError) -> LogError:
        """The error with what the client said of its connections: a call that ran into it only tells of the time."""
        self._troubles.clear()
        self._client.poll(0)
        if not self._troubles or not error.retriable:
            return error
        refused = [trouble for trouble in self._troubles if trouble.name() in _REFUSED]
        trouble = [*self._troubles, *refused][-1]
        return LogError(f"{error}; {trouble.str()} ({trouble.name()})", retriable=not refused)
