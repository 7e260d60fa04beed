"""`momentum_correction`: error feedback with the momentum inside."""

import math
import re

import pytest
import torch

import gradtx as gx
from gradtx.testing import check_laws, run_ranks

INF, NAN = float("inf"), float("nan")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def drawn(steps, shape=(6, 5), seed=0):
    return [{"w": normal(*shape, seed=100 * seed + step)} for step in range(steps)]


def run(tx, trees):
    """Outputs, decoded, and states."""
    state, outputs, states = tx.init(trees[0]), [], []
    for tree in trees:
        updates, state = tx.update(tree, state)
        leaf = updates["w"]
        shape = tree["w"].shape
        outputs.append(leaf if torch.is_tensor(leaf) else leaf.decode().reshape(shape))
        states.append(state)
    return outputs, states


def reference(trees, m, ratio, masking, clip=None, size=1):
    """Deep gradient compression, one value after the other; what is sent, u and v."""
    n = trees[0]["w"].numel()
    k, u, v, sent = max(1, round(ratio * n)), [0.0] * n, [0.0] * n, []
    for tree in trees:
        g = tree["w"].double().reshape(-1).tolist()
        norm = math.sqrt(sum(x * x for x in g))
        limit = math.inf if clip is None else clip / math.sqrt(size)
        factor = min(1.0, limit / norm) if norm else 1.0
        u = [m * a + factor * b for a, b in zip(u, g, strict=True)]
        v = [a + b for a, b in zip(v, u, strict=True)]
        chosen = sorted(range(n), key=lambda i: (-abs(v[i]), i))[:k]
        sent.append([v[i] if i in chosen else 0.0 for i in range(n)])
        for i in chosen:
            v[i] = 0.0
            u[i] = 0.0 if masking else u[i]
    return sent, u, v


@pytest.mark.parametrize("masking", [True, False])
@pytest.mark.parametrize("m", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("clip", [None, 2.0])
def test_it_is_deep_gradient_compression(m, masking, clip):
    trees = drawn(6)
    tx = gx.momentum_correction(m, gx.topk(0.1), masking=masking, clip=clip)
    outputs, states = run(tx, trees)
    sent, u, v = reference(trees, m, 0.1, masking, clip)
    for output, expected in zip(outputs, sent, strict=True):
        assert output.reshape(-1).tolist() == pytest.approx(expected, abs=1e-5)
    assert states[-1].velocity["w"].reshape(-1).tolist() == pytest.approx(u, abs=1e-5)
    assert states[-1].residual["w"].reshape(-1).tolist() == pytest.approx(v, abs=1e-5)


def test_stage_and_combinator_are_the_same():
    trees = drawn(4)
    stage = gx.chain(gx.topk(0.1), gx.momentum_correction(0.9, clip=1.0))
    combinator = gx.chain(gx.momentum_correction(0.9, gx.topk(0.1), clip=1.0))
    for one, other in zip(run(stage, trees)[0], run(combinator, trees)[0], strict=True):
        assert torch.equal(one, other)


def test_at_density_1_without_masking_it_is_momentum_sgd():
    trees, parameter = drawn(6), torch.nn.Parameter(torch.zeros(6, 5))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.9)
    tx = gx.chain(gx.topk(1.0), gx.momentum_correction(0.9, masking=False), gx.allreduce())
    for output, tree in zip(run(tx, trees)[0], trees, strict=True):
        before = parameter.detach().clone()
        parameter.grad = tree["w"].clone()
        optimizer.step()
        assert torch.allclose(before - parameter.detach(), output, atol=1e-5)


def test_at_density_1_with_masking_it_is_plain_sgd():
    trees = drawn(6)
    tx = gx.chain(gx.topk(1.0), gx.momentum_correction(0.9), gx.allreduce())
    assert all(torch.equal(a, b["w"]) for a, b in zip(run(tx, trees)[0], trees, strict=True))


def test_without_momentum_it_is_error_feedback():
    trees = drawn(5)
    one = gx.chain(gx.topk(0.1), gx.momentum_correction(0.0), gx.allreduce())
    other = gx.chain(gx.topk(0.1), gx.ef(), gx.allreduce())
    for a, b in zip(run(one, trees)[0], run(other, trees)[0], strict=True):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("compressor", [gx.topk(0.1), gx.sign(), gx.powersgd(1)], ids=repr)
@pytest.mark.parametrize("size", [1, 2])
def test_nothing_of_the_velocities_is_lost(compressor, size):
    # Without masking, what has been sent and the residuals are the sum of all velocities.
    m, steps = 0.9, 5
    tx = gx.chain(compressor, gx.momentum_correction(m, masking=False), gx.allreduce())
    trees = [drawn(steps, seed=i) for i in range(size)]
    results = run_ranks(size, lambda i: run(tx, trees[i]))
    total = torch.zeros(6, 5)
    for own in trees:
        velocity = torch.zeros(6, 5)
        for tree in own:
            velocity = m * velocity + tree["w"]
            total += velocity / size
    left = sum(states[-1].gate.inner_states[0].residual["w"] for _, states in results) / size
    sent = sum(results[0][0])
    assert torch.allclose(sent + left, total, atol=1e-4)


def test_feedback_drains():
    tree, steps, m = {"w": normal(6, 5)}, 300, 0.5
    tx = gx.chain(gx.topk(0.2), gx.momentum_correction(m, masking=False), gx.allreduce())
    mean = sum(run(tx, [tree] * steps)[0]) / steps
    assert (mean * (1 - m) - tree["w"]).norm() < 0.1 * tree["w"].norm()


@pytest.mark.parametrize("size", [1, 4])
def test_clip_is_divided_by_the_root_of_the_ranks(size):
    tree = {"w": torch.full((4,), 5.0)}
    tx = gx.chain(gx.topk(1.0), gx.momentum_correction(0.9, clip=2.0), gx.allreduce())
    result = run_ranks(size, lambda i: run(tx, [tree])[0][0])[0]
    assert result.norm().item() == pytest.approx(2.0 / math.sqrt(size))


def test_clip_is_over_all_leaves_together():
    tree = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    tx = gx.momentum_correction(0.9, gx.topk(1.0), clip=1.0)
    updates, _ = tx.update(tree, tx.init(tree))
    assert [updates[path].values.item() for path in "ab"] == pytest.approx([0.6, 0.8])


def test_gradient_within_the_clip_is_untouched():
    tree = {"w": torch.tensor([0.1, -0.3])}
    tx = gx.momentum_correction(0.9, gx.topk(1.0), clip=1.0)
    assert torch.equal(tx.update(tree, tx.init(tree))[0]["w"].values, tree["w"])


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_clip_has_no_overflow_nor_division_by_zero(scale):
    tree = {"w": torch.full((4,), scale)}
    tx = gx.momentum_correction(0.9, gx.topk(1.0), clip=1.0)
    values = tx.update(tree, tx.init(tree))[0]["w"].values
    assert values.tolist() == pytest.approx([min(scale, 0.5)] * 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_buffers_of_16_bit_leaves_are_fp32(dtype):
    tree = {"w": torch.full((4,), 1.0, dtype=dtype)}
    tx = gx.chain(gx.topk(0.25), gx.momentum_correction(0.9), gx.allreduce())
    updates, state = tx.update(tree, tx.init(tree))
    inner = state.gate.inner_states[0]
    assert inner.velocity["w"].dtype == inner.residual["w"].dtype == torch.float32
    assert updates["w"].dtype == dtype


def test_leaf_without_a_gradient_keeps_both_buffers():
    tx = gx.chain(gx.topk(0.1), gx.momentum_correction(0.9), gx.allreduce())
    tree = drawn(1)[0]
    _, state = tx.update(tree, tx.init(tree))
    updates, after = tx.update({"w": None}, state)
    assert updates["w"] is None
    one, other = (s.gate.inner_states[0] for s in (state, after))
    assert torch.equal(one.velocity["w"], other.velocity["w"])
    assert torch.equal(one.residual["w"], other.residual["w"])


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("compressor", [gx.topk(0.2), gx.powersgd(1)], ids=repr)
def test_bad_step_leaves_both_buffers_untouched(compressor, bad):
    tx = gx.chain(compressor, gx.momentum_correction(0.9, clip=1.0), gx.allreduce())

    def rank(i):
        tree = drawn(1, seed=i)[0]
        _, state = tx.update(tree, tx.init(tree))
        wrong = {"w": tree["w"].clone()}
        wrong["w"][0, 0] = bad if i else 1.0
        updates, after = tx.update(wrong, state)
        assert not updates["w"].any()
        one, other = (s.gate.inner_states[0] for s in (state, after))
        assert torch.equal(one.velocity["w"], other.velocity["w"])
        return torch.equal(one.residual["w"], other.residual["w"])

    assert all(run_ranks(2, rank))


@pytest.mark.parametrize("masking", [True, False])
def test_what_the_exchange_tells_late_is_taken_from_both_buffers(masking):
    tx = gx.chain(gx.powersgd(1), gx.momentum_correction(0.9, masking=masking), gx.allreduce())
    trees = [drawn(1, seed=i)[0] for i in range(2)]
    results = run_ranks(2, lambda i: run(tx, [trees[i]]))
    for (outputs, states), tree in zip(results, trees, strict=True):
        inner = states[0].gate.inner_states[0]
        assert torch.allclose(inner.residual["w"], tree["w"] - outputs[0], atol=1e-6)
        assert inner.velocity["w"].any() != masking


@pytest.mark.parametrize(
    "tx",
    [
        gx.chain(
            gx.unscale(), gx.skip_bn(), gx.topk(0.1), gx.momentum_correction(0.9), gx.allreduce()
        ),
        gx.chain(gx.topk(0.2), gx.sign(), gx.momentum_correction(0.5, clip=1.0), gx.allreduce()),
        gx.chain(gx.random_k(0.2), gx.momentum_correction(0.0)),
        gx.chain(
            gx.powersgd(1), gx.momentum_correction(0.9, masking=False), gx.allreduce(op="sum")
        ),
    ],
    ids=repr,
)
def test_laws(tx):
    check_laws(tx, steps=3, ranks=(1, 2))


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ((gx.topk(0.1), gx.momentum_correction(0.9), gx.ef()), "GX304"),
        ((gx.topk(0.1), gx.ef(), gx.momentum_correction(0.9)), "GX304"),
        ((gx.topk(0.1), gx.momentum_correction(0.9), gx.momentum_correction(0.9)), "GX304"),
        ((gx.momentum_correction(0.9),), "GX303"),
        ((gx.topk(0.1, feedback=False), gx.momentum_correction(0.9)), "GX303"),
        ((gx.random_k(0.1, unbiased=True), gx.momentum_correction(0.9)), "GX306"),
    ],
    ids=lambda value: value if isinstance(value, str) else repr(gx.chain(*value, check=False)),
)
def test_wrong_order_is_refused(parts, code):
    with pytest.raises(gx.ChainOrderError) as caught:
        gx.chain(*parts)
    assert code in [violation.code for violation in caught.value.violations]


def test_it_prints_as_the_call_that_makes_it():
    stage = gx.chain(gx.topk(0.001), gx.momentum_correction(0.9, masking=False, clip=1.0))
    text = "gx.chain(gx.topk(0.001), gx.momentum_correction(0.9, masking=False, clip=1.0))"
    assert repr(stage) == text
    combinator = gx.momentum_correction(0.9, gx.topk(0.001), clip=1.0)
    assert repr(combinator) == "gx.momentum_correction(0.9, gx.topk(0.001), clip=1.0)"


def test_alone_it_raises_with_what_to_write():
    text = re.escape("write chain(topk(0.01), momentum_correction(0.9)), or")
    with pytest.raises(TypeError, match=text):
        gx.momentum_correction(0.9).init({"w": torch.zeros(1)})


def test_resumed_state_goes_on_the_same():
    tx = gx.chain(gx.topk(0.1), gx.momentum_correction(0.9), gx.allreduce())
    parameters = {"w": torch.nn.Parameter(torch.zeros(6, 5))}
    one, other = gx.Pipeline(tx, parameters), gx.Pipeline(tx, parameters)

    def step(pipeline, seed):
        parameters["w"].grad = normal(6, 5, seed=seed)
        pipeline.sync()
        return parameters["w"].grad.clone()

    step(one, 0)
    other.load_state_dict(one.state_dict())
    assert torch.equal(step(one, 1), step(other, 1))


def test_jax_gives_the_same():
    jax = pytest.importorskip("jax")
    tx = gx.chain(gx.topk(0.2), gx.momentum_correction(0.9, clip=2.0))
    state, update, trees = None, jax.jit(tx.update), drawn(4)
    outputs, _ = run(tx, trees)
    for tree, expected in zip(trees, outputs, strict=True):
        theirs = {"w": jax.numpy.asarray(tree["w"].numpy())}
        state = tx.init(theirs) if state is None else state
        updates, state = update(theirs, state)
        decoded = torch.tensor(updates["w"].decode().tolist()).reshape(6, 5)
        assert torch.allclose(decoded, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: gx.momentum_correction(gx.topk(0.1)),
            TypeError,
            "momentum_correction(m=gx.topk(0.1)): expected a float of at least 0 and less than 1, "
            "such as 0.9",
        ),
        (
            lambda: gx.momentum_correction(1.0),
            ValueError,
            "momentum_correction(m=1.0): expected a float of at least 0 and less than 1",
        ),
        (
            lambda: gx.momentum_correction(NAN),
            ValueError,
            "momentum_correction(m=nan): expected a float of at least 0 and less than 1",
        ),
        (
            lambda: gx.momentum_correction(0.9, masking=1),
            TypeError,
            "momentum_correction(masking=1): expected True or False",
        ),
        (
            lambda: gx.momentum_correction(0.9, clip=0.0),
            ValueError,
            "momentum_correction(clip=0.0): expected a number over 0, or None",
        ),
        (
            lambda: gx.momentum_correction(0.9, clip="1"),
            TypeError,
            "momentum_correction(clip='1'): expected a number over 0, or None",
        ),
    ],
)
def test_wrong_argument_is_refused(call, error, text):
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        call()
