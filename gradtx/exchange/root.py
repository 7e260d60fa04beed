"""The exchange through a root: rank 0 gets all messages, adds them up, and sends the sums on.

It is what one writes first, and is here to be compared with the others: the root receives ``N - 1``
messages and sends ``N - 1`` copies of the sums, while all other links are idle.

What the root sends comes in two broadcasts. The first, of fixed size, has the flags of all ranks,
added up, and how many sums are not zero; the second the sums, at their positions or, where that is
less, all of them. The root takes what it has sent, as all do: so they get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from gradtx.core.errors import RankMismatchError
from gradtx.exchange.flags import Flags, Slots
from gradtx.exchange.group import Group
from gradtx.exchange.handshake import share_error
from gradtx.exchange.lanes import decode_part, encode_part, encode_whole, part_nbytes, whole_nbytes
from gradtx.wire import Header, WireFormatError

_ALL = -1  # in the place of a count: zeros are sent too
_FAILED = 1
_DTYPES = {"float32": torch.float32, "float64": torch.float64}

Sums = dict[int, torch.Tensor]


class Root:
    """One step of the exchange, as one rank sees it.

    Args:
        group: the ranks.
        leaves: how many leaves a header speaks of.
        windowed: whether ranks bring unequal parts.
    """

    def __init__(self, group: Group, leaves: int, *, windowed: bool) -> None:
        self._group = group
        self._slots = Slots(leaves, group.size, "float64", windowed=windowed)

    def add_up(
        self,
        here: bool,
        read: Callable[[], tuple[Sequence[Header], Sums]],
        lengths: Mapping[str, Mapping[int, int]],
        device: torch.device,
    ) -> tuple[Sums, Flags]:
        """All that follows once the messages have come to the root.

        Args:
            here: whether this rank is the root.
            read: there, gives the headers in them, and the sums, flat, by position.
            lengths: for the dtypes that sums are made in, by position, how many there are of each.
            device: where the sums are to be.

        Returns:
            The sums over ranks, flat, by position; and the flags of all ranks. If a rank has
            failed, the flags say so and there are no sums.

        Raises:
            RankMismatchError: on every rank, if the root cannot read what it got.
            WireFormatError: if what the root sent is no message of the agreed form.
        """
        error: Exception | None = None
        headers: Sequence[Header] = ()
        flat = {kind: torch.zeros(0, dtype=_DTYPES[kind], device=device) for kind in lengths}
        if here:
            try:
                headers, sums = read()
                for kind, own in lengths.items() if sums else ():
                    flat[kind] = torch.cat([flat[kind], *(sums[i] for i in own)])
            except (WireFormatError, RankMismatchError) as found:
                error = found
        counts = [_count(total) for total in flat.values()]
        flags, counts = self.tell(headers, counts, error)
        if flags.errors:
            return {}, flags
        sizes = [sum(own.values()) for own in lengths.values()]
        nbytes = [
            _nbytes(count, size, _DTYPES[kind])
            for kind, count, size in zip(lengths, counts, sizes, strict=True)
        ]
        body = torch.zeros(sum(nbytes), dtype=torch.uint8, device=device)
        if here:
            rows = zip(flat.values(), counts, strict=True)
            body = torch.cat([_encoded(total, count) for total, count in rows])
        parts = (self._group.broadcast(body) if body.numel() else body).split(nbytes)
        out: Sums = {}
        rows_of = zip(lengths.items(), parts, counts, sizes, strict=True)
        for (kind, own), part, count, size in rows_of:
            total = _decoded(part, count, size, _DTYPES[kind])
            out.update(zip(own, total.split(list(own.values())), strict=True))
        return out, flags

    def tell(
        self, headers: Sequence[Header], counts: Sequence[int], error: Exception | None = None
    ) -> tuple[Flags, list[int]]:
        """The first broadcast.

        Args:
            headers: at the root, those of all ranks.
            counts: at the root, how many sums of each dtype are sent; of as many as matter, else.
            error: why the root cannot go on, if it cannot.

        Returns:
            The flags of all ranks, and the root's counts.

        Raises:
            RankMismatchError: on every rank, if the root cannot go on.
        """
        rows = [self._slots.encode(header) for header in headers] or [[0.0] * self._slots.length]
        summed = torch.tensor(rows, dtype=torch.float64).sum(0)
        told = torch.tensor([_FAILED if error else 0, *counts])
        head = self._group.broadcast(torch.cat([summed.view(torch.int64), told]))
        slots, (failed, *counts) = head[: len(summed)], head[len(summed) :].tolist()
        if failed:
            _stop(self._group, error)
        return self._slots.decode(slots.view(torch.float64).tolist()), counts


def _stop(group: Group, error: Exception | None) -> None:
    try:
        share_error(group, "" if error is None else f"{type(error).__name__}: {error}")
    except RankMismatchError:
        if error is not None:
            raise error from None
        raise


def _count(total: torch.Tensor) -> int:
    """How many sums there are to send, or that all of them are fewer bytes."""
    count, size = int(torch.count_nonzero(total)), total.numel()
    sparse = part_nbytes(count, size, total.element_size())
    return count if sparse < _nbytes(_ALL, size, total.dtype) else _ALL


def _nbytes(count: int, size: int, dtype: torch.dtype) -> int:
    if count == _ALL:
        return whole_nbytes(size, dtype.itemsize)
    if not 0 <= count <= size:
        raise WireFormatError(f"the root has {count} sums to send, of {size}")
    return part_nbytes(count, size, dtype.itemsize)


def _encoded(total: torch.Tensor, count: int) -> torch.Tensor:
    if count == _ALL:
        return encode_whole(total)
    at = total.nonzero().view(-1)
    return encode_part((at, total[at]), total.numel())


def _decoded(part: torch.Tensor, count: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    if count == _ALL:
        return part[: size * dtype.itemsize].view(dtype)
    where, values = decode_part(part, count, size, size, dtype)
    return torch.zeros(size, dtype=dtype, device=part.device).index_put_((where,), values)
