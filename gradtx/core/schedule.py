"""Schedules: hyperparameters that change with the step, such as the density of a warm-up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gradtx import backends
from gradtx.core.arguments import check_whole
from gradtx.core.stage import Stage
from gradtx.core.transformation import Context, Settlement, Transformation
from gradtx.core.tree import Array, Info, PyTree, flatten


@dataclass(frozen=True)
class Schedule:
    """A hyperparameter as a function of the step, with finitely many values.

    It stands where a number would: ``topk(schedule)``. Steps are counted from zero, in the state of
    the chain, and only those that are taken: a bad step is none.

    Under `jax.jit` a chain with an exchange is compiled for each of the values, into one program
    that branches on the step: what is sent has the size of the step's own value.

    Args:
        function: ``function(step) -> value``. It must give the same on all ranks. Under `jax.jit`
            the step is a traced 0-d int32: write conditions with `jax.numpy.where`.
        values: all values it may give: sizes on the wire follow from them, and are checked at once.
        name: how it is printed; by default its qualified name and the values. All ranks must print
            the same.

    Raises:
        TypeError: if the function cannot be called, or a value is no float.
        ValueError: if there are no values.

    Example:
        >>> import gradtx as gx
        >>> schedule = gx.Schedule(lambda step: 0.5 if step < 10 else 0.01, (0.5, 0.01), "halves")
        >>> schedule(9), schedule(10)
        (0.5, 0.01)
        >>> gx.chain(gx.topk(schedule), gx.ef(), gx.allreduce())
        gx.chain(gx.topk(halves), gx.ef(), gx.allreduce())
    """

    function: Callable[[int], float]
    values: tuple[float, ...]
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"Schedule(function={self.function!r}): expected step -> value")
        object.__setattr__(self, "values", tuple(self.values))
        if not self.values:
            raise ValueError("Schedule(values=()): expected at least one value")
        if not all(isinstance(value, float) for value in self.values):
            raise TypeError(f"Schedule(values={self.values!r}): expected floats")

    def __call__(self, step: int) -> float:
        """The value at a step.

        Raises:
            ValueError: if the function gives one that was not declared.
        """
        value = float(self.function(step))
        nearest = min(self.values, key=lambda declared: abs(declared - value))
        # JAX computes in FP32.
        if not math.isclose(nearest, value, rel_tol=1e-6):
            raise ValueError(
                f"{self!r} gives {value!r} at step {step}: declare it among its values"
            )
        return nearest

    def __hash__(self) -> int:
        # Not of the function: an object that can be called need not have one.
        return hash(self.values)

    def index(self, step: Array) -> Array:
        """The position among `values` of the value at a step that is not known yet.

        A value that was not declared gives the position of the nearest one.

        Raises:
            TypeError: if the function needs to know the step.
        """
        try:
            value = self.function(step)
        except Exception as error:
            raise TypeError(
                f"{self!r} cannot be followed under jax.jit, where the step is not known: "
                f"{type(error).__name__}; write its conditions with jax.numpy.where"
            ) from error
        return backends.of(step).nearest(value, self.values)

    def __repr__(self) -> str:
        where = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        return self.name or f"gx.Schedule({where}, {self.values})"


@dataclass(frozen=True)
class _Stairs:
    values: tuple[float, ...]
    steps_each: int

    def __call__(self, step: Any) -> Any:
        if isinstance(step, int):
            return self.values[min(step // self.steps_each, len(self.values) - 1)]
        ops, value = backends.of(step), self.values[0]
        for i, later in enumerate(self.values[1:], 1):
            value = ops.where(step >= i * self.steps_each, later, value)
        return value


def warmup_density(densities: Sequence[float], steps_each: int) -> Schedule:
    """One density after the other, each for some steps, and the last for good.

    Early gradients change fast, and a residual that is sent late does harm: so the share of values
    that is sent starts high.

    Args:
        densities: the values, such as ``[0.25, 0.0625, 0.015625, 0.004, 0.001]``.
        steps_each: how many steps each of them lasts (a fifth of the warm-up, say).

    Returns:
        The schedule.

    Raises:
        TypeError: if these are no floats in a sequence, or `steps_each` is no int.
        ValueError: if there are none, or `steps_each` is less than 1.

    References:
        Lin et al., Deep Gradient Compression, 2018, section 3.3.

    Example:
        >>> import gradtx as gx
        >>> schedule = gx.warmup_density([0.25, 0.0625, 0.001], 100)
        >>> [schedule(step) for step in (0, 99, 100, 1000)]
        [0.25, 0.25, 0.0625, 0.001]
        >>> gx.topk(schedule)
        gx.topk(gx.warmup_density([0.25, 0.0625, 0.001], 100))
    """
    check_whole("warmup_density(steps_each", steps_each, 1)
    if isinstance(densities, str) or not isinstance(densities, Sequence):
        raise TypeError(
            f"warmup_density({densities!r}): expected several floats, such as [0.25, 0.01]"
        )
    values = tuple(densities)
    name = f"gx.warmup_density({list(values)}, {steps_each})"
    return Schedule(_Stairs(values, steps_each), values, name)


class ScheduleState(NamedTuple):
    """The state of a compressor with a schedule.

    Attributes:
        count: 0-d int32: steps taken so far.
        inner_state: the compressor's own.
    """

    count: Array
    inner_state: Any


class Scheduled(Transformation):
    """A transformation whose hyperparameter follows a schedule. Made by `scheduled`.

    Attributes:
        schedule: the hyperparameter.
        sized: whether sizes follow from it.
    """

    schedule: Schedule
    sized: bool


def scheduled(
    stage: Stage,
    schedule: Schedule,
    make: Callable[[float], Transformation],
    *,
    sized: bool = True,
) -> Scheduled:
    """A transformation whose hyperparameter follows a schedule.

    Args:
        stage: its declaration.
        schedule: the hyperparameter.
        make: the transformation for one value; its state must not depend on the value.
        sized: whether the sizes of what it gives follow from the value.

    Returns:
        The transformation. Where the step is not known yet, as under `jax.jit`, its `update` takes
        the value from the chain that it is in, and raises outside of one.
    """
    parts = {value: make(value) for value in schedule.values}
    first = parts[schedule.values[0]]

    def init(params: PyTree, info: Info | None) -> ScheduleState:
        counter = backends.find(flatten(params)[0]).counter()
        return ScheduleState(counter, first.setup(params, info))

    def update(
        updates: PyTree, state: ScheduleState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, ScheduleState]:
        step = backends.of(state.count).concrete(state.count)
        context: Context | None = extra.get("context")
        if step is not None:
            value = schedule(step)
        elif context is not None and schedule in context.scheduled:
            value = context.scheduled[schedule]
        else:
            raise TypeError(
                f"{stage.code()} follows the step, which is not known under jax.jit; put it into a "
                "chain with an exchange, or call update outside of jit"
            )
        out, inner_state = parts[value].step(updates, state.inner_state, params, **extra)
        return out, ScheduleState(state.count + 1, inner_state)

    def settle(
        before: ScheduleState, state: ScheduleState, settlement: Settlement
    ) -> ScheduleState:
        inner_state = first.settle(before.inner_state, state.inner_state, settlement)
        return ScheduleState(state.count, inner_state)

    select = first.select_rows
    transformation = Scheduled(
        stage,
        init,
        update,
        settle=settle,
        select_rows=select and (lambda rows, state: select(rows, state.inner_state)),
    )
    transformation.schedule, transformation.sized = schedule, sized
    return transformation


def unknown_steps(
    parts: Sequence[Transformation], states: Sequence[Any]
) -> Iterator[tuple[Scheduled, Array]]:
    """What follows a schedule within some parts and does not know its step yet; and the counts."""
    for part, state in zip(parts, states, strict=True):
        if isinstance(part, Scheduled):
            if backends.of(state.count).concrete(state.count) is None:
                yield part, state.count
        elif part.parts:
            several = getattr(state, "inner_states", None)
            yield from unknown_steps(
                part.parts, (state.inner_state,) if several is None else several
            )
