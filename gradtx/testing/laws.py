"""The laws that every chain keeps, each as a function that raises `LawViolation` where it is broken.

`check_laws` checks them all on ranks that are threads of this process::

    check_laws(gx.chain(gx.unscale(), my_compressor(), gx.ef(), gx.allreduce()))

All functions take the same arguments. Gradients are drawn from `seed`: random, with ties, zeros,
large and small magnitudes, and leaves that some ranks have no gradient for. What a fragment (a chain
without an exchange) gives is decoded, and it is checked on one rank.

Tolerances: *bit for bit* means the same bytes. Sums may differ by 16 units in the last place of the
dtype that the leaf is summed in (FP32, or FP64 for FP64 leaves), relative to the largest magnitude
in the leaf that went into the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch

from gradtx.core.chain import Chain
from gradtx.core.combinators import Filter, masked
from gradtx.core.payload import Payload, decode_leaves
from gradtx.core.stage import Kind, Stage
from gradtx.core.transformation import Transformation, flat
from gradtx.core.tree import (
    PyTree,
    accumulation_dtype,
    flatten,
    flatten_with_paths,
    map_leaves,
    unflatten,
    widen,
)
from gradtx.exchange.group import find_group
from gradtx.testing.ranks import run_ranks

RANKS = (1, 2, 3)
_LARGE = 20_000
_ULPS = 16
# Powers of two of at least one: no 16-bit gradient below becomes infinite or loses bits by them.
_SCALES = (1024.0, 1.0, 8.0, 2048.0, 2.0)


class LawViolation(AssertionError):
    """A chain breaks a law.

    Attributes:
        law: its name, such as ``"L2"``.
    """

    def __init__(self, law: str, message: str) -> None:
        super().__init__(f"{law}: {message}")
        self.law = law


@dataclass(frozen=True)
class Step:
    """What goes into one step.

    Attributes:
        gradients: for each rank, its gradients, loss-scaled if the chain unscales.
        loss_scale: what they are scaled by.
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
            updates, state = tx.update(
                step.gradients[i], out.states[-1], params, loss_scale=step.loss_scale
            )
            out.outputs.append(updates)
            out.states.append(state)
            out.sent.append(group.sent - before)
        return out

    return run_ranks(size, rank)


def default_params() -> dict[str, Any]:
    """Parameters of several shapes and dtypes, a normalisation layer and an empty leaf among them."""
    return {
        "bn": {"bias": torch.zeros(3), "weight": torch.zeros(3)},
        "double": torch.zeros(4, dtype=torch.float64),
        "empty": torch.zeros(0, 2),
        "half": torch.zeros(7, dtype=torch.float16),
        "scalar": torch.zeros(()),
        "weight": torch.zeros(6, 5),
    }


def draw_steps(params: PyTree, *, size: int, steps: int, seed: int) -> list[Step]:
    """True gradients for some steps; in every other one the last rank lacks a leaf."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Step(tuple(_draw(params, generator, number, rank, size) for rank in range(size)))
        for number in range(steps)
    ]


def _draw(params: PyTree, generator: torch.Generator, number: int, rank: int, size: int) -> PyTree:
    leaves, treespec = flatten(params)
    lacking = number // 2 % len(leaves) if leaves and number % 2 and rank == size - 1 else None
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


def _scaled(steps: Sequence[Step], scales: Sequence[float]) -> list[Step]:
    out = []
    for number, step in enumerate(steps):
        scale = scales[number % len(scales)]
        scaled = [map_leaves(lambda leaf, s=scale: leaf * s, tree) for tree in step.gradients]
        out.append(Step(tuple(scaled), scale))
    return out


def _widened(steps: Sequence[Step]) -> list[Step]:
    """The same gradients in FP32 and FP64: a chain then gives its results before the last cast."""
    return [
        Step(tuple(map_leaves(widen, tree) for tree in step.gradients), step.loss_scale)
        for step in steps
    ]


class Anatomy:
    """A chain taken apart: what the laws have to know of it.

    Attributes:
        parts: its transformations; those within a gate stand for the gate.
        stages: their stages.
        exchange: the position of the first exchange among the parts, or None for a fragment.
    """

    def __init__(self, tx: Transformation) -> None:
        self.parts = tuple(_opened(flat((tx,))))
        self.stages = tuple(stage for part in self.parts for stage in part.stages)
        exchanges = [i for i, p in enumerate(self.parts) if p.stage.kind is Kind.EXCHANGE]
        self.exchange = exchanges[0] if exchanges else None
        self.lossy = any(stage.lossy for stage in self.stages)
        self.unscales = self._has(Kind.UNSCALE)
        self.gated = self.unscales or any(s.lossy or s.stateful for s in self.stages)

    def _has(self, *kinds: Kind) -> bool:
        return any(stage.kind in kinds for stage in self.stages)

    def sizes(self, ranks: Sequence[int]) -> list[int]:
        """The world sizes to check."""
        return [1] if self.exchange is None else list(ranks)

    @property
    def local(self) -> tuple[Transformation, ...]:
        """What stands before the exchange."""
        return self.parts[: self.exchange]

    @property
    def subject(self) -> Chain:
        """What L0, L2 and L3 speak of: all of it, if it has stages with a known meaning only."""
        if not self._has(Kind.TRANSFORM):
            return Chain(self.parts)
        entry = len(self._entry())
        end = len(self.parts) if self.exchange is None else self.exchange + 1
        filters = [part for part in self.parts[:entry] if isinstance(part, Filter)]
        return Chain((*filters, *self.parts[entry:end]))

    def entering(self, params: PyTree, steps: list[Step], size: int) -> tuple[list[Step], ...]:
        """What the subject is given, and the true gradients that it stands for."""
        scaled = _scaled(steps, _SCALES) if self.unscales else steps
        if not self._has(Kind.TRANSFORM):
            return scaled, steps
        entry = Chain([part for part in self._entry() if not isinstance(part, Filter)])
        traces = [
            trace(entry, params, [Step((s.gradients[i],), s.loss_scale) for s in scaled], 1)[0]
            for i in range(size)
        ]
        entered = [
            Step(tuple(one.outputs[number] for one in traces), step.loss_scale)
            for number, step in enumerate(scaled)
        ]
        return entered, entered

    def _entry(self) -> tuple[Transformation, ...]:
        for i, part in enumerate(self.parts):
            if part.stage.kind is Kind.EXCHANGE or any(stage.lossy for stage in part.stages):
                return self.parts[:i]
        return self.parts

    @property
    def dense(self) -> Chain:
        """The exchange alone; the identity for a fragment."""
        return Chain(() if self.exchange is None else (self.parts[self.exchange],))

    def protected(self, params: PyTree) -> list[bool]:
        """For each leaf, whether the chain says that no compressor is to see it."""
        paths, leaves, _ = flatten_with_paths(params)
        filters = [part.predicate for part in self.parts if isinstance(part, Filter)]
        masks = [
            part.hyperparameters["predicate"] if part.name == masked.__name__ else None
            for part in self.parts
            if any(stage.lossy for stage in part.stages)
        ]
        return [
            leaf is not None
            and (
                not all(keep(path, leaf, None) for keep in filters)
                or (bool(masks) and all(m is not None and not m(path, leaf, None) for m in masks))
            )
            for path, leaf in zip(paths, leaves, strict=True)
        ]


def _opened(parts: Sequence[Transformation]) -> Iterator[Transformation]:
    for part in parts:
        if part.name == "apply_if_finite":
            yield from _opened(flat(part.parts))
        else:
            yield part


def meaning(
    tx: Transformation,
    *,
    ranks: Sequence[int] = RANKS,
    steps: int = 4,
    seed: int = 0,
    params: PyTree = None,
) -> None:
    """L0: without lossy stages the result is the mean (or sum) of the true gradients, once."""
    chain, params = Anatomy(tx), _given(params)
    if chain.lossy:
        return
    for size in chain.sizes(ranks):
        drawn = _widened(draw_steps(params, size=size, steps=steps, seed=seed))
        entering, true = chain.entering(params, drawn, size)
        traces = trace(chain.subject, params, entering, size)
        for number, step in enumerate(true):
            expected = _reduced(step.gradients, chain, params)
            scale = _magnitudes(step.gradients, params)
            for rank, one in enumerate(traces):
                where = f"rank {rank} of {size}, step {number}"
                got = _decoded(one.outputs[number])
                _compare_sums("L0", "the result", got, expected, scale, where, params)


def scale_freedom(
    tx: Transformation,
    *,
    ranks: Sequence[int] = RANKS,
    steps: int = 4,
    seed: int = 0,
    params: PyTree = None,
) -> None:
    """L1: the result and the state do not depend on the loss scale, nor on its changes."""
    chain, params = Anatomy(tx), _given(params)
    if not chain.unscales:
        return
    for size in chain.sizes(ranks):
        drawn = draw_steps(params, size=size, steps=steps, seed=seed)
        plain = trace(tx, params, drawn, size)
        scaled = trace(tx, params, _scaled(drawn, _SCALES), size)
        for rank, (one, other) in enumerate(zip(plain, scaled, strict=True)):
            for number in range(steps):
                scale = _SCALES[number % len(_SCALES)]
                where = f"loss scale {scale:g} instead of 1, rank {rank} of {size}, step {number}"
                _same_bits("L1", "result", one.outputs[number], other.outputs[number], where)
                _same_bits("L1", "state", one.states[number + 1], other.states[number + 1], where)


def nothing_lost(
    tx: Transformation,
    *,
    ranks: Sequence[int] = RANKS,
    steps: int = 4,
    seed: int = 0,
    params: PyTree = None,
) -> None:
    """L2: results so far + mean residual = mean gradients so far (sums for ``op="sum"``).

    Waived where a stage says ``feedback=False``. An unbiased compressor without feedback is not
    checked: the law holds for it in expectation only. Nor is `momentum_correction`, which keeps and
    sends velocities: for it the law speaks of their sums.
    """
    chain, params = Anatomy(tx), _given(params)
    feedback = any(stage.kind is Kind.FEEDBACK for stage in chain.stages)
    compressors = [stage for stage in chain.stages if stage.lossy]
    if not all(stage.feedback and (stage.biased or feedback) for stage in compressors):
        return
    if any(stage.hyperparameters.get("m") for stage in chain.stages):
        return
    for size in chain.sizes(ranks):
        drawn = _widened(draw_steps(params, size=size, steps=steps, seed=seed))
        entering, true = chain.entering(params, drawn, size)
        traces = trace(chain.subject, params, entering, size)
        sums, masses = _zeros(params), _zeros(params)
        results = [_zeros(params) for _ in traces]
        for number, step in enumerate(true):
            sums = _added(sums, _reduced(step.gradients, chain, params))
            masses = _added(masses, _magnitudes(step.gradients, params))
            results = [
                _added(total, _decoded(one.outputs[number]))
                for total, one in zip(results, traces, strict=True)
            ]
            residuals = [_residual(one.states[number + 1], params) for one in traces]
            left = _reduced(residuals, chain, params)
            scale = _added(masses, _magnitudes(residuals, params))
            for rank, total in enumerate(results):
                where = f"rank {rank} of {size}, after step {number}"
                what = "results + mean residual"
                _compare_sums("L2", what, _added(total, left), sums, scale, where, params)


def protected_leaves(
    tx: Transformation,
    *,
    ranks: Sequence[int] = RANKS,
    steps: int = 4,
    seed: int = 0,
    params: PyTree = None,
) -> None:
    """L3: leaves that a filter protects are what the dense exchange gives."""
    chain, params = Anatomy(tx), _given(params)
    protected = chain.protected(params)
    paths = flatten_with_paths(params)[0]
    if not any(protected):
        return
    for size in chain.sizes(ranks):
        drawn = _widened(draw_steps(params, size=size, steps=steps, seed=seed))
        entering, true = chain.entering(params, drawn, size)
        traces = trace(chain.subject, params, entering, size)
        expected = trace(chain.dense, params, true, size)
        for rank, (one, other) in enumerate(zip(traces, expected, strict=True)):
            for number in range(steps):
                where = f"rank {rank} of {size}, step {number}"
                got, want = (_decoded(t.outputs[number]) for t in (one, other))
                chosen = [i for i, is_protected in enumerate(protected) if is_protected]
                scale = _magnitudes(true[number].gradients, params)
                for i in chosen:
                    if size <= 2:
                        _same_bits("L3", f"leaf {paths[i]!r}", want[i], got[i], where)
                only = [x if protected[i] else None for i, x in enumerate(got)]
                dense = [x if protected[i] else None for i, x in enumerate(want)]
                what = "a protected leaf"
                _compare_sums("L3", what, only, dense, scale, where, params)


def replicas_agree(
    tx: Transformation,
    *,
    ranks: Sequence[int] = RANKS,
    steps: int = 4,
    seed: int = 0,
    params: PyTree = None,
) -> None:
    """L4: all ranks get the same bits, on bad steps too."""
    chain, params = Anatomy(tx), _given(params)
    if chain.exchange is None:
        return
    for size in ranks:
        drawn = draw_steps(params, size=size, steps=steps, seed=seed)
        drawn += _bad_steps(drawn[-1], params, chain.gated) + drawn[:1]
        first, *others = trace(tx, params, drawn, size)
        for rank, one in enumerate(others, 1):
            for number in range(len(drawn)):
                where = f"rank {rank} against rank 0 of {size}, step {number}"
                _same_bits("L4", "result", first.outputs[number], one.outputs[number], where)


def bad_step_leaves_no_trace(
    tx: Transformation,
    *,
    ranks: Sequence[int] = RANKS,
    steps: int = 4,
    seed: int = 0,
    params: PyTree = None,
) -> None:
    """L5: on a bad step every rank gives zeros, no state but counters moves, no byte is added.

    Counters are 0-d integers and bools. Every leaf has its bad steps, on every rank in turn; a step
    whose sum over ranks overflows is one too, unless the chain keeps it in range (a majority vote, a
    local clip).
    """
    chain, params = Anatomy(tx), _given(params)
    if not chain.gated:
        return
    for size in chain.sizes(ranks):
        good = draw_steps(params, size=size, steps=max(steps, 2), seed=seed)
        bad = _bad_steps(good[-1], params, True)
        arriving_bad = len(good) - 1 + len(bad)
        if chain.exchange is not None and size > 1:
            bad += [step for step in _overflows(params, size) if not _is_finite(chain, step)]
        mixed = good[:-1] + bad + good[-1:]
        for rank, one in enumerate(trace(tx, params, mixed, size)):
            for number in range(len(good) - 1, len(mixed) - 1):
                where = f"rank {rank} of {size}, bad step {number - len(good) + 1}"
                taken = bool(getattr(one.states[number + 1], "last_finite", False))
                if number >= arriving_bad and taken and _all_finite(one.outputs[number]):
                    continue
                _all_zeros(one.outputs[number], where)
                before, after = one.states[number], one.states[number + 1]
                _same_bits(
                    "L5", "state", _without_counters(before), _without_counters(after), where
                )
                if one.sent[number] != one.sent[-1]:
                    raise LawViolation(
                        "L5",
                        f"{where}: sent {one.sent[number]} bytes, in a good step {one.sent[-1]}",
                    )


def purity(
    tx: Transformation,
    *,
    ranks: Sequence[int] = RANKS,
    steps: int = 4,
    seed: int = 0,
    params: PyTree = None,
) -> None:
    """L7: `update` changes none of its inputs, and equal inputs give equal outputs."""
    chain, params = Anatomy(tx), _given(params)
    for size in chain.sizes(ranks):
        drawn = draw_steps(params, size=size, steps=steps, seed=seed)
        if chain.gated:
            drawn += _bad_steps(drawn[-1], params, True)[:1]
        run_ranks(size, lambda i, n=size, d=drawn: _purity_of_one_rank(tx, params, d, i, n))


def _purity_of_one_rank(
    tx: Transformation, params: PyTree, steps: Sequence[Step], rank: int, size: int
) -> None:
    state = tx.init(params)
    for number, step in enumerate(steps):
        where = f"rank {rank} of {size}, step {number}"
        given = (step.gradients[rank], state, params)
        before = optree.tree_map(torch.clone, given)
        first = tx.update(*given, loss_scale=step.loss_scale)
        kept = optree.tree_map(torch.clone, first)
        second = tx.update(*given, loss_scale=step.loss_scale)
        for what, old, new in zip(("gradients", "state", "parameters"), before, given, strict=True):
            _same_bits("L7", f"given {what}", old, new, f"{where}, by update")
        _same_bits("L7", "result", kept, second, f"{where}, a second call")
        _same_bits("L7", "first result", kept, first, f"{where}, by a second call")
        state = first[1]


def shape(
    tx: Transformation,
    *,
    ranks: Sequence[int] = RANKS,
    steps: int = 4,
    seed: int = 0,
    params: PyTree = None,
) -> None:
    """L8: results are like the gradients, states like the first one.

    A payload may come out of a fragment only, and decodes to the shape of the gradient, in FP32 (FP64
    for an FP64 leaf). A leaf is None where no rank had a gradient.
    """
    chain, params = Anatomy(tx), _given(params)
    for size in chain.sizes(ranks):
        drawn = draw_steps(params, size=size, steps=steps, seed=seed)
        drawn += _bad_steps(drawn[-1], params, chain.gated)[:1]
        for rank, one in enumerate(trace(tx, params, drawn, size)):
            first = _signature(one.states[0])
            for number, step in enumerate(drawn):
                where = f"rank {rank} of {size}, step {number}"
                _check_shapes(one.outputs[number], step, params, chain, where)
                if _signature(one.states[number + 1]) != first:
                    raise LawViolation(
                        "L8",
                        f"{where}: the state changed from {first} to "
                        f"{_signature(one.states[number + 1])}",
                    )


def it_pays(
    tx: Transformation,
    *,
    ranks: Sequence[int] = RANKS,
    steps: int = 4,
    seed: int = 0,
    params: PyTree = None,
) -> None:
    """L10: no more bytes than a dense ring all-reduce (and flags); a compressor sends fewer.

    FP64 leaves count with 8 bytes a value in the ring, all others with 4. That a compressor sends
    fewer is asked for on leaves of 20,000 values, where its payload, 2 bytes an index, gathered from
    all ranks is smaller than the ring. An exchange whose `algorithm` is not ``"auto"`` is exempt.
    """
    chain, params = Anatomy(tx), _given(params)
    algorithms = [stage.hyperparameters.get("algorithm", "auto") for stage in chain.stages]
    if chain.exchange is None or any(algorithm != "auto" for algorithm in algorithms):
        return
    large = _enlarged(params)
    for size in (size for size in ranks if size > 1):
        for tree in (params, large):
            leaves = [leaf for leaf in flatten(tree)[0] if leaf is not None]
            limit = _on_ring(sum(map(_wide_nbytes, leaves)), size)
            flags = _on_ring(8 * (2 + len(leaves)), size) + 1
            sent = _bytes_sent(tx, tree, size, seed)
            if sent > limit + flags:
                raise LawViolation(
                    "L10",
                    f"{sent} bytes a step on {size} ranks: a dense ring takes {limit}, "
                    f"its flags at most {flags}",
                )
        if chain.lossy and _ought_to_pay(chain, large, size, seed):
            plain = [p for p in chain.parts if not any(s.lossy for s in p.stages)]
            without = [p for p in plain if p.stage.kind not in (Kind.FEEDBACK, Kind.FILTER)]
            sparing, dense = sent, _bytes_sent(Chain(without), large, size, seed)
            if sparing >= dense:
                raise LawViolation(
                    "L10",
                    f"{sparing} bytes a step on {size} ranks with the compressors, "
                    f"{dense} without them",
                )


LAWS: Mapping[str, Callable[..., None]] = {
    "L0": meaning,
    "L1": scale_freedom,
    "L2": nothing_lost,
    "L3": protected_leaves,
    "L4": replicas_agree,
    "L5": bad_step_leaves_no_trace,
    "L7": purity,
    "L8": shape,
    "L10": it_pays,
}
"""The laws by name. L6 and L9 are about stages that are not there yet."""


def check_laws(
    tx: Transformation,
    *,
    ranks: Sequence[int] = RANKS,
    steps: int = 4,
    seed: int = 0,
    params: PyTree = None,
    laws: Sequence[str] | None = None,
) -> None:
    """Checks that a chain keeps the laws.

    Args:
        tx: a chain, or any transformation that works on its own; its exchange is given no group.
        ranks: the world sizes to check; a fragment is checked on one rank.
        steps: how many steps to take.
        seed: what the gradients are drawn from.
        params: a pytree of floating-point CPU tensors; by default one with several shapes and
            dtypes and a normalisation layer named ``bn``.
        laws: the names of the laws to check, of `LAWS`; by default all.

    Raises:
        LawViolation: naming the first law that is broken, and the figures.
        ValueError: for an unknown law.

    Example:
        >>> import gradtx as gx
        >>> check_laws(gx.chain(gx.unscale(), gx.topk(0.1), gx.ef(), gx.allreduce()))
        >>> check_laws(gx.chain(gx.topk(0.1), gx.allreduce(), check=False), laws=["L2"])
        Traceback (most recent call last):
        ...
        gradtx.testing.laws.LawViolation: L2: ...
    """
    unknown = [law for law in laws or () if law not in LAWS]
    if unknown:
        raise ValueError(f"unknown laws {unknown}: expected some of {list(LAWS)}")
    for law in LAWS if laws is None else laws:
        LAWS[law](tx, ranks=ranks, steps=steps, seed=seed, params=params)


def _given(params: PyTree) -> PyTree:
    return default_params() if params is None else params


def _decoded(updates: PyTree) -> list[Any]:
    return decode_leaves(flatten(updates)[0])


def _double(leaf: Any, like: Any) -> Any:
    if like is None:
        return None
    return torch.zeros(like.shape, dtype=torch.float64) if leaf is None else leaf.double()


def _zeros(params: PyTree) -> list[Any]:
    return [_double(None, like) for like in flatten(params)[0]]


def _added(total: Sequence[Any], more: Sequence[Any]) -> list[Any]:
    return [
        a if b is None else a + b.double().reshape(a.shape)
        for a, b in zip(total, more, strict=True)
    ]


def _reduced(trees: Sequence[PyTree], chain: Anatomy, params: PyTree) -> list[Any]:
    """The mean over ranks in FP64, or the sum if that is what the exchange gives."""
    total = _zeros(params)
    for tree in trees:
        total = _added(total, flatten(tree)[0])
    ops = [s.hyperparameters.get("op") for s in chain.stages if s.kind is Kind.EXCHANGE]
    divisor = 1 if "sum" in ops else len(trees)
    return [None if leaf is None else leaf / divisor for leaf in total]


def _magnitudes(trees: Sequence[PyTree], params: PyTree) -> list[Any]:
    """The sum over ranks of the magnitudes: what rounding errors are relative to."""
    total = _zeros(params)
    for tree in trees:
        total = _added(total, [None if x is None else x.abs() for x in flatten(tree)[0]])
    return total


def _residual(state: Any, params: PyTree) -> list[Any]:
    """All that the stages of a state hold as `residual`, added up."""
    total = _zeros(params)
    for residual in _fields(state, "residual"):
        total = _added(total, flatten(residual)[0])
    return total


def _fields(state: Any, name: str) -> Iterator[Any]:
    if hasattr(state, "_fields") and name in state._fields:
        yield getattr(state, name)
    elif isinstance(state, (tuple, list)):
        for part in state:
            yield from _fields(part, name)
    elif isinstance(state, dict):
        for part in state.values():
            yield from _fields(part, name)


def _compare_sums(
    law: str,
    what: str,
    got: Sequence[Any],
    expected: Sequence[Any],
    scale: Sequence[Any],
    where: str,
    params: PyTree,
) -> None:
    paths, likes, _ = flatten_with_paths(params)
    for path, like, a, b, size in zip(paths, likes, got, expected, scale, strict=True):
        if like is None or not like.numel():
            continue
        a, b = _double(a, like).reshape(like.shape), _double(b, like)
        epsilon = torch.finfo(getattr(torch, accumulation_dtype(str(like.dtype)[6:]))).eps
        tolerance = _ULPS * epsilon * float(size.max())
        difference = (a - b).abs()
        if not bool((difference <= tolerance).all()):
            worst = int(difference.nan_to_num(torch.inf).argmax())
            raise LawViolation(
                law,
                f"{where}, leaf {path!r}: {what} is {float(a.reshape(-1)[worst]):.9g} at "
                f"{worst}, expected {float(b.reshape(-1)[worst]):.9g} "
                f"within {tolerance:.2g}",
            )


def _tensors(tree: Any) -> tuple[list[str], list[Any], Any]:
    accessors, leaves, treespec = optree.tree_flatten_with_path(tree, none_is_leaf=True)
    return [".".join(map(str, path)) for path in accessors], leaves, treespec


def _bits(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    data = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return leaf.dtype, leaf.shape, bytes(data.numpy())


def _same_bits(law: str, what: str, old: Any, new: Any, where: str) -> None:
    paths, before, old_spec = _tensors(old)
    _, after, new_spec = _tensors(new)
    if old_spec != new_spec:
        raise LawViolation(law, f"{where}: the {what} has another structure: {new_spec}")
    for path, a, b in zip(paths, before, after, strict=True):
        if _bits(a) != _bits(b):
            raise LawViolation(law, f"{where}: the {what} differs at {path!r}: {a} and {b}")


def _without_counters(state: Any) -> Any:
    def kept(leaf: Any) -> Any:
        counts = isinstance(leaf, (bool, int)) or (
            isinstance(leaf, torch.Tensor) and not leaf.ndim and not leaf.is_floating_point()
        )
        return None if counts else leaf

    return optree.tree_map(kept, state)


def _bad_steps(good: Step, params: PyTree, gated: bool) -> list[Step]:
    """For each leaf with values, a good step but for one value, on one rank."""
    likes, treespec = flatten(params)
    out = []
    for i, like in enumerate(likes if gated else ()):
        if like is None or not like.numel():
            continue
        rank = len(out) % len(good.gradients)
        bad = (torch.inf, torch.nan, -torch.inf)[len(out) % 3]
        leaves = list(flatten(good.gradients[rank])[0])
        leaf = torch.zeros_like(like) if leaves[i] is None else leaves[i].clone()
        leaf.view(-1)[-1] = bad
        leaves[i] = leaf
        trees = list(good.gradients)
        trees[rank] = unflatten(treespec, leaves)
        out.append(Step(tuple(trees), good.loss_scale))
    return out


def _overflows(params: PyTree, size: int) -> list[Step]:
    """For each leaf with values, a step in which all ranks have nearly the largest number."""
    likes, treespec = flatten(params)
    out = []
    for i, like in enumerate(likes):
        if like is not None and like.numel():
            leaves = [None if leaf is None else torch.zeros_like(leaf) for leaf in likes]
            leaves[i] = torch.full_like(like, 0.75 * torch.finfo(like.dtype).max)
            out.append(Step((unflatten(treespec, leaves),) * size))
    return out


def _is_finite(chain: Anatomy, step: Step) -> bool:
    """Whether the dense exchange of a step is finite."""
    params = step.gradients[0]
    out = trace(chain.dense, params, [step], len(step.gradients))[0].outputs[0]
    return all(bool(x.isfinite().all()) for x in flatten(out)[0] if x is not None)


def _all_finite(updates: PyTree) -> bool:
    return all(bool(leaf.isfinite().all()) for leaf in _decoded(updates) if leaf is not None)


def _all_zeros(updates: PyTree, where: str) -> None:
    paths, _, _ = flatten_with_paths(updates)
    for path, leaf in zip(paths, _decoded(updates), strict=True):
        if leaf is not None and not bool((leaf == 0).all()):
            raise LawViolation("L5", f"{where}: leaf {path!r} is not zero: {leaf}")


def _signature(state: Any) -> Any:
    _, leaves, treespec = _tensors(state)
    kinds = [(x.dtype, tuple(x.shape), x.device) if hasattr(x, "dtype") else x for x in leaves]
    return kinds, treespec


def _check_shapes(updates: PyTree, step: Step, params: PyTree, chain: Anatomy, where: str) -> None:
    leaves, treespec = flatten(updates)
    paths, likes, expected = flatten_with_paths(params)
    if treespec != expected:
        raise LawViolation("L8", f"{where}: the result is {treespec}, the gradients {expected}")
    given = [flatten(tree)[0] for tree in step.gradients]
    for i, (path, leaf, like) in enumerate(zip(paths, leaves, likes, strict=True)):
        present = any(tree[i] is not None for tree in given)
        if isinstance(leaf, Payload):
            if chain.exchange is not None:
                raise LawViolation("L8", f"{where}: leaf {path!r} comes out compressed: {leaf}")
            wide = accumulation_dtype(str(like.dtype)[6:])
            got, want = (*_payload_shape(leaves, i), None), (wide, tuple(like.shape), None)
        elif leaf is None or not present:
            got, want = leaf is None, not present
        else:
            got = (leaf.dtype, tuple(leaf.shape), leaf.device)
            want = (like.dtype, tuple(like.shape), like.device)
        if got != want:
            raise LawViolation("L8", f"{where}: leaf {path!r} is {got}, expected {want}")


def _payload_shape(leaves: Sequence[Any], i: int) -> tuple[str, tuple[int, ...]]:
    decoded = decode_leaves(list(leaves))[i]
    wide = accumulation_dtype(str(decoded.dtype)[6:])
    return wide, tuple(decoded.shape)


def _enlarged(params: PyTree) -> PyTree:
    """Leaves of as many dimensions, but with 20,000 values; 0-d ones as they are."""

    def enlarge(leaf: torch.Tensor) -> torch.Tensor:
        if not leaf.ndim:
            return leaf
        rest = [max(length, 1) for length in leaf.shape[1:]]
        length = -(-_LARGE // max(int(torch.Size(rest).numel()), 1))
        return torch.zeros((length, *rest), dtype=leaf.dtype, device=leaf.device)

    return map_leaves(enlarge, params)


def _wide_nbytes(leaf: torch.Tensor) -> int:
    return leaf.numel() * (8 if leaf.dtype == torch.float64 else 4)


def _on_ring(nbytes: int, size: int) -> int:
    return 2 * (size - 1) * nbytes // size


def _bytes_sent(tx: Transformation, params: PyTree, size: int, seed: int) -> int:
    """What a rank sends in a step, handshake aside: the most of all ranks."""
    step = draw_steps(params, size=size, steps=1, seed=seed)[0]
    return max(one.sent[1] for one in trace(tx, params, [step, step], size))


def _ought_to_pay(chain: Anatomy, params: PyTree, size: int, seed: int) -> bool:
    """Whether what the compressors give is small enough; always, if they come too late."""
    if not any(stage.lossy for part in chain.local for stage in part.stages):
        return True
    step = draw_steps(params, size=1, steps=1, seed=seed)[0]
    leaves = flatten(trace(Chain(chain.local), params, [step], 1)[0].outputs[0])[0]
    payloads = [leaf for leaf in leaves if isinstance(leaf, Payload)]
    arrays = [x for x in optree.tree_leaves(payloads) if isinstance(x, torch.Tensor)]
    nominal = sum(x.numel() * (2 if x.dtype == torch.int64 else x.itemsize) for x in arrays)
    dense = sum(
        _wide_nbytes(x)
        for x, y in zip(flatten(params)[0], leaves, strict=True)
        if isinstance(y, Payload)
    )
    return size * nominal < 1.9 * dense


__all__ = [
    "LAWS",
    "LawViolation",
    "bad_step_leaves_no_trace",
    "check_laws",
    "it_pays",
    "meaning",
    "nothing_lost",
    "protected_leaves",
    "purity",
    "replicas_agree",
    "scale_freedom",
    "shape",
]
