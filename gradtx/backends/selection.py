"""Exact selection of the largest magnitudes on the CPU, without sorting.

Floats are compared by their bits without the sign, as whole numbers: that order is the order of
magnitudes, and has a place for every NaN (above infinity). A sample gives a threshold a little
below the one that is sought; one sweep in cache-sized blocks collects what lies above; the exact
choice is made among these. Where too few lie above, since many are equal to the threshold, a second
sweep takes the first of those. Where the sample misleads, the choice is made among all values.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Indices = npt.NDArray[np.int64]
Keys = npt.NDArray[Any]

_BLOCK = 1 << 17
_SAMPLE = 1 << 14
_SMALL = 1 << 16
_KEYS: dict[int, tuple[Any, int]] = {
    4: (np.uint32, 0x7FFFFFFF),
    8: (np.uint64, 0x7FFFFFFFFFFFFFFF),
}


def largest_magnitudes(values: npt.NDArray[Any], k: int) -> Indices:
    """The positions of the `k` largest magnitudes, ascending; ties go to the lowest position.

    Args:
        values: contiguous FP32 or FP64 ``[n]``.
        k: from 1 to `n`.

    Returns:
        int64 ``[k]``.

    Example:
        >>> largest_magnitudes(np.float32([1, -3, 2, 3, -3]), 2)
        array([1, 3])
    """
    dtype, without_sign = _KEYS[values.itemsize]
    bits, mask = values.view(dtype), dtype(without_sign)
    if values.size <= _SMALL or k > values.size // 8:
        return _choose(bits & mask, k)
    threshold, many = _threshold(bits, mask, k), 4 * k + 1024
    above = _collect(bits, mask, np.greater, threshold, many)
    if above.size > many:
        return _choose(bits & mask, k)
    if above.size >= k:
        return above[_choose(bits[above] & mask, k)]
    equal = _collect(bits, mask, np.equal, threshold, k - above.size)[: k - above.size]
    if above.size + equal.size < k:
        return _choose(bits & mask, k)
    return np.sort(np.concatenate((above, equal)))


def _threshold(bits: Keys, mask: Any, k: int) -> Any:
    """A key that a few more than `k` values lie above, if a sample is to be believed."""
    sample = bits[_sampled(bits.size)] & mask
    expected = k / bits.size * _SAMPLE
    rank = min(_SAMPLE, int(expected + 4 * expected**0.5 + 4))
    return np.partition(sample, _SAMPLE - rank)[_SAMPLE - rank]


@lru_cache(maxsize=64)
def _sampled(size: int) -> Indices:
    """The positions of a sample: spread evenly, and in step with no period of the data."""
    golden = 0.6180339887498949
    places = (np.arange(_SAMPLE) * golden % 1.0 * size).astype(np.int64)
    places.sort()  # Read in order, which is faster.
    return places


def _collect(bits: Keys, mask: Any, compare: Any, threshold: Any, enough: int) -> Indices:
    """The positions of the keys that compare so with the threshold; stops soon after `enough`."""
    keys, hits = np.empty(_BLOCK, bits.dtype), np.empty(_BLOCK, bool)
    found, total = [np.empty(0, np.int64)], 0
    for start in range(0, bits.size, _BLOCK):
        block = bits[start : start + _BLOCK]
        np.bitwise_and(block, mask, out=keys[: block.size])
        compare(keys[: block.size], threshold, out=hits[: block.size])
        positions = np.flatnonzero(hits[: block.size])
        positions += start
        found.append(positions)
        total += positions.size
        if total > enough:
            break
    return np.concatenate(found)


def _choose(keys: Keys, k: int) -> Indices:
    # torch does not order unsigned numbers; the sign bit is clear, so signed ones are the same.
    signed = keys.view(f"i{keys.itemsize}")
    least = torch.from_numpy(signed).topk(k, sorted=False).values.amin().item()
    chosen = np.flatnonzero(signed >= least)
    if chosen.size == k:
        return chosen
    tied = np.flatnonzero(signed[chosen] == least)
    return np.delete(chosen, tied[k - chosen.size :])
