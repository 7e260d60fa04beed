"""`delayed`: results applied some steps after their gradients."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from gradtx import backends
from gradtx.core.arguments import check_whole
from gradtx.core.combinators import BareDelaying, Delaying, either, run, within, zero_residual
from gradtx.core.stage import Argument, Kind, Stage
from gradtx.core.transformation import Context, Transformation
from gradtx.core.tree import (
    Array,
    Info,
    PyTree,
    arrays_in,
    flatten,
    map_arrays,
    map_leaves,
    widen,
)


class Result(NamedTuple):
    """What one exchange gave.

    Attributes:
        updates: a tree like the parameters, FP32 (FP64 for FP64 leaves).
        good: 0-d bool: there is something to step with: its step was taken.
        absent: bool, one a leaf: no rank had a gradient for it.
    """

    updates: PyTree
    good: Array
    absent: Array


class DelayedState(NamedTuple):
    """The state of `delayed`.

    Attributes:
        queue: the results that are still to be applied, the oldest first.
        ready: 0-d bool: the last update gave one to step with.
        inner_states: the states of what stands before the delay, and of the exchange.
    """

    queue: tuple[Result, ...]
    ready: Array
    inner_states: tuple[Any, ...]

    @property
    def finite(self) -> Array:
        """What an enclosing gate asks an exchange for."""
        return backends.of(self.ready).flag(True)

    @property
    def pending(self) -> Array:
        """0-d bool: a flush has something to do."""
        held = [state.pending for state in self.inner_states if hasattr(state, "pending")]
        pending: Array = functools.reduce(operator.or_, (*held, *(r.good for r in self.queue)))
        return pending


class Delayed(Delaying):
    """What `delayed` makes in a chain."""


def delayed(*inner: Transformation, steps: int) -> Transformation:
    r"""Applies the result of step :math:`t` at step :math:`t + s` (bounded staleness).

    In a chain it stands directly before the exchange and acts on it:
    ``chain(topk(0.01), ef(), delayed(steps=1), allreduce())``. The exchange of a step is then free
    to take as long as the next `steps` steps do: in a `Pipeline` it runs in the background, on a
    process group of its own, while the loop goes on. Each result is applied once, in the order of
    the steps, the same on all ranks, and no rank can be more than `steps` steps ahead of another.
    In the functional form the exchange is made at once and its result queued in the state, so the
    values are the same.

    In the first `steps` steps there is nothing to step with: updates are zeros, ``state.ready`` is
    false. ``tx.flush(state)`` (``Pipeline.flush``) brings out what is queued, one result a call:
    before evaluation, before the number of ranks changes, at the end. What stands to the right of
    the exchange acts on the results as they come out.

    A bad step is dropped on all ranks, in its turn, and what error feedback keeps is as if it had
    not been. A `torch.amp.GradScaler` cannot wait for that verdict: a `Pipeline` refuses it.

    The price is stability. With gradient descent on a quadratic of curvature :math:`\lambda`, one
    step of delay halves the stable learning rate, :math:`\eta \lambda < 1` rather than 2: see
    `stable_learning_rate` and `delayed_learning_rate`.

    Args:
        *inner: an exchange (and what stands before it); in a chain, nothing.
        steps: how many steps later, at least 0. With 0 it is, bit for bit, the chain without it.

    Returns:
        The transformation.

    Raises:
        TypeError: if `steps` is no int.
        ValueError: if it is negative; if `inner` has no exchange at its end.

    References:
        Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server,
        2013; Li et al., Pipe-SGD, 2018.

    Example:
        >>> import torch, gradtx as gx
        >>> tx = gx.chain(gx.delayed(steps=1), gx.allreduce())
        >>> state = tx.init({"w": torch.zeros(1)})
        >>> for value in (1.0, 3.0):
        ...     updates, state = tx.update({"w": torch.tensor([value])}, state)
        ...     print(updates["w"], bool(state.ready))
        tensor([0.]) False
        tensor([1.]) True
        >>> tx.flush(state)[0]["w"]
        tensor([3.])
    """
    check_whole("delayed(steps", steps, 0)
    stage = Stage(
        "delayed", Kind.DELAY, (Argument("steps", steps, -1),), linear=True, stateful=True
    )
    around = partial(_delayed, stage, steps)
    if inner:
        return around(within("delayed", inner))
    return BareDelaying(
        stage,
        steps,
        around,
        "write chain(delayed(steps=1), allreduce()), or delayed(allreduce(), steps=1)",
    )


def _delayed(stage: Stage, steps: int, parts: Sequence[Transformation]) -> Delayed:
    if not parts or parts[-1].stage.kind is not Kind.EXCHANGE:
        codes = ", ".join(part.code() for part in parts)
        raise ValueError(f"delayed({codes}, steps={steps}): expected an exchange at the end")

    def init(params: PyTree, info: Info | None) -> DelayedState:
        inner_states = tuple(part.setup(params, info) for part in parts)
        leaves = flatten(params)[0]
        ops = backends.find(leaves)
        empty = Result(
            map_leaves(zero_residual, params), ops.flag(False), ops.flags([False] * len(leaves))
        )
        return DelayedState((empty,) * steps, ops.flag(False), inner_states)

    def update(
        updates: PyTree,
        state: DelayedState,
        params: PyTree = None,
        *,
        context: Context,
        flush: bool = False,
        **extra: Any,
    ) -> tuple[PyTree, DelayedState]:
        ops, told = backends.of(state.ready), context.progress
        moves: Any = True
        inner_states, leaves = state.inner_states, len(context.layout.leaves)
        if context.windowed or not flush:
            extra |= {"context": context} | ({"flush": flush} if context.windowed else {})
            out, inner_states = run(parts, updates, state.inner_states, params, extra)
            moves, good = outcome_of(inner_states)
            absent = told.absent or (False,) * leaves
            result = Result(map_leaves(widen, out), good, ops.flags(absent))
        else:
            zeros = map_leaves(zero_residual, updates)
            result = Result(zeros, ops.flag(False), ops.flags([False] * leaves))
        moves = ops.as_flag(moves)
        head, *rest = (*state.queue, result)
        ready = moves & head.good
        told.finite, told.nothing, told.absent = True, ~ready, ()
        if not ops.TRACES:
            told.absent = tuple(head.absent.tolist()) if moves else context.absent
        zeros = map_arrays(ops.zeros_like, head.updates)
        queue = either(moves, tuple(rest), state.queue)
        return either(ready, head.updates, zeros), DelayedState(queue, ready, inner_states)

    def code(local: bool) -> str:
        codes = [part.code(local=local) for part in parts]
        return f"gx.delayed({', '.join((*codes, f'steps={steps}'))})"

    *before, exchange = [stage for part in parts for stage in part.stages]
    delayed_ = Delayed(
        Stage("delayed", Kind.EXCHANGE, stage.arguments, stateful=True),
        init,
        update,
        stages=(*before, stage, exchange),
        parts=tuple(parts),
        code=code,
    )
    delayed_.steps, delayed_.around = steps, partial(_delayed, stage, steps)
    return delayed_


def outcome_of(states: Sequence[Any]) -> tuple[Any, Array]:
    """Whether an exchange was due, and whether its step was taken.

    Args:
        states: of the parts up to the exchange, after the step.
    """
    for state in states:
        if hasattr(state, "closed"):
            # Not `closed`: a window in which nothing weighs anything has its turn too.
            return state.count == 0, state.ready
        if hasattr(state, "last_finite"):
            return True, state.last_finite
    return True, backends.find(arrays_in(states)).flag(True)
