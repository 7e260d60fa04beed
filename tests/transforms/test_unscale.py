"""`unscale`: the loss scale divided out, in FP32."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradtx as gx

INF, NAN = float("inf"), float("nan")


def unscaled(grads, *scale):
    tx = gx.unscale()
    extra = {"loss_scale": scale[0]} if scale else {}
    return tx.update(grads, tx.init(grads), **extra)[0]


def refused(error, text):
    return pytest.raises(error, match=f"^{re.escape(text)}$")


@pytest.mark.parametrize(
    "scale",
    [
        *(4, 4.0, torch.tensor(4.0), torch.tensor(4), torch.tensor(4.0, dtype=torch.float64)),
        *(torch.tensor(4.0, dtype=torch.float16), torch.tensor(4.0, dtype=torch.bfloat16)),
    ],
    ids=repr,
)
def test_gradients_are_divided(scale):
    out = unscaled(
        {"w": torch.tensor([2.0, -8.0]), "none": None, "scalar": torch.tensor(1.0)}, scale
    )
    assert out["w"].tolist() == [0.5, -2.0]
    assert out["none"] is None
    assert out["scalar"].tolist() == 0.25


def test_scale_may_be_below_one():
    assert unscaled([torch.tensor([1.0])], 0.5)[0].tolist() == [2.0]


def test_empty_leaf_is_taken():
    assert unscaled([torch.zeros(0, 3)], 2.0)[0].shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtype_is_kept_when_used_alone(dtype):
    assert unscaled([torch.ones(2, dtype=dtype)], 2.0)[0].dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "scale", [3.0, torch.tensor(3.0, dtype=torch.float64)], ids=["float", "f64"]
)
@pytest.mark.parametrize("shape", [(2,), ()], ids=["vector", "0-d"])
def test_what_stands_behind_it_sees_fp32(dtype, scale, shape):
    tx = gx.chain(gx.unscale(), gx.topk(1.0), gx.ef())
    grads = [torch.ones(shape, dtype=dtype)]
    out, state = tx.update(grads, tx.init(grads), loss_scale=scale)
    assert out[0].values.dtype == torch.float32
    assert state.gate.inner_states[0].residual[0].dtype == torch.float32


def test_fp64_stays_fp64():
    value = 1.0 + 2.0**-40
    assert unscaled([torch.tensor([2 * value], dtype=torch.float64)], 2.0)[0].item() == value


def test_result_that_fp16_cannot_hold_is_not_lost():
    grads = [torch.tensor([6e-8, 1.0], dtype=torch.float16)]
    tx = gx.chain(gx.unscale(), gx.topk(1.0), gx.ef())
    out, _ = tx.update(grads, tx.init(grads), loss_scale=65536.0)
    assert (grads[0] / 65536.0).tolist() == [0.0, 0.0000152587890625]
    assert out[0].values.tolist() == [grads[0][0].item() / 65536.0, 2.0**-16]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@given(
    st.lists(st.floats(2.0**-6, 1.0, width=16), min_size=1, max_size=8),
    st.integers(-8, 8),
)
def test_power_of_two_scale_leaves_no_trace(dtype, values, exponent):
    true = torch.tensor(values, dtype=dtype)
    tx = gx.chain(gx.unscale(), gx.topk(1.0), gx.ef())
    grads = [true * 2.0**exponent]
    out, _ = tx.update(grads, tx.init(grads), loss_scale=2.0**exponent)
    assert torch.equal(out[0].values, true.to(out[0].values.dtype))


def test_inputs_are_not_written_into():
    grads, scale = torch.tensor([2.0]), torch.tensor(2.0)
    unscaled([grads], scale)
    assert (grads.item(), scale.item()) == (2.0, 2.0)


@pytest.mark.parametrize(
    "leaf",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(12.0)[::3],
        torch.ones(1).expand(4),
        torch.arange(16.0).reshape(1, 2, 2, 4).to(memory_format=torch.channels_last),
    ],
    ids=["transposed", "strided", "expanded", "channels last"],
)
def test_leaf_that_is_not_contiguous_is_divided(leaf):
    assert torch.equal(unscaled([leaf], 2.0)[0], leaf / 2)


def test_scale_that_is_missing_is_refused():
    text = (
        "unscale() needs the loss scale: tx.update(grads, state, loss_scale=...), "
        "or Pipeline(tx, model, scaler=scaler)"
    )
    with refused(ValueError, text):
        unscaled([torch.ones(1)])


def test_scale_that_is_missing_in_a_chain_is_refused():
    tx = gx.chain(gx.unscale(), gx.allreduce())
    with pytest.raises(ValueError, match=r"^unscale\(\) needs the loss scale"):
        tx.update([torch.ones(1)], tx.init([torch.ones(1)]))


@pytest.mark.parametrize("scale", [0, 0.0, -0.0, -1, -2.0, NAN, INF, -INF])
def test_scale_that_is_not_positive_and_finite_is_refused(scale):
    with refused(ValueError, f"loss_scale is {scale!r}: expected a positive, finite number"):
        unscaled([torch.ones(1)], scale)


@pytest.mark.parametrize("scale", [True, "2", [2.0], 2j], ids=repr)
def test_scale_that_is_no_number_is_refused(scale):
    with refused(TypeError, f"loss_scale is {scale!r}: expected a number or a 0-d array"):
        unscaled([torch.ones(1)], scale)


def test_whole_number_too_large_for_a_float_is_refused():
    with pytest.raises(ValueError, match="expected a positive, finite number"):
        unscaled([torch.ones(1)], 10**400)


@pytest.mark.parametrize("shape", [(1,), (2,), (1, 1), (0,)])
def test_scale_that_is_not_0d_is_refused(shape):
    with refused(ValueError, f"loss_scale has shape {shape}: expected a 0-d array"):
        unscaled([torch.ones(1)], torch.ones(shape))


@pytest.mark.parametrize("value", [0.0, NAN])
def test_scale_given_as_an_array_that_cannot_divide_is_a_bad_step(value):
    tx = gx.chain(gx.unscale(), gx.topk(0.5), gx.ef(), gx.allreduce())
    grads = [torch.tensor([1.0, 2.0])]
    out, state = tx.update(grads, tx.init(grads), loss_scale=torch.tensor(value))
    assert out[0].tolist() == [0.0, 0.0]
    assert not state.last_finite


@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_bad_values_stay_bad(value):
    assert not unscaled([torch.tensor([value])], 2.0)[0].isfinite().any()


def test_overflow_in_fp32_is_a_bad_step():
    tx = gx.chain(gx.unscale(), gx.allreduce())
    grads = [torch.tensor([3e38])]
    out, state = tx.update(grads, tx.init(grads), loss_scale=0.5)
    assert out[0].tolist() == [0.0]
    assert not state.last_finite


def test_compressed_leaf_is_refused():
    compress = gx.topk(0.5, feedback=False)
    grads = [torch.ones(4)]
    payloads, _ = compress.update(grads, compress.init(grads))
    text = (
        "unscale() takes dense gradients only, got Sparse(shape=(4,), dtype='float32'): "
        "put it first"
    )
    with refused(TypeError, text):
        unscaled(payloads, 2.0)


def test_compressed_leaf_in_an_unchecked_chain_is_refused():
    tx = gx.chain(gx.sign(), gx.unscale(), check=False)
    with pytest.raises(TypeError, match=r"^unscale\(\) takes dense gradients only, got Signs"):
        tx.update([torch.ones(4)], tx.init([torch.ones(4)]), loss_scale=2.0)


def test_it_has_no_state():
    assert gx.unscale().init({"w": torch.ones(2)}) == ()


def test_an_infinite_scale_given_as_an_array_is_a_bad_step():
    tx = gx.chain(gx.unscale())
    state = tx.init([torch.zeros(2)])
    _, state = tx.update([torch.ones(2)], state, loss_scale=torch.tensor(float("inf")))
    assert not state.last_finite
