"""A transformation: two pure functions and a stage."""

from __future__ import annotations

import hashlib
import inspect
from abc import ABC
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from gradtx import backends
from gradtx.core.foreign import name_of, settings_of
from gradtx.core.payload import Payload
from gradtx.core.row_sparse import AllRows, SelectRows
from gradtx.core.stage import Kind, Stage
from gradtx.core.tree import (
    Array,
    Info,
    Layout,
    PyTree,
    arranged_like,
    cast_like,
    checked,
    map_leaves,
    parameters_of,
    unboxed,
    widen,
)

InitFn = Callable[[PyTree, "Info | None"], Any]
UpdateFn = Callable[..., tuple[PyTree, Any]]
SettleFn = Callable[[Any, Any, "Settlement"], Any]
ConcludeFn = Callable[[Any, Array], Any]
TellsFn = Callable[[Sequence[Any], Any], Sequence[bool]]
EncodeFn = Callable[[Sequence[Any]], "list[Payload]"]


class EmptyState(NamedTuple):
    """The state of a transformation that has none."""


class KeepsLossScale(ABC):
    """A state with the loss scale of the next step, by declaration: ``KeepsLossScale.register``."""

    loss_scale: Array


class Progress:
    """How far a step has come; an exchange writes here.

    Attributes:
        divisor: what `unscale` has left to error feedback to divide gradients by; None for one.
        shown: values that are not all finite if what a part has read was not; see `tells`.
        sent: this rank has begun to talk to the others.
        finite: the gradients of all ranks were finite as they arrived, as far as known.
        absent: for each leaf, whether no rank has a gradient for it, as far as known.
        settled: by position, the payloads whose values are known only after the exchange.
        returned: by position, flat, what this rank is to send again: what it left out of the sums
            that it sent on for all ranks.
        factor: what the exchange has multiplied its results by; None for one.
        nothing: no rank had anything to bring, so that there is nothing to step with.
        left_out: a rank has left something bad out of what it brought.
        through: all ranks have said that they bring no more.
        weight: what the parts of all ranks weigh together, where they are unequal.
        rows: the row-sparse leaves by position, as far as they have come; None for those that are
            not there.
        meetings: by what they are of, exchanges before the one between nodes; see
            `gradtx.exchange.inner`.
    """

    def __init__(self) -> None:
        self.divisor: float | None = None
        self.shown: list[Array] = []
        self.sent = False
        self.finite: Any = True
        self.absent: tuple[bool, ...] = ()
        self.settled: dict[int, Payload] = {}
        self.returned: dict[int, Array] = {}
        self.factor: Any = None
        self.nothing: Any = False
        self.left_out: Any = False
        self.through = True
        self.weight: Any = None
        self.rows: AllRows = {}
        self.meetings: dict[int, Any] = {}


@dataclass(frozen=True)
class Share:
    """What a rank brings to an exchange that ends a window of several steps.

    Attributes:
        weight: what its part of the mean weighs: a number, or 0-d.
        mean: whether the result is the mean by weight, rather than by rank.
        left_out: whether it has left something bad out: a bool, or 0-d.
        flushing: whether it brings no more until all ranks are through.
        partial: whether others are still to be heard, in an exchange to come, before it is known
            what all have brought.
    """

    weight: Any
    mean: bool
    left_out: Any
    flushing: bool
    partial: bool = False


@dataclass(frozen=True)
class Context:
    """What a chain tells its parts about the step, as the extra argument ``context``.

    Attributes:
        layout: paths, shapes and dtypes of the parameters.
        code: the chain as code, without what differs between ranks.
        absent: for each leaf, in the order of the layout, whether this rank has no gradient for it
            (zeros stand in); empty if all are there.
        rank: this rank's number in the exchange; under JAX it may be traced.
        size: how many ranks the exchange has.
        alone: there is no exchange to come.
        scheduled: the values of hyperparameters whose step is not known yet.
        windowed: whether ranks may bring unequal shares to the exchange.
        share: what this rank brings, where that is so and the exchange is to come.
        over: the gradients, where results may be written over them; empty where not.
        joins: whether what error feedback sends arrives at the exchange as it is, so that several
            leaves may be one payload.
        defers: whether error feedback, which comes next, is to divide by the loss scale.
        pool: where the buffers of residuals come from, if the state has an owner that looks after
            them; None for new ones.
        progress: how far the step has come.
    """

    layout: Layout
    code: str
    absent: tuple[bool, ...] = ()
    rank: Any = 0
    size: int = 1
    alone: bool = False
    scheduled: Mapping[Any, float] = field(default_factory=dict, compare=False)
    windowed: bool = False
    share: Share | None = field(default=None, compare=False)
    over: Sequence[Any] = field(default=(), compare=False)
    joins: bool = False
    defers: bool = False
    pool: Any = field(default=None, compare=False)
    progress: Progress = field(default_factory=Progress, compare=False)

    @property
    def weight(self) -> Any:
        """What this rank's gradients are multiplied by, where they are summed; None for one."""
        return self.share.weight if self.share is not None and self.share.mean else None


@dataclass(frozen=True)
class Settlement:
    """What the exchange tells of what was sent, once it has been.

    Attributes:
        payloads: by position of the leaf, those whose values are known only now.
        returned: by position, flat, what this rank is to send again.
        weight: what this rank's gradients were multiplied by: 0-d; None for one.
        factor: what the results were multiplied by: 0-d; None for one.
        absent: for each leaf, whether this rank had no gradient for it; empty if all were there.
    """

    payloads: Mapping[int, Payload] = field(default_factory=dict)
    returned: Mapping[int, Array] = field(default_factory=dict)
    weight: Any = None
    factor: Any = None
    absent: tuple[bool, ...] = ()

    @classmethod
    def of(cls, context: Context) -> Settlement:
        """What the exchange has told in a step."""
        told = context.progress
        weight = None if told.factor is None else context.weight
        return cls(told.settled, told.returned, weight, told.factor, context.absent)

    def __bool__(self) -> bool:
        """Whether there is anything to settle."""
        return bool(self.payloads or self.returned) or self.factor is not None

    def only(self, selected: Sequence[bool]) -> Settlement:
        """The part of it that speaks of some leaves."""
        return replace(
            self,
            payloads={i: payload for i, payload in self.payloads.items() if selected[i]},
            returned={i: values for i, values in self.returned.items() if selected[i]},
        )


class Transformation:
    """A pair of pure functions, `init` and `update`, and the `stage` that declares them.

    Transformations compare, hash and print by their stage.

    Args:
        stage: the declaration.
        init: ``init(params, info) -> state``; `info` is a mapping from path to `LeafInfo`, or None.
        update: ``update(updates, state, params=None, **extra) -> (updates, state)``. It may hand on
            16-bit leaves as FP32: the cast back to the leaf's dtype is made once, at the end.
        stages: the stages as the order checker sees them, if there are several.
        parts: of a combinator, the transformations inside.
        settle: ``settle(before, state, settlement) -> state``, called after the exchange if it
            tells more than the step knew; `before` is the state before the step.
        conclude: ``conclude(state, taken) -> state``, called once the gate to the right has
            decided, with the 0-d bool of all ranks that says whether the step is taken.
        code: ``code(local) -> str``, the expression that makes it; by default the stage's call.
        encoders: of a compressor that keeps no state and treats each leaf alone, all that `update`
            does: functions ``encode(leaves) -> payloads``, one after the other.
        encode_joined: ``encode_joined(flat, sizes) -> payload``: the same for many leaves, one
            after the other, as one payload.
        shows: of a compressor with encoders: an infinity or a NaN of a leaf is among the values of
            the payload that the first of them makes.
        select_rows: ``select_rows(rows, state) -> rows``: of a compressor that chooses among the
            rows of row-sparse leaves.
        divides: of what stands first in a gate: whether it divides by `Progress.divisor`.
        tells: ``tells(leaves, state) -> bools``: of which leaves `update` adds such values to
            `Progress.shown`, so that the leaves need not be judged.
    """

    _needs_chain = False

    def __init__(
        self,
        stage: Stage,
        init: InitFn | None,
        update: UpdateFn,
        *,
        stages: tuple[Stage, ...] | None = None,
        parts: tuple[Transformation, ...] = (),
        settle: SettleFn | None = None,
        conclude: ConcludeFn | None = None,
        code: Callable[[bool], str] | None = None,
        encoders: tuple[EncodeFn, ...] = (),
        encode_joined: Callable[..., Payload] | None = None,
        shows: bool = False,
        select_rows: SelectRows | None = None,
        divides: bool = False,
        tells: TellsFn | None = None,
    ) -> None:
        self.stage = stage
        self.encoders = encoders
        self.encode_joined: Any = encode_joined
        self.shows, self.divides = shows, divides
        self.select_rows = select_rows
        self.tells: TellsFn = tells or (lambda leaves, state: [False] * len(leaves))
        self.stages = (stage,) if stages is None else stages
        self.parts = parts
        self.settle: SettleFn = settle or (lambda before, state, settlement: state)
        self.conclude: ConcludeFn = conclude or (lambda state, taken: state)
        self._needs_chain |= stage.kind is Kind.EXCHANGE or conclude is not None
        self.setup: InitFn = init or (lambda params, info: EmptyState())
        self.step: UpdateFn = update
        self._code = code or (lambda local: stage.code(local=local))

    @property
    def name(self) -> str:
        """The stage's name."""
        return self.stage.name

    @property
    def hyperparameters(self) -> Mapping[str, Any]:
        """The stage's hyperparameters by name."""
        return self.stage.hyperparameters

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits: equal for equal transformations, on all ranks, in every run."""
        return hashlib.sha256(self.code(local=False).encode()).hexdigest()[:16]

    def code(self, *, local: bool = True) -> str:
        """The expression that makes this transformation."""
        return self._code(local)

    def init(self, params: PyTree, info: Info | None = None) -> Any:
        """The state before the first step.

        Args:
            params: a pytree of floating-point torch tensors or JAX arrays, or an `nn.Module`.
            info: what is known of the leaves, by path; from the module, where there is one.

        Returns:
            A pytree of arrays.
        """
        if self._needs_chain:
            return self._alone.init(params, info)
        params, info = parameters_of(params, info)
        with backends.within(params):
            return self.setup(params, info)

    def update(
        self, updates: PyTree, state: Any, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        """One step.

        Args:
            updates: the gradients, in the structure of the parameters; None where there is none.
            state: the state that `init` or the step before gave; it is not changed.
            params: the parameters, for transformations that need them.
            extra: further arguments by name, such as `loss_scale`.

        Returns:
            The new updates, in the structure, shapes and dtypes of `updates`, and the new state.
        """
        if self._needs_chain:
            return self._alone.update(updates, state, params, **extra)
        with backends.within(updates, state):
            out, state = self.step(self._checked(updates), state, unboxed(params), **extra)
        return self._like(out, updates), state

    def _like(self, out: PyTree, updates: PyTree) -> PyTree:
        """What comes out in the structure and dtypes of what went in."""
        return cast_like(arranged_like(out, updates), updates)

    def _checked(self, updates: PyTree) -> PyTree:
        return checked(updates)

    @cached_property
    def _alone(self) -> Transformation:
        # Whatever talks to other ranks needs what a chain does: leaves matched by path, stand-ins
        # for absent ones, and the word to the others when this rank fails. Whatever waits for a
        # gate's decision needs a gate.
        from gradtx.core.chain import Chain

        return Chain((self,))

    def __repr__(self) -> str:
        return self.code()

    def _key(self) -> Any:
        return self.stage, self.stages, self.code()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Transformation) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self.code())


class Exchange(Transformation):
    """A transformation at which ranks talk.

    Its state has `finite`, the gate's flag as all ranks agree on it.

    Attributes:
        one_program: whether the ranks are devices that run one program together.
    """

    one_program: bool = False

    @property
    def group(self) -> Any:
        """The ranks it talks to over torch.distributed."""
        raise NotImplementedError

    def over(self, group: Any) -> Exchange:
        """The same exchange among the same ranks, over another group."""
        raise NotImplementedError

    def before_another(self) -> Transformation:
        """What it is where another exchange stands to its right: it takes hold of all of that."""
        raise NotImplementedError

    def check_local(self, leaves: Mapping[str, Array]) -> None:
        """Refuses gradients, by path, that are known not to be those of one rank alone."""

    def describe(self, leaves: Sequence[Any], context: Context) -> list[str]:
        """What may be said of the ways that leaves may take on so many ranks, as lines of text.

        Args:
            leaves: as they arrive, in the order of the layout.
            context: of a step.
        """
        return []

    def ranks(self, arrays: Sequence[Array]) -> tuple[Any, int]:
        """This rank's number, and how many ranks there are, for the arrays of a step."""
        raise NotImplementedError

    def fail(
        self, state: Any, context: Context, error: Exception, arriving: PyTree | None = None
    ) -> None:
        """Tells the other ranks, in the message they wait for, that this one has failed.

        Args:
            state: the exchange's.
            context: of the step.
            error: what went wrong.
            arriving: a tree like the one that would have arrived, of the same sizes; None if it is
                not known: the sizes are then taken to be those of the step before.
        """
        raise NotImplementedError


def flat(transformations: Iterable[Any]) -> tuple[Transformation, ...]:
    """The transformations with nested chains flattened and foreign ones declared by default.

    Raises:
        TypeError: if one has no `init` and `update`.
    """
    out: list[Transformation] = []
    for obj in transformations:
        part = obj if isinstance(obj, Transformation) else declare(obj)
        out.extend(getattr(part, "transformations", (part,)))
    return tuple(out)


def declare(
    obj: Any,
    *,
    name: str | None = None,
    linear: bool = False,
    stateful: bool = True,
    needs_reduced: bool = True,
) -> Transformation:
    """Says what a foreign transformation (an optax one, say) needs, so that `chain` can place it.

    It sees parameters and gradients in FP32 (FP64 for FP64 leaves), in `init` too: so its state is
    in FP32 from the start, and no hyperparameter is rounded to 16 bits, where 0.999 is 1. All extra
    arguments of `update` are passed on to it, if it takes any; those that a chain adds for its own
    parts are not.

    Args:
        obj: anything with `init(params)` and `update(updates, state, params=None)`.
        name: what to print; by default the name of the function that made it. The numbers, strings
            and small arrays that it was made with are printed too, and ranks compare them; those of
            all its parts, if it is an `optax.chain`. Constants in the code of a function, such as
            that of ``lambda step: 1e-3``, are not seen: ranks that differ there do not notice.
        linear: it commutes with scaling and with the sum over ranks.
        stateful: what it does depends on earlier steps.
        needs_reduced: it wants the gradient of all ranks.

    Returns:
        The transformation, with a stage.

    Raises:
        TypeError: if `obj` has no `init` and `update`.

    Example:
        >>> import gradtx as gx, optax
        >>> clip = gx.declare(optax.clip(1.0), name="clip", stateful=False, needs_reduced=False)
        >>> gx.chain(gx.unscale(), clip, gx.allreduce())
        gx.chain(gx.unscale(), clip(max_delta=1.0), gx.allreduce())
    """
    init, update = getattr(obj, "init", None), getattr(obj, "update", None)
    if not callable(init) or not callable(update):
        raise TypeError(
            f"{obj!r} is no transformation: it needs init(params) and "
            "update(updates, state, params=None); did you forget to call a factory?"
        )
    stage = Stage(
        name or name_of(update),
        Kind.TRANSFORM,
        settings_of(update),
        identity=obj,
        linear=linear,
        stateful=stateful,
        needs_reduced=needs_reduced,
        whole=True,
        module="",
    )
    passed_on = extra_for(update)

    def setup(params: PyTree, info: Info | None) -> Any:
        return init(map_leaves(widen, params))

    def step(
        updates: PyTree, state: Any, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        updates = map_leaves(widen, updates)
        params = None if params is None else map_leaves(widen, params)
        out, state = update(updates, state, params, **passed_on(extra))
        # It may hand on another container, or the same one in another order.
        return arranged_like(out, updates), state

    return Transformation(stage, setup, step)


def extra_for(function: Callable[..., Any]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """What picks the extra arguments for a function that is not ours.

    Those are all that the caller has given, none of what a chain tells its parts; and none at all
    if the function does not take keyword arguments that it does not name.
    """
    takes_extra = takes_any_keyword(function)

    def pick(extra: Mapping[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in extra.items() if takes_extra and k not in ("context", "finite")}

    return pick


def takes_any_keyword(function: Callable[..., Any]) -> bool:
    """Whether a function takes keyword arguments that it does not name."""
    parameters = inspect.signature(function).parameters.values()
    return any(p.kind is p.VAR_KEYWORD for p in parameters)


def finite_flag(extra: Mapping[str, Any], ops: Any) -> Array:
    """The flag ``finite`` among the extra arguments; true where no gate has set one."""
    finite = extra.get("finite")
    return ops.flag(True) if finite is None else finite
