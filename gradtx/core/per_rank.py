"""State that differs between ranks, such as residuals.

A state says so by its property ``per_rank``, the names of those fields; each is a tree like the
parameters, or an array with an axis. Where all ranks are devices of one program, such a leaf is
laid out over all of them along its first axis, and so needs one: a leaf of shape ``[]`` is kept as
``[1]``.

When the number of ranks changes, fields called ``residual`` and ``velocity`` are shared out so that
what they add to the result is conserved: see `gradtx.reshard`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradtx import backends
from gradtx.core.tree import Layout, PyTree, flatten, unflatten


def per_rank_fields(state: Any) -> tuple[str, ...]:
    """The fields of a state that differ between ranks, as it declares.

    A field that a foreign state happens to call ``per_rank`` is no declaration.
    """
    if not isinstance(getattr(type(state), "per_rank", None), property):
        return ()
    declared: tuple[str, ...] = state.per_rank
    return declared


def with_first_axis(state: Any, layout: Layout) -> Any:
    """The state, its per-rank leaves of shape ``[]`` as ``[1]``."""
    return _map_per_rank(lambda tree: _shaped(tree, layout, (1,)), state)


def without_first_axis(state: Any, layout: Layout) -> Any:
    """The inverse of `with_first_axis`."""
    return _map_per_rank(lambda tree: _shaped(tree, layout, ()), state)


def _shaped(tree: PyTree, layout: Layout, shape: tuple[int, ...]) -> PyTree:
    leaves, treespec = flatten(tree)
    if treespec != layout.treespec:
        return tree
    return unflatten(
        treespec,
        [
            leaf if leaf is None or spec.shape != () else backends.of(leaf).reshape(leaf, shape)
            for leaf, spec in zip(leaves, layout.leaves, strict=True)
        ],
    )


def _map_per_rank(fn: Callable[[PyTree], PyTree], state: Any) -> Any:
    if not isinstance(state, tuple):
        return state
    names = getattr(state, "_fields", None)
    if names is None:
        return tuple(_map_per_rank(fn, part) for part in state)
    own = per_rank_fields(state)
    parts = zip(names, state, strict=True)
    return type(state)(
        *(fn(part) if name in own else _map_per_rank(fn, part) for name, part in parts)
    )
