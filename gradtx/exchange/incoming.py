"""The exchange itself: what goes out is sent, and what comes in is added up."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradtx.core.errors import RankMismatchError
from gradtx.core.phases import in_phase
from gradtx.exchange.flags import Flags
from gradtx.exchange.group import Group
from gradtx.exchange.handshake import share_error
from gradtx.exchange.message import Packing
from gradtx.exchange.outgoing import Outgoing
from gradtx.exchange.plan import add_payload
from gradtx.exchange.sparse_sums import SparseSums
from gradtx.exchange.two_shot import TwoShot, check_steps
from gradtx.exchange.uneven import gather
from gradtx.wire import Header, decode_message, message_nbytes

_AT_ONCE = 8  # messages that are decoded before they are added up


def exchange(
    group: Group,
    outgoing: Outgoing,
    header: Header,
    message: torch.Tensor | None,
    buffers: Sequence[torch.Tensor],
    shots: TwoShot,
    sparse: SparseSums,
) -> tuple[dict[int, torch.Tensor], Flags]:
    """Sends what goes out, and adds up what comes in.

    Args:
        group: the ranks.
        outgoing: what this rank sends.
        header: what it says of its step.
        message: the gathered message, or None.
        buffers: the dense buffers.
        shots: the two-shot exchange of this step; its first shot is made here.
        sparse: where sparse payloads are added up.

    Returns:
        The sums over ranks, flat, by position of the leaf, without those that have owners or are
        sparse; and the flags of all ranks. In the place of a payload that is summed stands the sum
        of its first summand.

    Raises:
        RankMismatchError: on every rank, if one has failed.
        WireFormatError: if what a rank sent is no message of the agreed form.
    """
    totals: dict[int, torch.Tensor] = {}
    flags = None
    if message is not None:
        totals, flags = _gather(group, outgoing, header, message, sparse)
    if shots.messages:
        told = shots.add_up()
        _stop_if_failed(group, told)
        flags = flags or told
    for dtype, buffer in zip(outgoing.dense_places, buffers, strict=True):
        total = group.all_reduce(buffer)
        if flags is None:
            total, flags = outgoing.sizes.read_flags(total, group.size)
            _stop_if_failed(group, flags)
            if not flags.in_step(group.size):
                raise RankMismatchError(
                    f"this is step {header.step} on rank {group.rank}, but not on all ranks"
                )
        totals |= outgoing.split(dtype, total)
    if flags is None:
        raise AssertionError("an exchange has a message or a buffer")
    return totals, flags


@in_phase("apply")
def _gather(
    group: Group, outgoing: Outgoing, header: Header, message: torch.Tensor, sparse: SparseSums
) -> tuple[dict[int, torch.Tensor], Flags]:
    leaves = outgoing.sizes.leaves

    def nbytes(counts: Sequence[int]) -> int:
        return message_nbytes(leaves, outgoing.packing_of(counts).sizes)

    received = []
    for data, counts in gather(group, message, outgoing.counts, outgoing.rooms, nbytes):
        packing = outgoing.packing_of(counts)
        other, segments = decode_message(data, leaves, packing.sizes, header.fingerprint)
        received.append((other, packing, segments))
    headers = [other for other, _, _ in received]
    flags = Flags.of(headers)
    _stop_if_failed(group, flags)
    check_steps(header, headers, group.rank)
    totals: dict[int, torch.Tensor] = {}
    for first in range(0, len(received), _AT_ONCE):
        _add_up(received[first : first + _AT_ONCE], outgoing, totals, sparse)
    return totals, flags


def _add_up(
    received: Sequence[tuple[Header, Packing, list[torch.Tensor]]],
    outgoing: Outgoing,
    totals: dict[int, torch.Tensor],
    sparse: SparseSums,
) -> None:
    """Adds the messages of some ranks to the sums, leaf by leaf: what is added to stays cached."""
    absent = [outgoing.absent_in(header) for header, _, _ in received]
    found = zip(*(packing.decode(segments) for _, packing, segments in received), strict=True)
    for [place, *_], payloads in zip(outgoing.places, found, strict=True):
        if not sparse.add(payloads, place, absent):
            for payload, gone in zip(payloads, absent, strict=True):
                add_payload(totals, payload, outgoing, place, gone.__contains__)


def _stop_if_failed(group: Group, flags: Flags) -> None:
    if flags.errors:
        share_error(group, "")
