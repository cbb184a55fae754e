"""The client's errors in rollstream's tree. Codes are told by name, as the client prints them."""

from confluent_kafka import KafkaError, KafkaException

from ..log import LogError, RecordTooLarge, UnknownTopic

UNKNOWN_TOPIC = frozenset({"UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC"})

PASSING = frozenset(
    {
        *("_NOENT", "_TRANSPORT", "_TIMED_OUT", "_TIMED_OUT_QUEUE", "_MSG_TIMED_OUT", "_ALL_BROKERS_DOWN", "_RESOLVE"),
        *(
            "_WAIT_COORD",
            "_WAIT_CACHE",
            "_IN_PROGRESS",
            "_PREV_IN_PROGRESS",
            "_PURGE_QUEUE",
            "_PURGE_INFLIGHT",
            "_DESTROY",
        ),
        *("LEADER_NOT_AVAILABLE", "NOT_LEADER_FOR_PARTITION", "NETWORK_EXCEPTION", "REQUEST_TIMED_OUT"),
        *("FENCED_LEADER_EPOCH", "UNKNOWN_LEADER_EPOCH", "OFFSET_NOT_AVAILABLE", "KAFKA_STORAGE_ERROR"),
        *("COORDINATOR_LOAD_IN_PROGRESS", "COORDINATOR_NOT_AVAILABLE", "NOT_COORDINATOR", "NOT_CONTROLLER"),
        *("REBALANCE_IN_PROGRESS", "NOT_ENOUGH_REPLICAS", "NOT_ENOUGH_REPLICAS_AFTER_APPEND", "UNKNOWN"),
    }
)
"""Conditions of the cluster or the network that pass; `_NOENT` is "no leaders found" just after a reconnect, `UNKNOWN`
what Tansu answers while its object store is away."""


FENCED = frozenset({"PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH"})
"""A producer that the broker knows a newer one of, though there is none: on Tansu after its object store was away."""


def code_of(error: KafkaException) -> KafkaError:
    """What the client found."""
    found = error.args[0]
    return found if isinstance(found, KafkaError) else KafkaError(KafkaError.UNKNOWN, str(error))


def is_passing(error: KafkaError) -> bool:
    """May the same call succeed later?"""
    return not error.fatal() and (error.retriable() or error.name() in PASSING)


def ends_client(error: KafkaError) -> bool:
    """Will this client never append again, though another one may?"""
    return error.fatal() or error.name() in FENCED


def to_log_error(error: KafkaError, doing: str) -> LogError:
    """The error for what failed while `doing` something, e.g. "append to tasks"."""
    name = error.name()
    if name in UNKNOWN_TOPIC:
        return UnknownTopic(f"{doing}: there is no such topic; `rollstream topics apply` creates what is declared")
    if name == "MSG_SIZE_TOO_LARGE":
        return RecordTooLarge(
            f"{doing}: the broker refused the batch as too large; "
            f"lower batch.size, or raise the topic's max.message.bytes"
        )
    if error.fatal():
        return LogError(f"{doing}: {error.str()} ({name}); this client cannot go on, open a new one")
    return LogError(f"{doing}: {error.str()} ({name})", retriable=is_passing(error))
