"""`natural`: signs and powers of two."""

from __future__ import annotations

from gradtx import backends
from gradtx.compressors.compressor import random_compressor
from gradtx.core.arguments import check_whole
from gradtx.core.payload import Payload, register_payload
from gradtx.core.stage import Argument, Kind, Stage
from gradtx.core.transformation import Transformation
from gradtx.core.tree import Array


@register_payload
class Powers(Payload):
    """Powers of two and their signs.

    Attributes:
        exponents: ``[n]``, uint8, plus 127 (int16 for FP64 leaves); one below and one above those
            of normal numbers stand for zero and infinity.
        signs: uint8 ``[ceil(n / 8)]``: a set bit is a minus, lowest bit first.
    """

    children = ("exponents", "signs")
    keeps_zeros = True
    exponents: Array
    signs: Array

    def at(self, places: Array) -> Payload | None:
        """Some of the values."""
        ops = backends.of(places)
        exponents = ops.take(self.exponents, places)
        signs = ops.pack_bits(ops.take(ops.unpack_bits(self.signs, self.size), places))
        return Powers(exponents, signs, tuple(exponents.shape), self.dtype)

    def plain(self) -> tuple[Array, None]:
        """The powers as bfloat16, which has all those of FP32."""
        ops = backends.of(self.exponents)
        return ops.cast(self.decode(), {"float32": "bfloat16"}.get(self.dtype, self.dtype)), None

    def decode(self) -> Array:
        """The powers, with the signs."""
        ops = backends.of(self.exponents)
        exponents = ops.cast(self.exponents, "int32") - _BIAS[self.dtype]
        powers = ops.power_of_two(exponents, self.dtype)
        return ops.where(ops.unpack_bits(self.signs, self.size), -powers, powers)


_BIAS = {"float32": 127, "float64": 0}
_DTYPE = {"float32": "uint8", "float64": "int16"}


def natural(*, seed: int = 0) -> Transformation:
    r"""Rounds each magnitude to one of the two powers of two around it, unbiased, in 9 bits.

    Of :math:`|g_i| = 2^e (1 + f)` the upper one, :math:`2^{e + 1}`, is taken with probability
    :math:`f`: :math:`E[\hat g] = g`, and :math:`E\|\hat g - g\|^2 \leq \|g\|^2 / 8`. As an average
    contraction it may have error feedback, and needs none.

    It works on the bits of the float, and is exact. A denormal number goes to zero or the smallest
    normal one (still unbiased, but with a larger variance), a magnitude over :math:`2^{127}` down
    to that, an infinity stays one, and a NaN becomes one. FP64 leaves take 17 bits a value.

    Args:
        seed: of the random numbers, which are independent on all ranks.

    Returns:
        The transformation: dense leaves or sparse payloads (whose values it takes) to `Powers`.

    Raises:
        TypeError: if the seed is no whole number.
        ValueError: if it is negative.

    References:
        Horvath et al., Natural Compression for Distributed Deep Learning, 2019.

    Example:
        >>> import torch, gradtx as gx
        >>> tx = gx.natural()
        >>> updates, _ = tx.update([torch.tensor([2.0, 0.0, -0.25])], tx.init([torch.zeros(3)]))
        >>> updates[0].decode()
        tensor([ 2.0000,  0.0000, -0.2500])
    """
    check_whole("natural(seed", seed, 0)
    stage = Stage(
        "natural",
        Kind.COMPRESSOR,
        (Argument("seed", seed, 0),),
        takes=frozenset({"dense", "sparse", "padded"}),
        gives="codes",
    )
    return random_compressor(stage, _encode, seed=seed, shared=False)


def _encode(flat: Array, shape: tuple[int, ...], key: Array) -> Powers:
    ops = backends.of(flat)
    dtype = ops.dtype_name(flat)
    exponents = ops.cast(ops.random_exponent(flat, key) + _BIAS[dtype], _DTYPE[dtype])
    return Powers(exponents, ops.pack_bits(ops.signbit(flat)), shape, dtype)
