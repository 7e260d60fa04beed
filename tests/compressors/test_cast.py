"""`cast`, and `topk` whose values are cast."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradtx as gx
from compressing import (
    FEW_LENGTHS,
    INF,
    LEAVES,
    MODERATE,
    NAN,
    check_not_finite_is_seen,
    check_nothing_is_lost,
    check_shapes_and_dtypes,
    decoded,
    encoded,
    normal,
    on_jax,
    payload_nbytes,
    same_under_jax,
    share_lost,
)
from gradtx.compressors.cast import cast
from gradtx.core.cast import FORMATS, Cast, encode_cast, encode_casts
from gradtx.testing import check_laws, run_ranks

# Half a unit in the last place of one; and half the smallest number, beside the least that the
# largest magnitude of a block is scaled to.
ROUNDING = {"float16": 2**-11, "bfloat16": 2**-8, "float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3}
UNDERFLOW = {
    "float16": 2.0**-25 / 2,
    "bfloat16": 0.0,
    "float8_e4m3fn": 2.0**-10 / 2,
    "float8_e5m2": 2.0**-17 / 2,
}
every = pytest.mark.parametrize("dtype", FORMATS)


@every
@given(LEAVES)
def test_is_a_contraction(dtype, values):
    error, total = share_lost(cast(dtype), values)
    assert error <= (ROUNDING[dtype] ** 2 + 300 * UNDERFLOW[dtype] ** 2) * total


@every
def test_bound_is_reached_but_for_the_second_order(dtype):
    u = ROUNDING[dtype]
    error, total = share_lost(cast(dtype), np.full(8, 1 + u, np.float32))
    assert error / total == pytest.approx((u / (1 + u)) ** 2, rel=1e-6)


@every
@given(LEAVES)
def test_decoded_values_encode_to_themselves(dtype, values):
    once = decoded(cast(dtype), torch.from_numpy(values))
    np.testing.assert_array_equal(decoded(cast(dtype), torch.from_numpy(once)), once)


@every
@given(MODERATE, st.integers(-20, 20))
def test_powers_of_two_pass_through(dtype, values, power):
    scaled = values * np.float32(2.0**power)
    one, other = (encoded(cast(dtype), torch.from_numpy(x)) for x in (values, scaled))
    assert torch.equal(one.codes, other.codes)
    assert torch.equal(one.decode() * 2.0**power, other.decode())


@every
@given(FEW_LENGTHS)
def test_jax_gives_the_same_bits(dtype, values):
    # XLA flushes subnormals on the CPU, and what is 2**-100 of the largest may be scaled to one.
    values = np.where(np.abs(values) < np.abs(values).max() * 2.0**-100, 0.0, values)
    assert same_under_jax(cast(dtype), values.astype(np.float32))


@every
def test_shapes_and_dtypes(dtype):
    check_shapes_and_dtypes(cast(dtype))


@every
def test_infinities_and_nans_are_seen_and_stay_where_they_are(dtype):
    check_not_finite_is_seen(cast(dtype))
    leaf = normal(600)
    leaf[[3, 4]] = torch.tensor([INF, NAN])
    assert np.flatnonzero(~np.isfinite(decoded(cast(dtype), leaf))).tolist() == [3, 4]


@every
def test_a_gate_sees_what_saturation_could_hide(dtype):
    tx = gx.chain(gx.unscale(), cast(dtype), gx.ef(), gx.allreduce(algorithm="gather"))
    good, bad = {"w": normal(300)}, {"w": normal(300)}
    bad["w"][7] = INF

    def rank(i):
        state = tx.init(good)
        return tx.update(bad if i else good, state, loss_scale=1.0)[0]["w"]

    for updates in run_ranks(2, rank):
        assert torch.equal(updates, torch.zeros(300))


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("float16", 16.01), ("bfloat16", 16.01), ("float8_e4m3fn", 8.3), ("float8_e5m2", 8.3)],
)
def test_bits_a_value(dtype, bits):
    for n in (4096, 100_001):
        assert 8 * payload_nbytes(encoded(cast(dtype), normal(n))) / n <= bits


@every
def test_never_larger_than_the_values_and_one_scale_a_block(dtype):
    for n in (0, 1, 10, 255, 257):
        payload = encoded(cast(dtype), normal(n))
        size, block = (2, n) if FORMATS[dtype].block is None else (1, 256)
        assert payload_nbytes(payload) == n * size + 2 * (-(-n // block) if n else 0)


@every
@pytest.mark.parametrize("power", [-120, -60, -24, 0, 60, 126])
def test_neither_overflow_nor_underflow_decides(dtype, power):
    values = (np.linspace(1, 1.9, 50) * 2.0**power).astype(np.float32)
    error, total = share_lost(cast(dtype), values)
    assert error <= ROUNDING[dtype] ** 2 * total


def test_large_on_one_rank_and_zero_on_the_other_has_a_finite_mean():
    tx = gx.chain(cast("float16"), gx.ef(), gx.allreduce(algorithm="gather"))
    leaves = [torch.full((8,), 1e5), torch.zeros(8)]

    def rank(i):
        return tx.update([leaves[i]], tx.init([leaves[i]]))[0][0]

    for mean in run_ranks(2, rank):
        torch.testing.assert_close(mean, torch.full((8,), 5e4), rtol=2**-11, atol=0)


def test_sums_are_not_made_in_16_bits():
    tx = gx.chain(cast("float16"), gx.ef(), gx.allreduce(op="sum", algorithm="gather"))
    leaf = torch.full((8,), 40000.0)
    for total in run_ranks(2, lambda rank: tx.update([leaf], tx.init([leaf]))[0][0]):
        assert torch.equal(total, torch.full((8,), 80000.0))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_a_block_far_below_the_others_keeps_its_precision(dtype):
    leaf = torch.cat([normal(256), 1e-20 * normal(256, seed=1)])
    error, total = share_lost(cast(dtype), leaf[256:].numpy())
    assert decoded(cast(dtype), leaf)[256:] == pytest.approx(decoded(cast(dtype), leaf[256:]))
    assert error <= ROUNDING[dtype] ** 2 * total


def test_fp64_leaves_reach_beyond_the_range_of_fp32():
    leaf = torch.tensor([1e300, -1e299, 1e290], dtype=torch.float64)
    for dtype in FORMATS:
        flat = encoded(cast(dtype), leaf).decode()
        torch.testing.assert_close(flat[:2], leaf[:2], rtol=ROUNDING[dtype], atol=0)


def test_eight_bits_travel_as_bytes():
    assert encoded(cast("float8_e5m2"), normal(10)).codes.dtype == torch.uint8
    assert encoded(cast("float8_e5m2"), on_jax(normal(10).numpy())).codes.dtype == np.uint8


@every
def test_compresses_the_values_of_topk(dtype):
    leaf = normal(300)
    tx = gx.chain(gx.topk(0.1), cast(dtype), gx.ef())
    payload = encoded(tx, leaf)
    kept = gx.topk(0.1).update([leaf], ())[0][0]
    assert torch.equal(payload.indices, kept.indices)
    expected = decoded(cast(dtype), kept.values)
    np.testing.assert_array_equal(payload.decode()[kept.indices].numpy(), expected)


@every
def test_keeps_the_laws(dtype):
    check_nothing_is_lost(cast(dtype))
    check_laws(gx.chain(gx.unscale(), cast(dtype), gx.ef(), gx.allreduce()))


def test_biased_without_feedback_is_refused():
    with pytest.raises(gx.ChainOrderError, match="GX302"):
        gx.chain(cast("float16"), gx.allreduce())
    gx.chain(cast("float16", feedback=False), gx.allreduce())


@pytest.mark.parametrize("dtype", ["float32", "fp16", torch.float16, None, 16])
def test_refuses_other_dtypes(dtype):
    with pytest.raises(ValueError, match=r"expected one of 'float16', 'bfloat16', 'float8_e4m3fn'"):
        cast(dtype)


@pytest.mark.parametrize("scope", ["leaf", "global"])
@pytest.mark.parametrize("values", ["float16", "bfloat16"])
def test_topk_sends_its_values_in_16_bits(values, scope):
    leaf = 1e-9 * normal(10_000)
    short, long = (gx.topk(0.01, scope=scope, values=v) for v in (values, "float32"))
    one, other = decoded(short, leaf), decoded(long, leaf)
    np.testing.assert_allclose(one, other, rtol=ROUNDING[values])
    assert 8 * payload_nbytes(encoded(short, leaf)) / 100 <= 25.0
    assert same_under_jax(short, leaf.numpy())


def test_topk_with_16_bits_at_most_24_7_bits_a_value_sent():
    leaf = normal(200_000)
    payload = encoded(gx.topk(0.01, values="float16"), leaf)
    assert 8 * payload_nbytes(payload) / 2000 <= 24.7


def test_topk_with_16_bits_keeps_the_laws():
    check_nothing_is_lost(gx.topk(0.1, values="float16"))
    check_laws(gx.chain(gx.unscale(), gx.topk(0.1, values="bfloat16"), gx.ef(), gx.allreduce()))


def test_topk_prints_its_dtype_and_leaves_nothing_to_compress():
    assert repr(gx.topk(0.01, values="float16")) == "gx.topk(0.01, values='float16')"
    assert repr(gx.topk(0.01, values="float32")) == "gx.topk(0.01)"
    with pytest.raises(gx.ChainOrderError, match="GX301"):
        gx.chain(gx.topk(0.01, values="float16"), gx.sign(), gx.ef())


@pytest.mark.parametrize("values", ["float64", "float8_e5m2", None])
def test_topk_refuses_other_dtypes(values):
    with pytest.raises(ValueError, match=r"expected 'float32', 'float16', 'bfloat16'"):
        gx.topk(0.01, values=values)


@every
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_leaves_cast_together_are_as_each_alone(dtype, wide):
    values = [
        normal(n, seed=seed).to(wide) for seed, n in enumerate([40, 40, 7, 0, 0, 40, 300, 300])
    ]
    values[1][3], values[5][:] = INF, 0.0
    values[6] *= 1e-30
    shapes = [(n.numel(),) for n in values]
    found = encode_casts(values, shapes, dtype)
    for flat, shape, payload in zip(values, shapes, found, strict=True):
        alone = encode_cast(flat, shape, dtype)
        assert (payload.shape, payload.dtype) == (alone.shape, alone.dtype)
        assert torch.equal(payload.codes.view(torch.uint8), alone.codes.view(torch.uint8))
        assert torch.equal(payload.exponents, alone.exponents)
    for payload, flat in zip(found, Cast.decode_all(found), strict=True):
        torch.testing.assert_close(flat, payload.decode(), rtol=0, atol=0, equal_nan=True)


@every
def test_what_is_left_is_the_difference(dtype):
    values = normal(300)
    payload = encode_cast(values, (300,), dtype)
    expected = values - payload.decode()
    assert torch.equal(payload.subtracted_from(values.clone()), expected)
