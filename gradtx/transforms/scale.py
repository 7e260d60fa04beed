"""`scale` and `scale_by_schedule`: gradients times a number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from gradtx import backends
from gradtx.core.arguments import check_number
from gradtx.core.foreign import Code, describe
from gradtx.core.row_sparse import map_rows
from gradtx.core.schedule import Schedule
from gradtx.core.stage import Argument, Kind, Stage
from gradtx.core.transformation import Context, EmptyState, Transformation
from gradtx.core.tree import Array, Info, PyTree, flatten, map_leaves
from gradtx.transforms.dense import dense


def scale(factor: float) -> Transformation:
    r"""Multiplies by a number: :math:`g \leftarrow f g`, in FP32 (FP64 for FP64 leaves).

    It is linear and may stand anywhere among dense gradients, before `unscale` too. At the end of a
    chain, ``scale(-0.1)`` makes of the gradient what is added to the parameters.

    Args:
        factor: the number; it may be negative.

    Returns:
        The transformation. It has no state and takes dense gradients only.

    Raises:
        TypeError: if `factor` is no number; in `update`, if a leaf is compressed.
        ValueError: if `factor` is not finite in FP32.

    Example:
        >>> import torch, gradtx as gx
        >>> tx = gx.scale(-0.5)
        >>> grads = {"w": torch.tensor([2.0, 4.0])}
        >>> tx.update(grads, tx.init(grads))[0]
        {'w': tensor([-1., -2.])}
    """
    factor = check_number("scale(factor", factor)
    arguments = (Argument("factor", factor),)
    stage = Stage("scale", Kind.TRANSFORM, arguments, linear=True, row_sparse=True)

    def update(
        updates: PyTree, state: EmptyState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, EmptyState]:
        multiply_rows(extra.get("context"), factor)
        return map_leaves(lambda leaf: dense(leaf, stage.name) * factor, updates), state

    return Transformation(stage, None, update)


def multiply_rows(context: Context | None, factor: Any) -> None:
    """Multiplies the rows of row-sparse leaves."""
    if context is not None and context.progress.rows:
        context.progress.rows = map_rows(lambda x: x * factor, context.progress.rows)


class ScaleByScheduleState(NamedTuple):
    """The state of `scale_by_schedule`.

    Attributes:
        count: 0-d int32: steps taken so far.
    """

    count: Array


def scale_by_schedule(schedule: Callable[[Any], Any]) -> Transformation:
    r"""Multiplies by a function of the step: :math:`g \leftarrow f(t) g`, in FP32 or FP64.

    Steps are counted from zero, and only those that are taken: so it stands behind `unscale`, whose
    gate keeps the count as it is on a bad step. As the count is the same on all ranks it may stand
    on either side of the exchange.

    Args:
        schedule: ``schedule(step) -> factor``, such as one of optax's, or a `Schedule`; it must
            give the same on all ranks. On torch, and on JAX outside of `jax.jit`, the step is a
            Python int; under `jax.jit` a traced 0-d int32: write conditions with `jax.numpy.where`.

    Returns:
        The transformation. It takes dense gradients only. On torch it reads the count, which is on
        the CPU in a chain with an exchange; in one without, on a GPU, it waits for the gate.

    Raises:
        TypeError: if `schedule` cannot be called; in `update`, if a leaf is compressed.
        ValueError: in `update`, if the schedule gives what is no finite number (under `jax.jit`,
            what is no single number).

    Example:
        >>> import torch, gradtx as gx
        >>> tx = gx.scale_by_schedule(lambda step: -1.0 / (1 + step))
        >>> grads = {"w": torch.tensor([4.0])}
        >>> updates, state = tx.update(grads, tx.init(grads))
        >>> updates, tx.update(grads, state)[0]
        ({'w': tensor([-4.])}, {'w': tensor([-2.])})
    """
    if not callable(schedule) or isinstance(schedule, type):
        raise TypeError(f"scale_by_schedule(schedule={schedule!r}): expected step -> factor")
    function, text = schedule, describe(schedule)
    if isinstance(schedule, Schedule):
        function, text = schedule.function, Code(repr(schedule))
    stage = Stage(
        "scale_by_schedule",
        Kind.TRANSFORM,
        (Argument("schedule", text),),
        linear=True,
        stateful=True,
        row_sparse=True,
        identity=schedule,
    )

    def init(params: PyTree, info: Info | None) -> ScaleByScheduleState:
        return ScaleByScheduleState(backends.find(flatten(params)[0]).counter())

    def update(
        updates: PyTree, state: ScaleByScheduleState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, ScaleByScheduleState]:
        step = backends.of(state.count).concrete(state.count)
        factor = function(state.count if step is None else step)
        factor = _checked(factor, step, stage)

        def scaled(leaf: Any) -> Array:
            wide = dense(leaf, stage.name)
            ops = backends.of(wide)
            by = ops.cast(factor, ops.dtype_name(wide)) if backends.is_array(factor) else factor
            return wide * by

        multiply_rows(extra.get("context"), factor)
        return map_leaves(scaled, updates), ScaleByScheduleState(state.count + 1)

    return Transformation(stage, init, update)


def _checked(factor: Any, step: int | None, stage: Stage) -> Any:
    """A factor as a Python number, or, if the step is not known, a 0-d array."""
    if step is None and backends.is_array(factor):
        if factor.ndim:
            raise ValueError(
                f"{stage.code()} gives an array of shape {tuple(factor.shape)}: expected a number"
            )
        return factor
    try:
        number = float(factor)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        where = "" if step is None else f" at step {step}"
        raise ValueError(f"{stage.code()} gives {factor!r}{where}: expected a finite number")
    return number
