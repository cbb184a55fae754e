"""The key-value cache of the `transformers` engine: rows of keys and values, and who may go on from which.

A row holds the keys and values of one token sequence from position 0 on. A request takes a row; when it is done the row
stays, idle, until a request whose prompt extends its tokens takes it up (the next turn of that conversation), or until
it is the one idle for longest and a row is needed. So a multi-turn episode computes each of its tokens once.
"""

from collections import Counter, OrderedDict, defaultdict
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

FIRST_CAPACITY = 64
ID_BYTES = 4


class RowPool:
    """Which row holds which tokens. Tokens are given as the bytes of their int32 ids."""

    def __init__(self, rows: int) -> None:
        self._free = list(range(rows))
        self._idle = OrderedDict[int, bytes]()
        self._holders = defaultdict[bytes, list[int]](list)
        self._lengths = Counter[int]()

    def claim(self, prompt: bytes) -> tuple[int, int]:
        """A row for this prompt, and how many of its first tokens the row holds: less than all."""
        for length in sorted(self._lengths, reverse=True):
            if length < len(prompt) and (holders := self._holders.get(prompt[:length])):
                row = holders[-1]
                self._take(row)
                return row, length // ID_BYTES
        if not self._free:
            self._free.append(self._take(next(iter(self._idle))))
        return self._free.pop(), 0

    def release(self, row: int, tokens: bytes) -> None:
        """The row is idle and holds these tokens."""
        self._idle[row] = tokens
        self._holders[tokens].append(row)
        self._lengths[len(tokens)] += 1

    def forget(self) -> None:
        """What idle rows hold is worth nothing any more."""
        for row in list(self._idle):
            self._free.append(self._take(row))

    def _take(self, row: int) -> int:
        tokens = self._idle.pop(row)
        self._holders[tokens].remove(row)
        if not self._holders[tokens]:
            del self._holders[tokens]
        self._lengths[len(tokens)] -= 1
        self._lengths += Counter()
        return row


class RowCache:
    """Keys and values of every layer, for rows of up to `context` positions; memory grows with the longest row."""

    def __init__(self, *, rows: int, context: int, layers: int) -> None:
        self.rows, self._context, self._capacity = rows, context, min(FIRST_CAPACITY, context)
        self._layers = [_Layer(self) for _ in range(layers)]
        self.reading = torch.empty(0, dtype=torch.long)
        """[b]: the rows of the batch that is being computed."""
        self.writing = torch.empty(0, dtype=torch.long)
        """[b * l]: where its new keys and values go, counted over rows and positions; padding goes to a spare row."""
        self.length = 0
        """Positions that the batch looks at."""

    @property
    def capacity(self) -> int:
        """Positions a row has now."""
        return self._capacity

    def as_transformers(self) -> Any:
        """What a model takes as `past_key_values`."""
        return import_module("transformers").Cache(layers=self._layers)

    def place(self, rows: Tensor, positions: Tensor, real: Tensor) -> None:
        """Say where the next forward pass reads and writes.

        `rows` [b]; `positions` [b, l]; `real` [b, l] bool: the others are padding and are written to nobody's row.
        """
        self.length = int(positions.max()) + 1
        while self._capacity < self.length:
            self._capacity = min(2 * self._capacity, self._context)
        self.reading = rows
        owners = torch.where(real, rows.unsqueeze(-1), self.rows)
        self.writing = (owners * self._capacity + positions).flatten()

    def forget(self) -> None:
        """Let go of everything. Fresh memory is zeros: a NaN left behind would reach others, mask or no mask."""
        for layer in self._layers:
            layer.keys = layer.values = None


class _Layer:
    """One layer of `transformers.Cache`, as far as attention needs it: twice [rows + 1, capacity, heads, size]."""

    def __init__(self, cache: RowCache) -> None:
        self._cache = cache
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Take in [b, heads, l, size] each, give back what the batch looks at: [b, heads, length, size] each."""
        self.keys, self.values = self._fitted(self.keys, keys), self._fitted(self.values, values)
        return self._exchange(self.keys, keys), self._exchange(self.values, values)

    def get_seq_length(self) -> int:
        """Positions and mask come with the batch, so nothing is derived from this."""
        return 0

    def _exchange(self, held: Tensor, new: Tensor) -> Tensor:
        cache = self._cache
        held.flatten(0, 1).index_copy_(0, cache.writing, new.transpose(1, 2).flatten(0, 1))
        return held[:, : cache.length].index_select(0, cache.reading).transpose(1, 2)

    def _fitted(self, held: Tensor | None, new: Tensor) -> Tensor:
        """As much memory as the capacity asks for, what was there kept."""
        capacity = self._cache.capacity
        if held is not None and held.shape[1] == capacity:
            return held
        grown = new.new_zeros(self._cache.rows + 1, capacity, new.shape[1], new.shape[3])
        if held is not None:
            grown[:, : held.shape[1]] = held
        return grown
