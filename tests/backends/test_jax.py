"""Fragments on JAX arrays give what they give on torch tensors."""

import inspect

import numpy as np
import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradtx as gx
from gradtx import backends
from gradtx.backends import torch_ops
from gradtx.core.payload import Payload

jax = pytest.importorskip("jax")
jnp = jax.numpy
jax_ops = pytest.importorskip("gradtx.backends.jax_ops")

INF, NAN = float("inf"), float("nan")

FRAGMENTS = {
    "unscale": gx.chain(gx.unscale()),
    "topk": gx.chain(gx.unscale(), gx.topk(0.3, feedback=False)),
    "sign": gx.chain(gx.unscale(), gx.sign(feedback=False)),
    "topk, sign": gx.chain(gx.unscale(), gx.topk(0.5, feedback=False), gx.sign(feedback=False)),
    "topk, ef": gx.chain(gx.unscale(), gx.topk(0.3), gx.ef()),
    "sign, ef": gx.chain(gx.unscale(), gx.sign(), gx.ef()),
    "skip_bn, topk, sign, ef": gx.chain(
        gx.unscale(), gx.skip_bn(), gx.topk(0.5), gx.sign(), gx.ef()
    ),
    "global": gx.chain(gx.unscale(), gx.skip_bn(), gx.topk(0.3, scope="global"), gx.ef()),
    "topk, topk, ef": gx.chain(gx.unscale(), gx.topk(0.5), gx.topk(0.5), gx.ef()),
    "mask and gate": gx.chain(
        gx.unscale(), gx.apply_if_finite(gx.masked(gx.error_feedback(gx.topk(0.5)), gx.is_matrix))
    ),
}
DTYPES = ["float16", "bfloat16", "float32"]


def to_torch(array, dtype):
    return torch.tensor(np.asarray(array, np.float32)).to(getattr(torch, dtype))


def to_jax(array, dtype):
    return jnp.asarray(np.asarray(array, np.float32)).astype(dtype)


def to_numpy(leaf):
    if isinstance(leaf, torch.Tensor):
        return (leaf.float() if leaf.is_floating_point() else leaf).numpy()
    return np.asarray(leaf.astype(jnp.float32) if "float" in str(leaf.dtype) else leaf)


def assert_agree(one, other, atol=None):
    """The same structure; whole numbers and bits exact, values to two units in the last place.

    With `atol`, values to that: a residual is a difference, so its own last place says nothing.
    """
    leaves, spec = optree.tree_flatten(one, none_is_leaf=True)
    others, other_spec = optree.tree_flatten(other, none_is_leaf=True)
    assert spec == other_spec
    for a, b in zip(leaves, others, strict=True):
        if a is None:
            assert b is None
            continue
        assert tuple(a.shape) == tuple(b.shape)
        integer = "int" in str(a.dtype)
        assert integer or str(a.dtype).removeprefix("torch.") == str(b.dtype)
        x, y = to_numpy(a), to_numpy(b)
        if x.dtype == np.float32 and atol is not None:
            np.testing.assert_allclose(x, y, rtol=0, atol=atol)
        elif x.dtype == np.float32:
            # Two units for the sum, and what they make of the residual of the step before.
            np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6 * np.abs(x).max(initial=0.0))
        else:
            np.testing.assert_array_equal(x, y)


def trees(seed, dtypes, steps=3):
    """Gradients as NumPy arrays, and the dtype of each leaf."""
    rng = np.random.default_rng(seed)
    shapes = {"conv": {"kernel": (3, 4), "bias": (5,)}, "bn1": {"scale": (3,)}, "s": (), "e": (0,)}
    leaves, spec = optree.tree_flatten(shapes, is_leaf=lambda node: isinstance(node, tuple))
    kinds = dict(enumerate(dtypes))
    grads = [
        optree.tree_unflatten(spec, [rng.normal(size=shape).astype(np.float32) for shape in leaves])
        for _ in range(steps)
    ]
    return grads, optree.tree_unflatten(spec, [kinds[i % len(kinds)] for i in range(len(leaves))])


def played(tx, convert, grads, dtypes, scales, wrap=lambda update: update):
    """What comes out, step by step, and the state at the end."""
    converted = [optree.tree_map(convert, tree, dtypes) for tree in grads]
    update = wrap(lambda updates, state, scale: tx.update(updates, state, loss_scale=scale))
    state, outs = tx.init(converted[0]), []
    for tree, scale in zip(converted, scales, strict=True):
        out, state = update(tree, state, scale)
        outs.append(out)
    return outs, state


@pytest.mark.parametrize("tx", FRAGMENTS.values(), ids=FRAGMENTS)
@settings(max_examples=15)
@given(
    st.integers(0, 2**31),
    st.lists(st.sampled_from(DTYPES), min_size=5, max_size=5),
    st.lists(st.sampled_from([1.0, 2.0, 1024.0]), min_size=2, max_size=2),
)
def test_eager_fragment_agrees_with_torch(tx, seed, dtypes, scales):
    grads, kinds = trees(seed, dtypes, steps=2)
    one = played(tx, to_torch, grads, kinds, scales)
    other = played(tx, to_jax, grads, kinds, scales)
    assert_agree(one[0], other[0])
    assert_agree(one[1].states, other[1].states, atol=1e-6)


@pytest.mark.parametrize("tx", FRAGMENTS.values(), ids=FRAGMENTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_jitted_fragment_agrees_with_torch(tx, dtype):
    grads, kinds = trees(7, [dtype])
    scales = [4.0, 4.0, 2.0]
    one = played(tx, to_torch, grads, kinds, scales)
    other = played(tx, to_jax, grads, kinds, scales, jax.jit)
    assert_agree(one[0], other[0])


@pytest.mark.parametrize("tx", FRAGMENTS.values(), ids=FRAGMENTS)
def test_jitted_fragment_compiles_once(tx):
    traced = []

    def wrap(update):
        def counted(*arguments):
            traced.append(1)
            return update(*arguments)

        return jax.jit(counted)

    grads, kinds = trees(1, ["float32"])
    played(tx, to_jax, grads, kinds, [1.0, 2.0, 4.0], wrap)
    assert len(traced) == 1


@pytest.mark.parametrize(
    ("value", "jitted"), [(INF, False), (-INF, False), (NAN, False), (INF, True), (NAN, True)]
)
@pytest.mark.parametrize("name", ["topk, ef", "skip_bn, topk, sign, ef", "global"])
def test_bad_step_leaves_no_trace(name, value, jitted):
    tx = FRAGMENTS[name]

    def update(updates, state, scale):
        return tx.update(updates, state, loss_scale=scale)

    compiled = jax.jit(update) if jitted else update
    grads, kinds = trees(2, ["float32"])
    grads[1]["bn1"]["scale"][1] = value
    outs, state = played(tx, to_jax, grads, kinds, [2.0] * 3, lambda _: compiled)
    good = [grads[0], grads[2]]
    expected, straight = played(tx, to_jax, good, kinds, [2.0] * 2, lambda _: compiled)
    assert not any(to_numpy(leaf).any() for leaf in optree.tree_leaves(outs[1]) if leaf.size)
    assert int(state.total_notfinite) == 1
    got, wanted = (outs[2], state.gate.inner_states), (expected[1], straight.gate.inner_states)
    for a, b in zip(optree.tree_leaves(got), optree.tree_leaves(wanted), strict=True):
        np.testing.assert_array_equal(to_numpy(a), to_numpy(b))


def test_absent_leaf_keeps_its_residual():
    tx = gx.chain(gx.topk(0.5), gx.ef())
    grads = {"a": jnp.asarray([3.0, 1.0]), "b": jnp.ones(2)}
    _, state = tx.update(grads, tx.init(grads))
    out, state = tx.update({"a": None, "b": jnp.ones(2)}, state)
    assert out["a"] is None
    assert state.gate.inner_states[0].residual["a"].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("tx", FRAGMENTS.values(), ids=FRAGMENTS)
class TestJaxTrees:
    def outcome(self, tx):
        grads, kinds = trees(3, ["float32"], steps=1)
        (out,), state = played(tx, to_jax, grads, kinds, [2.0])
        return out, state

    def test_jax_flattens_to_arrays(self, tx):
        for tree in self.outcome(tx):
            assert all(isinstance(leaf, jax.Array) for leaf in jax.tree_util.tree_leaves(tree))

    def test_jax_and_optree_see_the_same_leaves(self, tx):
        for tree in self.outcome(tx):
            ours, theirs = optree.tree_leaves(tree), jax.tree_util.tree_leaves(tree)
            assert [id(leaf) for leaf in ours] == [id(leaf) for leaf in theirs]

    def test_flattened_tree_comes_back(self, tx):
        for tree in self.outcome(tx):
            leaves, treedef = jax.tree_util.tree_flatten(tree)
            back = jax.tree_util.tree_unflatten(treedef, leaves)
            assert jax.tree_util.tree_structure(back) == treedef
            assert_agree(back, tree)

    def test_mapped_tree_keeps_its_structure(self, tx):
        for tree in self.outcome(tx):
            doubled = jax.tree_util.tree_map(lambda leaf: leaf, tree)
            assert optree.tree_structure(doubled) == optree.tree_structure(tree)

    def test_payload_is_still_a_payload_after_a_map(self, tx):
        out, _ = self.outcome(tx)
        mapped = jax.tree_util.tree_map(lambda leaf: leaf, out)
        kinds = [
            [type(node) for node in optree.tree_leaves(tree, is_leaf=self.is_payload)]
            for tree in (out, mapped)
        ]
        assert kinds[0] == kinds[1]

    @staticmethod
    def is_payload(node):
        return isinstance(node, Payload)

    def test_structure_can_be_hashed(self, tx):
        for tree in self.outcome(tx):
            structure = jax.tree_util.tree_structure(tree)
            assert hash(structure) == hash(jax.tree_util.tree_structure(tree))


def public_functions(module):
    """The parameters of what the module defines, or re-exports from `gradtx.wire.bits`."""
    return {
        name: list(inspect.signature(function).parameters)
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if not name.startswith("_") and function.__module__ in (module.__name__, "gradtx.wire.bits")
    }


def test_both_backends_have_the_same_functions():
    assert public_functions(torch_ops).keys() == public_functions(jax_ops).keys()


@pytest.mark.parametrize("name", sorted(public_functions(torch_ops)))
def test_function_has_the_same_parameters_in_both_backends(name):
    assert public_functions(torch_ops)[name] == public_functions(jax_ops)[name]


def test_backend_is_found_by_the_array():
    assert backends.of(jnp.ones(1)) is jax_ops
    assert backends.of(torch.ones(1)) is torch_ops


def test_what_is_no_array_has_no_backend():
    with pytest.raises(TypeError, match=r"^expected a torch tensor or a JAX array, got ndarray$"):
        backends.of(np.ones(1))


def test_whole_numbers_are_refused_naming_the_path():
    with pytest.raises(TypeError, match=r"^leaf 'w' has dtype int32: expected one of float16"):
        gx.chain().init({"w": jnp.arange(3)})


values = st.lists(
    st.one_of(
        st.sampled_from([0.0, -0.0, 1.0, -1.0, INF, -INF]),
        st.floats(-1e6, 1e6, width=32, allow_subnormal=False),
    ),
    min_size=1,
    max_size=20,
)


class TestOperations:
    @given(values, st.data())
    def test_top_k(self, numbers, data):
        k = data.draw(st.integers(0, len(numbers)))
        one = torch_ops.top_k(torch.tensor(numbers), k)
        other = jax_ops.top_k(jnp.asarray(numbers, jnp.float32), k)
        assert one.tolist() == other.tolist()

    @pytest.mark.parametrize("n", [3, 100])
    @pytest.mark.parametrize("k", [1, 2, 3])
    def test_top_k_with_nan(self, n, k):
        numbers = np.ones(n, np.float32)
        numbers[1], numbers[2] = NAN, INF
        one, other = (
            torch_ops.top_k(torch.tensor(numbers), k),
            jax_ops.top_k(jnp.asarray(numbers), k),
        )
        assert one.tolist() == other.tolist()

    @given(st.lists(st.booleans(), max_size=40))
    def test_bits(self, bits):
        one = torch_ops.pack_bits(torch.tensor(bits, dtype=torch.bool))
        other = jax_ops.pack_bits(jnp.asarray(bits, bool))
        assert one.tolist() == other.tolist()
        assert jax_ops.unpack_bits(other, len(bits)).tolist() == bits

    @given(st.integers(0, 2**31 - 1), st.integers(0, 2**20), st.integers(0, 40))
    def test_random_numbers_from_some_place_on(self, seed, start, n):
        one = torch_ops.uniform(torch_ops.random_key(seed), n, torch.zeros(1), start)
        other = jax_ops.uniform(jax_ops.random_key(seed), n, jnp.zeros(1), jnp.int32(start))
        assert one.tolist() == other.tolist()
        whole = torch_ops.uniform(torch_ops.random_key(seed), start + n, torch.zeros(1))
        assert one.tolist() == whole[start:].tolist()

    @given(st.integers(0, 30), st.integers(1, 5), st.integers(0, 9))
    def test_table(self, n, count, more):
        length = -(-n // count) + more
        one = torch_ops.table(torch.arange(1, n + 1), count, length)
        other = jax_ops.table(jnp.arange(1, n + 1), count, length)
        assert one.tolist() == other.tolist()
        filled = [*range(1, n + 1), *[0] * (count * length - n)]
        assert one.flatten().tolist() == filled
        assert (
            torch_ops.repeat(one, 2).tolist()
            == jax_ops.repeat(other, 2).tolist()
            == [one.tolist()] * 2
        )

    @pytest.mark.parametrize("n", [0, 1, 7, 1000, 300_000])
    def test_mean_magnitude(self, n):
        numbers = np.random.default_rng(n).normal(size=n).astype(np.float32)
        one = torch_ops.mean_magnitude(torch.tensor(numbers)).numpy()
        other = np.asarray(jax_ops.mean_magnitude(jnp.asarray(numbers)))
        np.testing.assert_array_max_ulp(one, other, maxulp=2)

    def test_mean_magnitude_of_large_values_does_not_overflow(self):
        assert jax_ops.mean_magnitude(jnp.full(4, 3e38)).item() == np.float32(3e38)

    @given(values)
    def test_all_finite(self, numbers):
        one = torch_ops.all_finite([torch.tensor(numbers), torch.zeros(0)])
        other = jax_ops.all_finite([jnp.asarray(numbers, jnp.float32), jnp.zeros(0)])
        assert bool(one) == bool(other) == bool(np.isfinite(np.float32(numbers)).all())

    def test_all_finite_of_nothing(self):
        assert bool(torch_ops.all_finite([]))
        assert bool(jax_ops.all_finite([]))

    def test_scatter_along_the_last_axis(self):
        rows, places = [[1.0, 2.0], [3.0, 4.0]], [[0, 2], [1, 2]]
        one = torch_ops.scatter(torch.tensor(rows), torch.tensor(places), 3)
        other = jax_ops.scatter(jnp.asarray(rows), jnp.asarray(places), 3)
        assert one.tolist() == other.tolist() == [[1, 0, 2], [0, 3, 4]]

    def test_take_along_the_last_axis(self):
        rows, places = [[1.0, 2.0, 5.0], [3.0, 4.0, 6.0]], [[0, 2], [1, 2]]
        one = torch_ops.take(torch.tensor(rows), torch.tensor(places))
        other = jax_ops.take(jnp.asarray(rows), jnp.asarray(places))
        assert one.tolist() == other.tolist() == [[1, 5], [4, 6]]

    def test_casting_to_bf16_rounds_alike(self):
        numbers = np.random.default_rng(0).normal(size=1000).astype(np.float32)
        one = torch_ops.cast(torch.tensor(numbers), "bfloat16")
        other = jax_ops.cast(jnp.asarray(numbers), "bfloat16")
        assert to_numpy(one).tolist() == to_numpy(other).tolist()


@pytest.mark.parametrize(
    "inner",
    [
        gx.random_k(0.5),
        gx.topk(gx.warmup_density([0.5, 0.25], 1)),
        gx.topk(0.5, scope="global"),
        gx.powersgd(2),
        gx.apply_if_finite(gx.topk(0.5)),
    ],
    ids=repr,
)
def test_a_part_that_is_given_no_leaf_keeps_jax_arrays(inner):
    tx = gx.chain(gx.unscale(), gx.masked(inner, ~gx.path_glob("*")), gx.allreduce(), check=False)
    grads = {"w": jnp.ones(4)}
    state = tx.init(grads)
    _, after = jax.jit(tx.update)(grads, state, loss_scale=2.0)
    _, nothing = tx.update({"w": None}, state, loss_scale=2.0)
    for tree in (state, after, nothing):
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree))
