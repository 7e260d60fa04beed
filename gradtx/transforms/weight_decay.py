"""`add_decayed_weights`: weight decay as a stage."""

from __future__ import annotations

from typing import Any

from gradtx.core.arguments import check_number
from gradtx.core.combinators import masked
from gradtx.core.predicates import Test
from gradtx.core.predicates import predicate as as_predicate
from gradtx.core.stage import Argument, Kind, Stage
from gradtx.core.transformation import EmptyState, Transformation
from gradtx.core.tree import (
    Array,
    PyTree,
    flatten,
    leaves_like,
    unflatten,
    widen,
)
from gradtx.transforms.dense import dense


def add_decayed_weights(weight_decay: float, mask: Test | None = None) -> Transformation:
    r"""Adds a share of the parameters: :math:`u \leftarrow u + \lambda p`, in FP32 or FP64.

    Behind an optimizer and before ``scale(-lr)`` that is decoupled weight decay, before the
    optimizer an L2 penalty; the sign is that of a gradient. Put it behind the exchange: before it
    the mean would be the same, since all ranks have the same parameters, but the decay would be
    compressed and fed back with the gradient, and be multiplied by the ranks where
    ``allreduce(op="sum")`` adds. `momentum_correction`, which takes the place of an optimizer, may
    want it there.

    Args:
        weight_decay: the share.
        mask: which leaves to decay, ``mask(path, leaf, info) -> bool``, as for `filter_params`,
            asked once a leaf, at `init`; None for all. Often ``~is_bias & ~is_batch_norm``.

    Returns:
        The transformation. It takes dense gradients only.

    Raises:
        TypeError: if `weight_decay` is no number, or `mask` cannot be called; in `update`, if a
            leaf is compressed.
        ValueError: if `weight_decay` is not finite in FP32; in `update`, if there are no `params`.

    References:
        Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019.

    Example:
        >>> import torch, gradtx as gx
        >>> tx = gx.add_decayed_weights(0.5, mask=~gx.is_bias)
        >>> params = {"w": torch.tensor([2.0]), "bias": torch.tensor([2.0])}
        >>> grads = {"w": torch.tensor([1.0]), "bias": torch.tensor([1.0])}
        >>> tx.update(grads, tx.init(params), params)[0]
        {'w': tensor([2.]), 'bias': tensor([1.])}
    """
    weight_decay = check_number("add_decayed_weights(weight_decay", weight_decay)
    chosen = None if mask is None else as_predicate(mask)
    stage = Stage(
        "add_decayed_weights",
        Kind.TRANSFORM,
        (Argument("weight_decay", weight_decay), Argument("mask", chosen, None)),
    )

    def update(
        updates: PyTree, state: EmptyState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, EmptyState]:
        if params is None:
            raise ValueError(
                "add_decayed_weights() needs the parameters: tx.update(grads, state, params)"
            )
        leaves, treespec = flatten(updates)
        pairs = zip(leaves, leaves_like(params, updates), strict=True)
        return unflatten(treespec, [None if u is None else decayed(u, p) for u, p in pairs]), state

    def decayed(leaf: Any, parameter: Array) -> Array:
        return dense(leaf, stage.name) + weight_decay * widen(parameter)

    everywhere = Transformation(stage, None, update)
    if chosen is None:
        return everywhere
    some = masked(everywhere, chosen)
    return Transformation(stage, some.setup, some.step)
