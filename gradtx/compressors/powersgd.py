"""`powersgd`: matrices as products of two narrow ones, found by one step of a power iteration."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from gradtx import backends
from gradtx.compressors.compressor import check_form
from gradtx.core.arguments import check_bool, check_whole
from gradtx.core.payload import Payload, register_payload
from gradtx.core.phases import in_phase
from gradtx.core.stage import Argument, Kind, Stage
from gradtx.core.transformation import Context, Settlement, Transformation
from gradtx.core.tree import (
    Array,
    Info,
    PyTree,
    flatten,
    flatten_with_paths,
    unflatten,
    widen,
    without_tables,
)


@register_payload
class LowRank(Payload):
    """A matrix as the product of two narrow ones.

    Attributes:
        left: ``[n, r]``, orthonormal columns.
        right: ``[m, r]``.
    """

    children = ("left", "right")
    left: Array
    right: Array
    _product: Array = None

    @in_phase("decode")
    def decode(self) -> Array:
        """The product, flat."""
        ops = backends.of(self.left)
        if self._product is not None:
            return self._product
        product = ops.ravel(self.left @ self.right.T)
        if not ops.TRACES:
            self._product = product  # Wanted twice: for the result, and for what is left.
        return product


@register_payload
class RowRound(Payload):
    """Before the first round: all ranks are to get the sum of :math:`P = M Q`.

    Attributes:
        matrix: ``[n, m]``, this rank's :math:`M`.
        guess: ``[m, r]``, orthonormal columns :math:`Q`, the same on all ranks.
    """

    children = ("matrix", "guess")
    summed = True
    late = True
    matrix: Array
    guess: Array

    def decode(self) -> Array:
        """Zeros: nothing has been sent yet."""
        return _nothing_yet(self.matrix)

    def subtracted_from(self, flat: Array) -> Array:
        """All of it."""
        return flat

    @in_phase("select")
    def summand(self) -> Array:
        """:math:`M Q`."""
        return backends.of(self.matrix).ravel(self.matrix @ self.guess)

    def receive(self, total: Array, size: int) -> Payload:
        """What the second round sends."""
        return self.receive_all([self], [total], size)[0]

    @classmethod
    @in_phase("select")
    def receive_all(
        cls, payloads: Sequence[Payload], totals: Sequence[Any], size: int
    ) -> list[Payload]:
        """The columns of the sums made orthonormal, matrices of one shape together."""
        rounds = [payload for payload in payloads if isinstance(payload, RowRound)]
        sums = [
            backends.of(total).reshape(total, (p.matrix.shape[0], p.guess.shape[1]))
            for p, total in zip(rounds, totals, strict=True)
        ]
        return [
            ColumnRound(p.matrix, left, p.shape, p.dtype)
            for p, left in zip(rounds, orthonormal_each(sums), strict=True)
        ]


@register_payload
class ColumnRound(Payload):
    r"""Before the second round: all ranks are to get the sum of :math:`M^\top \hat P`.

    Attributes:
        matrix: ``[n, m]``, this rank's :math:`M`.
        left: ``[n, r]``, orthonormal columns :math:`\hat P`, the same on all ranks.
    """

    children = ("matrix", "left")
    summed = True
    late = True
    matrix: Array
    left: Array

    def decode(self) -> Array:
        """Zeros: nothing is agreed yet."""
        return _nothing_yet(self.matrix)

    def subtracted_from(self, flat: Array) -> Array:
        """All of it."""
        return flat

    @in_phase("select")
    def summand(self) -> Array:
        r""":math:`M^\top \hat P`."""
        return backends.of(self.matrix).ravel(self.matrix.T @ self.left)

    def receive(self, total: Array, size: int) -> Payload:
        """The mean over ranks."""
        shape = (self.matrix.shape[1], self.left.shape[1])
        right = backends.of(total).reshape(total, shape) / size
        return LowRank(self.left, right, self.shape, self.dtype)


class PowersgdState(NamedTuple):
    """The state of `powersgd`.

    Attributes:
        count: 0-d int32: steps so far.
        guess: a tree like the parameters: ``[m, r]`` with orthonormal columns, FP32 (FP64 for FP64
            leaves), the same on all ranks; None for leaves that stay dense, and without warm start.
    """

    count: Array
    guess: PyTree


def powersgd(
    rank: int,
    *,
    warm_start: bool = True,
    seed: int = 0,
    feedback: bool = True,
    min_compression: float = 1.0,
) -> Transformation:
    r"""Sends matrices as :math:`\hat P Q^\top` of a given rank, in two rounds that are summed.

    With the matrices :math:`M_i` of :math:`N` ranks and a guess :math:`Q` that all share:
    :math:`\hat P = \mathrm{orthonormal}(\sum_i M_i Q)`, then
    :math:`\hat M = \hat P \big( \frac{1}{N} \sum_i M_i^\top \hat P \big)^\top`. The result is the
    mean matrix, projected to the columns of :math:`\hat P`: it depends on nothing but the mean, is
    never larger, and is the mean itself, up to rounding, if that has no higher rank than `rank`
    (and no row direction of it is orthogonal to the guess). What is left out is known only after
    the exchange, and the residuals of the ranks have :math:`\bar M - \hat M` as their mean.

    A leaf of shape ``[n, ...]`` is taken as the matrix ``[n, m]``: a convolution kernel as (out, in
    times height times width). Leaves with fewer than two dimensions, and those that would not
    become smaller, are exchanged as they are, exactly.

    Args:
        rank: of the product, 1 or more; 1 to 4 are usual.
        warm_start: the next guess is this step's :math:`Q`, its columns made orthonormal, so that
            over the steps the iteration converges to the largest singular vectors. Where it has
            fewer independent columns, random ones fill the place. False draws a new one each step.
        seed: of the guesses; the same on all ranks.
        feedback: False goes without error feedback, on purpose: what is left out is lost.
        min_compression: a matrix is compressed if the two narrow ones, ``rank * (n + m)`` values,
            are smaller by more than this factor.

    Returns:
        The transformation: dense leaves to payloads, or, in a chain without exchange, to `LowRank`.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if the rank is less than 1, the seed negative, or `min_compression` less than 1.

    References:
        Vogels et al., PowerSGD: Practical Low-Rank Gradient Compression for Distributed
        Optimization, 2019.

    Example:
        >>> import torch, gradtx as gx
        >>> tx = gx.chain(gx.powersgd(1), gx.ef(), gx.allreduce())
        >>> grads = {"w": torch.tensor([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [0.0, 0.0, 0.0]])}
        >>> updates, _ = tx.update(grads, tx.init(grads))
        >>> torch.allclose(updates["w"], grads["w"])
        True
    """
    check_whole("powersgd(rank", rank, 1)
    check_bool("powersgd(warm_start", warm_start)
    check_whole("powersgd(seed", seed, 0)
    check_bool("powersgd(feedback", feedback)
    if isinstance(min_compression, bool) or not isinstance(min_compression, (int, float)):
        raise TypeError(f"powersgd(min_compression={min_compression!r}): expected a number")
    if not min_compression >= 1:
        raise ValueError(f"powersgd(min_compression={min_compression!r}): expected at least 1")
    stage = Stage(
        "powersgd",
        Kind.COMPRESSOR,
        (
            Argument("rank", rank),
            Argument("warm_start", warm_start, True),
            Argument("seed", seed, 0),
            Argument("feedback", feedback, True),
            Argument("min_compression", min_compression, 1.0),
        ),
        stateful=True,
        gives="lowrank",
        biased=True,
        feedback=feedback,
    )

    def pays(leaf: Any) -> bool:
        if leaf is None or len(leaf.shape) < 2:
            return False
        n, m = matrix_shape(leaf)
        return rank * (n + m) * min_compression < n * m

    def random(path: str, count: Array, leaf: Array) -> Array:
        ops, (_, m) = backends.of(leaf), matrix_shape(leaf)
        return random_columns(path, seed, count, m, rank, ops.dtype_name(leaf), leaf)

    def init(params: PyTree, info: Info | None) -> PowersgdState:
        paths, leaves, treespec = flatten_with_paths(without_tables(params))
        count = backends.find(leaves).counter()
        places = [i for i, leaf in enumerate(leaves) if warm_start and pays(leaf)]
        drawn = [random(paths[i], count, widen(leaves[i])) for i in places]
        guesses: list[Any] = [None] * len(leaves)
        for i, guess in zip(places, orthonormal_each(drawn), strict=True):
            guesses[i] = guess
        return PowersgdState(count, unflatten(treespec, guesses))

    @in_phase("select")
    def update(
        updates: PyTree, state: PowersgdState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, PowersgdState]:
        paths, leaves, treespec = flatten_with_paths(updates)
        check_form(stage, leaves)
        places = [i for i, leaf in enumerate(leaves) if pays(leaf)]
        wide = [widen(leaves[i]) for i in places]
        if warm_start:
            warm = flatten(state.guess)[0]
            guesses = [warm[i] for i in places]
        else:
            drawn = (random(paths[i], state.count, x) for i, x in zip(places, wide, strict=True))
            guesses = orthonormal_each(list(drawn))
        payloads: dict[int, Payload] = {}
        for i, leaf, guess in zip(places, wide, guesses, strict=True):
            ops = backends.of(leaf)
            matrix = ops.reshape(leaf, matrix_shape(leaf))
            payloads[i] = RowRound(matrix, guess, tuple(leaf.shape), ops.dtype_name(leaf))
        state = PowersgdState(state.count + 1, state.guess)
        context: Context | None = extra.get("context")
        if context is None or context.alone:
            payloads = dict(zip(places, _alone(list(payloads.values())), strict=True))
            state = settle(state, state, Settlement(payloads))
        out = [payloads.get(i, leaf) for i, leaf in enumerate(leaves)]
        return unflatten(treespec, out), state

    @in_phase("select")
    def settle(
        before: PowersgdState, state: PowersgdState, settlement: Settlement
    ) -> PowersgdState:
        paths, guesses, treespec = flatten_with_paths(state.guess)
        found = {
            i: p for i, p in settlement.payloads.items() if isinstance(p, LowRank) and warm_start
        }
        next_guesses = []
        for i, payload in found.items():
            m, _ = payload.right.shape
            noise = random_columns(
                paths[i], seed, state.count, m, rank, payload.dtype, payload.right
            )
            next_guesses.append(_unit(payload.right) + _NOISE * noise)
        for i, guess in zip(found, orthonormal_each(next_guesses), strict=True):
            guesses[i] = guess
        return PowersgdState(state.count, unflatten(treespec, guesses))

    return Transformation(stage, init, update, settle=settle)


# What a direction that the last step did not see weighs in the next guess. Only the guess has it:
# the result is a projection of the mean whatever the guess.
_NOISE = 1e-6


def matrix_shape(leaf: Array) -> tuple[int, int]:
    """Rows and columns of a leaf as a matrix: the first dimension, and all others together."""
    rest = 1
    for length in leaf.shape[1:]:
        rest *= length
    return leaf.shape[0], rest


def random_columns(
    path: str, seed: int, count: Array, m: int, rank: int, dtype: str, like: Array
) -> Array:
    """``[m, rank]`` random numbers, each column of length one or so; the same on all ranks."""
    ops = backends.of(like)
    key = ops.random_key(seed, zlib.crc32(f"powersgd {path}".encode()), 0, count)
    centred = ops.uniform(key, m * rank, like) - 0.5
    return ops.reshape(ops.cast(centred, dtype) * (12.0 / max(m, 1)) ** 0.5, (m, rank))


def orthonormal_each(matrices: Sequence[Array]) -> list[Array]:
    """Each matrix with orthonormal columns of the same span; those of one shape in one call."""
    shapes: dict[Any, list[int]] = {}
    for i, matrix in enumerate(matrices):
        key = tuple(matrix.shape), backends.of(matrix).dtype_name(matrix)
        shapes.setdefault(key, []).append(i)
    out: list[Any] = [None] * len(matrices)
    for places in shapes.values():
        ops = backends.of(matrices[places[0]])
        batch = ops.orthonormal(ops.stack([matrices[i] for i in places]))
        for number, i in enumerate(places):
            out[i] = batch[number]
    return out


def _unit(x: Array) -> Array:
    """`x` divided by its norm; zeros stay zeros."""
    ops = backends.of(x)
    norm = ops.total_norm([x])
    return ops.ratio(x, ops.where(norm > 0, norm, 1.0))


def _nothing_yet(matrix: Array) -> Array:
    ops = backends.of(matrix)
    return ops.ravel(ops.zeros_like(matrix))


def _alone(payloads: list[Payload]) -> list[Payload]:
    """Both rounds with no other rank."""
    for cls in (RowRound, ColumnRound):
        sums = [payload.summand() for payload in payloads]
        payloads = cls.receive_all(payloads, sums, 1)
    return payloads
