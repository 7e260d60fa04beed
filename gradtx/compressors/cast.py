"""`cast`: 16 or 8 bits a value, scaled by powers of two."""

from __future__ import annotations

from functools import partial

from gradtx.compressors.compressor import compressor
from gradtx.core.arguments import check_bool
from gradtx.core.cast import FORMATS, encode_cast, encode_casts
from gradtx.core.stage import Argument, Kind, Stage
from gradtx.core.transformation import Transformation


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
    return compressor(
        stage,
        lambda flat, shape: encode_cast(flat, shape, dtype),
        encode_all=(partial(encode_casts, dtype=dtype),),
    )
