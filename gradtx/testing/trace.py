"""Runs of a chain on in-process ranks: what goes in, what comes out, what the chain is made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch

from gradtx.core.chain import Chain
from gradtx.core.combinators import Filter, Gate
from gradtx.core.stage import Kind
from gradtx.core.transformation import Transformation, flat
from gradtx.core.tree import PyTree, flatten, flatten_with_paths, map_leaves, unflatten, widen
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
    """

    ranks: Sequence[int]
    steps: int
    seed: int
    params: PyTree


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
    """

    outputs: list[PyTree]
    states: list[Any]
    sent: list[int]


def trace(tx: Transformation, params: PyTree, steps: Sequence[Step], size: int) -> list[Trace]:
    """Runs a transformation on `size` in-process ranks; the traces are in rank order."""

    def rank(i: int) -> Trace:
        group = find_group()
        out = Trace([], [tx.init(params)], [])
        for step in steps:
            before = group.sent
            gradients, extra = arguments(step, i, out.states[-1])
            updates, state = tx.update(gradients, out.states[-1], params, **extra)
            out.outputs.append(updates)
            out.states.append(state)
            out.sent.append(group.sent - before)
        return out

    return run_ranks(size, rank)


def arguments(step: Step, rank: int, state: Any) -> tuple[PyTree, dict[str, Any]]:
    """The gradients of a rank, and the extra arguments, as the chain with this state wants them.

    One with a loss scale of its own is given gradients that are multiplied by that one.
    """
    own = getattr(state, "loss_scale", None)
    if own is None:
        return step.gradients[rank], {"loss_scale": step.loss_scale}
    factor = float(own) / step.loss_scale
    return map_leaves(lambda leaf: leaf * factor, step.gradients[rank]), {}


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
    """

    def __init__(
        self,
        tx: Transformation,
        *,
        ranks: Sequence[int] = (1, 2, 3),
        steps: int = 4,
        seed: int = 0,
        params: PyTree = None,
    ) -> None:
        self.tx = tx if isinstance(tx, Chain) else Chain(flat((tx,)))
        self.steps, self._seed = steps, seed
        self.params = default_params() if params is None else params
        self.wide = map_leaves(widen, self.params)
        self.parts = tuple(_opened(flat((tx,))))
        self.stages = tuple(stage for part in self.parts for stage in part.stages)
        exchanges = [i for i, p in enumerate(self.parts) if p.stage.kind is Kind.EXCHANGE]
        self.exchange = exchanges[0] if exchanges else None
        self.lossy = any(stage.lossy for stage in self.stages)
        self.unscales = self.has(Kind.UNSCALE)
        self.gated = self.unscales or any(s.lossy or s.stateful for s in self.stages)
        self.sizes = [1] if self.exchange is None else list(ranks)

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
        """The state without that of a `dynamic_loss_scale`."""
        parts = zip(self.tx.core, state.states, strict=True)
        return tuple(own for part, own in parts if part.stage.kind is not Kind.UNSCALE)

    @property
    def local(self) -> Chain:
        """What stands before the exchange."""
        return Chain(self.parts[: self.exchange])

    @property
    def dense(self) -> Chain:
        """The exchange alone; the identity for a fragment."""
        return Chain(() if self.exchange is None else (self.parts[self.exchange],))

    def draw(self, size: int, params: PyTree = None) -> list[Step]:
        """True gradients of some ranks; in every other step the last of them lacks a leaf."""
        like = self.params if params is None else params
        generator = torch.Generator().manual_seed(self._seed)
        return [
            Step(tuple(_draw(like, generator, number, rank == size - 1) for rank in range(size)))
            for number in range(self.steps)
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
        entry = Chain([part for part in self._entry if not isinstance(part, Filter)])
        ranks = [
            trace(entry, self.wide, [Step((s.gradients[i],), s.loss_scale) for s in given], 1)[0]
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


def _opened(parts: Sequence[Transformation]) -> Iterator[Transformation]:
    for part in parts:
        if isinstance(part, Gate):
            yield from _opened(part.parts)
        else:
            yield part


def _draw(params: PyTree, generator: torch.Generator, number: int, is_last: bool) -> PyTree:
    leaves, treespec = flatten(params)
    lacking = number // 2 % len(leaves) if leaves and number % 2 and is_last else None
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
    out: list[Step] = []
    for i, like in enumerate(likes):
        if like is None or not like.numel():
            continue
        rank = len(out) % len(good.gradients)
        leaves = list(flatten(good.gradients[rank])[0])
        leaf = torch.zeros_like(like) if leaves[i] is None else leaves[i].clone()
        leaf[(-1,) * leaf.ndim] = (torch.inf, torch.nan, -torch.inf)[len(out) % 3]
        leaves[i] = leaf
        trees = list(good.gradients)
        trees[rank] = unflatten(treespec, leaves)
        out.append(Step(tuple(trees), good.loss_scale))
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
