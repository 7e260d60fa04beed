"""`ternary`: five values a byte, right on average."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradtx as gx
from compressing import (
    FEW_LENGTHS,
    MODERATE,
    check_draws,
    check_not_finite_is_seen,
    check_shapes_and_dtypes,
    decoded,
    draws,
    encoded,
    normal,
    on_jax,
    payload_nbytes,
    same_under_jax,
    tolerated_bias,
)
from gradtx.compressors.quantize import quantize
from gradtx.compressors.ternary import ternary
from gradtx.testing import check_laws, run_ranks

VALUES = [0.0, 1e-3, -0.01, 0.2, -0.25, 0.5, -0.77, 2.0, 0.9, -2.0]


@given(MODERATE)
def test_gives_signs_times_the_largest_magnitude(values):
    flat = decoded(ternary(), torch.from_numpy(values))
    scale = np.abs(values).max()
    assert set(np.unique(np.abs(flat))) <= {0, scale}
    assert (flat[flat != 0] * values[flat != 0] > 0).all()
    assert (flat[np.abs(values) == scale] == values[np.abs(values) == scale]).all()


def test_is_right_on_average():
    """False alarms: one in a million, by Hoeffding's bound over all values."""
    samples = draws(ternary(), VALUES, 30_000)
    bias = (samples.mean(0) - torch.tensor(VALUES)).abs().max()
    assert bias <= tolerated_bias(2.0, 30_000, len(VALUES))


def test_variance_is_that_of_the_paper():
    samples = draws(ternary(), VALUES, 30_000)
    size = torch.tensor(VALUES).abs()
    expected = (size * (2.0 - size)).double()
    torch.testing.assert_close(samples.var(0), expected, rtol=0.05, atol=0.005)


@pytest.mark.parametrize("clip", [None, 1, 2.5, 10.0])
@pytest.mark.parametrize("value", [5.0, -1e-30, 3e38])
def test_one_element_is_exact(clip, value):
    assert decoded(ternary(clip=clip), torch.tensor([value])).tolist() == [np.float32(value)]


def test_a_constant_leaf_is_exact_with_clipping():
    np.testing.assert_allclose(decoded(ternary(clip=2.5), torch.full((100,), 0.3)), 0.3, rtol=1e-6)


def test_does_not_clip_unless_asked():
    leaf = torch.cat([torch.tensor([5.0]), torch.zeros(99)])
    assert decoded(ternary(), leaf)[0] == 5.0
    assert decoded(ternary(clip=2.5), leaf)[0] == pytest.approx(2.5 * 0.5)


@given(MODERATE, st.integers(-20, 20), st.sampled_from([None, 2.5]))
def test_powers_of_two_pass_through(values, power, clip):
    scaled = values * np.float32(2.0**power)
    one, other = (encoded(ternary(clip=clip), torch.from_numpy(x)) for x in (values, scaled))
    assert torch.equal(one.codes, other.codes)
    assert torch.equal(one.decode() * 2.0**power, other.decode())


@given(FEW_LENGTHS)
def test_jax_gives_the_same_bits(values):
    assert same_under_jax(ternary(), values)


def test_jax_clips_to_two_units_in_the_last_place():
    leaf = normal(1001)
    mine = encoded(ternary(clip=2.5), leaf)
    theirs = encoded(ternary(clip=2.5), on_jax(leaf.numpy()))
    np.testing.assert_array_max_ulp(mine.norms.numpy(), np.asarray(theirs.norms), 2)


def test_shapes_and_dtypes():
    check_shapes_and_dtypes(ternary())
    check_shapes_and_dtypes(ternary(clip=2.5))


def test_infinities_and_nans_are_seen():
    check_not_finite_is_seen(ternary())
    check_not_finite_is_seen(ternary(clip=2.5))


def test_bits_a_value():
    for n in (4096, 100_001):
        assert 8 * payload_nbytes(encoded(ternary(), normal(n))) / n <= 1.65
    for n in range(8):
        assert payload_nbytes(encoded(ternary(), normal(n))) == -(-n // 5) + 4 * (n > 0)


def test_draws():
    check_draws(lambda seed: ternary(seed=seed))


def test_does_not_draw_as_another_compressor_with_its_seed_does():
    leaf = normal(500)
    assert not np.array_equal(decoded(ternary(), leaf), decoded(quantize(2, block=500), leaf))


def test_takes_no_feedback():
    gx.chain(gx.unscale(), ternary(), gx.allreduce())
    with pytest.raises(gx.ChainOrderError, match="GX306"):
        gx.chain(ternary(), gx.ef(), gx.allreduce())


def test_clipping_is_biased_and_says_so():
    with pytest.raises(gx.ChainOrderError, match="GX302"):
        gx.chain(ternary(clip=2.5), gx.allreduce())
    gx.chain(ternary(clip=2.5, feedback=False), gx.allreduce())


def test_error_may_be_larger_than_what_was_sent():
    leaf = torch.cat([torch.ones(1), torch.full((999,), 0.01)])
    assert np.square(decoded(ternary(), leaf) - leaf.numpy()).sum() > 2 * leaf.square().sum()


def test_keeps_the_laws():
    check_laws(gx.chain(gx.unscale(), ternary(), gx.allreduce()))


def test_mean_over_ranks_and_steps_tends_to_the_gradient():
    """L2 by hand; false alarms: one in a million, by Hoeffding's bound over all values."""
    leaves, steps = [torch.tensor(VALUES), torch.tensor(VALUES).flip(0) / 2], 200
    tx = gx.chain(ternary(), gx.allreduce(algorithm="gather"))

    def rank(i):
        state, total = tx.init([leaves[i]]), torch.zeros(len(VALUES), dtype=torch.float64)
        for _ in range(steps):
            updates, state = tx.update([leaves[i]], state)
            total += updates[0].double()
        return total / steps

    one, other = run_ranks(2, rank)
    assert torch.equal(one, other)
    bias = (one - (leaves[0] + leaves[1]) / 2).abs().max()
    assert bias <= tolerated_bias(1.5, steps, len(VALUES))


def test_compresses_the_values_of_topk():
    leaf = normal(300)
    payload = encoded(gx.chain(gx.topk(0.1, feedback=False), ternary()), leaf)
    kept = gx.topk(0.1).update([leaf], ())[0][0]
    assert torch.equal(payload.indices, kept.indices)
    assert set(payload.decode().abs().unique().tolist()) == {0.0, float(leaf.abs().max())}


def test_prints_what_makes_it():
    assert repr(ternary()) == "gx.ternary()"
    assert repr(ternary(clip=2.5, seed=1)) == "gx.ternary(clip=2.5, seed=1)"


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"clip": 0}, ValueError, r"ternary\(clip=0\): expected a finite number over 0, or None"),
        ({"clip": math.inf}, ValueError, r"ternary\(clip=inf\): expected a finite number over 0"),
        ({"clip": True}, TypeError, r"ternary\(clip=True\): expected a number over 0"),
        ({"clip": "2"}, TypeError, r"ternary\(clip='2'\): expected a number over 0"),
        ({"seed": 0.5}, TypeError, r"ternary\(seed=0.5\): expected a whole number"),
    ],
)
def test_refuses_other_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        ternary(**arguments)
