"""`random_k`: values at random places, the same on all ranks, so that no index is sent."""

from __future__ import annotations

from typing import Any

from gradtx import backends
from gradtx.compressors.compressor import random_compressor
from gradtx.compressors.topk import VALUES, Sparse
from gradtx.core.arguments import check_bool, check_ratio, check_whole, count
from gradtx.core.cast import encode_cast
from gradtx.core.payload import Payload, register_payload
from gradtx.core.schedule import Schedule, scheduled
from gradtx.core.stage import Argument, Kind, Stage
from gradtx.core.transformation import Transformation
from gradtx.core.tree import Array


@register_payload
class Shared(Payload):
    """Some of a leaf's values, at places that all ranks know.

    Attributes:
        values: ``[k]``: what the ranks sum.
        indices: ``[k]``, whole numbers, strictly increasing; not sent.
    """

    children = ("values", "indices")
    codecs = {"indices": "local"}  # noqa: RUF012
    summed = True
    values: Array
    indices: Array

    def decode(self) -> Array:
        """The values at their places, zeros elsewhere."""
        return backends.of(self.values).scatter(self.values, self.indices, self.size)

    def summand(self) -> Array:
        """The values."""
        return self.values

    def receive(self, total: Array, size: int) -> Payload:
        """The mean of the values, at their places."""
        return Sparse(total / size, self.indices, self.shape, self.dtype)


@register_payload
class Placed(Sparse):
    """A `Sparse` at places that all ranks know: they are not sent."""

    codecs = {"indices": "local"}  # noqa: RUF012

    def with_values(self, values: Any) -> Payload:
        """Refuses: there are none left to compress."""
        raise TypeError(f"{self!r} has no values left to compress")

    def decoded_values(self, values: Any) -> Payload:
        """The same at these places."""
        return Placed(values, self.indices, self.shape, self.dtype)


def random_k(
    ratio: float | Schedule,
    *,
    unbiased: bool = False,
    seed: int = 0,
    values: str = "float32",
    feedback: bool = True,
) -> Transformation:
    r"""Sends ``k = max(1, round(ratio * n))`` of `n` values, at places drawn anew in each step.

    All ranks draw the same places, without replacement, so the values are summed as they are: 32
    bits a value that is sent, no index, and through an all-reduce, however many ranks there are. As
    it is, it is biased, and a contraction in expectation with :math:`\delta = k / n`; it needs
    error feedback. With ``unbiased=True`` the values are multiplied by :math:`n / k`: right on
    average, with the variance :math:`(n / k - 1) \|g\|^2`, but no contraction, and so without
    feedback.

    In 16 bits the values cannot be summed on the way without overflow or more rounding, and are
    gathered: fewer bytes than a sum in 32 bits on up to three ranks.

    The places depend on the seed, the leaf's path and the number of steps in the state alone;
    torch's global generator is neither read nor moved.

    Args:
        ratio: the share of values that is sent, a float over 0 and at most 1, or a `Schedule`.
        unbiased: whether to multiply by :math:`n / k`.
        seed: of the random places; the same on all ranks.
        values: what the values travel in: ``"float32"`` (FP64 for FP64 leaves), or ``"float16"`` or
            ``"bfloat16"``, scaled as by `cast`; what that rounding leaves out is fed back too.
        feedback: False goes without error feedback, on purpose: what is not sent is lost.

    Returns:
        The transformation: dense leaves to `Shared`, or, in 16 bits, to `Placed`.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if the ratio is not over 0 and at most 1, the seed is negative, the values'
            dtype is unknown, or 16-bit values are asked to be unbiased: rounding is not.

    References:
        Stich et al., Sparsified SGD with Memory, 2018; Wangni et al., Gradient Sparsification for
        Communication-Efficient Distributed Optimization, 2018.

    Example:
        >>> import torch, gradtx as gx
        >>> tx = gx.random_k(0.5, unbiased=True)
        >>> grads = {"w": torch.tensor([1.0, 2.0, 3.0, 4.0])}
        >>> updates, _ = tx.update(grads, tx.init(grads))
        >>> updates["w"].values / grads["w"][updates["w"].indices]
        tensor([2., 2.])
    """
    for value in ratio.values if isinstance(ratio, Schedule) else (ratio,):
        check_ratio("random_k(ratio", value)
    check_bool("random_k(unbiased", unbiased)
    check_whole("random_k(seed", seed, 0)
    check_bool("random_k(feedback", feedback)
    if values not in VALUES:
        raise ValueError(f"random_k(values={values!r}): expected {', '.join(map(repr, VALUES))}")
    if unbiased and values != "float32":
        raise ValueError(
            f"random_k(unbiased=True, values={values!r}): rounding to nearest is not unbiased"
        )
    stage = Stage(
        "random_k",
        Kind.COMPRESSOR,
        (
            Argument("ratio", ratio),
            Argument("unbiased", unbiased, False),
            Argument("seed", seed, 0),
            Argument("values", values, "float32"),
            Argument("feedback", feedback, True),
        ),
        stateful=True,
        gives="shared" if values == "float32" else "codes",
        biased=not unbiased,
        contraction=not unbiased,
        feedback=feedback,
    )
    if isinstance(ratio, Schedule):
        return scheduled(
            stage, ratio, lambda value: _random_k(stage, value, unbiased, seed, values)
        )
    return _random_k(stage, ratio, unbiased, seed, values)


def _random_k(stage: Stage, ratio: float, unbiased: bool, seed: int, dtype: str) -> Transformation:
    def encode(flat: Array, shape: tuple[int, ...], key: Array) -> Payload:
        ops, n = backends.of(flat), flat.shape[-1]
        k = count(ratio, n)
        indices = ops.random_subset(key, n, k, flat)
        values = ops.take(flat, indices)
        if unbiased and k:
            values = values * (n / k)
        if dtype != "float32":
            codes = encode_cast(values, tuple(values.shape), dtype)
            return Placed(codes, indices, shape, ops.dtype_name(flat))
        return Shared(values, indices, shape, ops.dtype_name(flat))

    return random_compressor(stage, encode, seed=seed, shared=True)
