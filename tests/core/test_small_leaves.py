"""Many small leaves are compressed at once; what comes out is as if each were on its own."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradtx as gx
from gradtx.core import combinators
from gradtx.core.payload import Joined
from gradtx.core.transformation import Context
from gradtx.core.tree import layout_of
from gradtx.testing import check_laws, run_ranks

RATIO = 0.1


def chosen(flat):
    """What top-k keeps of an array, zeros elsewhere."""
    k = max(1, round(RATIO * flat.size))
    kept = np.sort(np.argsort(-np.abs(flat), kind="stable")[:k])
    out = np.zeros_like(flat)
    out[kept] = flat[kept]
    return out


def expected(gradients, steps):
    """The mean over ranks of what each rank sends in each step, by error feedback in NumPy."""
    residuals, results = [{} for _ in gradients[0]], []
    for step in range(steps):
        result = {}
        for rank, grads in enumerate(gradients[step]):
            for name, grad in grads.items():
                if grad is None:
                    continue
                whole = grad.numpy().reshape(-1) + residuals[rank].get(name, np.float32(0))
                sent = chosen(whole)
                residuals[rank][name] = whole - sent
                result[name] = result.get(name, np.float32(0)) + sent
        size = np.float32(len(gradients[step]))
        results.append({name: total / size for name, total in result.items()})
    return results


@settings(max_examples=30)
@given(
    sizes=st.lists(st.sampled_from([1, 2, 5, 30, 31, 64, 500]), min_size=16, max_size=40),
    ranks=st.integers(1, 3),
    seed=st.integers(0, 1000),
    ties=st.booleans(),
    absent=st.booleans(),
)
def test_result_is_that_of_each_leaf_on_its_own(sizes, ranks, seed, ties, absent):
    generator = torch.Generator().manual_seed(seed)

    def grad(size):
        values = torch.randn(size, generator=generator)
        return values.round() if ties else values

    steps = 3
    gradients = [
        [
            {
                f"{i:02}": None if absent and rank == 0 and i % 5 == step else grad(size)
                for i, size in enumerate(sizes)
            }
            for rank in range(ranks)
        ]
        for step in range(steps)
    ]
    # A leaf that is large, and one that is empty.
    for grads in (x for step in gradients for x in step):
        grads["large"] = grad(5000)
        grads["none"] = torch.zeros(0, 3)
    tx = gx.chain(gx.topk(RATIO), gx.ef(), gx.allreduce(algorithm="gather"))

    def run(rank):
        state = tx.init(
            {k: torch.zeros(n) for k, n in zip(names(sizes), sizes, strict=True)}
            | {"large": torch.zeros(5000), "none": torch.zeros(0, 3)}
        )
        out = []
        for step in range(steps):
            updates, state = tx.update(gradients[step][rank], state)
            out.append(updates)
        return out

    for found in run_ranks(ranks, run):
        for updates, results in zip(found, expected(gradients, steps), strict=True):
            for name, result in results.items():
                assert np.array_equal(updates[name].reshape(-1).numpy(), result), name


def names(sizes):
    return [f"{i:02}" for i in range(len(sizes))]


def test_shapes_and_dtypes_stay():
    shapes = [(), (3,), (2, 3), (1, 1, 4), (7,)] * 4
    params = {
        f"{i:02}": torch.randn(shape, dtype=torch.bfloat16 if i % 2 else torch.float32)
        for i, shape in enumerate(shapes)
    }
    params["wide"] = torch.randn(4, dtype=torch.float64)
    tx = gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce())
    state = tx.init(params)
    updates, state = tx.update(params, state)
    for name, param in params.items():
        assert (updates[name].shape, updates[name].dtype) == (param.shape, param.dtype)
    residual = state.states[0].inner_states[0].residual
    for name, param in params.items():
        kind = torch.float64 if param.dtype == torch.float64 else torch.float32
        assert (residual[name].shape, residual[name].dtype) == (param.shape, kind)


def test_they_are_one_payload():
    params = {f"{i:02}": torch.randn(8, 8) for i in range(20)}
    feedback = gx.error_feedback(gx.topk(0.1))
    context = Context(layout_of(params), "", joins=True)
    payloads, _ = feedback.step(params, feedback.init(params), context=context)
    joined = payloads["00"]
    assert isinstance(joined, Joined)
    assert joined.payload.indices.numel() == 20 * round(0.1 * 64)


@pytest.mark.parametrize(
    ("chain", "joins"),
    [
        (gx.chain(gx.topk(0.1), gx.ef(), gx.allreduce()), True),
        (gx.chain(gx.accumulate(2), gx.topk(0.1), gx.ef(), gx.allreduce(), gx.scale(2.0)), True),
        (gx.chain(gx.topk(0.1), gx.ef(), gx.delayed(steps=1), gx.allreduce()), True),
        (
            gx.chain(gx.topk(0.1), gx.ef(), gx.cast("float16", feedback=False), gx.allreduce()),
            False,
        ),
        (gx.chain(gx.topk(0.1), gx.ef()), False),
    ],
    ids=str,
)
def test_they_are_joined_where_the_exchange_gets_them_as_they_are(chain, joins):
    assert chain.context(chain.init({"w": torch.zeros(2)})).joins is joins


@pytest.mark.parametrize(
    "last",
    [gx.topk(0.5, feedback=False), gx.cast("float16", feedback=False)],
    ids=str,
)
def test_what_follows_still_treats_each_leaf_on_its_own(last):
    tx = gx.chain(gx.topk(0.5), gx.ef(), last, gx.allreduce(algorithm="gather"))
    # Of magnitudes so far apart that none of the last leaf's would be left beside the first's.
    gradients = {f"{i:02}": torch.arange(1.0, 5) * 10.0 ** (-i / 2) for i in range(24)}
    together, _ = tx.update(gradients, tx.init(gradients))
    for name, gradient in gradients.items():
        alone = {name: gradient}
        updates, _ = tx.update(alone, tx.init(alone))
        assert torch.equal(together[name], updates[name]), name


@pytest.mark.parametrize(
    "chain",
    [
        gx.chain(gx.topk(0.3), gx.ef(), gx.allreduce()),
        gx.chain(gx.unscale(), gx.skip_bn(), gx.topk(0.3), gx.ef(), gx.allreduce()),
        gx.chain(gx.accumulate(2), gx.topk(0.3), gx.ef(), gx.allreduce(op="sum")),
        gx.chain(gx.topk(0.3), gx.ef(), gx.delayed(steps=1), gx.allreduce()),
        gx.chain(gx.topk(0.3), gx.ef(), gx.allreduce(algorithm="sharded", density=0.2)),
    ],
    ids=str,
)
def test_laws_hold_where_even_two_leaves_are_many(chain, monkeypatch):
    monkeypatch.setattr(combinators, "_MANY", 2)
    check_laws(chain)


def test_a_pipeline_gives_what_the_function_gives():
    shapes = [(4,), (3, 5), (64,)] * 8
    gradients = [torch.randn(shape) for shape in shapes]
    tx = gx.chain(gx.unscale(), gx.topk(0.1), gx.ef(), gx.allreduce())

    def pipeline(rank):
        params = {str(i): torch.zeros(shape, requires_grad=True) for i, shape in enumerate(shapes)}
        pipe = gx.Pipeline(tx, params)
        for _ in range(3):
            for param, grad in zip(params.values(), gradients, strict=True):
                param.grad = 4 * grad * (rank + 1)
            pipe.sync(loss_scale=4.0)
        return [param.grad for param in params.values()]

    def function(rank):
        grads = {str(i): 4 * grad * (rank + 1) for i, grad in enumerate(gradients)}
        state = tx.init(grads)
        for _ in range(3):
            updates, state = tx.update(grads, state, loss_scale=4.0)
        return list(updates.values())

    for found, wanted in zip(run_ranks(2, pipeline), run_ranks(2, function), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
        assert sum(int(x.count_nonzero()) for x in found) <= 2 * sum(
            max(1, round(0.1 * math.prod(shape))) for shape in shapes
        )


@pytest.mark.parametrize("scale", [1, 3.0, 1024.0])
@pytest.mark.parametrize("last", [(), (gx.cast("float16"),)])
def test_feedback_divides_as_unscale_alone_does(scale, last):
    generator = torch.Generator().manual_seed(0)
    shapes = {"large": (300, 300), "half": (20, 3), **{f"{i:02}": (7,) for i in range(20)}}
    kinds = {name: torch.float16 if name == "half" else torch.float32 for name in shapes}
    plain = gx.chain(gx.topk(0.1), *last, gx.ef(), gx.allreduce())
    tx, unscale = gx.chain(gx.unscale(), *plain.transformations), gx.unscale()
    params = {name: torch.zeros(shape, dtype=kinds[name]) for name, shape in shapes.items()}
    states = [tx.init(params), plain.init(params)]
    for _ in range(3):
        grads = {k: torch.randn(s, generator=generator).to(kinds[k]) for k, s in shapes.items()}
        found, states[0] = tx.update(grads, states[0], loss_scale=scale)
        wide = {name: grad.float() for name, grad in grads.items()}
        divided, _ = unscale.update(wide, unscale.init(wide), loss_scale=scale)
        expected, states[1] = plain.update(divided, states[1])
        for name, value in found.items():
            assert torch.equal(value, expected[name].to(kinds[name]))
            assert torch.equal(states[0].residual[name], states[1].residual[name])
