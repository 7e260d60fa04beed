"""What one rank sends in a step: which leaves travel compressed, which dense, and the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from gradtx.core.payload import Joined, Member, Payload, decode_leaves
from gradtx.core.transformation import Context
from gradtx.core.tree import Array, accumulation_dtype, widen
from gradtx.exchange.flags import Flags, Slots
from gradtx.exchange.message import Packing, payload_nbytes
from gradtx.exchange.uneven import tell_nbytes
from gradtx.wire import Header, encode_message, error_message, message_nbytes

_ITEMSIZE = {"float32": 4, "float64": 8}


@dataclass(frozen=True)
class Sizes:
    """What all ranks send in a step, known to each from the first step on.

    Attributes:
        leaves: how many leaves the header speaks of.
        segments: the size of each segment of the gathered message, in bytes, with as little in it
            as can be; None if nothing is gathered.
        rooms: for each gathered payload of which a rank sends as much as it needs, how many values
            there is room for.
        buffers: dtype and length of each dense buffer, without flags.
    """

    leaves: int
    segments: tuple[int, ...] | None
    rooms: tuple[int, ...]
    buffers: tuple[tuple[str, int], ...]

    def slots(self, size: int) -> Slots | None:
        """The spare slots of the first dense buffer; None if the flags are in the header."""
        return Slots(self.leaves, size, self.buffers[0][0]) if self.segments is None else None

    def error_message(self, header: Header) -> torch.Tensor:
        """A message of the least size whose header says that this rank has failed."""
        return error_message(header, message_nbytes(self.leaves, self.segments or ()))

    def error_buffer(self, header: Header, size: int) -> torch.Tensor:
        """A first dense buffer of the agreed size, whose slots say that this rank has failed."""
        dtype, length = self.buffers[0]
        slots = Slots(self.leaves, size, dtype).encode(header)
        buffer = torch.zeros(length + len(slots), dtype=getattr(torch, dtype))
        buffer[length:] = torch.tensor(slots)
        return buffer

    def read_flags(self, buffer: torch.Tensor, size: int) -> tuple[torch.Tensor, Flags]:
        """The summed first buffer without its slots, and the flags in them."""
        dtype, length = self.buffers[0]
        flags = Slots(self.leaves, size, dtype).decode(buffer[length:].tolist())
        return buffer[:length], flags


class Outgoing:
    """What one rank sends in one step.

    Args:
        leaves: the leaves that arrive at the exchange, in the order of the layout.
        context: of the step.
        size: how many ranks there are.
        algorithm: ``"auto"`` or ``"gather"``.

    Attributes:
        absent: for each leaf, in path order, whether this rank has no gradient for it.
        payloads: those that travel compressed, in path order.
        places: for each of them, the positions of its leaves.
        rooms: for those of them of which a rank sends as much as it needs, the most it can be.
        counts: how much of it this rank sends.
        packing: how this rank lays them into segments.
        found: by position, all payloads that arrived, those among them that travel dense too.
        summed: by position, the payloads whose summands travel with the dense leaves.
    """

    def __init__(self, leaves: Sequence[Any], context: Context, size: int, algorithm: str) -> None:
        self._layout = context.layout
        order = context.layout.by_path
        self.absent = tuple(bool(context.absent) and context.absent[i] for i in order)
        self.found: dict[int, Payload] = {
            i: leaves[i]
            for i in order
            if isinstance(leaves[i], Payload) and not isinstance(leaves[i], Member)
        }
        self.summed = {i: payload for i, payload in self.found.items() if payload.summed}
        payloads = {i: payload for i, payload in self.found.items() if not payload.summed}
        dense_nbytes = {i: self._dense_nbytes(i, payload) for i, payload in payloads.items()}
        chosen = _worth_it(payloads, dense_nbytes, len(leaves), size, algorithm)
        self.payloads = [payloads[i] for i in chosen]
        self.places = [_places(i, payloads[i]) for i in chosen]
        self._used = [payload.used() for payload in self.payloads]
        places = [None if used is None else used.nonzero().flatten() for used in self._used]
        self.rooms = tuple(used.numel() for used in self._used if used is not None)
        self.counts = tuple(where.numel() for where in places if where is not None)
        self.packing = Packing(list(map(_at, self.payloads, places)))
        elsewhere = {i for places in self.places for i in places} | set(self.summed)
        rest = decode_leaves([None if i in elsewhere else x for i, x in enumerate(leaves)])
        dense = {i: widen(rest[i]) for i in order if rest[i] is not None and i not in elsewhere}
        for i in dense:
            # Zeros stand in for a leaf that is not there; a payload may decode to something else.
            if context.absent and context.absent[i] and isinstance(leaves[i], Payload):
                dense[i] = torch.zeros_like(dense[i])
        summands = {i: payload.summand() for i, payload in self.summed.items()}
        self._parts = {i: part for i in order if (part := (dense | summands).get(i)) is not None}

    def _dense_nbytes(self, position: int, payload: Payload) -> int:
        leaves = [self._layout.leaves[i] for i in _places(position, payload)]
        return sum(x.size * _ITEMSIZE[accumulation_dtype(x.dtype or "float32")] for x in leaves)

    @cached_property
    def dense_places(self) -> dict[str, list[int]]:
        """The positions of the leaves that are summed, in path order, by accumulation dtype."""
        places: dict[str, list[int]] = {}
        for i in self._parts:
            dtype = accumulation_dtype(self._layout.leaves[i].dtype or "float32")
            places.setdefault(dtype, []).append(i)
        if not places and not self.payloads:
            places["float32"] = []
        return dict(sorted(places.items()))

    def dtype(self, position: int) -> torch.dtype:
        """The dtype that a leaf is summed in."""
        name = accumulation_dtype(self._layout.leaves[position].dtype or "float32")
        dtype: torch.dtype = getattr(torch, name)
        return dtype

    def length(self, position: int) -> int:
        """How many values of a leaf, or of what is sent in its place, are summed."""
        return int(self._parts[position].numel())

    def is_absent(self, position: int, header: Header) -> bool:
        """Whether the rank that sent a header has no gradient for a leaf."""
        return header.absent[self._layout.path_ranks[position]]

    def packing_of(self, counts: Sequence[int]) -> Packing:
        """How a rank lays the payloads into segments that sends so much of those that vary."""
        if not counts:
            return self.packing
        rest = iter(counts)
        places = [
            None if used is None else torch.arange(next(rest), device=used.device)
            for used in self._used
        ]
        return Packing(list(map(_at, self.payloads, places)))

    @property
    def ways(self) -> tuple[Any, ...]:
        """Which leaves are gathered and which payloads are summed, by position."""
        return tuple(map(tuple, self.places)), tuple(self.summed)

    @cached_property
    def forms(self) -> dict[str, str]:
        """How each leaf travels, by path: what ranks have to agree on to read each other."""
        gathered = {
            i: payload
            for places, payload in zip(self.places, self.payloads, strict=True)
            for i in places
        }
        gathered |= self.summed
        return {
            leaf.path: f"as {gathered[i]!r}" if i in gathered else "dense"
            for i, leaf in enumerate(self._layout.leaves)
        }

    @cached_property
    def sizes(self) -> Sizes:
        """The sizes of all that is sent, the same on all ranks."""
        return Sizes(
            len(self.absent),
            tuple(self.packing_of([0] * len(self.rooms)).sizes) if self.payloads else None,
            self.rooms,
            tuple(
                (dtype, sum(map(self.length, places)))
                for dtype, places in self.dense_places.items()
            ),
        )

    def message(self, header: Header) -> torch.Tensor | None:
        """The gathered message, or None if nothing is gathered."""
        if not self.payloads:
            return None
        segments = self.packing.encode()
        return encode_message(header, segments, segments[0].device)

    def buffers(self, header: Header, size: int) -> list[torch.Tensor]:
        """The dense buffers: flat, one a dtype; the flags in the first, if need be."""
        slots = self.sizes.slots(size)
        out: list[torch.Tensor] = []
        for dtype, places in self.dense_places.items():
            parts: list[Array] = [self._parts[i].reshape(-1) for i in places]
            if slots is not None and not out:
                device = parts[0].device if parts else None
                kind = getattr(torch, dtype)
                parts.append(torch.tensor(slots.encode(header), dtype=kind, device=device))
            out.append(torch.cat([part.to(getattr(torch, dtype)) for part in parts]))
        return out


def _worth_it(
    payloads: dict[int, Payload],
    dense_nbytes: dict[int, int],
    leaves: int,
    size: int,
    algorithm: str,
) -> list[int]:
    """The positions of the payloads to gather: those that cost less than a dense all-reduce.

    Gathering puts ``N - 1`` copies of a payload on the link, a ring all-reduce ``2 (N - 1) / N``
    times the dense leaf.
    """
    if algorithm == "gather":
        return list(payloads)
    ranks = max(size, 2)
    cheaper = [i for i, p in payloads.items() if ranks * payload_nbytes(p) < 2 * dense_nbytes[i]]
    message = message_nbytes(leaves, Packing([payloads[i] for i in cheaper]).sizes)
    message += tell_nbytes(sum(payloads[i].used() is not None for i in cheaper))
    saved = sum(2 * dense_nbytes[i] for i in cheaper)
    return cheaper if ranks * message < saved else []


def _at(payload: Payload, places: torch.Tensor | None) -> Payload:
    """The payload with its values at some places alone; all of it if there are none given."""
    return payload if places is None else payload.at(places) or payload


def _places(position: int, payload: Payload) -> list[int]:
    if isinstance(payload, Joined):
        return [i for i, _ in payload.parts.leaves]
    return [position]
