"""Runs of a chain on in-process ranks: what goes in, what comes out, what the chain is made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch

from gradtx.core.chain import Chain
from gradtx.core.combinators import Delaying, Enclosing, Filter, Gate
from gradtx.core.stage import Kind, Stage
from gradtx.core.transformation import Transformation, flat
from gradtx.core.tree import (
    PyTree,
    flatten,
    flatten_with_paths,
    map_arrays,
    map_leaves,
    unflatten,
    widen,
)
from gradtx.exchange.group import find_group
from gradtx.testing.ranks import run_ranks
from gradtx.transforms.unscale import unscale

# Powers of two of at least one: no 16-bit gradient below becomes infinite or loses bits by them.
SCALES = (1024.0, 1.0, 8.0, 2048.0, 2.0)
LARGE = 20_000


class Options(TypedDict, total=False):
    """What every law can be told.

    Attributes:
        ranks: the world sizes to check, by default 1, 2 and 3; a fragment is checked on one rank.
        steps: how many steps to take, by default 4.
        seed: what the gradients are drawn from.
        params: a pytree of floating-point CPU tensors; by default `default_params`.
        backend: ``"torch"`` or ``"jax"``; by default what the chain exchanges.
    """

    ranks: Sequence[int]
    steps: int
    seed: int
    params: PyTree
    backend: str | None


@dataclass(frozen=True)
class Step:
    """What goes into one step.

    Attributes:
        gradients: for each rank, its gradients, multiplied by the loss scale.
        loss_scale: what they are multiplied by.
    """

    gradients: tuple[PyTree, ...]
    loss_scale: float = 1.0


@dataclass(frozen=True)
class Trace:
    """What one rank saw.

    Attributes:
        outputs: after each step, its updates, payloads among them.
        states: before the first step and after each.
        sent: in each step, the bytes it put on the link; in the first the handshake too.

    A step of a chain that accumulates is a whole window, and the updates of one that delays are
    those of the step that they are the result of.
    """

    outputs: list[PyTree]
    states: list[Any]
    sent: list[int]


@dataclass(frozen=True)
class Call:
    """Two calls of `update` with the same arguments, as one rank sees them.

    Attributes:
        before: gradients, state and parameters.
        after: the same, after the first call.
        first: what the first call gave.
        still_first: the same, after the second call.
        second: what the second call gave.
    """

    before: Any
    after: Any
    first: Any
    still_first: Any
    second: Any


@dataclass(frozen=True)
class Measured:
    """What a step after the first looks like.

    Attributes:
        outputs: the updates of the first rank; of their arrays only shape and dtype count.
        sent: the most bytes that a rank puts on the link.
    """

    outputs: PyTree
    sent: int


def trace(
    tx: Chain, params: PyTree, steps: Sequence[Step], size: int, backend: str = "torch"
) -> list[Trace]:
    """Runs a chain on `size` ranks, threads or rows of one program; the traces in rank order."""
    if backend == "jax":
        found: list[Trace] = _one_program().trace(tx, params, steps, size)
        return found

    delay = delay_of(tx)

    def rank(i: int) -> Trace:
        group = find_group()
        out = Trace([], [tx.init(params)], [])
        for number, step in enumerate(steps):
            before, state = group.sent, out.states[-1]
            for micro, weight in micro_steps(tx, step, number):
                gradients, extra = arguments(micro, i, state)
                updates, state = tx.update(gradients, state, params, **extra, **weight)
            out.outputs.append(updates)
            out.states.append(state)
            out.sent.append(group.sent - before)
        for _ in range(delay):
            updates, state = tx.flush(state, params)
            out.outputs.append(updates)
        return Trace(out.outputs[delay:], out.states, out.sent)

    return run_ranks(size, rank)


def window_of(tx: Chain) -> Stage | None:
    """The stage that accumulates, if there is one."""
    return next((stage for stage in tx.stages if stage.kind is Kind.ACCUMULATE), None)


def delay_of(tx: Chain) -> int:
    """By how many steps the results of a chain are delayed."""
    return sum(s.hyperparameters["steps"] for s in tx.stages if s.kind is Kind.DELAY)


def micro_steps(tx: Chain, step: Step, number: int) -> list[tuple[Step, dict[str, float]]]:
    """What a window is given so that its result is that of a step; the step, if there is none.

    In every other step all of it is in one micro-step, and the others weigh nothing; otherwise all
    micro-steps are the same. Of a sum, the others are zero.
    """
    window = window_of(tx)
    if window is None:
        return [(step, {})]
    n, mean = window.hyperparameters["n"], window.hyperparameters["mean"]
    if mean and number % 2 == 0:
        return [(step, {"weight": 1.0})] * n

    def other(tree: PyTree) -> PyTree:
        return map_leaves(lambda x: x * (-0.5 if mean else 0.0), tree)

    idle = Step(tuple(map(other, step.gradients)), step.loss_scale)
    return [
        (step if i == number % n else idle, {"weight": float(i == number % n)} if mean else {})
        for i in range(n)
    ]


def arguments(step: Step, rank: int, state: Any) -> tuple[PyTree, dict[str, Any]]:
    """The gradients of a rank, and the extra arguments, as the chain with this state wants them.

    One with a loss scale of its own is given gradients that are multiplied by that one.
    """
    own = getattr(state, "loss_scale", None)
    if own is None:
        return step.gradients[rank], {"loss_scale": step.loss_scale}
    factor = float(own) / step.loss_scale
    return map_leaves(lambda leaf: leaf * factor, step.gradients[rank]), {}


def windows(
    tx: Chain,
    params: PyTree,
    micro: Sequence[Step],
    weights: Sequence[Sequence[float]],
    weighed: bool,
    size: int,
) -> list[list[PyTree]]:
    """What a chain that accumulates gives at the end of each window, by rank.

    Args:
        tx: the chain.
        params: the parameters.
        micro: the micro-steps of all windows.
        weights: for each rank, those of a window.
        weighed: whether to tell them.
        size: how many ranks.
    """
    n = len(weights[0])

    def rank(i: int) -> list[PyTree]:
        state, out = tx.init(params), []
        for number, step in enumerate(micro):
            gradients, extra = arguments(step, i, state)
            if weighed:
                extra["weight"] = weights[i][number % n]
            updates, state = tx.update(gradients, state, params, **extra)
            if number % n == n - 1:
                out.append(updates)
        return out

    return run_ranks(size, rank)


def sent_within(tx: Chain, params: PyTree, micro: Sequence[Step], size: int) -> list[list[int]]:
    """For each rank, the bytes that it sends in the micro-steps that end no window."""
    window = window_of(tx)
    n = 1 if window is None else window.hyperparameters["n"]

    def rank(i: int) -> list[int]:
        group, state, sent = find_group(), tx.init(params), []
        for number, step in enumerate(micro):
            before = group.sent
            gradients, extra = arguments(step, i, state)
            _, state = tx.update(gradients, state, params, **extra)
            if number % n != n - 1:
                sent.append(group.sent - before)
        return sent

    return run_ranks(size, rank)


def calls(
    tx: Chain, params: PyTree, steps: Sequence[Step], size: int, backend: str = "torch"
) -> list[list[Call]]:
    """Runs a chain as `trace` does, but calls `update` twice in each step."""
    if backend == "jax":
        found: list[list[Call]] = _one_program().calls(tx, params, steps, size)
        return found

    def rank(i: int) -> list[Call]:
        out, state = [], tx.init(params)
        for step in steps:
            gradients, extra = arguments(step, i, state)
            given = (gradients, state, params)
            before = copied(given)
            first = tx.update(*given, **extra)
            kept = copied(first)
            second = tx.update(*given, **extra)
            out.append(Call(before, copied(given), kept, first, second))
            state = first[1]
        return out

    return run_ranks(size, rank)


def measure(tx: Chain, params: PyTree, step: Step, size: int, backend: str = "torch") -> Measured:
    """What a chain gives and sends; without the handshake of the first step."""
    if backend == "jax":
        found: Measured = _one_program().measure(tx, params, step, size)
        return found
    traces = trace(tx, params, [step, step], size)
    return Measured(traces[0].outputs[1], max(one.sent[1] for one in traces))


def _one_program() -> Any:
    try:
        from gradtx.testing import one_program
    except ImportError as error:
        raise ImportError(
            "the laws need jax for a chain on JAX arrays: pip install 'gradtx[jax]'"
        ) from error
    return one_program


def copied(tree: Any) -> Any:
    """The tree, with copies of its tensors."""
    return map_arrays(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, tree)


def default_params() -> dict[str, Any]:
    """Parameters of several shapes and dtypes, with a normalisation layer and an empty leaf."""
    return {
        "bn": {"bias": torch.zeros(3), "weight": torch.zeros(3)},
        "double": torch.zeros(4, dtype=torch.float64),
        "empty": torch.zeros(0, 2),
        "half": torch.zeros(7, dtype=torch.float16),
        "scalar": torch.zeros(()),
        "weight": torch.zeros(6, 5),
    }


class Case:
    """A chain taken apart, and the circumstances it is checked in.

    Attributes:
        tx: the chain; a transformation that is none, as a chain of one.
        parts: its transformations; those within a gate stand for the gate.
        stages: their stages.
        exchange: the position of the first exchange among the parts, or None for a fragment.
        lossy: whether a stage loses information.
        unscales: whether there is an `unscale`.
        gated: whether bad steps are to be skipped.
        sizes: the world sizes to check.
        params: the parameters.
        wide: the parameters in FP32 (FP64 for FP64 leaves).
        steps: how many steps to take.
        backend: ``"torch"`` or ``"jax"``.
    """

    def __init__(
        self,
        tx: Transformation,
        *,
        ranks: Sequence[int] = (1, 2, 3),
        steps: int = 4,
        seed: int = 0,
        params: PyTree = None,
        backend: str | None = None,
    ) -> None:
        self.tx = tx if isinstance(tx, Chain) else Chain(flat((tx,)))
        if self.tx.inners:
            raise ValueError(
                f"{self.tx!r} exchanges in two stages, and the laws are checked of one: leave "
                f"{', '.join(inner.exchange.code() for inner in self.tx.inners)} out, the ranks "
                "are then the nodes"
            )
        self.steps, self._seed = steps, seed
        self.parts = tuple(_opened(flat(self.tx.transformations)))
        self.stages = tuple(stage for part in self.parts for stage in part.stages)
        exchanges = [i for i, p in enumerate(self.parts) if p.stage.kind is Kind.EXCHANGE]
        self.exchange = exchanges[0] if exchanges else None
        self.lossy = any(stage.lossy for stage in self.stages)
        self.unscales = self.has(Kind.UNSCALE)
        self.windowed = self.has(Kind.ACCUMULATE)
        self.holds_back = self.windowed or delay_of(self.tx) > 0
        self.gated = self.unscales or any(s.lossy or s.stateful for s in self.stages)
        self.sizes = [1] if self.exchange is None else list(ranks)
        window = window_of(self.tx)
        # A power of two divides without rounding.
        n = 1 if window is None else window.hyperparameters["n"]
        self.exact = n & (n - 1) == 0
        self.backend = self._checked(backend)
        self.params = self._default_params() if params is None else params
        if self.backend == "jax":
            _one_program().check_params(self.params)
        self.wide = map_leaves(widen, self.params)

    def _checked(self, backend: str | None) -> str:
        """The backend, which must suit the exchange."""
        over_mesh = self.setting("axis_name", None) - {None}
        if backend is None:
            backend = "jax" if over_mesh else "torch"
        if backend not in ("torch", "jax"):
            raise ValueError(f"backend={backend!r}: expected 'torch' or 'jax'")
        if backend == "torch" and over_mesh:
            raise ValueError(
                f"backend='torch': {self.tx!r} exchanges JAX arrays; for torch tensors write "
                "allreduce()"
            )
        if backend == "jax" and not over_mesh and max(self.sizes, default=1) > 1:
            raise ValueError(
                f"backend='jax': {self.tx!r} exchanges torch tensors on several ranks; for JAX "
                "arrays write allreduce(axis_name=...)"
            )
        return backend

    def _default_params(self) -> PyTree:
        params = default_params()
        if self.backend == "jax" and not _one_program().has_float64():
            del params["double"]
        return params

    def trace(self, tx: Chain, params: PyTree, steps: Sequence[Step], size: int) -> list[Trace]:
        """See the function `trace`."""
        return trace(tx, params, steps, size, self.backend)

    def calls(self, steps: Sequence[Step], size: int) -> list[list[Call]]:
        """See the function `calls`."""
        return calls(self.tx, self.params, steps, size, self.backend)

    def measure(self, tx: Chain, params: PyTree, size: int) -> Measured:
        """See the function `measure`."""
        return measure(tx, params, self.draw(size, params)[0], size, self.backend)

    def has(self, kind: Kind) -> bool:
        """Whether a stage is of a kind."""
        return any(stage.kind is kind for stage in self.stages)

    def setting(self, name: str, default: Any) -> set[Any]:
        """The values of a hyperparameter of the exchanges."""
        exchanges = [stage for stage in self.stages if stage.kind is Kind.EXCHANGE]
        return {stage.hyperparameters.get(name, default) for stage in exchanges}

    @property
    def plain(self) -> Chain:
        """The chain with an `unscale` in the place of a `dynamic_loss_scale`."""
        dynamic = [p.stage.kind is Kind.UNSCALE and p.stage.stateful for p in self.parts]
        if not any(dynamic):
            return self.tx
        pairs = zip(self.parts, dynamic, strict=True)
        return Chain([unscale() if own else part for part, own in pairs])

    def scaleless(self, state: Any) -> tuple[Any, ...]:
        """The state without that of a `dynamic_loss_scale`, and without delayed results."""
        return tuple(_scaleless(self.tx.core, state.states))

    @property
    def local(self) -> Chain:
        """What stands before the exchange, and its delay."""
        parts = self.parts[: self.exchange]
        return Chain([part for part in parts if not isinstance(part, Delaying)])

    @property
    def dense(self) -> Chain:
        """The exchange alone; the identity for a fragment."""
        return Chain(() if self.exchange is None else (self.parts[self.exchange],))

    def draw(self, size: int, params: PyTree = None, *, count: int | None = None) -> list[Step]:
        """True gradients of some ranks; in every other step the last of them lacks a leaf.

        On JAX all of them lack it. There are as many steps as the case has, if not told otherwise.
        """
        like = self.params if params is None else params
        generator = torch.Generator().manual_seed(self._seed)

        def draw(number: int, rank: int) -> PyTree:
            lacks = number % 2 == 1 and (self.backend == "jax" or rank == size - 1)
            return _draw(like, generator, number, lacks)

        return [
            Step(tuple(draw(number, rank) for rank in range(size)))
            for number in range(self.steps if count is None else count)
        ]

    @property
    def subject(self) -> Chain:
        """What L0, L2 and L3 speak of: all of it, if it has stages of known meaning only.

        Otherwise what is from the first compressor (or the exchange) up to the exchange.
        """
        if not self.has(Kind.TRANSFORM):
            return Chain(self.parts)
        entry = len(self._entry)
        filters = [part for part in self.parts[:entry] if isinstance(part, Filter)]
        end = len(self.parts) if self.exchange is None else self.exchange + 1
        return Chain((*filters, *self.parts[entry:end]))

    def entering(self, steps: list[Step]) -> tuple[list[Step], list[Step]]:
        """What the subject is given, and the gradients that this means, both in FP32 or FP64.

        A chain gives its results in the dtypes of what it is given: so these are not rounded.
        """
        true = [Step(tuple(map_leaves(widen, tree) for tree in s.gradients)) for s in steps]
        given = scaled(true) if self.unscales else true
        if not self.has(Kind.TRANSFORM):
            return given, true
        others = (Filter, Delaying)
        entry = Chain([part for part in self._entry if not isinstance(part, others)])
        ranks = [
            self.trace(entry, self.wide, [Step((s.gradients[i],), s.loss_scale) for s in given], 1)[
                0
            ]
            for i in range(len(given[0].gradients))
        ]
        entered = [
            Step(tuple(rank.outputs[number] for rank in ranks), step.loss_scale)
            for number, step in enumerate(given)
        ]
        return entered, entered

    @property
    def _entry(self) -> tuple[Transformation, ...]:
        for i, part in enumerate(self.parts):
            if part.stage.kind is Kind.EXCHANGE or any(stage.lossy for stage in part.stages):
                return self.parts[:i]
        return self.parts

    def protected(self) -> list[bool]:
        """For each leaf, whether the chain says that no compressor is to see it."""
        paths, leaves, _ = flatten_with_paths(self.params)
        filters = [part.predicate for part in self.parts if isinstance(part, Filter)]
        lossy = [part for part in self.parts if any(stage.lossy for stage in part.stages)]
        masks = [part.hyperparameters["predicate"] for part in lossy if part.name == "masked"]
        all_masked = len(masks) == len(lossy) > 0

        def spared(path: str, leaf: Any) -> bool:
            if any(not keep(path, leaf, None) for keep in filters):
                return True
            return all_masked and not any(keep(path, leaf, None) for keep in masks)

        return [
            leaf is not None and spared(path, leaf)
            for path, leaf in zip(paths, leaves, strict=True)
        ]


def _scaleless(parts: Sequence[Transformation], states: Sequence[Any]) -> Iterator[Any]:
    for part, state in zip(parts, states, strict=True):
        if isinstance(part, Delaying):
            yield from _scaleless(part.parts, state.inner_states)
        elif part.stage.kind is not Kind.UNSCALE:
            yield state


def _opened(parts: Sequence[Transformation]) -> Iterator[Transformation]:
    for part in parts:
        if isinstance(part, Gate) and not isinstance(part, Enclosing):
            yield from _opened(part.parts)
        else:
            yield part


def _draw(params: PyTree, generator: torch.Generator, number: int, lacks: bool) -> PyTree:
    leaves, treespec = flatten(params)
    lacking = number // 2 % len(leaves) if leaves and lacks else None
    drawn = [
        None if leaf is None or i == lacking else _draw_leaf(leaf, generator, (number + i) % 4)
        for i, leaf in enumerate(leaves)
    ]
    return unflatten(treespec, drawn)


def _draw_leaf(like: torch.Tensor, generator: torch.Generator, kind: int) -> torch.Tensor:
    values = 2 * torch.rand(like.shape, generator=generator) - 1
    if kind == 1:
        values = values * 2.0 ** torch.randint(-8, 4, like.shape, generator=generator)
    elif kind == 2:
        values = torch.where(values < 0, -0.5, 0.5)
    elif kind == 3:
        values = torch.where(values.abs() < 0.7, 0.0, values)
    return values.to(like.device, like.dtype)


def scaled(steps: Sequence[Step]) -> list[Step]:
    """The same steps, multiplied by loss scales that change from step to step."""
    out = []
    for number, step in enumerate(steps):
        scale = SCALES[number % len(SCALES)]
        trees = [map_leaves(lambda leaf, s=scale: leaf * s, tree) for tree in step.gradients]
        out.append(Step(tuple(trees), scale))
    return out


def bad_steps(good: Step, params: PyTree) -> list[Step]:
    """For each leaf with values, a good step but for one infinity or NaN, on each rank in turn."""
    likes, treespec = flatten(params)
    rows = [list(flatten(tree)[0]) for tree in good.gradients]
    out: list[Step] = []
    for i, like in enumerate(likes):
        if like is None or not like.numel():
            continue
        spoilt, rank = [list(row) for row in rows], len(out) % len(rows)
        nowhere = all(row[i] is None for row in rows)
        for own, row in enumerate(spoilt):
            if row[i] is None and (nowhere or own == rank):
                row[i] = torch.zeros_like(like)
        leaf = spoilt[rank][i].clone()
        leaf[(-1,) * leaf.ndim] = (torch.inf, torch.nan, -torch.inf)[len(out) % 3]
        spoilt[rank][i] = leaf
        out.append(Step(tuple(unflatten(treespec, row) for row in spoilt), good.loss_scale))
    return out


def overflowing_steps(params: PyTree, size: int) -> list[Step]:
    """For each leaf with values, a step in which all ranks have nearly the largest number."""
    likes, treespec = flatten(params)
    out = []
    for i, like in enumerate(likes):
        if like is not None and like.numel():
            leaves = [None if leaf is None else torch.zeros_like(leaf) for leaf in likes]
            leaves[i] = torch.full_like(like, 0.75 * torch.finfo(like.dtype).max)
            out.append(Step((unflatten(treespec, leaves),) * size))
    return out


def enlarged(params: PyTree) -> PyTree:
    """Leaves of as many dimensions, but with 20,000 values; 0-d ones as they are."""

    def enlarge(leaf: torch.Tensor) -> torch.Tensor:
        if not leaf.ndim:
            return leaf
        rest = [max(length, 1) for length in leaf.shape[1:]]
        length = -(-LARGE // torch.Size(rest).numel())
        return torch.zeros((length, *rest), dtype=leaf.dtype, device=leaf.device)

    return map_leaves(enlarge, params)
