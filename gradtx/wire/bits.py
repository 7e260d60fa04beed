"""Bits to bytes and back: booleans eight to a byte, and unsigned integers of any width.

Bit ``i`` of a sequence is bit ``i % 8`` (least significant first) of byte ``i // 8``. All of it is
elementwise tensor arithmetic on the device of the input, eight bits at a time in one 64-bit word.
Words and bytes are converted by viewing, so the host must be little-endian, as all that CUDA runs
on are.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_WIDTH = 63

_BLOCK = 1 << 15  # integers

# A word holds eight bytes of 0 or 1. Multiplied by this, byte i lands on bit 56 + i: it needs a
# shift by 56 - 7i, and as all 64 partial products fall on different bits, nothing carries.
_GATHER = 0x0102040810204080
_REPEAT = 0x0101010101010101
# Bit i of byte i, as the signed number that torch wants.
_DIAGONAL = 0x8040201008040201 - 2**64


def pack_bits(bits: Tensor) -> Tensor:
    """Pack booleans along the last dimension, eight to a byte.

    Args:
        bits: bool ``[..., n]``.

    Returns:
        uint8 ``[..., ceil(n / 8)]``; the padding bits of the last byte are zero.

    Raises:
        TypeError: ``bits`` is not bool.
        ValueError: ``bits`` has no dimension to pack along.

    Example:
        >>> pack_bits(torch.tensor([True, False, True] + [False] * 6 + [True])).tolist()
        [5, 2]
    """
    _require(bits, torch.bool, "bits")
    return _words(bits.view(torch.uint8)).mul(_GATHER).bitwise_right_shift_(56).to(torch.uint8)


def unpack_bits(data: Tensor, n: int) -> Tensor:
    """Undo `pack_bits`.

    Args:
        data: uint8 ``[..., ceil(n / 8)]``; padding bits are ignored.
        n: how many booleans the last dimension holds.

    Returns:
        bool ``[..., n]``.

    Raises:
        TypeError: ``data`` is not uint8.
        ValueError: the last dimension of ``data`` is not ``ceil(n / 8)``.

    Example:
        >>> unpack_bits(torch.tensor([5], dtype=torch.uint8), 4).tolist()
        [True, False, True, False]
    """
    _require(data, torch.uint8, "data")
    _require_nbytes(data.shape[-1], n, f"{n} bits")
    words = data.to(torch.int64, memory_format=torch.contiguous_format)
    words.mul_(_REPEAT).bitwise_and_(_DIAGONAL)
    return words.view(torch.uint8).ne_(0).view(torch.bool)[..., :n]


def pack_uints(values: Tensor, width: int) -> Tensor:
    """Pack the low ``width`` bits of each integer, one after the other.

    Args:
        values: int64 ``[m]``; bits above ``width`` are dropped.
        width: bits a value, 0 to 63.

    Returns:
        uint8 ``[ceil(m * width / 8)]``; the padding bits of the last byte are zero.

    Raises:
        TypeError: ``values`` is not int64.
        ValueError: ``values`` is not one-dimensional, or ``width`` is not in 0..63.

    Example:
        >>> pack_uints(torch.tensor([1, 2, 3]), width=4).tolist()
        [33, 3]
    """
    _require(values, torch.int64, "values")
    _require_vector(values, "values")
    _require_width(width)
    if 0 < width <= 8:
        return torch.cat([_packed(part, width) for part in values.split(_BLOCK)])
    octets = values.contiguous().view(torch.uint8).view(-1, 8)[:, : _bytes_of(width)]
    parts = octets.split(_block_of(octets))
    return torch.cat([pack_bits(unpack_bits(part, width).reshape(-1)) for part in parts])


def _packed(values: Tensor, width: int) -> Tensor:
    """Eight values of up to eight bits in a word."""
    values = values & ((1 << width) - 1)
    missing = -len(values) % 8
    rows = torch.nn.functional.pad(values, (0, missing)).view(-1, 8)
    words = (rows << _shifts(width, values.device)).sum(-1)
    octets = words.view(torch.uint8).view(-1, 8)[:, :width].reshape(-1)
    return octets[: _bytes_of(len(values) * width)]


def _unpacked(data: Tensor, count: int, width: int) -> Tensor:
    """Undo `_packed`."""
    groups = _bytes_of(count)
    octets = data.new_zeros(groups, 8)
    octets[:, :width] = torch.nn.functional.pad(data, (0, groups * width - len(data))).view(
        groups, width
    )
    words = octets.view(torch.int64) >> _shifts(width, data.device)
    return words.bitwise_and_((1 << width) - 1).view(-1)[:count]


def _shifts(width: int, device: torch.device) -> Tensor:
    return torch.arange(0, 8 * width, width, device=device)


def unpack_uints(data: Tensor, count: int, width: int) -> Tensor:
    """Undo `pack_uints`.

    Args:
        data: uint8 ``[ceil(count * width / 8)]``; padding bits are ignored.
        count: how many integers there are.
        width: bits a value, 0 to 63.

    Returns:
        int64 ``[count]``, each in ``[0, 2**width)``.

    Raises:
        TypeError: ``data`` is not uint8.
        ValueError: ``data`` has another shape, ``count`` is negative, or ``width`` is not in 0..63.

    Example:
        >>> unpack_uints(torch.tensor([33, 3], dtype=torch.uint8), count=3, width=4).tolist()
        [1, 2, 3]
    """
    _require(data, torch.uint8, "data")
    _require_vector(data, "data")
    _require_width(width)
    if count < 0:
        raise ValueError(f"count must not be negative, but it is {count}")
    _require_nbytes(data.numel(), count * width, f"{count} values of {width} bits")
    if 0 < width <= 8:
        parts = data.split(_BLOCK * width // 8)
        counts = [min(_BLOCK, count - start) for start in range(0, count, _BLOCK)] or [0]
        return torch.cat([_unpacked(*each, width) for each in zip(parts, counts, strict=False)])
    words = data.new_zeros(count, 8)
    block = _block_of(words)
    parts = data.split(max(block * width // 8, 1))
    for part, rows in zip(parts, words.split(block), strict=False):  # no bits, no parts
        bits = unpack_bits(part, len(rows) * width).view(len(rows), width)
        rows[:, : _bytes_of(width)] = pack_bits(bits)
    return words.view(torch.int64).view(count)


def _block_of(rows: Tensor) -> int:
    """How many rows to treat at once, a multiple of 8: on a CPU, what stays in the cache."""
    return _BLOCK if rows.device.type == "cpu" else 8 * max(_bytes_of(len(rows)), 1)


def _bytes_of(bits: int) -> int:
    return (bits + 7) // 8


def _words(octets: Tensor) -> Tensor:
    """View the last dimension as int64, eight bytes a word, with zeros added to fill the last."""
    *batch, n = octets.shape
    whole = n > 0 and n % 8 == 0
    if not (whole and octets.is_contiguous() and octets.storage_offset() % 8 == 0):
        padded = octets.new_zeros(*batch, 8 * _bytes_of(n))
        padded[..., :n] = octets
        octets = padded
    # Flat, because a view of another item size refuses the odd strides that a contiguous tensor may
    # have along dimensions of size 1.
    return octets.reshape(-1).view(torch.int64).view(*batch, _bytes_of(n))


def _require(tensor: Tensor, dtype: torch.dtype, name: str) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, not {tensor.dtype}")
    if tensor.dim() == 0:
        raise ValueError(f"{name} must have at least one dimension, not none")


def _require_vector(tensor: Tensor, name: str) -> None:
    if tensor.dim() != 1:
        raise ValueError(f"{name} must have one dimension, not shape {tuple(tensor.shape)}")


def _require_width(width: int) -> None:
    if not 0 <= width <= MAX_WIDTH:
        raise ValueError(f"width must be in 0..{MAX_WIDTH}, not {width}")


def _require_nbytes(nbytes: int, bits: int, what: str) -> None:
    if bits < 0 or nbytes != _bytes_of(bits):
        raise ValueError(f"{what} take {_bytes_of(max(bits, 0))} bytes, but data has {nbytes}")
