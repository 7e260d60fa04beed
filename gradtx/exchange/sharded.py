"""The sharded exchange over torch.distributed: values at positions go to the owners of these.

Each rank sends every owner what it has for the owner's positions; the owner adds it up in FP32
(FP64 for FP64 leaves), in rank order, and sends all ranks the sum: as values at positions, or, once
so many are filled in that this is fewer bytes, as all values. So a rank sends its own values once
and its part of the result ``N - 1`` times, where a gather sends all its values ``N - 1`` times, and
the sum is the same. All ranks, owners too, take what was sent: so they get the same bits.

It takes four rounds: headers and how much is to come; the values; how much there is of the sums;
the sums. With a *density* owners send no more than that share of their positions, the largest sums,
and the third round falls away. What they leave out goes to their own residual.

References:
    Renggli et al., SparCML: High-Performance Sparse Communication for Machine Learning, 2019 (the
    split all-gather and the switch to dense); Li and Hoefler, Near-Optimal Sparse Allreduce for
    Distributed Deep Learning, 2022 (owners that sparsify again, and balanced regions).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TypeVar

import torch

from gradtx import backends
from gradtx.core.payload import Payload
from gradtx.exchange.flags import Flags
from gradtx.exchange.group import Group
from gradtx.exchange.handshake import stop
from gradtx.exchange.lanes import (
    Lane,
    Part,
    decode_part,
    encode_part,
    encode_whole,
    lanes_of,
    part_nbytes,
    whole_nbytes,
)
from gradtx.exchange.two_shot import check_steps
from gradtx.wire import (
    Header,
    WireFormatError,
    decode_message,
    encode_message,
)

T = TypeVar("T")

_FAILED = -1  # in the place of a count


class Scattered:
    """What one rank sends to owners of positions in one step.

    Args:
        payloads: by position, in path order; those that have `Payload.entries`.
        size: how many ranks there are.
        is_absent: whether this rank has no gradient for the leaf at a position.
        density: the share of its positions that an owner sends on; None for all that are not zero.

    Attributes:
        lanes: what the payloads hold.
    """

    def __init__(
        self,
        payloads: Mapping[int, Payload],
        size: int,
        is_absent: Callable[[int], bool],
        density: float | None = None,
    ) -> None:
        self.lanes = lanes_of(payloads, size, is_absent) if payloads else []
        self.density, self._size = density, size

    @cached_property
    def parts(self) -> list[list[Part]]:
        """For each owner, what it gets of each lane."""
        by_lane = [lane.by_owner() for lane in self.lanes]
        return [list(parts) for parts in zip(*by_lane, strict=True)]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of each segment of what goes ahead to each owner, in bytes."""
        return 8 * len(self.lanes), sum(lane.exponents_nbytes for lane in self.lanes)

    def ahead(self, header: Header) -> list[torch.Tensor]:
        """What goes ahead to each owner: the header, how much is to come, and exponents."""
        if not self.lanes:
            return []
        device = self.lanes[0].values.device
        scaled = [lane.exponents for lane in self.lanes if lane.exponents is not None]
        exponents = torch.cat([torch.zeros(0, dtype=torch.int16, device=device), *scaled])
        segments = [
            [_as_bytes([slots.numel() for slots, _ in own], device), exponents.view(torch.uint8)]
            for own in self.parts
        ]
        return [encode_message(header, own, device) for own in segments]

    def read_ahead(
        self, data: torch.Tensor, header: Header, rank: int
    ) -> tuple[Header, list[int], list[torch.Tensor | None]]:
        """What a rank has sent ahead to the owner with the number `rank`.

        Returns:
            Its header; how many values are to come of each lane; and its exponents of each.

        Raises:
            WireFormatError: if it is no such message.
        """
        other, (told, exponents) = decode_message(
            data, len(header.absent), self.sizes, header.fingerprint
        )
        counts = told.view(torch.int64).tolist()
        if not other.error:
            for lane, count in zip(self.lanes, counts, strict=True):
                _check_count(count, lane.owners.room(rank))
        found: list[torch.Tensor | None] = []
        rest = exponents.view(torch.int16)
        for lane in self.lanes:
            length = lane.exponents_nbytes // 2
            found.append(rest[:length] if lane.exponents is not None else None)
            rest = rest[length:]
        return other, counts, found

    def quota(self, lane: Lane, rank: int) -> int:
        """How many values a rank sends on of a lane; how many at most without a density."""
        room = lane.owners.room(rank)
        if self.density is None:
            return room
        return min(max(1, round(self.density * lane.owners.length / self._size)), room)

    def counts(self, rank: int) -> list[int]:
        """For each lane, how many values a rank sends on at most."""
        return [self.quota(lane, rank) for lane in self.lanes]

    def dense(self, counts: Sequence[Sequence[int]]) -> list[bool]:
        """For each lane, whether all values of the sums are fewer bytes than those at positions.

        Args:
            counts: for each owner, how many values at positions it would send of each lane.
        """
        return [
            _dense_nbytes(lane) <= max(_sum_nbytes(lane, own) for own in column)
            for lane, column in zip(self.lanes, zip(*counts, strict=True), strict=True)
        ]

    def result_nbytes(self, counts: Sequence[int], dense: Sequence[bool]) -> int:
        """What an owner sends on, in bytes; with a density, first of all whether it could."""
        return 8 * (self.density is not None) + sum(
            _dense_nbytes(lane) if full else _sum_nbytes(lane, count)
            for lane, count, full in zip(self.lanes, counts, dense, strict=True)
        )


class Sharded:
    """One step of the exchange, as one rank sees it.

    What goes wrong at an owner once values have come, such as bytes that are no index code, it
    tells the others in the next round.

    Args:
        group: the ranks.
        scattered: what this rank sends.
        header: what it says of its step.

    Attributes:
        messages: what goes ahead to each owner; none if nothing goes to owners.
        left_out: by position, flat, what this rank has left out of the sums that it owns.
    """

    def __init__(self, group: Group, scattered: Scattered, header: Header) -> None:
        self._group, self._scattered, self._header = group, scattered, header
        self._lanes = scattered.lanes
        self._error: Exception | None = None
        self.messages = scattered.ahead(header)
        self.left_out: dict[int, torch.Tensor] = {}

    def add_up(self) -> tuple[dict[int, torch.Tensor], Flags]:
        """All rounds.

        Returns:
            The sums over ranks, flat, by position of the payload; and the flags of all ranks. If a
            rank has failed, the flags say so and there are no sums.

        Raises:
            RankMismatchError: on every rank, if one fails on the way.
            WireFormatError: if what a rank sent is no message of the agreed form.
        """
        received = self._group.all_to_all(self.messages)
        found = [self._scattered.read_ahead(x, self._header, self._group.rank) for x in received]
        headers = [header for header, _, _ in found]
        flags = Flags.of(headers)
        if flags.errors:
            return {}, flags
        check_steps(self._header, headers, self._group.rank)
        sums = self._owned([counts for _, counts, _ in found], [scales for _, _, scales in found])
        return self._sent_on(sums), flags

    def _owned(
        self,
        counts: Sequence[Sequence[int]],
        exponents: Sequence[Sequence[torch.Tensor | None]],
    ) -> list[torch.Tensor]:
        """The second round: for each lane, the sums in the slots of this rank."""
        bodies = [
            torch.cat([encode_part(part, lane.owners.slots) for lane, part in self._with(own)])
            for own in self._scattered.parts
        ]
        lengths = [sum(_nbytes(lane, count) for lane, count in self._with(own)) for own in counts]
        received = self._group.all_to_all(bodies, lengths)
        sums = [lane.values.new_zeros(lane.owners.slots, dtype=lane.dtype) for lane in self._lanes]
        try:
            for data, own, scales in zip(received, counts, exponents, strict=True):
                self._add(sums, data, own, scales)
        except WireFormatError as error:
            self._error = error
        return sums

    def _add(
        self,
        sums: Sequence[torch.Tensor],
        data: torch.Tensor,
        counts: Sequence[int],
        exponents: Sequence[torch.Tensor | None],
    ) -> None:
        rank = self._group.rank
        parts = data.split([_nbytes(lane, count) for lane, count in self._with(counts)])
        rows = zip(self._lanes, sums, parts, counts, exponents, strict=True)
        for lane, total, part, count, scales in rows:
            room, slots = lane.owners.room(rank), lane.owners.slots
            found = decode_part(part, count, slots, room, lane.values.dtype)
            total.scatter_add_(0, found[0], lane.widened(rank, found, scales))

    def _sent_on(self, sums: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """The last rounds: the sums of all owners, flat, by position of the payload."""
        scattered, rank = self._scattered, self._group.rank
        if scattered.density is None:
            own = [total.nonzero().view(-1) for total in sums]
            counts = self._told([where.numel() for where in own])
        else:
            counts = [scattered.counts(other) for other in range(self._group.size)]
            own = [
                backends.of(total).top_k(total[: lane.owners.room(rank)], count)
                for (lane, total), count in zip(self._with(sums), counts[rank], strict=True)
            ]
        dense = scattered.dense(counts)
        if scattered.density is not None:
            self._keep(sums, own, dense)
        rows = zip(self._lanes, sums, own, dense, strict=True)
        body = torch.cat([_encoded(lane, total, at, full) for lane, total, at, full in rows])
        if scattered.density is not None:
            body = torch.cat([_as_bytes([_FAILED if self._error else 0], body.device), body])
        nbytes = [scattered.result_nbytes(other, dense) for other in counts]
        received = self._gathered(body, nbytes)
        if scattered.density is not None:
            self._stop_if_failed([int(data[:8].view(torch.int64)) for data in received])
            received = [data[8:] for data in received]
        return self._decoded(received, counts, dense)

    def _told(self, counts: Sequence[int]) -> list[list[int]]:
        """The third round: for each owner, how many sums of each lane are not zero."""
        said = [_FAILED] * len(counts) if self._error else counts
        received = self._group.all_gather(_as_bytes(said, self.messages[0].device))
        told = [data.clone().view(torch.int64).tolist() for data in received]
        self._stop_if_failed([count for own in told for count in own])
        for rank, own in enumerate(told):
            for lane, count in self._with(own):
                _check_count(count, lane.owners.room(rank))
        return told

    def _stop_if_failed(self, said: Sequence[int]) -> None:
        if _FAILED in said:
            stop(self._group, self._error)

    def _keep(
        self, sums: Sequence[torch.Tensor], own: Sequence[torch.Tensor], dense: Sequence[bool]
    ) -> None:
        """Notes what this rank is going to leave out."""
        rank = self._group.rank
        for lane, total, at, full in zip(self._lanes, sums, own, dense, strict=True):
            flat = total.new_zeros(lane.owners.length)
            if not full:
                left_out = total.index_fill(0, at, 0)
                slots = left_out.nonzero().view(-1)
                flat[lane.owners.positions(rank, slots)] = left_out[slots]
            self.left_out.update(lane.split(flat))

    def _gathered(self, message: torch.Tensor, nbytes: Sequence[int]) -> list[torch.Tensor]:
        """The messages of all ranks, of sizes that all know."""
        if not max(nbytes):
            return [message] * len(nbytes)
        filled = message.new_zeros(max(nbytes))
        filled[: message.numel()] = message
        received = self._group.all_gather(filled)
        return [data[:length] for data, length in zip(received, nbytes, strict=True)]

    def _decoded(
        self,
        received: Sequence[torch.Tensor],
        counts: Sequence[Sequence[int]],
        dense: Sequence[bool],
    ) -> dict[int, torch.Tensor]:
        """The sums of all owners, flat, by position of the payload."""
        totals = [
            lane.values.new_zeros(lane.owners.length, dtype=lane.dtype) for lane in self._lanes
        ]
        for rank, (data, own) in enumerate(zip(received, counts, strict=True)):
            for lane, total, count, full in zip(self._lanes, totals, own, dense, strict=True):
                length = _dense_nbytes(lane) if full else _sum_nbytes(lane, count)
                part, data = data[:length], data[length:]
                room = lane.owners.room(rank)
                if full:
                    slots = torch.arange(room, device=part.device)
                    values = part[: room * lane.dtype.itemsize].view(lane.dtype)
                else:
                    slots, values = decode_part(part, count, lane.owners.slots, room, lane.dtype)
                total[lane.owners.positions(rank, slots)] = values
        return {i: own for lane, total in self._with(totals) for i, own in lane.split(total)}

    def _with(self, things: Sequence[T]) -> list[tuple[Lane, T]]:
        return list(zip(self._lanes, things, strict=True))


def _encoded(lane: Lane, total: torch.Tensor, at: torch.Tensor, full: bool) -> torch.Tensor:
    """The sums in the slots of a rank: all of them, or those at some."""
    return encode_whole(total) if full else encode_part((at, total[at]), lane.owners.slots)


def _nbytes(lane: Lane, count: int) -> int:
    """What so many values for one owner take, in bytes."""
    return part_nbytes(count, lane.owners.slots, lane.values.dtype.itemsize)


def _sum_nbytes(lane: Lane, count: int) -> int:
    """What so many sums of one owner take at their positions, in bytes."""
    return part_nbytes(count, lane.owners.slots, lane.dtype.itemsize)


def _dense_nbytes(lane: Lane) -> int:
    """What all sums of one owner take, in bytes."""
    return whole_nbytes(lane.owners.slots, lane.dtype.itemsize)


def _as_bytes(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64).view(torch.uint8).to(device)


def _check_count(count: int, room: int) -> None:
    if not 0 <= count <= room:
        raise WireFormatError(f"{count} values for one owner, expected 0 to {room}")
