"""`run_ranks`: several ranks as threads of this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from gradtx.core.errors import RankMismatchError
from gradtx.exchange.group import Group, Hub, ThreadGroup, default_group

T = TypeVar("T")


def run_ranks(size: int, fn: Callable[[int], T], *, timeout: float = 30.0) -> list[T]:
    """Calls a function once a rank, each in a thread of its own that is a member of one group.

    Within `fn` the group is the default of `allreduce`.

    Args:
        size: how many ranks.
        fn: ``fn(rank)``; what raises in one rank ends the wait of the others.
        timeout: seconds that a rank waits for the others.

    Returns:
        What `fn` returned, in rank order.

    Raises:
        Exception: what a rank raised: the cause, if others raised only because of it.

    Example:
        >>> run_ranks(2, lambda rank: rank * 10)
        [0, 10]
    """
    hub = Hub(size, timeout)

    def call(rank: int) -> T:
        with default_group(ThreadGroup(hub, rank) if size > 1 else Group()):
            try:
                return fn(rank)
            finally:
                hub.leave(rank)

    with ThreadPoolExecutor(size, thread_name_prefix="rank") as pool:
        futures = [pool.submit(call, rank) for rank in range(size)]
        wait(futures)
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise min(errors, key=_consequence)
    return [future.result() for future in futures]


def _consequence(error: BaseException) -> int:
    """Sorts causes before what only follows from another rank's failure."""
    return 2 if isinstance(error, TimeoutError) else int(isinstance(error, RankMismatchError))
