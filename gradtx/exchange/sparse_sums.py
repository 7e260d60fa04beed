"""Sums of sparse payloads over torch.distributed.

Only the places that some rank has sent are read and written again: the zeros around them are
written once, and neither divided nor looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch

from gradtx.backends.torch_ops import split
from gradtx.core.payload import Joined, Parts, Payload, dense
from gradtx.core.transformation import Context
from gradtx.exchange.plan import Plan

_SMALL = 4096  # values of a leaf; a call for each costs more than what it does


class _Sum:
    """The sum of one leaf, or of several small ones that stand one after the other.

    Attributes:
        total: flat.
        judged: once it is scaled, the values at all places that ranks have sent; None before.
    """

    def __init__(self, total: torch.Tensor) -> None:
        self.total, self._sent = total, list[torch.Tensor]()
        self.judged: torch.Tensor | None = None

    def add(self, values: torch.Tensor, places: torch.Tensor) -> None:
        self.total.scatter_add_(0, places, values.to(self.total.dtype))
        self._sent.append(places)

    def scale(self, divisor: int, factor: Any) -> None:
        # All are read before any is written: a place that several ranks have sent comes often.
        places = torch.cat(self._sent) if self._sent else self.total.new_empty(0, dtype=torch.int64)
        values = self.total.index_select(0, places)
        values /= divisor
        if factor is not None:
            values *= factor
        self.total.scatter_(0, places, values)
        self.judged = values


class SparseSums:
    """The sums of one step.

    Args:
        plan: of the step.
        context: of the step. Where it says that gradients may be written over, sums take their
            place.
        divisor: of the sums.
    """

    def __init__(self, plan: Plan, context: Context, divisor: int) -> None:
        self._leaves, self._dtype, self._over = plan.layout.leaves, plan.dtype, context.over
        # What ranks bring unequal parts of is multiplied as well, by what is known in the end.
        self._divisor, self._equal = divisor, context.share is None
        self._sums: dict[int, _Sum] = {}
        self._parts: dict[int, Parts] = {}

    def add(
        self,
        payloads: Sequence[Payload],
        position: int,
        absent: Sequence[frozenset[int]],
        *,
        last: bool,
    ) -> bool:
        """Adds what ranks have sent, in their order, if it is sparse; says whether it was.

        Args:
            payloads: what each of some ranks has sent for a leaf, or for several joined.
            position: of the (first) leaf.
            absent: for each of these ranks, the positions of the leaves that it has no gradient
                for.
            last: whether these are the last ranks: then the sum is divided while it is in the
                cache.
        """
        touched: set[int] = set()
        for payload, gone in zip(payloads, absent, strict=True):
            entries = payload.entries()
            if entries is None:
                return False
            places, values = entries.indices, dense(entries.values)
            if not isinstance(payload, Joined):
                self._add(position, values, places, gone)
                touched.add(position)
                continue
            pieces = _by_leaf(payload.parts, values, places)
            if not self._of_small(payload.parts):
                for i, _, own, there in pieces:
                    self._add(i, own, there, gone)
                    touched.add(i)
                continue
            if position not in self._sums:
                dtype = getattr(torch, self._dtype(position))
                self._sums[position] = _Sum(values.new_zeros(payload.size, dtype=dtype))
                self._parts[position] = payload.parts
            kept = [(values, places)]
            if gone:
                kept = [(own, there + start) for i, start, own, there in pieces if i not in gone]
            for own, there in kept:
                self._sums[position].add(own, there)
            touched.add(position)
        if last and self._equal:
            for i in touched:
                self._sums[i].scale(self._divisor, None)
        return True

    def _of_small(self, parts: Parts) -> bool:
        sizes, dtypes = parts.sizes, {self._leaves[i].dtype for i, _ in parts.leaves}
        return sum(sizes) <= _SMALL * len(sizes) and len(dtypes) == 1

    def _add(
        self, position: int, values: torch.Tensor, places: torch.Tensor, gone: frozenset[int]
    ) -> None:
        if position not in self._sums:
            self._sums[position] = _Sum(self._zeros(position, values))
        if position not in gone:
            self._sums[position].add(values, places)

    def _zeros(self, position: int, like: torch.Tensor) -> torch.Tensor:
        dtype = getattr(torch, self._dtype(position))
        given = self._over[position] if self._over else None
        if given is not None and given.dtype == dtype and given.is_contiguous():
            total: torch.Tensor = given.detach().zero_().view(-1)
            return total
        return like.new_zeros(self._leaves[position].size, dtype=dtype)

    def results(self, factor: Any = None) -> dict[int, torch.Tensor]:
        """The sums, divided and multiplied, by position of the leaf; call it once."""
        out: dict[int, torch.Tensor] = {}
        for i, found in self._sums.items():
            if found.judged is None:
                found.scale(self._divisor, factor)
            if i not in self._parts:
                out[i] = found.total
                continue
            places, shapes = zip(*self._parts[i].leaves, strict=True)
            out.update(zip(places, split(found.total, shapes), strict=True))
        return out

    def judged(self, leaves: Sequence[Any]) -> list[Any]:
        """The results with, for the sums, only what is at the places that some rank has sent."""
        out = list(leaves)
        for parts in self._parts.values():
            for place, _ in parts.leaves:
                out[place] = None
        for i, found in self._sums.items():
            out[i] = found.judged
        return out


def _by_leaf(
    parts: Parts, values: torch.Tensor, places: torch.Tensor
) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
    """For each leaf its position, where it starts, and its values and their places in it."""
    ends = list(accumulate(parts.sizes))
    cuts = torch.searchsorted(places, torch.tensor(ends, device=places.device)).tolist()
    bounds = zip([0, *cuts], cuts, [0, *ends], strict=False)
    for (i, _), (first, last, start) in zip(parts.leaves, bounds, strict=True):
        yield i, start, values[first:last], places[first:last] - start
