"""Schedules: hyperparameters that change with the step, such as the density of a warm-up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gradtx import backends
from gradtx.compressors.arguments import check_whole
from gradtx.core.payload import Payload
from gradtx.core.stage import Stage
from gradtx.core.transformation import Transformation
from gradtx.core.tree import Array, Info, PyTree, flatten


@dataclass(frozen=True)
class Schedule:
    """A hyperparameter as a function of the step, with finitely many values.

    It stands where a number would: ``topk(schedule)``. Steps are counted from zero, in the state of
    the chain, and only those that are taken: a bad step is none.

    Args:
        function: ``function(step) -> value``. It must give the same on all ranks.
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
        value = self.function(step)
        if value not in self.values:
            raise ValueError(
                f"{self!r} gives {value!r} at step {step}: declare it among its values"
            )
        return value

    def __repr__(self) -> str:
        where = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        return self.name or f"gx.Schedule({where}, {self.values})"


@dataclass(frozen=True)
class _Stairs:
    values: tuple[float, ...]
    steps_each: int

    def __call__(self, step: int) -> float:
        return self.values[min(step // self.steps_each, len(self.values) - 1)]


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
        TypeError: if a density is no float, or `steps_each` no int.
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


def scheduled(
    stage: Stage, schedule: Schedule, make: Callable[[float], Transformation]
) -> Transformation:
    """A transformation whose hyperparameter follows a schedule.

    Args:
        stage: its declaration.
        schedule: the hyperparameter.
        make: the transformation for one value; its state must not depend on the value.

    Returns:
        The transformation. Under `jax.jit` its `update` raises, since there the step is not known
        when shapes are.
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
        if step is None:
            raise TypeError(
                f"{stage.code()}: shapes follow from the step, which is not known under jax.jit; "
                "call update outside of jit, or jit one chain for each value"
            )
        part = parts[schedule(step)]
        out, inner_state = part.step(updates, state.inner_state, params, **extra)
        return out, ScheduleState(state.count + 1, inner_state)

    def settle(state: ScheduleState, payloads: Mapping[int, Payload]) -> ScheduleState:
        return ScheduleState(state.count, first.settle(state.inner_state, payloads))

    return Transformation(stage, init, update, settle=settle)
