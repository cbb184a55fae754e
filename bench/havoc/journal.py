"""What the workers' logs tell of each sample: it begins, it is played, it is acknowledged at a position.

    begins ------> played ------> acknowledged
       |              |
       +--------------+--killed, died, or its task went to another worker--> lost: its seconds were for nothing

The lines are written before anything else happens, so a kill -9 takes none of them along. What a worker generated and
nobody got is the time from "begins" to its end. A sample whose record reached the log although its worker was killed
before it heard of that, or had it on the disk, is not lost: `lost_plays` takes it out again.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) rollstream\.producers\.\w+: (.*)")
BEGINS = re.compile(r"sample (\S+) begins")
PLAYED = re.compile(r"sample (\S+) is played")
ACKNOWLEDGED = re.compile(r"sample (\S+) is acknowledged at (\S+)")
MOVED = re.compile(r"task (\S+) went to another worker")
CLOCKS = 0.05
"""Seconds by which two clocks that tell of one record may differ."""


Cause = Literal["killed", "died", "moved"]
"""Its worker was killed, or ended by itself, or its task went to another worker."""


@dataclass(slots=True)
class Play:
    """One sample in one life of one worker. Times are seconds since the epoch."""

    worker: str
    name: str
    """The trajectory id."""
    began: float
    played: float | None = None
    acknowledged: float | None = None
    place: str = ""
    """Where its record lies, as its worker was told."""
    lost: float | None = None
    """When its worker ended without an acknowledgement, or gave it up."""
    cause: Cause | None = None
    """Why it was lost."""
    kill: int = 0
    """The number of the last kill before it was lost; 0 before the first."""

    @property
    def seconds(self) -> float:
        """Spent generating: until it was played, or lost before that."""
        return max(0.0, (self.played or self.lost or self.began) - self.began)


class Journal:
    """The plays of all workers. Used by one thread."""

    def __init__(self, logs: Mapping[str, Path]) -> None:
        """`logs`: worker -> its log."""
        self._logs = {worker: Follow(path) for worker, path in logs.items()}
        self._open: dict[tuple[str, str], Play] = {}
        self.plays: list[Play] = []
        self.kill = 0
        """Number of the last kill, for what is lost from here on."""

    def read(self) -> set[str]:
        """Take in what was written since; returns the workers that began to serve: each is about to join its group."""
        joining: set[str] = set()
        for worker, log in self._logs.items():
            for line in log.read():
                if line.startswith("serving "):
                    joining.add(worker)
                elif (found := LINE.fullmatch(line)) is not None:
                    moment = datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()
                    self._take(worker, moment, found[2])
        return joining

    def died(self, worker: str, moment: float, cause: Cause) -> None:
        """This worker ended; what it had under way is lost. Read its log to the end first."""
        for key in [key for key in self._open if key[0] == worker]:
            self._lose(self._open.pop(key), moment, cause)

    def _take(self, worker: str, moment: float, text: str) -> None:
        if found := BEGINS.fullmatch(text):
            play = self._open[worker, found[1]] = Play(worker=worker, name=found[1], began=moment)
            self.plays.append(play)
        elif found := PLAYED.fullmatch(text):
            if under_way := self._open.get((worker, found[1])):
                under_way.played = moment
        elif found := ACKNOWLEDGED.fullmatch(text):
            if finished := self._open.pop((worker, found[1]), None):
                finished.acknowledged, finished.place = moment, found[2]
        elif found := MOVED.fullmatch(text):
            for key in [k for k in self._open if k[0] == worker and k[1].rsplit("/", 2)[0] == found[1]]:
                self._lose(self._open.pop(key), moment, "moved")

    def _lose(self, play: Play, moment: float, cause: Cause) -> None:
        play.lost, play.cause, play.kill = moment, cause, self.kill


class Follow:
    """Reads the whole lines that were appended to a file since the last time; it may be put aside and begun anew."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def read(self) -> list[str]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            if file.seek(0, 2) < self._at:
                self._at = 0
            file.seek(self._at)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._at += len(whole) + len(newline)
        return whole.decode(errors="replace").splitlines()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A record of the log, as far as it matters here."""

    place: str
    name: str
    """Its trajectory id."""
    appended: float
    """Seconds since the epoch, by the worker's clock."""


def lost_plays(plays: Iterable[Play], records: Iterable[Stored]) -> list[Play]:
    """The plays that were lost, without those whose record reached the log: right then, or later from a disk.

    A record where no play was acknowledged is that of the last lost play of its sample that had begun by then.
    """
    plays = list(plays)
    taken = {play.place for play in plays if play.acknowledged is not None}
    lost = sorted((play for play in plays if play.lost is not None), key=lambda play: -play.began)
    for record in sorted(records, key=lambda record: record.appended):
        if record.place not in taken:
            own = (p for p in lost if p.name == record.name and p.began <= record.appended + CLOCKS)
            if (found := next(own, None)) is not None:
                lost.remove(found)
    return lost


def played_again(plays: Iterable[Play]) -> Iterator[Play]:
    """Plays to the end of samples that had been acknowledged before they began."""
    first: dict[str, float] = {}
    for play in sorted(plays, key=lambda p: p.began):
        if play.name in first and first[play.name] < play.began and play.played is not None:
            yield play
        if play.acknowledged is not None:
            first[play.name] = min(play.acknowledged, first.get(play.name, play.acknowledged))
