"""The plain combinators that a chain resolves into: each takes transformations, and is one."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from gradtx import backends
from gradtx.backends.registry import register_node
from gradtx.core.payload import (
    Joined,
    Member,
    Parts,
    Payload,
    decode_leaves,
    values_of,
    with_dense_values,
)
from gradtx.core.phases import in_phase
from gradtx.core.predicates import predicate as as_predicate
from gradtx.core.row_sparse import AllRows, all_finite, device_of, no_rows, with_feedback
from gradtx.core.stage import Argument, Kind, Stage
from gradtx.core.transformation import (
    Context,
    EncodeFn,
    Progress,
    Settlement,
    Transformation,
    finite_flag,
    flat,
)
from gradtx.core.tree import (
    Array,
    Info,
    PyTree,
    accumulation_dtype,
    arranged_like,
    arrays_in,
    flatten,
    flatten_with_paths,
    leaves_like,
    map_arrays,
    map_leaves,
    reorder,
    unflatten,
    widen,
    widen_all,
    without_tables,
)


class Bare(Transformation):
    """A stage that acts on its neighbours: `chain` resolves it; used on its own it raises."""

    def refuse_in(self, combinator: str) -> None:
        """Raises a ValueError: a combinator has no neighbours to offer."""
        raise ValueError(
            f"{combinator}({self.code()}): {self.code()} acts on its neighbours in a chain; "
            f"{self._instead}"
        )

    def __init__(self, stage: Stage, instead: str) -> None:
        self._instead = instead

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise TypeError(
                f"{stage.code()} acts on its neighbours in a chain and does nothing alone: "
                f"{instead}"
            )

        super().__init__(stage, refuse, refuse)


def compressors_in(name: str, compressors: Sequence[Any]) -> tuple[Transformation, ...]:
    """The compressors that a feedback is called with, nested chains flattened.

    Raises:
        ValueError: if there is something else among them.
    """
    parts = flat(compressors)
    for part in parts:
        if part.stage.kind is not Kind.COMPRESSOR:
            raise ValueError(f"{name}({part.code()}): expected compressors, such as topk(0.01)")
    return parts


def stages_in(parts: Sequence[Transformation]) -> int:
    """How many stages the order checker sees in some parts."""
    return sum(len(part.stages) for part in parts)


def within(name: str, inner: Sequence[Any]) -> tuple[Transformation, ...]:
    """What a combinator is called with, nested chains flattened.

    Raises:
        ValueError: if one of them acts on neighbours, which a combinator does not offer; if two of
            them exchange, over other ranks: those of the first would not decide together.
    """
    parts = flat(inner)
    for i, part in enumerate(parts):
        if isinstance(part, Bare):
            part.refuse_in(name)
        if exchanges_apart(part, parts[i + 1 :]):
            raise ValueError(f"{name}({part.code()}, ...): {TWO_STAGES}")
    return parts


TWO_STAGES = (
    "another exchange, over other ranks, stands to its right. An exchange in two stages is written "
    "as stages of a chain: chain(allreduce(inner), topk(0.01), ef(), allreduce(outer))"
)


def exchanges_apart(part: Transformation, right: Sequence[Transformation]) -> bool:
    """Whether there is an exchange in a part, and to its right are such over other ranks only."""
    own = [stage for stage in part.stages if stage.kind is Kind.EXCHANGE]
    others = [s for each in right for s in each.stages if s.kind is Kind.EXCHANGE]
    if not own or not others:
        return False
    return not any(one.same_ranks(other) for one in own for other in others)


class Gate(Transformation):
    """What `apply_if_finite` makes: it decides whether a step is taken."""

    def verdict(self, state: Any) -> tuple[Any, Array]:
        """Whether a decision was made in the last step, and the decision, for what is to its left.

        Args:
            state: after the step.
        """
        return True, state.last_finite


class Feedback(Bare):
    """A stage that takes hold of the run of compressors to its left.

    Attributes:
        over: makes the combinator of it, given the compressors.
    """

    def __init__(self, stage: Stage, over: Callable[..., Transformation], instead: str) -> None:
        super().__init__(stage, instead)
        self.over = over


Around = Callable[[Sequence[Transformation]], Transformation]


class Enclosing(Transformation):
    """A transformation that takes hold of everything to its right in a chain.

    Attributes:
        around: makes the combinator of it, given those parts.
    """

    around: Around


class BareEnclosing(Bare, Enclosing):
    """The stage of that kind that is called with nothing."""

    def __init__(self, stage: Stage, around: Around, instead: str) -> None:
        super().__init__(stage, instead)
        self.around = around


class Delaying(Transformation):
    """A transformation that delays what the exchange gives.

    Attributes:
        steps: by how many steps.
        around: makes the combinator of it, given what stands before it, and the exchange.
    """

    steps: int
    around: Around


class BareDelaying(Bare, Delaying):
    """The stage of that kind that is called with no exchange."""

    def __init__(self, stage: Stage, steps: int, around: Around, instead: str) -> None:
        super().__init__(stage, instead)
        self.steps, self.around = steps, around


class Filter(Bare):
    """A stage that marks leaves; the compressors to its right are masked by its predicate."""

    def __init__(self, stage: Stage, predicate: Callable[..., bool]) -> None:
        super().__init__(
            stage, "write chain(skip_bn(), topk(0.01), ef()), or masked(inner, predicate)"
        )
        self.predicate = predicate


def run(
    parts: Sequence[Transformation],
    updates: PyTree,
    states: Sequence[Any],
    params: PyTree,
    extra: dict[str, Any],
) -> tuple[PyTree, tuple[Any, ...]]:
    """The updates through all parts, one after the other, and the new states."""
    new: list[Any] = []
    for part, state in zip(parts, states, strict=True):
        updates, state = part.step(updates, state, params, **extra)
        if (context := extra.get("context")) is not None and context.progress.shown:
            extra = {**extra, "finite": _still_finite(extra.get("finite"), context.progress)}
        if part.stage.kind is Kind.EXCHANGE:
            new = settled(parts[: len(new)], states, new, Settlement.of(extra["context"]))
        if isinstance(part, Gate):
            decided, taken = part.verdict(state)
            before = zip(parts[: len(new)], new, strict=True)
            new = [_concluded(left, own, decided, taken) for left, own in before]
        new.append(state)
    return updates, tuple(new)


def _still_finite(finite: Array | None, progress: Progress) -> Array:
    """The flag ``finite``, once a part has shown what it has read; see `Transformation.tells`."""
    shown, progress.shown = progress.shown, []
    found: Array = backends.of(shown[0]).all_finite(shown)
    return found if finite is None else found & finite


def _concluded(part: Transformation, state: Any, decided: Any, taken: Array) -> Any:
    """The state of a part, once the gate to its right has decided, if it has."""
    after = part.conclude(state, taken)
    return after if after is state or decided is True else either(decided, after, state)


def either(condition: Array, yes: PyTree, no: PyTree) -> PyTree:
    """One of two trees of one structure; no branch where the condition is not known."""
    ops = backends.of(condition)
    known = ops.known(condition)
    if known is not None:
        return yes if known else no
    return map_arrays(lambda a, b: ops.where(condition, a, b), yes, no)


def settled(
    parts: Sequence[Transformation],
    before: Sequence[Any],
    states: Sequence[Any],
    settlement: Settlement,
) -> list[Any]:
    """The states after the exchange has told what was sent."""
    if not settlement:
        return list(states)
    found = zip(parts, before, states, strict=False)
    return [part.settle(old, new, settlement) for part, old, new in found]


def call(name: str, parts: Sequence[Transformation], *arguments: str) -> Callable[[bool], str]:
    """A `code` function for a combinator over parts."""

    def code(local: bool) -> str:
        return f"gx.{name}({', '.join((*(part.code(local=local) for part in parts), *arguments))})"

    return code


class ErrorFeedbackState(NamedTuple):
    """The state of `error_feedback`.

    Attributes:
        residual: what compression left out so far: a tree like the parameters, FP32 (FP64 for FP64
            leaves), None for leaves that are not compressed.
        inner_states: the states of the compressors.
    """

    residual: PyTree
    inner_states: tuple[Any, ...]

    @property
    def per_rank(self) -> tuple[str, ...]:
        """The fields that differ between ranks."""
        return ("residual",)


def error_feedback(*compressors: Transformation, dtype: str = "float32") -> Transformation:
    r"""Adds back at each step what compression left out before.

    With the compressors' composition :math:`C` and the residual :math:`e`, zero at the start:
    :math:`\hat g = C(g + e)`, then :math:`e \leftarrow g + e - \hat g`.

    Called with nothing it is a stage for `chain`, and takes hold of the run of compressors directly
    to its left. Called with compressors it is an ordinary combinator.

    Args:
        *compressors: what loses information, applied from left to right.
        dtype: of the residual; FP32 and nothing less, since what is smaller than the rounding of a
            16-bit residual would be lost for good.

    Returns:
        The transformation. A leaf without a gradient sends nothing and keeps its residual.

    Raises:
        ValueError: for a `dtype` other than ``"float32"``.

    References:
        Seide et al., 1-Bit Stochastic Gradient Descent, 2014; Karimireddy et al., Error Feedback
        Fixes SignSGD, 2019.

    Example:
        >>> import torch, gradtx as gx
        >>> tx = gx.error_feedback(gx.topk(0.5))
        >>> state = tx.init({"w": torch.zeros(2)})
        >>> sent, state = tx.update({"w": torch.tensor([3.0, 1.0])}, state)
        >>> sent["w"].decode(), state.residual["w"]
        (tensor([3., 0.]), tensor([0., 1.]))
    """
    if dtype != "float32":
        raise ValueError(
            f"error_feedback(dtype={dtype!r}): the residual is kept in 'float32' "
            "(FP64 for FP64 leaves); 16 bits lose what is smaller than their rounding"
        )
    parts = compressors_in("error_feedback", compressors)
    over = stages_in(parts) or None
    stage = Stage("ef", Kind.FEEDBACK, stateful=True, row_sparse=True, over=over)
    if not compressors:
        return Feedback(
            stage,
            error_feedback,
            "write chain(topk(0.01), ef()), or error_feedback(topk(0.01))",
        )
    encoders = [encode for part in parts for encode in part.encoders]
    leafwise = all(part.encoders for part in parts)
    selects_rows = any(part.select_rows for part in parts)

    def init(params: PyTree, info: Info | None) -> ErrorFeedbackState:
        params = params if selects_rows else without_tables(params)
        residual = map_leaves(zero_residual, params)
        return ErrorFeedbackState(residual, tuple(part.setup(params, info) for part in parts))

    @in_phase("feedback")
    def update(
        updates: PyTree, state: ErrorFeedbackState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, ErrorFeedbackState]:
        leaves, treespec = flatten(updates)
        residuals, own = flatten(state.residual)
        if own != treespec:
            residuals = leaves_like(state.residual, updates)
        context: Context | None = extra.get("context")
        absent = absent_here(leaves, context)
        inner_states = state.inner_states
        rows = {} if context is None else context.progress.rows
        if context is not None:
            context.progress.rows = {}  # What is chosen of them is chosen here.

        def corrected(i: int) -> Any:
            if absent[i]:
                return leaves[i]
            leaf = unscaled(widen(leaves[i]), context)
            return added(leaf, weighed(residuals[i], context), context)

        if leafwise and not backends.find(leaves).TRACES:
            there = [None if skip else x for x, skip in zip(residuals, absent, strict=True)]
            sent, left = _joined(parts, leaves, there, context)
            shown = [values_of(x) for x in sent if isinstance(x, Joined)]
            rest = [i for i, leaf in enumerate(leaves) if sent[i] is None and leaf is not None]
            present = [not absent[i] for i in rest]
            makes = [partial(corrected, i) for i in rest]
            first, *found = _leaf_by_leaf(encoders, makes, present)
            for i, payload, remainder in zip(rest, *found, strict=True):
                sent[i], left[i] = payload, remainder
            if context is not None and parts[0].shows:
                context.progress.shown += [*shown, *map(values_of, first)]
        else:
            carried = [corrected(i) for i in range(len(leaves))]
            payloads, inner_states = run(
                parts, unflatten(treespec, carried), inner_states, params, extra
            )
            sent = flatten(payloads)[0]
            there = [None if skip else x for x, skip in zip(carried, absent, strict=True)]
            left = remainders(there, sent, arrays_in(inner_states))
        payloads = unflatten(treespec, sent)
        kept = kept_residuals(residuals, left, leaves, sent, absent, context)
        if context is not None and rows:
            context.progress.rows = rows
            if selects_rows:
                select = partial(_selected, parts, state.inner_states)
                context.progress.rows, chosen = with_feedback(select, rows, residuals)
                kept = [chosen.get(i, own) for i, own in enumerate(kept)]
        residual = unflatten(treespec, kept)
        if own != treespec:
            residual = arranged_like(residual, state.residual)
        return payloads, ErrorFeedbackState(residual, inner_states)

    @in_phase("feedback")
    def settle(
        before: ErrorFeedbackState, state: ErrorFeedbackState, settlement: Settlement
    ) -> ErrorFeedbackState:
        residual = settled_residual(before.residual, state.residual, settlement)
        inner_states = settled(parts, before.inner_states, state.inner_states, settlement)
        return ErrorFeedbackState(residual, tuple(inner_states))

    def tells(leaves: Sequence[Any], state: ErrorFeedbackState) -> list[bool]:
        told = leafwise and parts[0].shows and not backends.find(leaves).TRACES
        return [told and leaf is not None and not isinstance(leaf, Payload) for leaf in leaves]

    return Transformation(
        stage,
        init,
        update,
        stages=(*(s for part in parts for s in part.stages), stage),
        parts=parts,
        settle=settle,
        code=call("error_feedback", parts),
        divides=leafwise and parts[0].shows,
        tells=tells,
    )


ef = error_feedback


def _selected(parts: Sequence[Transformation], states: Sequence[Any], rows: AllRows) -> AllRows:
    for part, state in zip(parts, states, strict=True):
        rows = part.select_rows(rows, state) if part.select_rows else rows
    return rows


def weighed(kept: Any, context: Context | None) -> Any:
    """What is kept of a leaf, with the weight of this rank's gradients."""
    if kept is None or context is None or context.weight is None:
        return kept
    return kept * context.weight


def unscaled(leaf: Array, context: Context | None) -> Array:
    """A leaf, divided by the loss scale if that has been left undone."""
    divisor = None if context is None else context.progress.divisor
    return leaf if divisor is None else leaf / divisor


def settled_residual(before: PyTree, residual: PyTree, settlement: Settlement) -> PyTree:
    r"""The residuals, once the exchange has told what was sent.

    With weight :math:`w` and factor :math:`F`, what was sent is :math:`\hat g = C(w e + g)`, and
    what it added to the result is :math:`F \hat g`: of what the rank had, :math:`e + F g`, that
    leaves :math:`F (w e + g - \hat g) + (1 - F w) e`.

    Args:
        before: the residuals before the step, :math:`e`.
        residual: what compression has left out, :math:`w e + g - \hat g`.
        settlement: what the exchange tells.
    """
    leaves, treespec = flatten(residual)
    for i, payload in settlement.payloads.items():
        leaves[i] = leaves[i] - _shaped(payload.decode(), leaves[i])
    leaves = reweighed(flatten(before)[0], leaves, settlement)
    for i, values in settlement.returned.items():
        leaves[i] = leaves[i] + _shaped(values, leaves[i])
    return unflatten(treespec, leaves)


def reweighed(before: Sequence[Any], after: Sequence[Any], settlement: Settlement) -> list[Any]:
    """``F x + (1 - F w) x_0`` for each leaf that this rank had a gradient for."""
    if settlement.factor is None:
        return list(after)
    absent = settlement.absent or (False,) * len(after)

    factor, rest = settlement.factor, 1 - settlement.factor * settlement.weight
    return [
        new if skip or new is None else factor * new + rest * old
        for old, new, skip in zip(before, after, absent, strict=True)
    ]


def _shaped(values: Array, like: Array) -> Array:
    ops = backends.of(like)
    return ops.reshape(ops.cast(values, ops.dtype_name(like)), tuple(like.shape))


def zero_residual(leaf: Array) -> Array:
    """Zeros like a leaf, in its accumulation dtype."""
    ops = backends.of(leaf)
    return ops.zeros(tuple(leaf.shape), accumulation_dtype(ops.dtype_name(leaf)), leaf)


def absent_here(leaves: Sequence[Any], context: Context | None) -> list[bool]:
    """For each leaf, whether this rank has no gradient for it."""
    if context is None or not context.absent:
        return [leaf is None for leaf in leaves]
    return [leaf is None or skip for leaf, skip in zip(leaves, context.absent, strict=True)]


def added(leaf: Array, residual: Array, context: Context | None) -> Array:
    """Their sum, in C order, in a buffer of its own that later stages may write to."""
    pool = None if context is None else context.pool
    if pool is not None:
        return pool.sum(leaf, residual)
    return backends.of(leaf).contiguous(leaf + residual)


def remainders(corrected: Sequence[Any], sent: Sequence[Any], kept: Sequence[Any]) -> list[Any]:
    """What compression has left out of each leaf.

    Args:
        corrected: what was compressed; it may be written to. None where there is nothing.
        sent: what came of it: payloads or arrays.
        kept: arrays that compressors keep: what they hold of `corrected` stays as it is.
    """
    out: list[Any] = [None] * len(corrected)
    alone = [
        i
        for i, (leaf, part) in enumerate(zip(corrected, sent, strict=True))
        if leaf is not None and isinstance(part, Payload) and not isinstance(part, (Joined, Member))
    ]
    first = [corrected[i] for i in alone]
    ops = backends.find(first)
    found = ops.each(_remainder, ops.unshared(first, kept), [sent[i] for i in alone])
    for i, values in zip(alone, found, strict=True):
        out[i] = values
    done = set(alone)
    others = decode_leaves([None if i in done else part for i, part in enumerate(sent)])
    for i, (leaf, part) in enumerate(zip(corrected, others, strict=True)):
        if leaf is not None and part is not None:
            out[i] = left_out(leaf, part)
    return out


_MANY = 16  # leaves


def _joined(
    parts: Sequence[Transformation],
    leaves: Sequence[Any],
    residuals: Sequence[Any],
    context: Context | None,
) -> tuple[list[Any], list[Any]]:
    """Compresses small leaves as one, if they are many: a call for each would cost more than that.

    Args:
        parts: the compressors.
        leaves: as they arrived, zeros for those that are not there.
        residuals: what to add to them; None for those that are not there.
        context: of the step.

    Returns:
        What is sent and what is left out of these leaves; None for the others.
    """
    sent: list[Any] = [None] * len(leaves)
    left: list[Any] = [None] * len(leaves)
    if context is None or not context.joins or len(parts) > 1 or parts[0].encode_joined is None:
        return sent, left
    members = context.layout.small
    if not all(leaves[i] is not None for i, _ in members.leaves):
        members = Parts(tuple(part for part in members.leaves if leaves[part[0]] is not None))
    if len(members.leaves) < _MANY:
        return sent, left
    places, shapes = zip(*members.leaves, strict=True)
    ops = backends.of(leaves[places[0]])
    kept = [ops.zeros_like(leaves[i]) if residuals[i] is None else residuals[i] for i in places]
    corrected = unscaled(ops.joined(widen_all([leaves[i] for i in places])), context)
    corrected = corrected + weighed(ops.joined(kept), context)
    payload = parts[0].encode_joined(corrected, [context.layout.sizes[i] for i in places])
    found = ops.split(payload.subtracted_from(corrected), shapes)
    member = {shape: Member(shape, payload.dtype) for shape in set(shapes)}
    for i, shape, values in zip(places, shapes, found, strict=True):
        sent[i], left[i] = member[shape], values
    sent[places[0]] = Joined(payload, members, payload.shape, payload.dtype)
    return sent, left


def _leaf_by_leaf(
    encoders: Sequence[EncodeFn], leaves: Sequence[Callable[[], Any]], there: Sequence[bool]
) -> tuple[list[Payload], list[Payload], list[Any]]:
    """Compresses leaves, each made and the first time compressed while it is in the cache.

    Args:
        encoders: of compressors that treat each leaf alone; the first chooses values, which the
            others encode, of all leaves together.
        leaves: make them.
        there: whether something is left out of each of them; they are then written to.

    Returns:
        What the first encoder makes of them, what is sent, and what is left out.
    """
    first, *others = encoders
    sent: list[Payload] = []
    left: list[Any] = []
    for make, own in zip(leaves, there, strict=True):
        leaf = make()
        [payload] = first([leaf])
        sent.append(payload)
        left.append(None if not own else leaf if others else _remainder(leaf, payload))
    chosen = sent
    for encode in others:
        sent = encode(sent)
    if others:
        pairs = zip(left, with_dense_values(sent), strict=True)
        left = [None if leaf is None else _remainder(leaf, payload) for leaf, payload in pairs]
    return chosen, sent, left


def _remainder(corrected: Array, sent: Any) -> Array:
    ops = backends.of(corrected)
    flat = sent.subtracted_from(ops.ravel(corrected))
    return ops.reshape(flat, tuple(corrected.shape))


def kept_residuals(
    residuals: Sequence[Any],
    left: Sequence[Any],
    leaves: Sequence[Any],
    sent: Sequence[Any],
    absent: Sequence[bool],
    context: Context | None,
) -> list[Any]:
    """The new residuals; an exchange leaves out what is sent for leaves that are not there.

    Args:
        residuals: those before the step.
        left: what compression has left out of the leaves that are there.
        leaves: as they arrived.
        sent: what came of them.
        absent: for each leaf, whether it is not there.
        context: of the step.
    """
    kept = [old if skip else new for old, new, skip in zip(residuals, left, absent, strict=True)]
    if context is not None and context.alone and any(absent):
        decoded = decode_leaves(list(sent))
        for i, (leaf, skip) in enumerate(zip(leaves, absent, strict=True)):
            if skip and leaf is not None:
                kept[i] = residuals[i] + left_out(leaf, decoded[i])
    return kept


def left_out(corrected: Array, sent: Array) -> Array:
    """What compression has left out of a leaf, in the dtype of the leaf."""
    ops = backends.of(corrected)
    return corrected - ops.cast(sent, ops.dtype_name(corrected))


@dataclass(frozen=True)
class Mask:
    """Which leaves are selected; a static pytree node.

    Attributes:
        paths: the key paths of the leaves, in the order of the tree.
        selected: one bool for each.
        treespec: the structure of the tree.
    """

    paths: tuple[str, ...]
    selected: tuple[bool, ...]
    treespec: Any

    def of(self, updates: PyTree) -> tuple[bool, ...]:
        """One bool for each leaf of `updates`, matched by path.

        Raises:
            ValueError: if the leaves have other paths.
        """
        if flatten(updates)[1] == self.treespec:
            return self.selected
        paths = flatten_with_paths(updates)[0]
        found = dict(zip(self.paths, self.selected, strict=True))
        reorder(dict.fromkeys(paths), self.paths)
        return tuple(found[path] for path in paths)


register_node(Mask, static=("paths", "selected", "treespec"))


class MaskedState(NamedTuple):
    """The state of `masked`.

    Attributes:
        mask: which leaves the inner transformation sees; static.
        inner_state: its state, over those leaves.
    """

    mask: Mask
    inner_state: Any


def masked(inner: Transformation, predicate: Callable[..., bool]) -> Transformation:
    """Applies a transformation to some leaves only; the others go past it unchanged.

    Args:
        inner: the transformation; it sees None for the leaves that are left out.
        predicate: ``predicate(path, leaf, info) -> bool``, asked once, at `init`, for each
            parameter; `info` is its `LeafInfo`, or None where `init` was not given a module.

    Returns:
        The transformation.

    Example:
        >>> import torch, gradtx as gx
        >>> tx = gx.masked(gx.topk(0.5, feedback=False), gx.is_matrix)
        >>> grads = {"w": torch.tensor([[3.0, 1.0]]), "b": torch.ones(2)}
        >>> updates, _ = tx.update(grads, tx.init(grads))
        >>> updates
        {'w': Sparse(shape=(1, 2), dtype='float32'), 'b': tensor([1., 1.])}
    """
    part = as_one(inner)
    if part.stage.kind is Kind.EXCHANGE:
        raise ValueError(
            f"masked({part.code()}, ...): an exchange sees every leaf, since a leaf that goes past "
            "it is never reduced; mask what stands before it"
        )
    if part.stage.kind is Kind.UNSCALE:
        raise ValueError(
            f"masked({part.code()}, ...): the loss scale is in every leaf; mask what comes after"
        )
    if isinstance(part, Bare):
        part.refuse_in("masked")
    if isinstance(part, Enclosing) and isinstance(part, Gate):
        raise ValueError(
            f"masked({part.code()}, ...): a window holds back whole steps; mask what is held back, "
            "accumulate(8, masked(...))"
        )
    predicate = as_predicate(predicate)

    def init(params: PyTree, info: Info | None) -> MaskedState:
        paths, leaves, treespec = flatten_with_paths(params)
        selected = tuple(
            leaf is not None and predicate(path, leaf, (info or {}).get(path))
            for path, leaf in zip(paths, leaves, strict=True)
        )
        mask = Mask(tuple(paths), selected, treespec)
        chosen = _only(leaves, selected)
        return MaskedState(mask, part.setup(unflatten(treespec, chosen), info))

    def update(
        updates: PyTree, state: MaskedState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, MaskedState]:
        leaves, treespec = flatten(updates)
        keep = state.mask.of(updates)
        chosen = unflatten(treespec, _only(leaves, keep))
        if params is not None:
            values, spec = flatten(params)
            params = unflatten(spec, _only(values, state.mask.of(params)))
        context: Context | None = extra.get("context")
        rows = {} if context is None else context.progress.rows
        if context is not None and rows:
            context.progress.rows = {i: own for i, own in rows.items() if keep[i]}
        out, inner_state = part.step(chosen, state.inner_state, params, **extra)
        if context is not None and rows:
            context.progress.rows = {**rows, **context.progress.rows}
        merged = [
            new if selected else old
            for new, old, selected in zip(flatten(out)[0], leaves, keep, strict=True)
        ]
        return unflatten(treespec, merged), MaskedState(state.mask, inner_state)

    def settle(before: MaskedState, state: MaskedState, settlement: Settlement) -> MaskedState:
        own = settlement.only(state.mask.selected)
        return MaskedState(state.mask, part.settle(before.inner_state, state.inner_state, own))

    def tells(leaves: Sequence[Any], state: MaskedState) -> list[bool]:
        keep = state.mask.selected
        told = part.tells(_only(leaves, keep), state.inner_state)
        return [own and yes for own, yes in zip(keep, told, strict=True)]

    def select_rows(rows: AllRows, state: MaskedState) -> AllRows:
        own = {i: x for i, x in rows.items() if state.mask.selected[i]}
        return {**rows, **_selected([part], [state.inner_state], own)}

    argument = Argument("predicate", predicate)
    stage = replace(part.stage, name="masked", arguments=(argument,))
    return Transformation(
        stage,
        init,
        update,
        stages=part.stages,
        parts=(part,),
        settle=settle,
        code=call("masked", (part,), repr(predicate)),
        select_rows=select_rows if part.select_rows else None,
        tells=tells,
    )


def as_one(inner: Any) -> Transformation:
    """A transformation, or the core of a fragment of several, as one part."""
    parts = flat((inner,))
    if len(parts) == 1:
        return parts[0]
    raise TypeError(
        f"masked takes one transformation, got a chain of {len(parts)}: mask each of them, or wrap "
        "the compressors in error_feedback(...)"
    )


def _only(leaves: Sequence[Any], selected: Sequence[bool]) -> list[Any]:
    return [leaf if keep else None for leaf, keep in zip(leaves, selected, strict=True)]


class ApplyIfFiniteState(NamedTuple):
    """The state of `apply_if_finite`.

    Attributes:
        last_finite: 0-d bool: the last step was taken.
        total_notfinite: 0-d int32: steps skipped so far.
        inner_states: the states of the parts.
    """

    last_finite: Array
    total_notfinite: Array
    inner_states: tuple[Any, ...]

    @property
    def finite(self) -> Array:
        """As `last_finite`: what an enclosing gate asks an exchange for."""
        return self.last_finite


def apply_if_finite(*inner: Transformation) -> Transformation:
    """Gates transformations: on a bad step the updates are zeros and no state but counters moves.

    A step is bad if a gradient, as it arrives, has an infinity or a NaN on any rank (on this rank,
    where there is no exchange among the parts), or the result has. The parts always run, so that
    no rank waits for another; old or new state is selected afterwards.

    This is what `unscale` puts around everything to its right. Unlike optax's function of the same
    name it may stand around an exchange: the ranks decide together, at no extra round trip.

    Args:
        *inner: the parts, applied from left to right, an exchange among them.

    Returns:
        The transformation.

    Example:
        >>> import torch, gradtx as gx
        >>> tx = gx.apply_if_finite(gx.error_feedback(gx.topk(0.5)), gx.allreduce())
        >>> state = tx.init({"w": torch.zeros(2)})
        >>> updates, state = tx.update({"w": torch.tensor([float("inf"), 1.0])}, state)
        >>> updates, int(state.total_notfinite)
        ({'w': tensor([0., 0.])}, 1)
    """
    parts = within("apply_if_finite", inner)
    for part in parts:
        if part.stage.kind is Kind.UNSCALE and part.stage.stateful:
            raise ValueError(
                f"apply_if_finite({part.code()}, ...): it waits for what the gate decides and has "
                f"to stand before it; write chain({part.code()}, ...)"
            )
    return gate(parts)


def gate(parts: tuple[Transformation, ...]) -> Gate:
    """As `apply_if_finite`, for parts that `chain` has resolved, whatever they are."""
    exchanges = [i for i, part in enumerate(parts) if part.stage.kind is Kind.EXCHANGE]

    def init(params: PyTree, info: Info | None) -> ApplyIfFiniteState:
        ops = backends.find(flatten(params)[0])
        inner_states = tuple(part.setup(params, info) for part in parts)
        return ApplyIfFiniteState(ops.flag(True), ops.counter(), inner_states)

    def update(
        updates: PyTree, state: ApplyIfFiniteState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, ApplyIfFiniteState]:
        leaves = flatten(updates)[0]
        ops = backends.find(arrays_in(leaves))
        context: Context | None = extra.get("context")
        if context is not None and exchanges and parts[0].stage.kind is not Kind.EXCHANGE:
            told = parts[0].tells(leaves, state.inner_states[0])
            leaves = [leaf for leaf, yes in zip(leaves, told, strict=True) if not yes]
        finite = ops.all_finite(arrays_in(leaves)) & finite_flag(extra, ops)
        if context is not None:
            finite = finite & context.progress.finite  # What an exchange to the left has heard.
            if context.progress.rows:
                finite = finite & all_finite(context.progress.rows)
        out, new = run(parts, updates, state.inner_states, params, {**extra, "finite": finite})
        if exchanges:
            agreed = functools.reduce(operator.and_, (new[i].finite for i in exchanges))
        else:
            agreed = finite & judge(out, extra.get("context"))
        old = state.inner_states
        kept = [new[i] if i in exchanges else old[i] for i in range(len(parts))]
        to_take = agreed
        if context is not None and context.progress.nothing is not False:
            nothing = context.progress.nothing
            to_take = ops.flag(False) if nothing is True else agreed & ~nothing
        out, states = _commit(to_take, (out, new), (out, tuple(kept)))
        if context is not None and context.progress.rows and not bool(to_take):
            context.progress.rows = _none_taken(context, arrays_in(out))
        skipped = state.total_notfinite + ops.cast(~agreed, "int32")
        return out, ApplyIfFiniteState(agreed, skipped, states)

    stage = Stage(
        "apply_if_finite",
        Kind.EXCHANGE if exchanges else Kind.TRANSFORM,
        stateful=True,
    )
    return Gate(
        stage,
        init,
        update,
        stages=tuple(s for part in parts for s in part.stages),
        parts=parts,
        code=call("apply_if_finite", parts),
    )


def _none_taken(context: Context, arrays: Sequence[Array]) -> AllRows:
    """No rows of the leaves that some rank has a gradient for: what zeros are to dense ones."""
    told, tables = context.progress, context.layout.tables
    absent = told.absent or (False,) * len(context.layout.leaves)
    device = device_of(told.rows, arrays)
    return {i: None if absent[i] else no_rows(tables[i], device) for i in told.rows}


def judge(updates: PyTree, context: Context | None) -> Array:
    """A 0-d bool: all values are finite, after the cast to the parameter's dtype too."""
    leaves = flatten(updates)[0]
    ops = backends.find(arrays_in(leaves))
    if context is not None:
        leaves = [
            ops.cast(leaf, spec.dtype) if spec.dtype and backends.is_array(leaf) else leaf
            for leaf, spec in zip(leaves, context.layout.leaves, strict=True)
            if leaf is not None
        ]
    floats = [x for x in arrays_in(leaves) if "float" in ops.dtype_name(x)]
    finite: Array = ops.all_finite(floats)
    if context is not None and context.progress.rows:
        finite = finite & all_finite(context.progress.rows, context.layout.tables)
    return finite


def _commit(agreed: Array, new: tuple[PyTree, Any], old: tuple[PyTree, Any]) -> tuple[PyTree, Any]:
    """New updates and states if the step is good, else zeros and the old states."""
    ops = backends.of(agreed)
    known = ops.known(agreed)
    if known:
        return new
    zeros = map_arrays(lambda leaf: backends.of(leaf).zeros_like(leaf), old[0])
    if known is None:
        chosen = map_arrays(lambda a, b: ops.where(agreed, a, b), new, (zeros, old[1]))
        return chosen[0], chosen[1]
    return zeros, old[1]
