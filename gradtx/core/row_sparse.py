"""Row-sparse gradients: some rows of a table, and which they are.

A lookup in a table (`torch.nn.Embedding` with ``sparse=True``) leaves most rows without a gradient.
Such leaves go beside the dense ones: to the parts of a chain they are leaves that are not there,
and what a part does to their rows it does in `Progress.rows`. They are torch's; gradients of JAX
are dense.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradtx.backends import torch_ops
from gradtx.core.arguments import count
from gradtx.core.payload import Payload, register_payload

LOOKUPS = (torch.nn.Embedding, torch.nn.EmbeddingBag)


@dataclass(frozen=True)
class Table:
    """Of a leaf whose gradients are row-sparse: the shape and the dtype of the whole leaf."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{list(self.shape)} {self.dtype} in rows"

    @property
    def kind(self) -> torch.dtype:
        """The dtype."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    def stand_in(self, device: torch.device) -> torch.Tensor:
        """A sparse tensor of that shape and dtype, with nothing in it."""
        indices = torch.empty((1, 0), dtype=torch.int64, device=device)
        values = torch.empty((0, *self.shape[1:]), dtype=self.kind, device=device)
        return torch.sparse_coo_tensor(indices, values, self.shape, check_invariants=False)

    @property
    def wide(self) -> torch.dtype:
        """The dtype of sums: FP64 for FP64 leaves, FP32 for all others."""
        return torch.float64 if self.dtype == "float64" else torch.float32


@register_payload
class Rows(Payload):
    """Some rows of a leaf, and which they are; all others are zero.

    Attributes:
        values: ``[r, ...]``, the rows.
        indices: ``[r]``, int64, strictly increasing.
    """

    children = ("values", "indices")
    codecs = {"indices": "index"}  # noqa: RUF012
    values: torch.Tensor
    indices: torch.Tensor

    @property
    def positions(self) -> int:
        """How many rows the leaf has."""
        return self.shape[0]

    def decode(self) -> torch.Tensor:
        """All rows, flat."""
        whole = self.values.new_zeros(self.shape)
        return whole.index_copy_(0, self.indices, self.values).view(-1)

    def with_values(self, values: Any) -> Rows:
        """Other values of the same rows."""
        return Rows(values, self.indices, self.shape, self.dtype)

    def chosen(self, where: torch.Tensor) -> Rows:
        """Some of the rows.

        Args:
            where: ``[k]``, int64, strictly increasing: which of these rows.
        """
        values, indices = self.values[where], self.indices[where]
        return Rows(values, indices, self.shape, self.dtype)

    def sparse(self, dtype: torch.dtype) -> torch.Tensor:
        """The same as a coalesced sparse COO tensor of a dtype."""
        return torch.sparse_coo_tensor(
            self.indices[None],
            self.values.to(dtype),
            self.shape,
            is_coalesced=True,
            check_invariants=False,
        )


def rows_of(path: str, gradient: torch.Tensor, table: Table) -> Rows:
    """The rows of a gradient in the dtype of sums, each once.

    Raises:
        TypeError: if it is dense, or sparse in another way than by rows.
        ValueError: if it has another shape than the leaf had at `init`.
    """
    expected = f"expected rows of {list(table.shape)}, as Embedding(sparse=True) leaves them"
    if not isinstance(gradient, torch.Tensor):
        raise TypeError(f"leaf {path!r} is a {type(gradient).__name__}: {expected}")
    if gradient.layout is torch.strided:
        raise TypeError(
            f"leaf {path!r} was row-sparse at init and has a dense gradient: "
            "build the layer with sparse=False if it is used in another way too"
        )
    if gradient.layout is not torch.sparse_coo or gradient.sparse_dim() != 1:
        how = f"{gradient.sparse_dim()} dimensions" if gradient.is_sparse else str(gradient.layout)
        raise TypeError(f"leaf {path!r} is sparse in {how}: {expected}")
    if tuple(gradient.shape) != table.shape:
        raise ValueError(
            f"leaf {path!r} has shape {tuple(gradient.shape)}: expected {table.shape}, as at init"
        )
    dtype = str(gradient.dtype).removeprefix("torch.")
    wide = str(table.wide).removeprefix("torch.")
    if dtype not in (table.dtype, wide):
        raise TypeError(f"leaf {path!r} has dtype {dtype}: expected {table.dtype}, as at init")
    # Widened before rows that come twice are added up: 16 bits would round, or overflow.
    once = torch.sparse_coo_tensor(
        gradient.detach()._indices(),
        gradient.detach()._values().to(table.wide),
        table.shape,
        is_coalesced=gradient.is_coalesced(),
        check_invariants=False,
    ).coalesce()
    return Rows(once.values(), once.indices()[0], table.shape, wide)


def no_rows(table: Table, device: torch.device | str) -> Rows:
    """No rows of a leaf, for a rank that has no gradient for it."""
    values = torch.empty((0, *table.shape[1:]), dtype=table.wide, device=device)
    indices = torch.empty(0, dtype=torch.int64, device=device)
    return Rows(values, indices, table.shape, str(table.wide).removeprefix("torch."))


def largest_rows(ratio: float, rows: Rows) -> Rows:
    """The ``max(1, round(ratio * n))`` rows of the largest L2 norm, of a leaf of `n` rows.

    Ties go to the lowest index; rows of zeros are not among them.
    """
    values = rows.values.flatten(1) if rows.values.ndim > 1 else rows.values[:, None]
    norms = torch.linalg.vector_norm(values, dim=1, dtype=torch.float64)
    where = torch_ops.top_k(norms, min(count(ratio, rows.positions), norms.numel()))
    return rows.chosen(where[norms[where] > 0])


AllRows = Mapping[int, Rows | None]

SelectRows = Callable[[AllRows, Any], AllRows]


def all_finite(rows: AllRows, tables: Mapping[int, Table] | None = None) -> bool:
    """Whether all values are finite, in the dtypes of the tables if these are given."""
    there = {i: x.values for i, x in rows.items() if x is not None}
    if tables is not None:
        there = {i: values.to(tables[i].kind) for i, values in there.items()}
    return all(bool(values.isfinite().all()) for values in there.values())


def device_of(rows: AllRows, others: Sequence[torch.Tensor]) -> torch.device:
    """The device of a step's arrays, for what stands in for rows that are not there."""
    found = [*(x.values for x in rows.values() if x is not None), *others]
    return found[0].device if found else torch.device("cpu")


def map_rows(fn: Callable[[torch.Tensor], Any], rows: AllRows) -> dict[int, Rows | None]:
    """`fn` of the values of all rows."""
    return {i: x if x is None else x.with_values(fn(x.values)) for i, x in rows.items()}


def among_rows(select: Callable[[Rows], Rows]) -> SelectRows:
    """Chooses among the rows of each leaf alone."""

    def select_rows(rows: AllRows, state: Any) -> AllRows:
        return {i: x if x is None else select(x) for i, x in rows.items()}

    return select_rows


def with_feedback(
    select: Callable[[AllRows], AllRows], rows: AllRows, residuals: Sequence[Any]
) -> tuple[dict[int, Rows | None], dict[int, torch.Tensor]]:
    """The rows that are sent with what was left out before, and what is left out now.

    Args:
        select: chooses among rows; what it hands on as it is goes past.
        rows: by position.
        residuals: of all leaves, dense; None for one whose rows are all sent.

    Returns:
        What is sent; and the new residuals of the leaves that have a gradient, by position.
    """
    sent, left = dict(rows), {}
    for i, own in rows.items():
        residual = residuals[i]
        if own is None or residual is None:
            continue
        whole = residual.index_add(0, own.indices, own.values)
        every = Rows(whole, torch.arange(own.positions, device=whole.device), own.shape, own.dtype)
        chosen = select({i: every})[i]
        if chosen is not None and chosen is not every:
            sent[i] = chosen
            left[i] = whole.index_fill_(0, chosen.indices, 0)
    return sent, left
