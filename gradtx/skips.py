"""Bad steps in a row, and when there have been too many."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from gradtx.core.arguments import check_whole
from gradtx.core.errors import NeverFiniteError


class Skips:
    """Counts bad steps in a row, and keeps in mind which gradients were finite in none of them.

    Args:
        argument: how `most` was given, such as ``"Pipeline(max_skips"``.
        most: how many are borne, at least 1; None for any number.

    Raises:
        TypeError: if `most` is no whole number.
        ValueError: if it is less than 1.
    """

    def __init__(self, argument: str, most: Any) -> None:
        if most is not None:
            check_whole(argument, most, 1)
        self._most: int | None = most
        self._row = 0
        self._bad: set[str] = set()
        self._never_finite: set[str] | None = None

    def look(self, gradients: Iterable[tuple[str, torch.Tensor | None]]) -> None:
        """Looks, while steps are skipped, which gradients, by path, are not finite."""
        if not self._row:
            return
        there = ((path, grad) for path, grad in gradients if grad is not None)
        values = ((path, grad._values() if grad.is_sparse else grad) for path, grad in there)
        self._bad |= {path for path, x in values if not bool(x.isfinite().all())}

    def count(self, skipped: bool) -> None:
        """Counts a step.

        Raises:
            NeverFiniteError: if it is one skipped step too many.
        """
        if not skipped:
            self._never_finite = None
        elif self._row:
            known = self._never_finite
            self._never_finite = self._bad if known is None else known & self._bad
        self._bad = set()
        self._row = self._row + 1 if skipped else 0
        if self._most is None or self._row <= self._most:
            return
        found = sorted(self._never_finite or ())
        here = ", ".join(map(repr, found[:5])) or "none on this rank"
        raise NeverFiniteError(
            f"{self._row} steps in a row were skipped; gradients that were finite in none of "
            f"them: {here}. A smaller loss scale does not help: look for an infinity or a NaN in "
            "the loss or the model"
        )
