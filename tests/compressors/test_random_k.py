"""`random_k`: random places that all ranks share."""

import math
import re

import pytest
import torch

import gradtx as gx
from gradtx.exchange.group import find_group
from gradtx.testing import check_laws, run_ranks
from gradtx.wire import message_nbytes

NAN = float("nan")


def payloads(tx, grads, steps, state=None):
    """The payloads of some steps, and the state after them."""
    state, out = tx.init(grads) if state is None else state, []
    for _ in range(steps):
        updates, state = tx.update(grads, state)
        out.append(updates)
    return out, state


def places(n, ratio, steps, **options):
    grads = {"w": torch.zeros(n)}
    tx = gx.random_k(ratio, feedback=False, **options)
    return [updates["w"].indices.tolist() for updates in payloads(tx, grads, steps)[0]]


def normal(n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("n", [1, 2, 7, 500, 70_000])
@pytest.mark.parametrize("ratio", [1e-9, 0.01, 0.5, 1.0])
def test_places_are_as_many_as_asked_ascending_and_none_twice(n, ratio):
    for chosen in places(n, ratio, 2):
        assert len(chosen) == max(1, round(ratio * n))
        assert chosen == sorted(set(chosen) & set(range(n)))


def test_values_are_those_at_the_places():
    leaf = normal(40)
    (updates,), _ = payloads(gx.random_k(0.25, feedback=False), [leaf], 1)
    assert torch.equal(updates[0].values, leaf[updates[0].indices])
    assert torch.equal(updates[0].decode()[updates[0].indices], updates[0].values)
    assert updates[0].decode().count_nonzero() == 10


def test_global_generator_is_neither_read_nor_moved():
    torch.manual_seed(1)
    before, one = torch.get_rng_state(), places(100, 0.1, 3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert places(100, 0.1, 3) == one


def test_every_step_has_its_own_places():
    drawn = places(1000, 0.1, 20)
    assert len({tuple(chosen) for chosen in drawn}) == 20


def test_every_seed_has_its_own_places():
    assert len({tuple(places(1000, 0.1, 1, seed=seed)[0]) for seed in range(20)}) == 20


def test_leaves_with_the_same_letters_in_their_names_have_their_own_places():
    grads = {name: torch.zeros(1000) for name in ("ab", "ba", "a.b", "b.a", "aab", "aba")}
    (updates,), _ = payloads(gx.random_k(0.1, feedback=False), grads, 1)
    assert len({tuple(leaf.indices.tolist()) for leaf in updates.values()}) == 6


def test_places_are_the_same_on_all_ranks():
    tx = gx.chain(gx.random_k(0.3, feedback=False), gx.allreduce())

    def rank(i):
        grads = {"w": torch.full((50,), 1.0 + i)}
        return payloads(tx, grads, 3)[0]

    one, other = run_ranks(2, rank)
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a["w"], b["w"])
        assert sorted(a["w"].tolist()) == [0.0] * 35 + [1.5] * 15


def test_every_place_is_as_likely():
    # 2000 draws of 5 of 20. The counts have, draw by draw, variance p (1 - p) and covariance
    # -p (1 - p) / 19, so this sum is chi-squared with 19 degrees of freedom: over 67.5 once in four
    # million runs with independent seeds.
    draws, p = 2000, 0.25
    counts = torch.zeros(20)
    for chosen in places(20, p, draws, seed=7):
        counts[chosen] += 1
    statistic = ((counts - draws * p).square().sum() * 19 / 20 / (draws * p * (1 - p))).item()
    assert statistic < 67.5


def test_unbiased_is_right_on_average():
    # All 40 means are within six standard errors of the value, but once in ten million runs.
    leaf, draws, ratio = normal(40), 2000, 0.25
    tx = gx.random_k(ratio, unbiased=True, seed=3)
    total = sum(updates[0].decode() for updates in payloads(tx, [leaf], draws)[0])
    error = leaf.abs() * math.sqrt((1 / ratio - 1) / draws)
    assert ((total / draws - leaf).abs() <= 6 * error + 1e-6).all()


def test_unbiased_has_the_variance_stated():
    # The mean squared error of 2000 draws is within 5 % of (n / k - 1) |x|^2; its own deviation is
    # 0.5 % here, so that a false alarm is out of the question.
    leaf, draws = normal(200), 2000
    tx = gx.random_k(0.25, unbiased=True)
    squares = [
        (updates[0].decode() - leaf).square().sum().item()
        for updates in payloads(tx, [leaf], draws)[0]
    ]
    assert sum(squares) / draws == pytest.approx(3 * leaf.square().sum().item(), rel=0.05)


@pytest.mark.parametrize("n", [1, 3, 50])
def test_unbiased_multiplies_by_n_over_k(n):
    (updates,), _ = payloads(gx.random_k(0.3, unbiased=True), [torch.ones(n)], 1)
    k = max(1, round(0.3 * n))
    assert updates[0].values.tolist() == pytest.approx([n / k] * k)


@pytest.mark.parametrize("seed", range(20))
def test_biased_loses_just_what_it_does_not_send(seed):
    leaf = normal(30, seed).double()
    (updates,), _ = payloads(gx.random_k(0.2, seed=seed, feedback=False), [leaf], 1)
    kept = updates[0].decode()
    lost = (leaf - kept).square().sum()
    assert lost.item() == pytest.approx((leaf.square().sum() - kept.square().sum()).item())


def test_feedback_drains():
    grads, steps = {"w": normal(100)}, 400
    tx = gx.chain(gx.random_k(0.1), gx.ef(), gx.allreduce())
    outputs, _ = payloads(tx, grads, steps)
    mean = sum(updates["w"] for updates in outputs) / steps
    assert torch.allclose(mean, grads["w"], atol=0.25 * grads["w"].abs().max().item())
    assert (mean - grads["w"]).norm() < 0.05 * grads["w"].norm()


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "tx",
    [
        gx.chain(gx.unscale(), gx.random_k(0.3), gx.ef(), gx.allreduce()),
        gx.chain(gx.random_k(0.3, unbiased=True), gx.allreduce(op="sum")),
        gx.chain(gx.skip_bn(), gx.random_k(0.3), gx.ef()),
    ],
    ids=repr,
)
def test_laws(tx, seed):
    check_laws(tx, seed=seed, steps=3, ranks=(1, 3))


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ((gx.random_k(0.1, unbiased=True), gx.ef()), "GX306"),
        ((gx.random_k(0.1),), "GX302"),
        ((gx.random_k(0.1, feedback=False), gx.ef()), "GX303"),
        ((gx.topk(0.5), gx.random_k(0.1), gx.ef()), "GX301"),
        ((gx.random_k(0.1), gx.topk(0.5), gx.ef()), "GX301"),
        ((gx.random_k(0.1), gx.sign(), gx.ef()), "GX301"),
        ((gx.random_k(0.1), gx.random_k(0.1), gx.ef()), "GX301"),
    ],
    ids=lambda value: value if isinstance(value, str) else repr(gx.chain(*value, check=False)),
)
def test_wrong_order_is_refused(parts, code):
    with pytest.raises(gx.ChainOrderError) as caught:
        gx.chain(*parts)
    assert [violation.code for violation in caught.value.violations] == [code]


@pytest.mark.parametrize(
    "parts",
    [
        (gx.topk(0.5), gx.random_k(0.1)),
        (gx.random_k(0.1), gx.topk(0.5)),
        (gx.random_k(0.1), gx.sign()),
    ],
    ids=repr,
)
def test_form_that_is_refused_fails_unchecked(parts):
    tx = gx.chain(*parts, check=False)
    with pytest.raises(TypeError, match=r"takes dense leaves only|no values left to compress"):
        tx.update([torch.ones(8)], tx.init([torch.ones(8)]))


def test_residual_grows_without_bound_under_unbiased():
    grads = [normal(64)]
    tx = gx.chain(gx.random_k(0.05, unbiased=True), gx.ef(), check=False)
    _, state = payloads(tx, grads, 60)
    assert state.gate.inner_states[0].residual[0].norm() > 1e6 * grads[0].norm()


@pytest.mark.parametrize("size", [2, 3])
def test_no_index_is_sent(size):
    n, k = 4000, 40
    tx = gx.chain(gx.random_k(0.01), gx.ef(), gx.allreduce())

    def rank(i):
        group, grads = find_group(), [normal(n, i)]
        _, state = payloads(tx, grads, 1)
        before = group.sent
        payloads(tx, grads, 1, state)
        return group.sent - before

    flags = 5
    assert set(run_ranks(size, rank)) == {2 * (size - 1) * 4 * (k + flags) // size}


def test_resumed_state_draws_on():
    tx = gx.chain(gx.random_k(0.1, unbiased=True), gx.allreduce())
    grads = {"w": normal(200)}
    _, state = payloads(tx, grads, 3)
    one, _ = payloads(tx, grads, 3, state)
    other, _ = payloads(tx, grads, 6)
    assert all(torch.equal(a["w"], b["w"]) for a, b in zip(one, other[3:], strict=True))


def test_state_goes_through_a_checkpoint():
    tx = gx.chain(gx.random_k(0.1), gx.ef(), gx.allreduce())
    parameters = {"w": torch.nn.Parameter(torch.zeros(100))}
    one, other = gx.Pipeline(tx, parameters), gx.Pipeline(tx, parameters)
    parameters["w"].grad = normal(100)
    one.sync()
    other.load_state_dict(one.state_dict())
    results = []
    for pipeline in (one, other):
        parameters["w"].grad = normal(100, 1)
        pipeline.sync()
        results.append(parameters["w"].grad.clone())
    assert torch.equal(*results)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (), (1,)])
def test_tiny_leaf(shape):
    tx = gx.chain(gx.random_k(0.5), gx.ef(), gx.allreduce())
    (updates,), _ = payloads(tx, [torch.ones(shape)], 1)
    assert torch.equal(updates[0], torch.ones(shape))


def test_leaf_without_a_gradient_keeps_its_residual():
    tx = gx.chain(gx.random_k(0.5), gx.ef(), gx.allreduce())
    _, state = payloads(tx, {"a": torch.ones(8), "b": torch.ones(8)}, 1)
    updates, after = tx.update({"a": None, "b": torch.ones(8)}, state)
    assert updates["a"] is None
    residuals = [s.gate.inner_states[0].residual["a"] for s in (state, after)]
    assert torch.equal(*residuals)


def test_fp64_leaf_stays_fp64():
    leaf = torch.tensor([1 + 2.0**-50], dtype=torch.float64)
    tx = gx.chain(gx.random_k(1.0), gx.ef(), gx.allreduce())
    (updates,), _ = payloads(tx, [leaf], 1)
    assert torch.equal(updates[0], leaf)


def test_jax_draws_the_same_places():
    jnp = pytest.importorskip("jax.numpy")
    tx = gx.random_k(0.1, unbiased=True, seed=5)
    leaf = normal(300)
    ours, _ = payloads(tx, {"w": leaf}, 3)
    theirs, _ = payloads(tx, {"w": jnp.asarray(leaf.numpy())}, 3)
    for a, b in zip(ours, theirs, strict=True):
        assert a["w"].indices.tolist() == b["w"].indices.tolist()
        assert a["w"].values.tolist() == pytest.approx(b["w"].values.tolist())


def test_jax_under_jit():
    jax = pytest.importorskip("jax")
    tx = gx.chain(gx.random_k(0.1), gx.ef())
    grads = {"w": jax.numpy.arange(50.0)}
    state = tx.init(grads)
    eager, eager_state = tx.update(grads, state)
    jitted, jitted_state = jax.jit(tx.update)(grads, state)
    assert eager["w"].indices.tolist() == jitted["w"].indices.tolist()
    pairs = zip(*map(jax.tree_util.tree_leaves, (eager_state, jitted_state)), strict=True)
    assert all((a == b).all() for a, b in pairs)


@pytest.mark.parametrize("ratio", [1, True, "0.1", None])
def test_ratio_that_is_no_float_is_refused(ratio):
    text = f"random_k(ratio={ratio!r}): expected a float over 0 and at most 1, such as 0.01"
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        gx.random_k(ratio)


@pytest.mark.parametrize("ratio", [0.0, -0.5, 1.5, NAN])
def test_ratio_out_of_range_is_refused(ratio):
    text = f"random_k(ratio={ratio!r}): expected a float over 0 and at most 1"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        gx.random_k(ratio)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"seed": -1}, ValueError, "random_k(seed=-1): expected a whole number of 0 or more"),
        ({"seed": 0.5}, TypeError, "random_k(seed=0.5): expected a whole number of 0 or more"),
        ({"unbiased": 1}, TypeError, "random_k(unbiased=1): expected True or False"),
        ({"feedback": None}, TypeError, "random_k(feedback=None): expected True or False"),
    ],
)
def test_wrong_argument_is_refused(options, error, text):
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        gx.random_k(0.5, **options)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_values_travel_without_an_index(dtype):
    tx = gx.chain(gx.random_k(0.01, values=dtype), gx.ef(), gx.allreduce())
    leaf = torch.randn(20_000, generator=torch.Generator().manual_seed(0))

    def rank(i):
        group, grads = find_group(), [leaf * (1 + i)]
        _, state = tx.update(grads, tx.init(grads))
        before = group.sent
        updates, after = tx.update(grads, state)
        return group.sent - before, updates[0], state, after

    (sent, first, _, _), (_, second, _, _) = run_ranks(2, rank)
    assert sent == message_nbytes(1, [2 * 200, 2])
    assert torch.equal(first, second)
    # The mean of two steps, but for rounding; of one where the first had sent the place too.
    chosen = first != 0
    assert 190 <= int(chosen.sum()) <= 200
    factor = first[chosen] / leaf[chosen]
    assert torch.minimum((factor - 1.5).abs(), (factor - 3.0).abs()).max() < 0.02


@pytest.mark.parametrize(
    "tx",
    [
        gx.chain(gx.unscale(), gx.random_k(0.2, values="float16"), gx.ef(), gx.allreduce()),
        gx.chain(gx.random_k(0.2, values="bfloat16"), gx.ef(), gx.allreduce(op="sum")),
        gx.chain(gx.random_k(0.2, values="float16"), gx.momentum_correction(0.5), gx.allreduce()),
    ],
    ids=repr,
)
def test_16_bit_values_keep_the_laws(tx):
    check_laws(tx, steps=3, ranks=(1, 2))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"values": "int8"}, "random_k(values='int8'): expected 'float32', 'float16', 'bfloat16'"),
        (
            {"values": "float16", "unbiased": True},
            "random_k(unbiased=True, values='float16'): round",
        ),
    ],
)
def test_wrong_values_are_refused(arguments, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        gx.random_k(0.1, **arguments)
