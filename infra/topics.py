"""Topics as data: what they are called, how they are set, and what it takes to make a cluster so.

    declared(namespace, environments) --> plan(log, topics) --> show the changes --> apply(log, changes)
                                      --> verify(log, topics)          where somebody else manages the cluster

| topic | key | what, and who writes -> reads |
| --- | --- | --- |
| `<namespace>.tasks` | task id | Task; dispatcher -> workers |
| `<namespace>.trajectories.<environment>` | group id | Trajectory; workers -> every consumer group |
| `<namespace>.control` | task or group id | Control; whoever runs the workers -> all of them |
| `<namespace>.policy` | run id | PolicyUpdate, compacted; trainer -> workers |
| `<namespace>.ledger` | run id | Receipt, kept for ever; trainer -> dispatcher, audit |
| `<namespace>.dead-letter` | original key | untouched bytes; anyone -> people, replay |
| `<namespace>.schemas` | schema id | Avro schema text, compacted; `publish_schemas` -> every reader |
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, cast

from .log import Log, LogError, Topic

LIMIT = 1_000_000
"""Largest record (bytes) of a topic, unless declared otherwise."""
_ROOM = 1_048_576
"""Of the dead-letter topic: any record of another topic, and the headers that say where it came from."""
_DAY = 24 * 60 * 60 * 1000

_ENVIRONMENT = re.compile(r"[a-z0-9-]+")
_NAMESPACE = re.compile(r"[a-z0-9-]+(\.[a-z0-9-]+)*")


@dataclass(frozen=True, slots=True)
class Names:
    """The topics of one namespace. Raises `LogError` for a namespace that is not dotted words of [a-z0-9-]."""

    namespace: str = "rollstream"

    def __post_init__(self) -> None:
        if not _NAMESPACE.fullmatch(self.namespace):
            raise LogError(f"namespace: expected words of a-z, 0-9 and - joined by dots, found {self.namespace!r}")

    @property
    def tasks(self) -> str:
        return f"{self.namespace}.tasks"

    @property
    def control(self) -> str:
        return f"{self.namespace}.control"

    @property
    def policy(self) -> str:
        return f"{self.namespace}.policy"

    @property
    def ledger(self) -> str:
        return f"{self.namespace}.ledger"

    @property
    def dead_letter(self) -> str:
        return f"{self.namespace}.dead-letter"

    @property
    def schemas(self) -> str:
        return f"{self.namespace}.schemas"

    def trajectories(self, environment: str) -> str:
        """Raises `LogError` for a name that is not of [a-z0-9-]+."""
        if not _ENVIRONMENT.fullmatch(environment):
            raise LogError(f"environment: expected a name of a-z, 0-9 and -, found {environment!r}")
        return f"{self.namespace}.trajectories.{environment}"

    def environment(self, topic: str) -> str | None:
        """The environment whose trajectories a topic holds; None for any other topic."""
        prefix = f"{self.namespace}.trajectories."
        return topic.removeprefix(prefix) if topic.startswith(prefix) else None


def declared(
    namespace: str,
    environments: Iterable[str] | Mapping[str, int],
    *,
    partitions: int = 4,
    max_bytes: int = LIMIT,
    retention_days: float = 7,
    replication: int = -1,
) -> tuple[Topic, ...]:
    """Every topic of a namespace.

    `partitions` is for tasks and for each environment, unless `environments` maps its name to a number of its own.
    The other topics have one.
    `retention_days` bounds tasks and trajectories; a dead letter stays for 30 days, a receipt for ever.
    Replication, `min.insync.replicas` and the like are left to the cluster unless `replication` says otherwise.
    """
    names = Names(namespace)
    counts = dict.fromkeys(environments, partitions)
    if isinstance(environments, Mapping):
        counts.update(cast("Mapping[str, int]", environments))
    flow = {"cleanup.policy": "delete", "retention.ms": str(int(retention_days * _DAY))}
    latest = {"cleanup.policy": "compact"}
    limit = {"max.message.bytes": str(max_bytes)}
    dead = {
        "cleanup.policy": "delete",
        "retention.ms": str(30 * _DAY),
        "max.message.bytes": str(max(max_bytes + _ROOM - LIMIT, _ROOM)),
    }
    settled: list[tuple[str, int, Mapping[str, str]]] = [
        (names.tasks, partitions, flow | limit),
        *((names.trajectories(environment), count, flow | limit) for environment, count in counts.items()),
        (names.control, 1, {"cleanup.policy": "delete", "retention.ms": str(_DAY)} | limit),
        (names.policy, 1, latest | limit),
        (names.ledger, 1, {"cleanup.policy": "delete", "retention.ms": "-1"} | limit),
        (names.dead_letter, 1, dead),
        (names.schemas, 1, latest | limit),
    ]
    return tuple(
        Topic(name=name, partitions=count, config=config, replication=replication) for name, count, config in settled
    )


class Action(StrEnum):
    """What a change does."""

    CREATE = "create"
    GROW = "grow"
    ALTER = "alter"
    REFUSE = "refuse"
    """What is asked cannot be had without losing records or their order; nothing is applied."""


class Difference(NamedTuple):
    """One point in which a cluster is not as declared. Renders itself."""

    topic: str
    point: str
    """"topic", "partitions", or the name of a setting."""
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.topic}: {self.point}: expected {self.expected}, found {self.found}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One step towards what is declared. Renders itself as a line of the plan."""

    action: Action
    topic: Topic
    """As declared."""
    differences: tuple[Difference, ...] = ()

    def __str__(self) -> str:
        head = f"{self.action:8} {self.topic.name}"
        if self.action is Action.CREATE:
            settings = " ".join(f"{name}={value}" for name, value in sorted(self.topic.config.items()))
            return f"{head}  partitions={self.topic.partitions} {settings}".rstrip()
        return "  ".join([head, *(f"{d.point}: {d.found} -> {d.expected}" for d in self.differences)])


def plan(log: Log, topics: Iterable[Topic]) -> tuple[Change, ...]:
    """What it takes to make the log as declared; nothing where it is. Changes nothing."""
    there = log.topics()
    return tuple(change for topic in topics for change in _plan(log, topic, there.get(topic.name)))


def apply(log: Log, changes: Iterable[Change]) -> None:
    """Carry a plan out. Raises `LogError`, before anything is changed, where the plan refuses something."""
    changes = tuple(changes)
    if refused := [change for change in changes if change.action is Action.REFUSE]:
        raise LogError("nothing was applied: " + "; ".join(" ".join(str(change).split()) for change in refused))
    for change in changes:
        if change.action is Action.CREATE:
            log.create(change.topic)
        elif change.action is Action.GROW:
            log.grow(change.topic.name, change.topic.partitions)
        elif change.action is Action.ALTER:
            log.alter(change.topic.name, {d.point: d.expected for d in change.differences})


def verify(log: Log, topics: Iterable[Topic]) -> tuple[Difference, ...]:
    """Where the log is not as declared, for clusters that somebody else manages. More partitions are fine."""
    there = log.topics()
    found: list[Difference] = []
    for topic in topics:
        if topic.name not in there:
            found.append(Difference(topic.name, "topic", f"{topic.partitions} partitions", "none"))
            continue
        if there[topic.name] < topic.partitions:
            found.append(Difference(topic.name, "partitions", str(topic.partitions), str(there[topic.name])))
        found += _settings(log, topic)
    return tuple(found)


def _plan(log: Log, topic: Topic, partitions: int | None) -> list[Change]:
    if partitions is None:
        return [Change(action=Action.CREATE, topic=topic)]
    changes: list[Change] = []
    if partitions != topic.partitions:
        action = Action.GROW if partitions < topic.partitions else Action.REFUSE
        difference = Difference(topic.name, "partitions", str(topic.partitions), str(partitions))
        changes.append(Change(action=action, topic=topic, differences=(difference,)))
    if differences := _settings(log, topic):
        changes.append(Change(action=Action.ALTER, topic=topic, differences=differences))
    return changes


def _settings(log: Log, topic: Topic) -> tuple[Difference, ...]:
    effective = log.settings(topic.name)
    return tuple(
        Difference(topic.name, name, value, effective.get(name, "not set"))
        for name, value in sorted(topic.config.items())
        if effective.get(name) != value
    )
