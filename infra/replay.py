"""Dead letters back to where they came from, after a fix: a new release, a schema that is published, a topic made.

    letter --its record was replayed--> skipped        unless asked for again
       |---- no topic of origin, a tombstone,
       |     or still cannot be read -> refused        unless forced
       v
    original key, bytes and headers, and `rollstream-replayed-from` --> topic of origin --acknowledged--> mark

Killed between the two, it appends a record a second time when it is asked again; consumers know both by one id.
"""

from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from ..schemas import Task, WireError, WireRecord, decode, decode_as, parse_headers
from ..schemas.registry import Schemas
from .claims import Claims, read_trajectory
from .deadletters import REPLAYED, REPLAYED_FROM, REPLAYED_TO, Letter
from .log import Log, LogError, Position, Writer, await_position
from .topics import Names

AT_ONCE = 100
"""Letters between two rounds of marks."""


class Outcome(NamedTuple):
    """What became of a letter."""

    letter: Letter
    position: Position | None = None
    """Where its record lies now."""
    refusal: str = ""
    """Why it was not appended; empty where it was, or would be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Replays letters of one namespace. `force`: also what still cannot be read. `again`: also what was replayed."""

    log: Log
    names: Names
    schemas: Schemas
    claims: Claims
    force: bool = False
    again: bool = False
    timeout: float = 60.0

    def judge(self, letters: Iterable[Letter]) -> Iterator[Outcome]:
        """What `append` would do, without doing it. Raises `LogError`, `StoreError` where what it takes is away."""
        taken: set[str] = set()
        for letter in letters:
            refusal = "another letter of the same record" if letter.identity in taken else self._refusal(letter)
            if not refusal:
                taken.add(letter.identity)
            yield Outcome(letter, None, refusal)

    def append(self, letters: Iterable[Letter]) -> "Generator[Outcome]":
        """Append what may be, mark it as replayed, and tell of each letter. Raises `LogError` where the log is away.

        Nothing is done ahead of the outcomes that were taken but for the hundred under way.
        """
        judged = self.judge(letters)
        with self.log.writer() as writer:
            while outcomes := list(islice(judged, AT_ONCE)):
                sent = [self._send(writer, outcome) for outcome in outcomes]
                done = [self._settled(outcome, future) for outcome, future in zip(outcomes, sent, strict=True)]
                marks = [
                    writer.append(self.names.dead_letter, None, key=o.letter.key, headers=_mark(o.letter, o.position))
                    for o in done
                    if o.position
                ]
                for mark in marks:
                    await_position(mark, self.timeout, "the mark of a replayed letter")
                yield from done

    def _send(self, writer: Writer, outcome: Outcome) -> "Future[Position] | None":
        letter = outcome.letter
        if outcome.refusal or letter.origin is None:
            return None
        headers = {**letter.headers, REPLAYED_FROM: str(letter.position).encode()}
        return writer.append(letter.origin.partition.topic, letter.value, key=letter.key, headers=headers)

    def _settled(self, outcome: Outcome, future: "Future[Position] | None") -> Outcome:
        if future is None:
            return outcome
        try:
            return outcome._replace(position=await_position(future, self.timeout, f"{outcome.letter.position} again"))
        except LogError as error:
            if error.retriable:
                raise
            return outcome._replace(refusal=str(error))

    def _refusal(self, letter: Letter) -> str:
        if letter.origin is None:
            return "its headers name no topic of origin"
        if letter.value is None:
            return "it is a tombstone"
        if letter.replayed and not self.again:
            return f"it was replayed to {letter.replayed}"
        try:
            read_letter(letter, self.names, self.schemas, self.claims)
        except WireError as error:
            return "" if self.force else f"{error.reason}: {error}"
        return ""


def read_letter(letter: Letter, names: Names, schemas: Schemas, claims: Claims) -> WireRecord:
    """Its record, read as the consumers of its topic read it. Raises `WireError` where it cannot be.

    Raises `StoreError`, or what the lookup behind `schemas` raises, where what it needs is away. What only they can
    judge is not judged here: the model's vocabulary and tokenizer.
    """
    topic, value = letter.origin.partition.topic if letter.origin else "", letter.value or b""
    if names.environment(topic) is not None:
        parse_headers(letter.headers)
        return read_trajectory(value, claims, schemas=schemas)
    if topic == names.tasks:
        return decode_as(Task, value, schemas=schemas)
    return decode(value, schemas=schemas)


def _mark(letter: Letter, position: Position) -> dict[str, bytes]:
    return {REPLAYED: letter.identity.encode(), REPLAYED_TO: str(position).encode()}
