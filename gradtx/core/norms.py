"""Clipping by the norm of several leaves together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from gradtx import backends
from gradtx.core.row_sparse import map_rows
from gradtx.core.transformation import Context
from gradtx.core.tree import arrays_in, widen


def clip_together(
    leaves: Sequence[Any],
    limit: float,
    axes: Sequence[tuple[str, ...]] | None = None,
    context: Context | None = None,
) -> list[Any]:
    """The leaves in FP32 (FP64 for FP64 leaves), all shrunk by one factor to a norm of `limit`.

    If their norm is not larger they are handed on as they are.

    Args:
        leaves: arrays, and None for those that are not there.
        limit: over 0.
        axes: for each array, the axes of a mesh along which other devices hold other parts of it.
        context: of the step, whose row-sparse leaves count, and are shrunk, too.
    """
    rows = {} if context is None else context.progress.rows
    found = [widen(leaf) for leaf in leaves if leaf is not None]
    found += [own.values for own in rows.values() if own is not None]
    if not found:
        return list(leaves)
    axes = [*(axes or ()), *[()] * (len(found) - len(axes or ()))]
    clipped = iter(backends.of(found[0]).clip_by_norm(found, limit, axes))
    out = [None if leaf is None else next(clipped) for leaf in leaves]
    if context is not None and rows:
        context.progress.rows = map_rows(lambda _: next(clipped), rows)
    return out


def clip_locally(leaves: Sequence[Any], clip: float, context: Context | None) -> list[Any]:
    """As `clip_together`, one rank's gradient to a norm of ``clip / sqrt(N)`` on `N` ranks.

    The sum of `N` independent gradients of that norm has a norm of about `clip`. Where JAX keeps
    track of what varies over a mesh, leaves that are spread over further axes than the exchange's
    count with all their parts.
    """
    if context is None:
        return clip_together(leaves, clip)
    arrays = arrays_in(leaves)
    ops = backends.find(arrays)
    ranks = ops.varying_axes(context.rank)
    axes = [tuple(a for a in ops.varying_axes(x) if ranks and a not in ranks) for x in arrays]
    return clip_together(leaves, clip / math.sqrt(context.size), axes, context)
