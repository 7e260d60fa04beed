"""Digits of bytes in any base on the CPU, where NumPy divides bytes in vector registers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_BLOCK = 1 << 16  # bytes: with two of scratch space it stays in the cache


def write_digits(data: Bytes, base: int, rows: Bytes) -> None:
    """Writes the lowest digits of each byte.

    Args:
        data: ``[n]``.
        base: 2 to 255.
        rows: ``[count, n]``: what is written to, the lowest digits first.

    Example:
        >>> rows = np.empty((2, 1), np.uint8)
        >>> write_digits(np.uint8([7]), 3, rows)
        >>> rows.tolist()
        [[1], [2]]
    """
    scratch = np.empty((2, _BLOCK), np.uint8)
    for start in range(0, data.size, _BLOCK):
        rest = data[start : start + _BLOCK]
        for i, row in enumerate(rows[:, start : start + _BLOCK]):
            quotient = scratch[i % 2, : rest.size]
            np.floor_divide(rest, base, out=quotient)
            np.multiply(quotient, base, out=row)
            np.subtract(rest, row, out=row)
            rest = quotient
