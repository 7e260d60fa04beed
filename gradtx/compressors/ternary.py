"""`ternary`: minus one, zero or one times the largest magnitude."""

from __future__ import annotations

import math
import sys
from typing import Any

from gradtx import backends
from gradtx.compressors.compressor import random_compressor
from gradtx.compressors.levels import Levels, encode_levels
from gradtx.core.arguments import check_bool, check_whole
from gradtx.core.stage import Argument, Kind, Stage
from gradtx.core.transformation import Transformation
from gradtx.core.tree import Array


def ternary(*, clip: float | None = None, seed: int = 0, feedback: bool = True) -> Transformation:
    r"""Sends :math:`\hat g_i = s \, \mathrm{sign}(g_i) \, b_i`, :math:`P(b_i = 1) = |g_i| / s`.

    The scale :math:`s` is the largest magnitude of the leaf: :math:`E[\hat g] = g`, with the
    variance :math:`\sum_i |g_i| (s - |g_i|)`. That is no contraction: it takes no error feedback.
    Five values fit a byte. An infinity or a NaN makes all of its leaf infinite or NaN.

    Args:
        clip: limits magnitudes to so many standard deviations, about zero (the root mean square,
            so that one value alone has one): less variance, but wrong on average, which only
            ``feedback=False`` allows. None does not clip.
        seed: of the random numbers, which are independent on all ranks.
        feedback: False goes without error feedback, on purpose, where clipping needs it.

    Returns:
        The transformation: dense leaves or sparse payloads (whose values it takes) to `Levels`.

    Raises:
        TypeError: if the seed is no whole number, or `clip` no number.
        ValueError: if the seed is negative, or `clip` not finite and over 0.

    References:
        Wen et al., TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep
        Learning, 2017.

    Example:
        >>> import torch, gradtx as gx
        >>> tx = gx.ternary()
        >>> updates, _ = tx.update([torch.tensor([2.0, 0.0, -2.0])], tx.init([torch.zeros(3)]))
        >>> updates[0].codes.nbytes, updates[0].decode()
        (1, tensor([ 2.,  0., -2.]))
    """
    check_whole("ternary(seed", seed, 0)
    _check_clip(clip)
    check_bool("ternary(feedback", feedback)
    stage = Stage(
        "ternary",
        Kind.COMPRESSOR,
        (
            Argument("clip", clip, None),
            Argument("seed", seed, 0),
            Argument("feedback", feedback, True),
        ),
        takes=frozenset({"dense", "sparse", "padded"}),
        gives="codes",
        biased=clip is not None,
        contraction=False,
        feedback=feedback,
    )

    def encode(flat: Array, shape: tuple[int, ...], key: Array) -> Levels:
        ops, n = backends.of(flat), flat.shape[0]
        block = max(n, 1)
        rows = ops.blocks(flat, block)
        scale = ops.max_magnitude(rows)
        if clip is not None:
            limit = ops.euclidean_norm(rows) * (clip / math.sqrt(block))
            scale = ops.where(limit < scale, limit, scale)
        noise = ops.uniform(key, n, flat)
        return encode_levels(flat, scale, noise, base=3, block=block, shape=shape)

    return random_compressor(stage, encode, seed=seed, shared=False)


def _check_clip(clip: Any) -> None:
    if clip is None:
        return
    if isinstance(clip, bool) or not isinstance(clip, int | float):
        raise TypeError(f"ternary(clip={clip!r}): expected a number over 0, such as 2.5, or None")
    if not 0 < clip < math.inf or clip > sys.float_info.max:
        raise ValueError(f"ternary(clip={clip!r}): expected a finite number over 0, or None")
