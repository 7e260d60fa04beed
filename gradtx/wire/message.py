"""The message: all that one rank sends in one step, in one contiguous run of bytes.

All numbers are little-endian::

    offset  size             what
    0       4                magic, b"GRTX"
    4       2                version, 2
    6       2                flags: 1 not finite (a bad step), 2 error, 4 left out, 8 flushing
    8       8                fingerprint of the chain
    16      4                step, modulo 2**32
    20      4                leaves
    24      8                length of what follows the absent bitmap
    32      8                weight, FP64
    40      ceil(leaves/8)   absent leaves, one bit each, least significant first
            0 to 7           zeros, so that the whole message is a multiple of 8 bytes
                             segments

Segments are not written in the order given but sorted by alignment, the odd-sized first and the
multiples of 8 bytes last, and they end where the message ends. So a segment whose size is a
multiple of 1, 2, 4 or 8 bytes starts at a multiple of it, ready for `Tensor.view` with a dtype of
that size, at a cost of at most 7 bytes a message. As the message is a multiple of 8 too, this holds
for each of several messages gathered into one tensor, without a copy.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from gradtx.wire.errors import WireFormatError

MAGIC = b"GRTX"
VERSION = 2

_FIXED = struct.Struct("<4sHHQIIQd")
_NOT_FINITE = 1
_ERROR = 2
_LEFT_OUT = 4
_FLUSHING = 8
_FLAGS = _NOT_FINITE | _ERROR | _LEFT_OUT | _FLUSHING
_ALIGNMENT = 8


@dataclass(frozen=True)
class Header:
    """What a rank says about its step, before the payload.

    Attributes:
        fingerprint: unsigned 64-bit digest of what all ranks must agree on.
        step: the step, sent modulo 2**32.
        finite: whether this rank's gradients were finite as they arrived.
        error: whether this rank failed; its segments then mean nothing.
        absent: for each leaf, whether this rank had no gradient for it.
        weight: what this rank's part weighs in a mean, at least 0.
        left_out: whether it has left something bad out of its part.
        flushing: whether it brings no more until all ranks are through.

    Example:
        >>> Header(fingerprint=7, step=0, finite=True, error=False, absent=(False, True)).absent
        (False, True)
    """

    fingerprint: int
    step: int
    finite: bool
    error: bool
    absent: tuple[bool, ...]
    weight: float = 1.0
    left_out: bool = False
    flushing: bool = False


def message_nbytes(leaves: int, segments: Sequence[int]) -> int:
    """Say how long a message is, from the shapes alone.

    Args:
        leaves: how many leaves the header speaks of.
        segments: the size of each segment in bytes.

    Returns:
        The size in bytes, a multiple of 8.

    Raises:
        ValueError: a size is negative, or there are 2**32 leaves or more.

    Example:
        >>> message_nbytes(3, [5, 8])
        56
    """
    if not 0 <= leaves < 2**32:
        raise ValueError(f"leaves must be in [0, 2**32), not {leaves}")
    if any(size < 0 for size in segments):
        raise ValueError(f"segment sizes must not be negative, but they are {list(segments)}")
    return _round_up(_named_nbytes(leaves) + sum(segments))


def encode_message(
    header: Header, segments: Sequence[Tensor], device: torch.device | str
) -> Tensor:
    """Write a header and segments as one message.

    Args:
        header: what to say about the step.
        segments: uint8 vectors, of the sizes that all ranks agreed on.
        device: where the message is to be.

    Returns:
        uint8 ``[message_nbytes(len(header.absent), sizes)]``.

    Raises:
        TypeError: a segment is not uint8.
        ValueError: a segment is not one-dimensional, or the fingerprint is not in ``[0, 2**64)``.

    Example:
        >>> header = Header(fingerprint=7, step=0, finite=True, error=False, absent=(False,))
        >>> encode_message(header, [torch.ones(7, dtype=torch.uint8)], "cpu")[40:].tolist()
        [0, 1, 1, 1, 1, 1, 1, 1]
    """
    for position, segment in enumerate(segments):
        _require_segment(position, segment)
    sizes = [segment.numel() for segment in segments]
    prefix = _prefix(header, message_nbytes(len(header.absent), sizes), sum(sizes))
    parts = [torch.frombuffer(bytearray(prefix), dtype=torch.uint8)]
    parts += [segments[position] for position in _order(sizes)]
    return torch.cat([part.to(device) for part in parts])


def decode_message(
    data: Tensor, leaves: int, sizes: Sequence[int], fingerprint: int
) -> tuple[Header, list[Tensor]]:
    """Read a message, trusting what this rank knows and no byte of ``data``.

    Only the header is copied to the CPU, once. When its ``error`` is set the segments mean nothing.

    Args:
        data: uint8 ``[message_nbytes(leaves, sizes)]``.
        leaves: how many leaves there are.
        sizes: the agreed size of each segment in bytes.
        fingerprint: this rank's own.

    Returns:
        The header, and the segments in the order of ``sizes``. They are views of ``data`` (of a
        copy, if ``data`` is strided or starts off a multiple of 8 bytes), and
        ``segment.view(dtype)`` works for every dtype of up to 8 bytes that divides their size.

    Raises:
        ValueError: ``leaves`` or ``sizes`` are impossible.
        WireFormatError: the message is not one that a rank in agreement with this one sends.

    Example:
        >>> sent = Header(fingerprint=7, step=3, finite=True, error=False, absent=(False,))
        >>> data = encode_message(sent, [torch.tensor([0.5, 2.0]).view(torch.uint8)], "cpu")
        >>> header, [segment] = decode_message(data, leaves=1, sizes=[8], fingerprint=7)
        >>> header == sent, segment.view(torch.float32).tolist()
        (True, [0.5, 2.0])
        >>> decode_message(data, leaves=1, sizes=[8], fingerprint=6)
        Traceback (most recent call last):
        gradtx.wire.errors.WireFormatError: message has fingerprint 0x7, expected 0x6
    """
    nbytes = message_nbytes(leaves, sizes)
    if data.dtype != torch.uint8 or data.dim() != 1:
        found = f"{data.dtype} of shape {tuple(data.shape)}"
        raise WireFormatError(f"message is {found}, expected a vector of torch.uint8")
    if data.numel() != nbytes:
        raise WireFormatError(f"message has {data.numel()} bytes, expected {nbytes}")
    prefix = bytes(data[: nbytes - sum(sizes)].tolist())
    return _parse(prefix, leaves, nbytes, fingerprint), _split(data, sizes)


def error_message(header: Header, nbytes_total: int, device: torch.device | str = "cpu") -> Tensor:
    """Write the message of a rank that failed: the agreed size, the error flag and no payload.

    Args:
        header: what to say about the step; ``error`` is set whatever it is here.
        nbytes_total: the agreed size, as given by `message_nbytes`.
        device: where the message is to be.

    Returns:
        uint8 ``[nbytes_total]``, which `decode_message` accepts.

    Raises:
        ValueError: no message with so many leaves has that size.

    Example:
        >>> header = Header(fingerprint=7, step=0, finite=True, error=False, absent=(False,))
        >>> message = error_message(header, message_nbytes(1, [8]))
        >>> decode_message(message, leaves=1, sizes=[8], fingerprint=7)[0].error
        True
    """
    smallest = message_nbytes(len(header.absent), [])
    if nbytes_total < smallest or nbytes_total % _ALIGNMENT:
        raise ValueError(
            f"a message for {len(header.absent)} leaves has a multiple of {_ALIGNMENT} bytes,"
            f" at least {smallest}, not {nbytes_total}; use message_nbytes"
        )
    prefix = _prefix(replace(header, error=True), nbytes_total, nbytes_total - smallest)
    message = torch.zeros(nbytes_total, dtype=torch.uint8, device=device)
    message[: len(prefix)] = torch.frombuffer(bytearray(prefix), dtype=torch.uint8).to(device)
    return message


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _named_nbytes(leaves: int) -> int:
    return _FIXED.size + (leaves + 7) // 8


def _order(sizes: Sequence[int]) -> list[int]:
    """Order the segments by alignment, the least aligned first."""
    return sorted(range(len(sizes)), key=lambda position: _alignment(sizes[position]))


def _alignment(size: int) -> int:
    """Return the largest power of two, up to 8, that divides ``size``."""
    return next(power for power in (8, 4, 2, 1) if size % power == 0)


def _prefix(header: Header, nbytes: int, payload: int) -> bytes:
    """Write all that comes before the segments of a message of ``nbytes``."""
    if not 0 <= header.fingerprint < 2**64:
        raise ValueError(f"fingerprint must be in [0, 2**64), not {header.fingerprint}")
    leaves = len(header.absent)
    named = _named_nbytes(leaves)
    flags = _NOT_FINITE * (not header.finite) | _ERROR * header.error
    flags |= _LEFT_OUT * header.left_out | _FLUSHING * header.flushing
    step = header.step % 2**32
    fixed = _FIXED.pack(
        MAGIC, VERSION, flags, header.fingerprint, step, leaves, nbytes - named, header.weight
    )
    bitmap = sum(1 << leaf for leaf, absent in enumerate(header.absent) if absent)
    return fixed + bitmap.to_bytes(nbytes - payload - _FIXED.size, "little")


def _parse(prefix: bytes, leaves: int, nbytes: int, fingerprint: int) -> Header:
    """Read and check all that comes before the segments."""
    magic, version, flags, found, step, count, length, weight = _FIXED.unpack_from(prefix)
    _expect("magic", magic, MAGIC)
    _expect("version", version, VERSION)
    if flags & ~_FLAGS:
        raise WireFormatError(f"message has flags {flags:#x}, expected none but {_FLAGS:#x}")
    if not 0 <= weight < math.inf:
        raise WireFormatError(f"message has weight {weight}, expected a finite one of at least 0")
    _expect("fingerprint", hex(found), hex(fingerprint))
    _expect("leaves", count, leaves)
    _expect("length", length, nbytes - _named_nbytes(leaves))
    bitmap = int.from_bytes(prefix[_FIXED.size :], "little")
    if bitmap >> leaves:
        raise WireFormatError("message has padding that is not zero after the absent leaves")
    # The extra one keeps the leading zeros. Shifting instead would be quadratic in the leaves.
    absent = tuple(digit == "1" for digit in bin(1 << leaves | bitmap)[:2:-1])
    return Header(
        found,
        step,
        not flags & _NOT_FINITE,
        bool(flags & _ERROR),
        absent,
        weight,
        bool(flags & _LEFT_OUT),
        bool(flags & _FLUSHING),
    )


def _split(data: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Cut the segments from the end of ``data`` and put them in the order of ``sizes``."""
    if not data.is_contiguous() or data.storage_offset() % _ALIGNMENT:
        data = data.clone(memory_format=torch.contiguous_format)
    order = _order(sizes)
    first = data.numel() - sum(sizes)
    starts = accumulate((sizes[position] for position in order), initial=first)
    start_of = dict(zip(order, starts, strict=False))
    return [data[start_of[i] : start_of[i] + size] for i, size in enumerate(sizes)]


def _require_segment(position: int, segment: Tensor) -> None:
    if segment.dtype != torch.uint8:
        raise TypeError(f"segment {position} must be torch.uint8, not {segment.dtype}")
    if segment.dim() != 1:
        shape = tuple(segment.shape)
        raise ValueError(f"segment {position} must have one dimension, not shape {shape}")


def _expect(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise WireFormatError(f"message has {what} {found}, expected {expected}")
