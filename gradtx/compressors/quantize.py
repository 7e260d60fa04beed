"""`quantize`: 1, 2, 4 or 8 bits a value, and a norm a block."""

from __future__ import annotations

import math
from typing import Any

from gradtx import backends
from gradtx.compressors.compressor import compressor, random_compressor
from gradtx.compressors.levels import Levels, at_random, encode_levels, steps_of
from gradtx.core.arguments import check_bool, check_whole
from gradtx.core.stage import Argument, Kind, Stage
from gradtx.core.transformation import Transformation
from gradtx.core.tree import Array

BITS = (1, 2, 4, 8)
NORMS = ("l2", "max")


def quantize(
    bits: int,
    *,
    block: int = 256,
    stochastic: bool = True,
    norm: str = "max",
    seed: int = 0,
    feedback: bool = True,
) -> Transformation:
    r"""Rounds values to `s` evenly spaced levels on either side of zero, block by block.

    With the norm :math:`N` of a block and :math:`\ell_i` one of the two whole numbers around
    :math:`s \, g_i / N`, :math:`\hat g_i = N \ell_i / s`, where :math:`s` is 127, 7 or 1 for 8, 4
    or 2 bits. With 1 bit, :math:`\hat g_i = \pm N`. Stochastic rounding takes the upper one with
    the fraction as its probability: :math:`E[\hat g] = g`. Otherwise the nearest is taken (and
    error feedback needed).

    The error, at worst and on average, is :math:`E\|\hat g - g\|^2 \leq \omega \|g\|^2` with
    the :math:`\omega` of `error_bound`. Error feedback over it is accepted where
    :math:`\omega < 1`: for blocks of `d` values

    ========= ========================== =====================
    norm      stochastic                 to nearest
    ========= ========================== =====================
    ``"max"`` :math:`d \leq 8 s^2`       always
    ``"l2"``  :math:`d < 4 s^2`          :math:`d < 4 s^2`
    ========= ========================== =====================

    with ``norm="max"`` thus up to blocks of 129,032, 392 and 8 values for 8, 4 and 2 bits;
    with 1 bit never. The largest magnitude as norm is the closer of the two.

    An infinity or a NaN makes all of its block infinite or NaN. Values scaled by a power of two
    give the same codes.

    Args:
        bits: 1, 2, 4 or 8.
        block: how many values share a norm; 32 bits each (64 for FP64 leaves).
        stochastic: whether to round at random, independently on all ranks.
        norm: ``"max"``, the largest magnitude of a block, or ``"l2"``, as in the paper.
        seed: of the random numbers.
        feedback: False goes without error feedback, on purpose, where rounding to nearest needs it.

    Returns:
        The transformation: dense leaves or sparse payloads (whose values it takes) to `Levels`.

    Raises:
        TypeError: if the block or the seed is no whole number.
        ValueError: for other bits, another norm, a block below 1 or a negative seed.

    References:
        Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding,
        2017.

    Example:
        >>> import torch, gradtx as gx
        >>> tx = gx.quantize(2, stochastic=False, feedback=False)
        >>> updates, _ = tx.update([torch.tensor([3.0, -1.8, 0.2])], tx.init([torch.zeros(3)]))
        >>> updates[0].codes.nbytes, updates[0].decode()
        (1, tensor([ 3., -3.,  0.]))
    """
    _check(bits, block, norm, seed)
    check_bool("quantize(stochastic", stochastic)
    check_bool("quantize(feedback", feedback)
    stage = Stage(
        "quantize",
        Kind.COMPRESSOR,
        (
            Argument("bits", bits),
            Argument("block", block, 256),
            Argument("stochastic", stochastic, True),
            Argument("norm", norm, "max"),
            Argument("seed", seed, 0),
            Argument("feedback", feedback, True),
        ),
        takes=frozenset({"dense", "sparse"} | ({"padded"} if bits > 1 else set())),
        gives="codes",
        biased=not stochastic,
        homogeneous=not stochastic,
        contraction=error_bound(bits, block, norm, stochastic=stochastic) < 1.0,
        feedback=feedback,
    )

    def encode(flat: Array, shape: tuple[int, ...], noise: Array | float = 0.5) -> Levels:
        ops = backends.of(flat)
        norm_of = ops.max_magnitude if norm == "max" else ops.euclidean_norm
        norms = norm_of(ops.blocks(flat, block))
        return encode_levels(flat, norms, noise, base=2**bits, block=block, shape=shape)

    if not stochastic:
        return compressor(stage, encode)

    def encode_at_random(flat: Array, shape: tuple[int, ...], key: Array) -> Levels:
        levels = encode(flat, shape, backends.of(flat).uniform(key, flat.shape[0], flat))
        return at_random(levels, key) if bits == 8 else levels

    return random_compressor(stage, encode_at_random, seed=seed, shared=False)


def error_bound(bits: int, block: int, norm: str, *, stochastic: bool) -> float:
    r"""The largest :math:`E\|\hat g - g\|^2 / \|g\|^2` that `quantize` makes.

    Rounding at random a value at a distance `a` from the level below has the variance
    :math:`a (h - a)`, where :math:`h = N / s`: most, beside its square, between zero and the first
    level. With all `d` values equal there (but one, at the norm, for ``"max"``), the most is

    - ``"max"``: :math:`(\sqrt{1 + (d - 1) / s^2} - 1) / 2`;
    - ``"l2"``: :math:`d / 4 s^2` up to :math:`d = 4 s^2`, then :math:`\sqrt d / s - 1` (the paper's
      bound is :math:`\min(d / s^2, \sqrt d / s)`).

    To nearest, the error is at most `a` and at most half a step:

    - ``"max"``: :math:`q / (1 + q)` with :math:`q = (d - 1) / 4 s^2`;
    - ``"l2"``: :math:`d / 4 s^2` up to one; beyond, all may be rounded to zero.

    With 1 bit it is :math:`d - 1`.
    """
    if bits == 1:
        return block - 1.0
    steps = steps_of(2**bits)
    quarter = block / (4 * steps**2)
    if norm == "l2":
        if quarter <= 1.0:
            return quarter
        return math.sqrt(block) / steps - 1.0 if stochastic else 1.0
    if stochastic:
        return (math.sqrt(1 + (block - 1) / steps**2) - 1) / 2
    q = (block - 1) / (4 * steps**2)
    return q / (1 + q)


def _check(bits: Any, block: Any, norm: Any, seed: Any) -> None:
    if isinstance(bits, bool) or not isinstance(bits, int) or bits not in BITS:
        raise ValueError(f"quantize(bits={bits!r}): expected 1, 2, 4 or 8")
    check_whole("quantize(block", block, 1)
    check_whole("quantize(seed", seed, 0)
    if norm not in NORMS:
        raise ValueError(f"quantize(norm={norm!r}): expected 'l2' or 'max'")
