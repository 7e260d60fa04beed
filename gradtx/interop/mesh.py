"""What `jax.shard_map` has to be told of a state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree

from gradtx.backends.registry import NAMESPACE
from gradtx.core.chain import ChainState
from gradtx.core.per_rank import per_rank_fields
from gradtx.core.tree import PyTree, adopt
from gradtx.exchange.allreduce import AllreduceState
from gradtx.exchange.inner import InnerState
from gradtx.interop.optional import require


def partition_specs(state: PyTree, *, axis_name: str | Sequence[str]) -> PyTree:
    """How a state is laid out over the devices of a mesh, for `jax.shard_map`.

    What differs between devices is laid along its first axis: the fields that a state names in its
    property ``per_rank``, such as residuals and velocities, and what a foreign transformation
    before the exchange keeps, but for counters. On `N` devices, the residual of a leaf of shape
    ``[n, ...]`` is one array of shape ``[N * n, ...]``. All else is the same on all. The parameters
    are taken to be whole on every device, not spread over other axes.

    Args:
        state: of a chain, or a tree with such states in it, as of `optax.chain`; arrays, or what
            `jax.eval_shape` gives. What is no chain's state counts as the same on all devices.
        axis_name: the axis that the chain exchanges over; of a chain with several exchanges the
            axes of all of them, in their order. What is behind one is the same along its axis.

    Returns:
        A tree like the state, of `jax.sharding.PartitionSpec`.

    Raises:
        TypeError: if `axis_name` is no string, nor several.
        ValueError: if what differs between devices is a single number of shape ``[]``, or a chain
            has no exchange, or not as many as there are axes.
        ImportError: if jax is not installed.

    Example:
        >>> import jax, jax.numpy as jnp, gradtx as gx
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
        >>> tx = gx.chain(gx.topk(0.01), gx.ef(), gx.allreduce(axis_name="data"))
        >>> params = {"w": jnp.zeros(300)}
        >>> specs = gx.partition_specs(jax.eval_shape(tx.init, params), axis_name="data")
        >>> specs.residual == {"w": P("data")}
        True
        >>> init = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs)
        >>> init(params).residual["w"].shape == (300 * jax.device_count(),)
        True
    """
    axes = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not (isinstance(axes, Sequence) and axes and all(isinstance(x, str) for x in axes)):
        raise TypeError(
            f"partition_specs(axis_name={axis_name!r}): expected a mesh axis's name, or several"
        )
    spec = require("jax", "partition_specs").sharding.PartitionSpec
    # What is laid along all axes, then along all but the first, and so on.
    along = [spec(axes[i:] if len(axes) - i > 1 else axes[i]) for i in range(len(axes))]

    def of_chain(node: Any) -> Any:
        if not _is_chain(node):
            return spec()
        walk = _Walk(spec(), along)
        specs = walk.visit(node)
        if node.states and walk.left != 1 and walk.exchanged:
            raise ValueError(
                f"partition_specs(axis_name={axis_name!r}): the chain has "
                f"{len(axes) + 1 - walk.left} exchanges; give the axis of each, in their order"
            )
        if node.states and not walk.exchanged:
            raise ValueError(
                "a chain without an exchange decides on each device alone whether a step is bad, "
                "and its counters part: put the exchange into the same chain"
            )
        return specs

    return optree.tree_map(of_chain, adopt(state), is_leaf=_is_chain, namespace=NAMESPACE)


def _is_chain(node: Any) -> bool:
    return isinstance(node, ChainState)


class _Walk:
    """From left to right through a state, minding whether the exchange has been passed."""

    def __init__(self, everywhere: Any, along: Sequence[Any]) -> None:
        self._everywhere, self._axes = everywhere, along
        self.left = len(along)
        self.exchanged = False

    @property
    def _along(self) -> Any:
        return self._axes[min(len(self._axes) - self.left, len(self._axes) - 1)]

    def visit(self, state: Any) -> Any:
        """The specs of the state of one transformation."""
        ours = type(state).__module__.startswith("gradtx.") or per_rank_fields(state)
        if not ours:
            return self._all(state, self._everywhere if self.exchanged else self._along)
        self.exchanged |= isinstance(state, AllreduceState)
        self.left -= isinstance(state, InnerState)
        own = per_rank_fields(state)
        parts = []
        for name, part in zip(state._fields, state, strict=True):
            if name in ("states", "inner_states"):
                parts.append(tuple(map(self.visit, part)))
            elif name == "inner_state":
                parts.append(self.visit(part))
            else:
                parts.append(self._all(part, self._along if name in own else self._everywhere))
        return type(state)(*parts)

    def _all(self, tree: PyTree, spec: Any) -> PyTree:
        def of(leaf: Any) -> Any:
            if leaf.ndim or spec is self._everywhere:
                return spec
            if "float" in str(leaf.dtype):
                raise ValueError(
                    "a state that differs between devices has a number of shape []: it cannot be "
                    "laid out along an axis; keep it as [1]"
                )
            return self._everywhere  # A counter.

        return optree.tree_map(of, tree, namespace=NAMESPACE)
