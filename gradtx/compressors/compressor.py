"""What all compressors share: from `encode`, on one flat leaf, to a transformation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradtx import backends
from gradtx.core.payload import Member, Payload, values_of
from gradtx.core.stage import Stage
from gradtx.core.transformation import Transformation
from gradtx.core.tree import Array, PyTree, map_leaves, widen

Encode = Callable[[Array, tuple[int, ...]], Payload]


def compressor(stage: Stage, encode: Encode) -> Transformation:
    """A stateless compressor, leaf by leaf.

    Args:
        stage: its declaration.
        encode: ``encode(flat, shape) -> Payload``: `flat` are the values of one leaf in FP32 (FP64
            for FP64 leaves), `shape` is the shape of the leaf.

    Returns:
        The transformation. A payload that arrives has its float child compressed.
    """

    def update(
        updates: PyTree, state: Any, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        return map_leaves(lambda leaf: encode_leaf(leaf, encode), updates), state

    return Transformation(stage, None, update)


def encode_leaf(leaf: Any, encode: Encode) -> Payload:
    """One leaf encoded: an array, or the float child of a payload, however deep."""
    if not isinstance(leaf, Payload):
        wide = widen(leaf)
        return encode(backends.of(wide).ravel(wide), tuple(leaf.shape))
    if isinstance(leaf, Member):
        return leaf
    values = values_of(leaf)
    if values is None:
        raise TypeError(f"{leaf!r} has no values left to compress")
    return leaf.with_values(encode_leaf(values, encode))
