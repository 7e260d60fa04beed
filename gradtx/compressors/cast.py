"""`cast`: 16 or 8 bits a value, scaled by powers of two."""

from __future__ import annotations

from typing import NamedTuple

from gradtx import backends
from gradtx.compressors.compressor import compressor
from gradtx.core.arguments import check_bool
from gradtx.core.payload import Payload, register_payload
from gradtx.core.stage import Argument, Kind, Stage
from gradtx.core.transformation import Transformation
from gradtx.core.tree import Array


class Format(NamedTuple):
    """A float format.

    Attributes:
        top: the exponent that the largest magnitude is scaled to.
        block: how many values share a scale; None for the whole leaf.
    """

    top: int
    block: int | None


# E4M3 goes up to 1.75 * 2**8: only below 2**8 is there room for every mantissa. BF16 has the range
# of FP32, so that any exponent does.
FORMATS = {
    "float16": Format(15, None),
    "bfloat16": Format(15, None),
    "float8_e4m3fn": Format(7, 256),
    "float8_e5m2": Format(15, 256),
}
# Both 2**n and 2**-n are normal numbers.
_LIMIT = {"float32": 126, "float64": 1022}


@register_payload
class Cast(Payload):
    """Values in fewer bits, scaled by powers of two.

    Attributes:
        codes: ``[n]``: the scaled values, 8-bit ones as uint8.
        exponents: int16, one a leaf, or ``[ceil(n / 256)]``: what to scale back by.
        format: the name of the dtype of the codes.
    """

    children = ("codes", "exponents")
    static = ("format",)
    keeps_zeros = True
    codes: Array
    exponents: Array
    format: str

    def at(self, places: Array) -> Payload | None:
        """Some of the values, if all have one scale."""
        if FORMATS[self.format].block is not None:
            return None
        codes = backends.of(places).take(self.codes, places)
        return Cast(codes, self.exponents, self.format, tuple(codes.shape), self.dtype)

    def decode(self) -> Array:
        """The values, scaled back."""
        ops = backends.of(self.codes)
        eight_bits = ops.dtype_name(self.codes) == "uint8"
        codes = ops.bitcast(self.codes, self.format) if eight_bits else self.codes
        rows = ops.blocks(ops.cast(codes, self.dtype), FORMATS[self.format].block or self.size or 1)
        scales = ops.power_of_two(self.exponents, self.dtype)
        return ops.ravel(rows * scales[:, None])[: self.size]


def cast(dtype: str, *, feedback: bool = True) -> Transformation:
    r"""Sends values in 16 or 8 bits: :math:`\hat g_i = 2^{-s} \, \mathrm{round}(2^s g_i)`.

    The scale :math:`2^s` brings the largest magnitude to the top of the format's range, for a leaf
    of a 16-bit format and for each 256 values of an 8-bit one: no value overflows, and none
    underflows that matters beside the largest. Rounding is to nearest, ties to even. It is a
    contraction, with :math:`1 - \delta` about :math:`u^2`, where :math:`u` is :math:`2^{-11}` for
    ``"float16"``, :math:`2^{-8}` for ``"bfloat16"``, :math:`2^{-4}` for ``"float8_e4m3fn"`` and
    :math:`2^{-3}` for ``"float8_e5m2"``; all values scaled by a power of two give the same codes.

    An infinity or a NaN decodes to NaN, in whatever format, and the rest of its leaf (or block) to
    zero. A leaf (or block) of denormal numbers alone may decode to zeros, and a magnitude within
    rounding of the largest FP32 number to infinity.

    Args:
        dtype: ``"float16"``, ``"bfloat16"``, ``"float8_e4m3fn"`` or ``"float8_e5m2"``.
        feedback: False goes without error feedback, on purpose: what rounding leaves out is lost.

    Returns:
        The transformation: dense leaves or sparse payloads (whose values it takes) to `Cast`.

    Raises:
        ValueError: for another dtype.

    References:
        Micikevicius et al., Mixed Precision Training, 2018; Micikevicius et al., FP8 Formats for
        Deep Learning, 2022.

    Example:
        >>> import torch, gradtx as gx
        >>> tx = gx.cast("float8_e5m2", feedback=False)
        >>> updates, _ = tx.update([torch.tensor([1e-9, -3e-9])], tx.init([torch.zeros(2)]))
        >>> updates[0].codes.dtype, updates[0].decode()
        (torch.uint8, tensor([ 9.3132e-10, -2.7940e-09]))
    """
    check_bool("cast(feedback", feedback)
    if not isinstance(dtype, str) or dtype not in FORMATS:
        raise ValueError(f"cast({dtype!r}): expected one of {', '.join(map(repr, FORMATS))}")
    stage = Stage(
        "cast",
        Kind.COMPRESSOR,
        (Argument("dtype", dtype), Argument("feedback", feedback, True)),
        takes=frozenset({"dense", "sparse", "padded"}),
        gives="codes",
        biased=True,
        feedback=feedback,
    )
    return compressor(stage, lambda flat, shape: encode_cast(flat, shape, dtype))


def encode_cast(flat: Array, shape: tuple[int, ...], dtype: str) -> Cast:
    """The flat FP32 or FP64 values of a leaf in another dtype, scaled."""
    ops = backends.of(flat)
    wide = ops.dtype_name(flat)
    top, block = FORMATS[dtype]
    rows = ops.blocks(flat, block or max(flat.shape[0], 1))
    largest = ops.max_magnitude(rows)
    exponents = ops.limit(top - _rounded_exponent(largest, dtype), _LIMIT[wide])
    finite = ops.exponent(largest) < _LIMIT[wide] + 2
    # Times zero, infinity and NaN are NaN: the cast, which in some formats saturates, cannot hide
    # them.
    scales = ops.power_of_two(ops.where(finite, exponents, -_LIMIT[wide] - 1), wide)
    codes = ops.ravel(ops.cast(rows * scales[:, None], dtype))[: flat.shape[0]]
    if block is not None:
        codes = ops.bitcast(codes, "uint8")
    return Cast(codes, ops.cast(-exponents, "int16"), dtype, shape, wide)


def _rounded_exponent(x: Array, dtype: str) -> Array:
    """The exponents of magnitudes once rounded: what is encoded anew keeps its scale."""
    ops = backends.of(x)
    wide = ops.dtype_name(x)
    exponents = ops.limit(ops.exponent(x), _LIMIT[wide])
    rounded = ops.cast(x * ops.power_of_two(-exponents, wide), dtype)
    return exponents + ops.exponent(ops.cast(rounded, wide))
