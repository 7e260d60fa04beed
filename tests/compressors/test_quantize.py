"""`quantize`: levels, their packing, and when feedback may stand over them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradtx as gx
from compressing import (
    FEW_LENGTHS,
    LEAVES,
    MODERATE,
    check_draws,
    check_not_finite_is_seen,
    check_nothing_is_lost,
    check_shapes_and_dtypes,
    decoded,
    draws,
    encoded,
    normal,
    on_jax,
    payload_nbytes,
    same_under_jax,
    share_lost,
    tolerated_bias,
)
from gradtx.compressors.levels import PER_BYTE, pack, unpack
from gradtx.compressors.quantize import BITS, NORMS, error_bound, quantize
from gradtx.testing import check_laws

bits_ = pytest.mark.parametrize("bits", BITS)
norm_ = pytest.mark.parametrize("norm", NORMS)
STEPS = {1: 0.5, 2: 1, 4: 7, 8: 127}


@pytest.mark.parametrize("base", PER_BYTE)
@pytest.mark.parametrize("n", [0, 1, 2, 5, 7, 8, 9, 1001])
def test_digits_are_packed_as_many_to_a_byte_as_fit(base, n):
    digits = np.random.default_rng(n).integers(0, base, n).astype(np.uint8)
    packed = pack(torch.from_numpy(digits), base)
    assert packed.dtype == torch.uint8
    assert len(packed) == -(-n // PER_BYTE[base])
    assert base ** PER_BYTE[base] <= 256 < base ** (PER_BYTE[base] + 1)
    np.testing.assert_array_equal(unpack(packed, n, base), digits)
    np.testing.assert_array_equal(pack(on_jax(digits), base), packed)
    np.testing.assert_array_equal(unpack(on_jax(packed.numpy()), n, base), digits)


@pytest.mark.parametrize("base", PER_BYTE)
def test_any_byte_unpacks_to_digits(base):
    data = torch.arange(256).to(torch.uint8)
    assert int(unpack(data, 256 * PER_BYTE[base], base).max()) < base


@bits_
@norm_
@given(LEAVES, st.sampled_from([1, 3, 16, 150, 256]))
def test_to_nearest_keeps_its_bound(bits, norm, values, block):
    tx = quantize(bits, block=block, norm=norm, stochastic=False, feedback=False)
    error, total = share_lost(tx, values)
    assert error <= error_bound(bits, block, norm, stochastic=False) * total * (1 + 1e-5)


def worst(bits, block, norm, *, stochastic):
    """The block that `error_bound` is about."""
    step = 1 / STEPS[bits]
    if norm == "l2":
        share = min(step / 2, 1 / math.sqrt(block))
        rest = math.sqrt(max(1 - block * share**2, 0))
        return [share] * block + ([rest] if rest > 1e-6 else [])
    if not stochastic:
        return [1.0] + [step / 2 * 0.9999] * (block - 1)
    others = block - 1
    return [1.0] + [(math.sqrt(1 + others * step**2) - 1) / (others * step)] * others


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("stochastic", [True, False])
def test_the_worst_block_reaches_the_bound(bits, stochastic):
    values = torch.tensor(worst(bits, 64, "max", stochastic=stochastic))
    tx = quantize(bits, block=64, stochastic=stochastic, feedback=False)
    error, total = share_lost(tx, values.repeat(4000).numpy())
    bound = error_bound(bits, 64, "max", stochastic=stochastic)
    assert error / total == pytest.approx(bound, rel=0.02)


@pytest.mark.parametrize(("bits", "block"), [(2, 64), (4, 150), (4, 300)])
def test_the_worst_block_under_the_euclidean_norm_reaches_the_bound(bits, block):
    values = worst(bits, block, "l2", stochastic=True)
    rows = torch.tensor(values).repeat(2000)
    tx = quantize(bits, block=len(values), norm="l2")
    error, total = share_lost(tx, rows.numpy())
    assert error / total == pytest.approx(error_bound(bits, block, "l2", stochastic=True), rel=0.03)


VALUES = [
    0.0,
    1e-3,
    -0.01,
    0.2,
    -0.25,
    0.5,
    -0.77,
    1.0,
    0.9,
    -1.0,
    0.33,
    1 / 7,
    1 / 127,
    0.6,
    -1e-5,
]


@bits_
@norm_
def test_is_right_on_average(bits, norm):
    """False alarms: one in a million, by Hoeffding's bound over all values."""
    copies = 20_000
    samples = draws(quantize(bits, block=len(VALUES), norm=norm), VALUES, copies)
    values = torch.tensor(VALUES, dtype=torch.float64)
    size = values.abs().max() if norm == "max" else values.norm()
    step = float(size) / STEPS[bits]
    bias = (samples.mean(0) - values).abs().max()
    assert bias <= tolerated_bias(step, copies, len(VALUES))


@bits_
def test_levels_are_exact_whatever_is_drawn(bits):
    steps = STEPS[bits]
    levels = torch.arange(-steps, steps + 1) / steps
    samples = draws(quantize(bits, block=len(levels)), levels.tolist(), 2000)
    torch.testing.assert_close(samples, levels.double().expand_as(samples), rtol=1e-6, atol=0)


def test_variance_falls_with_the_square_of_the_levels():
    leaf = normal(20_000)
    errors = [share_lost(quantize(bits), leaf.numpy())[0] for bits in (4, 8)]
    assert errors[0] / errors[1] == pytest.approx((127 / 7) ** 2, rel=0.05)


@bits_
@norm_
@pytest.mark.parametrize("stochastic", [True, False])
@given(MODERATE, st.integers(-20, 20))
def test_powers_of_two_pass_through(bits, norm, stochastic, values, power):
    tx = quantize(bits, block=64, norm=norm, stochastic=stochastic)
    scaled = values * np.float32(2.0**power)
    one, other = (encoded(tx, torch.from_numpy(x)) for x in (values, scaled))
    assert torch.equal(one.codes, other.codes)
    assert torch.equal(one.decode() * 2.0**power, other.decode())


@bits_
@given(values=LEAVES)
def test_decoded_values_encode_to_themselves(bits, values):
    tx = quantize(bits, block=64, stochastic=False)
    once = decoded(tx, torch.from_numpy(values))
    np.testing.assert_array_equal(decoded(tx, torch.from_numpy(once)), once)


@bits_
@pytest.mark.parametrize("stochastic", [True, False])
@given(values=FEW_LENGTHS)
def test_jax_gives_the_same_bits(bits, stochastic, values):
    assert same_under_jax(quantize(bits, stochastic=stochastic), values)


@bits_
def test_jax_gives_the_euclidean_norm_to_two_units_in_the_last_place(bits):
    leaf = normal(1001)
    tx = quantize(bits, norm="l2")
    mine, theirs = encoded(tx, leaf), encoded(tx, on_jax(leaf.numpy()))
    np.testing.assert_array_max_ulp(mine.norms.numpy(), np.asarray(theirs.norms), 2)
    assert np.mean(mine.codes.numpy() != np.asarray(theirs.codes)) < 0.01


@norm_
def test_shapes_and_dtypes(norm):
    for bits in (2, 4, 8):
        check_shapes_and_dtypes(quantize(bits, norm=norm))
    check_shapes_and_dtypes(quantize(1, norm=norm, block=3))


@bits_
@norm_
@pytest.mark.parametrize("stochastic", [True, False])
def test_infinities_and_nans_are_seen(bits, norm, stochastic):
    tx = quantize(bits, norm=norm, stochastic=stochastic)
    check_not_finite_is_seen(tx)
    leaf = normal(600)
    leaf[3] = math.nan
    assert np.isfinite(decoded(tx, leaf)[256:]).all()


@norm_
def test_squares_do_not_overflow(norm):
    for size in (1e25, 1e-30):
        leaf = size * normal(512)
        error, total = share_lost(quantize(8, norm=norm), leaf.numpy())
        assert error < 0.01 * total


@norm_
def test_what_fills_the_last_block_does_not_count(norm):
    leaf = normal(300)
    whole, tail = encoded(quantize(8, norm=norm), leaf), encoded(quantize(8, norm=norm), leaf[256:])
    assert torch.equal(whole.norms[1:], tail.norms)


@bits_
@pytest.mark.parametrize("block", [64, 256, 512])
def test_bits_a_value(bits, block):
    for n in (4096, 100_001):
        payload = encoded(quantize(bits, block=block), normal(n))
        assert 8 * payload_nbytes(payload) / n <= bits + 32 / block + 0.01


@bits_
def test_draws(bits):
    check_draws(lambda seed: quantize(bits, seed=seed))


@pytest.mark.parametrize(
    ("bits", "norm", "stochastic", "largest"),
    [
        (8, "max", True, 129_032),
        (4, "max", True, 392),
        (2, "max", True, 8),
        (1, "max", True, 1),
        (8, "l2", True, 64_515),
        (4, "l2", True, 195),
        (2, "l2", True, 3),
        (8, "l2", False, 64_515),
        (4, "l2", False, 195),
        (1, "max", False, 1),
    ],
)
def test_feedback_is_for_contractions(bits, norm, stochastic, largest):
    options = {"norm": norm, "stochastic": stochastic}
    gx.chain(quantize(bits, block=largest, **options), gx.ef(), gx.allreduce())
    with pytest.raises(gx.ChainOrderError, match="GX306"):
        gx.chain(quantize(bits, block=largest + 1, **options), gx.ef(), gx.allreduce())


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_largest_magnitude_to_nearest_is_always_a_contraction(bits):
    assert quantize(bits, block=2**20, stochastic=False).stage.contraction


def test_to_nearest_is_biased_and_needs_feedback():
    with pytest.raises(gx.ChainOrderError, match="GX302"):
        gx.chain(quantize(8, stochastic=False), gx.allreduce())
    gx.chain(quantize(8, stochastic=False, feedback=False), gx.allreduce())
    gx.chain(quantize(1), gx.allreduce())


@pytest.mark.parametrize(("bits", "stochastic"), [(4, True), (8, True), (2, False), (4, False)])
def test_keeps_the_laws(bits, stochastic):
    tx = quantize(bits, stochastic=stochastic)
    check_nothing_is_lost(tx)
    check_laws(gx.chain(gx.unscale(), tx, gx.ef(), gx.allreduce()))


@bits_
def test_keeps_the_laws_without_feedback(bits):
    check_laws(gx.chain(gx.unscale(), quantize(bits), gx.allreduce()))


def test_residual_of_one_bit_grows_without_bound():
    tx = gx.chain(quantize(1, block=64), gx.ef(), check=False)
    leaf, sizes = [normal(64)], []
    state = tx.init(leaf)
    for _ in range(12):
        updates, state = tx.update(leaf, state)
        sizes.append(float(updates[0].norms[0]))
    assert sizes[-1] > 100 * sizes[0]


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_compresses_the_values_of_topk(bits):
    leaf = normal(300)
    payload = encoded(gx.chain(gx.topk(0.1), quantize(bits, stochastic=False), gx.ef()), leaf)
    kept = gx.topk(0.1).update([leaf], ())[0][0]
    assert torch.equal(payload.indices, kept.indices)
    expected = decoded(quantize(bits, stochastic=False), kept.values)
    np.testing.assert_array_equal(payload.decode()[kept.indices].numpy(), expected)


def test_prints_what_makes_it():
    assert repr(quantize(4)) == "gx.quantize(4)"
    assert repr(quantize(2, block=64, stochastic=False, norm="l2", seed=7, feedback=False)) == (
        "gx.quantize(2, block=64, stochastic=False, norm='l2', seed=7, feedback=False)"
    )


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"bits": 3}, ValueError, r"quantize\(bits=3\): expected 1, 2, 4 or 8"),
        ({"bits": True}, ValueError, r"quantize\(bits=True\): expected 1, 2, 4 or 8"),
        ({"bits": 4, "block": 0}, ValueError, r"quantize\(block=0\): expected a whole number of 1"),
        ({"bits": 4, "block": 8.0}, TypeError, r"quantize\(block=8.0\): expected a whole number"),
        ({"bits": 4, "seed": -1}, ValueError, r"quantize\(seed=-1\): expected a whole number of 0"),
        ({"bits": 4, "norm": "l1"}, ValueError, r"quantize\(norm='l1'\): expected 'l2' or 'max'"),
    ],
)
def test_refuses_other_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        quantize(**arguments)
