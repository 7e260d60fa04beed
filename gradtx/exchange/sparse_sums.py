"""Sums of sparse payloads over torch.distributed.

Only the places that some rank has sent are read and written again: the zeros around them are
written once, and neither divided nor looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from gradtx.core.payload import Joined, Payload
from gradtx.core.transformation import Context
from gradtx.exchange.plan import Plan


class SparseSums:
    """The sums of one step.

    Args:
        plan: of the step.
        context: of the step. Where it says that gradients may be written over, sums take their
            place.
    """

    def __init__(self, plan: Plan, context: Context) -> None:
        self._plan, self._over = plan, context.over
        self._sums: dict[int, torch.Tensor] = {}
        self._sent: dict[int, list[torch.Tensor]] = {}
        self._judged: dict[int, torch.Tensor] = {}

    def add(
        self, payloads: Sequence[Payload], position: int, is_absent: Callable[[int, int], bool]
    ) -> bool:
        """Adds what ranks have sent, in their order, if it is sparse; says whether it was.

        Args:
            payloads: what each of some ranks has sent for a leaf, or for several joined.
            position: of the (first) leaf.
            is_absent: whether the rank of that number among these has no gradient for the leaf at
                a position.
        """
        for rank, payload in enumerate(payloads):
            entries = payload.entries()
            if entries is None:
                return False
            for i, values, places in _by_leaf(payload, position, *entries):
                if i not in self._sums:
                    self._sums[i], self._sent[i] = self._zeros(i, values), []
                if not is_absent(rank, i):
                    total = self._sums[i]
                    total.scatter_add_(0, places, values.to(total.dtype))
                    self._sent[i].append(places)
        return True

    def _zeros(self, position: int, like: torch.Tensor) -> torch.Tensor:
        spec, dtype = self._plan.layout.leaves[position], getattr(torch, self._plan.dtype(position))
        given = self._over[position] if self._over else None
        if given is not None and given.dtype == dtype and given.is_contiguous():
            total: torch.Tensor = given.detach().zero_().view(-1)
            return total
        return like.new_zeros(spec.size, dtype=dtype)

    def results(self, divisor: int, factor: Any = None) -> dict[int, torch.Tensor]:
        """The sums, divided and multiplied, flat, by position; call it once."""
        for i, total in self._sums.items():
            # All are read before any is written: a place that several ranks have sent comes often.
            found = [total.index_select(0, places) for places in self._sent[i]]
            for places, values in zip(self._sent[i], found, strict=True):
                values /= divisor
                if factor is not None:
                    values *= factor
                total.scatter_(0, places, values)
            self._judged[i] = torch.cat([*found, total[:1]])
        return self._sums

    def judged(self, leaves: Sequence[Any]) -> list[Any]:
        """The results with, for the sums, only what is at the places that some rank has sent."""
        return [self._judged.get(i, leaf) for i, leaf in enumerate(leaves)]


def _by_leaf(
    payload: Payload, position: int, values: torch.Tensor, places: torch.Tensor
) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """For each leaf its position, and its values and their places."""
    if not isinstance(payload, Joined):
        return [(position, values, places)]
    where = [i for i, _ in payload.parts.leaves]
    ends = list(accumulate(payload.parts.sizes))
    bounds = torch.tensor(ends, device=places.device)
    cuts = [0, *torch.searchsorted(places, bounds).tolist()]
    starts = [0, *ends[:-1]]
    return [
        (i, values[a:b], places[a:b] - start)
        for i, a, b, start in zip(where, cuts, cuts[1:], starts, strict=False)
    ]
