"""`unscale`: the loss scale divided out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradtx import backends
from gradtx.core.payload import Payload
from gradtx.core.row_sparse import map_rows
from gradtx.core.stage import Kind, Stage
from gradtx.core.transformation import Context, EmptyState, Transformation
from gradtx.core.tree import Array, PyTree, flatten, unflatten, widen, widen_all


def unscale() -> Transformation:
    r"""Divides by the loss scale: :math:`g \leftarrow g / s`, in FP32.

    The scale is the extra argument `loss_scale` of `update`: a Python number or a 0-d array. In a
    chain, everything to the right is gated: on a step with an infinity or a NaN in the divided
    gradients, on any rank, the updates are zeros and no state moves (see `apply_if_finite`).

    Returns:
        The transformation. It has no state and takes dense gradients only.

    Raises:
        ValueError: in `update`, if `loss_scale` is missing, or a number that is not positive.
        TypeError: in `update`, if a leaf is compressed already.

    References:
        Micikevicius et al., Mixed Precision Training, 2018.

    Example:
        >>> import torch, gradtx as gx
        >>> tx = gx.unscale()
        >>> grads = {"w": torch.tensor([1024.0, 512.0])}
        >>> tx.update(grads, tx.init(grads), loss_scale=1024)[0]
        {'w': tensor([1.0000, 0.5000])}
    """

    def update(
        updates: PyTree,
        state: EmptyState,
        params: PyTree = None,
        *,
        loss_scale: float | Array | None = None,
        **extra: Any,
    ) -> tuple[PyTree, EmptyState]:
        scale = _checked(loss_scale)
        leaves, treespec = flatten(updates)
        context: Context | None = extra.get("context")
        divide_rows(context, scale)
        known = isinstance(scale, (int, float)) and not backends.find(leaves).TRACES
        if context is not None and context.defers and known:
            # Each leaf is divided while it is in the cache.
            context.progress.divisor = None if scale == 1 else scale
            return updates, state
        return unflatten(treespec, divide_all(leaves, scale, "unscale")), state

    return Transformation(Stage("unscale", Kind.UNSCALE, linear=True), None, update)


def _checked(scale: Any) -> Any:
    if isinstance(scale, (np.ndarray, np.generic)) and scale.ndim == 0:
        scale = scale.item()
    if scale is None:
        raise ValueError(
            "unscale() needs the loss scale: tx.update(grads, state, loss_scale=...), "
            "or Pipeline(tx, model, scaler=scaler)"
        )
    if backends.is_array(scale):
        if scale.ndim != 0:
            raise ValueError(f"loss_scale has shape {tuple(scale.shape)}: expected a 0-d array")
        if backends.of(scale).known(scale < 0):
            raise ValueError(f"loss_scale is {scale}: expected a positive number")
        return scale
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"loss_scale is {scale!r}: expected a number or a 0-d array")
    # What is infinite in FP32 would make zeros of the gradients.
    if not 0 < scale <= float(np.finfo(np.float32).max):
        raise ValueError(f"loss_scale is {scale!r}: expected a positive, finite number")
    return scale


def divide_rows(context: Context | None, scale: Any) -> None:
    """Divides the rows of row-sparse leaves by the scale."""
    if context is not None and context.progress.rows:
        rows = context.progress.rows
        context.progress.rows = map_rows(lambda x: divide(x, scale, "unscale"), rows)


def divide_all(leaves: Sequence[Any], scale: Any, name: str) -> list[Any]:
    """`divide` of all leaves but Nones."""
    out = list(leaves)
    if backends.is_array(scale) or any(isinstance(leaf, Payload) for leaf in leaves):
        return [leaf if leaf is None else divide(leaf, scale, name) for leaf in leaves]
    places = [i for i, leaf in enumerate(leaves) if leaf is not None]
    found = backends.find(leaves).divided(widen_all([leaves[i] for i in places]), scale)
    for i, leaf in zip(places, found, strict=True):
        out[i] = leaf
    return out


def divide(leaf: Any, scale: Any, name: str) -> Array:
    """A dense leaf in its accumulation dtype, divided by the scale; NaN for an infinite scale.

    Args:
        leaf: an array.
        scale: a number or a 0-d array.
        name: of the stage that divides, for the error.

    Raises:
        TypeError: if the leaf is a payload.
    """
    if isinstance(leaf, Payload):
        raise TypeError(f"{name}() takes dense gradients only, got {leaf!r}: put it first")
    wide = widen(leaf)
    if backends.is_array(scale):
        ops = backends.of(scale)
        scale = ops.cast(scale, backends.of(wide).dtype_name(wide))
        # Infinity less itself is NaN: no step is taken on gradients divided by infinity.
        scale = scale + (scale - scale)
    return wide / scale
