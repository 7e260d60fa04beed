"""The laws that every chain keeps, each a function that raises `LawViolation` where it is broken.

`check_laws` checks them all on ranks that are threads of this process, or, for a chain that
exchanges over an axis of a JAX mesh, rows of one compiled program::

    check_laws(gx.chain(gx.unscale(), my_compressor(), gx.ef(), gx.allreduce()))
    check_laws(gx.chain(gx.unscale(), my_compressor(), gx.ef(), gx.allreduce(axis_name="data")))

All functions take the same arguments. Gradients are drawn from `seed`: random, with ties, zeros,
large and small magnitudes, and leaves that a rank has no gradient for. What a fragment (a chain
without an exchange) gives is decoded, and it is checked on one rank.

Tolerances: *bit for bit* means the same bytes. Sums may differ by 16 units in the last place of the
dtype that the leaf is summed in (FP32, or FP64 for FP64 leaves), relative to the largest magnitude
in the leaf, added up over ranks and steps: a relative error of 2e-6 in FP32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, Unpack

import optree
import torch

from gradtx.backends.registry import NAMESPACE
from gradtx.core.chain import Chain
from gradtx.core.combinators import Delaying
from gradtx.core.payload import Joined, Member, Payload, decode_leaves
from gradtx.core.rules import Flow
from gradtx.core.stage import Kind
from gradtx.core.transformation import Transformation
from gradtx.core.tree import (
    PyTree,
    accumulation_dtype,
    flatten,
    flatten_with_paths,
    map_leaves,
    unflatten,
    widen,
)
from gradtx.testing.trace import (
    SCALES,
    Call,
    Case,
    Options,
    Step,
    bad_steps,
    enlarged,
    overflowing_steps,
    scaled,
    sent_within,
    window_of,
    windows,
)

_ULPS = 16
Leaves: TypeAlias = list[Any]


class LawViolation(AssertionError):
    """A chain breaks a law.

    Attributes:
        law: its name, such as ``"L2"``.
    """

    def __init__(self, law: str, message: str) -> None:
        super().__init__(f"{law}: {message}")
        self.law = law


def meaning(tx: Transformation, **options: Unpack[Options]) -> None:
    """L0: without lossy stages the result is the mean (or sum) of the true gradients, once."""
    case = Case(tx, **options)
    for size in () if case.lossy else case.sizes:
        given, true = case.entering(case.draw(size))
        traces = case.trace(case.subject, case.wide, given, size)
        for number, step in enumerate(true):
            expected, scale = _reduced(case, step.gradients), _magnitudes(case, step.gradients)
            for rank, one in enumerate(traces):
                where = f"rank {rank} of {size}, step {number}: the result"
                _same_sums(case, "L0", where, _decoded(one.outputs[number]), expected, scale)


def scale_freedom(tx: Transformation, **options: Unpack[Options]) -> None:
    """L1: result and state do not depend on the loss scale, a power of two, nor on its changes.

    A chain with a loss scale of its own is compared with one that has an `unscale` in its place;
    give it a power of two to begin with that no gradient below one overflows with.
    """
    case = Case(tx, **options)
    for size in case.sizes if case.unscales else ():
        steps = case.draw(size)
        plain = case.trace(case.plain, case.params, steps, size)
        other = case.trace(case.tx, case.params, scaled(steps), size)
        for rank, (one, two) in enumerate(zip(plain, other, strict=True)):
            for number in range(len(steps)):
                scale = SCALES[number % len(SCALES)]
                where = f"loss scale {scale:g} for 1, rank {rank} of {size}, step {number}"
                _same_bits("L1", f"{where}: the result", one.outputs[number], two.outputs[number])
                old, new = (case.scaleless(t.states[number + 1]) for t in (one, two))
                _same_bits("L1", f"{where}: the state", old, new)


def nothing_lost(tx: Transformation, **options: Unpack[Options]) -> None:
    """L2: results so far + mean residual = mean gradients so far (sums for ``op="sum"``).

    The residual is what the state has in fields of the name `residual`. Waived where a stage says
    ``feedback=False``. For `momentum_correction`, which keeps and sends velocities, the law speaks
    of their sums; with ``clip`` it is not checked.

    Where all compressors say that they are unbiased, and no feedback is over them, it holds in
    expectation: over 256 steps of one gradient the mean error is to be within 7 standard errors of
    zero, along the gradient and along four random directions. And what is fed back has to shrink:
    the residual of a first step may not be larger than the gradient, or feedback lets it grow.
    """
    case = Case(tx, **options)
    _check_mean(case)
    _check_residual(case)
    momentum = max((stage.hyperparameters.get("m", 0.0) for stage in case.stages), default=0.0)
    for size in case.sizes if _accounts_for_all(case) else ():
        given, true = case.entering(case.draw(size))
        traces = case.trace(case.subject, case.wide, given, size)
        sums, masses = _zeros(case), _zeros(case)
        results = [_zeros(case) for _ in traces]
        for number, step in enumerate(true):
            carried = [
                _carried(case, momentum, gradients, one.states[number])
                for gradients, one in zip(step.gradients, traces, strict=True)
            ]
            sums = _added(sums, _reduced(case, (*step.gradients, *carried), len(traces)))
            masses = _added(masses, _magnitudes(case, (*step.gradients, *carried)))
            residuals = [_residual(case, one.states[number + 1]) for one in traces]
            left, scale = _reduced(case, residuals), _added(masses, _magnitudes(case, residuals))
            for rank, one in enumerate(traces):
                results[rank] = _added(results[rank], _decoded(one.outputs[number]))
                where = f"rank {rank} of {size}, after step {number}: results + mean residual"
                _same_sums(case, "L2", where, _added(results[rank], left), sums, scale)


_DRAWS = 256


def _check_mean(case: Case) -> None:
    """Compressors that say that they are unbiased are."""
    lossy = [stage for stage in case.stages if stage.lossy]
    claimed = all(s.feedback and not s.biased and s.gives != "votes" for s in lossy)
    if not lossy or not claimed or case.has(Kind.FEEDBACK):
        return
    given, true = case.entering(case.draw(1)[:1])
    one = case.trace(case.subject, case.wide, given * _DRAWS, 1)[0]
    outputs = [_decoded(updates) for updates in one.outputs]
    generator = torch.Generator().manual_seed(0)
    for i, gradient in enumerate(_reduced(case, true[0].gradients)):
        if gradient is None or not gradient.any():
            continue
        errors = torch.stack([leaves[i].double().ravel() for leaves in outputs]) - gradient.ravel()
        random = torch.randn(4, gradient.numel(), generator=generator, dtype=torch.float64)
        directions = torch.cat([gradient.reshape(1, -1), random])
        along = errors @ (directions / directions.norm(dim=1, keepdim=True)).T / gradient.norm()
        mean, spread = along.mean(0), along.std(0)
        worst = (mean.abs() - 7 * spread / math.sqrt(_DRAWS)).max()
        if worst > 1e-5:
            raise LawViolation(
                "L2",
                f"over {_DRAWS} steps of one gradient the results are off by "
                f"{mean.abs().max():.3g} of it on average, at leaf {i}: a compressor that is wrong "
                "on average says biased=True",
            )


def _check_residual(case: Case) -> None:
    """Compressors under a feedback that say that they are contractions are."""
    flow = Flow(case.stages)
    feedbacks = flow.where(Kind.FEEDBACK)
    covered = [case.stages[i] for f in feedbacks for i in flow.covered(f)]
    if not covered or not all(stage.contraction for stage in covered):
        return
    given, true = case.entering(case.draw(1))
    for number, (step, meant) in enumerate(zip(given, true, strict=True)):
        one = case.trace(case.subject, case.wide, [step], 1)[0]
        left = _norm(_residual(case, one.states[1]))
        if left > (1 + 1e-5) * _norm(flatten(meant.gradients[0])[0]):
            raise LawViolation(
                "L2",
                f"the residual of gradient {number} has the norm {left:.3g}, more than the "
                "gradient: with feedback it grows; a compressor whose error may be larger than its "
                "input says contraction=False",
            )


def _norm(leaves: Leaves) -> float:
    return math.sqrt(sum(float(x.double().square().sum()) for x in leaves if x is not None))


def _accounts_for_all(case: Case) -> bool:
    """Whether what the compressors leave out is in the residuals, and not lost or noise."""
    flow = Flow(case.stages)
    fed_back = {i for f in flow.where(Kind.FEEDBACK) for i in flow.covered(f)}
    clipped = any(case.stages[f].hyperparameters.get("clip") for f in flow.where(Kind.FEEDBACK))
    return not clipped and all(
        stage.feedback and (stage.biased or i in fed_back)
        for i, stage in enumerate(case.stages)
        if stage.lossy
    )


def _carried(case: Case, momentum: float, gradients: PyTree, state: Any) -> Leaves:
    """The old velocity's part in the new one; a leaf without a gradient keeps its velocity."""
    total = _zeros(case)
    for velocity in _fields(state, "velocity"):
        total = _added(total, flatten(velocity)[0])
    return [
        None if gradient is None or leaf is None else momentum * leaf
        for gradient, leaf in zip(flatten(gradients)[0], total, strict=True)
    ]


def protected_leaves(tx: Transformation, **options: Unpack[Options]) -> None:
    """L3: leaves that a filter protects are what the dense exchange gives.

    Bit for bit on one or two ranks, within the tolerance of sums on more (and with windows that are
    no power of two).
    """
    case = Case(tx, **options)
    protected = case.protected()
    for size in case.sizes if any(protected) else ():
        given, true = case.entering(case.draw(size))
        traces = case.trace(case.subject, case.wide, given, size)
        expected = case.trace(case.dense, case.wide, true, size)
        for rank, (one, other) in enumerate(zip(traces, expected, strict=True)):
            for number, step in enumerate(true):
                where = f"rank {rank} of {size}, step {number}: a protected leaf"
                got, want = (
                    [leaf if spared else None for leaf, spared in zip(all_, protected, strict=True)]
                    for all_ in (_decoded(t.outputs[number]) for t in (one, other))
                )
                if case.backend == "jax" and case.holds_back:
                    got = [None if a is None else b for a, b in zip(want, got, strict=True)]
                if size <= 2 and case.exact:
                    _same_bits("L3", where, want, got)
                _same_sums(case, "L3", where, got, want, _magnitudes(case, step.gradients))


def replicas_agree(tx: Transformation, **options: Unpack[Options]) -> None:
    """L4: all ranks get the same bits, in steps after a bad one too."""
    case = Case(tx, **options)
    for size in () if case.exchange is None else case.sizes:
        steps = case.draw(size)
        if case.gated:
            steps += bad_steps(steps[-1], case.params)[-2:] + steps[:1]
        first, *others = case.trace(case.tx, case.params, steps, size)
        for rank, one in enumerate(others, 1):
            for number in range(len(steps)):
                where = f"rank {rank} against rank 0 of {size}, step {number}: the result"
                _same_bits("L4", where, first.outputs[number], one.outputs[number])


def bad_step_leaves_no_trace(tx: Transformation, **options: Unpack[Options]) -> None:
    """L5: on a bad step every rank gives zeros, no state but counters moves, no byte is added.

    Counters are 0-d integers and bools; a loss scale that adjusts itself may fall, not grow. Every
    leaf has its bad step, on each rank in turn; a step whose sum over ranks overflows is one too,
    unless compressors, or stages of unknown meaning, leave out so much that it does not. A chain of
    stateless linear stages without `unscale` is not gated, and exempt. Bytes are not compared where
    a stage says that they vary. A window is bad with any of its micro-steps; where those are left
    out on their own, the law is checked on one rank, which then has nothing left. Results that wait
    in a queue are not state in this sense.
    """
    case = Case(tx, **options)
    reduces = case.lossy or case.has(Kind.TRANSFORM) or case.windowed
    window = window_of(case.tx)
    alone = window is not None and window.hyperparameters["on_bad"] == "leave_out"
    for size in () if not case.gated else [1] if alone else case.sizes:
        good, spoilt = case.draw(size), bad_steps(case.draw(size)[-1], case.params)
        too_large = overflowing_steps(case.params, size) if case.exchange is not None else []
        steps, start, end = [*good, *spoilt, good[-1]], len(good), len(good) + len(spoilt)
        for step in too_large:
            steps += [] if _is_finite(case, step) else [step, good[-1]]
        for rank, one in enumerate(case.trace(case.tx, case.params, steps, size)):
            for number in (*range(start, end), *range(end + 1, len(steps), 2)):
                out, sent = one.outputs[number], one.sent[number]
                if reduces and number > end and _is_taken(out):
                    continue
                # The next good step: schedules go on with it as if there had been no bad one.
                where, usual = (
                    f"rank {rank} of {size}, bad step {number}",
                    one.sent[max(number + 1, end)],
                )
                if sent != usual and not any(stage.varies for stage in case.stages):
                    raise LawViolation("L5", f"{where}: {sent} bytes, {usual} in a good step")
                _all_zeros(where, out)
                before, after = one.states[number], one.states[number + 1]
                _check_scale(where, before, after)
                old, new = (_without_counters(case.scaleless(s)) for s in (before, after))
                _same_bits("L5", f"{where}: the state", old, new)


def once(tx: Transformation, **options: Unpack[Options]) -> None:
    """L6: a window gives what one large batch gives, and crosses the network once.

    Of the chain without its compressors and delay: after each window of random micro-steps, with
    weights and loss scales that change, it gives what it gives without `accumulate` for the mean
    (or sum) of the window, on every rank. Of the whole chain: nothing is sent within a window. The
    former is not asked of stages that are not gradtx's own, which may turn rounding into anything.
    Checked on torch.
    """
    case = Case(tx, **options)
    window = window_of(case.tx)
    if window is None or case.backend != "torch":
        return
    n, mean = window.hyperparameters["n"], window.hyperparameters["mean"]
    dense = [p for p in _uncompressed(case).transformations if not isinstance(p, Delaying)]
    large = Chain([part for part in dense if part.stage.kind is not Kind.ACCUMULATE])
    known = all(stage.module == "gx." for stage in case.stages)
    joined = any(s.kind is Kind.TRANSFORM and not s.linear for s in case.stages)
    for size in case.sizes:
        true = [
            Step(tuple(map_leaves(widen, tree) for tree in step.gradients))
            for step in case.draw(size, count=n * case.steps)
        ]
        micro = scaled(true) if case.unscales else true
        weights = [
            [float(1 + (j + rank) % n) if mean else 1.0 for j in range(n)] for rank in range(size)
        ]
        for rank, sent in enumerate(sent_within(case.tx, case.params, micro, size)):
            if any(sent):
                raise LawViolation("L6", f"rank {rank} of {size} sends {sent} bytes in a window")
        if not known:
            continue
        meant, masses = [], []
        for start in range(0, len(true), n):
            parts = true[start : start + n]
            trees, mass = [], _zeros(case)
            for rank in range(size):
                own = [step.gradients[rank] for step in parts]
                total, divisor = _zeros(case), sum(weights[rank]) if mean else 1.0
                for weight, tree in zip(weights[rank], own, strict=True):
                    leaves = [None if x is None else x * weight for x in flatten(tree)[0]]
                    total = _added(total, leaves)
                mass = _added(mass, _magnitudes(case, own))
                trees.append(_like(case, [x if x is None else x / divisor for x in total]))
            meant.append(Step(tuple(trees)))
            masses.append(_coarse(mass, case.wide) if joined else mass)
        got = windows(Chain(dense), case.wide, micro, weights, mean, size)
        expected = case.trace(large, case.wide, meant, size)
        for rank, (one, other) in enumerate(zip(got, expected, strict=True)):
            for number, (a, b) in enumerate(zip(one, other.outputs, strict=True)):
                where = f"rank {rank} of {size}, window {number}: the result"
                _same_sums(case, "L6", where, _decoded(a), _decoded(b), masses[number])


def _coarse(masses: Leaves, wide: PyTree) -> Leaves:
    """Masses with which FP64 leaves are compared as FP32 ones: what joins them is that exact."""
    ratio = torch.finfo(torch.float32).eps / torch.finfo(torch.float64).eps
    pairs = zip(masses, flatten(wide)[0], strict=True)
    return [
        mass if like is None or like.dtype != torch.float64 else mass * ratio
        for mass, like in pairs
    ]


def _like(case: Case, leaves: Leaves) -> PyTree:
    """Leaves in FP64 as the tree of the parameters, in FP32 (FP64 for FP64 leaves)."""
    likes, treespec = flatten(case.wide)
    pairs = zip(leaves, likes, strict=True)
    return unflatten(treespec, [x if x is None else x.to(like.dtype) for x, like in pairs])


def purity(tx: Transformation, **options: Unpack[Options]) -> None:
    """L7: `update` changes none of its inputs, and equal inputs give equal outputs."""
    case = Case(tx, **options)
    for size in case.sizes:
        steps = case.draw(size)
        if case.gated:
            steps += bad_steps(steps[-1], case.params)[:1]
        for rank, calls in enumerate(case.calls(steps, size)):
            for number, call in enumerate(calls):
                _check_purity(f"rank {rank} of {size}, step {number}", call)


def _check_purity(where: str, call: Call) -> None:
    names = ("gradients", "state", "parameters")
    for name, old, new in zip(names, call.before, call.after, strict=True):
        _same_bits("L7", f"{where}: update writes into the {name}", old, new)
    _same_bits("L7", f"{where}: the same call, a second time,", call.first, call.second)
    _same_bits(
        "L7", f"{where}: the first result, after a second call,", call.first, call.still_first
    )


def shape(tx: Transformation, **options: Unpack[Options]) -> None:
    """L8: results are like the gradients, states like the first one.

    A payload may come out of a fragment only, and decodes to the shape of the gradient, in FP32
    (FP64 for an FP64 leaf, and for all that are joined with one). A leaf is None where no rank had
    a gradient; under JAX not where the result comes later than the gradient.
    """
    case = Case(tx, **options)
    for size in case.sizes:
        steps = case.draw(size)
        if case.gated:
            steps += bad_steps(steps[-1], case.params)[:1]
        for rank, one in enumerate(case.trace(case.tx, case.params, steps, size)):
            first = _signature(one.states[0])
            for number, step in enumerate(steps):
                where = f"rank {rank} of {size}, step {number}"
                _check_shapes(case, where, one.outputs[number], step)
                now = _signature(one.states[number + 1])
                if now != first:
                    raise LawViolation("L8", f"{where}: the state changed from {first} to {now}")


def one_norm(tx: Transformation, **options: Unpack[Options]) -> None:
    """L9: a global clip uses one coefficient on all ranks, computed from the reduced gradient.

    What a `clip_by_global_norm` gives, or for one that stands before the exchange what the exchange
    gives, is what there is without it times ``max_norm / max(norm, max_norm)``, with the norm of
    that in FP64; on all ranks bit for bit. Fragments, in which nothing is reduced, are exempt.
    """
    case = Case(tx, **options)
    named = [i for i, part in enumerate(case.parts) if part.name == "clip_by_global_norm"]
    clips = [i for i in named if "max_norm" in case.parts[i].hyperparameters]
    if case.exchange is None or not clips:
        return
    early = [i for i in clips if i < case.exchange]
    if early:
        parts = list(enumerate(case.parts[: case.exchange + 1]))
        plain = [part for i, part in parts if i not in early]
        limit = min(case.parts[i].hyperparameters["max_norm"] for i in early)
        _check_coefficient(case, plain, [part for _, part in parts], limit)
    for i in clips[len(early) :]:
        limit = case.parts[i].hyperparameters["max_norm"]
        _check_coefficient(case, case.parts[:i], case.parts[: i + 1], limit)


def _check_coefficient(
    case: Case,
    plain: Sequence[Transformation],
    clipping: Sequence[Transformation],
    max_norm: float,
) -> None:
    for size in case.sizes:
        true = [Step(tuple(map_leaves(widen, t) for t in s.gradients)) for s in case.draw(size)]
        steps = scaled(true) if case.unscales else true
        reduced = case.trace(Chain(plain), case.wide, steps, size)[0]
        first, *others = case.trace(Chain(clipping), case.wide, steps, size)
        for number in range(len(steps)):
            where = f"on {size} ranks, step {number}: the clipped gradient"
            given = _decoded(reduced.outputs[number])
            coefficient = max_norm / max(_norm(given), max_norm)
            expected = [None if x is None else x.double() * coefficient for x in given]
            scale = _added(_zeros(case), [None if x is None else x.abs() for x in expected])
            _same_sums(case, "L9", where, _decoded(first.outputs[number]), expected, scale)
            for one in others:
                _same_bits("L9", where, first.outputs[number], one.outputs[number])


def it_pays(tx: Transformation, **options: Unpack[Options]) -> None:
    """L10: no more bytes than a dense ring all-reduce (and flags); a compressor sends fewer.

    FP64 leaves count with 8 bytes a value in the ring, all others with 4. That a compressor sends
    fewer is asked for on leaves of 20,000 values, where its payload, at 2 bytes an index, gathered
    from all ranks (or, where it can be cut, sent to owners and back) is smaller than the ring, or
    than half of it for 16-bit leaves, which travel in 16 bits without it. An exchange whose
    `algorithm` is not ``"auto"`` is exempt.
    """
    case = Case(tx, **options)
    exempt = case.exchange is None or case.setting("algorithm", "auto") != {"auto"}
    large = enlarged(case.params)
    for size in () if exempt else (size for size in case.sizes if size > 1):
        for tree in (case.params, large):
            sent, ring, flags = case.measure(case.tx, tree, size).sent, *_ring(tree, size)
            if sent > ring + flags:
                raise LawViolation(
                    "L10",
                    f"{sent} bytes a step on {size} ranks, a dense ring takes {ring} and at most "
                    f"{flags} for flags",
                )
        if case.lossy and _ought_to_pay(case, large, size):
            sent = case.measure(case.tx, large, size).sent
            dense = case.measure(_uncompressed(case), large, size).sent
            if sent >= dense:
                raise LawViolation(
                    "L10",
                    f"{sent} bytes a step on {size} ranks with the compressors, {dense} without",
                )


LAWS: Mapping[str, Callable[..., None]] = {
    "L0": meaning,
    "L1": scale_freedom,
    "L2": nothing_lost,
    "L3": protected_leaves,
    "L4": replicas_agree,
    "L5": bad_step_leaves_no_trace,
    "L6": once,
    "L7": purity,
    "L8": shape,
    "L9": one_norm,
    "L10": it_pays,
}
"""The laws by name."""


def check_laws(
    tx: Transformation,
    *,
    ranks: Sequence[int] = (1, 2, 3),
    steps: int = 4,
    seed: int = 0,
    params: PyTree = None,
    laws: Sequence[str] | None = None,
    backend: str | None = None,
) -> None:
    """Checks that a chain keeps the laws.

    Args:
        tx: a chain, or a transformation that is checked as a chain of one; its exchange is given
            no group.
        ranks: the world sizes to check; a fragment is checked on one rank.
        steps: how many steps to take.
        seed: what the gradients are drawn from.
        params: a pytree of floating-point CPU tensors; by default one with several shapes and
            dtypes and a normalisation layer named ``bn``.
        laws: the names of the laws to check, of `LAWS`; by default all.
        backend: ``"torch"`` runs it on tensors, ranks are threads; ``"jax"`` on JAX arrays, ranks
            are rows of one compiled program, so that a gradient is None on all of them or on none.
            By default ``"jax"`` for a chain with ``allreduce(axis_name=...)``, else ``"torch"``.

    Raises:
        LawViolation: naming the first law that is broken, and the figures.
        ValueError: for an unknown law or backend; if the exchange is not one of that backend; for
            an FP64 leaf where JAX has none; for a chain with two exchanges.
        ImportError: if the backend needs jax and it is not installed.

    Example:
        >>> import gradtx as gx
        >>> check_laws(gx.chain(gx.unscale(), gx.topk(0.1), gx.ef(), gx.allreduce()))
        >>> check_laws(gx.chain(gx.topk(0.1), gx.allreduce(), check=False), laws=["L2"])
        Traceback (most recent call last):
        ...
        gradtx.testing.laws.LawViolation: L2: ...
        >>> check_laws(gx.chain(gx.sign(), gx.ef(), gx.allreduce(axis_name="data")), ranks=(2,))
    """
    unknown = [law for law in laws or () if law not in LAWS]
    if unknown:
        raise ValueError(f"unknown laws {unknown}: expected some of {', '.join(LAWS)}")
    for law in LAWS if laws is None else laws:
        LAWS[law](tx, ranks=ranks, steps=steps, seed=seed, params=params, backend=backend)


def _decoded(updates: PyTree) -> Leaves:
    return decode_leaves(flatten(updates)[0])


def _zeros(case: Case) -> Leaves:
    likes = flatten(case.params)[0]
    return [None if x is None else torch.zeros(x.shape, dtype=torch.float64) for x in likes]


def _added(total: Leaves, more: Leaves) -> Leaves:
    return [a if b is None else a + b.double() for a, b in zip(total, more, strict=True)]


def _reduced(case: Case, trees: Sequence[PyTree], size: int | None = None) -> Leaves:
    """The mean over ranks in FP64, or the sum if that is what the exchange gives.

    `size` is how many ranks there are, by default as many as trees.
    """
    total = _zeros(case)
    for tree in trees:
        total = _added(total, flatten(tree)[0])
    divisor = 1 if "sum" in case.setting("op", "mean") else size or len(trees)
    return [None if leaf is None else leaf / divisor for leaf in total]


def _magnitudes(case: Case, trees: Sequence[PyTree]) -> Leaves:
    """The sum over ranks of the magnitudes: what rounding errors are relative to."""
    total = _zeros(case)
    for tree in trees:
        total = _added(total, [None if x is None else x.abs() for x in flatten(tree)[0]])
    return total


def _residual(case: Case, state: Any) -> Leaves:
    total = _zeros(case)
    for residual in _fields(state, "residual"):
        total = _added(total, flatten(residual)[0])
    return total


def _fields(state: Any, name: str) -> Iterator[Any]:
    if name in getattr(state, "_fields", ()):
        yield getattr(state, name)
    elif isinstance(state, (tuple, list, dict)):
        for part in state.values() if isinstance(state, dict) else state:
            yield from _fields(part, name)


def _same_sums(
    case: Case, law: str, where: str, got: Leaves, expected: Leaves, scale: Leaves
) -> None:
    paths, likes, _ = flatten_with_paths(case.params)
    got, expected = _added(_zeros(case), got), _added(_zeros(case), expected)
    for path, like, a, b, size in zip(paths, likes, got, expected, scale, strict=True):
        if like is None or not like.numel():
            continue
        epsilon = torch.finfo(torch.float64 if like.dtype == torch.float64 else torch.float32).eps
        tolerance = _ULPS * epsilon * float(size.max())
        wrong = ~((a - b).abs() <= tolerance).reshape(-1)
        if bool(wrong.any()):
            i = int(wrong.nonzero()[0])
            raise LawViolation(
                law,
                f"{where} is {float(a.reshape(-1)[i]):.9g} at {path!r}, value {i}, "
                f"expected {float(b.reshape(-1)[i]):.9g} within {tolerance:.2g}",
            )


def _tensors(tree: Any) -> tuple[list[str], Leaves, Any]:
    paths, leaves, treespec = optree.tree_flatten_with_path(
        tree, none_is_leaf=True, namespace=NAMESPACE
    )
    return [".".join(map(str, path)) for path in paths], list(leaves), treespec


def _bits(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    flat = leaf.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format)
    data = bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""
    return leaf.dtype, leaf.shape, data


def _same_bits(law: str, where: str, old: Any, new: Any) -> None:
    paths, before, old_spec = _tensors(old)
    _, after, new_spec = _tensors(new)
    if old_spec != new_spec:
        raise LawViolation(law, f"{where} has the structure {new_spec}, expected {old_spec}")
    for path, a, b in zip(paths, before, after, strict=True):
        if _bits(a) != _bits(b):
            raise LawViolation(law, f"{where} is {b} at {path!r}, expected {a}, bit for bit")


def _without_counters(state: Any) -> Leaves:
    def is_counter(leaf: Any) -> bool:
        if isinstance(leaf, torch.Tensor):
            return not leaf.ndim and not leaf.is_floating_point()
        return isinstance(leaf, (bool, int))

    return [leaf for leaf in _tensors(state)[1] if not is_counter(leaf)]


def _check_scale(where: str, before: Any, after: Any) -> None:
    old, new = before.loss_scale, after.loss_scale
    if old is not None and not 0 < float(new) <= float(old):
        raise LawViolation("L5", f"{where}: the loss scale is {new}, {old} before")


def _is_finite(case: Case, step: Step) -> bool:
    """Whether the dense exchange of a step is finite."""
    out = case.trace(case.dense, case.params, [step], len(step.gradients))[0].outputs[0]
    return all(bool(x.isfinite().all()) for x in _decoded(out) if x is not None)


def _is_taken(out: PyTree) -> bool:
    """Whether a result is finite and not zero."""
    values = [x for x in _decoded(out) if x is not None]
    return all(bool(x.isfinite().all()) for x in values) and any(bool(x.any()) for x in values)


def _all_zeros(where: str, updates: PyTree) -> None:
    for path, leaf in zip(flatten_with_paths(updates)[0], _decoded(updates), strict=True):
        if leaf is not None and not bool((leaf == 0).all()):
            raise LawViolation("L5", f"{where}: the result is {leaf} at {path!r}, expected zeros")


def _signature(state: Any) -> Any:
    _, leaves, treespec = _tensors(state)
    kinds = [(x.dtype, tuple(x.shape), x.device) if hasattr(x, "dtype") else x for x in leaves]
    return kinds, treespec


def _check_shapes(case: Case, where: str, updates: PyTree, step: Step) -> None:
    paths, likes, expected = flatten_with_paths(case.params)
    leaves, treespec = flatten(updates)
    if treespec != expected:
        raise LawViolation("L8", f"{where}: the result is {treespec}, the gradients {expected}")
    decoded = decode_leaves(leaves)
    given = [flatten(tree)[0] for tree in step.gradients]
    for i, (path, leaf, like) in enumerate(zip(paths, leaves, likes, strict=True)):
        absent = all(tree[i] is None for tree in given)
        got, want = _kind(decoded[i]), None if absent else _kind(like)
        if case.backend == "jax" and case.holds_back and want is None:
            want = _kind(like)
        if isinstance(leaf, Payload):
            if case.exchange is not None:
                raise LawViolation("L8", f"{where}: leaf {path!r} comes out compressed: {leaf}")
            want = (_decoded_dtype(leaf, like), tuple(like.shape), like.device)
        if got != want:
            raise LawViolation("L8", f"{where}: leaf {path!r} is {got}, expected {want}")


def _decoded_dtype(payload: Payload, like: torch.Tensor) -> torch.dtype:
    """FP64 if an FP64 leaf is in the payload: where several are joined, for all of them."""
    joined = isinstance(payload, (Joined, Member))
    name = payload.dtype if joined else accumulation_dtype(str(like.dtype).removeprefix("torch."))
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _kind(leaf: Any) -> Any:
    return None if leaf is None else (leaf.dtype, tuple(leaf.shape), leaf.device)


def _nbytes(leaves: Leaves) -> int:
    """In FP32, FP64 for FP64 leaves."""
    return sum(x.numel() * (8 if x.dtype == torch.float64 else 4) for x in leaves if x is not None)


def _ring(params: PyTree, size: int) -> tuple[int, int]:
    """What a dense ring all-reduce takes, and what flags may add.

    Flags are summed exactly in FP32: two numbers, and one for as many leaves as it has digits to
    the base of the number of ranks plus one. They may ride in FP64.
    """
    leaves = flatten(params)[0]
    digits = int(24 / math.log2(size + 1))
    numbers = 2 + -(-len(leaves) // digits)
    copies = 2 * (size - 1)
    return copies * _nbytes(leaves) // size, copies * 8 * numbers // size + 1


def _uncompressed(case: Case) -> Chain:
    """The chain without compressors and all that is for them."""
    plain = [part for part in case.parts if not any(stage.lossy for stage in part.stages)]
    return Chain([p for p in plain if p.stage.kind not in (Kind.FEEDBACK, Kind.FILTER)])


def _ought_to_pay(case: Case, params: PyTree, size: int) -> bool:
    """Whether what the compressors give is small enough; always, if they come too late."""
    if not any(stage.lossy for stage in case.local.stages):
        return True
    leaves = flatten(case.measure(case.local, params, 1).outputs)[0]
    compressed = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Payload)]
    sent = sum((2 if leaves[i].grain else size) * _nominal(leaves[i]) for i in compressed)
    dense: int = sum(x.numel() * x.itemsize for x in (flatten(params)[0][i] for i in compressed))
    return sent < 1.9 * dense


def _nominal(payload: Payload) -> int:
    """The bytes of a payload, at 2 bytes an index."""
    arrays = [x for x in _tensors(payload)[1] if isinstance(x, torch.Tensor)]
    positions = (torch.int32, torch.int64)
    return sum(x.numel() * (2 if x.dtype in positions else x.itemsize) for x in arrays)
