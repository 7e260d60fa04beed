"""Errors that several parts of the library raise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Violation:
    """One rule that a chain breaks.

    Attributes:
        code: the rule, such as ``"GX102"``.
        stages: positions in the flat chain.
        reason: what goes wrong.
        fix: what to write instead.
    """

    code: str
    stages: tuple[int, ...]
    reason: str
    fix: str


class ChainOrderError(ValueError):
    """A chain was refused.

    Attributes:
        violations: all rules that it breaks, the most telling first.
        suggestion: the same transformations in an order that passes, or None.
    """

    def __init__(
        self, message: str, violations: Sequence[Violation], suggestion: Any | None = None
    ) -> None:
        super().__init__(message)
        self.violations = tuple(violations)
        self.suggestion = suggestion

    def __reduce__(self) -> tuple[Any, ...]:
        # A suggestion is full of functions, and stays behind.
        return type(self), (str(self), self.violations, None)


class NeverFiniteError(FloatingPointError):
    """Raised when so many steps in a row are bad that waiting for a good one makes no sense."""


class RankMismatchError(RuntimeError):
    """Ranks disagree (other chain, other parameters, other step), or another rank failed."""


class RankLostError(RankMismatchError):
    """A rank has died, was silent for longer than the group's time-out, or has given up.

    The step has left no trace on the rank that raises this. The group is of no more use, and says
    so at once when it is used again: begin anew from the checkpoints of one step.
    """
