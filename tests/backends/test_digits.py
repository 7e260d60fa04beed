"""Digits of bytes: by NumPy on the CPU, by shifts for a power of two, and under JAX."""

import numpy as np
import pytest
import torch

from gradtx.backends import torch_ops
from gradtx.backends.digits import quotient_of
from gradtx.compressors.levels import PER_BYTE

jax_ops = pytest.importorskip("gradtx.backends.jax_ops")

BASES = [base for base, count in PER_BYTE.items() if count > 1]


def by_division(data, base, count):
    return np.stack([data // base**i % base for i in range(count)])


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("n", [0, 1, 65_535, 65_536, 65_537, 200_000])
def test_digits_are_those_of_division(base, n):
    data = (np.arange(n) * 7 % 256).astype(np.uint8)
    digits = torch_ops.digits(torch.from_numpy(data), base, PER_BYTE[base])
    expected = by_division(data.astype(int), base, PER_BYTE[base])
    np.testing.assert_array_equal(digits, expected)


ALL = np.arange(256, dtype=np.uint8)


@pytest.mark.parametrize("base", range(2, 257))
def test_products_divide_by_every_base(base):
    """As on devices other than the CPU, by both libraries' operators."""
    for numbers in (torch.arange(256, dtype=torch.int32), jax_ops.jnp.arange(256, dtype="int32")):
        np.testing.assert_array_equal(quotient_of(numbers, base), ALL // base if base < 256 else 0)


@pytest.mark.parametrize("base", range(2, 257))
def test_every_base_on_both_sides(base):
    count = next(count for count in range(1, 9) if base ** (count + 1) > 256)
    expected = by_division(ALL.astype(int), base, count)
    np.testing.assert_array_equal(torch_ops.digits(torch.from_numpy(ALL), base, count), expected)
    np.testing.assert_array_equal(jax_ops.digits(ALL, base, count), expected)


@pytest.mark.parametrize("base", BASES)
def test_jax_gives_the_same_digits(base):
    data = np.arange(256, dtype=np.uint8)
    mine = torch_ops.digits(torch.from_numpy(data), base, PER_BYTE[base])
    np.testing.assert_array_equal(jax_ops.digits(data, base, PER_BYTE[base]), mine)
