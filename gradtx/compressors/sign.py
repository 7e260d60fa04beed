"""`sign`: one bit a value."""

from __future__ import annotations

from gradtx import backends
from gradtx.compressors.compressor import compressor
from gradtx.core.payload import Payload, register_payload
from gradtx.core.stage import Argument, Kind, Stage, check_bool
from gradtx.core.transformation import Transformation
from gradtx.core.tree import Array


@register_payload
class Signs(Payload):
    """One bit a value, and one scale.

    Attributes:
        bits: uint8 ``[ceil(n / 8)]``: a set bit is a value of at least zero, lowest bit first.
        scale: ``[1]``: the mean magnitude.
    """

    children = ("bits", "scale")
    form = "signs"
    bits: Array
    scale: Array

    def decode(self) -> Array:
        """The scale, with the signs."""
        ops = backends.of(self.scale)
        return ops.where(ops.unpack_bits(self.bits, self.size), self.scale, -self.scale)


def sign_quantize(*, feedback: bool = True) -> Transformation:
    r"""One bit a value and one scale a leaf: :math:`\hat g_i = \pm \frac{1}{n} \sum_j |g_j|`.

    The error is :math:`\|g\|_2^2 - \|g\|_1^2 / n`: it is a contraction, and needs error feedback.
    Zero counts as positive; a leaf of zeros has the scale zero and decodes to zeros.

    Args:
        feedback: False goes without error feedback, on purpose: the result is biased.

    Returns:
        The transformation: dense leaves or sparse payloads (whose values it takes) to `Signs`.

    References:
        Seide et al., 1-Bit Stochastic Gradient Descent, 2014; Karimireddy et al., Error Feedback
        Fixes SignSGD, 2019.

    Example:
        >>> import torch, gradtx as gx
        >>> tx = gx.sign(feedback=False)
        >>> updates, _ = tx.update([torch.tensor([3.0, -1.0])], tx.init([torch.zeros(2)]))
        >>> updates[0].decode()
        tensor([ 2., -2.])
    """
    check_bool("sign(feedback=...)", feedback)
    stage = Stage(
        "sign",
        Kind.COMPRESSOR,
        (Argument("feedback", feedback, True),),
        takes=frozenset({"dense", "sparse"}),
        gives="signs",
        biased=True,
        feedback=feedback,
    )
    return compressor(stage, _encode)


def _encode(flat: Array, shape: tuple[int, ...]) -> Payload:
    ops = backends.of(flat)
    scale = ops.reshape(ops.mean_magnitude(flat), (1,))
    return Signs(ops.pack_bits(flat >= 0), scale, shape, ops.dtype_name(flat))


sign = sign_quantize
