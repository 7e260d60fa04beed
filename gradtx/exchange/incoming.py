"""The exchange itself: what goes out is sent, and what comes in is added up."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from gradtx.core.errors import RankMismatchError
from gradtx.core.phases import in_phase
from gradtx.exchange.flags import Flags
from gradtx.exchange.group import Group
from gradtx.exchange.handshake import share_error
from gradtx.exchange.outgoing import Outgoing
from gradtx.exchange.plan import add_payload
from gradtx.exchange.two_shot import TwoShot, check_steps
from gradtx.exchange.uneven import gather
from gradtx.wire import Header, decode_message, message_nbytes


def exchange(
    group: Group,
    outgoing: Outgoing,
    header: Header,
    message: torch.Tensor | None,
    buffers: Sequence[torch.Tensor],
    shots: TwoShot,
) -> tuple[dict[int, torch.Tensor], Flags]:
    """Sends what goes out, and adds up what comes in.

    Args:
        group: the ranks.
        outgoing: what this rank sends.
        header: what it says of its step.
        message: the gathered message, or None.
        buffers: the dense buffers.
        shots: the two-shot exchange of this step; its first shot is made here.

    Returns:
        The sums over ranks, flat, by position of the leaf, without those that have owners; and the
        flags of all ranks. In the place of a payload that is summed stands the sum of its first
        summand.

    Raises:
        RankMismatchError: on every rank, if one has failed.
        WireFormatError: if what a rank sent is no message of the agreed form.
    """
    totals: dict[int, torch.Tensor] = {}
    flags = None
    if message is not None:
        totals, flags = _gather(group, outgoing, header, message)
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
    group: Group, outgoing: Outgoing, header: Header, message: torch.Tensor
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
    for other, packing, segments in received:
        payloads = packing.decode(segments)
        for places, payload in zip(outgoing.places, payloads, strict=True):
            absent = partial(outgoing.is_absent, header=other)
            add_payload(totals, payload, outgoing, places[0], absent)
    return totals, flags


def _stop_if_failed(group: Group, flags: Flags) -> None:
    if flags.errors:
        share_error(group, "")
