"""From payloads to the segments of one message, and back.

All sizes follow from the payloads' static shapes, so they are the same on all ranks. Whole numbers
declared as ``"index"`` go through the index code, over the flat index space of all leaves; what is
declared as ``"local"`` is the same on all ranks and is not sent; all other arrays of one dtype go
as their bytes, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradtx import backends
from gradtx.core.payload import Payload
from gradtx.core.phases import in_phase
from gradtx.core.tree import Array, structure, unflatten
from gradtx.wire import WireFormatError, decode_indices, encode_indices, indices_nbytes


@dataclass(frozen=True)
class Field:
    """One array of a payload.

    Attributes:
        array: what is sent; on the receiving side, an array of the same shape and dtype.
        universe: for an index field, the number of positions; None for others.
        local: whether it is not sent.
    """

    array: Array
    universe: int | None
    local: bool = False

    @property
    def nbytes(self) -> int:
        """What the field takes in a message, if it is sent alone."""
        count = backends.size(self.array)
        if self.universe is not None:
            return indices_nbytes(count, self.universe)
        return 0 if self.local else count * int(self.array.dtype.itemsize)


def fields(payload: Payload) -> Iterator[Field]:
    """The arrays of a payload and of the payloads within, in the order of its pytree."""
    for name in payload.children:
        child = getattr(payload, name)
        if isinstance(child, Payload):
            yield from fields(child)
        elif backends.is_array(child):
            codec = payload.codecs.get(name)
            yield Field(child, payload.positions if codec == "index" else None, codec == "local")


class Packing:
    """How the arrays of some payloads are laid into segments.

    Args:
        payloads: on this rank; those of the others have the same shapes.
    """

    def __init__(self, payloads: Sequence[Payload]) -> None:
        self._payloads = list(payloads)
        self._fields = [field for payload in payloads for field in fields(payload)]
        self._index = [i for i, f in enumerate(self._fields) if f.universe is not None]
        plain = [i for i, f in enumerate(self._fields) if f.universe is None and not f.local]
        dtypes = sorted({self._fields[i].array.dtype for i in plain}, key=str)
        self._plain = [
            (dtype, [i for i in plain if self._fields[i].array.dtype == dtype]) for dtype in dtypes
        ]
        self._counts = [self._fields[i].array.numel() for i in self._index]
        self._universes = [self._fields[i].universe or 0 for i in self._index]

    def own(self) -> list[Payload]:
        """The payloads that were given."""
        return self._payloads

    @property
    def sizes(self) -> list[int]:
        """The size of each segment in bytes."""
        sizes = [
            sum(self._fields[i].array.numel() for i in which) * dtype.itemsize
            for dtype, which in self._plain
        ]
        if self._index:
            sizes.append(indices_nbytes(sum(self._counts), sum(self._universes)))
        return sizes

    @in_phase("encode")
    def encode(self) -> list[torch.Tensor]:
        """The segments: uint8, of the given sizes."""
        segments = [
            torch.cat([self._fields[i].array.reshape(-1) for i in which]).view(torch.uint8)
            for _, which in self._plain
        ]
        if self._index:
            starts = self._starts()
            flat = [
                self._fields[i].array.reshape(-1) + s
                for i, s in zip(self._index, starts, strict=True)
            ]
            segments.append(encode_indices(torch.cat(flat), sum(self._universes)))
        return segments

    @in_phase("decode")
    def decode(self, segments: Sequence[torch.Tensor]) -> list[Payload]:
        """Payloads like those given at construction, with the arrays that the segments hold.

        Raises:
            WireFormatError: if a segment is of another size, or an index lies outside its leaf.
        """
        found = [segment.numel() for segment in segments]
        if found != self.sizes:
            raise WireFormatError(f"segments have {found} bytes, expected {self.sizes}")
        arrays: list[Any] = [f.array if f.local else None for f in self._fields]
        for (dtype, which), segment in zip(self._plain, segments, strict=False):
            flat = segment.view(dtype)
            parts = flat.split([self._fields[i].array.numel() for i in which])
            for i, part in zip(which, parts, strict=True):
                arrays[i] = part.reshape(self._fields[i].array.shape)
        if self._index:
            for i, part in zip(self._index, self._decode_indices(segments[-1]), strict=True):
                arrays[i] = part.reshape(self._fields[i].array.shape)
        treespec = structure(self._payloads)
        return list(unflatten(treespec, arrays))

    def _starts(self) -> list[int]:
        starts = [0]
        for universe in self._universes[:-1]:
            starts.append(starts[-1] + universe)
        return starts

    def _decode_indices(self, segment: torch.Tensor) -> Iterator[torch.Tensor]:
        flat = decode_indices(segment, sum(self._counts), sum(self._universes))
        parts = flat.split(self._counts)
        # Strictly increasing, so the ends decide; one look at all of them.
        ends = iter(torch.cat([part[[0, -1]] for part in parts if part.numel()] or [flat]).tolist())
        for part, start, universe in zip(parts, self._starts(), self._universes, strict=True):
            if part.numel():
                first, last = next(ends), next(ends)
                if not start <= first <= last < start + universe:
                    raise WireFormatError(
                        f"indices {first} to {last} lie outside their leaf, "
                        f"{start} to {start + universe - 1}"
                    )
            yield part - start
