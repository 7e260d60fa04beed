"""The exchange itself: what goes out is sent, and what comes in is added up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch

from gradtx.core.errors import RankMismatchError
from gradtx.core.payload import Payload, with_dense_values
from gradtx.core.phases import in_phase
from gradtx.exchange.flags import Flags
from gradtx.exchange.group import Group
from gradtx.exchange.handshake import share_error
from gradtx.exchange.outgoing import Outgoing
from gradtx.exchange.plan import add_payload
from gradtx.exchange.root import Root
from gradtx.exchange.sharded import Sharded
from gradtx.exchange.sparse_sums import SparseSums
from gradtx.exchange.two_shot import TwoShot, check_steps
from gradtx.exchange.uneven import gather
from gradtx.wire import Header, decode_message, message_nbytes

_AT_ONCE = 8  # messages that are decoded before they are added up

Sent: TypeAlias = tuple[Header, Callable[[], list[Payload]]]
AddUp: TypeAlias = Callable[[], dict[int, torch.Tensor]]


def exchange(
    group: Group,
    outgoing: Outgoing,
    header: Header,
    message: torch.Tensor | None,
    buffers: Sequence[torch.Tensor],
    shots: TwoShot,
    sharded: Sharded,
    sparse: SparseSums,
) -> tuple[dict[int, torch.Tensor], Flags, AddUp]:
    """Sends what goes out, and adds up what comes in.

    What has been gathered is added up by the caller, once all ranks have answered to the end: sums
    may take the place of gradients, which an error is to leave as they are.

    Args:
        group: the ranks.
        outgoing: what this rank sends.
        header: what it says of its step.
        message: the gathered message, or None.
        buffers: the dense buffers.
        shots: the two-shot exchange of this step; its first shot is made here.
        sharded: the sharded exchange of this step.
        sparse: where sparse payloads that are gathered are added up.

    Returns:
        The sums over ranks, flat, by position of the leaf, without those that have owners or are
        gathered; the flags of all ranks; and what adds up those that are gathered, and gives those
        of them that are not sparse. In the place of a payload that is summed stands the sum of its
        first summand.

    Raises:
        RankMismatchError: on every rank, if one has failed.
        WireFormatError: if what a rank sent is no message of the agreed form.
    """
    totals: dict[int, torch.Tensor] = {}
    flags: Flags | None = None
    gathered: AddUp = dict
    if message is not None:
        flags, gathered = _gather(group, outgoing, header, message, sparse)
    if shots.messages:
        told = shots.add_up()
        _stop_if_failed(group, told)
        flags = flags or told
    if sharded.messages:
        sums, told = sharded.add_up()
        _stop_if_failed(group, told)
        flags = flags or told
        totals |= outgoing.parts_of(sums)
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
    return totals, flags, gathered


@in_phase("apply")
def _gather(
    group: Group, outgoing: Outgoing, header: Header, message: torch.Tensor, sparse: SparseSums
) -> tuple[Flags, AddUp]:
    if outgoing.kept:
        own = [(header, outgoing.packing.own)]
        return Flags.of([header]), partial(_add_up, own, outgoing, sparse)
    leaves, root = outgoing.sizes.leaves, outgoing.through_root

    def nbytes(counts: Sequence[int]) -> int:
        return message_nbytes(leaves, outgoing.packing_of(counts).sizes)

    received = gather(group, message, outgoing.counts, outgoing.rooms, nbytes, to_root=root)
    if root:
        shape = outgoing.gathered_lengths
        step = Root(group, leaves, windowed=outgoing.sizes.windowed)
        read = partial(_added, group, outgoing, header, received)
        totals, flags = step.add_up(bool(received), read, shape, message.device)
        _stop_if_failed(group, flags)
        return flags, lambda: totals
    found = _read(outgoing, header, received)
    flags = Flags.of([other for other, _ in found])
    _stop_if_failed(group, flags)
    check_steps(header, [other for other, _ in found], group.rank)
    return flags, partial(_add_up, found, outgoing, sparse)


def _added(
    group: Group,
    outgoing: Outgoing,
    header: Header,
    received: Sequence[tuple[torch.Tensor, tuple[int, ...]]],
) -> tuple[list[Header], dict[int, torch.Tensor]]:
    """The headers of all ranks; and the sums of their payloads, none if a rank has failed."""
    found = _read(outgoing, header, received)
    headers = [other for other, _ in found]
    if any(other.error for other in headers):
        return headers, {}
    check_steps(header, headers, group.rank)
    return headers, _add_up(found, outgoing, None)


def _read(
    outgoing: Outgoing,
    header: Header,
    received: Sequence[tuple[torch.Tensor, tuple[int, ...]]],
) -> list[Sent]:
    """What each rank has sent."""
    found: list[Sent] = []
    for data, counts in received:
        packing = outgoing.packing_of(counts)
        other, segments = decode_message(
            data, outgoing.sizes.leaves, packing.sizes, header.fingerprint
        )
        # This rank's own too: all ranks add up what these bytes stand for.
        found.append((other, partial(packing.decode, segments)))
    return found


@in_phase("apply")
def _add_up(
    found: Sequence[Sent], outgoing: Outgoing, sparse: SparseSums | None
) -> dict[int, torch.Tensor]:
    """The sums of what all ranks have sent."""
    totals: dict[int, torch.Tensor] = {}
    for first in range(0, len(found), _AT_ONCE):
        some = found[first : first + _AT_ONCE]
        _add_some(some, outgoing, totals, sparse, last=first + _AT_ONCE >= len(found))
    return totals


def _add_some(
    received: Sequence[Sent],
    outgoing: Outgoing,
    totals: dict[int, torch.Tensor],
    sparse: SparseSums | None,
    *,
    last: bool,
) -> None:
    """Adds the messages of some ranks to the sums, leaf by leaf: what is added to stays cached."""
    absent = [outgoing.absent_in(header) for header, _ in received]
    sent = [with_dense_values(read()) for _, read in received]
    found = zip(*sent, strict=True)
    for [place, *_], payloads in zip(outgoing.places, found, strict=True):
        if sparse is None or not sparse.add(payloads, place, absent, last=last):
            for payload, gone in zip(payloads, absent, strict=True):
                add_payload(totals, payload, outgoing, place, gone.__contains__)


def _stop_if_failed(group: Group, flags: Flags) -> None:
    if flags.errors:
        share_error(group, "")
        raise RankMismatchError(f"{flags.errors} ranks say that they failed, and none says why")
