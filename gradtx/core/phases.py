"""What a step spends its time on: a clock that functions name their phase to.

Nothing is measured unless a `PhaseClock` runs in this thread: a function of a phase then costs one
look-up. Arrays are not touched, so it makes no difference to what JAX traces.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

PHASES = ("feedback", "select", "encode", "transport", "decode", "apply")
"""The phases of a step, in order.

- ``feedback``: residuals are added, and what compression leaves out is kept;
- ``select``: compressors choose and round values, and find factors;
- ``encode``: payloads and dense leaves become the bytes that are sent;
- ``transport``: collectives, waiting for other ranks in them included;
- ``decode``: what has come becomes payloads again;
- ``apply``: those are added up, divided, and written to where the result belongs.
"""


class PhaseClock:
    """Seconds by phase; a phase within another one stops that for as long as it lasts.

    Attributes:
        seconds: of each phase so far.

    Example:
        >>> @in_phase("select")
        ... def choose():
        ...     return 1
        >>> clock = PhaseClock()
        >>> with clock.running():
        ...     choose()
        1
        >>> list(clock.seconds), clock.seconds["select"] > 0
        (['select'], True)
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def running(self) -> Iterator[PhaseClock]:
        """Measures what this thread does within a ``with`` block."""
        token = _clock.set(self)
        try:
            yield self
        finally:
            _clock.reset(token)

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Counts a ``with`` block as a phase."""
        self._turn()
        self._open.append(phase)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def _turn(self) -> None:
        now = time.perf_counter()
        if self._open:
            phase = self._open[-1]
            self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now


_clock: ContextVar[PhaseClock | None] = ContextVar("gradtx_phase_clock", default=None)


def in_phase(phase: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a decorator: what the function does belongs to a phase.

    Args:
        phase: one of `PHASES`, or a name of one's own.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            clock = _clock.get()
            if clock is None:
                return function(*args, **kwargs)
            with clock.within(phase):
                return function(*args, **kwargs)

        return timed

    return decorate
