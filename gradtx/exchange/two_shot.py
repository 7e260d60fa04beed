"""The two-shot exchange over torch.distributed: ranks own runs of what is sent.

In the first shot each rank sends every owner its run; the owner adds them up in FP32 (FP64 for FP64
leaves), in rank order. In the second it sends the sum on, in the format that its parts came in.
What that leaves out, the owner sends again: it goes to its own residual, where there is one. All
ranks, owners too, take what was sent: so they get the same bits. A rank puts twice ``(N - 1) / N``
of the small format on the link, and the sum is rounded once, whatever `N`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gradtx import backends
from gradtx.core.errors import RankMismatchError
from gradtx.core.payload import Joined, Payload
from gradtx.core.phases import in_phase
from gradtx.core.tree import arrays_in
from gradtx.exchange.flags import Flags
from gradtx.exchange.group import Group
from gradtx.exchange.handshake import stop
from gradtx.exchange.message import Packing
from gradtx.exchange.plan import Plan, divisor_of
from gradtx.wire import (
    Header,
    WireFormatError,
    decode_message,
    encode_message,
    error_message,
    message_nbytes,
)


@dataclass(frozen=True)
class Piece:
    """A run of the values of a leaf.

    Attributes:
        place: the position of the leaf.
        start: the first value.
        stop: where it ends.
    """

    place: int
    start: int
    stop: int


class Shards:
    """Which rank owns what: of all payloads, one after the other, each as many bytes.

    They are cut at multiples of their grain, so some ranks own a little more, or nothing.

    Args:
        payloads: by position, in path order.
        size: how many ranks there are.

    Attributes:
        pieces: for each rank, what it owns.
        packings: for each rank, how its pieces are laid into segments.
    """

    def __init__(self, payloads: Mapping[int, Payload], size: int) -> None:
        self.payloads = dict(payloads)
        self.pieces = _pieces(self.payloads, size)
        self.packings = [
            Packing([self.payloads[x.place].cut(x.start, x.stop) for x in own])
            for own in self.pieces
        ]

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """For each owner, the size of each segment in bytes."""
        return tuple(tuple(packing.sizes) for packing in self.packings)

    def messages(self, header: Header) -> list[torch.Tensor]:
        """What a rank sends to each owner; nothing if nothing is owned."""
        if not self.payloads:
            return []
        device = arrays_in(next(iter(self.payloads.values())))[0].device
        return [encode_message(header, packing.encode(), device) for packing in self.packings]


def _pieces(payloads: Mapping[int, Payload], size: int) -> list[list[Piece]]:
    nbytes = {i: sum(Packing([payload]).sizes) for i, payload in payloads.items()}
    total, start = sum(nbytes.values()), 0
    out: list[list[Piece]] = [[] for _ in range(size)]
    for i, payload in payloads.items():
        ends = [
            _nearest(rank * total - size * start, size * nbytes[i], payload) for rank in range(size)
        ]
        for own, first, last in zip(out, ends, [*ends[1:], payload.size], strict=True):
            if first < last:
                own.append(Piece(i, first, last))
        start += nbytes[i]
    return out


def _nearest(share: int, whole: int, payload: Payload) -> int:
    """The value, at a multiple of the grain, before which a share of the payload lies."""
    grain = payload.grain or 1
    grains = -(-payload.size // grain)
    return min(max((2 * share * grains + whole) // (2 * whole), 0) * grain, payload.size)


class TwoShot:
    """One step of the exchange, as one rank sees it.

    What goes wrong here once all have begun to talk, such as bytes that are no message, is told to
    the others in the second shot.

    Args:
        group: the ranks.
        plan: of the step.
        shards: which rank owns what.
        header: what this rank says of its step.

    Attributes:
        messages: what this rank sends to each owner; none if nothing is shared out.
    """

    @in_phase("encode")
    def __init__(self, group: Group, plan: Plan, shards: Shards, header: Header) -> None:
        self._group, self._plan, self._shards, self._header = group, plan, shards, header
        self._own = shards.pieces[group.rank]
        self._sums: dict[int, torch.Tensor] = {}
        self._first: list[Payload] = []
        self._error: Exception | None = None
        self.messages = shards.messages(header)

    def add_up(self) -> Flags:
        """The first shot: adds up what this rank owns, and gives the flags of all ranks."""
        received = self._group.all_to_all(self.messages)
        try:
            return self._added(received)
        except (WireFormatError, RankMismatchError) as error:
            self._error = error
            return Flags.of([self._header] * self._group.size)

    @in_phase("decode")
    def _added(self, received: Sequence[torch.Tensor]) -> Flags:
        packing = self._shards.packings[self._group.rank]
        found = [self._decoded(data, packing) for data in received]
        flags = Flags.of([header for header, _ in found])
        if flags.errors:
            return flags
        check_steps(self._header, [header for header, _ in found], self._group.rank)
        for header, segments in found:
            payloads = packing.decode(segments)
            self._first = self._first or payloads
            for piece, payload in zip(self._own, payloads, strict=True):
                self._add(piece.place, payload, header)
        return flags

    def _decoded(self, data: torch.Tensor, packing: Packing) -> tuple[Header, list[torch.Tensor]]:
        leaves = len(self._header.absent)
        return decode_message(data, leaves, packing.sizes, self._header.fingerprint)

    @in_phase("apply")
    def _add(self, place: int, payload: Payload, header: Header) -> None:
        joined = isinstance(self._shards.payloads[place], Joined)  # Absent leaves are zeros in it.
        if not joined and header.absent[self._plan.layout.path_ranks[place]]:
            return
        if place in self._sums:
            self._sums[place] = payload.add_to(self._sums[place])
        else:
            values = payload.decode()
            self._sums[place] = backends.of(values).cast(values, self._plan.dtype(place))

    @in_phase("encode")
    def send_on(
        self, op: str, factor: float = 1.0
    ) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """The second shot: sends on what this rank has added up.

        Args:
            op: ``"mean"`` or ``"sum"``.
            factor: what results are multiplied by.

        Returns:
            What the exchange gives, flat, by position; and by position, flat, what this rank has
            left out of its runs, as it is to be sent again.

        Raises:
            RankMismatchError: on every rank, if one has failed.
            WireFormatError: if what a rank sent is no message of the agreed form.
        """
        divisor = divisor_of(self._group.size, op)
        encoded: list[Payload] = []
        returned: dict[int, torch.Tensor] = {}
        for piece, first in [] if self._error else zip(self._own, self._first, strict=True):
            total = self._sums.pop(piece.place, None)
            exact = torch.zeros_like(first.decode()) if total is None else total / divisor * factor
            encoded.append(first.again(exact, piece.start))
            if piece.place in self._plan.found:
                # A mean counts what one rank has for a share of it.
                left_out = (exact - encoded[-1].decode()) * divisor
                returned[piece.place] = exact.new_zeros(self._shards.payloads[piece.place].size)
                returned[piece.place][piece.start : piece.stop] = left_out
        return self._gathered(encoded), returned

    @in_phase("decode")
    def _gathered(self, encoded: Sequence[Payload]) -> dict[int, torch.Tensor]:
        """What all owners have sent on, flat, by position."""
        leaves, sizes = len(self._header.absent), self._shards.sizes
        nbytes = [message_nbytes(leaves, own) for own in sizes]
        if self._error is None:
            message = encode_message(
                self._header, Packing(encoded).encode(), self.messages[0].device
            )
        else:
            message = error_message(self._header, nbytes[self._group.rank], self.messages[0].device)
        filled = message.new_zeros(max(nbytes))
        filled[: message.numel()] = message
        received = self._group.all_gather(filled)
        found = [
            decode_message(data[:length], leaves, own, self._header.fingerprint)
            for data, length, own in zip(received, nbytes, sizes, strict=True)
        ]
        if any(header.error for header, _ in found):
            stop(self._group, self._error)
        runs: dict[int, list[torch.Tensor]] = {i: [] for i in self._shards.payloads}
        owners = zip(self._shards.pieces, self._shards.packings, found, strict=True)
        for pieces, packing, (_, segments) in owners:
            for piece, payload in zip(pieces, packing.decode(segments), strict=True):
                runs[piece.place].append(payload.decode())
        return {i: torch.cat(parts) for i, parts in runs.items()}


def check_steps(header: Header, others: Sequence[Header], rank: int) -> None:
    """Refuses messages of other steps.

    Raises:
        RankMismatchError: naming the ranks.
    """
    steps = {other: x.step for other, x in enumerate(others) if x.step != header.step}
    if steps:
        raise RankMismatchError(
            f"this is step {header.step} on rank {rank}, but "
            + ", ".join(f"step {step} on rank {other}" for other, step in steps.items())
        )
