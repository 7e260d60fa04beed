"""`sign`: one bit a value and the mean magnitude."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import gradtx as gx

INF, NAN = float("inf"), float("nan")


def payload_of(leaf):
    tx = gx.sign(feedback=False)
    return tx.update([leaf], tx.init([leaf]))[0][0]


def bits_of(payload):
    """The bits, lowest first, by Python's whole numbers."""
    number = int.from_bytes(bytes(payload.bits.tolist()), "little")
    return [number >> i & 1 for i in range(payload.size)]


def test_signs_carry_the_mean_magnitude():
    payload = payload_of(torch.tensor([[3.0, -1.0], [-2.0, 0.0]]))
    assert payload.scale.tolist() == [1.5]
    assert payload.decode().tolist() == [1.5, -1.5, -1.5, 1.5]


def test_bits_are_packed_lowest_first():
    leaf = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0, 1.0])
    assert payload_of(leaf).bits.tolist() == [0b101, 0b10]


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zero_counts_as_positive(zero):
    payload = payload_of(torch.tensor([zero, -2.0]))
    assert payload.decode().tolist() == [1.0, -1.0]


@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 1001])
def test_length_need_not_be_a_multiple_of_eight(n):
    leaf = torch.randn(n, generator=torch.Generator().manual_seed(n))
    payload = payload_of(leaf)
    assert payload.bits.shape == ((n + 7) // 8,)
    assert bits_of(payload) == [int(value >= 0) for value in leaf.tolist()]
    assert payload.decode().sign().tolist() == leaf.sign().tolist()


def test_padding_bits_are_clear():
    assert payload_of(torch.ones(9)).bits.tolist() == [255, 1]


@pytest.mark.parametrize("n", [1, 8, 11])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_all_zeros_decode_to_zeros(n, zero):
    payload = payload_of(torch.full((n,), zero))
    assert payload.scale.tolist() == [0.0]
    assert payload.decode().tolist() == [0.0] * n


def test_no_jitter_where_the_gradient_is_zero():
    tx = gx.chain(gx.sign(), gx.ef(), gx.allreduce())
    grads = [torch.zeros(5)]
    state = tx.init(grads)
    for _ in range(3):
        out, state = tx.update(grads, state)
        assert out[0].tolist() == [0.0] * 5
    assert state.gate.inner_states[0].residual[0].tolist() == [0.0] * 5


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_empty_leaf_sends_a_scale_of_zero(shape):
    payload = payload_of(torch.zeros(shape))
    assert payload.bits.shape == (0,)
    assert payload.scale.tolist() == [0.0]
    assert payload.decode().shape == (0,)


@pytest.mark.parametrize("value", [-3.0, 2.0])
def test_0d_leaf_is_sent_exactly(value):
    payload = payload_of(torch.tensor(value))
    assert payload.shape == ()
    assert payload.decode().tolist() == [value]


def test_leaf_that_is_none_stays_none():
    tx = gx.sign(feedback=False)
    assert tx.update([None], tx.init([None]))[0] == [None]


@pytest.mark.parametrize(
    ("dtype", "decoded"),
    [
        *((torch.float16, torch.float32), (torch.bfloat16, torch.float32)),
        *((torch.float32, torch.float32), (torch.float64, torch.float64)),
    ],
)
def test_scale_is_in_the_accumulation_dtype(dtype, decoded):
    payload = payload_of(torch.ones(3, dtype=dtype))
    assert payload.scale.dtype == payload.decode().dtype == decoded


def test_scale_of_large_fp16_values_does_not_overflow():
    leaf = torch.full((1000,), 60000.0, dtype=torch.float16)
    assert payload_of(leaf).scale.item() == leaf[0].item()


def test_scale_of_large_fp32_values_does_not_overflow():
    leaf = torch.full((1000,), 3e38)
    assert payload_of(leaf).scale.item() == leaf[0].item()


def test_scale_of_many_values_is_the_correctly_rounded_mean():
    leaf = torch.randn(300_000, generator=torch.Generator().manual_seed(0))
    mean = math.fsum(abs(value) for value in leaf.tolist()) / 300_000
    assert payload_of(leaf).scale.item() == np.float32(mean)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_bad_value_shows_in_the_scale(bad):
    assert not math.isfinite(payload_of(torch.tensor([bad, 1.0])).scale.item())


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_bad_value_does_not_look_finite_in_a_chain(bad):
    tx = gx.chain(gx.sign(), gx.ef(), gx.allreduce())
    grads = [torch.tensor([bad, 1.0])]
    out, state = tx.update(grads, tx.init(grads))
    assert out[0].tolist() == [0.0, 0.0]
    assert not state.last_finite


@pytest.mark.parametrize(
    "leaf",
    [
        torch.arange(-6.0, 6.0).reshape(3, 4).t(),
        torch.arange(-6.0, 6.0)[::3],
        torch.arange(-6.0, 6.0)[1:],
        torch.full((1,), -2.0).expand(11),
        torch.arange(-6.0, 6.0).reshape(1, 2, 2, 3).to(memory_format=torch.channels_last),
    ],
    ids=["transposed", "strided", "offset", "expanded", "channels last"],
)
def test_layout_in_memory_does_not_matter(leaf):
    one, other = payload_of(leaf), payload_of(leaf.contiguous().clone())
    assert torch.equal(one.bits, other.bits)
    assert torch.equal(one.scale, other.scale)


def test_payload_prints_what_it_stands_for():
    assert repr(payload_of(torch.ones(2, 3))) == "Signs(shape=(2, 3), dtype='float32')"


def test_signs_have_no_values_left():
    with pytest.raises(TypeError, match=r"^Signs has no values left to compress$"):
        payload_of(torch.ones(2)).with_values(torch.ones(2))


def test_sign_of_signs_is_refused_when_used_unchecked():
    tx = gx.chain(gx.sign(), gx.sign(), check=False)
    text = r"^Signs\(shape=\(2,\), dtype='float32'\) has no values left to compress$"
    with pytest.raises(TypeError, match=text):
        tx.update([torch.ones(2)], tx.init([torch.ones(2)]))


def test_arguments_are_by_name_only():
    with pytest.raises(TypeError, match="takes 0 positional arguments but 1 was given"):
        gx.sign(False)


@pytest.mark.parametrize("feedback", ["no", None, 0])
def test_feedback_that_is_no_bool_is_refused(feedback):
    with pytest.raises((TypeError, ValueError), match="feedback"):
        gx.sign(feedback=feedback)


values = hnp.arrays(
    np.float32,
    st.integers(1, 40),
    elements=st.one_of(st.sampled_from([0.0, -0.0, 1.0, -1.0]), st.floats(-1e6, 1e6, width=32)),
)


@given(values)
def test_same_as_a_plain_loop(array):
    payload = payload_of(torch.from_numpy(array))
    mean = np.float32(math.fsum(abs(float(value)) for value in array) / len(array))
    assert payload.decode().tolist() == [mean if value >= 0 else -mean for value in array]


@given(values)
def test_error_is_what_the_norms_say(array):
    """||x - C(x)||^2 = ||x||_2^2 - ||x||_1^2 / n, for the exact mean."""
    decoded = payload_of(torch.from_numpy(array)).decode().double().numpy()
    wide = array.astype(np.float64)
    lost = np.square(wide - decoded).sum()
    expected = np.square(wide).sum() - np.square(np.abs(wide).sum()) / len(wide)
    # The scale is rounded to FP32 once.
    assert abs(lost - expected) <= 1e-6 * np.square(wide).sum()


@given(values)
def test_it_is_a_contraction(array):
    decoded = payload_of(torch.from_numpy(array)).decode().double().numpy()
    wide = array.astype(np.float64)
    lost, whole = np.square(wide - decoded).sum(), np.square(wide).sum()
    assert lost <= (1 - 1 / len(wide)) * whole + 1e-6 * whole


@given(values, st.integers(-40, 40))
def test_power_of_two_scales_go_through(array, exponent):
    leaf = torch.from_numpy(np.round(array * 8) / 8)
    one, scaled = payload_of(leaf), payload_of(leaf * 2.0**exponent)
    assert torch.equal(scaled.bits, one.bits)
    assert torch.equal(scaled.scale, one.scale * 2.0**exponent)


@given(values)
def test_inputs_are_not_written_into(array):
    leaf = torch.from_numpy(array.copy())
    payload_of(leaf)
    assert leaf.numpy().tobytes() == array.tobytes()
