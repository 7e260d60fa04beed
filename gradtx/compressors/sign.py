"""`sign`: one bit a value."""

from __future__ import annotations

from typing import Any

from gradtx import backends
from gradtx.compressors.compressor import compressor
from gradtx.core.arguments import check_bool
from gradtx.core.payload import Payload, register_payload
from gradtx.core.stage import Argument, Kind, Stage
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
    bits: Array
    scale: Array

    def decode(self) -> Array:
        """The scale, with the signs."""
        return backends.of(self.scale).signed(self.bits, self.size, self.scale)

    def add_to(self, total: Array) -> Array:
        """The total with the values added, in place where that can be."""
        ops = backends.of(total)
        return ops.add_in_place(total, ops.cast(self.decode(), ops.dtype_name(total)))

    def subtracted_from(self, flat: Array) -> Array:
        """What is left, in place where that can be."""
        ops = backends.of(flat)
        [flat] = ops.unshared([flat], [self.scale])
        return ops.add_in_place(flat, -ops.cast(self.decode(), ops.dtype_name(flat)))


@register_payload
class Votes(Payload):
    """One bit a value: a vote for its sign. The result is that of most ranks.

    Attributes:
        bits: uint8 ``[ceil(n / 8)]``: a set bit is a value of at least zero, lowest bit first.
        unit: ``[1]``: one; not sent. A gate makes zero of it, and so of the votes.
    """

    children = ("bits", "unit")
    codecs = {"unit": "local"}  # noqa: RUF012
    bits: Array
    unit: Array

    def decode(self) -> Array:
        """1 and -1."""
        return backends.of(self.bits).signed(self.bits, self.size, self.unit)

    def combined(self, total: Array) -> Array:
        """The sign of the sum of the votes: 1, -1, or 0 for a tie."""
        ops = backends.of(total)
        dtype = ops.dtype_name(total)
        return ops.cast(total > 0, dtype) - ops.cast(total < 0, dtype)


def sign_quantize(
    *, scale: str = "l1", majority_vote: bool = False, feedback: bool = True
) -> Transformation:
    r"""One bit a value and one scale a leaf: :math:`\hat g_i = \pm \frac{1}{n} \sum_j |g_j|`.

    The error is :math:`\|g\|_2^2 - \|g\|_1^2 / n`: it is a contraction, and needs error feedback.
    Zero counts as positive; a leaf of zeros has the scale zero and decodes to zeros.

    With a majority vote there is no scale: the exchange hands on the sign that more ranks have, 1
    or -1, and 0 where as many have one as the other. Zero votes for 1; a rank without a gradient
    for the leaf does not vote. The result is 1, -1 or 0 whatever the exchange's `op`. It is not
    linear over the ranks, so there can be no error feedback over it.

    Args:
        scale: ``"l1"``, the mean magnitude. The root of the mean square, which some systems take,
            is larger, and no contraction: the error may exceed the gradient.
        majority_vote: whether the exchange hands on the sign of most ranks.
        feedback: False goes without error feedback, on purpose: the result is biased.

    Returns:
        The transformation: dense leaves or sparse payloads (whose values it takes) to `Signs`;
        dense leaves to `Votes` with a majority vote.

    Raises:
        TypeError: if `majority_vote` or `feedback` is no bool.
        ValueError: for another `scale`.

    References:
        Seide et al., 1-Bit Stochastic Gradient Descent, 2014; Karimireddy et al., Error Feedback
        Fixes SignSGD, 2019; Bernstein et al., signSGD with Majority Vote, 2019.

    Example:
        >>> import torch, gradtx as gx
        >>> tx = gx.sign(feedback=False)
        >>> updates, _ = tx.update([torch.tensor([3.0, -1.0])], tx.init([torch.zeros(2)]))
        >>> updates[0].decode()
        tensor([ 2., -2.])
    """
    _check_scale(scale)
    check_bool("sign(majority_vote", majority_vote)
    check_bool("sign(feedback", feedback)
    stage = Stage(
        "sign",
        Kind.COMPRESSOR,
        (
            Argument("scale", scale, "l1"),
            Argument("majority_vote", majority_vote, False),
            Argument("feedback", feedback, True),
        ),
        # A vote over values at places that differ between ranks means nothing.
        takes=frozenset({"dense"} if majority_vote else {"dense", "sparse"}),
        gives="votes" if majority_vote else "signs",
        # A vote is wrong on average as well, but by design: no feedback can make up for it.
        biased=not majority_vote,
        homogeneous=not majority_vote,
        contraction=not majority_vote,
        feedback=feedback,
    )
    return compressor(stage, _vote if majority_vote else _encode)


def _check_scale(scale: Any) -> None:
    if scale == "rms":
        raise ValueError(
            "sign(scale='rms'): the root mean square is no contraction, the error may exceed the "
            "gradient and the residual grows without bound; write sign(), which takes the mean "
            "magnitude"
        )
    if scale != "l1":
        raise ValueError(f"sign(scale={scale!r}): expected 'l1', the mean magnitude")


def _encode(flat: Array, shape: tuple[int, ...]) -> Payload:
    ops = backends.of(flat)
    scale = ops.reshape(ops.mean_magnitude(flat), (1,))
    return Signs(ops.pack_bits(flat >= 0), scale, shape, ops.dtype_name(flat))


def _vote(flat: Array, shape: tuple[int, ...]) -> Payload:
    ops = backends.of(flat)
    dtype = ops.dtype_name(flat)
    return Votes(ops.pack_bits(flat >= 0), ops.zeros((1,), dtype, flat) + 1, shape, dtype)


sign = sign_quantize
