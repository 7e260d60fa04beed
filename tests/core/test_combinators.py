"""The plain combinators: `error_feedback`, `masked`, `apply_if_finite`."""

import copy
import re
from typing import Any, NamedTuple

import numpy as np
import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradtx as gx
from gradtx.compressors.compressor import compressor
from gradtx.core.payload import Payload, decode_leaves
from gradtx.core.stage import Kind, Stage
from gradtx.core.transformation import Transformation

INF, NAN = float("inf"), float("nan")


def decoded(updates):
    """Payloads as dense leaves, by path."""
    paths, leaves, _ = optree.tree_flatten_with_path(
        updates, is_leaf=lambda node: isinstance(node, Payload)
    )
    return dict(zip(map(str, paths), decode_leaves(leaves), strict=True))


def residual_of(state):
    """The tree of residuals, wherever it is in the state."""
    found = []
    optree.tree_map(
        found.append, state, is_leaf=lambda node: hasattr(node, "residual"), none_is_leaf=True
    )
    return next(node.residual for node in found if hasattr(node, "residual"))


def bits_of(tree):
    return [
        (leaf.dtype, tuple(leaf.shape), leaf.contiguous().reshape(-1).view(torch.uint8).tolist())
        for leaf in optree.tree_leaves(tree)
    ]


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class TestErrorFeedback:
    @pytest.mark.parametrize(
        ("gradient", "residual"),
        [
            *((torch.float16, torch.float32), (torch.bfloat16, torch.float32)),
            *((torch.float32, torch.float32), (torch.float64, torch.float64)),
        ],
    )
    def test_residual_is_fp32_or_more_whatever_the_gradients(self, gradient, residual):
        grads = [torch.ones(3, dtype=gradient)]
        tx = gx.error_feedback(gx.topk(0.5))
        state = tx.init(grads)
        assert residual_of(state)[0].dtype == residual
        for _ in range(2):
            _, state = tx.update(grads, state)
            assert residual_of(state)[0].dtype == residual

    @pytest.mark.parametrize("parameter", [torch.float16, torch.bfloat16])
    def test_residual_is_fp32_when_fp32_gradients_stand_in(self, parameter):
        tx = gx.chain(gx.topk(0.5), gx.ef())
        _, state = tx.update([torch.ones(3)], tx.init([torch.ones(3, dtype=parameter)]))
        assert residual_of(state)[0].dtype == torch.float32

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", torch.float32, None])
    @pytest.mark.parametrize("parts", [(), (gx.topk(0.5),)], ids=["stage", "combinator"])
    def test_residual_in_another_dtype_is_refused(self, dtype, parts):
        text = (
            f"error_feedback(dtype={dtype!r}): the residual is kept in 'float32' "
            "(FP64 for FP64 leaves); 16 bits lose what is smaller than their rounding"
        )
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            gx.error_feedback(*parts, dtype=dtype)

    def test_residual_starts_at_zero(self):
        assert residual_of(gx.ef(gx.topk(0.5)).init([torch.ones(2)]))[0].tolist() == [0.0, 0.0]

    def test_what_is_left_out_comes_back(self):
        tx = gx.error_feedback(gx.topk(0.5))
        state, sent = tx.init([torch.zeros(2)]), []
        for values in ([3.0, 1.0], [0.0, 2.0], [2.0, 0.5], [0.0, 0.0], [0.0, 0.0]):
            out, state = tx.update([torch.tensor(values)], state)
            sent.append(out[0].decode().tolist())
        assert sent == [[3, 0], [0, 3], [2, 0], [0, 0.5], [0, 0]]

    @pytest.mark.parametrize("compressors", [[gx.topk(0.1)], [gx.topk(0.1), gx.topk(0.5)]])
    def test_residual_drains_when_the_gradient_ends(self, compressors):
        tx = gx.error_feedback(*compressors)
        state = tx.init([torch.zeros(20)])
        _, state = tx.update([randn(20)], state)
        for _ in range(20):
            _, state = tx.update([torch.zeros(20)], state)
        assert not residual_of(state)[0].any()

    @pytest.mark.parametrize(
        ("compressors", "delta"),
        [([gx.topk(0.1)], 0.1), ([gx.sign()], 1 / 20), ([gx.topk(0.5), gx.sign()], 1 / 20)],
    )
    def test_residual_stays_bounded_under_a_constant_gradient(self, compressors, delta):
        tx, grad = gx.error_feedback(*compressors), randn(20)
        state, largest = tx.init([grad]), 0.0
        for _ in range(300):
            _, state = tx.update([grad], state)
            largest = max(largest, residual_of(state)[0].norm().item())
        # Karimireddy et al., 2019, lemma 3; without a contraction it would reach 300 norms.
        assert largest <= 2 * (1 - delta) ** 0.5 / delta * grad.norm().item()

    def test_mean_of_what_is_sent_is_the_constant_gradient(self):
        tx, grad = gx.error_feedback(gx.topk(0.1)), randn(20)
        state, total = tx.init([grad]), torch.zeros(20)
        for _ in range(1000):
            out, state = tx.update([grad], state)
            total += out[0].decode()
        assert (total / 1000 - grad).abs().max() < 0.03 * grad.abs().max()

    def test_400_steps_in_bf16_lose_nothing_that_a_bf16_residual_would(self):
        n, k = 2000, 20
        grads = [randn(n, seed=i).mul(1e-3).bfloat16() for i in range(400)]
        mass = sum(grad.double() for grad in grads)

        def lost(sent, residual):
            return ((sent + residual.double() - mass).abs().sum() / mass.abs().sum()).item()

        tx = gx.error_feedback(gx.topk(k / n))
        state, sent = tx.init([grads[0]]), torch.zeros(n, dtype=torch.float64)
        naive, naive_sent = torch.zeros(n, dtype=torch.bfloat16), torch.zeros_like(sent)
        for grad in grads:
            out, state = tx.update([grad], state)
            sent += out[0].decode().double()
            corrected = grad + naive
            kept = corrected.float().abs().topk(k).indices
            naive_sent[kept] += corrected[kept].double()
            naive = corrected.index_fill(0, kept, 0.0)
        assert lost(sent, residual_of(state)[0]) < 1e-5
        assert 0.004 < lost(naive_sent, naive) < 0.009

    @staticmethod
    def gap_after_the_scale_halves(residual_in_scaled_units):
        """Top 5 %, 20 steps: how far applied + residual is from the sum of the gradients."""
        grads = [randn(1000, seed=i) for i in range(20)]
        scales = [1024.0] * 10 + [512.0] * 10
        applied = torch.zeros(1000, dtype=torch.float64)
        if residual_in_scaled_units:
            residual = torch.zeros(1000)
            for grad, scale in zip(grads, scales, strict=True):
                corrected = grad * scale + residual
                kept = corrected.abs().topk(50).indices
                residual = corrected.index_fill(0, kept, 0.0)
                applied[kept] += (corrected[kept] / scale).double()
            residual = residual / scales[-1]
        else:
            tx = gx.chain(gx.unscale(), gx.topk(0.05), gx.ef(), gx.allreduce())
            state = tx.init([grads[0]])
            for grad, scale in zip(grads, scales, strict=True):
                out, state = tx.update([grad * scale], state, loss_scale=scale)
                applied += out[0].double()
            residual = residual_of(state)[0]
        total = sum(grad.double() for grad in grads)
        return ((applied + residual.double() - total).norm() / total.norm()).item()

    def test_nothing_is_lost_when_the_loss_scale_changes(self):
        assert self.gap_after_the_scale_halves(residual_in_scaled_units=False) < 1e-6

    def test_residual_in_scaled_units_would_be_wrong_when_the_loss_scale_changes(self):
        assert self.gap_after_the_scale_halves(residual_in_scaled_units=True) > 0.1

    @pytest.mark.parametrize("used", ["combinator", "chain"])
    def test_absent_leaf_keeps_its_residual_bit_for_bit(self, used):
        parts = (gx.topk(0.3),)
        tx = gx.error_feedback(*parts) if used == "combinator" else gx.chain(*parts, gx.ef())
        grads = {"a": randn(7), "b": randn(7, seed=1)}
        _, state = tx.update(grads, tx.init(grads))
        before = residual_of(state)["a"].clone()
        out, state = tx.update({"a": None, "b": grads["b"]}, state)
        assert out["a"] is None
        assert torch.equal(residual_of(state)["a"], before)
        assert before.any()

    def test_absent_leaf_sends_nothing_through_an_exchange(self):
        tx = gx.chain(gx.topk(0.3), gx.ef(), gx.allreduce())
        grads = {"a": randn(7), "b": randn(7, seed=1)}
        _, state = tx.update(grads, tx.init(grads))
        before = residual_of(state)["a"].clone()
        out, state = tx.update({"a": None, "b": None}, state)
        assert out == {"a": None, "b": None}
        assert torch.equal(residual_of(state)["a"], before)

    def test_absent_leaf_comes_back_with_what_it_left(self):
        tx = gx.error_feedback(gx.topk(0.5))
        _, state = tx.update([torch.tensor([3.0, 1.0])], tx.init([torch.zeros(2)]))
        _, state = tx.update([None], state)
        out, _ = tx.update([torch.zeros(2)], state)
        assert out[0].decode().tolist() == [0.0, 1.0]

    def test_autograd_history_does_not_grow_in_the_residual(self):
        tx = gx.error_feedback(gx.topk(0.5))
        grads = [torch.tensor([3.0, 1.0], requires_grad=True)]
        _, state = tx.update(grads, tx.init(grads))
        assert not residual_of(state)[0].requires_grad

    @pytest.mark.parametrize(
        "leaf",
        [randn(6, 4).t(), randn(24)[::3], randn(1).expand(9), randn(1, 2, 3, 4).transpose(1, 3)],
        ids=["transposed", "strided", "expanded", "permuted"],
    )
    @pytest.mark.parametrize("compressor", [gx.topk(0.3), gx.sign()], ids=repr)
    def test_layout_in_memory_does_not_matter(self, leaf, compressor):
        tx, plain = gx.error_feedback(compressor), leaf.contiguous().clone()
        state, other = tx.init([leaf]), tx.init([plain])
        for _ in range(3):
            out, state = tx.update([leaf], state)
            expected, other = tx.update([plain], other)
            assert torch.equal(out[0].decode(), expected[0].decode())
        assert torch.equal(residual_of(state)[0], residual_of(other)[0])

    @given(
        st.integers(0, 2**31),
        st.integers(1, 40),
        st.sampled_from(["topk", "sign", "both", "global"]),
        st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    )
    def test_what_is_sent_and_what_is_kept_are_what_came(self, seed, n, kind, dtype):
        compressors = {
            "topk": [gx.topk(0.3)],
            "sign": [gx.sign()],
            "both": [gx.topk(0.5), gx.sign()],
            "global": [gx.topk(0.3, scope="global")],
        }[kind]
        tx = gx.error_feedback(*compressors)
        grads = {"a": randn(n, seed=seed).to(dtype), "b": randn(2, n, seed=seed + 1).to(dtype)}
        state = tx.init(grads)
        sent = {path: torch.zeros_like(leaf, dtype=torch.float64) for path, leaf in grads.items()}
        for _ in range(4):
            out, state = tx.update(grads, state)
            for path, leaf in zip(sorted(grads), decoded(out).values(), strict=True):
                sent[path] += leaf.double()
        for path, leaf in grads.items():
            total = sent[path] + residual_of(state)[path].double()
            assert torch.allclose(total, 4 * leaf.double(), rtol=0, atol=1e-5)


class TestMasked:
    GRADS = {"w": torch.tensor([[3.0, 1.0]]), "b": torch.tensor([1.0, 2.0]), "none": None}  # noqa: RUF012

    def test_leaves_left_out_go_past_unchanged(self):
        tx = gx.masked(gx.topk(0.5, feedback=False), gx.is_matrix)
        out, _ = tx.update(self.GRADS, tx.init(self.GRADS))
        assert out["b"] is self.GRADS["b"]
        assert out["w"].decode().tolist() == [3.0, 0.0]
        assert out["none"] is None

    @pytest.mark.parametrize(
        "inner",
        [gx.chain(gx.topk(0.5), gx.ef()), gx.chain(gx.unscale(), gx.allreduce())],
        ids=repr,
    )
    def test_chain_of_several_is_refused(self, inner):
        text = (
            "masked takes one transformation, got a chain of 2: mask each of them, or wrap "
            "the compressors in error_feedback(...)"
        )
        with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
            gx.masked(inner, gx.is_matrix)

    def test_chain_of_one_is_that_one(self):
        one = gx.masked(gx.chain(gx.topk(0.5, feedback=False)), gx.is_matrix)
        assert one == gx.masked(gx.topk(0.5, feedback=False), gx.is_matrix)

    @pytest.mark.parametrize("chosen", [True, False])
    def test_all_or_no_leaf_may_be_chosen(self, chosen):
        tx = gx.masked(gx.topk(1.0, feedback=False), lambda *leaf: chosen)
        out, _ = tx.update(self.GRADS, tx.init(self.GRADS))
        assert isinstance(out["w"], torch.Tensor) != chosen

    def test_inner_state_has_no_leaf_that_is_left_out(self):
        tx = gx.masked(gx.error_feedback(gx.topk(0.5)), gx.is_matrix)
        residual = residual_of(tx.init(self.GRADS))
        assert [path for path, leaf in residual.items() if leaf is not None] == ["w"]

    def test_masks_nest(self):
        inner = gx.masked(gx.topk(0.5, feedback=False), gx.is_matrix)
        tx = gx.masked(inner, gx.path_glob("w", "b"))
        out, _ = tx.update(self.GRADS, tx.init(self.GRADS))
        assert [path for path, leaf in out.items() if isinstance(leaf, Payload)] == ["w"]

    def test_global_choice_is_among_the_chosen_leaves(self):
        grads = {"a": torch.tensor([9.0]), "b": torch.tensor([1.0, 2.0]), "c": torch.tensor([3.0])}
        tx = gx.masked(gx.topk(0.3, scope="global", feedback=False), gx.path_glob("b", "c"))
        out, _ = tx.update(grads, tx.init(grads))
        assert [leaf.tolist() for leaf in decoded(out).values()] == [[9.0], [0.0, 0.0], [3.0]]

    def test_exchange_may_not_be_masked(self):
        text = (
            "masked(gx.allreduce(), ...): an exchange sees every leaf, since a leaf that goes past "
            "it is never reduced; mask what stands before it"
        )
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            gx.masked(gx.allreduce(), gx.is_matrix)

    def test_mask_is_static(self):
        tx = gx.masked(gx.topk(0.5, feedback=False), gx.is_matrix)
        assert optree.tree_leaves(tx.init(self.GRADS)) == []

    @given(st.permutations(["w", "x", "y"]), st.sets(st.sampled_from(["w", "x", "y"])))
    def test_the_mask_says_which_are_compressed(self, order, chosen):
        grads = {path: torch.ones(2) for path in order}
        tx = gx.masked(gx.topk(0.5, feedback=False), lambda path, leaf, info: path in chosen)
        out, _ = tx.update(grads, tx.init(grads))
        assert {path for path, leaf in out.items() if isinstance(leaf, Payload)} == chosen


GATED = [
    gx.apply_if_finite(gx.error_feedback(gx.topk(0.5))),
    gx.apply_if_finite(gx.error_feedback(gx.topk(0.5)), gx.allreduce()),
    gx.apply_if_finite(gx.masked(gx.error_feedback(gx.sign()), gx.path_glob("a")), gx.allreduce()),
    gx.chain(gx.topk(0.5), gx.sign(), gx.ef(), gx.allreduce()),
    gx.chain(gx.topk(0.5, scope="global"), gx.ef()),
    gx.chain(gx.skip_bn(), gx.sign(), gx.ef()),
]


class TestApplyIfFinite:
    @pytest.mark.parametrize("tx", GATED, ids=repr)
    @pytest.mark.parametrize("value", [INF, -INF, NAN])
    @pytest.mark.parametrize("path", ["a", "bn1"])
    def test_bad_step_leaves_no_trace(self, tx, value, path):
        grads = {"a": randn(5), "bn1": randn(3, seed=1)}
        bad = {**grads, path: grads[path].clone()}
        bad[path][1] = value
        _, state = tx.update(grads, tx.init(grads))
        out, after = tx.update(bad, state)
        assert not any(leaf.any() for leaf in decoded(out).values())
        assert bits_of(residual_of(after)) == bits_of(residual_of(state))
        _, straight = tx.update(grads, state)
        _, resumed = tx.update(grads, after)
        assert bits_of(residual_of(resumed)) == bits_of(residual_of(straight))

    def test_zeros_of_a_bad_step_have_the_structure_and_dtypes_of_the_gradients(self):
        grads = {"a": [torch.tensor([INF]).half(), None], "b": torch.zeros(2, 0).double()}
        tx = gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce())
        out, _ = tx.update(grads, tx.init(grads))
        assert out["a"][0].dtype == torch.float16
        assert out["a"][1] is None
        assert (out["b"].dtype, out["b"].shape) == (torch.float64, (2, 0))

    def test_skipped_steps_are_counted_and_the_last_one_is_told(self):
        tx = gx.apply_if_finite(gx.error_feedback(gx.topk(0.5)))
        state, seen = tx.init([torch.zeros(2)]), []
        for value in (1.0, INF, NAN, 1.0):
            _, state = tx.update([torch.tensor([value, 1.0])], state)
            seen.append((bool(state.last_finite), int(state.total_notfinite)))
        assert seen == [(True, 0), (False, 1), (False, 2), (True, 2)]

    def test_counters_keep_their_dtypes(self):
        tx = gx.apply_if_finite(gx.error_feedback(gx.topk(0.5)), gx.allreduce())
        state = tx.init([torch.zeros(2)])
        before = [leaf.dtype for leaf in optree.tree_leaves(state)]
        for value in (1.0, INF):
            _, state = tx.update([torch.tensor([value, 1.0])], state)
            assert [leaf.dtype for leaf in optree.tree_leaves(state)] == before

    def test_exchange_counts_bad_steps_too(self):
        tx = gx.apply_if_finite(gx.allreduce())
        grads = [torch.tensor([INF])]
        _, state = tx.update(grads, tx.init(grads))
        assert int(state.states[0].inner_states[0].count) == 1

    def test_result_that_is_not_finite_is_a_bad_step(self):
        tx = gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce())
        state = tx.init([torch.zeros(2)])
        _, state = tx.update([torch.tensor([3e38, 2e38])], state)
        out, after = tx.update([torch.tensor([0.0, 3e38])], state)
        assert out[0].tolist() == [0.0, 0.0]
        assert bits_of(residual_of(after)) == bits_of(residual_of(state))

    def test_result_that_the_leaf_cannot_hold_is_a_bad_step(self):
        tx = gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce())
        grads = [torch.tensor([60000.0, 50000.0], dtype=torch.float16)]
        _, state = tx.update(grads, tx.init(grads))
        out, after = tx.update(grads, state)
        assert not after.last_finite
        assert out[0].tolist() == [0.0, 0.0]

    def test_gradient_narrower_than_the_parameter_cannot_overflow_unseen(self):
        tx = gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce())
        with pytest.raises(TypeError, match=r"^leaf '0' has dtype float16: expected float32"):
            tx.update([torch.ones(2).half()], tx.init([torch.ones(2)]))

    def test_empty_tree_is_finite(self):
        tx = gx.apply_if_finite(gx.error_feedback(gx.topk(0.5)))
        _, state = tx.update({}, tx.init({}))
        assert bool(state.last_finite)

    def test_gates_nest(self):
        tx = gx.apply_if_finite(gx.apply_if_finite(gx.error_feedback(gx.topk(0.5))), gx.allreduce())
        grads = [torch.tensor([INF, 1.0])]
        out, state = tx.update(grads, tx.init(grads))
        assert out[0].tolist() == [0.0, 0.0]
        assert not residual_of(state)[0].any()

    def test_nothing_inside_is_the_identity_on_finite_values(self):
        tx = gx.apply_if_finite()
        out, _ = tx.update([torch.tensor([1.0, 2.0])], tx.init([torch.zeros(2)]))
        assert out[0].tolist() == [1.0, 2.0]

    @given(
        st.sampled_from(GATED),
        st.lists(st.sampled_from(["good", "inf", "nan"]), max_size=6),
        st.integers(0, 2**31),
    )
    def test_bad_steps_might_as_well_not_have_been(self, tx, steps, seed):
        def grads(i, kind):
            leaf = randn(4, seed=seed + i)
            leaf[i % 4] = {"good": 1.0, "inf": INF, "nan": NAN}[kind]
            return {"a": leaf, "bn1": randn(3, seed=seed - i)}

        state = tx.init(grads(0, "good"))
        for i, kind in enumerate(steps):
            _, state = tx.update(grads(i, kind), state)
        other = tx.init(grads(0, "good"))
        for i, kind in enumerate(steps):
            if kind == "good":
                _, other = tx.update(grads(i, kind), other)
        assert bits_of(residual_of(state)) == bits_of(residual_of(other))


PURE = [
    gx.chain(),
    gx.chain(gx.allreduce()),
    gx.chain(gx.unscale(), gx.allreduce()),
    gx.chain(gx.unscale(), gx.skip_bn(), gx.topk(0.3), gx.ef(), gx.allreduce()),
    gx.chain(gx.unscale(), gx.topk(0.5), gx.sign(), gx.ef()),
    gx.chain(gx.unscale(), gx.topk(1.0), gx.ef(), gx.allreduce()),
    gx.chain(gx.topk(0.5, scope="global"), gx.ef(), gx.allreduce(algorithm="gather")),
    gx.error_feedback(gx.topk(0.5)),
    gx.masked(gx.error_feedback(gx.sign()), gx.is_matrix),
    gx.apply_if_finite(gx.error_feedback(gx.topk(0.5)), gx.allreduce()),
]


@pytest.mark.parametrize("tx", PURE, ids=repr)
@settings(max_examples=15)
@given(
    st.integers(0, 2**31),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    st.booleans(),
)
def test_inputs_are_never_written_into(tx, seed, dtype, bad):
    grads = {
        "w": randn(3, 5, seed=seed).to(dtype).t(),
        "bn1": randn(9, seed=seed + 1).to(dtype)[::3],
        "s": torch.tensor(1.0, dtype=dtype),
        "e": torch.zeros(0, dtype=dtype),
        "n": None,
    }
    if bad:
        grads["bn1"][1] = NAN
    state = tx.init(grads)
    for _ in range(2):
        inputs = (grads, state)
        before = bits_of(copy.deepcopy([leaf.contiguous() for leaf in optree.tree_leaves(inputs)]))
        _, state = tx.update(grads, state, loss_scale=4.0)
        assert bits_of(inputs) == before


@pytest.mark.parametrize("tx", PURE, ids=repr)
def test_equal_inputs_give_equal_outputs(tx):
    grads = {"w": randn(3, 5), "bn1": randn(4, seed=1)}
    state = tx.init(grads)
    one, other = (tx.update(grads, state, loss_scale=4.0) for _ in range(2))
    assert bits_of(one) == bits_of(other)


@pytest.mark.parametrize("tx", PURE, ids=repr)
@settings(max_examples=15)
@given(st.integers(0, 2**31), st.sampled_from(["transposed", "strided", "expanded", "offset"]))
def test_layout_in_memory_does_not_matter(tx, seed, layout):
    leaf = {
        "transposed": randn(4, 3, seed=seed).t(),
        "strided": randn(6, 4, seed=seed)[::2],
        "expanded": randn(1, 4, seed=seed).expand(3, 4),
        "offset": randn(13, seed=seed)[1:].reshape(3, 4),
    }[layout]
    state, other = tx.init({"w": leaf}), tx.init({"w": leaf.contiguous().clone()})
    for _ in range(2):
        out, state = tx.update({"w": leaf}, state, loss_scale=2.0)
        expected, other = tx.update({"w": leaf.contiguous().clone()}, other, loss_scale=2.0)
        assert bits_of(out) == bits_of(expected)
    assert bits_of(state) == bits_of(other)


@pytest.mark.parametrize("tx", PURE, ids=repr)
def test_dtypes_and_shapes_of_the_state_never_change(tx):
    grads = {"w": randn(3, 5).half(), "bn1": randn(4).bfloat16(), "s": torch.tensor(1.0)}
    state = tx.init(grads)
    before = [(leaf.dtype, leaf.shape) for leaf in optree.tree_leaves(state)]
    for scale in (4, 2.0, torch.tensor(8.0), torch.tensor(8.0, dtype=torch.float64)):
        _, state = tx.update(grads, state, loss_scale=scale)
        assert [(leaf.dtype, leaf.shape) for leaf in optree.tree_leaves(state)] == before


@given(st.lists(st.integers(-6, 6), min_size=1, max_size=6), st.integers(0, 2**31))
def test_loss_scales_that_are_powers_of_two_leave_no_trace(exponents, seed):
    tx = gx.chain(gx.unscale(), gx.topk(0.3), gx.ef(), gx.allreduce())
    scaled = plain = tx.init([torch.zeros(10)])
    for i, exponent in enumerate(exponents):
        grad = randn(10, seed=seed + i)
        out, scaled = tx.update([grad * 2.0**exponent], scaled, loss_scale=2.0**exponent)
        expected, plain = tx.update([grad], plain, loss_scale=1.0)
        assert np.array_equal(out[0].numpy(), expected[0].numpy())
    assert bits_of(residual_of(scaled)) == bits_of(residual_of(plain))


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (
            lambda: gx.error_feedback(gx.unscale()),
            "error_feedback(gx.unscale()): expected",
        ),
        (lambda: gx.error_feedback(gx.allreduce()), "error_feedback(gx.allreduce()): expected"),
        (
            lambda: gx.error_feedback(gx.skip_bn(), gx.topk(0.1)),
            "error_feedback(gx.skip_bn()): ",
        ),
        (lambda: gx.masked(gx.unscale(), gx.is_matrix), "the loss scale is in every leaf"),
        (
            lambda: gx.masked(gx.ef(), gx.is_matrix),
            "masked(gx.ef()): gx.ef() acts on",
        ),
        (
            lambda: gx.apply_if_finite(gx.topk(0.1), gx.ef()),
            "apply_if_finite(gx.ef()): gx.ef()",
        ),
    ],
)
def test_combinators_refuse_what_cannot_stand_inside(build, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        build()


def test_a_payload_that_is_not_registered_says_so():
    class Bare(gx.Payload):
        children = ("values",)

    with pytest.raises(TypeError, match="Bare is no pytree node: decorate the class with register"):
        Bare(torch.ones(2), (2,), "float32")


class Kept(NamedTuple):
    whole: Any


def first_values(count, *, stateful=False):
    """A compressor that sends the first values of a leaf as a view, or keeps the whole leaf."""

    def encode(flat, shape):
        return gx.Sparse(flat[:count], torch.arange(count), shape, "float32")

    stage = Stage("first", Kind.COMPRESSOR, biased=True, gives="sparse", stateful=stateful)
    stateless = compressor(stage, encode)
    if not stateful:
        return stateless

    def update(updates, state, params=None, **extra):
        return stateless.update(updates, (), params)[0], Kept(dict(updates))

    return Transformation(stage, lambda params, info: Kept(dict(params)), update)


@pytest.mark.parametrize("stateful", [False, True])
def test_feedback_does_not_write_over_views_of_what_it_compressed(stateful):
    tx = gx.error_feedback(first_values(2, stateful=stateful))
    sent, state = tx.update({"w": torch.arange(1.0, 5)}, tx.init({"w": torch.zeros(4)}))
    assert sent["w"].decode().tolist() == [1.0, 2.0, 0.0, 0.0]
    assert state.residual["w"].tolist() == [0.0, 0.0, 3.0, 4.0]
    if stateful:
        assert state.inner_states[0].whole["w"].tolist() == [1.0, 2.0, 3.0, 4.0]
