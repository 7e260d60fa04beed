"""Ranks as threads that take turns."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gradtx.exchange.group import Hub, ThreadGroup, default_group


class Turns(Hub):
    """Threads of one process that form a group, and of which one at a time works.

    With networks this small a step is thousands of calls of microseconds each, and threads that ran
    at once would spend up to half of their time handing Python's lock to each other. So a rank
    works until it has to wait for others: a run keeps one core busy, and needs no second one.

    Args:
        size: how many threads.
        timeout: seconds that a thread waits for the others.
    """

    def __init__(self, size: int, timeout: float) -> None:
        super().__init__(size, timeout)
        self._turn = threading.Lock()

    @contextmanager
    def member(self, rank: int) -> Iterator[None]:
        """Makes this thread a rank, for the time of a ``with`` block."""
        try:
            with default_group(ThreadGroup(self, rank)), self._turn:
                yield
        finally:
            self.leave(rank)

    def swap(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """As `Hub.swap`; others work meanwhile."""
        self._turn.release()
        try:
            return super().swap(rank, tensor)
        finally:
            self._turn.acquire()
