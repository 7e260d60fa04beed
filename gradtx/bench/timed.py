"""A group of ranks that tells how long its collectives take."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

from gradtx.exchange.group import Group

Result = TypeVar("Result")


class TimedGroup(Group):
    """Another group, with a clock; it is what `allreduce` is given.

    Before each collective the ranks wait for each other, so that time spent on the link is told
    apart from time spent waiting for a rank that computes for longer.

    Args:
        inner: the group that does the work.

    Attributes:
        waiting: seconds spent waiting for other ranks so far.
        transport: seconds spent in collectives so far, all ranks having come.

    Example:
        >>> group = TimedGroup(Group())
        >>> group.all_gather(torch.zeros(3, dtype=torch.uint8))
        [tensor([0, 0, 0], dtype=torch.uint8)]
        >>> group.waiting >= 0 and group.transport > 0
        True
    """

    def __init__(self, inner: Group) -> None:
        super().__init__()
        self.rank, self.size = inner.rank, inner.size
        self._inner = inner
        self.waiting = self.transport = 0.0

    def sibling(self) -> Group:
        """Another group of the same ranks, with a clock of its own."""
        return TimedGroup(self._inner.sibling())

    def _all_gather(self, message: torch.Tensor) -> list[torch.Tensor]:
        return self._timed(self._inner.all_gather, message)

    def _all_reduce(self, buffer: torch.Tensor) -> torch.Tensor:
        return self._timed(self._inner.all_reduce, buffer)

    def _broadcast(self, buffer: torch.Tensor) -> torch.Tensor:
        return self._timed(self._inner.broadcast, buffer)

    def _timed(self, collective: Callable[[torch.Tensor], Result], tensor: torch.Tensor) -> Result:
        came = time.perf_counter()
        self._inner.all_reduce(torch.zeros(1))
        met = time.perf_counter()
        result = collective(tensor)
        self.waiting += met - came
        self.transport += time.perf_counter() - met
        return result
