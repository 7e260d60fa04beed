"""Digits of bytes in any base: by products, and on the CPU by NumPy's division in registers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_BLOCK = 1 << 16  # bytes: with two of scratch space it stays in the cache


def quotient_of(numbers: Any, base: int) -> Any:
    """``numbers // base`` by a product and a shift, which are cheap everywhere.

    The factor is over ``2**16 / base`` by less than one, and so the product over the right one by
    less than 256: too little to reach the next multiple of ``2**16``, which is at least
    ``2**16 / base`` away.

    Args:
        numbers: int32 arrays of any library, 0 to 255.
        base: 2 to 256.

    Example:
        >>> quotient_of(np.int32([0, 4, 5, 9, 10, 255]), 5).tolist()
        [0, 0, 1, 1, 2, 51]
    """
    return (numbers * -(-(1 << 16) // base)) >> 16


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
