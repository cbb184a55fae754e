"""The rules of the wire: what a record must satisfy when it is written, and again when it was read.

`validate` says nothing about a good record and raises `InvalidRecord` for a bad one, with a short `reason` that is
counted and a message that names the field, what was expected and what was found. The reasons stand in rules.py.
"""

import re

import numpy as np
from numpy.typing import NDArray

from .errors import InvalidRecord
from .records import (
    Claim,
    Command,
    Consumed,
    Control,
    PolicySpan,
    PolicyUpdate,
    Receipt,
    Role,
    Sampling,
    Status,
    Task,
    Trajectory,
    Turn,
)
from .rules import (
    LONG,
    SPANS,
    column,
    finite,
    flag,
    ident,
    instance,
    mapping,
    maybe,
    member,
    name,
    number,
    refusal,
    reward,
    several,
    text,
    whole,
)

PLACEHOLDER = -9999.0
"""Engines write it, or less, where they have no log-probability."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


def validate(record: object, *, vocabulary: int | None = None) -> None:
    """Raise `InvalidRecord` unless the record keeps every rule.

    `vocabulary`: number of tokens the model knows; ids from there on are refused. None leaves only the lower bound.
    """
    match record:
        case Trajectory():
            _trajectory(record, vocabulary)
        case Task():
            _task(record)
        case PolicyUpdate():
            _policy(record)
        case Receipt():
            _receipt(record)
        case Control():
            _control(record)
        case Claim():
            _claim(record)
        case _:
            raise refusal("bad-type", "record", "a Trajectory, Task, PolicyUpdate, Receipt, Control or Claim", record)


def _trajectory(record: Trajectory, vocabulary: int | None) -> None:
    ident(record.trajectory_id, "trajectory_id")
    name(record.group_id, "group_id")
    name(record.environment, "environment")
    whole(record.group_size, "group_size", low=1, reason="bad-group")
    whole(record.sample_index, "sample_index", high=record.group_size - 1, reason="bad-group")
    whole(record.seed, "seed", low=-LONG - 1, high=LONG)
    text(record.environment_version, "environment_version")
    text(record.model, "model")
    text(record.tokenizer, "tokenizer")
    finite(record.temperature, "temperature", low=0)
    _columns(record, vocabulary)
    reward(record.reward, "reward")
    mapping(record.rewards, "rewards", reward)
    member(record.status, Status, "status")
    maybe(record.cause, "cause")
    mapping(record.metrics, "metrics", number)
    mapping(record.metadata, "metadata", text)
    _times(record)


def _times(record: Trajectory | Turn) -> None:
    whole(record.started_ms, "started_ms", high=LONG)
    whole(record.finished_ms, "finished_ms", high=LONG)


def _columns(record: Trajectory, vocabulary: int | None) -> None:
    """Turns, tokens, log-probabilities and spans: each sane, and of lengths that agree."""
    tokens = column(record.tokens, np.int32, "tokens")
    logprobs = column(record.logprobs, np.float32, "logprobs")
    counted = sampled = 0
    for index, turn in enumerate(several(record.turns, Turn, "turns")):
        _turn(turn, index)
        counted += turn.tokens
        sampled += turn.tokens if turn.sampled else 0
    if counted != tokens.size:
        raise refusal("bad-lengths", "turns", f"{tokens.size} tokens in all, as the token column has", counted)
    if logprobs.size not in (0, sampled):
        raise refusal("bad-lengths", "logprobs", f"{sampled}, one a sampled token, or none", logprobs.size)
    _tokens(tokens, vocabulary)
    _logprobs(logprobs)
    _spans(record.spans, sampled)


def _turn(turn: Turn, index: int) -> None:
    try:
        member(turn.role, Role, "role")
        whole(turn.tokens, "tokens")
        flag(turn.sampled, "sampled")
        flag(turn.masked, "masked")
        if turn.reward is not None:
            reward(turn.reward, "reward")
        maybe(turn.text, "text")
        for call in several(turn.tool_calls, str, "tool_calls"):
            text(call, "tool_calls")
        maybe(turn.finish_reason, "finish_reason")
        _times(turn)
    except InvalidRecord as error:
        raise InvalidRecord(f"turns[{index}].{error}", reason=error.reason) from None


def _tokens(tokens: NDArray[np.int32], vocabulary: int | None) -> None:
    if not tokens.size:
        return
    limit = np.inf if vocabulary is None else vocabulary
    if tokens.min() < 0 or tokens.max() >= limit:
        at = int(np.argmax((tokens < 0) | (tokens >= limit)))
        expected = "a token id >= 0" if vocabulary is None else f"a token id from 0 to {vocabulary - 1}"
        raise refusal("bad-tokens", f"tokens[{at}]", expected, int(tokens[at]))


def _logprobs(logprobs: NDArray[np.float32]) -> None:
    # One test for all: every comparison with NaN is false.
    if logprobs.size and not (logprobs.min() > PLACEHOLDER and logprobs.max() <= 0):
        at = int(np.argmin((logprobs > PLACEHOLDER) & (logprobs <= 0)))
        raise refusal(
            "bad-logprobs", f"logprobs[{at}]", f"a number from above {PLACEHOLDER:g} to 0", float(logprobs[at])
        )


def _spans(spans: tuple[PolicySpan, ...], sampled: int) -> None:
    if len(several(spans, PolicySpan, "spans")) > SPANS:
        raise refusal("bad-lengths", "spans", f"at most {SPANS}", len(spans))
    for index, span in enumerate(spans):
        whole(span.version, f"spans[{index}].version", low=1, high=LONG, reason="bad-versions")
        whole(span.count, f"spans[{index}].count", low=1, reason="bad-versions")
    if spans and (counted := sum(span.count for span in spans)) != sampled:
        raise refusal("bad-lengths", "spans", f"{sampled} tokens in all, one a sampled token, or no spans", counted)


def _task(record: Task) -> None:
    name(record.task_id, "task_id")
    name(record.environment, "environment")
    whole(record.seed, "seed", low=-LONG - 1, high=LONG)
    whole(record.group_size, "group_size", low=1, reason="bad-group")
    _sampling(instance(record.sampling, Sampling, "sampling"))
    whole(record.max_turns, "max_turns")
    whole(record.attempt, "attempt")
    mapping(record.payload, "payload", text)
    whole(record.created_ms, "created_ms", high=LONG)
    maybe(record.traceparent, "traceparent")


def _sampling(sampling: Sampling) -> None:
    finite(sampling.temperature, "sampling.temperature", low=0)
    whole(sampling.max_tokens, "sampling.max_tokens", low=1)
    finite(sampling.top_p, "sampling.top_p")
    if not 0 < sampling.top_p <= 1:
        raise refusal("bad-float", "sampling.top_p", "a number from above 0 to 1", sampling.top_p)
    whole(sampling.top_k, "sampling.top_k")


def _policy(record: PolicyUpdate) -> None:
    ident(record.run, "run")
    whole(record.version, "version", low=1, high=LONG, reason="bad-versions")
    ident(record.incarnation, "incarnation")
    whole(record.step, "step", high=LONG)
    ident(record.manifest, "manifest")
    _digest(record.digest, "digest")
    whole(record.published_ms, "published_ms", high=LONG)


def _digest(value: str, field: str) -> None:
    text(value, field)
    if not _DIGEST.fullmatch(value):
        raise refusal("bad-digest", field, "a SHA-256 as 64 lower-case hex digits", value)


def _receipt(record: Receipt) -> None:
    ident(record.run, "run")
    ident(record.incarnation, "incarnation")
    whole(record.step, "step", high=LONG)
    whole(record.version, "version", low=1, high=LONG, reason="bad-versions")
    text(record.parent_incarnation, "parent_incarnation")
    whole(record.parent, "parent", high=record.version, reason="bad-versions")
    _consumed(record.consumed)
    for group in several(record.groups, str, "groups"):
        ident(group, "groups")
    if len(set(record.groups)) != len(record.groups):
        raise refusal("bad-group", "groups", "every group once", record.groups)
    number(record.loss, "loss")
    mapping(record.metrics, "metrics", number)
    whole(record.written_ms, "written_ms", high=LONG)


def _consumed(consumed: tuple[Consumed, ...]) -> None:
    seen: set[tuple[str, int]] = set()
    for index, part in enumerate(several(consumed, Consumed, "consumed")):
        field = f"consumed[{index}]"
        ident(part.topic, f"{field}.topic")
        whole(part.partition, f"{field}.partition")
        if (part.topic, part.partition) in seen:
            raise refusal("bad-offsets", field, "every partition once", f"{part.topic}[{part.partition}] again")
        seen.add((part.topic, part.partition))
        mapping(part.dropped, f"{field}.dropped", _offsets)
        _offsets(part.trained, f"{field}.trained")
        _disjoint(part, field)


def _offsets(value: object, field: str) -> None:
    offsets = column(value, np.int64, field)
    if offsets.size and (offsets[0] < 0 or not (offsets[1:] > offsets[:-1]).all()):
        raise refusal("bad-offsets", field, "offsets >= 0, each above the one before", offsets)


def _disjoint(part: Consumed, field: str) -> None:
    every = np.sort(np.concatenate([part.trained, *part.dropped.values()]))
    twice = every[1:][every[1:] == every[:-1]]
    if twice.size:
        raise refusal("bad-offsets", field, "every offset in one column only", int(twice[0]))


def _control(record: Control) -> None:
    member(record.command, Command, "command")
    if record.command is Command.CANCEL:
        ident(record.target, "target")
    text(record.target, "target")
    text(record.reason, "reason")
    whole(record.issued_ms, "issued_ms", high=LONG)


def _claim(record: Claim) -> None:
    whole(record.size, "size", low=1, high=LONG)
    _digest(record.sha256, "sha256")
