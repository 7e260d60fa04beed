"""`chain`: transformations composed, their order checked, their neighbours resolved."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from gradtx import backends
from gradtx.core.combinators import (
    TWO_STAGES,
    ApplyIfFiniteState,
    Delaying,
    Enclosing,
    ErrorFeedbackState,
    Feedback,
    Filter,
    Gate,
    error_feedback,
    exchanges_apart,
    gate,
    masked,
    run,
)
from gradtx.core.errors import ChainOrderError, RankLostError, Violation
from gradtx.core.payload import Joined, Member
from gradtx.core.per_rank import with_first_axis, without_first_axis
from gradtx.core.predicates import all_of
from gradtx.core.row_sparse import Rows
from gradtx.core.rules import check as check_order
from gradtx.core.schedule import Schedule, unknown_steps
from gradtx.core.stage import Kind, Stage
from gradtx.core.transformation import (
    Context,
    Exchange,
    KeepsLossScale,
    Progress,
    Transformation,
    flat,
)
from gradtx.core.tree import (
    Array,
    Info,
    Layout,
    PyTree,
    accumulation_dtype,
    all_tensors,
    arrays_in,
    expecting,
    flatten,
    flatten_with_paths,
    layout_of,
    unflatten,
)


class ChainState(NamedTuple):
    """The state of a chain.

    Attributes:
        layout: paths, shapes and dtypes of the parameters; static.
        states: the states of the core form's parts.
    """

    layout: Layout
    states: tuple[Any, ...]

    @property
    def gate(self) -> ApplyIfFiniteState | None:
        """The state of the gate, or None for a chain that is not gated."""
        return next((s for s in _within(self.states) if isinstance(s, ApplyIfFiniteState)), None)

    @property
    def residual(self) -> PyTree:
        """What error feedback keeps: FP32, a tree like the parameters; None without feedback."""
        return _residual(self.states)

    @property
    def loss_scale(self) -> Array | None:
        """What `dynamic_loss_scale` wants the next loss multiplied by; None without that stage."""
        found = (s.loss_scale for s in _within(self.states) if isinstance(s, KeepsLossScale))
        return next(found, None)

    @property
    def ready(self) -> Array:
        """0-d bool: the last update has given something to step with.

        It has not after a bad step, and before the end of a window of `accumulate`.
        """
        ready = next((s.ready for s in _within(self.states) if hasattr(s, "ready")), None)
        if ready is None:
            return self.last_finite
        for state in self.states:
            if isinstance(state, ApplyIfFiniteState):
                ready = ready & state.last_finite
        return ready

    @property
    def pending(self) -> Array:
        """0-d bool: there is something for `Chain.flush` to bring out."""
        held = [s.pending for s in _within(self.states) if hasattr(s, "pending")]
        return held[0] if held else backends.find(arrays_in(self.states)).flag(False)

    @property
    def last_finite(self) -> Array:
        """0-d bool: the last step was taken (always true for a chain that is not gated)."""
        if self.gate is not None:
            return self.gate.last_finite
        return backends.find(arrays_in(self.states)).flag(True)

    @property
    def total_notfinite(self) -> Array:
        """0-d int32: steps skipped so far."""
        if self.gate is not None:
            return self.gate.total_notfinite
        return backends.find(arrays_in(self.states)).counter()


def _within(states: Sequence[Any]) -> Iterator[Any]:
    """The states of a core form's parts, and of the parts within those, outermost first."""
    for state in states:
        yield state
        yield from _within(getattr(state, "inner_states", ()))


def _residual(state: Any) -> PyTree:
    if isinstance(state, ErrorFeedbackState):
        return state.residual
    parts = state if isinstance(state, tuple) else ()
    return next((found for part in parts if (found := _residual(part)) is not None), None)


class Chain(Transformation):
    """Several transformations, applied from left to right. Made by `chain`.

    Attributes:
        transformations: the flat chain, as it was written.
        core: the plain combinators it resolves to.
        exchange: the exchange in it, of several the last one, or None.
        inners: those before it, inside nodes, outermost first.
        overwrites: whether results may be written over the gradients, where a caller allows it.
        shared_code: its code without what differs between ranks.
    """

    def __init__(self, transformations: Sequence[Transformation]) -> None:
        self.transformations = tuple(transformations)
        self.core = resolve(self.transformations)
        self.exchange = next_exchange(self.core)
        self.inners = tuple(_inners_in(self.core))

        def code(local: bool) -> str:
            arguments = [t.code(local=local) for t in self.transformations]
            if check_order(self.stages):
                arguments.append("check=False")
            return f"gx.chain({', '.join(arguments)})"

        super().__init__(
            Stage("chain", stateful=True),
            self._setup,
            self._step,
            stages=tuple(s for part in self.transformations for s in part.stages),
            code=code,
        )
        self.shared_code = self.code(local=False)
        self._windowed = any(stage.kind is Kind.ACCUMULATE for stage in self.stages)
        self._holds_back = self._windowed or any(isinstance(part, Delaying) for part in self.core)
        self._joins = _ends_in_feedback(self.stages)
        self._defers = self.exchange is not None and _defers(self.core)
        # A state behind the exchange may keep its results: the next gradients must not reach them.
        # And what others have written may fail there: gradients are then as they were.
        behind = _behind_exchange(self.stages)
        self.overwrites = not any(s.stateful or s.identity is not None for s in behind)

    def _setup(self, params: PyTree, info: Info | None) -> ChainState:
        layout = layout_of(params, info)
        if layout.tables:
            params = self._with_stand_ins(params, layout)
        with self._arrays():
            return self._kept(layout, tuple(part.setup(params, info) for part in self.core))

    def _with_stand_ins(self, params: PyTree, layout: Layout) -> PyTree:
        """The parameters, an empty sparse tensor for each of those that are row-sparse.

        Raises:
            ValueError: if a stage cannot do with such a leaf.
        """
        path = next(layout.leaves[i].path for i in layout.tables)
        for stage in self.stages:
            if not (stage.row_sparse or stage.kind in _PASSED_BY):
                raise ValueError(
                    f"leaf {path!r} has row-sparse gradients, and {stage} takes dense ones: build "
                    f"the layer with sparse=False, or leave {stage.name}() out"
                    + _INSTEAD.get(stage.name, "")
                )
        leaves, treespec = flatten(params)
        leaves = list(leaves)
        for i, table in layout.tables.items():
            leaves[i] = table.stand_in(leaves[i].device)
        return unflatten(treespec, leaves)

    def _arrays(self) -> AbstractContextManager[None]:
        """Where it is known without any leaf whose arrays a state is made of."""
        one_program = self.exchange is not None and self.exchange.one_program
        return backends.on_jax() if one_program else nullcontext()

    def _kept(self, layout: Layout, states: tuple[Any, ...]) -> ChainState:
        """The state between two steps; `_used` has its inverse."""
        if self.exchange is not None and self.exchange.one_program:
            states = with_first_axis(states, layout)
        return ChainState(layout, states)

    def _used(self, state: ChainState) -> tuple[Any, ...]:
        """The states of the parts, within a step."""
        if self.exchange is not None and self.exchange.one_program:
            return tuple(without_first_axis(state.states, state.layout))
        return state.states

    def _checked(self, updates: PyTree) -> PyTree:
        # The layout refuses what it does not know, inside the step, where the others are told.
        return updates

    def _like(self, out: PyTree, updates: PyTree) -> PyTree:
        # The step has seen to it.
        return out

    def _step(
        self, updates: PyTree, state: ChainState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, ChainState]:
        found = list(unknown_steps(self.core, state.states)) if self._may_vary(state) else []
        if self.exchange is None and any(part.sized for part, _ in found):
            raise TypeError(
                f"{self.code()}: sizes follow from the step, which is not known under jax.jit; "
                "put an exchange into the chain, or call update outside of jit"
            )
        unknown = {part.schedule: count for part, count in found}
        take = partial(self._taken, updates, state, params, extra)
        with expecting(getattr(state, "layout", _NOTHING)):
            return _branched(take, list(unknown.items()), {})

    @property
    def delay(self) -> int:
        """By how many steps results come later than their gradients."""
        return sum(part.steps for part in self.core if isinstance(part, Delaying))

    @property
    def before_delay(self) -> tuple[Transformation, ...]:
        """What stands before a delayed exchange, as it was written.

        Raises:
            TypeError: if it was written as the combinators that a chain resolves to.
        """
        for i, part in enumerate(self.transformations):
            if isinstance(part, Delaying):
                before = (*self.transformations[:i], *part.parts[:-1])
                if any(isinstance(inner, (Gate, Enclosing)) for inner in part.parts):
                    raise TypeError(
                        f"{part.code()}: write what stands before the delay as stages of the chain"
                    )
                return before
        return self.transformations

    def flush(self, state: ChainState, params: PyTree = None, **extra: Any) -> tuple[PyTree, Any]:
        """Ends a window of `accumulate` early: a step with what has been accumulated so far.

        Over torch.distributed all ranks call it, whether they have accumulated anything or not, and
        until ``state.pending`` is false, which it becomes on all of them at once::

            while True:
                updates, state = tx.flush(state, params)
                if state.ready:
                    params = apply(params, updates)
                if not state.pending:
                    break

        Args:
            state: the state that `init` or the last step gave; it is not changed.
            params: the parameters, for transformations that need them.
            extra: as for `update`.

        Returns:
            The updates, zeros (or None) if there is nothing to step with, and the new state.
        """
        nothing = [None] * len(state.layout.leaves)
        none = unflatten(state.layout.treespec, nothing)
        if not self._holds_back:
            return _in_structure_of(none, _filled(nothing, state), state.layout), state
        if state.loss_scale is None:
            extra = {"loss_scale": 1.0, **extra}
        with backends.within(state):
            return self._step(none, state, params, flush=True, **extra)

    def context(self, state: Any) -> Context:
        """What is known of a step before it begins."""
        return Context(
            getattr(state, "layout", _NOTHING),
            self.shared_code + self._grid,
            alone=self.exchange is None,
            windowed=self._windowed,
            joins=self._joins,
            defers=self._defers,
        )

    @property
    def _grid(self) -> str:
        """How many ranks there are in each group, if there are several: the same for all."""
        if not self.inners or self.exchange is None or self.exchange.one_program:
            return ""
        return f" on {' x '.join(str(group.size) for group in self.groups)} ranks"

    @property
    def groups(self) -> tuple[Any, ...]:
        """The groups of ranks that its exchanges are over, that of the last one first."""
        exchanges = [inner.exchange for inner in self.inners]
        return tuple(each.group for each in (self.exchange, *reversed(exchanges)) if each)

    def _may_vary(self, state: Any) -> bool:
        varying = any(isinstance(a.value, Schedule) for s in self.stages for a in s.arguments)
        return varying and isinstance(state, ChainState) and len(state.states) == len(self.core)

    def _taken(
        self,
        updates: PyTree,
        state: ChainState,
        params: PyTree,
        extra: dict[str, Any],
        scheduled: Mapping[Schedule, float],
    ) -> tuple[PyTree, ChainState]:
        exchange = self.exchange
        extra = dict(extra)
        pool = extra.pop("pool", None)
        context = replace(self.context(state), scheduled=scheduled, pool=pool)
        layout = context.layout
        if exchange is not None:
            rank, size = exchange.ranks(arrays_in(updates) or arrays_in(state))
            context = replace(context, rank=rank, size=size)
        with telling_others(self, state, context), self._arrays():
            _check_state(self, state)
            leaves = layout.match(updates)
            if any(leaf is None for leaf in leaves):
                context = replace(context, absent=_absent(leaves, layout))
                context.progress.absent = context.absent
            if layout.tables:
                rows = {i: leaves[i] for i in layout.tables}
                leaves = [None if i in rows else leaf for i, leaf in enumerate(leaves)]
                context.progress.rows = rows
            if pool is not None and self.overwrites:
                context = replace(context, over=leaves)
            if exchange is not None and exchange.one_program:
                paths = (spec.path for spec in layout.leaves)
                given = zip(paths, leaves, strict=True)
                there = {p: leaf for p, leaf in given if leaf is not None}
                for each in (exchange, *(inner.exchange for inner in self.inners)):
                    each.check_local(there)
            if context.absent:
                leaves = _filled(leaves, state)
            tree = unflatten(layout.treespec, leaves)
            if params is not None:
                dense = layout.arrange(params)
                if layout.tables:
                    dense = [None if i in layout.tables else x for i, x in enumerate(dense)]
                params = unflatten(layout.treespec, _detached(dense))
            extra = {**extra, "context": context}
            with backends.full_precision():
                out, states = run(self.core, tree, self._used(state), params, extra)
        out_leaves = _withdrawn(flatten(out)[0], context)
        for i, own in context.progress.rows.items():
            out_leaves[i] = own
        return _in_structure_of(updates, out_leaves, layout), self._kept(layout, states)


def _branched(
    take: Callable[[Mapping[Schedule, float]], tuple[PyTree, ChainState]],
    unknown: list[tuple[Schedule, Array]],
    scheduled: Mapping[Schedule, float],
) -> tuple[PyTree, ChainState]:
    """A step, with one branch for each value of the schedules whose step is not known."""
    if not unknown:
        return take(scheduled)
    (schedule, count), *rest = unknown
    branches = [
        partial(_branched, take, rest, {**scheduled, schedule: value}) for value in schedule.values
    ]
    found: tuple[PyTree, ChainState] = backends.of(count).switch(schedule.index(count), branches)
    return found


def _check_state(tx: Chain, state: Any) -> None:
    if not isinstance(state, ChainState) or len(state.states) != len(tx.core):
        raise TypeError(
            f"this is no state of {tx.code()}: got {type(state).__name__}; "
            "give update what init or the last update of the same chain has returned"
        )


def fail(tx: Chain, state: ChainState, error: Exception) -> None:
    """Tells the other ranks that this one will not come to the next exchange, and why."""
    with suppress(type(error)), telling_others(tx, state, tx.context(state)):
        raise error


@contextmanager
def telling_others(tx: Chain, state: ChainState, context: Context) -> Iterator[None]:
    """Tells the other ranks of an error that is raised inside, if they wait to hear from this one.

    Args:
        tx: the chain at whose exchange they wait, if it has one.
        state: its state before the step.
        context: of the step.
    """
    try:
        yield
    except Exception as error:
        if tx.exchange is not None and not context.progress.sent:
            _tell(tx, state, context, error)
        if isinstance(error, RankLostError):
            # Those in other groups of the chain wait for this rank too.
            for group in tx.groups:
                group.give_up(str(error))
        raise


def _tell(tx: Chain, state: Any, context: Context, error: Exception) -> None:
    for inner in tx.inners:
        inner.fail(*_at(tx, state, context, inner, error))
    for meeting in reversed(context.progress.meetings.values()):
        with suppress(Exception):  # It is this one that the user is to see.
            meeting.confirm(error)
    exchange: Any = tx.exchange
    exchange.fail(*_at(tx, state, context, exchange, error))


def _at(tx: Chain, state: Any, context: Context, part: Any, error: Exception) -> tuple[Any, ...]:
    """What one that stands in a chain is told when a step fails."""
    try:
        own, arrives = _state_of(part, tx.core, state.states), rehearsed(tx, state, context, part)
    except Exception:  # The state itself is at fault: what is known without it has to do.
        own, arrives = None, None
    return own, context, error, arrives


def rehearsed(
    tx: Chain, state: ChainState, context: Context, at: Transformation | None = None
) -> PyTree | None:
    """What zeros look like when they arrive at the exchange; None if they do not get there.

    The sizes of what a rank sends may change with the step. They follow from the state, so a rank
    that fails can still tell what the others send in this step.
    """
    layout = state.layout
    zeros = _filled([None] * len(layout.leaves), state)
    extra: dict[str, Any] = {"context": replace(context, progress=Progress())}
    if state.loss_scale is None:
        extra["loss_scale"] = 1.0
    try:
        zeros = unflatten(layout.treespec, zeros)
        return arriving(at or tx.exchange, tx.core, zeros, state.states, extra)
    except Exception:  # The stage that fails on the gradients may fail on zeros too.
        return None


def arriving(
    at: Transformation | None,
    parts: Sequence[Transformation],
    updates: PyTree,
    states: Sequence[Any],
    extra: dict[str, Any],
) -> PyTree:
    """The updates as they arrive at one of the parts, or of those within, past all exchanges."""
    for part, state in zip(parts, states, strict=True):
        if part is at or isinstance(part, Exchange):
            break
        if part.parts and part.stage.kind is Kind.EXCHANGE:
            return arriving(at, part.parts, updates, state.inner_states, extra)
        updates, _ = part.step(updates, state, None, **extra)
    return updates


def _ends_in_feedback(stages: Sequence[Stage]) -> bool:
    """Whether the exchange gets what a single error feedback makes, and nothing comes between."""
    kinds = [stage.kind for stage in stages if stage.kind is not Kind.DELAY]
    if Kind.EXCHANGE not in kinds:
        return False
    before = kinds[: _last(kinds, Kind.EXCHANGE)]
    return before.count(Kind.FEEDBACK) == 1 and before[-1] is Kind.FEEDBACK


def _defers(core: Sequence[Transformation]) -> bool:
    """Whether `unscale` may leave the division to an error feedback that sees every leaf next."""
    if len(core) != 2 or not isinstance(core[1], Gate):
        return False
    first = core[0].stage
    return first.kind is Kind.UNSCALE and not first.stateful and core[1].parts[0].divides


def _behind_exchange(stages: Sequence[Stage]) -> Sequence[Stage]:
    kinds = [stage.kind for stage in stages]
    return stages[_last(kinds, Kind.EXCHANGE) + 1 :] if Kind.EXCHANGE in kinds else ()


def _last(kinds: Sequence[Kind], kind: Kind) -> int:
    return len(kinds) - 1 - kinds[::-1].index(kind)


def next_exchange(parts: Sequence[Transformation]) -> Exchange | None:
    """The first exchange among the parts of a core form, past those inside nodes."""
    for part in parts:
        found = part if isinstance(part, Exchange) else next_exchange(part.parts)
        if found is not None:
            return found
    return None


def _inners_in(parts: Sequence[Transformation]) -> Iterator[Any]:
    """The exchanges before another one, and all to their right."""
    for part in parts:
        if isinstance(getattr(part, "exchange", None), Exchange):
            yield part
        yield from _inners_in(part.parts)


def _state_of(wanted: Any, parts: Sequence[Transformation], states: Sequence[Any]) -> Any:
    """The state of an exchange, or of one before another, among the parts of a core form."""
    for part, state in zip(parts, states, strict=True):
        if part is wanted:
            return state
        if part.parts and part.stage.kind is Kind.EXCHANGE:
            return _state_of(wanted, part.parts, state.inner_states)
    return None


_NOTHING = Layout((), None)

# What never sees a row-sparse leaf, or knows of them.
_PASSED_BY = (Kind.UNSCALE, Kind.FILTER, Kind.COMPRESSOR, Kind.EXCHANGE)
_INSTEAD = {
    "accumulate": "; autograd adds gradients up between two zero_grad(): sync once for several "
    "backward passes",
}


def _detached(leaves: Sequence[Any]) -> list[Any]:
    if all_tensors(leaves):
        return [x.detach() if x.requires_grad else x for x in leaves]
    return [backends.of(x).detach(x) if backends.is_array(x) else x for x in leaves]


def _absent(leaves: Sequence[Any], layout: Layout) -> tuple[bool, ...]:
    return tuple(
        leaf is None and (spec.shape is not None or spec.table is not None)
        for leaf, spec in zip(leaves, layout.leaves, strict=True)
    )


def _filled(leaves: Sequence[Any], state: ChainState) -> list[Any]:
    """The leaves with zeros for those that this rank has no gradient for."""
    arrays = [leaf for leaf in leaves if leaf is not None]
    ops = backends.find(arrays or arrays_in(state.states))
    like = arrays[0] if arrays else None
    return [
        ops.zeros(spec.shape, accumulation_dtype(spec.dtype), like)
        if leaf is None and spec.shape is not None and spec.dtype is not None
        else leaf
        for leaf, spec in zip(leaves, state.layout.leaves, strict=True)
    ]


def _withdrawn(leaves: list[Any], context: Context) -> list[Any]:
    """The leaves with None again where no rank had a gradient."""
    absent = context.progress.absent or (False,) * len(leaves)
    return [
        None if gone and not isinstance(leaf, (Joined, Member)) else leaf
        for leaf, gone in zip(leaves, absent, strict=True)
    ]


def _in_structure_of(updates: PyTree, leaves: list[Any], layout: Layout) -> PyTree:
    """The leaves, in the order of the layout, in the containers and dtypes of `updates`."""
    given, treespec = flatten(updates)
    order: Sequence[int] = range(len(leaves))
    if treespec != layout.treespec:
        order = [layout.positions[path] for path in flatten_with_paths(updates)[0]]
    if all_tensors(given) and treespec == layout.treespec and all_tensors(leaves):
        kinds = [x.dtype for x in given]
        if kinds == [x.dtype for x in leaves]:
            return unflatten(treespec, leaves)
    out = []
    for like, i in zip(given, order, strict=True):
        leaf, spec = leaves[i], layout.leaves[i]
        if isinstance(leaf, Rows) and spec.table is not None:
            leaf = leaf.sparse(spec.table.kind if like is None else like.dtype)
        elif backends.is_array(leaf):
            ops = backends.of(leaf)
            leaf = ops.cast(leaf, spec.dtype if like is None else ops.dtype_name(like))
        out.append(leaf)
    return unflatten(treespec, out)


def chain(*transformations: Any, check: bool = True) -> Chain:
    """Composes transformations, applied from left to right, and refuses a wrong order.

    Nested chains flatten. Stages that act on their neighbours are resolved here, once: `unscale`
    gates everything to its right, `filter_params` and `skip_bn` mark leaves for the compressors to
    their right, `error_feedback()` takes hold of the run of compressors directly to its left. A
    chain without `unscale` is gated from its first stage on that is not stateless and linear.

    Args:
        *transformations: gradtx transformations, or anything with ``init(params)`` and
            ``update(updates, state, params=None)``, such as an optax transformation: it counts as
            needing true, reduced, dense gradients and as stateful, unless `declare` says otherwise.
        check: False builds a chain whatever its order; for tests, and for people who know.

    Returns:
        The chain: itself a transformation. With nothing in it, the identity.

    Raises:
        ChainOrderError: if the order breaks a rule (``python -m gradtx explain`` prints the rules).
        TypeError: if an argument is no transformation.
        ValueError: if a combinator has an exchange in it, and one over other ranks stands to its
            right.

    Example:
        >>> import gradtx as gx
        >>> tx = gx.chain(gx.unscale(), gx.skip_bn(), gx.topk(0.01), gx.ef(), gx.allreduce())
        >>> try:
        ...     gx.chain(gx.topk(0.01), gx.unscale(), gx.ef(), gx.allreduce())
        ... except gx.ChainOrderError as error:
        ...     print([violation.code for violation in error.violations])
        ...     print(error.suggestion)
        ['GX102', 'GX302', 'GX303', 'GX401']
        gx.chain(gx.unscale(), gx.topk(0.01), gx.ef(), gx.allreduce())
    """
    if not isinstance(check, bool):
        raise TypeError(f"chain(check={check!r}): expected True or False")
    parts = flat(transformations)
    violations = check_order([s for part in parts for s in part.stages]) if check else []
    if violations:
        suggestion = suggest(parts)
        raise ChainOrderError(_message(parts, violations, suggestion), violations, suggestion)
    return Chain(parts)


def resolve(transformations: Sequence[Transformation]) -> tuple[Transformation, ...]:
    """The core form of a flat chain: plain combinators, and no stage that acts on neighbours."""
    parts: list[Transformation] = []
    compressors: list[Transformation] = []
    predicates: list[Any] = []

    def keep(*found: Transformation) -> None:
        predicate = all_of(*predicates) if predicates else None
        parts.extend(masked(part, predicate) if predicate else part for part in found)

    for i, part in enumerate(transformations):
        if part.stage.kind is Kind.COMPRESSOR:
            compressors.append(part)
            continue
        if isinstance(part, Feedback) and compressors:
            keep(part.over(*compressors))
            compressors = []
            continue
        keep(*compressors)
        compressors = []
        if isinstance(part, Filter):
            predicates.append(part.predicate)
        elif any(stage.lossy for stage in part.stages) and part.stage.kind is not Kind.EXCHANGE:
            keep(part)
        elif exchanges_apart(part, transformations[i + 1 :]):
            if not isinstance(part, Exchange):
                raise ValueError(f"chain({part.code()}, ...): {TWO_STAGES}")
            parts.append(part.before_another())
            predicates = []
        else:
            parts.append(part)
            if part.stage.kind is Kind.EXCHANGE:
                predicates = []
    keep(*compressors)
    return _delayed(parts)


def _delayed(parts: list[Transformation]) -> tuple[Transformation, ...]:
    """The parts, with a delay around all that is to its left, and its exchange."""
    for i, part in enumerate(parts):
        if not isinstance(part, Delaying):
            continue
        delayed, end = list(part.parts), i + 1
        if not delayed and part.stage.kind is Kind.DELAY:
            delayed, end = parts[i + 1 : i + 2], i + 2
        if not delayed or delayed[-1].stage.kind is not Kind.EXCHANGE:
            continue  # Out of order: it raises when it is used.
        if part.steps == 0:
            return _delayed([*parts[:i], *delayed, *parts[end:]])
        behind = tuple(_enclosed(parts[end:]))
        up_to = _gated(_enclosed([*parts[:i], *delayed]))
        if not any(isinstance(inner, Gate) for inner in up_to):
            up_to = (*up_to[:-1], gate(up_to[-1:]))  # A queue is state: nothing bad enters it.
        front = part.around(up_to)
        return (front, gate(behind)) if behind else (front,)
    return _gated(_enclosed(parts))


def _enclosed(parts: list[Transformation]) -> list[Transformation]:
    """The parts, with those that take hold of everything to their right around it."""
    for i, part in enumerate(parts):
        if isinstance(part, Enclosing):
            return [*parts[:i], part.around(_enclosed(parts[i + 1 :]))]
    return parts


def _gated(parts: list[Transformation]) -> tuple[Transformation, ...]:
    unscales = [i + 1 for i, part in enumerate(parts) if part.stage.kind is Kind.UNSCALE]
    # What is stateless and linear hands an overflow on; anything else may hide or keep it.
    delicate = [
        i
        for i, part in enumerate(parts)
        if any(stage.lossy or stage.stateful or not stage.linear for stage in part.stages)
    ]
    if not unscales and not delicate:
        return tuple(parts)
    start = (unscales or delicate)[0]
    if len(parts) == start + 1 and isinstance(parts[start], Gate):
        return tuple(parts)
    return (*parts[:start], gate(tuple(parts[start:])))


_TRIED = 6
_PLACES = (
    Kind.UNSCALE,
    Kind.ACCUMULATE,
    Kind.FILTER,
    Kind.COMPRESSOR,
    Kind.FEEDBACK,
    Kind.DELAY,
    Kind.EXCHANGE,
    Kind.TRANSFORM,
)


def suggest(transformations: Sequence[Transformation]) -> Chain | None:
    """The same transformations in an order that passes, or None if none is found.

    Of up to six transformations all orders are tried, those with the fewest transpositions first;
    of more, the usual order.
    """
    if len(transformations) > _TRIED:
        usual = sorted(transformations, key=lambda part: _PLACES.index(part.stage.kind))
        return Chain(usual) if _passes(usual) else None
    orders = itertools.permutations(range(len(transformations)))
    for order in sorted(orders, key=_transpositions):
        candidate = [transformations[i] for i in order]
        if _passes(candidate):
            return Chain(candidate)
    return None


def _with_feedback(transformations: Sequence[Transformation]) -> Chain | None:
    """The transformations in an order that passes once an ef() is added."""
    return suggest((*transformations, error_feedback()))


def _passes(parts: Sequence[Transformation]) -> bool:
    return not check_order([stage for part in parts for stage in part.stages])


def _transpositions(order: Sequence[int]) -> int:
    return sum(a > b for a, b in itertools.combinations(order, 2))


def _message(
    parts: Sequence[Transformation], violations: Sequence[Violation], suggestion: Chain | None
) -> str:
    marks: dict[int, list[str]] = {}
    for violation in violations:
        for i in violation.stages:
            codes = marks.setdefault(i, [])
            if violation.code not in codes:
                codes.append(violation.code)
    broken = len({violation.code for violation in violations})
    lines = [f"this chain breaks {broken} rule{'s' if broken > 1 else ''}:", "", "    gx.chain("]
    position = 0
    for part in parts:
        own = range(position, position + len(part.stages))
        position += len(part.stages)
        found = list(dict.fromkeys(code for i in own for code in marks.get(i, [])))
        mark = f"  # <- {', '.join(found)}" if found else ""
        lines.append(f"        {part.code()},{mark}")
    lines += ["    )", ""]
    for violation in violations:
        where = ", ".join(map(str, violation.stages))
        lines += [f"{violation.code} at {where}: {violation.reason}", f"    fix: {violation.fix}"]
    if suggestion is not None:
        lines += ["", "write instead:", "", f"    {suggestion.code()}"]
    elif (extended := _with_feedback(parts)) is not None:
        lines += ["", "write instead, with ef() added:", "", f"    {extended.code()}"]
    return "\n".join(lines)
