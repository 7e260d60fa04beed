"""The exchange over an axis of a JAX mesh."""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradtx as gx
from gradtx.testing import check_laws, run_ranks

jax = pytest.importorskip("jax")
jnp = jax.numpy
optax = pytest.importorskip("optax")

from gradtx.bench.hlo import collective_bytes  # noqa: E402
from gradtx.exchange.arrays import BLOCK, Packing, Said  # noqa: E402
from gradtx.exchange.mesh import MeshAxis  # noqa: E402
from meshes import OnMesh, P, laid_out, mesh_of  # noqa: E402

INF, NAN = np.inf, np.nan
SHAPES = {"bn1": {"weight": (5,)}, "s": (), "w": (30, 70)}
SHARED = {
    "cast": [gx.cast("bfloat16", feedback=False)],
    "cast fp8": [gx.cast("float8_e4m3fn", feedback=False)],
    "quantize 8": [gx.quantize(8)],
}
SOME = ["dense", "topk", "sign", "powersgd", "momentum"]

# What stands between unscale() and the exchange.
PARTS = {
    "dense": [],
    "topk": [gx.topk(0.05), gx.ef()],
    "topk fp16": [gx.skip_bn(), gx.topk(0.05, values="float16"), gx.ef()],
    "global": [gx.topk(0.02, scope="global"), gx.ef()],
    "threshold": [gx.threshold(1.5), gx.ef()],
    "random_k": [gx.random_k(0.1), gx.ef()],
    "random_k fp16": [gx.random_k(0.1, values="float16"), gx.ef()],
    "unbiased random_k": [gx.random_k(0.1, unbiased=True)],
    "sign": [gx.skip_bn(), gx.sign(), gx.ef()],
    "topk, sign": [gx.topk(0.1), gx.sign(), gx.ef()],
    "vote": [gx.sign(majority_vote=True, feedback=False)],
    "cast": [gx.cast("float16"), gx.ef()],
    "cast fp8": [gx.cast("float8_e4m3fn"), gx.ef()],
    "quantize": [gx.quantize(4, block=64)],
    "quantize 8": [gx.quantize(8), gx.ef()],
    "ternary": [gx.ternary()],
    "natural": [gx.natural()],
    "powersgd": [gx.powersgd(2), gx.ef()],
    "momentum": [gx.topk(0.05), gx.momentum_correction(0.9, clip=1.0)],
    "schedule": [gx.topk(gx.warmup_density([0.25, 0.05], 1)), gx.ef()],
}


def is_shape(node):
    return isinstance(node, tuple)


def zeros():
    return jax.tree.map(jnp.zeros, SHAPES, is_leaf=is_shape)


def gradients(seed, size, steps):
    """For each step, a tree of NumPy arrays ``[size, ...]``."""
    rng = np.random.default_rng(seed)

    def draw(shape):
        return rng.normal(size=(size, *shape)).astype(np.float32)

    return [jax.tree.map(draw, SHAPES, is_leaf=is_shape) for _ in range(steps)]


def chain_of(name, **where):
    return gx.chain(gx.unscale(), *PARTS[name], gx.allreduce(**where))


@cache
def compiled(name, size, check_vma):
    return OnMesh(chain_of(name, axis_name="data"), zeros(), size, check_vma=check_vma)


def on_mesh_of(name, size=2, check_vma=True):
    """Each is compiled once, which takes longer than all else here."""
    return compiled(name, size, check_vma).again()


def on_threads(tx, grads, size, scales):
    """What each step gives on in-process ranks with torch tensors; and the last state."""

    def rank(i):
        def own(tree):
            return jax.tree.map(lambda x: torch.tensor(x[i]), tree)

        state, outs = tx.init(own(grads[0])), []
        for tree, scale in zip(grads, scales, strict=True):
            updates, state = tx.update(own(tree), state, loss_scale=scale)
            outs.append(updates)
        return outs, state

    return run_ranks(size, rank)


def worst(one, other):
    """The largest difference between two trees, in units of the largest value."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    diffs = [float(np.abs(np.asarray(a) - np.asarray(b)).max(initial=0.0)) for a, b in pairs]
    largest = [float(np.abs(np.asarray(x)).max(initial=0.0)) for x in jax.tree.leaves(one)]
    return max(diffs) / max(*largest, 1e-30)


@pytest.mark.parametrize("name", PARTS)
def test_it_keeps_the_laws(name):
    # All FP32: what L2 speaks of is then the same program.
    params = {"bn1": {"weight": torch.zeros(5)}, "s": torch.zeros(()), "w": torch.zeros(6, 5)}
    tx = chain_of(name, axis_name="data", op="sum", algorithm="gather")
    check_laws(tx, params=params, ranks=(2,), steps=2)
    check_laws(chain_of(name, axis_name="data"), ranks=(2,), laws=["L10"])


@pytest.mark.parametrize(
    ("name", "size", "check_vma"),
    [
        *((name, 2, True) for name in PARTS),
        *((name, 4, False) for name in SOME),
    ],
)
def test_it_gives_what_torch_gives(name, size, check_vma):
    grads, scales = gradients(1, size, 3), [2.0, 2.0, 8.0]
    on_mesh = on_mesh_of(name, size, check_vma)
    found = [on_mesh.step(tree, scale) for tree, scale in zip(grads, scales, strict=True)]
    expected, _ = on_threads(chain_of(name), grads, size, scales)[0]
    # PowerSGD goes through a QR factorisation on both sides.
    tolerance = 1e-5 if name == "powersgd" else 5e-7
    assert max(map(worst, found, expected)) < tolerance
    assert on_mesh.update._cache_size() == 1


@pytest.mark.parametrize("name", SOME)
@settings(max_examples=30)
@given(seed=st.integers(0, 2**31), exponents=st.lists(st.integers(-3, 10), min_size=2, max_size=2))
def test_any_gradients_and_scales(name, seed, exponents):
    grads, scales = gradients(seed, 2, 2), [2.0**e for e in exponents]
    on_mesh = on_mesh_of(name)
    found = [on_mesh.step(tree, scale) for tree, scale in zip(grads, scales, strict=True)]
    expected, _ = on_threads(chain_of(name), grads, 2, scales)[0]
    assert max(map(worst, found, expected)) < (1e-4 if name == "powersgd" else 1e-6)


@pytest.mark.parametrize("name", PARTS)
def test_state_is_a_fixed_point(name):
    on_mesh = on_mesh_of(name)
    before = jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), on_mesh.state)
    on_mesh.step(gradients(0, 2, 1)[0])
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), on_mesh.state) == before


def test_state_has_the_structure_it_has_on_torch():
    """An empty state among them, which is a NamedTuple without fields."""
    params = jax.tree.map(lambda x: torch.zeros(x.shape), zeros())
    on_jax = optree.tree_structure(chain_of("topk", axis_name="data").init(zeros()))
    on_torch = optree.tree_structure(chain_of("topk").init(params))
    assert on_jax == on_torch


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("bad", [INF, NAN])
def test_bad_step_on_one_device_leaves_no_trace_on_any(name, bad):
    on_mesh = on_mesh_of(name)
    first, second = gradients(3, 2, 2)
    on_mesh.step(first)
    before = on_mesh.state
    second["w"][1, 3, 7] = bad
    updates = on_mesh.step(second, 4.0)
    assert all(not np.asarray(x).any() for x in jax.tree.leaves(updates))
    assert int(on_mesh.state.total_notfinite) == 1
    assert not bool(on_mesh.state.last_finite)
    gate, old = on_mesh.state.gate.inner_states[:-1], before.gate.inner_states[:-1]
    for a, b in zip(jax.tree.leaves(gate), jax.tree.leaves(old), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    on_mesh.step(first)
    assert bool(on_mesh.state.last_finite)


@pytest.mark.parametrize("name", [*SOME, "natural", "schedule"])
def test_steps_in_a_scan_are_the_steps(name):
    """Within one program: what varies over the devices, as JAX keeps track of it, stays so."""
    size, steps = 2, 3
    tx, grads = chain_of(name, axis_name="data"), gradients(5, size, steps)
    on_mesh = on_mesh_of(name)

    def run(stacked, state):
        def step(state, tree):
            updates, state = tx.update(tree, state, loss_scale=2.0)
            return state, updates

        return jax.lax.scan(step, state, jax.tree.map(lambda x: x[0], stacked))

    stacked = jax.tree.map(lambda *x: np.stack(x, 1), *grads)
    specs = on_mesh.specs
    scanned = jax.jit(
        jax.shard_map(run, mesh=on_mesh.mesh, in_specs=(P("data"), specs), out_specs=(specs, P()))
    )
    _, found = scanned(laid_out(on_mesh.mesh, stacked), on_mesh.state)
    expected = [on_mesh.step(tree, 2.0) for tree in grads]
    for i, tree in enumerate(expected):
        assert worst(jax.tree.map(lambda x, i=i: x[i], found), tree) < 1e-5


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_gradients_and_state_may_be_donated():
    plain = on_mesh_of("topk")
    donated = OnMesh(chain_of("topk", axis_name="data"), zeros(), 2, donate=(0, 1))
    for tree in gradients(2, 2, 3):
        given, state = laid_out(donated.mesh, tree), donated.state
        updates, donated.state = donated.update(given, state, jnp.float32(1.0))
        assert worst(plain.step(tree), updates) == 0
        assert state.residual["w"].is_deleted()


def test_a_leaf_that_is_none_stays_none_and_keeps_its_residual():
    tx = gx.chain(gx.topk(0.05), gx.ef(), gx.allreduce(axis_name="data"))
    on_mesh = OnMesh(tx, {"v": jnp.zeros(900), "w": jnp.zeros((30, 70))}, 2)
    first, second = (
        {"v": x["w"][:, :13].reshape(2, -1)[:, :900], "w": x["w"]} for x in gradients(4, 2, 2)
    )
    on_mesh.step(first)
    residual = np.asarray(on_mesh.state.residual["v"])
    updates = on_mesh.step({"v": None, "w": second["w"]})
    assert updates["v"] is None
    np.testing.assert_array_equal(np.asarray(on_mesh.state.residual["v"]), residual)


# Bits a value that one device puts into the gather, of a leaf of 200,000 values: the wire table,
# with 16 bits for a position.
TABLE = {
    "topk": ([gx.topk(0.01), gx.ef()], 0.01 * 48),
    "topk fp16": ([gx.topk(0.01, values="float16"), gx.ef()], 0.01 * 32),
    "threshold": ([gx.threshold(1.0, capacity=0.01), gx.ef()], 0.01 * 48),
    "random_k fp16": ([gx.random_k(0.01, values="float16"), gx.ef()], 0.01 * 16),
    "topk, sign": ([gx.topk(0.01), gx.sign(), gx.ef()], 0.01 * 17),
    "sign": ([gx.sign(), gx.ef()], 1.0),
    "vote": ([gx.sign(majority_vote=True, feedback=False)], 1.0),
    "cast fp16": ([gx.cast("float16"), gx.ef()], 16.0),
    "cast fp8": ([gx.cast("float8_e5m2"), gx.ef()], 8.3),
    "quantize 4": ([gx.quantize(4)], 4 + 32 / 256),
    "quantize 2": ([gx.quantize(2)], 2 + 32 / 256),
    "ternary": ([gx.ternary()], 1.65),
    "natural": ([gx.natural()], 9.05),
}


@pytest.mark.parametrize("name", TABLE)
def test_what_is_gathered_is_small(name):
    parts, bits = TABLE[name]
    tx = gx.chain(gx.unscale(), *parts, gx.allreduce(axis_name="data", algorithm="gather"))
    sent = OnMesh(tx, {"w": jnp.zeros((400, 500))}, 2).sent({"w": np.zeros((2, 400, 500))})
    assert set(sent) == {"all-gather"}
    assert 8 * sent["all-gather"] / 200_000 <= 1.05 * bits


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", SHARED)
def test_what_goes_to_owners_gives_what_torch_gives(name, check_vma):
    """Without feedback: whose residual takes what a sum has lost follows from who owns it."""
    tx = gx.chain(gx.unscale(), *SHARED[name], gx.allreduce(axis_name="data"))
    over_threads = gx.chain(gx.unscale(), *SHARED[name], gx.allreduce())
    grads = gradients(1, 4, 3)
    on_mesh = OnMesh(tx, zeros(), 4, check_vma=check_vma)
    found = [on_mesh.step(tree, 2.0) for tree in grads]
    expected, _ = on_threads(over_threads, grads, 4, [2.0] * 3)[0]
    assert max(map(worst, found, expected)) < 5e-7


@pytest.mark.parametrize("name", SHARED)
def test_what_goes_to_owners_is_not_lost(name):
    """Results and mean residuals are the mean gradients, whoever owns what."""
    on_mesh = on_mesh_of(name, 4)
    grads = gradients(4, 4, 3)
    results = sum(np.asarray(on_mesh.step(tree)["w"], np.float64) for tree in grads)
    left = np.asarray(on_mesh.state.residual["w"], np.float64).reshape(4, 30, 70).mean(0)
    expected = sum(tree["w"].astype(np.float64).mean(0) for tree in grads)
    assert np.abs(left).max() > 1e-5
    np.testing.assert_allclose(results + left, expected, atol=2e-6)


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize(
    ("name", "bits"), [("cast", 16.0), ("cast fp8", 8.07), ("quantize 8", 8.13)]
)
def test_what_goes_to_owners_is_twice_its_share(name, bits, size):
    params = {"v": jnp.zeros(30_001), "w": jnp.zeros((400, 500))}
    stacked = jax.tree.map(lambda x: np.zeros((size, *x.shape), np.float32), params)
    sent = OnMesh(chain_of(name, axis_name="data"), params, size).sent(stacked)
    assert set(sent) == {"all-gather", "all-to-all"}
    # An all-to-all has what a device keeps too; a gather puts a copy for each other on the link.
    on_link = (size - 1) / size * sent["all-to-all"] + (size - 1) * sent["all-gather"]
    # A grain of 256 values may be in vain in each leaf.
    values = 230_001 + 2 * 256 * size
    assert on_link <= 2 * (size - 1) / size * values * bits / 8 + 40 * size


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("size", "bits"), [(2, {"all-gather": 16}), (4, {"all-to-all": 16})])
def test_16_bit_leaves_travel_in_16_bits(dtype, size, bits):
    tx = gx.chain(gx.unscale(), gx.allreduce(axis_name="data"))
    on_mesh = OnMesh(tx, {"w": jnp.zeros(40_000, dtype)}, size)
    sent = on_mesh.sent({"w": np.zeros((size, 40_000), jnp.dtype(dtype))})
    assert "all-reduce" not in sent
    for name, expected in bits.items():
        assert 8 * sent[name] / 40_000 == pytest.approx(expected, rel=0.001)
    rows = np.asarray(np.random.default_rng(0).normal(size=(size, 40_000)), jnp.dtype(dtype))
    found = np.asarray(on_mesh.step({"w": rows * np.asarray(4, rows.dtype)}, 4.0)["w"])
    total = rows.astype(np.float32)[0]
    for row in rows.astype(np.float32)[1:]:
        total = total + row
    np.testing.assert_array_equal(found, (total / np.float32(size)).astype(rows.dtype))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("size", [2, 4])
def test_a_16_bit_value_that_is_not_finite_spoils_no_other(size, check_vma):
    tx = gx.chain(gx.allreduce(axis_name="data"))
    kinds = {"u": "float16", "v": "bfloat16", "w": "float16"}
    params = {name: jnp.zeros(3000, dtype) for name, dtype in kinds.items()}
    grads = {k: np.ones((size, 3000), x.dtype) for k, x in params.items()}
    grads["u"][1, 5], grads["v"][1, 2999] = -INF, NAN
    found = OnMesh(tx, params, size, check_vma=check_vma, scaled=False).step(grads)
    for name, rows in grads.items():
        np.testing.assert_array_equal(np.asarray(found[name], np.float32), rows[1].astype("f4"))


def test_leaves_of_one_shape_go_to_owners_together():
    """And give what they give alone; FP64 leaves, and what goes other ways, in the same step."""
    with jax.enable_x64(True):
        tx = gx.chain(
            gx.masked(gx.error_feedback(gx.cast("float8_e4m3fn")), gx.path_glob("[ab]*")),
            gx.masked(gx.error_feedback(gx.topk(0.1)), gx.path_glob("t")),
            gx.masked(gx.error_feedback(gx.cast("float16")), gx.path_glob("d")),
            gx.allreduce(axis_name="data", algorithm="two_shot"),
            check=False,
        )
        rng = np.random.default_rng(3)
        grads = {k: rng.normal(size=(3, 700)).astype(np.float32) for k in ("a1", "a2", "b", "t")}
        grads |= {"d": rng.normal(size=(3, 90)), "n": rng.normal(size=(3, 4)).astype(np.float32)}
        params = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), grads)
        found = OnMesh(tx, params, 3, scaled=False).step(grads)
        assert found["d"].dtype == jnp.float64
        over_threads = gx.chain(
            *tx.transformations[:-1], gx.allreduce(algorithm="two_shot"), check=False
        )
        expected, _ = on_threads(over_threads, [grads], 3, [1.0])[0]
        assert worst(found, expected[0]) < 5e-7


@pytest.mark.parametrize(
    ("parts", "values"),
    [([gx.powersgd(4), gx.ef()], 4 * 900), ([gx.random_k(0.01), gx.ef()], 2000), ([], 200_000)],
    ids=["powersgd", "random_k", "dense"],
)
def test_what_is_summed_is_small(parts, values):
    tx = gx.chain(gx.unscale(), *parts, gx.allreduce(axis_name="data"))
    sent = OnMesh(tx, {"w": jnp.zeros((400, 500))}, 2).sent({"w": np.zeros((2, 400, 500))})
    assert set(sent) == {"all-reduce"}
    assert 4 * values <= sent["all-reduce"] <= 4 * values + 8


def test_a_schedule_has_a_program_for_each_value():
    """And none of them sends more than its own value asks for."""
    tx = chain_of("schedule", axis_name="data")
    on_mesh = OnMesh(tx, {"w": jnp.zeros(100_000)}, 2)
    stacked = {"w": np.zeros((2, 100_000))}
    arguments = laid_out(on_mesh.mesh, stacked), on_mesh.state, jnp.float32(1.0)
    text = on_mesh.update.lower(*arguments).compile().as_text()
    gathers = sorted(
        collective_bytes(line, 2)["all-gather"]
        for line in text.splitlines()
        if " all-gather(" in line
    )
    further = 4 * (-(-100_000 // BLOCK) - 1)
    assert gathers == [6 * k + further + 1 for k in (5000, 25_000)]


def test_auto_takes_the_dense_way_where_gathering_costs_more():
    sizes = {}
    for size in (2, 4):
        tx = gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce(axis_name="data"))
        stacked = {"w": np.zeros((size, 1000))}
        sizes[size] = set(OnMesh(tx, {"w": jnp.zeros(1000)}, size).sent(stacked))
    assert sizes == {2: {"all-gather"}, 4: {"all-reduce"}}


@settings(max_examples=20)
@given(st.integers(1, 5 * BLOCK), st.data())
def test_positions_come_through(universe, data):
    """Within blocks, their borders and empty blocks among them."""
    near = st.sampled_from([BLOCK - 1, BLOCK, 2 * BLOCK, 4 * BLOCK - 1, 0, universe - 1])
    places = st.one_of(st.integers(0, universe - 1), near.filter(lambda i: i < universe))
    indices = sorted(data.draw(st.sets(places, max_size=30)))
    values = jnp.asarray(np.arange(len(indices)), jnp.float32)
    sparse = gx.Sparse(values, jnp.asarray(indices, jnp.int32), (universe,), "float32")
    packing = Packing([sparse])
    [found] = packing.decode(packing.encode(Said(jnp.zeros(1))))
    assert found.indices.tolist() == indices
    assert found.values.tolist() == values.tolist()


def in_shard_map(fn, axes=("data",), *, check_vma=True, run=True):
    """`fn` on a gradient on every device of a mesh; without `run` it is only traced."""
    shape = (2,) * len(axes)
    mesh = jax.make_mesh(shape, axes, devices=jax.devices()[: 2 ** len(axes)])
    mapped = jax.shard_map(
        lambda x: fn(x[0]), mesh=mesh, in_specs=P(axes), out_specs=P(axes), check_vma=check_vma
    )
    rows = np.arange(2 ** len(axes) * 3.0, dtype=np.float32).reshape(-1, 3)
    rows = jax.device_put(rows, jax.NamedSharding(mesh, P(axes)))
    return jax.jit(mapped)(rows) if run else jax.eval_shape(mapped, rows)


def test_one_axis_of_two():
    tx = gx.chain(gx.topk(1.0), gx.ef(), gx.allreduce(axis_name="replica", algorithm="gather"))

    def step(grads):
        updates, _ = tx.update([grads], tx.init([grads]))
        return jax.lax.pcast(updates[0], "replica", to="varying")[None]

    found = in_shard_map(step, ("replica", "shard"))
    rows = np.arange(12.0).reshape(4, 3)
    np.testing.assert_array_equal(found, (rows + rows[[2, 3, 0, 1]]) / 2)


@pytest.mark.parametrize("check_vma", [True, False])
def test_parts_of_a_model_on_another_axis_step_all_or_none(check_vma):
    """Parameters spread over "shard": a bad value in one part is a bad step of the other too."""
    tx = gx.chain(gx.topk(1.0), gx.ef(), gx.allreduce(axis_name="replica", algorithm="gather"))

    def step(grads):
        grads = jnp.where(grads == 5.0, jnp.inf, grads)  # of one device of four
        updates, state = tx.update([grads], tx.init([grads]))
        return jnp.stack([updates[0].sum(), state.last_finite.astype(jnp.float32)])[None]

    mesh = jax.make_mesh((2, 2), ("replica", "shard"))
    mapped = jax.shard_map(
        lambda x: step(x[0]), mesh=mesh, in_specs=P(("replica", "shard")), out_specs=P("shard"),
        check_vma=check_vma,
    )  # fmt: skip
    rows = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    rows = jax.device_put(rows, jax.NamedSharding(mesh, P(("replica", "shard"))))
    np.testing.assert_array_equal(jax.jit(mapped)(rows), np.zeros((2, 2)))


def test_an_axis_that_is_not_there_is_refused_naming_those_that_are():
    tx = gx.allreduce(axis_name="batch")
    with pytest.raises(ValueError, match=r"'batch'\): no axis of that name; the axes here are 'd"):
        in_shard_map(lambda x: tx.update([x], tx.init([x]))[0][0])
    with pytest.raises(ValueError, match=r"there is no axis here .*inside jax.shard_map"):
        tx.update([jnp.ones(3)], tx.init([jnp.ones(3)]))


def test_an_exchange_without_an_axis_inside_a_mesh_is_refused():
    tx = gx.allreduce()
    with pytest.raises(ValueError, match=r"such as allreduce\(axis_name='data'\)"):
        in_shard_map(lambda x: tx.update([x], tx.init([x]))[0][0])


@pytest.mark.parametrize("name", PARTS)
def test_gradients_that_jax_has_summed_are_refused_whatever_the_chain(name):
    tx = chain_of(name, axis_name="data")

    def step(x):
        params = {"a": jnp.ones(3), "b": jax.lax.pcast(jnp.ones(3), "data", to="varying")}
        grads = jax.grad(lambda p: (p["a"] * x + p["b"]).sum())(params)
        return tx.update(grads, tx.init(params), loss_scale=1.0)[0]["b"]

    with pytest.raises(ValueError, match=r"gradients of 'a' are the same .* along 'data': .*pcast"):
        in_shard_map(step, run=False)


def test_gradients_of_own_parameters_are_taken():
    tx = gx.allreduce(axis_name="data")

    def loss(params, x):
        return (params * x).sum()

    def own(x):
        grads = jax.grad(loss)(jax.lax.pcast(jnp.ones(3), "data", to="varying"), x)
        return jax.lax.pcast(tx.update([grads], tx.init([grads]))[0][0], "data", to="varying")

    rows = np.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(in_shard_map(own), np.tile(rows.mean(0), 2))


def test_vmap_over_a_named_axis_is_a_simulation():
    tx = gx.chain(gx.topk(0.1), gx.ef(), gx.allreduce(axis_name="data"))
    rows = np.random.default_rng(0).normal(size=(3, 1000)).astype(np.float32)

    def step(grads):
        return tx.update({"w": grads}, tx.init({"w": grads}))[0]["w"]

    found = np.asarray(jax.vmap(step, axis_name="data")(rows))
    kept = np.where(np.abs(rows) >= np.sort(np.abs(rows))[:, -100, None], rows, 0)
    np.testing.assert_allclose(found, np.tile(kept.mean(0), (3, 1)), atol=1e-7)


def test_alone_without_an_axis():
    tx = gx.chain(gx.unscale(), gx.topk(0.1), gx.ef(), gx.allreduce())
    grads = {"w": jnp.asarray(np.random.default_rng(0).normal(size=50), jnp.float32)}
    updates, state = jax.jit(tx.update)(grads, tx.init(grads), loss_scale=2.0)
    assert int((updates["w"] != 0).sum()) == 5
    np.testing.assert_allclose(updates["w"] + state.residual["w"], grads["w"] / 2, rtol=1e-6)


def test_torch_tensors_are_refused_where_an_axis_is_named():
    tx = gx.allreduce(axis_name="data")

    def step(x):
        return tx.update([torch.ones(3)], tx.init([torch.ones(3)]))[0][0]

    with pytest.raises(TypeError, match=r"for torch tensors write allreduce\(\)"):
        in_shard_map(step)
    with pytest.raises(TypeError, match=r"for torch tensors write allreduce\(\)"):
        step(None)


def test_jax_arrays_are_refused_between_torch_ranks():
    def rank(i):
        tx = gx.allreduce()
        with pytest.raises(TypeError, match=r"write allreduce\(axis_name=\.\.\.\)"):
            tx.update([jnp.ones(3)], tx.init([jnp.ones(3)]))
        return True

    assert run_ranks(2, rank) == [True, True]


def test_torch_beside_jax_is_refused():
    tx = gx.allreduce()
    with pytest.raises(TypeError, match="1 of 2 leaves are torch tensors, the others JAX arrays"):
        tx.update([torch.ones(3), jnp.ones(3)], tx.init([jnp.ones(3), jnp.ones(3)]))


def test_group_and_axis_exclude_each_other():
    with pytest.raises(ValueError, match="a group is for torch tensors, an axis for JAX arrays"):
        gx.allreduce(MeshAxis, axis_name="data")


def test_axis_is_in_the_code_and_the_fingerprint():
    assert repr(gx.allreduce(axis_name="data")) == "gx.allreduce(axis_name='data')"
    assert gx.allreduce(axis_name="a").fingerprint != gx.allreduce(axis_name="b").fingerprint


def test_mesh_of_one_device():
    on_mesh = OnMesh(chain_of("topk", axis_name="data"), zeros(), 1)
    tree = gradients(0, 1, 1)[0]
    expected, _ = on_threads(chain_of("topk"), [tree], 1, [1.0])[0]
    assert worst(on_mesh.step(tree), expected[0]) == 0
    assert mesh_of(1).size == 1


@pytest.mark.parametrize("name", ["powersgd", "momentum", "quantize", "topk", "schedule"])
def test_with_64_bits_on_the_state_is_a_fixed_point_too(name):
    with jax.enable_x64(True):
        tx, params = chain_of(name), {"w": jnp.ones((32, 16), jnp.float32)}
        state = tx.init(params)

        def step(state, grads):
            return tx.update({"w": grads}, state, loss_scale=1.0)[::-1]

        after, _ = jax.lax.scan(step, state, params["w"][None])
        assert [x.dtype for x in jax.tree.leaves(after)] == [
            x.dtype for x in jax.tree.leaves(state)
        ]


@pytest.mark.parametrize(
    "parts",
    [
        [gx.quantize(8)],
        [gx.quantize(8, norm="l2", stochastic=False, block=64, feedback=False)],
        [gx.ternary()],
        [gx.topk(1.0), gx.momentum_correction(0.5, clip=1.0, masking=False)],
        [gx.powersgd(1), gx.ef()],
    ],
    ids=repr,
)
def test_the_largest_numbers_do_not_vanish(parts):
    """XLA divides by a multiplication, and flushes what the inverse of a large norm is."""
    tx = gx.chain(*parts, gx.allreduce())
    values = np.outer([9.0, -4.0, 2.0, 3.0, 1.0], [1.0, 0.5, 0.25, 0.125]).astype(np.float32)
    for exponent in (37, 0):
        grads = values * np.float32(10.0**exponent)
        ours, theirs = (
            np.asarray(tx.update(tree, tx.init(tree))[0]["w"])
            for tree in ({"w": jnp.asarray(grads)}, {"w": torch.tensor(grads)})
        )
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())
        assert np.abs(ours).max() > 0


@pytest.mark.parametrize("params", [{}, {"a": None}], ids=repr)
def test_a_tree_without_leaves_has_a_state_of_jax(params):
    tx = gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce(axis_name="data"))
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(tx.init(params)))
    tx = gx.to_optax(gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce()))
    state = tx.init(params)
    updates, _ = jax.jit(tx.update)(params, state)
    assert updates == params


def test_a_part_of_a_partition_that_no_leaf_belongs_to():
    chain = gx.to_optax(gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce()))
    params = {"w": jnp.ones(4)}
    tx = optax.partition({"big": chain, "small": optax.sgd(0.5)}, {"w": "small"})
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    assert updates["w"].tolist() == [-0.5] * 4


class Local(NamedTuple):
    """The state of a stage before the exchange."""

    norm: Any
    count: Any


def foreign(norm):
    def init(params):
        return Local(norm, jnp.zeros((), jnp.int32))

    def update(updates, state, params=None):
        return updates, state

    return gx.declare(optax.GradientTransformation(init, update), needs_reduced=False)


class TestPartitionSpecs:
    def specs(self, tx, params=None):
        params = zeros() if params is None else params
        return gx.partition_specs(jax.eval_shape(tx.init, params), axis_name="data")

    def test_what_differs_between_devices_is_along_the_axis(self):
        momentum = self.specs(chain_of("momentum", axis_name="data")).gate.inner_states[0]
        assert set(jax.tree.leaves((momentum.velocity, momentum.residual))) == {P("data")}
        powersgd = self.specs(chain_of("powersgd", axis_name="data")).gate.inner_states[0]
        assert set(jax.tree.leaves(powersgd.residual)) == {P("data")}
        assert set(jax.tree.leaves(powersgd.inner_states)) == {P()}

    def test_within_optax(self):
        tx = optax.chain(gx.to_optax(chain_of("topk", axis_name="data")), optax.adam(1e-3))
        chain, (adam, _) = self.specs(tx)
        assert set(jax.tree.leaves(chain.residual)) == {P("data")}
        assert set(jax.tree.leaves(adam)) == {P()}

    def test_foreign_stages_by_where_they_stand(self):
        before = gx.chain(foreign(jnp.zeros(3)), gx.allreduce(axis_name="data"))
        assert self.specs(before).gate.inner_states[0] == Local(P("data"), P())
        behind = gx.chain(gx.topk(0.1), gx.ef(), gx.allreduce(axis_name="data"), optax.adam(1e-3))
        assert set(jax.tree.leaves(self.specs(behind).gate.inner_states[-1])) == {P()}

    def test_a_number_that_differs_between_devices_is_refused(self):
        tx = gx.chain(foreign(jnp.zeros(())), gx.allreduce(axis_name="data"))
        with pytest.raises(ValueError, match=r"a number of shape \[\].*keep it as \[1\]"):
            self.specs(tx)

    def test_a_chain_without_an_exchange_is_refused(self):
        with pytest.raises(ValueError, match="put the exchange into the same chain"):
            self.specs(gx.chain(gx.topk(0.1), gx.ef()), {"w": jnp.zeros(3)})

    def test_the_axis_is_a_name(self):
        with pytest.raises(
            TypeError, match=r"partition_specs\(axis_name=0\): expected a mesh axis"
        ):
            gx.partition_specs({}, axis_name=0)

    def test_an_optimizer_in_the_chain_trains_on_the_mesh(self):
        tx = gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce(axis_name="data"), optax.adam(0.1))
        params, mesh = {"w": jnp.asarray([3.0, -2.0, 1.0, 0.5])}, mesh_of(2)
        specs = self.specs(tx, params)

        def run(params, state, x):
            def step(carry, _):
                params, state = carry
                own = jax.lax.pcast(params, "data", to="varying")
                grads = jax.grad(lambda p: ((p["w"] - x[0]) ** 2).sum())(own)
                updates, state = tx.update(grads, state, params)
                return (optax.apply_updates(params, updates), state), None

            return jax.lax.scan(step, (params, state), None, 200)[0]

        init = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs)
        mapped = jax.jit(
            jax.shard_map(run, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs))
        )
        params = jax.device_put(params, jax.NamedSharding(mesh, P()))
        rows = np.asarray([[1.0, 2.0, 3.0, 4.0], [3.0, 2.0, 1.0, 0.0]], np.float32)
        trained, _ = mapped(params, init(params), laid_out(mesh, rows))
        np.testing.assert_allclose(trained["w"], rows.mean(0), atol=0.1)


def test_dynamic_loss_scale_falls_on_all_devices_together():
    tx = gx.chain(
        gx.dynamic_loss_scale(16.0, growth_interval=2), gx.topk(0.5), gx.ef(),
        gx.allreduce(axis_name="data"),
    )  # fmt: skip
    on_mesh = OnMesh(tx, {"w": jnp.zeros(4)}, 2, scaled=False)
    bad = np.ones((2, 4), np.float32)
    bad[1, 2] = INF
    scales = []
    for rows in (np.ones((2, 4), np.float32), bad, *[np.ones((2, 4), np.float32)] * 2):
        on_mesh.step({"w": rows})
        scales.append(float(on_mesh.state.loss_scale))
    assert scales == [16.0, 8.0, 8.0, 16.0]
