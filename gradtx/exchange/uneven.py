"""Messages whose size varies: ranks first tell each other how much they have to send."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gradtx.exchange.group import Group
from gradtx.wire import WireFormatError

_MOST_EACH = 32  # bytes that a value and its index take, and more


def tell_nbytes(varying: int) -> int:
    """What it takes to tell the counts of so many payloads, in bytes."""
    return 8 * (1 + varying) if varying else 0


def gather(
    group: Group,
    message: torch.Tensor,
    counts: Sequence[int],
    rooms: Sequence[int],
    nbytes_of: Callable[[Sequence[int]], int] | None = None,
    *,
    to_root: bool = False,
) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
    """The messages of all ranks, in rank order, each with the counts that its size follows from.

    Where nothing varies this is one `Group.all_gather`. Else there is one more before it, of the
    message's size and the counts, int64; and the messages are filled up to the largest of them.

    Args:
        group: the ranks.
        message: uint8.
        counts: how many values of each payload that varies are in it.
        rooms: how many there may be; no payload varies if there are none.
        nbytes_of: the size of a message by its counts, to be checked. None for a rank that has
            failed and sends the least there is; it then only bounds the size.
        to_root: whether rank 0 alone gets the messages.

    Raises:
        WireFormatError: if a rank tells what cannot be.
    """
    collect = group.gather if to_root else group.all_gather
    if not rooms:
        return [(data, ()) for data in collect(message)]
    told = torch.tensor([message.numel(), *counts], dtype=torch.int64).view(torch.uint8)
    answers = [
        tuple(answer.clone().view(torch.int64).tolist())
        for answer in group.all_gather(told.to(message.device))
    ]
    for rank, (nbytes, *others) in enumerate(answers):
        if not all(0 <= count <= room for count, room in zip(others, rooms, strict=True)):
            raise WireFormatError(f"rank {rank} has {others} values to send, of at most {rooms}")
        if nbytes_of is not None and nbytes != nbytes_of(others):
            raise WireFormatError(
                f"rank {rank} has {nbytes} bytes to send, expected {nbytes_of(others)}"
            )
        most = message.numel() + _MOST_EACH * sum(others)
        if nbytes_of is None and not 0 <= nbytes <= most:
            raise WireFormatError(f"rank {rank} has {nbytes} bytes to send, of at most {most}")
    filled = message.new_zeros(max(nbytes for nbytes, *_ in answers))
    filled[: message.numel()] = message
    return [
        (data[:nbytes], tuple(others))
        for data, (nbytes, *others) in zip(collect(filled), answers, strict=False)
    ]
