"""Processes that tell the one that started them what they do."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import ProcessContext, spawn


def messages_of(
    function: Callable[..., None],
    arguments: tuple[Any, ...],
    count: int,
    limit: float = float("inf"),
) -> Generator[Any, None, None]:
    """Starts processes and hands on what they tell; none of them outlives this generator.

    Args:
        function: what each of them calls, ``function(number, *arguments, outbox)``; what it puts
            into the queue `outbox` is handed on.
        arguments: the same for all.
        count: how many processes.
        limit: seconds that they may take.

    Raises:
        TimeoutError: if they take longer.
        ProcessException: if one of them fails; with its traceback, if it has raised.
    """
    deadline = time.monotonic() + limit
    inbox = get_context("spawn").SimpleQueue()
    with started(function, (*arguments, inbox), count) as processes:
        ended = False
        while not ended:
            ended = processes.join(timeout=0.1)
            while not inbox.empty():
                yield inbox.get()
            if time.monotonic() > deadline:
                raise TimeoutError(f"the processes have not ended in {limit:.0f} s")


@contextmanager
def started(
    function: Callable[..., None], arguments: tuple[Any, ...], count: int
) -> Iterator[ProcessContext]:
    """Processes, which are stopped when the block is left."""
    context = spawn(function, arguments, nprocs=count, join=False, daemon=True)
    try:
        yield context
    finally:
        for process in context.processes:
            process.terminate()
        for process in context.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
