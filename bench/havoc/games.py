"""The demo's two games for a model that has learnt nothing: every word is a move, and a turn takes its time.

Without a warm start a model says any of 251 words, and the game would end at the first one that is no move. Here such a
word stands for the move that its hash picks; so episodes have many turns, and some are won. A turn takes 0.25 s in the
median and now and then a second: what a kill meets is under way.
"""

import asyncio
import random
import zlib
from collections.abc import Mapping
from dataclasses import replace

from rollstream.app.demo import games
from rollstream.producers.environment import Action, Environment, Outcome

MEDIAN, SPREAD = 0.25, 0.7
"""Seconds of a turn, and sigma of their logarithm."""


def number(name: str) -> Environment:
    """`adapter = "havoc.games:number"`."""
    return Lenient(games.number(name))


def lake(name: str) -> Environment:
    """`adapter = "havoc.games:lake"`."""
    return Lenient(games.lake(name))


class Lenient:
    """A game in which every word is a move."""

    def __init__(self, game: Environment) -> None:
        self._game = game
        self._moves: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self._game.name

    @property
    def version(self) -> str:
        return self._game.version

    async def reset(self, payload: Mapping[str, str], seed: int) -> Outcome:
        outcome = await self._game.reset(payload, seed)
        self._moves = find_moves(outcome.messages[-1].content)
        return outcome

    async def step(self, action: Action) -> Outcome:
        # Of the world's chance, not of the seed's: the samples of a group take different times.
        await asyncio.sleep(random.lognormvariate(0.0, SPREAD) * MEDIAN)
        return await self._game.step(replace(action, text=pick_move(action.text, self._moves)))

    async def close(self) -> None:
        await self._game.close()


def find_moves(opening: str) -> tuple[str, ...]:
    """The moves of the game that opens with these words."""
    kind, *words = opening.split()
    if kind == "<number>":
        low, high = map(int, words)
        return tuple(map(str, range(low, high + 1)))
    return games.ACTIONS


def pick_move(word: str, moves: tuple[str, ...]) -> str:
    """The word itself where it is a move, else the one that it stands for."""
    return word if word in moves else moves[zlib.crc32(word.encode()) % len(moves)]
