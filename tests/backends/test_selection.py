"""The exact selection against a stable sort, on data that misleads a sampled threshold."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gradtx.backends.selection import largest_magnitudes

N = 200_000


def by_sorting(values: np.ndarray, k: int) -> np.ndarray:
    magnitude = np.where(np.isnan(values), np.inf, np.abs(values))
    order = np.lexsort((np.arange(values.size), ~np.isnan(values), -magnitude))
    return np.sort(order[:k])


def periodic(rng: np.random.Generator) -> np.ndarray:
    values = rng.normal(size=N)
    values[:: N >> 15] = 0.0
    return values


def few(rng: np.random.Generator) -> np.ndarray:
    values = np.zeros(N)
    values[rng.choice(N, 50, replace=False)] = rng.normal(size=50)
    return values


DATA: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "normal": lambda rng: rng.normal(size=N),
    "constant": lambda rng: np.full(N, -2.5),
    "two values": lambda rng: rng.choice([1.0, -2.0], N),
    "few non-zeros": few,
    "zeros": lambda rng: np.zeros(N),
    "one huge value": lambda rng: np.where(np.arange(N) == N // 3, 1e30, 1.0),
    "sorted": lambda rng: np.sort(rng.normal(size=N)),
    "in step with a stride": periodic,
    "clustered": lambda rng: np.where(np.arange(N) < 5000, 1.0, 1e-6) * rng.normal(size=N),
    "rounded": lambda rng: np.round(rng.normal(size=N), 1),
    "denormal": lambda rng: rng.normal(size=N) * 1e-42,
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("k", [1, 20, 2000, N // 8, N // 2, N])
def test_selects_what_a_stable_sort_does(name: str, dtype: type, k: int) -> None:
    values = DATA[name](np.random.default_rng(0)).astype(dtype)
    np.testing.assert_array_equal(largest_magnitudes(values, k), by_sorting(values, k))


def test_counts_nan_above_infinity() -> None:
    values = np.zeros(N, np.float32)
    values[[5, N - 1]] = np.inf, np.nan
    assert largest_magnitudes(values, 1).tolist() == [N - 1]
    assert largest_magnitudes(values, 2).tolist() == [5, N - 1]


@given(
    hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(-4, 4, width=16)),
    st.floats(0, 1),
)
def test_small_arrays(values: np.ndarray, share: float) -> None:
    k = max(1, round(share * values.size))
    np.testing.assert_array_equal(largest_magnitudes(values, k), by_sorting(values, k))
