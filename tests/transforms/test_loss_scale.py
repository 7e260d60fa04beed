"""`dynamic_loss_scale`: a loss scale in the state, adjusted by what all ranks agree on."""

import inspect
import io
import re
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradtx as gx
from gradtx.core.parse import parse
from gradtx.core.per_rank import per_rank_fields
from gradtx.testing import run_ranks

INF, NAN = float("inf"), float("nan")
LARGEST = float(np.finfo(np.float32).max)


def refused(error, text):
    return pytest.raises(error, match=f"^{re.escape(text)}$")


def scales(tx, verdicts, value=1.0):
    """The scale after each step of a chain on one leaf, good (True) or bad."""
    state, found = tx.init([torch.zeros(2)]), []
    for good in verdicts:
        grads = [torch.tensor([value if good else INF, 1.0])]
        state = tx.update(grads, state)[1]
        found.append(float(state.loss_scale))
    return found


def test_gradients_are_divided_by_the_scale_in_the_state():
    tx = gx.chain(gx.dynamic_loss_scale(8.0))
    grads = {"w": torch.tensor([2.0, -8.0]), "none": None, "half": torch.ones(2).half()}
    out, state = tx.update(grads, tx.init(grads))
    assert out["w"].tolist() == [0.25, -1.0]
    assert out["none"] is None
    assert (out["half"].dtype, out["half"].tolist()) == (torch.float16, [0.125, 0.125])
    assert state.loss_scale == 8.0


def test_the_scale_is_an_fp32_scalar_found_in_the_state_of_the_chain():
    state = gx.chain(gx.skip_bn(), gx.dynamic_loss_scale(), gx.topk(0.5), gx.ef()).init(
        {"w": torch.zeros(4, dtype=torch.float16)}
    )
    assert (state.loss_scale.dtype, tuple(state.loss_scale.shape)) == (torch.float32, ())
    assert state.loss_scale == 65536.0
    assert state.states[0] == (65536.0, 0)


def test_a_chain_without_it_has_no_scale():
    tx = gx.chain(gx.unscale(), gx.topk(0.5), gx.ef())
    assert tx.init({"w": torch.zeros(4)}).loss_scale is None


class Foreign(NamedTuple):
    """A state with fields that happen to have names of ours."""

    loss_scale: torch.Tensor
    per_rank: torch.Tensor


FOREIGN = gx.declare(
    SimpleNamespace(
        init=lambda params: Foreign(torch.tensor(3.0), torch.tensor(5.0)),
        update=lambda updates, state, params=None: (updates, state),
    ),
    name="foreign",
    stateful=False,
    needs_reduced=False,
)


def test_a_field_of_a_foreign_state_is_no_loss_scale():
    params = {"w": torch.zeros(4)}
    assert gx.chain(FOREIGN, gx.topk(0.5), gx.ef()).init(params).loss_scale is None
    own = gx.chain(FOREIGN, gx.dynamic_loss_scale(8.0), check=False).init(params)
    assert own.loss_scale == 8.0


def test_a_field_of_a_foreign_state_does_not_say_what_differs_between_ranks():
    assert per_rank_fields(Foreign(torch.tensor(3.0), torch.tensor(5.0))) == ()


def test_what_stands_behind_it_sees_fp32():
    tx = gx.chain(gx.dynamic_loss_scale(65536.0), gx.topk(1.0), gx.ef())
    grads = [torch.tensor([6e-8, 1.0], dtype=torch.float16)]
    out, _ = tx.update(grads, tx.init(grads))
    assert out[0].values.tolist() == [grads[0][0].item() / 65536.0, 2.0**-16]


def test_used_alone_it_is_a_chain_of_one():
    tx = gx.dynamic_loss_scale(4.0)
    out, state = tx.update([torch.tensor([INF])], tx.init([torch.zeros(1)]))
    assert out[0].tolist() == [0.0]
    assert (state.loss_scale, state.total_notfinite) == (2.0, 1)


def test_it_backs_off_at_each_bad_step_and_grows_after_good_ones_in_a_row():
    tx = gx.chain(gx.dynamic_loss_scale(8.0, growth_interval=2), gx.topk(0.5), gx.ef())
    verdicts = [True, False, False, True, True, True, False, True, True]
    assert scales(tx, verdicts) == [8, 4, 2, 2, 4, 4, 2, 2, 4]


def test_it_does_not_fall_below_the_minimum():
    tx = gx.dynamic_loss_scale(8.0, minimum=3.0)
    assert scales(tx, [False] * 4) == [4, 3, 3, 3]


def test_it_does_not_grow_to_infinity():
    tx = gx.dynamic_loss_scale(2.0**125, growth_interval=1, growth_factor=4.0)
    assert scales(tx, [True] * 3) == [2.0**127] * 3


def test_after_a_growth_that_was_left_out_the_count_starts_again():
    tx = gx.dynamic_loss_scale(2.0**127, growth_interval=2)
    state = tx.init([torch.zeros(1)])
    counts = []
    for _ in range(4):
        state = tx.update([torch.ones(1)], state)[1]
        counts.append(int(state.states[0].good_steps))
    assert counts == [1, 0, 1, 0]


@given(
    st.lists(st.booleans(), min_size=1, max_size=40),
    st.integers(1, 4),
    st.sampled_from([2.0, 4.0, 1.5]),
    st.sampled_from([0.5, 0.25, 0.75]),
    st.sampled_from([2.0**16, 1.0, 2.0**126]),
)
def test_it_does_what_a_grad_scaler_does(verdicts, interval, growth, backoff, initial):
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=initial,
        growth_factor=growth,
        backoff_factor=backoff,
        growth_interval=interval,
    )
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    tx = gx.chain(
        gx.dynamic_loss_scale(
            initial,
            growth_interval=interval,
            growth_factor=growth,
            backoff_factor=backoff,
            minimum=2.0**-120,
        ),
        gx.allreduce(),
    )
    params, state = [torch.zeros(2)], tx.init([torch.zeros(2)])
    for good in verdicts:
        true = torch.tensor([0.5 if good else NAN, -1.0])
        scaler.scale(torch.zeros(()))
        weight.grad = true * scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        updates, state = tx.update([true * state.loss_scale], state)
        params = [params[0] - updates[0]]
        # The scaler multiplies in FP64 and rounds once.
        assert float(state.loss_scale) == pytest.approx(scaler.get_scale(), rel=1e-6)
        assert int(state.states[0].good_steps) == scaler._get_growth_tracker()
        assert state.last_finite == good
        torch.testing.assert_close(params[0], weight.detach(), rtol=1e-5, atol=0)
        if growth != 1.5 and backoff != 0.75:
            assert float(state.loss_scale) == scaler.get_scale()
            assert torch.equal(params[0], weight)


class TestRanks:
    def played(self, verdicts, algorithm="auto"):
        tx = gx.chain(
            gx.dynamic_loss_scale(8.0, growth_interval=2),
            gx.topk(0.5),
            gx.ef(),
            gx.allreduce(algorithm=algorithm),
        )

        def rank(i):
            state, found = tx.init([torch.zeros(4)]), []
            for bad in verdicts:
                grads = torch.arange(4.0) * (i + 1)
                grads[0] = INF if bad == i else 1.0
                state = tx.update([grads * state.loss_scale], state)[1]
                found.append((float(state.loss_scale), int(state.states[0].good_steps)))
            return found

        return run_ranks(3, rank)

    @pytest.mark.parametrize("algorithm", ["auto", "gather"])
    def test_all_decide_alike_whoever_had_the_bad_step(self, algorithm):
        one, *others = self.played([None, 0, 1, 2, None, None, None], algorithm)
        assert all(other == one for other in others)
        assert one == [(8, 1), (4, 0), (2, 0), (1, 0), (1, 1), (2, 0), (2, 1)]

    def test_a_sum_that_overflows_makes_all_back_off(self):
        tx = gx.chain(gx.dynamic_loss_scale(1.0, minimum=0.5), gx.allreduce())

        def rank(i):
            grads = [torch.full((2,), 3e38)]
            return float(tx.update(grads, tx.init(grads))[1].loss_scale)

        assert run_ranks(2, rank) == [0.5, 0.5]

    def test_behind_the_exchange_it_hears_of_the_others_too(self):
        tx = gx.chain(gx.allreduce(), gx.dynamic_loss_scale(4.0))

        def rank(i):
            grads = [torch.tensor([NAN if i else 1.0])]
            out, state = tx.update(grads, tx.init(grads))
            return out[0].tolist(), float(state.loss_scale)

        assert run_ranks(2, rank) == [([0.0], 2.0)] * 2

    def test_a_rank_that_fails_tells_the_others(self):
        tx = gx.chain(gx.dynamic_loss_scale(), gx.topk(0.5), gx.ef(), gx.allreduce())

        def rank(i):
            grads = {"w": torch.ones(64)}
            _, state = tx.update(grads, tx.init(grads))
            try:
                tx.update({"v": torch.ones(64)} if i else grads, state)
            except (ValueError, gx.RankMismatchError) as error:
                return type(error).__name__
            return None

        assert run_ranks(2, rank) == ["RankMismatchError", "ValueError"]


class TestOrder:
    @pytest.mark.parametrize(
        "parts",
        [
            (gx.unscale(), gx.dynamic_loss_scale()),
            (gx.dynamic_loss_scale(), gx.unscale()),
            (gx.dynamic_loss_scale(), gx.dynamic_loss_scale()),
        ],
        ids=repr,
    )
    def test_two_loss_scales_are_refused(self, parts):
        with pytest.raises(gx.ChainOrderError) as caught:
            gx.chain(*parts, gx.allreduce())
        assert [violation.code for violation in caught.value.violations] == ["GX101"]

    def test_behind_a_compressor_it_is_refused(self):
        with pytest.raises(gx.ChainOrderError) as caught:
            gx.chain(gx.topk(0.5), gx.ef(), gx.dynamic_loss_scale(2.0), gx.allreduce())
        codes = {violation.code for violation in caught.value.violations}
        assert codes == {"GX102", "GX401"}
        assert repr(caught.value.suggestion) == (
            "gx.chain(gx.dynamic_loss_scale(initial=2.0), gx.topk(0.5), gx.ef(), gx.allreduce())"
        )

    def test_a_plain_exchange_and_filters_may_stand_before_it(self):
        gx.chain(gx.allreduce(), gx.dynamic_loss_scale())
        gx.chain(gx.skip_bn(), gx.dynamic_loss_scale(), gx.topk(0.5), gx.ef(), gx.allreduce())

    def test_it_resolves_to_itself_and_a_gate(self):
        tx = gx.chain(gx.dynamic_loss_scale(), gx.topk(0.5), gx.ef(), gx.allreduce())
        assert list(map(repr, tx.core)) == [
            "gx.dynamic_loss_scale()",
            "gx.apply_if_finite(gx.error_feedback(gx.topk(0.5)), gx.allreduce())",
        ]

    def test_in_a_combinator_it_is_refused(self):
        text = (
            "apply_if_finite(gx.dynamic_loss_scale(), ...): it waits for what the gate decides and "
            "has to stand before it; write chain(gx.dynamic_loss_scale(), ...)"
        )
        with refused(ValueError, text):
            gx.apply_if_finite(gx.dynamic_loss_scale(), gx.allreduce())
        with pytest.raises(ValueError, match="the loss scale is in every leaf"):
            gx.masked(gx.dynamic_loss_scale(), gx.is_matrix)


def test_a_gate_written_by_hand_gives_it_its_verdict():
    by_hand = gx.chain(
        gx.dynamic_loss_scale(8.0),
        gx.apply_if_finite(gx.error_feedback(gx.topk(0.5)), gx.allreduce()),
    )
    assert scales(by_hand, [True, False]) == [8, 4]
    short = gx.chain(gx.dynamic_loss_scale(8.0), gx.topk(0.5), gx.ef(), gx.allreduce())
    assert by_hand.core == short.core


class TestArguments:
    def test_defaults_are_not_printed_and_all_others_are(self):
        assert repr(gx.dynamic_loss_scale()) == "gx.dynamic_loss_scale()"
        tx = gx.dynamic_loss_scale(
            4.0, growth_interval=3, growth_factor=8.0, backoff_factor=0.125, minimum=2.0
        )
        assert parse(repr(tx), vars(gx)) == tx
        assert tx.hyperparameters == {
            "initial": 4.0,
            "growth_interval": 3,
            "growth_factor": 8.0,
            "backoff_factor": 0.125,
            "minimum": 2.0,
        }

    def test_defaults_are_those_of_a_grad_scaler(self):
        theirs = inspect.signature(torch.amp.GradScaler).parameters
        ours = gx.dynamic_loss_scale().hyperparameters
        assert ours["initial"] == theirs["init_scale"].default
        for name in ("growth_interval", "growth_factor", "backoff_factor"):
            assert ours[name] == theirs[name].default

    @pytest.mark.parametrize("name", ["initial", "growth_factor", "backoff_factor", "minimum"])
    @pytest.mark.parametrize("value", [True, "2", None, torch.tensor(2.0)], ids=repr)
    def test_what_is_no_number_is_refused(self, name, value):
        with refused(TypeError, f"dynamic_loss_scale({name}={value!r}): expected a number"):
            gx.dynamic_loss_scale(**{name: value})

    @pytest.mark.parametrize(
        ("name", "values", "range_"),
        [
            ("initial", [0.5, 0, -1.0, INF, NAN, 1e39], "1 to 3.4e+38"),
            ("minimum", [0.0, -1.0, 1e-40, INF, NAN], "1.18e-38 to 3.4e+38"),
            ("growth_factor", [1.0, 0.5, 0, -2.0, INF, NAN], "1 to 3.4e+38"),
            ("backoff_factor", [1.0, 2.0, 0, -0.5, NAN], "1.18e-38 to 1"),
        ],
    )
    def test_what_is_out_of_range_is_refused(self, name, values, range_):
        for value in values:
            text = f"dynamic_loss_scale({name}={value!r}): expected a number from {range_}"
            with refused(ValueError, text):
                gx.dynamic_loss_scale(**{name: value})

    def test_an_initial_scale_below_the_minimum_is_refused(self):
        text = "dynamic_loss_scale(initial=2.0): expected a number from 4 to 3.4e+38"
        with refused(ValueError, text):
            gx.dynamic_loss_scale(2.0, minimum=4.0)

    @pytest.mark.parametrize(
        ("value", "error"), [(0, ValueError), (2.0, TypeError), (True, TypeError)]
    )
    def test_an_interval_that_is_no_whole_number_is_refused(self, value, error):
        text = (
            f"dynamic_loss_scale(growth_interval={value!r}): expected a whole number of 1 or more"
        )
        with refused(error, text):
            gx.dynamic_loss_scale(growth_interval=value)

    @pytest.mark.parametrize("given", [2.0, torch.tensor(2.0)], ids=repr)
    def test_a_second_loss_scale_is_refused(self, given):
        tx = gx.chain(gx.dynamic_loss_scale(), gx.allreduce())
        text = (
            f"loss_scale={given!r} is given, and dynamic_loss_scale() has a scale of its own: "
            "multiply the loss by state.loss_scale and leave the argument out, or write unscale()"
        )
        with refused(ValueError, text):
            tx.update([torch.ones(1)], tx.init([torch.ones(1)]), loss_scale=given)

    def test_a_compressed_leaf_is_refused(self):
        tx = gx.chain(gx.sign(), gx.dynamic_loss_scale(), check=False)
        text = r"^dynamic_loss_scale\(\) takes dense gradients only, got Signs"
        with pytest.raises(TypeError, match=text):
            tx.update([torch.ones(4)], tx.init([torch.ones(4)]))


class TestPipeline:
    tx = gx.chain(
        gx.dynamic_loss_scale(8.0, growth_interval=2), gx.topk(0.5), gx.ef(), gx.allreduce()
    )

    def stepped(self, pipe, model, optimizer, good):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2) if good else torch.full((1, 2), INF)).sum()
        (loss * pipe.state.loss_scale).backward()
        report = pipe.sync(optimizer)
        if report.ready:
            optimizer.step()
        return report.skipped, float(pipe.state.loss_scale)

    def model(self):
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 2)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def test_it_needs_no_scaler(self):
        model, optimizer = self.model()
        pipe = gx.Pipeline(self.tx, model)
        found = [self.stepped(pipe, model, optimizer, good) for good in (1, 1, 0, 1)]
        assert found == [(False, 8), (False, 16), (True, 8), (False, 8)]

    def test_it_goes_on_after_a_checkpoint_as_it_would_have(self):
        model, optimizer = self.model()
        pipe = gx.Pipeline(self.tx, model)
        for good in (1, 0, 1):
            self.stepped(pipe, model, optimizer, good)
        file = io.BytesIO()
        torch.save((pipe.state_dict(), model.state_dict()), file)
        file.seek(0)
        saved, weights = torch.load(file, weights_only=True)
        assert saved["state"]["states.0.loss_scale"] == 4.0
        other, its_optimizer = self.model()
        other.load_state_dict(weights)
        resumed = gx.Pipeline(self.tx, other)
        resumed.load_state_dict(saved)
        for good in (1, 0, 1, 1):
            expected = self.stepped(pipe, model, optimizer, good)
            assert self.stepped(resumed, other, its_optimizer, good) == expected
        assert torch.equal(model.weight, other.weight)

    def test_with_a_scaler_there_would_be_two_loss_scales(self):
        model, _ = self.model()
        text = (
            "a GradScaler is given and the chain has gx.dynamic_loss_scale(): two loss scales; "
            "leave the scaler out and multiply the loss by pipe.state.loss_scale, or write "
            "unscale()"
        )
        tx = gx.chain(gx.dynamic_loss_scale(), gx.allreduce())
        with refused(ValueError, text):
            gx.Pipeline(tx, model, scaler=torch.amp.GradScaler("cpu"))

    def test_with_an_argument_there_would_be_two_loss_scales(self):
        model, optimizer = self.model()
        pipe = gx.Pipeline(gx.chain(gx.dynamic_loss_scale(), gx.allreduce()), model)
        text = (
            "loss_scale is given and the chain has gx.dynamic_loss_scale(): two loss scales; "
            "multiply the loss by pipe.state.loss_scale and leave the argument out"
        )
        with refused(ValueError, text):
            pipe.sync(optimizer, loss_scale=2.0)

    def test_a_scaler_that_is_switched_off_is_no_second_scale(self):
        model, optimizer = self.model()
        pipe = gx.Pipeline(self.tx, model, scaler=torch.amp.GradScaler("cpu", enabled=False))
        assert self.stepped(pipe, model, optimizer, good=True) == (False, 8)


class TestJax:
    tx = gx.chain(gx.dynamic_loss_scale(8.0, growth_interval=2), gx.topk(0.5), gx.ef())
    verdicts = (True, False, True, True, False, True, True)

    @pytest.fixture
    def jnp(self):
        return pytest.importorskip("jax").numpy

    def expected(self):
        return scales(self.tx, self.verdicts)

    def gradients(self, jnp):
        return jnp.asarray([[1.0 if good else INF, 1.0] for good in self.verdicts], jnp.float32)

    def test_eager_and_compiled_it_does_what_it_does_on_torch(self, jnp):
        import jax

        for compiled in (lambda update: update, jax.jit):
            update = compiled(lambda grads, state: self.tx.update(grads, state)[1])
            state, found = self.tx.init([jnp.zeros(2)]), []
            for row in self.gradients(jnp):
                state = update([row], state)
                found.append(float(state.loss_scale))
            assert found == self.expected()

    def test_in_a_scan_the_state_keeps_its_types(self, jnp):
        import jax

        def step(state, row):
            state = self.tx.update([row * state.loss_scale], state)[1]
            return state, state.loss_scale

        state, found = jax.lax.scan(step, self.tx.init([jnp.zeros(2)]), self.gradients(jnp))
        assert found.tolist() == self.expected()
        assert int(state.total_notfinite) == 2

    def test_the_state_has_no_weak_types_and_its_dtypes_do_not_change(self, jnp):
        state = self.tx.init([jnp.zeros(2)])
        after = self.tx.update([jnp.ones(2)], state)[1]
        for own in (state.states[0], after.states[0]):
            assert (str(own.loss_scale.dtype), str(own.good_steps.dtype)) == ("float32", "int32")
            assert not own.loss_scale.weak_type
            assert not own.good_steps.weak_type

    def test_it_compiles_once(self, jnp):
        import jax

        update = jax.jit(lambda grads, state: self.tx.update(grads, state))
        state = self.tx.init([jnp.zeros(2)])
        for row in self.gradients(jnp):
            _, state = update([row], state)
        assert update._cache_size() == 1

    def test_the_minimum_and_infinity_hold(self, jnp):
        low = gx.dynamic_loss_scale(2.0, minimum=1.5)
        high = gx.dynamic_loss_scale(2.0**127, growth_interval=1)
        bad, good = [jnp.asarray([INF])], [jnp.ones(1)]
        assert low.update(bad, low.init(bad))[1].loss_scale == 1.5
        assert high.update(good, high.init(good))[1].loss_scale == 2.0**127

    def test_the_state_survives_flattening(self, jnp):
        import jax

        state = self.tx.update([jnp.asarray([INF, 1.0])], self.tx.init([jnp.zeros(2)]))[1]
        leaves, treedef = jax.tree_util.tree_flatten(state)
        assert jax.tree_util.tree_unflatten(treedef, leaves).loss_scale == 4.0


def test_the_state_survives_flattening_by_torch():
    tx = gx.chain(gx.dynamic_loss_scale(8.0), gx.topk(0.5), gx.ef())
    state = tx.update([torch.tensor([INF, 1.0])], tx.init([torch.zeros(2)]))[1]
    leaves, spec = torch.utils._pytree.tree_flatten(state)
    assert torch.utils._pytree.tree_unflatten(leaves, spec).loss_scale == 4.0
