"""What transformations of dense gradients ask of a leaf."""

from __future__ import annotations

from typing import Any

from gradtx.core.payload import Payload
from gradtx.core.tree import Array, widen


def dense(leaf: Any, name: str) -> Array:
    """A dense leaf in its accumulation dtype.

    Args:
        leaf: an array.
        name: of the stage, for the error.

    Raises:
        TypeError: if the leaf is a payload.
    """
    if isinstance(leaf, Payload):
        raise TypeError(
            f"{name}() takes dense gradients only, got {leaf!r}: put it before the compressors or "
            "behind the exchange"
        )
    return widen(leaf)
