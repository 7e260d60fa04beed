"""`natural`: powers of two, right on average."""

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
    payload_nbytes,
    same_under_jax,
    share_lost,
    tolerated_bias,
)
from gradtx.compressors.natural import natural
from gradtx.testing import check_laws

VALUES = [1.0, 1.25, -1.5, 1.75, 1.999, -1.001, 1.1, 1.9]


@given(LEAVES)
def test_gives_one_of_the_powers_of_two_around(values):
    flat = decoded(natural(), torch.from_numpy(values)).astype(np.float64)
    size = np.abs(values.astype(np.float64))
    some = size > 0
    assert (flat[~some] == 0).all()
    lower = np.exp2(np.floor(np.log2(size[some])))
    assert (np.sign(flat) == np.sign(values)).all()
    assert ((np.abs(flat[some]) == lower) | (np.abs(flat[some]) == 2 * lower)).all()


@pytest.mark.parametrize("scale", [1.0, 2.0**-126, 2.0**126])
def test_is_right_on_average(scale):
    """False alarms: one in a million, by Hoeffding's bound over all values."""
    samples = draws(natural(), [scale * value for value in VALUES], 30_000) / scale
    bias = (samples.mean(0) - torch.tensor(VALUES)).abs().max()
    assert bias <= tolerated_bias(1.0, 30_000, len(VALUES))


def test_denormal_numbers_are_right_on_average_too():
    tiny = 2.0**-126
    samples = draws(natural(), [0.3 * tiny, -0.9 * tiny], 30_000) / tiny
    assert set(samples.abs().unique().tolist()) == {0.0, 1.0}
    bias = (samples.mean(0) - torch.tensor([0.3, -0.9])).abs().max()
    assert bias <= tolerated_bias(1.0, 30_000, 2)


def test_variance_is_at_most_an_eighth_and_reaches_it():
    samples = draws(natural(), VALUES, 30_000)
    size = torch.tensor(VALUES, dtype=torch.float64).abs()
    expected = (size - 1) * (2 - size)
    torch.testing.assert_close(samples.var(0), expected, rtol=0.05, atol=0.001)
    assert float((expected / size**2).max()) < 1 / 8
    error, total = share_lost(natural(), np.full(100_000, 4 / 3, np.float32))
    assert error / total == pytest.approx(1 / 8, rel=0.02)
    error, total = share_lost(natural(), normal(100_000).numpy())
    assert error < total / 8


@given(LEAVES)
def test_decoded_values_encode_to_themselves(values):
    once = decoded(natural(), torch.from_numpy(values))
    np.testing.assert_array_equal(decoded(natural(seed=1), torch.from_numpy(once)), once)


@given(MODERATE, st.integers(-20, 20))
def test_powers_of_two_pass_through(values, power):
    scaled = values * np.float32(2.0**power)
    one, other = (encoded(natural(), torch.from_numpy(x)) for x in (values, scaled))
    assert torch.equal(one.exponents + power, other.exponents)
    assert torch.equal(one.signs, other.signs)


@given(FEW_LENGTHS)
def test_jax_gives_the_same_bits(values):
    assert same_under_jax(natural(), values)


def test_shapes_and_dtypes():
    check_shapes_and_dtypes(natural())


def test_infinities_stay_where_they_are_and_nans_become_some():
    check_not_finite_is_seen(natural())
    leaf = torch.tensor([1.0, math.inf, -math.inf, math.nan, 0.0])
    assert decoded(natural(), leaf).tolist() == [1.0, math.inf, -math.inf, math.inf, 0.0]


def test_the_largest_numbers_stay_finite():
    leaf = torch.full((100,), torch.finfo(torch.float32).max)
    assert (decoded(natural(), leaf) == 2.0**127).all()


def test_fp64_leaves_keep_their_range():
    leaf = torch.tensor([2.0**1000, -(2.0**-1000), 1e-310], dtype=torch.float64)
    payload = encoded(natural(), leaf)
    assert payload.decode()[:2].tolist() == [2.0**1000, -(2.0**-1000)]
    many = torch.full((30_000,), 1.3, dtype=torch.float64)
    mean = float(encoded(natural(), many).decode().mean())
    assert abs(mean - 1.3) <= tolerated_bias(1.0, 30_000, 1)


def test_bits_a_value():
    for n in (4096, 100_001):
        assert 8 * payload_nbytes(encoded(natural(), normal(n))) / n <= 9.05
    for n in (0, 1, 8, 9):
        assert payload_nbytes(encoded(natural(), normal(n))) == n + -(-n // 8)


def test_draws():
    check_draws(lambda seed: natural(seed=seed))


def test_keeps_the_laws():
    check_nothing_is_lost(natural())
    check_laws(gx.chain(gx.unscale(), natural(), gx.ef(), gx.allreduce()))
    check_laws(gx.chain(gx.unscale(), natural(), gx.allreduce()))


def test_compresses_the_values_of_topk():
    leaf = normal(300)
    payload = encoded(gx.chain(gx.topk(0.1), natural(), gx.ef()), leaf)
    kept = gx.topk(0.1).update([leaf], ())[0][0]
    assert torch.equal(payload.indices, kept.indices)
    share = payload.decode()[kept.indices] / kept.values
    assert ((share > 0.5) & (share <= 2)).all()


def test_prints_what_makes_it():
    assert repr(natural()) == "gx.natural()"
    assert repr(natural(seed=3)) == "gx.natural(seed=3)"


def test_refuses_other_seeds():
    with pytest.raises(TypeError, match=r"natural\(seed='a'\): expected a whole number"):
        natural(seed="a")
