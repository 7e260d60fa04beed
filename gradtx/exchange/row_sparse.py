"""The exchange of row-sparse leaves: rows are gathered, and those of one index added up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from gradtx.core.phases import in_phase
from gradtx.core.row_sparse import AllRows, Rows, device_of, map_rows, no_rows
from gradtx.core.tree import Layout
from gradtx.exchange.group import Group
from gradtx.exchange.message import Packing
from gradtx.exchange.plan import divisor_of
from gradtx.exchange.two_shot import check_steps
from gradtx.exchange.uneven import gather
from gradtx.wire import Header, decode_message, encode_message, message_nbytes


def exchanged_rows(
    group: Group,
    rows: AllRows,
    layout: Layout,
    header: Header,
    op: str,
    dense: Sequence[torch.Tensor],
) -> dict[int, Rows | None]:
    """The mean (or the sum) over ranks of row-sparse leaves, in one message of a rank.

    The ranks first tell each other how many rows they have. All of them come here, once they have
    agreed on the layout and know that no rank has failed.

    Args:
        group: the ranks.
        rows: of this rank, by position; None for a leaf that it has no gradient for.
        layout: of all leaves.
        header: of the step.
        op: ``"mean"`` or ``"sum"``.
        dense: the other arrays of the step.

    Returns:
        The rows that some rank has, by position; None for a leaf that no rank has a gradient for.

    Raises:
        WireFormatError: if what a rank sent is no message of the agreed form.
    """
    if group.size == 1:
        return map_rows(torch.clone, rows)  # A result of its own, as dense leaves have.
    tables, device = layout.tables, device_of(rows, dense)
    own = [rows[i] or no_rows(table, device) for i, table in tables.items()]
    absent = tuple(rows[i] is None for i in tables)
    header = replace(header, absent=absent)
    message = _message(own, header)

    def packing(counts: Sequence[int]) -> Packing:
        return Packing([_like(x, n) for x, n in zip(own, counts, strict=True)])

    def nbytes(counts: Sequence[int]) -> int:
        return message_nbytes(len(tables), packing(counts).sizes)

    counts = [x.indices.numel() for x in own]
    rooms = [table.shape[0] for table in tables.values()]
    headers, found = [], []
    for data, those in gather(group, message, counts, rooms, nbytes):
        other, sent = _read(data, packing(those), header)
        headers.append(other)
        found.append(sent)
    check_steps(header, headers, group.rank)
    out: dict[int, Rows | None] = {}
    for at, i in enumerate(tables):
        pairs = zip(headers, found, strict=True)
        present = [sent[at] for other, sent in pairs if not other.absent[at]]
        out[i] = _sum(present, divisor_of(group.size, op)) if present else None
    return out


@in_phase("encode")
def _message(own: Sequence[Rows], header: Header) -> torch.Tensor:
    return encode_message(header, Packing(own).encode(), own[0].values.device)


@in_phase("decode")
def _read(data: torch.Tensor, packing: Packing, header: Header) -> tuple[Header, list[Any]]:
    other, segments = decode_message(data, len(header.absent), packing.sizes, header.fingerprint)
    return other, packing.decode(segments)


@in_phase("apply")
def _sum(found: Sequence[Rows], divisor: int) -> Rows:
    """The sum of the rows of several ranks, added up in their order, over a divisor."""
    places = torch.cat([own.indices for own in found])
    union, where = places.unique(return_inverse=True)
    total = found[0].values.new_zeros((union.numel(), *found[0].shape[1:]))
    parts = where.split([own.indices.numel() for own in found])
    for own, at in zip(found, parts, strict=True):
        total.index_add_(0, at, own.values)
    return Rows(total / divisor, union, found[0].shape, found[0].dtype)


def _like(rows: Rows, count: int) -> Rows:
    values = rows.values.new_empty((count, *rows.shape[1:]))
    return Rows(values, rows.indices.new_empty(count), rows.shape, rows.dtype)
