"""Parameters in the containers of other libraries: leaves are known by key path."""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.utils import _pytree as torch_pytree

import gradtx as gx
from gradtx.backends import registry
from gradtx.core.tree import adopt, flatten_with_paths, unboxed

jax = pytest.importorskip("jax")
jnp = jax.numpy

from meshes import OnMesh  # noqa: E402

PLAIN = {"a": {"w": jnp.arange(12.0).reshape(3, 4)}, "b": jnp.asarray([-20.0, 0.5])}
TX = gx.chain(gx.unscale(), gx.topk(0.25), gx.ef(), gx.allreduce())


def frozen():
    core = pytest.importorskip("flax.core")
    return core.FrozenDict(PLAIN), ["a.w", "b"]


def nnx_state():
    nnx = pytest.importorskip("flax.nnx")
    state = nnx.state(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.Param)
    return state, ["bias", "kernel"]


def partitioned():
    linen = pytest.importorskip("flax.linen")
    kernel = linen.Partitioned(jnp.arange(12.0).reshape(3, 4), (None, "model"))
    return {"dense": {"kernel": kernel, "bias": jnp.arange(4.0)}}, ["dense.bias", "dense.kernel"]


def struct():
    flax_struct = pytest.importorskip("flax.struct")

    @flax_struct.dataclass
    class Params:
        w: jax.Array
        activation: str = flax_struct.field(pytree_node=False, default="relu")

    return Params(jnp.arange(4.0)), ["w"]


def module():
    eqx = pytest.importorskip("equinox")
    mlp = eqx.nn.MLP(3, 2, 8, 1, key=jax.random.key(0))
    layers = [f"layers.{i}.{name}" for i in range(2) for name in ("weight", "bias")]
    return eqx.filter(mlp, eqx.is_inexact_array), [*layers, "activation", "final_activation"]


@pytest.mark.parametrize("make", [frozen, nnx_state, partitioned, struct, module])
def test_gradients_come_back_in_the_same_container(make):
    params, paths = make()
    grads = jax.tree.map(lambda x: x + 1.0, params)
    state = TX.init(params)
    updates, after = jax.jit(TX.update)(grads, state, loss_scale=2.0)
    assert [leaf.path for leaf in state.layout.leaves] == paths
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    for sent, left, given in zip(
        *map(jax.tree.leaves, (updates, after.residual, grads)), strict=True
    ):
        np.testing.assert_allclose(sent + left, given / 2, rtol=1e-6)


def test_a_plain_dict_and_a_frozen_one_are_the_same_parameters():
    params, _ = frozen()
    state = TX.init(params)
    plain, _ = TX.update(PLAIN, state, loss_scale=1.0)
    other, _ = TX.update(params, TX.init(PLAIN), loss_scale=1.0)
    assert type(plain) is dict
    assert type(other) is type(params)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), plain, other.unfreeze()))


def test_on_a_mesh():
    params, _ = frozen()
    on_mesh = OnMesh(gx.chain(gx.topk(0.25), gx.ef(), gx.allreduce(axis_name="data")), params, 2)
    updates = on_mesh.step(jax.tree.map(lambda x: np.stack([x, x]), params))
    assert type(updates) is type(params)
    assert float(updates["b"][0]) == -20


X = jnp.asarray(np.random.default_rng(0).normal(size=(16, 3)), jnp.float32)
Y = X @ jnp.asarray([[1.0, 2.0], [0.0, -1.0], [3.0, 0.5]])


def optimizer():
    optax = pytest.importorskip("optax")
    return optax.chain(gx.to_optax(gx.chain(gx.topk(0.5), gx.ef())), optax.sgd(0.1))


def by_hand(params, steps=4):
    """What a loop over plain dicts comes to."""
    tx = optimizer()
    state = tx.init(params)
    for _ in range(steps):
        grads = jax.grad(lambda p: jnp.square(X @ p["kernel"] + p["bias"] - Y).mean())(params)
        updates, state = tx.update(grads, state, params)
        params = jax.tree.map(jnp.add, params, updates)
    return params


def test_nnx_unwraps_its_variables_between_init_and_update():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    expected = by_hand({"kernel": model.kernel[...], "bias": model.bias[...]})
    trained = nnx.Optimizer(model, optimizer(), wrt=nnx.Param)

    @nnx.jit
    def step(model, trained):
        grads = nnx.grad(lambda model: jnp.square(model(X) - Y).mean())(model)
        trained.update(model, grads)

    for _ in range(4):
        step(model, trained)
    np.testing.assert_allclose(model.kernel[...], expected["kernel"], rtol=1e-5)
    np.testing.assert_allclose(model.bias[...], expected["bias"], rtol=1e-5, atol=1e-7)


def test_a_fragment_takes_variables_too():
    nnx = pytest.importorskip("flax.nnx")
    params, _ = nnx_state()
    tx = gx.error_feedback(gx.topk(0.5))
    state = tx.init(params)
    for grads in (params, nnx.as_pure(params)):
        updates, after = tx.update(grads, state, params)
        assert isinstance(updates["bias"], nnx.Param) == (grads is params)
        assert jax.tree.structure(after) == jax.tree.structure(state)


def test_a_key_that_is_called_value_is_no_box():
    core = pytest.importorskip("flax.core")
    state = TX.init(core.FrozenDict({"a": {"value": jnp.ones(2)}}))
    assert [leaf.path for leaf in state.layout.leaves] == ["a.value"]


def test_in_a_train_state_of_flax():
    train_state = pytest.importorskip("flax.training.train_state")
    linen = pytest.importorskip("flax.linen")
    model = linen.Dense(2)
    params = model.init(jax.random.key(0), X)["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optimizer())

    @jax.jit
    def step(state):
        def loss(params):
            return jnp.square(state.apply_fn({"params": params}, X) - Y).mean()

        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    for _ in range(4):
        state = step(state)
    assert jax.tree.structure(state.params) == jax.tree.structure(params)
    for name, wanted in by_hand(params).items():
        np.testing.assert_allclose(state.params[name], wanted, rtol=1e-5, atol=1e-7)


def test_in_a_loop_of_equinox():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.Linear(3, 2, key=jax.random.key(0))
    plain = by_hand({"kernel": model.weight.T, "bias": model.bias})
    tx = optimizer()
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state):
        grads = eqx.filter_grad(lambda model: jnp.square(jax.vmap(model)(X) - Y).mean())(model)
        updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state

    for _ in range(4):
        model, state = step(model, state)
    np.testing.assert_allclose(model.weight.T, plain["kernel"], rtol=1e-5)
    np.testing.assert_allclose(model.bias, plain["bias"], rtol=1e-5, atol=1e-7)


def test_a_part_that_is_given_no_leaf_finds_them():
    params, _ = frozen()
    none = gx.masked(gx.random_k(0.5, feedback=False), ~gx.path_glob("*"))
    state = gx.chain(none, gx.allreduce(), check=False).init(params)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))


def test_partition_specs_of_a_train_state():
    """A container that has not been met yet: the chain's state in it is found."""
    flax_struct = pytest.importorskip("flax.struct")

    @flax_struct.dataclass
    class Training:
        params: dict
        opt_state: tuple

    tx = gx.chain(gx.topk(0.25), gx.ef(), gx.allreduce(axis_name="data"))
    state = jax.eval_shape(lambda params: Training(params, tx.init(params)), PLAIN)
    specs = gx.partition_specs(state, axis_name="data")
    spec = jax.sharding.PartitionSpec
    assert specs.params["b"] == spec()
    assert specs.opt_state.residual["b"] == spec("data")


def test_partition_specs_say_how_to_install_jax(monkeypatch):
    state = TX.init(PLAIN)
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(ImportError, match=r"^partition_specs needs jax, .*'gradtx\[jax\]'$"):
        gx.partition_specs(state, axis_name="data")


def test_orders_of_a_dict_do_not_matter():
    """JAX and optree sort the keys, torch takes them as they were put in."""
    one = {"b": torch.ones(2), "a": torch.arange(4.0)}
    other = dict(reversed(one.items()))
    first, _ = TX.update(one, TX.init(other), loss_scale=1.0)
    second, _ = TX.update(other, TX.init(one), loss_scale=1.0)
    assert list(first) == ["b", "a"]
    assert all(torch.equal(first[key], second[key]) for key in one)


def test_state_crosses_the_pytrees_of_torch_and_jax():
    grads = {"b": torch.ones(2), "a": torch.arange(4.0)}
    _, state = TX.update(grads, TX.init(grads), loss_scale=1.0)
    leaves, spec = torch_pytree.tree_flatten(state)
    again = torch_pytree.tree_unflatten(leaves, spec)
    _, one = TX.update(grads, again, loss_scale=1.0)
    _, two = TX.update(grads, state, loss_scale=1.0)
    assert all(torch.equal(one.residual[key], two.residual[key]) for key in grads)
    jax_leaves, treedef = jax.tree.flatten(TX.init(PLAIN))
    state = jax.tree.unflatten(treedef, jax_leaves)
    updates, _ = TX.update(PLAIN, state, loss_scale=1.0)
    assert float(updates["b"][0]) == -20


def test_threads_may_meet_a_container_at_once():
    @jax.tree_util.register_pytree_with_keys_class
    class Box:
        def __init__(self, value):
            self.value = value

        def tree_flatten_with_keys(self):
            return [(jax.tree_util.GetAttrKey("value"), self.value)], None

        @classmethod
        def tree_unflatten(cls, aux, parts):
            return cls(*parts)

    def paths(_):
        together.wait()
        registry.adopt_type(Box)  # Each has found it unknown.
        return flatten_with_paths(unboxed(adopt({"w": Box(PLAIN["b"])})))[0]

    threads = 8
    together = threading.Barrier(threads)
    with ThreadPoolExecutor(threads) as pool:
        assert list(pool.map(paths, range(threads))) == [["w"]] * threads


def test_threads_may_register_our_nodes_with_jax_at_once(monkeypatch):
    class Jax:
        """Takes its time, and a class only once."""

        tree_util = property(lambda self: self)
        known = ()

        def register_pytree_node(self, cls, flatten, unflatten):
            assert cls not in self.known
            time.sleep(1e-3)
            self.known = (*self.known, cls)

    def register(_):
        together.wait()
        registry.register_with_jax(fake)
        return len(fake.known)

    fake, threads = Jax(), 4
    monkeypatch.setattr(registry, "_jax", [])
    together = threading.Barrier(threads)
    with ThreadPoolExecutor(threads) as pool:
        assert set(pool.map(register, range(threads))) == {len(registry._nodes)}


def test_a_module_is_no_predicate():
    """It can be called, but it is a tree."""
    eqx = pytest.importorskip("equinox")
    mlp = eqx.nn.MLP(3, 2, 8, 1, key=jax.random.key(0))
    with pytest.raises(TypeError, match="a pytree"):
        gx.masked(gx.topk(0.1, feedback=False), mlp)


def test_what_no_library_knows_stays_a_leaf():
    class Opaque:
        pass

    tree = {"x": Opaque(), "y": jnp.ones(2)}
    assert flatten_with_paths(adopt(tree))[0] == ["x", "y"]
    with pytest.raises(TypeError, match="leaf 'x' is a Opaque"):
        TX.init(tree)
