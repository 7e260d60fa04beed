"""Trees of JAX arrays laid on top of each other, to go through one computation; imports jax.

A program that treats each of a thousand leaves on its own takes minutes to compile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

# Larger arrays are left alone, rather than copied to lie beside each other.
LARGE = 2**16


def groups(trees: Sequence[Any]) -> list[list[int]]:
    """The positions of the trees, those of one structure and the same small shapes together."""
    found: dict[Any, list[int]] = {}
    for i, tree in enumerate(trees):
        arrays, treedef = jax.tree.flatten(tree)
        alone = not arrays or any(x.size > LARGE for x in arrays)
        kind = i if alone else (treedef, tuple((x.shape, x.dtype) for x in arrays))
        found.setdefault(kind, []).append(i)
    return list(found.values())


def stacked(trees: Sequence[Any]) -> Any:
    """One tree of arrays ``[len(trees), ...]``."""
    return jax.tree.map(lambda *xs: jnp.stack(xs), *trees)


def row(tree: Any, number: int) -> Any:
    """One of the trees that were stacked."""
    return jax.tree.map(lambda x: jax.lax.index_in_dim(x, number, keepdims=False), tree)
