"""Client settings: what rollstream fixes, what it prefers, what the user adds.

    DEFAULTS of the role  <-  the user's settings  <-  FIXED for the role

One mapping of user settings serves every client: those that concern only writers or only consumers go to these alone.
All names are librdkafka's, so security (SASL, TLS, OAuth) passes through as it is documented there. Secrets are never
shown.
"""

from collections.abc import Mapping
from typing import Literal

from ..log import LogError
from ..sections import is_secret

Role = Literal["admin", "writer", "consumer"]
Settings = Mapping[str, str]

_EVERYBODY = {
    # a broker that restarts is found within a second, a new partition within ten
    "reconnect.backoff.ms": "50",
    "reconnect.backoff.max.ms": "1000",
    "topic.metadata.refresh.interval.ms": "10000",
}
DEFAULTS: Mapping[Role, Settings] = {
    # nobody polls the admin client, so its log would only pile up; what fails is raised
    "admin": {**_EVERYBODY, "log_level": "2"},
    "writer": {
        **_EVERYBODY,
        "compression.type": "zstd",
        "linger.ms": "5",
        "batch.size": "524288",
        "message.max.bytes": "1048576",
        "queue.buffering.max.kbytes": "65536",
        # longer than a broker takes to restart: its records wait, they do not fail
        "delivery.timeout.ms": "600000",
        "retry.backoff.max.ms": "1000",
    },
    "consumer": {
        **_EVERYBODY,
        "group.protocol": "classic",
        "max.poll.interval.ms": "300000",
        "queued.max.messages.kbytes": "32768",
        "fetch.max.bytes": "16777216",
        # by default a full queue is looked at once a second, which a fast reader would feel
        "fetch.queue.backoff.ms": "10",
        "fetch.error.backoff.ms": "100",
    },
}
"""What a client of each role gets unless the user says otherwise. `batch.size` stays well below a topic's usual
`max.message.bytes`, so that no batch is refused whose records would each be accepted."""

CLASSIC: Settings = {"session.timeout.ms": "6000", "heartbeat.interval.ms": "1000"}
"""Defaults that only the classic group protocol knows; with `group.protocol=consumer` the broker decides them."""

# Tansu creates an unknown topic as soon as somebody asks about it, unless told not to
_UNASKED = {"allow.auto.create.topics": "false"}
FIXED: Mapping[Role, Settings] = {
    "admin": _UNASKED,
    "writer": {
        **_UNASKED,
        "enable.idempotence": "true",
        "acks": "all",
        "partitioner": "murmur2_random",
        # the buffer counts bytes; a second bound by number would refuse small records
        "queue.buffering.max.messages": "0",
    },
    "consumer": {
        **_UNASKED,
        "enable.auto.commit": "false",
        "enable.auto.offset.store": "false",
        "auto.offset.reset": "error",
    },
}
"""What the promises of the log rest on; a user setting that contradicts it is refused."""

OWN = ("bootstrap.servers", "group.id", "group.instance.id", "partition.assignment.strategy", "enable.partition.eof")
"""Settings that rollstream fills in itself."""

_ONLY: Mapping[Role, tuple[str, ...]] = {
    "admin": (),
    "writer": (
        *("acks", "request.required.acks", "request.timeout.ms", "retries", "partitioner", "enable.idempotence"),
        *("linger.", "batch.", "compression.", "delivery.", "message.timeout.", "message.send.", "queue.buffering."),
        *("sticky.", "queuing.", "retry.backoff.", "message.max.bytes"),
    ),
    "consumer": (
        *("group.", "partition.assignment.", "session.timeout.", "heartbeat.", "max.poll.", "coordinator."),
        *("fetch.", "max.partition.fetch.", "queued.", "auto.", "enable.auto.", "enable.partition.", "isolation."),
        *("check.crcs", "client.rack"),
    ),
}


def assemble(role: Role, bootstrap: str, settings: Settings) -> dict[str, str]:
    """The settings of one client. Raises `LogError` where the user's contradict what is fixed."""
    check_settings(settings)
    mine = {name: value for name, value in settings.items() if _concerns(name, role)}
    found = {**DEFAULTS[role], **mine, **FIXED[role], "bootstrap.servers": bootstrap}
    if role == "consumer" and found["group.protocol"] == "classic":
        return {**CLASSIC, "partition.assignment.strategy": "cooperative-sticky", **found}
    return found


def check_settings(settings: Settings) -> None:
    """Raises `LogError` for a setting that is rollstream's own, or contradicts what is fixed."""
    for name, value in settings.items():
        if name in OWN:
            raise LogError(f"client setting {name}: rollstream fills it in itself; take it out")
        for fixed in FIXED.values():
            if fixed.get(name, value) != value:
                raise LogError(f"client setting {name}: expected {fixed[name]!r}, which the log relies on; take it out")


def hide_secrets(text: str, settings: Settings) -> str:
    """`text` without the values of secret settings."""
    for name, value in settings.items():
        if value and is_secret(name):
            text = text.replace(value, "***")
    return text


def _concerns(name: str, role: Role) -> bool:
    owners = [owner for owner, prefixes in _ONLY.items() if name.startswith(prefixes)]
    return not owners or role in owners
