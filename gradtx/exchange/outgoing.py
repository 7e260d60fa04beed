"""What one rank sends in a step over torch.distributed: the plan, and the bytes."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from gradtx.core.payload import Payload
from gradtx.core.phases import in_phase
from gradtx.core.transformation import Context
from gradtx.core.tree import Array
from gradtx.exchange.choice import Choice
from gradtx.exchange.cost import Link
from gradtx.exchange.flags import Flags, Slots
from gradtx.exchange.message import Packing
from gradtx.exchange.plan import Plan
from gradtx.exchange.sharded import Scattered
from gradtx.exchange.two_shot import Shards
from gradtx.exchange.uneven import tell_nbytes
from gradtx.wire import Header, encode_message, error_message, message_nbytes


@dataclass(frozen=True)
class Sizes:
    """What all ranks send in a step, known to each from the first step on.

    Attributes:
        leaves: how many leaves the header speaks of.
        segments: the size of each segment of the gathered message, in bytes, with as little in it
            as can be; None if nothing is gathered.
        shards: for each owner, the size of each segment of the message to it, in bytes; None if
            there are no owners.
        ahead: the size of each segment of what goes ahead to the owners of positions, in bytes;
            None if there are none.
        rooms: for each gathered payload of which a rank sends as much as it needs, how many values
            there is room for.
        buffers: dtype and length of each dense buffer, without flags.
        windowed: whether ranks bring unequal parts, and say what theirs weighs.
        root: whether the gathered message goes to rank 0, which sends sums on.
    """

    leaves: int
    segments: tuple[int, ...] | None
    shards: tuple[tuple[int, ...], ...] | None
    ahead: tuple[int, ...] | None
    rooms: tuple[int, ...]
    buffers: tuple[tuple[str, int], ...]
    windowed: bool = False
    root: bool = False

    def slots(self, size: int) -> Slots | None:
        """The spare slots of the first dense buffer; None if the flags are in the header."""
        with_header = self.segments, self.shards, self.ahead
        return self._slots(size) if with_header == (None, None, None) else None

    def _slots(self, size: int) -> Slots:
        return Slots(self.leaves, size, self.buffers[0][0], windowed=self.windowed)

    def error_message(self, header: Header) -> torch.Tensor:
        """A message of the least size whose header says that this rank has failed."""
        return error_message(header, message_nbytes(self.leaves, self.segments or ()))

    def error_parts(self, header: Header) -> list[torch.Tensor]:
        """To each owner, a message of the agreed size whose header says the same."""
        sizes = [message_nbytes(self.leaves, own) for own in self.shards or ()]
        return [error_message(header, nbytes) for nbytes in sizes]

    def error_ahead(self, header: Header, size: int) -> list[torch.Tensor]:
        """To each owner of positions, a message of the agreed size whose header says the same."""
        return [error_message(header, message_nbytes(self.leaves, self.ahead or ()))] * size

    def error_buffer(self, header: Header, size: int) -> torch.Tensor:
        """A first dense buffer of the agreed size, whose slots say that this rank has failed."""
        dtype, length = self.buffers[0]
        slots = self._slots(size).encode(header)
        buffer = torch.zeros(length + len(slots), dtype=getattr(torch, dtype))
        buffer[length:] = torch.tensor(slots)
        return buffer

    def read_flags(self, buffer: torch.Tensor, size: int) -> tuple[torch.Tensor, Flags]:
        """The summed first buffer without its slots, and the flags in them."""
        _, length = self.buffers[0]
        flags = self._slots(size).decode(buffer[length:].tolist())
        return buffer[:length], flags


class Outgoing(Plan):
    """What one rank sends in one step.

    Args:
        leaves: the leaves that arrive at the exchange, in the order of the layout.
        context: of the step.
        size: how many ranks there are.
        algorithm: one of `gradtx.exchange.plan.ALGORITHMS`.
        choices: as for `Plan`.
        density: the share of the sums at positions that are sent; None for all.
        link: as for `Plan`.

    Attributes:
        shards: which rank owns what of the payloads that are shared out.
        to_owners: what goes to the owners of positions.
        rooms: for the payloads of which a rank sends as much as it needs, the most it can be.
        counts: how much of each this rank sends.
        packing: how this rank lays the payloads into segments.
    """

    @in_phase("encode")
    def __init__(
        self,
        leaves: Sequence[Any],
        context: Context,
        size: int,
        algorithm: str,
        choices: MutableMapping[Any, tuple[Any, Choice]] | None = None,
        density: float | None = None,
        link: Link | None = None,
    ) -> None:
        known: dict[int, Any] = {}

        def used_of(payload: Payload) -> Any:
            if id(payload) not in known:
                known[id(payload)] = payload.used()
            return known[id(payload)]

        def nbytes(payloads: Sequence[Payload]) -> int:
            return sum(Packing(payloads).sizes)

        def overhead(payloads: Sequence[Payload]) -> int:
            total = nbytes(payloads)
            told = tell_nbytes(sum(used_of(payload) is not None for payload in payloads))
            return message_nbytes(len(leaves), [total]) - total + told

        super().__init__(leaves, context, size, algorithm, nbytes, overhead, choices, link, density)
        self._windowed = context.windowed
        self.shards = Shards(self.shared, size)
        self.to_owners = Scattered(self.scattered, size, self._is_absent_here, density)
        self._used = list(map(used_of, self.payloads))
        places = [None if used is None else used.nonzero().flatten() for used in self._used]
        self.rooms = tuple(used.numel() for used in self._used if used is not None)
        self.counts = tuple(where.numel() for where in places if where is not None)
        self.packing = Packing(list(map(_at, self.payloads, places)))

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

    def absent_in(self, header: Header) -> frozenset[int]:
        """The positions of the leaves for which the rank that sent a header has no gradient."""
        if not any(header.absent):
            return frozenset()
        order = self.layout.by_path
        return frozenset(i for i, gone in zip(order, header.absent, strict=True) if gone)

    def _is_absent_here(self, position: int) -> bool:
        return self.absent[self.layout.path_ranks[position]]

    @property
    def ways(self) -> tuple[Any, ...]:
        """Which leaves go where, which payloads are summed, and whether a root does it."""
        moved = self.places, self.shared_places, self.scattered_places
        found = tuple(tuple(map(tuple, places)) for places in moved)
        return *found, tuple(self.summed), self.through_root

    @cached_property
    def forms(self) -> dict[str, str]:
        """How each leaf travels, by path: what ranks have to agree on to read each other."""
        gathered = {
            i: payload
            for places, payload in zip(self.places, self.payloads, strict=True)
            for i in places
        }
        forms = {i: f"as {payload!r}" for i, payload in (gathered | self.summed).items()}
        owned = [
            *zip(self.shared_places, self.shared.values(), strict=True),
            *zip(self.scattered_places, self.scattered.values(), strict=True),
        ]
        forms |= {i: f"to owners as {payload!r}" for places, payload in owned for i in places}
        return {leaf.path: forms.get(i, "dense") for i, leaf in enumerate(self.layout.leaves)}

    @cached_property
    def sizes(self) -> Sizes:
        """The sizes of all that is sent, the same on all ranks."""
        return Sizes(
            len(self.absent),
            tuple(self.packing_of([0] * len(self.rooms)).sizes) if self.payloads else None,
            self.shards.sizes if self.shared else None,
            self.to_owners.sizes if self.scattered else None,
            self.rooms,
            tuple(
                (dtype, sum(map(self.length, places)))
                for dtype, places in self.dense_places.items()
            ),
            self._windowed,
            self.through_root,
        )

    @cached_property
    def kept(self) -> bool:
        """Whether what is gathered is read by this rank alone, which has it; and only read."""
        if self._size > 1:
            return False
        return all(payload.entries() is not None for payload in self.packing.own())

    @in_phase("encode")
    def message(self, header: Header) -> torch.Tensor | None:
        """The gathered message, or None if nothing is gathered; empty if nobody reads it."""
        if not self.payloads:
            return None
        if self.kept:
            return torch.empty(0, dtype=torch.uint8)
        segments = self.packing.encode()
        return encode_message(header, segments, segments[0].device)

    @in_phase("encode")
    def buffers(self, header: Header, size: int) -> list[torch.Tensor]:
        """The dense buffers: flat, one a dtype; the flags in the first, if need be."""
        slots = self.sizes.slots(size)
        out: list[torch.Tensor] = []
        for dtype, places in self.dense_places.items():
            parts: list[Array] = [self.parts[i].reshape(-1) for i in places]
            if slots is not None and not out:
                device = parts[0].device if parts else None
                kind = getattr(torch, dtype)
                parts.append(torch.tensor(slots.encode(header), dtype=kind, device=device))
            out.append(torch.cat([part.to(getattr(torch, dtype)) for part in parts]))
        return out


def _at(payload: Payload, places: torch.Tensor | None) -> Payload:
    """The payload with its values at some places alone; all of it if there are none given."""
    return payload if places is None else payload.at(places) or payload
