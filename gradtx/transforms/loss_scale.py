"""`dynamic_loss_scale`: a loss scale that adjusts itself, in place of a GradScaler."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from gradtx import backends
from gradtx.core.arguments import check_whole
from gradtx.core.stage import Argument, Kind, Stage
from gradtx.core.transformation import KeepsLossScale, Transformation
from gradtx.core.tree import Array, Info, PyTree, flatten, map_leaves
from gradtx.transforms.unscale import divide, divide_rows

_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST = float(np.finfo(np.float32).tiny)


class DynamicLossScaleState(NamedTuple):
    """The state of `dynamic_loss_scale`.

    Attributes:
        loss_scale: 0-d FP32: what the loss of the next step is to be multiplied by.
        good_steps: 0-d int32: good steps in a row since the scale last changed.
    """

    loss_scale: Array
    good_steps: Array


KeepsLossScale.register(DynamicLossScaleState)


def dynamic_loss_scale(
    initial: float = 2.0**16,
    *,
    growth_interval: int = 2000,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    minimum: float = 1.0,
) -> Transformation:
    r"""Divides by a loss scale :math:`s` of its own, and adjusts that by whether the step was good.

    It stands where `unscale` would, and gates everything to its right as `unscale` does; but the
    scale is in the state, not an argument of `update`. Multiply the loss by it::

        loss, grads = value_and_grad(lambda p: loss_fn(p) * state.loss_scale)(params)
        updates, state = tx.update(grads, state, params)

    After a bad step (on any rank), on all ranks :math:`s \leftarrow \max(s \cdot b, s_{min})` with
    `backoff_factor` :math:`b`; after each `growth_interval` good steps in a row
    :math:`s \leftarrow s \cdot f` with `growth_factor` :math:`f`, unless that is infinite in FP32.
    That is what `torch.amp.GradScaler` does, but for the minimum. It works on torch tensors and on
    JAX arrays, under ``jax.jit`` and ``jax.lax.scan`` too; nothing is read back from the device.

    Args:
        initial: the scale before the first step.
        growth_interval: how many good steps in a row make it grow.
        growth_factor: what it is then multiplied by, over 1.
        backoff_factor: what it is multiplied by after a bad step, over 0 and under 1.
        minimum: what it does not fall below.

    Returns:
        The transformation. `ChainState.loss_scale` finds the scale in the state of the chain.

    Raises:
        TypeError: if an argument is no number; in `update`, if a leaf is compressed already.
        ValueError: if an argument is out of range; in `update`, if a `loss_scale` is given.

    References:
        Micikevicius et al., Mixed Precision Training, 2018.

    Example:
        >>> import torch, gradtx as gx
        >>> tx = gx.chain(gx.dynamic_loss_scale(1024.0), gx.topk(0.5), gx.ef(), gx.allreduce())
        >>> state = tx.init({"w": torch.zeros(2)})
        >>> grads = {"w": torch.tensor([3.0, 1.0]) * state.loss_scale}
        >>> tx.update(grads, state)[0]
        {'w': tensor([3., 0.])}
        >>> _, state = tx.update({"w": torch.tensor([float("inf"), 0.0])}, state)
        >>> state.loss_scale
        tensor(512.)
    """
    _check_number("minimum", minimum, _SMALLEST, _LARGEST)
    _check_number("initial", initial, minimum, _LARGEST)
    check_whole("dynamic_loss_scale(growth_interval", growth_interval, 1)
    if growth_interval >= 2**31:
        raise ValueError(
            f"dynamic_loss_scale(growth_interval={growth_interval!r}): expected less than 2**31"
        )
    _check_number("growth_factor", growth_factor, math.nextafter(1.0, 2.0), _LARGEST)
    _check_number("backoff_factor", backoff_factor, _SMALLEST, math.nextafter(1.0, 0.0))
    stage = Stage(
        "dynamic_loss_scale",
        Kind.UNSCALE,
        (
            Argument("initial", initial, 2.0**16),
            Argument("growth_interval", growth_interval, 2000),
            Argument("growth_factor", growth_factor, 2.0),
            Argument("backoff_factor", backoff_factor, 0.5),
            Argument("minimum", minimum, 1.0),
        ),
        linear=True,
        stateful=True,
        whole=True,
    )

    def init(params: PyTree, info: Info | None) -> DynamicLossScaleState:
        leaves = [leaf for leaf in flatten(params)[0] if leaf is not None]
        ops, like = backends.find(leaves), leaves[0] if leaves else None
        scale = ops.zeros((), "float32", like) + initial
        return DynamicLossScaleState(scale, ops.zeros((), "int32", like))

    def update(
        updates: PyTree,
        state: DynamicLossScaleState,
        params: PyTree = None,
        *,
        loss_scale: Any = None,
        **extra: Any,
    ) -> tuple[PyTree, DynamicLossScaleState]:
        if loss_scale is not None:
            raise ValueError(
                f"loss_scale={loss_scale!r} is given, and dynamic_loss_scale() has a scale of its "
                "own: multiply the loss by state.loss_scale and leave the argument out, or write "
                "unscale()"
            )
        divide_rows(extra.get("context"), state.loss_scale)
        return map_leaves(lambda leaf: divide(leaf, state.loss_scale, stage.name), updates), state

    def conclude(state: DynamicLossScaleState, taken: Array) -> DynamicLossScaleState:
        scale, count = state.loss_scale, state.good_steps + 1
        ops = backends.of(scale)
        # The verdict of the ranks may be on another device than the scale; this brings it here.
        taken = taken & (count > 0)
        due = count >= growth_interval
        larger, smaller = scale * growth_factor, scale * backoff_factor
        larger = ops.where(due & (larger <= _LARGEST), larger, scale)
        smaller = ops.where(smaller < minimum, minimum, smaller)
        return DynamicLossScaleState(
            ops.where(taken, larger, smaller), ops.where(taken & ~due, count, 0)
        )

    return Transformation(stage, init, update, conclude=conclude)


def _check_number(name: str, value: Any, least: float, most: float) -> None:
    given = f"dynamic_loss_scale({name}={value!r})"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{given}: expected a number")
    if not least <= value <= most:
        raise ValueError(f"{given}: expected a number from {least:.3g} to {most:.3g}")
