"""Every chain that is accepted keeps every law, and computes what the reference computes."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradtx as gx
from gradtx.core.combinators import ErrorFeedbackState, Filter
from gradtx.core.payload import Joined, Member, Payload, decode_leaves
from gradtx.core.rules import check
from gradtx.core.tree import flatten, flatten_with_paths, map_leaves, unflatten, widen
from gradtx.testing import check_laws
from gradtx.testing import strategies as gs
from gradtx.testing.trace import Step, default_params, trace
from reference import Reference, cast_to

STAGES = {
    "unscale": gx.unscale(),
    "skip_bn": gx.skip_bn(),
    "topk": gx.topk(0.3),
    "sign": gx.sign(),
    "ef": gx.ef(),
    "allreduce": gx.allreduce(),
}
ACCEPTED = [
    names
    for length in range(6)
    for names in itertools.product(STAGES, repeat=length)
    if not check([STAGES[name].stage for name in names])
]
SMALL = {"bn": torch.zeros(2), "half": torch.zeros(3, dtype=torch.float16), "w": torch.zeros(3, 4)}


def parts_of(names, algorithm="auto"):
    """The chain; only if told to gather does the exchange send leaves this small compressed."""
    exchange = {"allreduce": gx.allreduce(algorithm=algorithm)}
    return [{**STAGES, **exchange}[name] for name in names]


def as_numpy(tree):
    """Path to array; bfloat16 as float32."""
    paths, leaves, _ = flatten_with_paths(tree)
    return {
        path: None
        if leaf is None
        else (leaf.float() if leaf.dtype == torch.bfloat16 else leaf).numpy()
        for path, leaf in zip(paths, leaves, strict=True)
    }


def residual_of(state, params):
    """The residual in a state, path to array; nothing where there is no feedback."""
    if isinstance(state, ErrorFeedbackState):
        return as_numpy(state.residual)
    found = [residual_of(part, params) for part in state if isinstance(part, tuple)]
    return next((residual for residual in found if residual), {})


def specification(parts, params):
    """The chain for the reference."""
    leaves = dict(zip(*flatten_with_paths(params)[:2], strict=True))

    def stage(part):
        if isinstance(part, Filter):
            return "filter_params", {"keep": lambda path: part.predicate(path, leaves[path], None)}
        return part.name, part.hyperparameters

    return [stage(part) for part in parts]


def dtype_name(leaf):
    return str(leaf.dtype).removeprefix("torch.")


def assert_same(got, expected, *, where, dtype, exact, scale):
    assert (got is None) == (expected is None), where
    if expected is None:
        return
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape, where
    if exact:
        assert np.array_equal(got, expected, equal_nan=True), (where, got, expected)
        return
    info = torch.finfo(getattr(torch, dtype))
    rounding = info.eps * np.abs(expected, dtype=np.float64) if info.bits == 16 else 0.0
    with np.errstate(all="ignore"):
        error = np.abs(got.astype(np.float64) - expected.astype(np.float64))
    allowed = 1e-6 * scale + rounding + 4 * info.smallest_normal * info.eps
    same = (got == expected) | (np.isnan(got) & np.isnan(expected)) | (error <= allowed)
    assert same.all(), (where, got, expected, allowed)


def assert_agrees(parts, params, steps, size):
    """The library and the reference, step by step: outputs on every rank, and residuals.

    Selections, sums in rank order and residuals are to be equal. A mean magnitude is added up in
    another order: it may differ by 1e-6 of the largest value around, and by one rounding to the
    leaf's dtype. So may a 16-bit leaf that nothing compresses, which travels in 16 bits, where the
    loss scale is no power of two. The reference goes on from the library's residuals, so errors do
    not add up and both select among the same values.
    """
    traces = trace(gx.chain(*parts), params, steps, size)
    paths, leaves, _ = flatten_with_paths(params)
    known = {p: (i, x) for i, (p, x) in enumerate(zip(paths, leaves, strict=True)) if x is not None}
    shapes = {path: (tuple(leaf.shape), dtype_name(leaf)) for path, (_, leaf) in known.items()}
    reference = Reference(specification(parts, params), shapes, size)
    exact = "sign" not in [part.name for part in parts]
    for number, step in enumerate(steps):
        given_to_all = [as_numpy(tree) for tree in step.gradients]
        result = reference.step(given_to_all, step.loss_scale)
        rounded = size > 1 and math.frexp(step.loss_scale)[0] != 0.5
        for rank, one in enumerate(traces):
            outputs, treespec = flatten(one.outputs[number])
            decoded = as_numpy(unflatten(treespec, decode_leaves(outputs)))
            gradients = flatten(step.gradients[rank])[0]
            residuals = residual_of(one.states[number + 1], params)
            wanted, left = result.outputs[rank], reference.residuals[rank]
            scale = largest([*wanted.values(), *left.values()])
            for path, (i, leaf) in known.items():
                where, want = f"step {number}, rank {rank}, {path}", wanted[path]
                wide = "float64" if leaf.dtype == torch.float64 else "float32"
                given = leaf if gradients[i] is None else gradients[i]
                dtype = wide if isinstance(outputs[i], Payload) else dtype_name(given)
                if want is not None:
                    want = cast_to(want, dtype)
                elif isinstance(outputs[i], (Joined, Member)):
                    # It is in a payload with other leaves, which holds zeros for it.
                    want = np.zeros(leaf.shape, np.float32)
                around, strict = scale, exact
                if rounded and leaf.dtype in (torch.float16, torch.bfloat16):
                    sent = largest([tree[path] for tree in given_to_all]) / step.loss_scale
                    around, strict = scale + 1e6 * torch.finfo(leaf.dtype).eps * sent, False
                got = decoded[path]
                assert_same(got, want, where=where, dtype=dtype, exact=strict, scale=around)
                where += ", residual"
                got, want = residuals.get(path), left[path]
                assert_same(got, want, where=where, dtype=wide, exact=exact, scale=scale)
            gate = one.states[number + 1].gate
            assert bool(gate is not None and not gate.last_finite) == result.skipped, number
        reference.residuals = [
            {path: residual_of(one.states[number + 1], params).get(path) for path in known}
            for one in traces
        ]


def largest(arrays):
    """The largest magnitude in some arrays, in FP64."""
    magnitudes = [np.abs(x, dtype=np.float64).max() for x in arrays if x is not None and x.size]
    return max(magnitudes, default=0.0)


@st.composite
def runs(draw, parts, *, min_size=1, max_size=3):
    """Parameters, steps and a world size for a chain; the gradients at times in FP32 already."""
    params = draw(gs.params())
    exchanges = any(part.name == "allreduce" for part in parts)
    size = draw(gs.world_sizes(max_size, min_size=min_size)) if exchanges else 1
    unscales = any(part.name == "unscale" for part in parts)
    scales = gs.loss_scales() if unscales else st.just(1.0)
    steps = draw(gs.sequences(params, size, scales=scales, min_steps=2))
    if draw(st.booleans()):
        steps = [
            Step(tuple(map_leaves(widen, t) for t in step.gradients), step.loss_scale)
            for step in steps
        ]
    return params, steps, size


@pytest.mark.parametrize("names", ACCEPTED, ids=" ".join)
def test_accepted_chain_keeps_the_laws(names):
    check_laws(gx.chain(*parts_of(names)), params=SMALL, steps=3)


@pytest.mark.parametrize("names", [n for n in ACCEPTED if "allreduce" in n], ids=" ".join)
def test_accepted_chain_keeps_the_laws_where_payloads_are_gathered(names):
    tx = gx.chain(*parts_of(names, "gather"))
    check_laws(tx, params=SMALL, steps=3, ranks=(2, 3), laws=["L2", "L3", "L4", "L5", "L7", "L8"])


@pytest.mark.parametrize("names", [n for n in ACCEPTED if "unscale" in n], ids=" ".join)
def test_a_loss_scale_that_adjusts_itself_keeps_the_laws(names):
    own = gx.dynamic_loss_scale(8.0, growth_interval=2)
    parts = [own if part.name == "unscale" else part for part in parts_of(names)]
    check_laws(gx.chain(*parts), params=SMALL, steps=3)


@pytest.mark.parametrize("names", ACCEPTED, ids=" ".join)
@settings(max_examples=8)
@given(data=st.data())
def test_accepted_chain_agrees_with_the_reference(names, data):
    parts = parts_of(names, data.draw(st.sampled_from(["auto", "gather"])))
    assert_agrees(parts, *data.draw(runs(parts)))


@settings(max_examples=60)
@given(data=st.data(), ratio=gs.ratios(), op=st.sampled_from(["mean", "sum"]))
def test_leaves_compressed_together_agree_with_the_reference(data, ratio, op):
    """What a rank sends for a leaf that it lacks is not zero here, and must not count."""
    parts = [gx.topk(ratio, scope="global"), gx.sign(), gx.ef()]
    parts.append(gx.allreduce(op=op, algorithm="gather"))
    assert_agrees(parts, *data.draw(runs(parts, min_size=2)))


@settings(max_examples=200)
@given(data=st.data())
def test_longer_chain_agrees_with_the_reference(data):
    parts = data.draw(gs.transformations(valid=True, max_stages=8))
    assert_agrees(parts, *data.draw(runs(parts, max_size=4)))


@settings(max_examples=20)
@given(
    tx=gs.chains(valid=True, max_stages=8),
    params=gs.params(),
    seed=st.integers(0, 100),
    ranks=st.sampled_from([(1,), (2,), (3,), (4,)]),
)
def test_longer_chain_keeps_the_laws(tx, params, seed, ranks):
    laws = ["L0", "L1", "L2", "L3", "L4", "L5", "L7", "L8"]
    check_laws(tx, params=params, seed=seed, ranks=ranks, steps=3, laws=laws)


@settings(max_examples=20)
@given(
    tx=gs.chains(valid=True, max_stages=8, dense=True),
    params=gs.params().map(lambda tree: map_leaves(lambda leaf: leaf + 0.75, tree)),
    seed=st.integers(0, 100),
    ranks=st.sampled_from([(1,), (2,), (3,)]),
)
def test_longer_chain_with_clips_scales_and_weight_decay_keeps_the_laws(tx, params, seed, ranks):
    laws = ["L0", "L1", "L2", "L3", "L4", "L5", "L7", "L8", "L9"]
    check_laws(tx, params=params, seed=seed, ranks=ranks, steps=3, laws=laws)


@settings(max_examples=20)
@given(tx=gs.chains(valid=True, exchange=True, max_stages=6), ranks=st.sampled_from([2, 3, 4]))
def test_longer_chain_pays(tx, ranks):
    check_laws(tx, ranks=(ranks,), laws=["L10"], params={"bn": torch.zeros(2), "w": torch.zeros(9)})


class Hide:
    """Takes infinities and NaNs out of the gradients: then only the flags tell the other ranks."""

    def init(self, params):
        return ()

    def update(self, updates, state, params=None):
        return map_leaves(lambda leaf: leaf.nan_to_num(0.0, 0.0, 0.0), updates), state


hide = gx.declare(Hide(), name="hide", stateful=False, needs_reduced=False)


@pytest.mark.parametrize(
    "tx",
    [
        gx.chain(gx.topk(0.5), gx.ef(), gx.sign(feedback=False), gx.allreduce()),
        gx.chain(gx.error_feedback(gx.topk(0.5), gx.sign()), gx.allreduce()),
        gx.chain(
            gx.unscale(), gx.masked(gx.error_feedback(gx.sign()), gx.is_matrix), gx.allreduce()
        ),
        gx.chain(gx.apply_if_finite(gx.error_feedback(gx.topk(0.5)), gx.allreduce())),
        gx.chain(gx.unscale(), hide, gx.topk(0.5), gx.ef(), gx.allreduce()),
        gx.chain(gx.unscale(), hide, gx.allreduce()),
        gx.allreduce(),
        gx.topk(0.5, feedback=False),
        gx.error_feedback(gx.topk(0.5)),
    ],
    ids=repr,
)
def test_other_ways_to_write_a_chain_keep_the_laws(tx):
    check_laws(tx, params={"empty": torch.zeros(0), **SMALL}, steps=3)


def test_the_mission_chain_keeps_the_laws_on_the_default_parameters():
    tx = gx.chain(*parts_of(["unscale", "skip_bn", "topk", "ef", "allreduce"]))
    check_laws(tx, params=default_params(), ranks=(1, 2, 3, 4))


def test_the_mission_chain_keeps_the_laws_on_a_mesh():
    pytest.importorskip("jax")
    from meshes import over_axis

    tx = gx.chain(*parts_of(["unscale", "skip_bn", "topk", "ef", "allreduce"]))
    check_laws(over_axis(tx), ranks=(2, 3), steps=3)


def test_nothing_is_lost_where_a_leaf_of_several_compressed_together_is_absent():
    tx = gx.chain(gx.topk(1.0, scope="global"), gx.sign(), gx.ef())
    check_laws(tx, params={"a": torch.zeros(2), "b": torch.zeros(2)}, laws=["L2"])
