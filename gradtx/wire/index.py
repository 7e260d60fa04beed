"""Sorted indices as bytes, close to the entropy bound and of a size that shapes alone decide.

``count`` strictly increasing indices below ``universe`` are written as whichever is smaller:

- *Elias-Fano*: the ``low`` lowest bits of each index as they are, after the remaining high bits in
  unary: index number ``i`` sets bit ``high + i`` of a bitmap. That is at most about
  ``2 + log2(universe / count)`` bits an index: 8.56 at 1 %, where the entropy bound is 8.08.
- a *bitmap* of ``universe`` bits, once more than about a quarter of them is set.

Two bytes an index within blocks of 65,536, with a four-byte count a block, are not among the
choices, because they are never smaller. Elias-Fano with ``low = 16`` takes 17 bits an index and 1 a
block, against 16 and 32, so it wins up to 31 indices a block; with ``low = 11`` it takes 12 and 32,
so it always wins beyond that.

References:
    Elias, "Efficient storage and retrieval by content and address of static files", J. ACM, 1974.
    Fano, "On the number of bits required to implement an associative memory", MIT, 1971.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradtx.wire.bits import pack_bits, pack_uints, unpack_bits, unpack_uints
from gradtx.wire.errors import WireFormatError


@dataclass(frozen=True)
class _Layout:
    """``bitmap_bits`` bits (rounded up to bytes), then ``count`` numbers of ``low`` bits."""

    bitmap_bits: int
    low: int
    # Whether a bitmap position is an index's high bits plus its rank, or the index itself.
    ranked: bool
    count: int

    @property
    def bitmap_nbytes(self) -> int:
        return (self.bitmap_bits + 7) // 8

    @property
    def nbytes(self) -> int:
        return self.bitmap_nbytes + (self.count * self.low + 7) // 8


def indices_nbytes(count: int, universe: int) -> int:
    """Say how many bytes `encode_indices` makes, from the shapes alone.

    Args:
        count: how many indices there are.
        universe: how many they are chosen from, below 2**63.

    Returns:
        The size in bytes; 0 when there is nothing to tell (none or all are chosen).

    Raises:
        ValueError: ``universe`` is negative or too large, or ``count`` is not in ``0..universe``.

    Example:
        >>> indices_nbytes(250_000, 25_000_000) * 8 / 250_000
        8.562496
    """
    _require_sizes(count, universe)
    return 0 if count in (0, universe) else _layout(count, universe).nbytes


def encode_indices(indices: Tensor, universe: int) -> Tensor:
    """Write strictly increasing indices as bytes.

    Args:
        indices: int64 ``[count]``, strictly increasing, each in ``[0, universe)``.
        universe: how many they are chosen from, below 2**63.

    Returns:
        uint8 ``[indices_nbytes(count, universe)]`` on the device of ``indices``.

    Raises:
        TypeError: ``indices`` is not int64.
        ValueError: ``indices`` is not one-dimensional, strictly increasing and in range.

    Example:
        >>> encode_indices(torch.tensor([3, 70, 71]), universe=100).tolist()
        [25, 195, 28]
    """
    if indices.dtype != torch.int64:
        raise TypeError(f"indices must be torch.int64, not {indices.dtype}")
    if indices.dim() != 1:
        raise ValueError(f"indices must have one dimension, not shape {tuple(indices.shape)}")
    count = indices.numel()
    _require_sizes(count, universe)
    fault = _fault(indices, universe)
    if fault:
        raise ValueError(f"indices must be strictly increasing in [0, {universe}), but {fault}")
    if count in (0, universe):
        return indices.new_empty(0, dtype=torch.uint8)
    layout = _layout(count, universe)
    positions = indices >> layout.low
    if layout.ranked:
        positions += _ranks(indices)
    bitmap = torch.zeros(layout.bitmap_bits, dtype=torch.bool, device=indices.device)
    bitmap.index_fill_(0, positions, True)
    return torch.cat([pack_bits(bitmap), pack_uints(indices, layout.low)])


def decode_indices(data: Tensor, count: int, universe: int) -> Tensor:
    """Undo `encode_indices`, trusting ``count`` and ``universe`` but no byte of ``data``.

    Memory is proportional to ``len(data) + count``, whatever the bytes are.

    Args:
        data: uint8 ``[indices_nbytes(count, universe)]``.
        count: how many indices were encoded.
        universe: how many they were chosen from.

    Returns:
        int64 ``[count]``, strictly increasing, each in ``[0, universe)``.

    Raises:
        ValueError: ``count`` or ``universe`` is impossible.
        WireFormatError: ``data`` is not what `encode_indices` makes of any such indices.

    Example:
        >>> decode_indices(torch.tensor([1, 0, 0], dtype=torch.uint8), count=3, universe=100)
        Traceback (most recent call last):
        gradtx.wire.errors.WireFormatError: index bitmap has 1 ones, expected 3
    """
    _require_sizes(count, universe)
    _check_data(data, indices_nbytes(count, universe))
    if count in (0, universe):
        return torch.arange(count, device=data.device)
    layout = _layout(count, universe)
    high = _read_bitmap(data[: layout.bitmap_nbytes], layout)
    if not layout.ranked:
        return high
    indices = (high - _ranks(high)).bitwise_left_shift_(layout.low)
    indices |= _read_low(data[layout.bitmap_nbytes :], layout)
    fault = _fault(indices, universe)
    if fault:
        raise WireFormatError(f"indices are not strictly increasing in [0, {universe}): {fault}")
    return indices


def _layout(count: int, universe: int) -> _Layout:
    """Choose the smallest layout for ``0 < count < universe``."""
    # One bit more or less in `low` costs as much as it saves, or more; rounding aside.
    low = (universe // count).bit_length() - 1
    elias_fano = _Layout(count + ((universe - 1) >> low), low, True, count)
    # The first wins a tie, and is the cheaper to read.
    bitmap = _Layout(universe, 0, False, count)
    return min(bitmap, elias_fano, key=lambda layout: layout.nbytes)


def _read_bitmap(data: Tensor, layout: _Layout) -> Tensor:
    bitmap = unpack_bits(data, layout.bitmap_bits)
    # Counted before they are listed: a list of hostile ones would be 64 times the data.
    ones = int(torch.count_nonzero(bitmap))
    if ones != layout.count:
        raise WireFormatError(f"index bitmap has {ones} ones, expected {layout.count}")
    _check_padding(data, layout.bitmap_bits, "index bitmap")
    return _places_of(bitmap)


def _places_of(bits: Tensor) -> Tensor:
    if bits.device.type == "cpu":  # Ten times faster.
        return torch.from_numpy(np.flatnonzero(bits.numpy()))
    return bits.nonzero().view(-1)


def _read_low(data: Tensor, layout: _Layout) -> Tensor:
    _check_padding(data, layout.count * layout.low, "low bits of the indices")
    return unpack_uints(data, layout.count, layout.low)


def _ranks(like: Tensor) -> Tensor:
    return torch.arange(like.numel(), device=like.device)


def _fault(indices: Tensor, universe: int) -> str:
    """Describe the first thing wrong with ``indices``, or return an empty string."""
    if not indices.numel():
        return ""
    falls = (indices[1:] <= indices[:-1]).sum()
    # One transfer, so that a CUDA device is waited for once.
    first, last, fallen = torch.stack([indices[0], indices[-1], falls]).tolist()
    if fallen:
        return f"{fallen} of them are not above the one before"
    if first < 0:
        return f"the first is {first}"
    return f"the last is {last}" if last >= universe else ""


def _require_sizes(count: int, universe: int) -> None:
    if not 0 <= universe < 2**63:
        raise ValueError(f"universe must be in [0, 2**63), not {universe}")
    if not 0 <= count <= universe:
        raise ValueError(f"count must be in [0, {universe}], the universe, not {count}")


def _check_data(data: Tensor, nbytes: int) -> None:
    if data.dtype != torch.uint8 or data.dim() != 1:
        found = f"{data.dtype} of shape {tuple(data.shape)}"
        raise WireFormatError(f"encoded indices are {found}, expected a vector of torch.uint8")
    if data.numel() != nbytes:
        raise WireFormatError(f"encoded indices have {data.numel()} bytes, expected {nbytes}")


def _check_padding(data: Tensor, bits: int, what: str) -> None:
    if bits % 8 and int(data[-1]) >> (bits % 8):
        raise WireFormatError(f"padding after the {what} is not zero: last byte {int(data[-1])}")
