"""The processes that train one run together, as one of them sees the others.

    torchrun --> rank 0 | rank 1 | ...      each reads partitions of its own, whole groups
    exchange     what every rank has to say, in rank order            small values, over gloo
    add_up       tensors, in place: everybody has the sum             gradients, over gloo or nccl

One process alone is the case of one rank, `ALONE`: the trainer is written once. Everybody must make the same calls in
the same order, so whoever decides something decides it from what was exchanged.
"""

import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..schemas.errors import RollstreamError

T = TypeVar("T")

PATIENCE = timedelta(minutes=30)
"""How long one rank may keep the others waiting, besides the time that a publish may be tried again."""
BUCKET = 1 << 24
"""Elements that are added up at once; more would double the memory of the gradients."""

_dist: Any = dist  # its annotations leave much open


class RankLost(RollstreamError):
    """Another rank is gone; this one cannot go on without it."""


class Ranks(Protocol):
    """Used by the trainer's thread alone."""

    @property
    def rank(self) -> int:
        """This process's number; 0 publishes."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def exchange(self, value: T) -> list[T]:
        """Everybody's value, in rank order; waits for all. Raises `RankLost`."""
        ...

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Put the sum over all ranks into these tensors, the same bits everywhere. Raises `RankLost`."""
        ...


class Alone:
    """One process."""

    rank, size = 0, 1

    def exchange(self, value: T) -> list[T]:
        return [value]

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Nothing to add."""


ALONE = Alone()


class TorchRanks:
    """Ranks over `torch.distributed`, whose default process group is there already."""

    def __init__(self, limit: timedelta = PATIENCE) -> None:
        """`limit`: how long an exchange waits for the others."""
        self.rank: int = _dist.get_rank()
        self.size: int = _dist.get_world_size()
        # Values travel over the host whatever the gradients do: nccl would put them on the GPU.
        self._values = _dist.new_group(backend="gloo", timeout=limit)

    def exchange(self, value: T) -> list[T]:
        values: list[T] = [value] * self.size
        with _lost():
            _dist.all_gather_object(values, value, group=self._values)
        return values

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            with _lost():
                _dist.all_reduce(flat)
            at = 0
            for tensor in bucket:
                tensor.copy_(flat[at : at + tensor.numel()].view_as(tensor))
                at += tensor.numel()


@contextmanager
def open_ranks(device: str, *, publish: float = 0.0) -> "Generator[tuple[Ranks, str]]":
    """The ranks that torchrun started, or `ALONE`, and this rank's device: "cuda" becomes a GPU of its own.

    `publish`: seconds for which rank 0 may try a publish again, while the others wait for it. Raises `RankLost` where
    the others do not come.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE, device
        return
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    with _lost():
        _dist.init_process_group("nccl" if device.startswith("cuda") else "gloo", timeout=PATIENCE)
        ranks = TorchRanks(PATIENCE + timedelta(seconds=publish))
    try:
        yield ranks, device
    finally:
        _dist.destroy_process_group()


@contextmanager
def _lost() -> Generator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLost(
            f"the ranks of this run lost each other, what the lost one says of itself is the cause: {error}; "
            f"start them anew together, they go on from the last checkpoint"
        ) from error


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one type, in parts of about `BUCKET` elements."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        full = sum(t.numel() for t in bucket) + tensor.numel() > BUCKET
        if bucket and (full or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
