"""The dense transformations on JAX: beside optax, under jit, and across meshes."""

from functools import partial

import numpy as np
import pytest
import torch

import gradtx as gx
from gradtx.testing import check_laws

jax = pytest.importorskip("jax")
jnp = jax.numpy
optax = pytest.importorskip("optax")

from meshes import OnMesh, over_axis  # noqa: E402

P = jax.sharding.PartitionSpec
SHAPES = {"b": (3,), "empty": (0, 2), "s": (), "w": (6, 5)}


def drawn(seed, factor=1.0):
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(factor * rng.normal(size=v), jnp.float32) for k, v in SHAPES.items()}


def updates_of(tx, trees, params=None):
    """What comes out of each step, under jit."""
    state, update, out = tx.init(trees[0] if params is None else params), jax.jit(tx.update), []
    for tree in trees:
        updates, state = update(tree, state, params)
        out.append(updates)
    return out


def close(got, expected, rtol=1e-6):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-30), got, expected
    )


@pytest.mark.parametrize("clip", [gx.clip_by_global_norm, gx.clip_by_local_norm])
@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_clipping_is_what_optax_does(clip, max_norm):
    trees = [drawn(0), drawn(1, 2.0**-20), drawn(2, 2.0**40)]
    found = updates_of(clip(max_norm), trees)
    close(found, updates_of(optax.clip_by_global_norm(max_norm), trees))


@pytest.mark.parametrize("clip", [gx.clip_by_global_norm, gx.clip_by_local_norm])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30, 3e38])
def test_no_overflow_nor_division_by_zero(clip, scale):
    """optax gives zeros for the last two, whose squares are too large for FP32."""
    [out] = updates_of(clip(1.0), [{"w": jnp.full((4,), scale)}])
    close(out, {"w": np.full(4, min(scale, 0.5), np.float32)})


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_not_hidden(bad):
    [out] = updates_of(gx.clip_by_global_norm(1.0), [{"w": jnp.asarray([bad, 1.0])}])
    assert np.isnan(out["w"]).all()


def test_16_bit_leaves_are_clipped_in_fp32():
    grads = {"w": jnp.full((70_000,), 2.0, jnp.float16)}
    [out] = updates_of(gx.clip_by_global_norm(1.0), [grads])
    assert out["w"].dtype == jnp.float16
    np.testing.assert_allclose(out["w"][:3], 70_000**-0.5, rtol=5e-3)


def test_scale_and_schedule_are_what_optax_does():
    trees = [drawn(step) for step in range(4)]
    close(updates_of(gx.scale(-0.3), trees), updates_of(optax.scale(-0.3), trees))
    schedule = optax.exponential_decay(0.1, 2, 0.5)
    ours, theirs = gx.scale_by_schedule(schedule), optax.scale_by_schedule(schedule)
    close(updates_of(ours, trees), updates_of(theirs, trees))


@pytest.mark.parametrize("schedule", [lambda step: step, lambda step: 2, lambda step: 0.5])
def test_a_schedule_may_give_whole_numbers(schedule):
    trees = [{"w": jnp.ones(2)} for _ in range(3)]
    found = [out["w"].tolist() for out in updates_of(gx.scale_by_schedule(schedule), trees)]
    assert found == [[float(schedule(step))] * 2 for step in range(3)]


def test_a_schedule_of_ours_is_followed_under_jit():
    schedule = gx.warmup_density([0.5, 0.25], 1)
    trees = [{"w": jnp.ones(2)} for _ in range(3)]
    found = [out["w"].tolist() for out in updates_of(gx.scale_by_schedule(schedule), trees)]
    assert found == [[0.5] * 2, [0.25] * 2, [0.25] * 2]


def test_a_schedule_that_gives_several_numbers_is_refused():
    tx = gx.scale_by_schedule(lambda step: jnp.ones(2) * step)
    with pytest.raises(ValueError, match=r"gives an array of shape \(2,\): expected a number"):
        updates_of(tx, [{"w": jnp.ones(2)}])


def test_weight_decay_is_what_optax_does():
    trees, params = [drawn(0), drawn(1)], drawn(2)
    mask = jax.tree.map(lambda p: p.ndim > 1, params)
    ours = gx.add_decayed_weights(0.3, mask=gx.is_matrix)
    close(
        updates_of(ours, trees, params),
        updates_of(optax.add_decayed_weights(0.3, mask), trees, params),
    )


def test_a_whole_optimizer_is_near_to_optax_to_the_last_bits():
    parts = optax.clip_by_global_norm(1.0), optax.add_decayed_weights(0.01), optax.adam(0.1)
    theirs = optax.chain(*parts, optax.scale(0.5))
    ours = gx.chain(
        gx.allreduce(),
        gx.clip_by_global_norm(1.0),
        gx.add_decayed_weights(0.01),
        gx.from_optax(optax.adam(0.1)),
        gx.scale(0.5),
    )
    trees, params = [drawn(step) for step in range(6)], drawn(9)
    found, expected = updates_of(ours, trees, params), updates_of(theirs, trees, params)
    close(found, expected, rtol=1e-5)
    apart = jax.tree.map(lambda a, b: np.abs(a - b).max(initial=0.0), found, expected)
    assert max(jax.tree.leaves(apart)) < 5e-8


def test_the_same_on_torch():
    on_torch = gx.chain(
        gx.allreduce(),
        gx.clip_by_global_norm(1.0),
        gx.add_decayed_weights(0.01),
        gx.from_optax(optax.adam(0.1)),
        gx.scale_by_schedule(optax.cosine_decay_schedule(1.0, 10)),
    )
    trees, params = [drawn(step) for step in range(4)], drawn(9)
    to_torch = partial(jax.tree.map, lambda x: torch.tensor(np.asarray(x)))
    state = on_torch.init(to_torch(params))
    for tree, expected in zip(trees, updates_of(on_torch, trees, params), strict=True):
        updates, state = on_torch.update(to_torch(tree), state, to_torch(params))
        close({k: v.numpy() for k, v in updates.items()}, expected, rtol=2e-5)


CHAIN = gx.chain(
    gx.unscale(),
    gx.clip_by_local_norm(1.0),
    gx.topk(0.1),
    gx.ef(),
    gx.allreduce(),
    gx.clip_by_global_norm(1.0),
    gx.add_decayed_weights(0.01),
    gx.scale(-0.1),
)


def test_laws():
    params = {"w": torch.ones(6, 5)}
    check_laws(over_axis(CHAIN), ranks=(2,), steps=1, params=params)


def test_laws_of_a_schedule():
    tx = gx.chain(gx.unscale(), gx.scale_by_schedule(lambda step: 1.0 / (1 + step)), gx.allreduce())
    laws = ["L1", "L4", "L5", "L8"]
    check_laws(over_axis(tx), ranks=(2,), steps=1, params={"w": torch.zeros(3, 4)}, laws=laws)


@pytest.mark.parametrize("check_vma", [True, False])
def test_on_a_mesh_all_devices_clip_and_count_alike(check_vma):
    tx = gx.chain(
        gx.unscale(),
        gx.allreduce(axis_name="data"),
        gx.clip_by_global_norm(1.0),
        gx.scale_by_schedule(lambda step: 1.0 / (1.0 + step)),
        gx.masked(gx.scale(-1.0), gx.is_matrix),
    )
    mesh = OnMesh(tx, drawn(0), 2, check_vma=check_vma)
    for number in range(3):
        ranks = [drawn(10 * number + rank) for rank in range(2)]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *ranks)
        mean = jax.tree.map(lambda *leaves: sum(leaves) / 2, *ranks)
        norm = np.sqrt(sum(float(jnp.square(x).sum()) for x in jax.tree.leaves(mean)))
        expected = {k: x / norm / (1 + number) for k, x in mean.items()}
        expected |= {k: -x for k, x in expected.items() if x.ndim > 1}
        close(mesh.step(stacked), expected, rtol=1e-5)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("delay", [(), (gx.delayed(steps=1),)])
def test_on_a_mesh_a_window_is_one_large_batch(check_vma, delay):
    tx = gx.chain(gx.unscale(), gx.accumulate(2), *delay, gx.allreduce(axis_name="data"))
    mesh = OnMesh(tx, {"w": jnp.zeros(3)}, 2, check_vma=check_vma)
    out = []
    for number in range(4):
        stacked = {"w": np.full((2, 3), number, np.float32) + np.float32([[0.0], [1.0]])}
        out.append((float(mesh.step(stacked)["w"][0]), bool(mesh.state.ready)))
    first = (0.0, False) if delay else (1.0, True)
    second = (1.0, True) if delay else (3.0, True)
    assert out == [(0.0, False), first, (0.0, False), second]


# Of a model on a mesh of two replicas by two shards: one leaf is spread over the shards, the other
# is whole on both.
WHOLE = np.asarray([3.0, -1.0, 2.0], np.float32)
SPREAD = np.arange(8.0, dtype=np.float32)
NORM = np.sqrt((WHOLE**2).sum() + (SPREAD**2).sum())


def on_two_axes(tx, *, check_vma=True, with_params=True):
    """The updates for the mean gradients `WHOLE` and `SPREAD`, other ones on each replica.

    An exchange lays leaves together, so that JAX takes the whole one to vary as well: it comes out
    once a shard.
    """
    mesh = jax.make_mesh((2, 2), ("replica", "shard"))

    def step(params):
        own = jax.tree.map(lambda x: x * (0.5 + jax.lax.axis_index("replica")), params)
        out, _ = tx.update(own, tx.init(params), params if with_params else None)
        return out

    specs = {"spread": P("shard"), "whole": P()}
    out_specs = {"spread": P("shard"), "whole": P("shard")}
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(specs,), out_specs=out_specs, check_vma=check_vma
    )
    out = jax.jit(mapped)({"spread": laid_out(mesh, SPREAD), "whole": WHOLE})
    return np.asarray(out["spread"]), np.asarray(out["whole"]).reshape(2, 3)


def laid_out(mesh, values):
    return jax.device_put(values, jax.NamedSharding(mesh, P("shard")))


EXCHANGE = gx.allreduce(axis_name="replica")


@pytest.mark.parametrize("axis_name", [None, "shard", ("shard",), ()])
def test_parts_on_another_axis_count_and_whole_leaves_count_once(axis_name):
    """Parameters show better which leaves are spread than a name could say."""
    tx = gx.chain(EXCHANGE, gx.clip_by_global_norm(1.0, axis_name=axis_name))
    spread, whole = on_two_axes(tx)
    np.testing.assert_allclose(spread, SPREAD / NORM, rtol=1e-6)
    np.testing.assert_allclose(whole, [WHOLE / NORM] * 2, rtol=1e-6)
    assert (whole[0] == whole[1]).all()


def test_without_parameters_it_cannot_be_told_which_leaves_are_spread():
    tx = gx.chain(EXCHANGE, gx.clip_by_global_norm(1.0))
    with pytest.raises(ValueError, match=r"some leaves are spread over \['shard'\], .*, params\)"):
        on_two_axes(tx, with_params=False)


def test_where_jax_does_not_keep_track_the_axis_has_to_be_named():
    tx = gx.chain(EXCHANGE, gx.clip_by_global_norm(1.0))
    with pytest.raises(
        ValueError, match=r"mesh with the axes \['replica', 'shard'\].*='shard', or"
    ):
        on_two_axes(tx, check_vma=False)


@pytest.mark.parametrize("options", [{"check_vma": False}, {"with_params": False}], ids=str)
def test_over_a_named_axis_all_leaves_are_taken_to_be_spread(options):
    tx = gx.chain(EXCHANGE, gx.clip_by_global_norm(1.0, axis_name="shard"))
    spread, whole = on_two_axes(tx, **options)
    norm = np.sqrt(2 * (WHOLE**2).sum() + (SPREAD**2).sum())
    np.testing.assert_allclose(spread, SPREAD / norm, rtol=1e-6)
    np.testing.assert_allclose(whole, [WHOLE / norm] * 2, rtol=1e-6)


def test_over_no_axis_each_device_has_a_norm_of_its_own():
    tx = gx.chain(EXCHANGE, gx.clip_by_global_norm(1.0, axis_name=()))
    spread, _ = on_two_axes(tx, check_vma=False)
    norms = [np.sqrt((WHOLE**2).sum() + (part**2).sum()) for part in (SPREAD[:4], SPREAD[4:])]
    expected = np.concatenate([SPREAD[:4] / norms[0], SPREAD[4:] / norms[1]])
    np.testing.assert_allclose(spread, expected, rtol=1e-6)


def spoilt_where_large(bad):
    def spoil(updates, params):
        return jax.tree.map(lambda x: jnp.where(x > 6, bad, x), updates)

    return gx.declare(
        optax.stateless(spoil), name="spoil", linear=True, stateful=False, needs_reduced=False
    )


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("front", [(), (gx.clip_by_local_norm(100.0),)], ids=repr)
def test_a_bad_value_in_one_part_is_a_bad_step_of_all(bad, front):
    """In front of the gate, and behind it."""
    tx = gx.chain(spoilt_where_large(bad), *front, EXCHANGE, gx.clip_by_global_norm(100.0))
    for part in on_two_axes(tx):
        np.testing.assert_array_equal(part, np.zeros_like(part))


def test_norm_of_spread_parts_does_not_overflow():
    def step(x):
        tx = gx.clip_by_global_norm(1.0)
        return tx.update([x], tx.init([x]))[0][0]

    mesh = jax.make_mesh((4,), ("shard",))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=P("shard"), out_specs=P("shard"))
    out = jax.jit(mapped)(laid_out(mesh, np.asarray([3e38, 0.0, 1e-30, -3e38], np.float32)))
    np.testing.assert_allclose(out, [0.5**0.5, 0.0, 0.0, -(0.5**0.5)], rtol=1e-6, atol=1e-30)


def test_the_local_norm_is_of_all_parts_of_one_rank():
    spread, whole = on_two_axes(gx.chain(gx.clip_by_local_norm(1.0), EXCHANGE))
    # Both replicas have more than 1 / sqrt(2), in one direction.
    np.testing.assert_allclose(spread, SPREAD / NORM / 2**0.5, rtol=1e-6)
    np.testing.assert_allclose(whole, [WHOLE / NORM / 2**0.5] * 2, rtol=1e-6)


def test_the_clip_of_momentum_correction_too():
    tx = gx.chain(gx.topk(1.0), gx.momentum_correction(0.0, clip=1.0), EXCHANGE)
    mesh = jax.make_mesh((2, 2), ("replica", "shard"))

    def step(x):
        own = x * (0.5 + jax.lax.axis_index("replica"))
        return tx.update([own], tx.init([x]))[0][0]

    mapped = jax.shard_map(step, mesh=mesh, in_specs=P("shard"), out_specs=P("shard"))
    expected = SPREAD / np.linalg.norm(SPREAD) / 2**0.5
    np.testing.assert_allclose(jax.jit(mapped)(laid_out(mesh, SPREAD)), expected, rtol=1e-6)


def test_an_axis_that_is_not_there_is_refused():
    tx = gx.clip_by_global_norm(1.0, axis_name="model")
    with pytest.raises(
        ValueError, match=r"'model'\): no axis of that name; the axes here are \[\]"
    ):
        updates_of(tx, [drawn(0)])


def test_an_axis_of_vmap_may_be_named():
    tx = gx.clip_by_global_norm(1.0, axis_name="part")
    step = jax.vmap(lambda x: tx.update([x], tx.init([x]))[0][0], axis_name="part")
    np.testing.assert_allclose(step(jnp.asarray([[3.0], [4.0]])), [[0.6], [0.8]], rtol=1e-6)
