"""The flags that ranks share in a step: bad steps, errors, absent leaves.

They ride in the header of the gathered message, or, where nothing is gathered, in spare slots at
the end of the first dense buffer, which the all-reduce sums: so they cost no round trip.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gradtx.wire import Header, WireFormatError

# Small enough for the sum of squares to be exact in FP32 on 4,000 ranks.
STEPS = 64
_EXACT = {"float32": 2**24, "float64": 2**53}


@dataclass(frozen=True)
class Flags:
    """How many ranks say what.

    Attributes:
        not_finite: ranks whose gradients were not finite as they arrived.
        errors: ranks that failed.
        absent: for each leaf, in path order, ranks that have no gradient for it.
        steps: the ranks' steps, modulo `STEPS` each, added up, and their squares.
        weight: what the parts of all ranks weigh together.
        left_out: ranks that have left something bad out of their part.
        flushing: ranks that bring no more until all are through.
    """

    not_finite: int
    errors: int
    absent: tuple[int, ...]
    steps: tuple[int, int]
    weight: float
    left_out: int
    flushing: int

    @classmethod
    def of(cls, headers: Sequence[Header]) -> Flags:
        """The sum over the headers of all ranks."""
        return cls(
            sum(not header.finite for header in headers),
            sum(header.error for header in headers),
            _counts([header.absent for header in headers]),
            (
                sum(header.step % STEPS for header in headers),
                sum((header.step % STEPS) ** 2 for header in headers),
            ),
            sum(header.weight for header in headers),
            sum(header.left_out for header in headers),
            sum(header.flushing for header in headers),
        )

    def in_step(self, size: int) -> bool:
        """Whether all ranks are at the same step (modulo `STEPS`); all ranks find the same."""
        total, squares = self.steps
        return size * squares == total**2

    def absent_everywhere(self, size: int) -> tuple[bool, ...]:
        """Which leaves no rank has a gradient for."""
        if not any(self.absent):
            return (False,) * len(self.absent)
        return tuple(count == size for count in self.absent)


def _counts(absent: Sequence[tuple[bool, ...]]) -> tuple[int, ...]:
    """For each leaf, how many ranks have no gradient for it."""
    if not any(map(any, absent)):
        return (0,) * len(absent[0])
    return tuple(map(sum, zip(*absent, strict=True)))


class Slots:
    """The flags as numbers that can be summed without rounding.

    Four slots add up bad steps, errors, and the ranks' steps and their squares; each further one
    holds the counts of several leaves, as digits to the base of the number of ranks plus one. Where
    ranks bring unequal parts, two such digits are for what they say of them, and a last slot, which
    may be rounded, adds up their weights.

    Args:
        leaves: how many leaves there are.
        size: how many ranks.
        dtype: of the buffer: ``"float32"`` or ``"float64"``.
        windowed: whether ranks bring unequal parts.
    """

    def __init__(self, leaves: int, size: int, dtype: str, *, windowed: bool = False) -> None:
        self._leaves, self._size, self._base = leaves, size, size + 1
        self._windowed = windowed
        self._digits = 1
        while self._base ** (self._digits + 1) <= _EXACT[dtype]:
            self._digits += 1

    @property
    def length(self) -> int:
        """How many slots."""
        counts = self._leaves + 2 * self._windowed
        return 4 + -(-counts // self._digits) + self._windowed

    def encode(self, header: Header) -> list[float]:
        """This rank's flags."""
        slots = [0.0] * self.length
        step = header.step % STEPS
        slots[:4] = float(not header.finite), float(header.error), float(step), float(step**2)
        said = header.absent
        if self._windowed:
            said = (*said, header.left_out, header.flushing)
            slots[-1] = header.weight
        for i, yes in enumerate(said):
            if yes:
                slots[4 + i // self._digits] += self._base ** (i % self._digits)
        return slots

    def decode(self, slots: Sequence[float]) -> Flags:
        """The flags of all ranks, from the sum of their slots.

        Raises:
            WireFormatError: if it is not the sum of what so many ranks encode.
        """
        end = len(slots) - self._windowed
        last, ranks = STEPS - 1, self._size
        most = [ranks, ranks, ranks * last, ranks * last**2]
        most += [self._base**self._digits - 1] * (end - len(most))
        for slot, limit in zip(slots[:end], most, strict=True):
            if not (0 <= slot <= limit and slot == int(slot)):
                raise WireFormatError(f"flags add up to {slot}, expected 0 to {limit}")
        if self._windowed and not 0 <= slots[-1] < math.inf:
            raise WireFormatError(f"weights add up to {slots[-1]}, expected at least 0")
        numbers = [int(slot) for slot in slots[:end]]
        counts = tuple(
            numbers[4 + i // self._digits] // self._base ** (i % self._digits) % self._base
            for i in range(self._leaves + 2 * self._windowed)
        )
        absent, said = counts[: self._leaves], counts[self._leaves :]
        weight, left_out, flushing = (
            (slots[-1], *said) if self._windowed else (float(self._size), 0, 0)
        )
        return Flags(
            numbers[0], numbers[1], absent, (numbers[2], numbers[3]), weight, left_out, flushing
        )
