"""`topk`: exactly the k largest magnitudes, ties to the lowest index."""

import re
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import gradtx as gx
from gradtx.core.payload import Joined, Member, decode_leaves

INF, NAN = float("inf"), float("nan")


def payload_of(leaf, ratio, **arguments):
    tx = gx.topk(ratio, feedback=False, **arguments)
    return tx.update([leaf], tx.init([leaf]))[0][0]


def oracle(values, k):
    """Sorted by magnitude, the largest first; a stable sort keeps the lowest index in front."""
    wide = np.abs(np.asarray(values, np.float64))
    order = np.argsort(np.where(np.isnan(wide), -np.inf, -wide), kind="stable")
    return sorted(order[:k].tolist())


def expected_count(ratio, n):
    return max(1, round(ratio * n)) if n else 0


def assert_largest(leaf, ratio):
    payload = payload_of(leaf, ratio)
    flat = leaf.reshape(-1)
    kept = oracle(flat.double().numpy(), expected_count(ratio, flat.numel()))
    assert payload.indices.tolist() == kept
    assert torch.equal(payload.values, flat[kept].to(payload.values.dtype))


@pytest.mark.parametrize(
    ("n", "ratio", "k"),
    [
        *((10, 0.5, 5), (10, 0.1, 1), (10, 0.01, 1), (3, 1e-9, 1), (10, 1.0, 10), (1, 0.5, 1)),
        *((7, 0.5, 4), (5, 0.5, 2), (1000, 0.0014, 1), (1000, 0.0016, 2), (0, 0.5, 0), (0, 1.0, 0)),
    ],
)
def test_exactly_k_are_sent(n, ratio, k):
    payload = payload_of(torch.randn(n, generator=torch.Generator().manual_seed(n)), ratio)
    assert payload.indices.shape == payload.values.shape == (k,)


def test_largest_magnitudes_are_chosen():
    payload = payload_of(torch.tensor([[1.0, -4.0], [0.0, 2.0]]), 0.5)
    assert payload.indices.tolist() == [1, 3]
    assert payload.values.tolist() == [-4.0, 2.0]


def test_payload_knows_the_shape_of_the_leaf():
    payload = payload_of(torch.ones(2, 3), 0.5)
    assert (payload.shape, payload.size, payload.dtype) == ((2, 3), 6, "float32")


def test_rest_is_decoded_as_zeros():
    assert payload_of(torch.tensor([1.0, -4.0, 3.0]), 0.3).decode().tolist() == [0.0, -4.0, 0.0]


@pytest.mark.parametrize(
    "values",
    [
        [2.0, -2.0, 2.0, -2.0],
        [1.0, 3.0, -3.0, 3.0, 0.0, -1.0, 1.0, 3.0],
        [0.0, -0.0, 0.0, 0.0],
        [5.0, 1.0, 1.0, 1.0, 1.0, 5.0],
    ],
)
@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
def test_ties_go_to_the_lowest_index(values, ratio):
    assert_largest(torch.tensor(values), ratio)


@pytest.mark.parametrize("n", [7, 100, 65_536, 65_537, 200_000])
@pytest.mark.parametrize("value", [1.0, -3.5, 0.0, 1e-42])
def test_all_equal_magnitudes_give_the_lowest_indices(n, value):
    signs = torch.ones(n)
    signs[::3] = -1
    payload = payload_of(signs * value, 0.01)
    assert payload.indices.tolist() == list(range(expected_count(0.01, n)))


@pytest.mark.parametrize("ratio", [0.05, 0.1, 0.25])
@pytest.mark.parametrize("value", [1.0, -0.1])
def test_all_equal_magnitudes_are_all_sent_within_two_rounds(ratio, value):
    tx = gx.chain(gx.topk(ratio), gx.ef())
    grads = [torch.full((60,), value)]
    state, sent = tx.init(grads), set()
    for _ in range(round(2 / ratio)):
        out, state = tx.update(grads, state)
        sent.update(out[0].indices.tolist())
    assert sent == set(range(60))


def test_all_negative_values_are_chosen_by_magnitude():
    assert_largest(-torch.arange(1.0, 41.0), 0.1)


@pytest.mark.parametrize("k", [10, 50, 51, 1000, 90_000])
def test_few_non_zeros_come_first_and_the_rest_are_the_lowest_zeros(k):
    generator = torch.Generator().manual_seed(3)
    leaf = torch.zeros(100_000)
    places = torch.randperm(100_000, generator=generator)[:50]
    leaf[places] = torch.randn(50, generator=generator)
    assert_largest(leaf, k / 100_000)


@pytest.mark.parametrize("n", [1, 9, 100_000])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_all_zeros_send_the_lowest_indices(n, zero):
    payload = payload_of(torch.full((n,), zero), 0.1)
    assert payload.indices.tolist() == list(range(expected_count(0.1, n)))
    assert not payload.decode().any()


@pytest.mark.parametrize("n", [6, 100, 100_000])
@pytest.mark.parametrize("bad", [[NAN], [INF], [-INF], [NAN, NAN, NAN, NAN], [NAN, INF, -INF]])
@pytest.mark.parametrize("ratio", [0.00001, 0.01, 0.5, 1.0])
def test_indices_are_valid_whatever_the_values(n, bad, ratio):
    leaf = torch.randn(n, generator=torch.Generator().manual_seed(n))
    leaf[: len(bad)] = torch.tensor(bad)
    indices = payload_of(leaf.roll(3), ratio).indices.tolist()
    assert len(indices) == expected_count(ratio, n)
    assert indices == sorted(set(indices) & set(range(n)))


def test_all_nan_gives_valid_indices():
    assert payload_of(torch.full((10,), NAN), 0.3).indices.tolist() == [0, 1, 2]


@pytest.mark.parametrize("n", [6, 100_000])
def test_infinity_is_the_largest(n):
    leaf = torch.ones(n)
    leaf[4] = -INF
    assert payload_of(leaf, 1.0 / n).indices.tolist() == [4]


def test_bad_value_is_always_sent():
    leaf = torch.ones(100)
    leaf[40] = NAN
    assert 40 in payload_of(leaf, 0.05).indices.tolist()


@pytest.mark.parametrize("ratio", [0.01, 0.5, 1.0])
def test_0d_leaf_sends_its_value(ratio):
    payload = payload_of(torch.tensor(3.0), ratio)
    assert (payload.shape, payload.values.tolist(), payload.indices.tolist()) == ((), [3.0], [0])


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 2, 2)])
def test_empty_leaf_sends_nothing(shape):
    tx = gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce())
    out, _ = tx.update([torch.zeros(shape)], tx.init([torch.zeros(shape)]))
    assert out[0].shape == shape


def test_leaf_that_is_none_stays_none():
    tx = gx.topk(0.5, feedback=False)
    assert tx.update({"a": None}, tx.init({"a": None}))[0] == {"a": None}


@pytest.mark.parametrize("n", [5, 100_000])
def test_ratio_of_one_sends_everything_bit_for_bit(n):
    leaf = torch.randn(n, generator=torch.Generator().manual_seed(0))
    assert torch.equal(payload_of(leaf, 1.0).decode(), leaf)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_leaf_is_sent_as_fp32(dtype):
    payload = payload_of(torch.tensor([1.0, 2.0], dtype=dtype), 0.5)
    assert (payload.dtype, payload.values.dtype) == ("float32", torch.float32)


def test_fp64_leaf_is_sent_as_fp64():
    payload = payload_of(torch.tensor([1.0, 1.0 + 2.0**-50], dtype=torch.float64), 0.5)
    assert payload.indices.tolist() == [1]
    assert (payload.dtype, payload.values.dtype) == ("float64", torch.float64)


def layouts(leaf):
    """One leaf of 2 n values laid out in other ways, each with the same values in C order."""
    n = leaf.shape[0]
    padded = torch.full((n, 3), NAN)
    padded[:, 1] = leaf
    spread = torch.full((2, n), NAN)
    spread[1] = leaf
    return {
        "strided": padded[:, 1],
        "offset": spread[1],
        "transposed": leaf.reshape(n // 2, 2).t().contiguous().t(),
        "flipped twice": leaf.flip(0).flip(0),
        "channels last": leaf.reshape(1, 2, n // 2, 1).to(memory_format=torch.channels_last),
    }


@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("n", [12, 100_000])
@pytest.mark.parametrize("name", layouts(torch.zeros(4)))
def test_layout_in_memory_does_not_matter(name, n, ratio):
    leaf = torch.randn(n, generator=torch.Generator().manual_seed(1))
    other = payload_of(layouts(leaf)[name], ratio)
    assert torch.equal(other.indices, payload_of(leaf, ratio).indices)
    assert torch.equal(other.values, payload_of(leaf, ratio).values)


def test_expanded_leaf_is_taken():
    assert payload_of(torch.ones(1).expand(8), 0.5).indices.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("ratio", [1, 0, True, False, "0.1", None, 1j, [0.1]])
def test_ratio_that_is_no_float_is_refused(ratio):
    text = f"topk(ratio={ratio!r}): expected a float over 0 and at most 1, such as 0.01"
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        gx.topk(ratio)


@pytest.mark.parametrize("ratio", [0.0, -0.0, -0.1, 1.5, 1.0000000000000002, NAN, INF, -INF])
def test_ratio_out_of_range_is_refused(ratio):
    text = f"topk(ratio={ratio!r}): expected a float over 0 and at most 1"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        gx.topk(ratio)


@pytest.mark.parametrize("scope", ["Leaf", "", None, 3])
def test_unknown_scope_is_refused(scope):
    text = f"topk(scope={scope!r}): expected 'leaf' or 'global'"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        gx.topk(0.5, scope=scope)


@pytest.mark.parametrize("feedback", ["no", None, 0])
def test_feedback_that_is_no_bool_is_refused(feedback):
    with pytest.raises((TypeError, ValueError), match="feedback"):
        gx.topk(0.5, feedback=feedback)


GRADS = OrderedDict(
    b=torch.tensor([[9.0, 1.0], [-7.0, 0.0]]), a=torch.tensor([8.0, 7.0]), c=torch.tensor(7.0)
)


class TestGlobal:
    def sent(self, grads, ratio):
        tx = gx.topk(ratio, scope="global", feedback=False)
        out, _ = tx.update(grads, tx.init(grads))
        return list(out.values()), dict(zip(out, decode_leaves(list(out.values())), strict=True))

    @pytest.mark.parametrize(
        ("k", "kept"),
        [
            (1, {"b": [[9.0, 0.0], [0.0, 0.0]], "a": [0.0, 0.0], "c": 0.0}),
            (2, {"b": [[9.0, 0.0], [0.0, 0.0]], "a": [8.0, 0.0], "c": 0.0}),
            (3, {"b": [[9.0, 0.0], [0.0, 0.0]], "a": [8.0, 7.0], "c": 0.0}),
            (4, {"b": [[9.0, 0.0], [-7.0, 0.0]], "a": [8.0, 7.0], "c": 0.0}),
            (5, {"b": [[9.0, 0.0], [-7.0, 0.0]], "a": [8.0, 7.0], "c": 7.0}),
            (7, {"b": [[9.0, 1.0], [-7.0, 0.0]], "a": [8.0, 7.0], "c": 7.0}),
        ],
    )
    def test_largest_of_all_leaves_are_chosen_with_ties_in_path_order(self, k, kept):
        _, decoded = self.sent(GRADS, k / 7)
        assert {path: leaf.tolist() for path, leaf in decoded.items()} == kept

    def test_first_leaf_in_path_order_holds_the_payload(self):
        payloads, _ = self.sent(GRADS, 0.5)
        assert [type(leaf) for leaf in payloads] == [Member, Joined, Member]

    def test_none_and_empty_leaves_are_no_part(self):
        grads = {"a": None, "b": torch.zeros(0), "c": torch.tensor([1.0, 2.0])}
        _, decoded = self.sent(grads, 0.5)
        assert decoded["a"] is None
        assert decoded["b"].shape == (0,)
        assert decoded["c"].tolist() == [0.0, 2.0]

    @pytest.mark.parametrize("grads", [{}, {"a": None}, {"a": torch.zeros(0)}])
    def test_nothing_to_choose_from_sends_nothing(self, grads):
        tx = gx.chain(gx.topk(0.5, scope="global"), gx.ef(), gx.allreduce())
        out, _ = tx.update(grads, tx.init(grads))
        assert out.keys() == grads.keys()

    def test_leaves_of_other_precision_are_chosen_together(self):
        grads = {
            "a": torch.tensor([1.0, 5.0], dtype=torch.float64),
            "b": torch.tensor([4.0, 2.0], dtype=torch.float16),
        }
        tx = gx.chain(gx.topk(0.5, scope="global"), gx.ef(), gx.allreduce())
        out, state = tx.update(grads, tx.init(grads))
        assert {path: leaf.tolist() for path, leaf in out.items()} == {"a": [0, 5], "b": [4, 0]}
        residual = state.gate.inner_states[0].residual
        assert (residual["a"].dtype, residual["b"].dtype) == (torch.float64, torch.float32)

    def test_global_behind_leaf_chooses_among_what_was_chosen(self):
        tx = gx.chain(
            gx.topk(0.5, feedback=False),
            gx.topk(0.5, scope="global", feedback=False),
            gx.allreduce(),
        )
        grads = {"a": torch.tensor([1.0, 2.0, 0.0, 0.0]), "b": torch.tensor([9.0, 8.0, 7.0, 0.0])}
        out, _ = tx.update(grads, tx.init(grads))
        assert {path: leaf.tolist() for path, leaf in out.items()} == {
            "a": [0, 0, 0, 0],
            "b": [9, 8, 0, 0],
        }

    def test_leaf_behind_global_chooses_again_among_all(self):
        tx = gx.chain(
            gx.topk(0.5, scope="global", feedback=False),
            gx.topk(0.5, feedback=False),
            gx.allreduce(),
        )
        grads = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([9.0, 8.0])}
        out, _ = tx.update(grads, tx.init(grads))
        assert {path: leaf.tolist() for path, leaf in out.items()} == {"a": [0, 0], "b": [9, 0]}

    def test_sign_behind_global_takes_one_scale(self):
        tx = gx.chain(
            gx.topk(0.5, scope="global", feedback=False), gx.sign(feedback=False), gx.allreduce()
        )
        grads = {"a": torch.tensor([1.0, -6.0]), "b": torch.tensor([2.0, 0.0])}
        out, _ = tx.update(grads, tx.init(grads))
        assert {path: leaf.tolist() for path, leaf in out.items()} == {"a": [0, -4], "b": [4, 0]}


class TestComposed:
    LEAF = torch.tensor([1.0, -8.0, 3.0, 0.5, -6.0, 2.0, 4.0, 0.0])

    def composed(self, *parts):
        tx = gx.chain(*parts)
        return tx.update([self.LEAF], tx.init([self.LEAF]))[0][0]

    def test_topk_of_topk_is_merged_into_one_payload(self):
        payload = self.composed(gx.topk(0.5, feedback=False), gx.topk(0.5, feedback=False))
        assert isinstance(payload.values, torch.Tensor)
        assert payload.indices.tolist() == [1, 4]
        assert payload.values.tolist() == [-8.0, -6.0]

    def test_topk_then_sign_sends_indices_and_signs(self):
        payload = self.composed(gx.topk(0.5, feedback=False), gx.sign(feedback=False))
        assert isinstance(payload.values, gx.Signs)
        assert payload.indices.tolist() == [1, 2, 4, 6]
        assert payload.values.scale.tolist() == [5.25]
        assert payload.decode().tolist() == [0, -5.25, 5.25, 0, -5.25, 0, 5.25, 0]

    def test_topk_of_topk_then_sign(self):
        payload = self.composed(
            gx.topk(0.5, feedback=False), gx.topk(0.5, feedback=False), gx.sign(feedback=False)
        )
        assert payload.decode().tolist() == [0, -7, 0, 0, -7, 0, 0, 0]

    def test_feedback_keeps_what_the_whole_run_lost(self):
        tx = gx.chain(gx.topk(0.5), gx.sign(), gx.ef())
        out, state = tx.update([self.LEAF], tx.init([self.LEAF]))
        residual = state.gate.inner_states[0].residual[0]
        assert torch.equal(out[0].decode() + residual, self.LEAF)

    def test_topk_of_signs_is_refused_when_used_unchecked(self):
        tx = gx.chain(gx.sign(), gx.topk(0.5), check=False)
        text = r"^Signs\(shape=\(8,\), dtype='float32'\) has no values left to compress$"
        with pytest.raises(TypeError, match=text):
            tx.update([self.LEAF], tx.init([self.LEAF]))


def floats(dtype):
    """Arrays with many equal magnitudes, subnormals and both zeros among other finite values."""
    width = np.dtype(dtype).itemsize * 8
    largest = {16: 60000.0, 32: float(np.float32(1e30)), 64: 1e200}[width]
    values = st.one_of(
        st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 2.0**-24]),
        st.floats(-largest, largest, width=width),
    )
    return hnp.arrays(dtype, st.integers(0, 50), elements=values)


ratios = st.floats(0.0, 1.0, exclude_min=True)


@given(floats(np.float32), ratios)
def test_same_as_a_sort(values, ratio):
    assert_largest(torch.from_numpy(values), ratio)


@given(floats(np.float64), ratios)
def test_same_as_a_sort_in_fp64(values, ratio):
    assert_largest(torch.from_numpy(values), ratio)


@given(floats(np.float16), ratios)
def test_same_as_a_sort_in_fp16(values, ratio):
    assert_largest(torch.from_numpy(values), ratio)


@settings(max_examples=25)
@given(
    st.integers(0, 2**31),
    st.integers(65_000, 200_000),
    st.floats(1e-5, 1.0),
    st.sampled_from(["normal", "few levels", "sparse", "heavy tail", "rising", "periodic"]),
)
def test_same_as_a_sort_for_large_leaves(seed, n, ratio, kind):
    rng = np.random.default_rng(seed)
    values = {
        "normal": lambda: rng.normal(size=n),
        "few levels": lambda: rng.integers(-2, 3, n) * 0.5,
        "sparse": lambda: rng.normal(size=n) * (rng.random(n) < 0.001),
        "heavy tail": lambda: rng.standard_cauchy(n),
        "rising": lambda: np.arange(n) - n / 3,
        "periodic": lambda: np.tile(rng.normal(size=512), n // 512 + 1)[:n],
    }[kind]()
    assert_largest(torch.from_numpy(values.astype(np.float32)), ratio)


@given(floats(np.float32), ratios)
def test_it_is_a_contraction(values, ratio):
    leaf = torch.from_numpy(values)
    kept = payload_of(leaf, ratio).decode().double()
    n, wide = leaf.numel(), leaf.double()
    lost = (wide - kept).square().sum().item()
    delta = expected_count(ratio, n) / n if n else 1.0
    assert lost <= (1 - delta) * wide.square().sum().item() * (1 + 1e-12)


@given(floats(np.float16), ratios, st.integers(-60, 60))
def test_power_of_two_scales_go_through(values, ratio, exponent):
    leaf, scale = torch.from_numpy(values).float(), 2.0**exponent
    one, scaled = payload_of(leaf, ratio), payload_of(leaf * scale, ratio)
    assert torch.equal(scaled.indices, one.indices)
    assert torch.equal(scaled.values, one.values * scale)


@given(floats(np.float32), ratios)
def test_signs_do_not_matter_for_the_choice(values, ratio):
    leaf = torch.from_numpy(values)
    assert torch.equal(payload_of(leaf, ratio).indices, payload_of(-leaf, ratio).indices)


@given(floats(np.float32), ratios)
def test_inputs_are_not_written_into(values, ratio):
    leaf = torch.from_numpy(values.copy())
    payload_of(leaf, ratio)
    assert leaf.numpy().tobytes() == values.tobytes()


@given(st.lists(floats(np.float32), min_size=1, max_size=4), ratios)
def test_global_is_leaf_over_the_concatenation(arrays, ratio):
    grads = [torch.from_numpy(values) for values in arrays]
    tx = gx.topk(ratio, scope="global", feedback=False)
    decoded = decode_leaves(tx.update(grads, tx.init(grads))[0])
    whole = payload_of(torch.cat(grads), ratio).decode()
    assert torch.equal(torch.cat(decoded), whole)
