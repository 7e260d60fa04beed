"""`master_weights`: the optimizer steps on FP32 copies of 16-bit parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from gradtx import backends
from gradtx.core.combinators import BareEnclosing, Enclosing, run, within
from gradtx.core.stage import Kind, Stage
from gradtx.core.transformation import Transformation
from gradtx.core.tree import (
    Array,
    Info,
    PyTree,
    accumulation_dtype,
    flatten,
    leaves_like,
    map_leaves,
    unflatten,
    widen,
)

STAGE = Stage("master_weights", Kind.TRANSFORM, stateful=True, needs_reduced=True)


class MasterWeightsState(NamedTuple):
    """The state of `master_weights`.

    Attributes:
        masters: the parameters in FP32, the same on all ranks; None for those that are wider than
            16 bits, which need no copy.
        inner_states: the states of what is to the right.
    """

    masters: PyTree
    inner_states: tuple[Any, ...]


class MasterWeights(Enclosing):
    """What `master_weights` makes in a chain."""


def master_weights(*inner: Transformation) -> Transformation:
    r"""Keeps 16-bit parameters in FP32 as well, for what is to its right to step on.

    An update that is small beside its parameter is lost in 16 bits: in bfloat16, :math:`w + u` is
    :math:`w` for every :math:`|u| < 2^{-9} |w|`. Here it is added to a copy in FP32, and what comes
    out is the difference between that copy, rounded, and the parameter: added to the parameters, it
    leaves them within one rounding of the copy, and nothing is lost from step to step.

    In a chain it stands behind the exchange and takes hold of everything to its right, which sees
    the copies as `params`: ``chain(ef, allreduce(), master_weights(), from_optax(adam))``. With a
    `Pipeline`, whose optimizer is a `torch.optim.Optimizer`, nothing is to its right; the optimizer
    is given ``pipe.parameters()``, the copies.

    Args:
        *inner: what steps on the copies; in a chain, nothing.

    Returns:
        The transformation. `update` needs `params`.

    Raises:
        ValueError: in `update`, if `params` is not given.
        TypeError: in `update`, if nothing is to its right.

    References:
        Micikevicius et al., Mixed Precision Training, 2018, section 3.1.

    Example:
        >>> import torch, gradtx as gx
        >>> tx = gx.chain(gx.master_weights(gx.scale(-1.0)))
        >>> params = {"w": torch.ones(1, dtype=torch.bfloat16)}
        >>> state = tx.init(params)
        >>> for _ in range(8):
        ...     updates, state = tx.update({"w": torch.full((1,), 2.0**-10)}, state, params)
        ...     params["w"] = params["w"] + updates["w"].bfloat16()
        >>> params["w"]
        tensor([0.9922], dtype=torch.bfloat16)
    """
    if inner:
        return _around(within("master_weights", inner))
    return BareEnclosing(
        STAGE,
        _around,
        "put the optimizer to its right, chain(allreduce(), master_weights(), from_optax(...)), or "
        "give the chain to a Pipeline and pipe.parameters() to a torch optimizer",
    )


def _around(parts: Sequence[Transformation]) -> Transformation:
    if not parts:
        return master_weights()

    def init(params: PyTree, info: Info | None) -> MasterWeightsState:
        masters = map_leaves(master_of, params)
        wide = map_leaves(widen, params)
        return MasterWeightsState(masters, tuple(part.setup(wide, info) for part in parts))

    def update(
        updates: PyTree, state: MasterWeightsState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, MasterWeightsState]:
        if params is None:
            raise ValueError(
                "master_weights() needs the parameters: tx.update(grads, state, params)"
            )
        masters, treespec = flatten(state.masters)
        current = leaves_like(params, state.masters)
        stepped_on = [p if m is None else m for m, p in zip(masters, current, strict=True)]
        out, inner_states = run(
            parts,
            map_leaves(widen, updates),
            state.inner_states,
            unflatten(treespec, stepped_on),
            extra,
        )
        steps = leaves_like(out, state.masters)
        moved = [
            m if m is None or u is None else m + widen(u)
            for m, u in zip(masters, steps, strict=True)
        ]
        shown = [
            u if m is None or u is None else _difference(m, p)
            for m, u, p in zip(moved, steps, current, strict=True)
        ]
        return (
            unflatten(treespec, shown),
            MasterWeightsState(unflatten(treespec, moved), inner_states),
        )

    def code(local: bool) -> str:
        return f"gx.master_weights({', '.join(part.code(local=local) for part in parts)})"

    combinator = MasterWeights(
        STAGE,
        init,
        update,
        stages=(STAGE, *(stage for part in parts for stage in part.stages)),
        parts=tuple(parts),
        code=code,
    )
    combinator.around = lambda right: _around((*parts, *right))
    return combinator


def master_of(leaf: Array) -> Array | None:
    """A copy of a 16-bit leaf in FP32; None for a wider one."""
    ops = backends.of(leaf)
    if ops.dtype_name(leaf) == accumulation_dtype(ops.dtype_name(leaf)):
        return None
    return widen(leaf)


def _difference(master: Array, parameter: Array) -> Array:
    """What brings a parameter to its master, as near as its dtype is."""
    ops = backends.of(master)
    rounded = ops.cast(master, ops.dtype_name(parameter))
    return widen(rounded) - widen(parameter)
