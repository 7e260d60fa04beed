"""The exchange itself: what goes out is sent, and what comes in is added up."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradtx.core.errors import RankMismatchError
from gradtx.core.payload import Joined, Payload
from gradtx.exchange.flags import Flags
from gradtx.exchange.group import Group
from gradtx.exchange.handshake import share_error
from gradtx.exchange.outgoing import Outgoing
from gradtx.exchange.uneven import gather
from gradtx.wire import Header, decode_message, message_nbytes


def exchange(
    group: Group,
    outgoing: Outgoing,
    header: Header,
    message: torch.Tensor | None,
    buffers: Sequence[torch.Tensor],
) -> tuple[dict[int, torch.Tensor], Flags]:
    """Sends what goes out, and adds up what comes in.

    Args:
        group: the ranks.
        outgoing: what this rank sends.
        header: what it says of its step.
        message: the gathered message, or None.
        buffers: the dense buffers.

    Returns:
        The sums over ranks, flat, by position of the leaf; and the flags of all ranks. In the place
        of a payload that is summed stands the sum of its first summand.

    Raises:
        RankMismatchError: on every rank, if one has failed.
        WireFormatError: if what a rank sent is no message of the agreed form.
    """
    totals: dict[int, torch.Tensor] = {}
    flags = None
    if message is not None:
        totals, flags = _gather(group, outgoing, header, message)
    for places, buffer in zip(outgoing.dense_places.values(), buffers, strict=True):
        total = group.all_reduce(buffer)
        if flags is None:
            total, flags = outgoing.sizes.read_flags(total, group.size)
            _stop_if_failed(group, flags)
            if not flags.in_step(group.size):
                raise RankMismatchError(
                    f"this is step {header.step} on rank {group.rank}, but not on all ranks"
                )
        lengths = [outgoing.length(i) for i in places]
        totals.update(zip(places, total.split(lengths) if lengths else (), strict=True))
    if flags is None:
        raise AssertionError("an exchange has a message or a buffer")
    return totals, flags


def further_rounds(
    group: Group, outgoing: Outgoing, totals: dict[int, torch.Tensor]
) -> dict[int, Payload]:
    """Brings the payloads that are summed to their end.

    Args:
        group: the ranks.
        outgoing: what this rank sends.
        totals: the sums of the first round; those of the summed payloads are taken out.

    Returns:
        By position, the payloads, which decode to the mean over ranks.
    """
    done: dict[int, Payload] = {}
    pending = outgoing.summed
    while pending:
        received: dict[int, Payload] = {}
        for cls in {type(payload): None for payload in pending.values()}:
            places = [i for i, payload in pending.items() if type(payload) is cls]
            sums = [totals.pop(i) for i in places]
            payloads = cls.receive_all([pending[i] for i in places], sums, group.size)
            received.update(zip(places, payloads, strict=True))
        summands = {i: p.summand() for i, p in received.items()}
        done.update({i: received[i] for i, summand in summands.items() if summand is None})
        pending = {i: received[i] for i, summand in summands.items() if summand is not None}
        for dtype in sorted({summands[i].dtype for i in pending}, key=str):
            places = [i for i in pending if summands[i].dtype == dtype]
            total = group.all_reduce(torch.cat([summands[i] for i in places]))
            lengths = [summands[i].numel() for i in places]
            totals.update(zip(places, total.split(lengths), strict=True))
    return done


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
    steps = {rank: other.step for rank, other in enumerate(headers) if other.step != header.step}
    if steps:
        raise RankMismatchError(
            f"this is step {header.step} on rank {group.rank}, but "
            + ", ".join(f"step {step} on rank {rank}" for rank, step in steps.items())
        )
    totals: dict[int, torch.Tensor] = {}
    for other, packing, segments in received:
        payloads = packing.decode(segments)
        for places, payload in zip(outgoing.places, payloads, strict=True):
            _add(totals, payload, outgoing, other, places[0])
    return totals, flags


def _add(
    totals: dict[int, torch.Tensor],
    payload: Payload,
    outgoing: Outgoing,
    header: Header,
    place: int,
) -> None:
    """Adds one rank's payload to the sums, except for leaves that this rank has no gradient for."""
    if not isinstance(payload, Joined):
        if outgoing.is_absent(place, header):
            totals.setdefault(place, torch.zeros_like(payload.decode()).to(outgoing.dtype(place)))
        elif place in totals:
            totals[place] = payload.add_to(totals[place])
        else:
            totals[place] = payload.decode().to(outgoing.dtype(place))
        return
    for i, part in payload.parts.split(payload.decode()).items():
        part = part.reshape(-1).to(outgoing.dtype(i))
        if outgoing.is_absent(i, header):
            part = torch.zeros_like(part)
        totals[i] = totals[i] + part if i in totals else part


def _stop_if_failed(group: Group, flags: Flags) -> None:
    if flags.errors:
        share_error(group, "")
