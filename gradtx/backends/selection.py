"""Exact selection of the largest magnitudes on the CPU, without sorting.

Floats are compared by their bits without the sign, as whole numbers: that order is the order of
magnitudes, and has a place for every NaN (above infinity). A sample gives a threshold a little
below the one that is sought; one sweep in cache-sized blocks collects what lies above; the exact
choice is made among these. Where too few lie above, since many are equal to the threshold, a second
sweep takes the first of those. Where the sample misleads, the choice is made among all values.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Indices = npt.NDArray[np.int64]
Keys = npt.NDArray[Any]

_BLOCK = 1 << 17
_RUN = 1 << 20
_SAMPLE = 1 << 14
_SMALL = 1 << 16
_KEYS: dict[int, tuple[Any, int]] = {
    4: (np.uint32, 0x7FFFFFFF),
    8: (np.uint64, 0x7FFFFFFFFFFFFFFF),
}


class _Scratch(threading.local):
    """What a thread writes keys and hits to: new arrays would cost more than what is done there."""

    def __init__(self) -> None:
        self.keys = np.empty(_BLOCK, np.uint64)
        self.hits = np.empty(_RUN, bool)


_scratch = _Scratch()


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
    many = _SAMPLE if k < bits.size // 128 else _SAMPLE // 2
    sample = bits[_sampled(bits.size, many)] & mask
    expected = k / bits.size * many
    rank = min(many, int(expected + 4 * expected**0.5 + 4))
    return _kth_largest(sample, rank)


@lru_cache(maxsize=64)
def _sampled(size: int, many: int) -> Indices:
    """The positions of a sample: spread evenly, and in step with no period of the data."""
    golden = 0.6180339887498949
    places = (np.arange(many) * golden % 1.0 * size).astype(np.int64)
    places.sort()  # Read in order, which is faster.
    return places


def _collect(bits: Keys, mask: Any, compare: Any, threshold: Any, enough: int) -> Indices:
    """The positions of the keys that compare so with the threshold; stops soon after `enough`."""
    keys, hits = _scratch.keys.view(bits.dtype), _scratch.hits
    found, total = [np.empty(0, np.int64)], 0
    for start in range(0, bits.size, _RUN):
        run = bits[start : start + _RUN]
        for first in range(0, run.size, _BLOCK):
            block = run[first : first + _BLOCK]
            np.bitwise_and(block, mask, out=keys[: block.size])
            compare(keys[: block.size], threshold, out=hits[first : first + block.size])
        end = -(-run.size // 8) * 8
        hits[run.size : end] = False
        positions = _positions(hits[:end])
        positions += start
        found.append(positions)
        total += positions.size
        if total > enough:
            break
    return np.concatenate(found)


def _positions(hits: npt.NDArray[np.bool_]) -> Indices:
    """As `np.flatnonzero`, which mispredicts a branch for each of a few hits, but not for many.

    Args:
        hits: ``[n]``, a multiple of 8.
    """
    words = hits.view(np.uint64)
    some = words != 0
    few = some.size % 8 == 0 and 10 * np.count_nonzero(some) < some.size
    positions = _positions(some) if few else np.flatnonzero(some)
    places = np.flatnonzero(words.take(positions).view(bool))
    positions = positions.take(places >> 3)
    positions <<= 3
    places &= 7
    positions += places
    return positions


def _choose(keys: Keys, k: int) -> Indices:
    least = _kth_largest(keys, k)
    chosen = np.flatnonzero(keys >= least)
    if chosen.size == k:
        return chosen
    tied = np.flatnonzero(keys[chosen] == least)
    return np.delete(chosen, tied[k - chosen.size :])


def _kth_largest(keys: Keys, k: int) -> Any:
    # torch does not order unsigned numbers; the sign bit is clear, so signed ones are the same.
    # numpy's partition takes twenty times as long where many are equal.
    signed = torch.from_numpy(keys.view(f"i{keys.itemsize}"))
    return signed.topk(k, sorted=False).values.amin().item()
