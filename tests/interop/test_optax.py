"""gradtx in optax, optax in gradtx, and optax for torch parameters."""

import io
import re
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import optree
import pytest
import torch

import gradtx as gx
from gradtx.core.foreign import describe
from gradtx.interop import dlpack
from gradtx.testing import check_laws, run_ranks

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
jnp = jax.numpy

from meshes import P, laid_out, mesh_of  # noqa: E402

INF = float("inf")
PARAMS = {"b": np.linspace(-1, 1, 3, dtype=np.float32), "w": np.ones((4, 5), np.float32)}


def refused(error, text):
    return pytest.raises(error, match=f"^{re.escape(text)}")


def codes(*parts):
    with pytest.raises(gx.ChainOrderError) as caught:
        gx.chain(*parts)
    return {violation.code for violation in caught.value.violations}


def gradients(steps, like=PARAMS, seed=0):
    rng = np.random.default_rng(seed)
    return [
        {key: rng.normal(size=x.shape).astype(np.float32) for key, x in like.items()}
        for _ in range(steps)
    ]


def on_jax(tree):
    return {key: jnp.asarray(x) for key, x in tree.items()}


def on_torch(tree):
    return {key: torch.tensor(x) for key, x in tree.items()}


def close(tree, other, rtol=1e-6, atol=1e-7):
    for a, b in zip(optree.tree_leaves(tree), optree.tree_leaves(other), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=rtol, atol=atol)


class TestToOptax:
    tx = gx.chain(gx.unscale(), gx.topk(0.25), gx.ef())

    def expected(self, tx=None):
        """Updates of the chain by itself, decoded, after two steps."""
        tx = tx or gx.to_optax(self.tx)
        state = tx.init(on_jax(PARAMS))
        for tree in gradients(2):
            out, state = tx.update(on_jax(tree), state, loss_scale=4.0)
        return out, state

    def test_it_is_optaxs_own_type(self):
        assert isinstance(gx.to_optax(self.tx), optax.GradientTransformationExtraArgs)

    def test_payloads_come_out_decoded_in_shape_and_dtype(self):
        grads = {"w": jnp.asarray([[3.0, 1.0], [0.5, -2.0]], jnp.bfloat16), "none": None}
        tx = gx.to_optax(gx.chain(gx.topk(0.5), gx.ef()))
        out, _ = tx.update(grads, tx.init(grads))
        assert (str(out["w"].dtype), out["w"].tolist()) == ("bfloat16", [[3, 0], [0, -2]])
        assert out["none"] is None

    def test_leaves_compressed_together_come_out_apart(self):
        tx = gx.to_optax(gx.chain(gx.topk(0.5, scope="global"), gx.ef()))
        grads = {"a": jnp.asarray([3.0, 1.0]), "b": jnp.asarray([[2.0], [0.5]])}
        out, _ = tx.update(grads, tx.init(grads))
        assert (out["a"].tolist(), out["b"].tolist()) == ([3, 0], [[2], [0]])

    @pytest.mark.parametrize("jitted", [False, True])
    @pytest.mark.parametrize("wrap", [optax.chain, None], ids=["chain", "named_chain"])
    def test_in_a_chain_of_optax_the_loss_scale_arrives(self, wrap, jitted):
        parts = (gx.to_optax(self.tx), optax.sgd(0.5))
        tx = wrap(*parts) if wrap else optax.named_chain(*zip(["ours", "sgd"], parts, strict=True))
        update = jax.jit(tx.update) if jitted else tx.update
        state = tx.init(on_jax(PARAMS))
        for tree in gradients(2):
            out, state = update(on_jax(tree), state, on_jax(PARAMS), loss_scale=4.0)
        close(out, jax.tree.map(lambda u: -0.5 * u, self.expected()[0]))

    def test_without_it_the_loss_scale_does_not_arrive(self):
        tx = optax.chain(self.tx, optax.sgd(0.5))
        state = tx.init(on_jax(PARAMS))
        with refused(ValueError, "unscale() needs the loss scale"):
            tx.update(on_jax(PARAMS), state, on_jax(PARAMS), loss_scale=4.0)

    def test_what_is_dense_and_needs_no_argument_is_accepted_as_it_is(self):
        clip = gx.declare(optax.clip(0.5), stateful=False, needs_reduced=False)
        tx = optax.chain(gx.chain(clip), optax.sgd(1.0))
        out, _ = tx.update(on_jax(PARAMS), tx.init(on_jax(PARAMS)))
        assert float(out["w"].min()) == -0.5

    def test_masked(self):
        tx = optax.masked(gx.to_optax(self.tx), {"b": False, "w": True})
        out, state = self.expected(tx)
        close(out["b"], gradients(2)[1]["b"])
        alone = self.expected()
        close(out["w"], alone[0]["w"])
        close(optax.tree.get(state, "residual")["w"], alone[1].residual["w"])

    def test_partition(self):
        tx = optax.partition(
            {"ours": gx.to_optax(self.tx), "sgd": optax.sgd(1.0)}, {"b": "sgd", "w": "ours"}
        )
        out, _ = self.expected(tx)
        close(out["b"], -gradients(2)[1]["b"])
        close(out["w"], self.expected()[0]["w"])

    def test_multi_steps(self):
        tx = optax.MultiSteps(optax.chain(gx.to_optax(self.tx), optax.sgd(1.0)), 2)
        update = jax.jit(tx.update)
        state = tx.init(on_jax(PARAMS))
        first, second = gradients(2)
        out, state = update(on_jax(first), state, on_jax(PARAMS), loss_scale=2.0)
        assert not any(leaf.any() for leaf in jax.tree.leaves(out))
        out, state = update(on_jax(second), state, on_jax(PARAMS), loss_scale=2.0)
        mean = jax.tree.map(lambda a, b: (a + b) / 2, on_jax(first), on_jax(second))
        ours = gx.to_optax(self.tx)
        wanted, _ = ours.update(mean, ours.init(on_jax(PARAMS)), loss_scale=2.0)
        close(out, jax.tree.map(lambda u: -u, wanted))
        assert update._cache_size() == 1

    MICRO = np.asarray([[[4.0, 1.0], [1.0, 0.0]], [[0.0, 2.0], [0.0, 2.0]]], np.float32)
    """By device, by step, values: means of [2.5, 0.5] and [0, 2]."""

    @staticmethod
    def multi_steps(exchange, micro):
        """The updates of the micro-steps of one device."""
        tx = optax.MultiSteps(gx.to_optax(gx.chain(gx.topk(0.5), gx.ef(), exchange)), len(micro))
        state = tx.init({"w": micro[0]})
        out = []
        for grads in micro:
            updates, state = tx.update({"w": grads}, state)
            out.append(updates["w"])
        return jnp.stack(out)

    def test_multi_steps_around_an_exchange_on_one_device(self):
        found = jax.jit(lambda x: self.multi_steps(gx.allreduce(), x))(self.MICRO[0])
        assert found.tolist() == [[0, 0], [2.5, 0]]

    def test_multi_steps_around_an_exchange_under_vmap(self):
        exchange = gx.allreduce(axis_name="data")
        found = jax.vmap(lambda x: self.multi_steps(exchange, x), axis_name="data")(self.MICRO)
        assert found.tolist() == [[[0, 0], [1.25, 1]]] * 2

    def test_multi_steps_around_an_exchange_over_a_mesh_cannot_be(self):
        chain = gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce(axis_name="data"))
        tx, params = optax.MultiSteps(gx.to_optax(chain), 2), {"w": jnp.zeros(2)}
        specs = gx.partition_specs(jax.eval_shape(tx.init, params), axis_name="data")
        assert specs.acc_grads == {"w": P()}
        mesh = mesh_of(2)
        state = jax.jit(jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs))(params)

        def step(grads, state):
            return tx.update({"w": grads[0]}, state)

        mapped = jax.shard_map(step, mesh=mesh, in_specs=(P("data"), specs), out_specs=(P(), specs))
        with pytest.raises(ValueError, match="gradients of 'w' are the same on all devices"):
            jax.jit(mapped)(laid_out(mesh, self.MICRO[:, 0]), state)

    def test_instead_the_gradients_are_accumulated_before_the_chain(self):
        tx = gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce(axis_name="data"))

        def step(micro):
            total, _ = jax.lax.scan(lambda a, b: (a + b, None), 0 * micro[0, 0], micro[0])
            grads = {"w": total / micro.shape[1]}
            return tx.update(grads, tx.init(grads))[0]["w"]

        micro = laid_out(mesh_of(2), self.MICRO)
        mapped = jax.shard_map(step, mesh=mesh_of(2), in_specs=P("data"), out_specs=P())
        assert jax.jit(mapped)(micro).tolist() == [1.25, 1]

    def test_tree_get_finds_what_is_in_the_state(self):
        own = gx.to_optax(gx.chain(gx.dynamic_loss_scale(8.0), gx.topk(0.25), gx.ef()))
        tx = optax.chain(own, optax.adam(1e-3))
        state = tx.init(on_jax(PARAMS))
        bad = {**on_jax(PARAMS), "b": jnp.full(3, INF)}
        _, state = tx.update(bad, state, on_jax(PARAMS))
        assert optax.tree.get(state, "loss_scale") == 4.0
        assert optax.tree.get(state, "total_notfinite") == 1
        assert not optax.tree.get(state, "last_finite")
        assert optax.tree.get(state, "residual").keys() == PARAMS.keys()

    def test_in_a_training_state_it_is_scanned(self):
        class TrainState(NamedTuple):
            step: Any
            params: Any
            opt_state: Any

        tx = optax.chain(
            gx.to_optax(gx.chain(gx.dynamic_loss_scale(8.0), gx.topk(0.25), gx.ef())),
            optax.adamw(1e-2),
        )

        def step(state, target):
            def loss(params):
                scale = optax.tree.get(state.opt_state, "loss_scale")
                return scale * jnp.square(params["w"] - target).mean()

            grads = jax.grad(loss)(state.params)
            updates, opt_state = tx.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            return TrainState(state.step + 1, params, opt_state), loss(params)

        params = on_jax(PARAMS)
        state, losses = jax.lax.scan(
            step, TrainState(jnp.int32(0), params, tx.init(params)), jnp.zeros(20)
        )
        assert state.step == 20
        assert losses[-1] < losses[0]

    def test_apply_if_finite_of_optax_hides_bad_steps_from_it(self):
        """Why it must not stand around an exchange: what it holds does not run on this rank."""
        own = gx.to_optax(gx.chain(gx.dynamic_loss_scale(8.0), gx.topk(0.25), gx.ef()))
        bad = {**on_jax(PARAMS), "b": jnp.full(3, INF)}
        found = []
        for tx in (own, optax.apply_if_finite(own, 3)):
            _, state = tx.update(bad, tx.init(on_jax(PARAMS)))
            found.append(float(optax.tree.get(state, "loss_scale")))
        assert found == [4.0, 8.0]

    def test_inject_hyperparams_on_a_ratio_is_refused(self):
        tx = optax.inject_hyperparams(lambda ratio: gx.to_optax(gx.topk(ratio, feedback=False)))
        with pytest.raises(TypeError, match=r"^topk\(ratio=.*Array.*expected a float over 0 and"):
            tx(ratio=0.5).init(on_jax(PARAMS))

    def test_inject_hyperparams_on_an_optimizer_behind_it_works(self):
        def factory(learning_rate):
            return optax.chain(gx.to_optax(self.tx), optax.sgd(learning_rate))

        tx = optax.inject_hyperparams(factory)(learning_rate=0.5)
        out, _ = self.expected(tx)
        close(out, jax.tree.map(lambda u: -0.5 * u, self.expected()[0]))

    def test_what_is_not_ours_is_refused(self):
        with refused(TypeError, "to_optax(GradientTransformationExtraArgs("):
            gx.to_optax(optax.sgd(0.1))

    def test_the_order_is_checked(self):
        with pytest.raises(gx.ChainOrderError) as caught:
            gx.to_optax(gx.topk(0.5))
        assert [violation.code for violation in caught.value.violations] == ["GX302"]

    def test_without_optax_it_says_how_to_install_it(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "optax", None)
        text = "to_optax needs optax, which is not installed: pip install 'gradtx[jax]'"
        with refused(ImportError, text):
            gx.to_optax(self.tx)


OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": optax.adamw(1e-2),
    "bf16 moments": optax.adamw(1e-2, mu_dtype=jnp.bfloat16),
    "schedule": optax.adam(optax.cosine_decay_schedule(1e-2, 30)),
    "lion": optax.lion(1e-3),
    "rmsprop": optax.rmsprop(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
    "masked": optax.masked(optax.adam(1e-2), {"b": False, "w": True}),
    "partition": optax.partition(
        {"a": optax.adam(1e-2), "s": optax.sgd(0.1)}, {"b": "s", "w": "a"}
    ),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "multi steps": optax.MultiSteps(optax.adam(1e-2), 3).gradient_transformation(),
}


class TestOptaxInAChain:
    def test_it_stands_behind_the_exchange(self):
        tx = gx.chain(gx.topk(0.01), gx.ef(), gx.allreduce(), optax.adamw(1e-3))
        assert tx.stages[-1].needs_reduced
        assert tx.stages[-1].stateful

    def test_before_the_exchange_it_is_refused(self):
        assert codes(optax.adamw(1e-3), gx.allreduce()) == {"GX403"}

    def test_it_takes_no_payload(self):
        assert codes(gx.topk(0.01), gx.ef(), optax.adamw(1e-3)) == {"GX401"}

    def test_before_unscale_it_is_refused(self):
        assert codes(optax.adamw(1e-3), gx.unscale()) == {"GX102"}

    @pytest.mark.parametrize("tx", OPTIMIZERS.values(), ids=OPTIMIZERS)
    def test_it_does_what_it_does_alone(self, tx):
        ours = gx.chain(gx.unscale(), tx)
        params = on_jax(PARAMS)
        state, alone = ours.init(params), tx.init(params)
        for tree in gradients(4):
            scaled = jax.tree.map(lambda x: 2 * x, on_jax(tree))
            out, state = ours.update(scaled, state, params, loss_scale=2.0)
            wanted, alone = tx.update(on_jax(tree), alone, params)
            close(out, wanted)
        close(state.gate.inner_states[0], alone)

    def test_parameters_are_asked_for_by_optax(self):
        tx = gx.chain(gx.unscale(), optax.adamw(1e-3))
        with pytest.raises(ValueError, match="params"):
            tx.update(on_jax(PARAMS), tx.init(on_jax(PARAMS)), loss_scale=1.0)

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
    @pytest.mark.parametrize("tx", OPTIMIZERS.values(), ids=OPTIMIZERS)
    def test_types_are_a_fixed_point(self, tx, dtype):
        ours = gx.chain(gx.dynamic_loss_scale(8.0), tx)
        params = jax.tree.map(lambda x: x.astype(dtype), on_jax(PARAMS))
        state = ours.init(params)

        def step(state, _):
            return ours.update(params, state, params)[1], None

        after = jax.eval_shape(lambda state: step(state, None)[0], state)
        kinds = [
            [(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(tree)]
            for tree in (state, after)
        ]
        assert kinds[0] == kinds[1]
        state, _ = jax.lax.scan(step, state, length=2)
        assert state.total_notfinite == 0

    def test_hyperparameters_are_not_rounded_to_the_16_bits_of_the_parameters(self):
        params = {"w": jnp.ones(4, jnp.bfloat16)}
        ours, alone = gx.chain(gx.unscale(), optax.adam(1e-3, b2=0.999)), optax.adam(1e-3)
        wide = {"w": jnp.ones(4)}
        state, its = ours.init(params), alone.init(wide)
        for _ in range(3):
            _, state = ours.update(params, state, params, loss_scale=1.0)
            _, its = alone.update(wide, its, wide)
        close(optax.tree.get(state, "nu"), optax.tree.get(its, "nu"))
        assert float(optax.tree.get(state, "nu")["w"][0]) == pytest.approx(2.997e-3, rel=1e-4)

    def test_extra_arguments_are_passed_on_without_our_own(self):
        seen = []

        def update(updates, state, params=None, *, value=None, **extra):
            seen.append((value, sorted(extra)))
            return updates, state

        foreign = optax.GradientTransformationExtraArgs(lambda params: (), update)
        tx = gx.chain(gx.unscale(), foreign)
        params = on_jax(PARAMS)
        tx.update(params, tx.init(params), params, loss_scale=2.0, value=3.0)
        assert seen == [(3.0, ["loss_scale"])]

    def test_an_optimizer_that_wants_the_loss_gets_it(self):
        tx, alone = gx.chain(gx.unscale(), optax.polyak_sgd()), optax.polyak_sgd()
        params = on_jax(PARAMS)
        out, _ = tx.update(params, tx.init(params), params, loss_scale=1.0, value=2.0)
        close(out, alone.update(params, alone.init(params), params, value=2.0)[0])

    @pytest.mark.parametrize("jitted", [False, True])
    def test_a_bad_step_leaves_no_trace_in_its_state(self, jitted):
        tx = gx.chain(gx.unscale(), optax.adamw(1e-2))

        def update(grads, state):
            return tx.update(grads, state, on_jax(PARAMS), loss_scale=1.0)

        update = jax.jit(update) if jitted else update
        _, state = update(on_jax(gradients(1)[0]), tx.init(on_jax(PARAMS)))
        bad = {**on_jax(PARAMS), "b": jnp.full(3, INF)}
        out, after = update(bad, state)
        assert not any(leaf.any() for leaf in jax.tree.leaves(out))
        close(after.gate.inner_states, state.gate.inner_states, rtol=0, atol=0)
        assert int(after.total_notfinite) == 1


def joined(boundary):
    schedules = [optax.constant_schedule(0.1), optax.constant_schedule(0.01)]
    return optax.join_schedules(schedules, [boundary])


class TestWhatIsPrinted:
    def test_the_parts_of_a_chain_and_their_numbers(self):
        assert repr(gx.declare(optax.sgd(0.1, momentum=0.9))) == (
            "chain(trace(decay=0.9, nesterov=False), scale(step_size=-0.1))"
        )

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (optax.adamw(1e-3), optax.adamw(1e-2)),
            (optax.adamw(1e-3), optax.adam(1e-3)),
            (optax.adamw(1e-3), optax.adamw(1e-3, b2=0.99)),
            (
                optax.sgd(optax.cosine_decay_schedule(1e-2, 30)),
                optax.sgd(optax.cosine_decay_schedule(1e-2, 40)),
            ),
            (
                optax.partition({"a": optax.sgd(0.1)}, {"w": "a"}),
                optax.partition({"a": optax.sgd(0.2)}, {"w": "a"}),
            ),
            (
                optax.named_chain(("a", optax.scale(0.1))),
                optax.named_chain(("a", optax.scale(0.2))),
            ),
            (optax.adam(jnp.float32(1e-3)), optax.adam(jnp.float32(1e-2))),
            (optax.adam(np.float32(1e-3)), optax.adam(np.float32(1e-2))),
            (optax.adam(np.float64(1e-3)), optax.adam(np.float64(1e-2))),
            (optax.adam(torch.tensor(1e-3)), optax.adam(torch.tensor(1e-2))),
            (optax.scale(np.asarray([1.0, 2.0])), optax.scale(np.asarray([1.0, 3.0]))),
            (optax.adam(joined(10)), optax.adam(joined(99))),
            (
                optax.sgd(partial(np.multiply, 1e-3)),
                optax.sgd(partial(np.multiply, 1e-2)),
            ),
            (
                optax.sgd(optax.piecewise_constant_schedule(1.0, {10: 0.1})),
                optax.sgd(optax.piecewise_constant_schedule(1.0, {10: 0.2})),
            ),
        ],
    )
    def test_ranks_with_other_settings_have_another_fingerprint(self, one, other):
        assert gx.declare(one).fingerprint != gx.declare(other).fingerprint
        assert gx.from_optax(one).fingerprint != gx.from_optax(other).fingerprint

    @pytest.mark.parametrize(
        "number",
        [0.5, np.float32(0.5), np.float64(0.5), np.asarray(0.5), jnp.float32(0.5)],
        ids=lambda number: type(number).__name__,
    )
    def test_a_number_is_a_number_whatever_its_type(self, number):
        assert repr(gx.declare(optax.scale(number))) == "scale(step_size=0.5)"

    def test_sequences_and_small_arrays_are_printed_and_large_ones_are_not(self):
        def holding(held):
            def update(updates, state, params=None):
                return held, state

            return describe(update).removeprefix("TestWhatIsPrinted")

        assert holding([10, 99]) == "(held=[10, 99])"
        assert holding((np.float32(0.5), "a")) == "(held=(0.5, 'a'))"
        assert (
            holding(jnp.arange(16).reshape(2, 8))
            == f"(held={np.arange(16).reshape(2, 8).tolist()})"
        )
        assert holding(np.arange(17)) == holding([]) == holding(jax.random.key(0)) == "()"

    def test_a_traced_setting_is_left_out(self):
        seen = []
        jax.jit(lambda rate: seen.append(repr(gx.declare(optax.scale(rate)))))(0.5)
        assert seen == ["scale()"]

    def test_constants_in_the_code_of_a_function_are_not_seen(self):
        """The limit that the module states."""
        one, other = optax.sgd(lambda step: 1e-3), optax.sgd(lambda step: 1e-2)
        assert gx.declare(one).fingerprint == gx.declare(other).fingerprint

    def test_equal_settings_have_equal_fingerprints(self):
        one, other = optax.adamw(1e-3), optax.adamw(1e-3)
        assert gx.declare(one).fingerprint == gx.declare(other).fingerprint

    def test_what_holds_itself_is_described_all_the_same(self):
        def outer():
            def update(updates, state, params=None):
                return update, 1

            return update

        assert describe(outer()).startswith("TestWhatIsPrinted(")


def stepped(tx, params, trees, **extra):
    """Parameters after steps of an optimizer for torch, and its state."""
    state = tx.init(params)
    for tree in trees:
        updates, state = tx.update(tree, state, params, **extra)
        params = {key: params[key] + updates[key] for key in params}
    return params, state


KEEPING = optax.GradientTransformation(
    lambda params: params, lambda updates, state, params=None: (updates, state)
)


@dataclass
class OnlyForJax:
    x: Any


jax.tree_util.register_dataclass(OnlyForJax, ["x"], [])


class TestFromOptax:
    @pytest.mark.parametrize("tx", OPTIMIZERS.values(), ids=OPTIMIZERS)
    def test_it_gives_what_optax_gives_on_jax_arrays(self, tx):
        trees = gradients(50)
        ours, state = stepped(gx.from_optax(tx), on_torch(PARAMS), map(on_torch, trees))
        params, its = on_jax(PARAMS), tx.init(on_jax(PARAMS))
        update = jax.jit(tx.update)
        for tree in trees:
            updates, its = update(on_jax(tree), its, params)
            params = optax.apply_updates(params, updates)
        close(ours, params, rtol=1e-5, atol=1e-6)
        assert jax.tree.structure(state) == jax.tree.structure(its)
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(its), strict=True):
            assert isinstance(a, torch.Tensor)
            assert (tuple(a.shape), str(a.dtype)) == (b.shape, f"torch.{b.dtype}")

    def test_it_gives_what_torch_gives(self):
        trees = gradients(50)
        ours, _ = stepped(
            gx.from_optax(optax.adamw(1e-2, weight_decay=0.1)),
            on_torch(PARAMS),
            map(on_torch, trees),
        )
        theirs = {key: torch.nn.Parameter(x) for key, x in on_torch(PARAMS).items()}
        optimizer = torch.optim.AdamW(theirs.values(), lr=1e-2, weight_decay=0.1)
        for tree in trees:
            for key, parameter in theirs.items():
                parameter.grad = torch.tensor(tree[key])
            optimizer.step()
        for key, parameter in theirs.items():
            torch.testing.assert_close(ours[key], parameter.detach(), rtol=1e-5, atol=1e-6)

    def test_it_is_compiled_once(self):
        traced = []
        adam = optax.adamw(optax.cosine_decay_schedule(1e-2, 30))

        def update(updates, state, params=None, **extra):
            traced.append(sorted(extra))
            return adam.update(updates, state, params, **extra)

        counted = optax.GradientTransformationExtraArgs(adam.init, update)
        tx = gx.chain(gx.unscale(), gx.allreduce(), gx.from_optax(counted))
        params = on_torch(PARAMS)
        state = tx.init(params)
        for number, tree in enumerate(gradients(100)):
            grads = on_torch(tree)
            if number % 3 == 0:
                grads["w"] = grads["w"].t().contiguous().t()
            if number % 5 == 0:
                grads["b"] = torch.cat([torch.zeros(1), grads["b"]])[1:]
            if number % 7 == 0:
                grads["b"][0] = INF
            _, state = tx.update(grads, state, params, loss_scale=1.0 + number, value=float(number))
        assert traced == [["loss_scale", "value"]]
        assert int(state.total_notfinite) == 15

    def test_in_a_chain_on_two_ranks_it_gives_what_optax_makes_of_the_mean(self):
        front = (gx.topk(0.25), gx.ef(), gx.allreduce())
        tx = gx.chain(*front, gx.from_optax(optax.adamw(1e-2)))
        reduced = gx.chain(*front)

        def rank(i):
            trees = [on_torch(tree) for tree in gradients(5, seed=i)]
            ours, _ = stepped(tx, on_torch(PARAMS), trees)
            state, means = reduced.init(on_torch(PARAMS)), []
            for tree in trees:
                mean, state = reduced.update(tree, state)
                means.append(mean)
            return ours, means

        (one, means), (other, _) = run_ranks(2, rank)
        assert all(torch.equal(one[key], other[key]) for key in one)
        alone, params = optax.adamw(1e-2), on_jax(PARAMS)
        state = alone.init(params)
        for mean in means:
            updates, state = alone.update(gx.to_jax(mean), state, params)
            params = optax.apply_updates(params, updates)
        close(one, params)

    def test_it_keeps_the_laws(self):
        tx = gx.chain(
            gx.unscale(), gx.topk(0.5), gx.ef(), gx.allreduce(), gx.from_optax(optax.adamw(1e-2))
        )
        params = {"bn": torch.zeros(2), "half": torch.ones(3).half(), "w": torch.ones(3, 4)}
        check_laws(tx, params=params, steps=3, ranks=(1, 2))

    def test_before_the_exchange_it_is_refused(self):
        assert codes(gx.from_optax(optax.sgd(0.1)), gx.allreduce()) == {"GX403"}

    def test_it_takes_no_payload(self):
        assert codes(gx.topk(0.1), gx.ef(), gx.from_optax(optax.sgd(0.1))) == {"GX401"}

    def test_16_bit_parameters_are_stepped_in_fp32(self):
        params = {"w": torch.ones(4, dtype=torch.bfloat16)}
        tx, alone = gx.from_optax(optax.adamw(1e-3)), optax.adamw(1e-3)
        state, its, wide = tx.init(params), alone.init({"w": jnp.ones(4)}), {"w": jnp.ones(4)}
        for _ in range(3):
            out, state = tx.update(params, state, params)
            wanted, its = alone.update(wide, its, wide)
        assert out["w"].dtype == torch.bfloat16
        assert state[0].nu["w"].dtype == torch.float32
        close(state[0].nu, its[0].nu)
        close(out["w"].float(), wanted["w"], rtol=2**-8)

    def test_fp64_parameters_are_refused_where_jax_would_narrow_them(self):
        tx = gx.chain(gx.allreduce(), gx.from_optax(optax.sgd(0.1)))
        with refused(TypeError, "leaf 'a.w' has dtype float64 and JAX would narrow it to 32 bits"):
            tx.init({"a": {"w": torch.zeros(2, dtype=torch.float64)}})

    def test_fp64_parameters_are_stepped_in_fp64_where_jax_has_it(self):
        params = {"w": torch.full((2,), 1.0 + 2.0**-40, dtype=torch.float64)}
        with jax.enable_x64(True):
            tx = gx.from_optax(optax.sgd(1.0, momentum=0.5))
            out, state = tx.update(params, tx.init(params), params)
        assert torch.equal(out["w"], -params["w"])
        assert state[0].trace["w"].dtype == torch.float64

    def test_all_kinds_of_leaves(self):
        params = {
            "scalar": torch.tensor(1.0),
            "empty": torch.zeros(0, 2),
            "none": None,
            "transposed": torch.arange(6.0).reshape(2, 3).t(),
            "sliced": torch.arange(12.0)[1::3],
            "expanded": torch.ones(1).expand(3),
            "list": [torch.nn.Parameter(torch.ones(2)), torch.tensor([INF])],
        }
        tx = gx.from_optax(optax.sgd(1.0))
        out, _ = tx.update(params, tx.init(params), params)
        assert out["none"] is None
        wanted = optree.tree_map(lambda x: -x.detach(), params)
        for a, b in zip(optree.tree_leaves(out), optree.tree_leaves(wanted), strict=True):
            assert torch.equal(a, b)

    def test_no_parameters_at_all(self):
        tx = gx.from_optax(optax.adam(1e-3))
        assert tx.update({}, tx.init({}), {})[0] == {}

    def test_a_module_is_a_tree_of_parameters(self):
        model = torch.nn.Linear(2, 1)
        tx = gx.from_optax(optax.sgd(0.5))
        grads = {path: torch.ones_like(p) for path, p in model.named_parameters()}
        out, _ = tx.update(grads, tx.init(model), dict(model.named_parameters()))
        assert out["weight"].tolist() == [[-0.5, -0.5]]

    def test_nothing_is_copied_where_layout_allows(self, monkeypatch):
        tx = gx.from_optax(optax.adamw(1e-3))
        params = on_torch(PARAMS)
        state = tx.init(params)
        copied = []
        monkeypatch.setattr(dlpack, "_plain_copy", lambda leaf: copied.append(leaf) or leaf.clone())
        for tree in gradients(3):
            _, state = tx.update(on_torch(tree), state, params)
        assert copied == []
        tx.update({**on_torch(PARAMS), "b": torch.zeros(4)[1:]}, state, params)
        assert len(copied) == 1

    @pytest.mark.parametrize("alone", [optax.identity(), KEEPING, optax.adam(0.1)])
    def test_results_share_no_memory_with_what_was_given(self, alone):
        tx = gx.from_optax(alone)
        params, grads = on_torch(PARAMS), on_torch(PARAMS)
        state = tx.init(params)
        out, after = tx.update(grads, state, params)
        given = {x.data_ptr() for x in optree.tree_leaves((params, grads, state))}
        assert not given & {x.data_ptr() for x in optree.tree_leaves((out, after))}

    def test_a_state_that_holds_the_parameters_holds_a_copy(self):
        params = on_torch(PARAMS)
        state = gx.from_optax(KEEPING).init(params)
        params["w"].zero_()
        assert bool((state["w"] == 1).all())

    def test_extra_arguments_that_are_numbers_or_arrays_arrive(self):
        tx, alone = gx.from_optax(optax.polyak_sgd()), optax.polyak_sgd()
        params = on_torch(PARAMS)
        out, _ = tx.update(params, tx.init(params), params, value=torch.tensor(2.0), other="text")
        wide = on_jax(PARAMS)
        close(out, alone.update(wide, alone.init(wide), wide, value=2.0)[0])

    @pytest.mark.parametrize(
        "value",
        [2, 2.0, np.float32(2), np.float64(2), np.int32(2), np.asarray(2.0), jnp.float32(2)],
        ids=lambda value: type(value).__name__,
    )
    def test_an_extra_argument_may_be_of_any_numeric_type(self, value):
        tx = gx.from_optax(optax.polyak_sgd())
        params = on_torch(PARAMS)
        out, _ = tx.update(params, tx.init(params), params, value=value)
        wanted, _ = tx.update(params, tx.init(params), params, value=torch.tensor(2.0))
        close(out, wanted)

    def test_an_array_of_numpy_arrives_and_one_of_text_does_not(self):
        seen = []

        def update(updates, state, params=None, **extra):
            seen.append({name: (x.shape, str(x.dtype)) for name, x in extra.items()})
            return updates, state

        tx = gx.from_optax(optax.GradientTransformationExtraArgs(lambda params: (), update))
        params = on_torch(PARAMS)
        extra = {"weights": np.ones((2, 3), np.float32), "names": np.asarray(["a", "b"])}
        tx.update(params, tx.init(params), params, **extra)
        assert seen == [{"weights": ((2, 3), "float32")}]

    def test_an_extra_argument_in_fp64_is_named(self):
        tx = gx.from_optax(optax.polyak_sgd())
        params = on_torch(PARAMS)
        value = torch.tensor(2.0, dtype=torch.float64)
        with refused(TypeError, "leaf 'value' has dtype float64 and JAX would narrow it"):
            tx.update(params, tx.init(params), params, value=value)

    def test_a_random_key_in_the_state_is_kept(self):
        alone = optax.add_noise(0.1, 0.5, jax.random.key(0))
        tx = gx.from_optax(alone)
        params = on_torch(PARAMS)
        state, its = tx.init(params), alone.init(on_jax(PARAMS))
        for tree in gradients(3):
            out, state = tx.update(on_torch(tree), state)
            wanted, its = alone.update(on_jax(tree), its)
            close(out, wanted)

    def test_a_state_that_only_jax_can_take_apart_is_refused(self):
        alone = optax.GradientTransformation(
            lambda params: (OnlyForJax(jnp.zeros(2)),),
            lambda updates, state, params=None: (updates, state),
        )
        text = "the optimizer's state '0' is a OnlyForJax: expected arrays in dicts, lists,"
        with refused(TypeError, text):
            gx.from_optax(alone).init(on_torch(PARAMS))

    def test_on_jax_arrays_it_is_the_optimizer_itself(self):
        tx, alone = gx.from_optax(optax.adamw(1e-3)), optax.adamw(1e-3)
        params = on_jax(PARAMS)
        out, state = jax.jit(tx.update)(params, tx.init(params), params)
        wanted, its = alone.update(params, alone.init(params), params)
        close(out, wanted)
        close(state, its)

    def test_what_is_no_optimizer_is_refused(self):
        with refused(TypeError, "from_optax(3): expected an optax.GradientTransformation, such as"):
            gx.from_optax(3)

    def test_without_jax_it_says_how_to_install_it(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "jax", None)
        text = "from_optax needs jax, which is not installed: pip install 'gradtx[jax]'"
        with refused(ImportError, text):
            gx.from_optax(optax.sgd(0.1))

    def test_it_prints_what_it_was_made_of(self):
        assert repr(gx.from_optax(optax.sgd(0.1))) == (
            "gx.from_optax(chain(identity(), scale(step_size=-0.1)))"
        )


class TestPipeline:
    def parts(self):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, maximize=True)
        tx = gx.chain(
            gx.dynamic_loss_scale(8.0),
            gx.topk(0.25),
            gx.ef(),
            gx.allreduce(),
            gx.from_optax(optax.adamw(1e-2)),
        )
        return model, optimizer, gx.Pipeline(tx, model)

    def trained(self, model, optimizer, pipe, steps):
        generator, losses = torch.Generator().manual_seed(1), []
        for _ in range(steps):
            x = torch.randn(16, 4, generator=generator)
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            (loss * pipe.state.loss_scale).backward()
            if pipe.sync(optimizer).ready:
                optimizer.step()
            losses.append(loss.item())
        return losses

    def test_sgd_that_maximises_adds_the_updates(self):
        losses = self.trained(*self.parts(), steps=150)
        assert np.mean(losses[-10:]) < 0.3 * losses[0]

    def test_its_state_is_saved_and_loaded_as_plain_tensors(self):
        model, optimizer, pipe = self.parts()
        self.trained(model, optimizer, pipe, 5)
        file = io.BytesIO()
        torch.save((pipe.state_dict(), model.state_dict()), file)
        file.seek(0)
        saved, weights = torch.load(file, weights_only=True)
        assert any(key.endswith("mu.0.weight") for key in saved["state"])
        other, its_optimizer, resumed = self.parts()
        other.load_state_dict(weights)
        resumed.load_state_dict(saved)
        expected = self.trained(model, optimizer, pipe, 5)
        assert self.trained(other, its_optimizer, resumed, 5) == expected


class TestNormsOf16Bits:
    """The square of 300 is no FP16 number: norms are taken in FP32."""

    def test_of_an_optax_stage_on_jax(self):
        tx = gx.chain(gx.allreduce(), optax.clip_by_global_norm(1.0))
        grads = {"w": jnp.asarray([300.0, 400.0], jnp.float16)}
        updates, state = jax.jit(tx.update)(grads, tx.init(grads))
        assert updates["w"].dtype == jnp.float16
        np.testing.assert_allclose(updates["w"], [0.6, 0.8], rtol=1e-3)
        assert bool(state.last_finite)

    def test_of_an_optax_stage_on_torch(self):
        tx = gx.chain(gx.allreduce(), gx.from_optax(optax.clip_by_global_norm(1.0)))
        grads = {"w": torch.tensor([300.0, 400.0], dtype=torch.float16)}
        updates, state = tx.update(grads, tx.init(grads))
        torch.testing.assert_close(updates["w"], torch.tensor([0.6, 0.8], dtype=torch.float16))
        assert bool(state.last_finite)

    @pytest.mark.parametrize("library", ["torch", "jax"])
    def test_of_a_local_clip(self, library):
        grads = {"w": torch.tensor([300.0, 400.0], dtype=torch.float16)}
        if library == "jax":
            grads = gx.to_jax(grads)
        tx = gx.chain(gx.topk(1.0), gx.momentum_correction(0.5, clip=1.0), gx.allreduce())
        updates, _ = tx.update(grads, tx.init(grads))
        np.testing.assert_allclose(np.asarray(updates["w"]), [0.6, 0.8], rtol=1e-3)
