"""Values at positions in many leaves as few long sparse vectors: the lanes, one a dtype."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from gradtx import backends
from gradtx.core.payload import Joined, Payload, plain
from gradtx.exchange.owners import Owners
from gradtx.wire import WireFormatError, decode_indices, encode_indices, indices_nbytes

_ALIGNMENT = 8
Part = tuple[torch.Tensor, torch.Tensor]
"""Slots of a rank, int64 and strictly increasing, and the values for them."""


@dataclass(frozen=True)
class Lane:
    """The flat leaves of some payloads, one after the other, and what a rank has for them.

    Attributes:
        places: the positions of the payloads, in path order.
        lengths: how many values each of their leaves has.
        owners: of the positions in all of them.
        indices: int64, strictly increasing: where this rank has something.
        values: what it has there, in the dtype that it is sent in.
        exponents: int16, for each payload: of two, what its values are to be multiplied by; None if
            they are what they are.
    """

    places: list[int]
    lengths: list[int]
    owners: Owners
    indices: torch.Tensor
    values: torch.Tensor
    exponents: torch.Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        """What sums are made in."""
        return torch.float64 if self.values.dtype == torch.float64 else torch.float32

    @property
    def exponents_nbytes(self) -> int:
        """What the exponents take, in bytes."""
        return 0 if self.exponents is None else 2 * len(self.places)

    def split(self, flat: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """The position of each payload, and its part of what is laid out as the lane is."""
        return zip(self.places, flat.split(self.lengths), strict=True)

    def by_owner(self) -> list[Part]:
        """For each rank, the slots that this rank has something for."""
        owner, slots = self.owners.find(self.indices)
        order = owner.sort(stable=True).indices
        counts = torch.bincount(owner, minlength=self.owners.size).tolist()
        slots, values = slots[order], self.values[order]
        return list(zip(slots.split(counts), values.split(counts), strict=True))

    def widened(self, rank: int, part: Part, exponents: torch.Tensor | None) -> torch.Tensor:
        """The values for slots of a rank, in the dtype of sums.

        Args:
            rank: whose slots they are.
            part: as it was sent.
            exponents: of who sent it, for each payload.
        """
        slots, values = part
        wide = values.to(self.dtype)
        if exponents is None:
            return wide
        ends = torch.tensor(list(accumulate(self.lengths)), device=slots.device)
        leaf = torch.searchsorted(ends, self.owners.positions(rank, slots), right=True)
        powers: torch.Tensor = backends.of(wide).power_of_two(exponents, "float32")
        return wide * powers[leaf]


def lanes_of(
    payloads: Mapping[int, Payload], size: int, is_absent: Callable[[int], bool]
) -> list[Lane]:
    """The lanes of payloads that have `Payload.entries`; of the same form on all ranks.

    What is zero is left out, and what stands for a leaf that is not there.

    Args:
        payloads: by position, in path order.
        size: how many ranks there are.
        is_absent: whether this rank has no gradient for the leaf at a position.
    """
    found: dict[tuple[str, bool], list[tuple[int, torch.Tensor, Part]]] = {}
    for i, payload in payloads.items():
        entries = payload.entries()
        if entries is None:
            raise AssertionError(f"{payload!r} has no values at positions")
        values, exponents = plain(entries.values)
        scaled = exponents is not None
        row = i, entries.indices.to(torch.int64), (values, exponents if scaled else values[:0])
        found.setdefault((str(values.dtype), scaled), []).append(row)
    return [
        _lane({i: payloads[i] for i, _, _ in rows}, rows, scaled, size, is_absent)
        for (_, scaled), rows in sorted(found.items(), key=lambda item: item[0])
    ]


def _lane(
    payloads: Mapping[int, Payload],
    rows: Sequence[tuple[int, torch.Tensor, Part]],
    scaled: bool,
    size: int,
    is_absent: Callable[[int], bool],
) -> Lane:
    lengths = [payload.size for payload in payloads.values()]
    starts = list(accumulate(lengths, initial=0))
    indices = torch.cat([own + start for (_, own, _), start in zip(rows, starts, strict=False)])
    values = torch.cat([own for _, _, (own, _) in rows])
    keep = values != 0
    for (i, payload), start in zip(payloads.items(), starts, strict=False):
        for first, stop in _absent(i, payload, is_absent):
            keep &= (indices < start + first) | (indices >= start + stop)
    some = keep.nonzero().view(-1)
    exponents = torch.cat([own for _, _, (_, own) in rows]) if scaled else None
    owners = Owners(starts[-1], size)
    return Lane(list(payloads), lengths, owners, indices[some], values[some], exponents)


def _absent(
    place: int, payload: Payload, is_absent: Callable[[int], bool]
) -> Iterator[tuple[int, int]]:
    """Where in a payload those leaves lie that this rank has no gradient for."""
    if not isinstance(payload, Joined):
        if is_absent(place):
            yield 0, payload.size
        return
    ends = accumulate((math.prod(shape) for _, shape in payload.parts.leaves), initial=0)
    for (i, _), (start, stop) in zip(payload.parts.leaves, pairwise(ends), strict=True):
        if is_absent(i):
            yield start, stop


def part_nbytes(count: int, slots: int, itemsize: int) -> int:
    """What the values for so many of the slots of a rank take, in bytes: a multiple of 8."""
    return _round_up(count * itemsize + indices_nbytes(count, slots))


def whole_nbytes(length: int, itemsize: int) -> int:
    """What so many values without positions take, in bytes: a multiple of 8."""
    return _round_up(length * itemsize)


def encode_whole(values: torch.Tensor) -> torch.Tensor:
    """Values without positions as uint8 ``[whole_nbytes(...)]``."""
    data = values.view(torch.uint8)
    missing = whole_nbytes(values.numel(), values.element_size()) - data.numel()
    return torch.cat([data, data.new_zeros(missing)])


def encode_part(part: Part, slots: int) -> torch.Tensor:
    """Slots and values as uint8 ``[part_nbytes(...)]``: the values, and then the index code."""
    where, values = part
    segments = [values.view(torch.uint8), encode_indices(where, slots)]
    missing = -sum(segment.numel() for segment in segments) % _ALIGNMENT
    return torch.cat([*segments, segments[0].new_zeros(missing)])


def decode_part(data: torch.Tensor, count: int, slots: int, room: int, dtype: torch.dtype) -> Part:
    """The inverse, trusting no byte.

    Args:
        data: uint8.
        count: how many slots it speaks of.
        slots: of how many.
        room: how many of those are the slots of a position.
        dtype: of the values.

    Raises:
        WireFormatError: if it is of another size, or speaks of a slot that is none.
    """
    expected = part_nbytes(count, slots, dtype.itemsize)
    if data.numel() != expected:
        raise WireFormatError(f"values of {data.numel()} bytes, expected {expected}")
    if data.storage_offset() % _ALIGNMENT:
        data = data.clone()
    end = count * dtype.itemsize
    where = decode_indices(data[end : end + indices_nbytes(count, slots)], count, slots)
    if count and int(where[-1]) >= room:
        raise WireFormatError(f"slot {int(where[-1])} is that of no position, of {room}")
    return where, data[:end].view(dtype)


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
