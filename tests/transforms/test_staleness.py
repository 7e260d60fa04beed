"""Learning rates for late gradients: the limit of stability on a quadratic."""

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradtx as gx

DELAYS = range(6)
MOMENTA = [0.0, 0.3, 0.5, 0.9, 0.95]


def distance(lr, curvature, steps, momentum, count=200_000):
    """How far from the minimum a run ends that begins at 1: 0 or infinity, in the long run."""
    history = [1.0] * (steps + 1)
    velocity = 0.0
    for _ in range(count):
        velocity = momentum * velocity + curvature * history[0]
        history = [*history[1:], history[-1] - lr * velocity]
        if abs(history[-1]) > 1e6:
            return math.inf
    return max(map(abs, history))


def spectral_radius(lr, curvature, steps, momentum):
    """The largest magnitude of the roots of the characteristic polynomial, by numpy."""
    polynomial = np.zeros(steps + 3)
    polynomial[:3] = 1.0, -1.0 - momentum, momentum
    polynomial[1 + steps] += lr * curvature
    return np.abs(np.roots(polynomial)).max()


@pytest.mark.parametrize("momentum", MOMENTA)
@pytest.mark.parametrize("steps", DELAYS)
def test_just_inside_the_limit_it_converges_and_just_outside_it_does_not(steps, momentum):
    limit = gx.stable_learning_rate(3.0, steps=steps, momentum=momentum)
    assert distance(0.99 * limit, 3.0, steps, momentum) < 1e-3
    assert distance(1.01 * limit, 3.0, steps, momentum) == math.inf


@pytest.mark.parametrize("momentum", MOMENTA)
@pytest.mark.parametrize("steps", DELAYS)
def test_all_characteristic_roots_are_inside_the_circle_below_it_and_some_outside_above(
    steps, momentum
):
    limit = gx.stable_learning_rate(1.0, steps=steps, momentum=momentum)
    below = [spectral_radius(f * limit, 1.0, steps, momentum) for f in (1e-3, 0.1, 0.5, 0.9999)]
    above = [spectral_radius(f * limit, 1.0, steps, momentum) for f in (1.0001, 1.5, 4.0, 100.0)]
    assert max(below) < 1.0 < min(above)
    assert spectral_radius(limit, 1.0, steps, momentum) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize(("steps", "limit"), [(0, 2.0), (1, 1.0), (2, (math.sqrt(5) - 1) / 2)])
def test_limits_that_are_known(steps, limit):
    assert gx.stable_learning_rate(1.0, steps=steps) == pytest.approx(limit, rel=1e-15)


@given(steps=st.integers(0, 50), curvature=st.floats(1e-3, 1e3))
def test_without_momentum_it_is_the_formula_of_levin_and_may(steps, curvature):
    expected = 2 * math.sin(math.pi / (2 * (2 * steps + 1))) / curvature
    found = gx.stable_learning_rate(curvature, steps=steps)
    assert found == pytest.approx(expected, rel=1e-12)
    # The search for what momentum does ends at the same place.
    assert gx.stable_learning_rate(curvature, steps=steps, momentum=1e-12) == pytest.approx(
        expected, rel=1e-9
    )


@pytest.mark.parametrize("momentum", [0.1, 0.5, 0.9])
def test_limits_with_momentum_that_are_known(momentum):
    in_time = gx.stable_learning_rate(1.0, momentum=momentum)
    one_late = gx.stable_learning_rate(1.0, steps=1, momentum=momentum)
    assert in_time == pytest.approx(2 * (1 + momentum), rel=1e-12)
    assert one_late == pytest.approx(1 - momentum, rel=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_longer_the_delay_the_smaller_the_limit(momentum):
    limits = [gx.stable_learning_rate(1.0, steps=s, momentum=momentum) for s in (*range(9), 1000)]
    assert limits == sorted(limits, reverse=True)
    assert len(set(limits)) == len(limits)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("steps", DELAYS)
def test_delayed_learning_rate_is_as_far_from_the_limit_as_it_was(steps, momentum):
    in_time = gx.stable_learning_rate(2.0, momentum=momentum)
    late = gx.stable_learning_rate(2.0, steps=steps, momentum=momentum)
    found = gx.delayed_learning_rate(0.3 * in_time, steps, momentum=momentum)
    assert found == pytest.approx(0.3 * late, rel=1e-12)


def test_without_delay_the_learning_rate_stays():
    assert gx.delayed_learning_rate(0.1, 0, momentum=0.9) == 0.1


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: gx.stable_learning_rate(0.0),
            ValueError,
            "stable_learning_rate(curvature=0.0): expected a finite number over 0",
        ),
        (
            lambda: gx.stable_learning_rate("1"),
            TypeError,
            "stable_learning_rate(curvature='1'): expected a number over 0",
        ),
        (
            lambda: gx.stable_learning_rate(1.0, steps=-1),
            ValueError,
            "stable_learning_rate(steps=-1): expected a whole number of 0 or more",
        ),
        (
            lambda: gx.delayed_learning_rate(0.1, 1.0),
            TypeError,
            "delayed_learning_rate(steps=1.0): expected a whole number of 0 or more",
        ),
        (
            lambda: gx.delayed_learning_rate(-0.1, 1),
            ValueError,
            "delayed_learning_rate(lr=-0.1): expected a finite number over 0",
        ),
        (
            lambda: gx.stable_learning_rate(1.0, momentum=1.0),
            ValueError,
            "stable_learning_rate(momentum=1.0): expected at least 0 and less than 1",
        ),
        (
            lambda: gx.delayed_learning_rate(0.1, 1, momentum=True),
            TypeError,
            "delayed_learning_rate(momentum=True): expected a number",
        ),
        (
            lambda: gx.stable_learning_rate(1.0, momentum=math.nan),
            ValueError,
            "stable_learning_rate(momentum=nan): expected at least 0 and less than 1",
        ),
    ],
)
def test_wrong_argument_is_refused(call, error, text):
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        call()
