"""`accumulate`: gradients added up over several micro-steps, exchanged once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from gradtx import backends
from gradtx.core.arguments import check_bool, check_whole
from gradtx.core.combinators import (
    BareEnclosing,
    Enclosing,
    Gate,
    absent_here,
    gate,
    within,
    zero_residual,
)
from gradtx.core.stage import Argument, Kind, Stage
from gradtx.core.transformation import (
    Context,
    EmptyState,
    Progress,
    Share,
    Transformation,
    finite_flag,
)
from gradtx.core.tree import (
    Array,
    Info,
    PyTree,
    arrays_in,
    flatten,
    leaves_like,
    map_arrays,
    map_leaves,
    unflatten,
    widen,
)

ON_BAD = ("drop", "leave_out")


class AccumulateState(NamedTuple):
    """The state of `accumulate`.

    Attributes:
        count: 0-d int32: micro-steps in the window so far.
        total: the gradients so far, times their weights: a tree like the parameters, FP32 (FP64 for
            FP64 leaves).
        weight: ``[1]`` FP32: the sum of the weights so far.
        bad: ``[1]`` bool: a micro-step of the window was bad on this rank.
        seen: bool, one a leaf: this rank has had a gradient for it in the window.
        closed: 0-d bool: the last update ended a window.
        ready: 0-d bool: and its result is there to step with.
        clean: 0-d bool: in the last window no gradient of any rank was bad.
        waiting: 0-d bool: the last update was a flush, and other ranks have more to bring.
        inner_states: the state of the gate around what is to the right.
    """

    count: Array
    total: PyTree
    weight: Array
    bad: Array
    seen: Array
    closed: Array
    ready: Array
    clean: Array
    waiting: Array
    inner_states: tuple[Any, ...]

    @property
    def per_rank(self) -> tuple[str, ...]:
        """The fields that differ between ranks."""
        return ("total", "weight", "bad", "seen")

    @property
    def finite(self) -> Array:
        """What an enclosing gate asks an exchange for."""
        found: Array = self.inner_states[0].last_finite
        return found

    @property
    def pending(self) -> Array:
        """0-d bool: a flush has something to do."""
        return (self.count > 0) | self.waiting


class Window(Gate, Enclosing):
    """What `accumulate` makes in a chain."""

    _needs_chain = True

    def verdict(self, state: AccumulateState) -> tuple[Array, Array]:
        """At the end of a window, whether all of it was good on all ranks."""
        return state.closed, state.clean


def accumulate(
    n: int, *inner: Transformation, mean: bool = True, on_bad: str = "drop"
) -> Transformation:
    r"""Adds up the gradients of `n` micro-steps in FP32, and exchanges once, at the end.

    In a chain it holds back everything to its right until the window is full: that sees the mean of
    the window, once. In between updates are zeros and ``state.ready`` is false (`SyncReport.ready`
    with a `Pipeline`): there is nothing to step with.

    Micro-steps may have weights, :math:`w`, the extra argument `weight` of `update` (or
    ``Pipeline.sync``): how many tokens, say, the loss of the micro-step is a mean over. The result
    is the mean by weight, over the window and over the ranks,

    .. math:: \frac{\sum_r \sum_i w_{ri} \, g_{ri}}{\sum_r \sum_i w_{ri}},

    so unequal micro-batches count as in one large batch. Without it each weighs one.

    A window ends early by ``tx.flush(state)`` (``Pipeline.flush``), at the end of an epoch: what
    has been accumulated divides. The ranks may then have brought unequal numbers of micro-steps;
    all of them flush until ``state.pending`` is false, and none waits for ever.

    What compression left out before is fed back with each rank's share of the weight, and error
    feedback accounts for it once the weights of all ranks are known, with the exchange.

    Args:
        n: how many micro-steps.
        *inner: what is held back; in a chain, nothing: it takes hold of what is to its right.
        mean: False gives the sum over the window (and the mean over ranks, as ever).
        on_bad: what happens when a micro-step has an infinity or a NaN: ``"drop"`` drops the
            window, on all ranks; ``"leave_out"`` goes on without that micro-step, and without its
            weight, and drops the window only if nothing is left on any rank. A rank tells the
            others with the exchange. What is left of such a window is no longer a fair sample:
            prefer ``"drop"`` unless bad micro-steps are rare.

    Returns:
        The transformation. A leaf that is None in a micro-step counts as zero there. Under
        `jax.jit` a window compiles to one program with two branches.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if `n` is less than 1, or `on_bad` none of the two; in `update`, if a weight is
            negative or not finite. Where that is not known at once, for an array of JAX or on an
            accelerator, the micro-step counts as bad instead.

    References:
        Ott et al., Scaling Neural Machine Translation, 2018.

    Example:
        >>> import torch, gradtx as gx
        >>> tx = gx.chain(gx.accumulate(2), gx.allreduce())
        >>> state = tx.init({"w": torch.zeros(1)})
        >>> for value in (1.0, 3.0):
        ...     updates, state = tx.update({"w": torch.tensor([value])}, state)
        ...     print(updates["w"], bool(state.ready))
        tensor([0.]) False
        tensor([2.]) True
    """
    check_whole("accumulate(n", n, 1)
    check_bool("accumulate(mean", mean)
    if on_bad not in ON_BAD:
        raise ValueError(
            f"accumulate(on_bad={on_bad!r}): expected {' or '.join(map(repr, ON_BAD))}"
        )
    arguments = (
        Argument("n", n),
        Argument("mean", mean, True),
        Argument("on_bad", on_bad, "drop"),
    )
    stage = Stage("accumulate", Kind.ACCUMULATE, arguments, linear=True, stateful=True)
    around = partial(_window, stage, n, mean, on_bad)
    if inner:
        return around(within("accumulate", inner))
    return BareEnclosing(
        stage, around, "write chain(accumulate(8), allreduce()), or accumulate(8, allreduce())"
    )


def _window(
    stage: Stage, n: int, mean: bool, on_bad: str, inner: Sequence[Transformation]
) -> Window:
    parts = _opened(inner)
    held = gate(_weighing(parts))
    exchanges = held.stage.kind is Kind.EXCHANGE

    def init(params: PyTree, info: Info | None) -> AccumulateState:
        leaves = flatten(params)[0]
        ops = backends.find(leaves)
        like = next((leaf for leaf in leaves if leaf is not None), None)
        no = ops.flag(False)
        return AccumulateState(
            count=ops.counter(),
            total=map_leaves(zero_residual, params),
            weight=ops.zeros((1,), "float32", like),
            bad=ops.zeros((1,), "bool", like),
            seen=ops.zeros((len(leaves),), "bool"),
            closed=no,
            ready=no,
            clean=ops.flag(True),
            waiting=no,
            inner_states=(held.setup(params, info),),
        )

    def update(
        updates: PyTree,
        state: AccumulateState,
        params: PyTree = None,
        *,
        context: Context,
        weight: Any = None,
        flush: bool = False,
        finite: Array | None = None,
        **extra: Any,
    ) -> tuple[PyTree, AccumulateState]:
        ops = backends.of(state.count)
        if not flush:
            flag = finite_flag({"finite": finite}, ops)
            state = _absorbed(updates, state, context, check_weight(weight), flag)
        unequal = not ops.TRACES or weight is not None or on_bad == "leave_out"
        shares = unequal and not context.alone
        if ops.TRACES:
            # Whether a leaf has been there in the window is not known: so it stays.
            context.progress.absent = ()
        end = partial(
            _end,
            held,
            state,
            params,
            extra,
            context=context,
            n=n,
            mean=mean,
            shares=shares,
            on_bad=on_bad,
            flush=flush,
        )
        count = ops.concrete(state.count)
        # Of the form that the end of a window gives, and known to be as equal on all devices.
        of_end = ops.TRACES and (context.alone or count is None)
        apart = replace(context, progress=Progress())
        middle = partial(
            _middle, state, ops.blank(lambda: end(context=apart)[0]) if of_end else None
        )
        # Ranks that are processes cannot see whether others have brought anything: all come.
        collective = flush and exchanges and not ops.TRACES
        if count is not None:
            return end() if collective or (flush and count) or count >= n else middle()
        closes = (state.count > 0) if flush else (state.count >= n)
        found: tuple[PyTree, AccumulateState] = ops.switch(ops.cast(closes, "int32"), [middle, end])
        return found

    def code(local: bool) -> str:
        named = [str(argument) for argument in stage.arguments[1:] if argument.printed]
        codes = [part.code(local=local) for part in parts]
        return f"gx.accumulate({', '.join((repr(n), *codes, *named))})"

    window = Window(
        Stage("accumulate", held.stage.kind, stage.arguments, stateful=True),
        init,
        update,
        stages=(stage, *(s for part in parts for s in part.stages)),
        parts=(held,),
        code=code,
    )
    window.around = lambda right: _window(stage, n, mean, on_bad, (*parts, *right))
    return window


def _opened(inner: Sequence[Transformation]) -> tuple[Transformation, ...]:
    """The parts, without a gate around all of them."""
    if len(inner) == 1 and isinstance(inner[0], Gate) and not isinstance(inner[0], Enclosing):
        return _opened(inner[0].parts)
    return tuple(part for part in inner if not isinstance(part, _Weigh))


class _Weigh(Transformation):
    """Multiplies by the rank's weight what is about to be compressed, or sent."""

    def __init__(self) -> None:
        def update(
            updates: PyTree, state: EmptyState, params: PyTree = None, **extra: Any
        ) -> tuple[PyTree, EmptyState]:
            weight = extra["context"].weight
            if weight is None or (isinstance(weight, float) and weight == 1.0):
                return updates, state
            return map_arrays(lambda x: widen(x) * weight, updates), state

        super().__init__(Stage("weigh", linear=True), None, update, stages=())


def _weighing(parts: Sequence[Transformation]) -> tuple[Transformation, ...]:
    for i, part in enumerate(parts):
        if part.stage.kind is Kind.EXCHANGE or any(stage.lossy for stage in part.stages):
            return (*parts[:i], _Weigh(), *parts[i:])
    return tuple(parts)


def check_weight(weight: Any) -> Any:
    """The weight of a micro-step as a Python float, or FP32 0-d; one for None.

    Raises:
        TypeError: if it is no number.
        ValueError: if it is known to be negative or not finite, or has an axis.
    """
    if isinstance(weight, (np.ndarray, np.generic)) and weight.ndim == 0:
        weight = weight.item()
    if weight is None:
        return 1.0
    if backends.is_array(weight):
        if weight.ndim:
            raise ValueError(f"weight has shape {tuple(weight.shape)}: expected a 0-d array")
        ops = backends.of(weight)
        weight = ops.cast(ops.detach(weight), "float32")
        if ops.known((weight >= 0) & (weight < math.inf)) is False:
            raise ValueError(f"weight is {float(weight)}: expected a finite number of at least 0")
        return weight
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        raise TypeError(f"weight is {weight!r}: expected a number or a 0-d array")
    if not 0 <= weight <= float(np.finfo(np.float32).max):
        raise ValueError(f"weight is {weight!r}: expected a finite number of at least 0")
    return float(weight)


def _absorbed(
    updates: PyTree,
    state: AccumulateState,
    context: Context,
    weight: Any,
    finite: Array,
) -> AccumulateState:
    """The state with one more micro-step in it, if that is good."""
    leaves, _ = flatten(updates)
    totals, treespec = flatten(state.total)
    ops = backends.of(state.count)
    for leaf in leaves:
        if leaf is not None and not backends.is_array(leaf):
            raise TypeError(f"accumulate() takes dense gradients only, got {leaf!r}")
    good = ops.all_finite(arrays_in(leaves)) & finite
    if backends.is_array(weight):
        good = good & (weight >= 0) & (weight < math.inf)
        weight = ops.where(good, weight, 0.0)
    gradients = leaves_like(updates, state.total)
    wide = [x if x is None else widen(x) for x in gradients]
    plain = not backends.is_array(weight) and weight == 1
    weighed = wide if plain else [x if x is None else x * weight for x in wide]
    added = [x if y is None else x + y for x, y in zip(totals, weighed, strict=True)]
    known = ops.known(good)
    if known is False:
        added = totals
    elif known is None:
        added = [
            old if old is None else ops.where(good, new, old)
            for new, old in zip(added, totals, strict=True)
        ]
    absent = absent_here(leaves, context)
    seen = ops.flags([not skip for skip in absent])
    return state._replace(
        count=state.count + 1,
        total=unflatten(treespec, added),
        weight=ops.where(good, state.weight + weight, state.weight),
        bad=state.bad | ~good,
        seen=state.seen | seen,
    )


def _middle(state: AccumulateState, blank: PyTree | None) -> tuple[PyTree, AccumulateState]:
    """Nothing to step with yet: zeros, of another form if there is one given."""
    no = backends.of(state.count).flag(False)
    kept = state._replace(closed=no, ready=no, waiting=no)
    if blank is None:
        blank = map_leaves(lambda x: backends.of(x).zeros_like(x), state.total)
    return blank, kept


def _end(
    held: Gate,
    state: AccumulateState,
    params: PyTree,
    extra: dict[str, Any],
    *,
    context: Context,
    n: int,
    mean: bool,
    shares: bool,
    on_bad: str,
    flush: bool,
) -> tuple[PyTree, AccumulateState]:
    """The window through what was held back, and a new one begun."""
    ops, told = backends.of(state.count), context.progress
    count, bad = ops.ravel(state.weight)[0], ops.ravel(state.bad)[0]
    empty = count == 0
    if mean:
        divisor = ops.where(empty, 1.0, count)
        updates = map_arrays(lambda x: x / ops.cast(divisor, ops.dtype_name(x)), state.total)
    else:
        updates = state.total
    left_out = bad if on_bad == "leave_out" else ops.flag(False)
    finite = ~bad if on_bad == "drop" else ops.flag(True)
    share = None
    if shares and ops.TRACES:
        share = Share(count / n, mean, left_out, flush)
    elif shares:
        share = Share(float(count) / n, mean, bool(left_out), flush)
    if context.alone:
        told.nothing = empty & ~bad
        finite = finite & ~(empty & bad)
    absent = _absent(state, context)
    told.absent = absent
    within = replace(context, share=share, absent=absent)
    extra = {**extra, "context": within, "finite": finite}
    out, inner = held.step(updates, state.inner_states[0], params, **extra)
    went = ~ops.as_flag(told.nothing)
    left_out = ops.as_flag(told.left_out) if not context.alone else left_out
    return out, AccumulateState(
        count=state.count * 0,
        total=map_arrays(ops.zeros_like, state.total),
        weight=ops.zeros_like(state.weight),
        bad=ops.zeros_like(state.bad),
        seen=ops.zeros_like(state.seen),
        closed=went,
        ready=went & inner.last_finite,
        clean=inner.last_finite & ~left_out,
        waiting=ops.flag(flush and not told.through),
        inner_states=(inner,),
    )


def _absent(state: AccumulateState, context: Context) -> tuple[bool, ...]:
    """For each leaf, whether this rank has had no gradient for it in the window."""
    if backends.of(state.seen).TRACES:
        return ()
    shapes = (spec.shape for spec in context.layout.leaves)
    seen: list[bool] = state.seen.tolist()
    absent = tuple(shape is not None and not one for one, shape in zip(seen, shapes, strict=True))
    return absent if any(absent) else ()
