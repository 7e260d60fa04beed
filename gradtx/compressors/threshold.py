"""`threshold`: all magnitudes over a bound, up to a capacity."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from gradtx import backends
from gradtx.compressors.compressor import compressor
from gradtx.compressors.topk import Sparse
from gradtx.core.arguments import check_bool, check_ratio, count
from gradtx.core.payload import Payload, dense, register_payload
from gradtx.core.phases import in_phase
from gradtx.core.schedule import Schedule, scheduled
from gradtx.core.stage import Argument, Kind, Stage
from gradtx.core.transformation import Context, EmptyState, Transformation
from gradtx.core.tree import Array, PyTree


@register_payload
class Padded(Sparse):
    """A `Sparse` of which some values are padding: zeros, at places where nothing is sent."""

    def used(self) -> Array | None:
        """Those that are not zero, if they can be taken apart."""
        apart = not isinstance(self.values, Payload) or self.values.at(self.indices[:0]) is not None
        return dense(self.values) != 0 if apart else None

    def at(self, places: Array) -> Payload | None:
        """Some of the values, where they are."""
        ops = backends.of(places)
        values: Any = self.values
        values = values.at(places) if isinstance(values, Payload) else ops.take(values, places)
        return Padded(values, ops.take(self.indices, places), self.shape, self.dtype)

    def with_values(self, values: Any) -> Payload:
        """Other values at the same places, if a zero among them stays zero.

        Raises:
            TypeError: if it does not: the padding would decode to something.
        """
        if isinstance(values, Payload) and not values.keeps_zeros:
            raise TypeError(f"{self!r} is padded with zeros, which {values!r} does not keep")
        return Padded(values, self.indices, self.shape, self.dtype)


def threshold(
    tau: float | Schedule, *, capacity: float = 0.05, feedback: bool = True
) -> Transformation:
    r"""Sends the values with :math:`|g_i| > \tau`, at most ``max(1, round(capacity * n))`` of `n`.

    If more of them are over the bound, the largest are sent, ties to the lowest index; what does
    not fit stays in the residual. As long as they fit, the error is at most :math:`\tau` a value:
    that is an absolute bound (:math:`\|C(g) - g\|^2 \le n \tau^2`) and no contraction, but with
    error feedback the residual is bounded by it as well.

    How many are over the bound varies by rank and step. Over torch.distributed the ranks first tell
    each other how many they have, and only those travel, in messages of the size that the rank with
    most of them needs; so do values that `cast` has made 16-bit, or `natural` 8-bit. Values that
    other compressors have packed travel with their padding, and so does all under JAX, where
    shapes are static. Whether gathering costs less than a dense all-reduce is decided for the whole
    capacity: choose it a little over the share that is expected to be over the bound.

    Args:
        tau: the bound, a float of at least 0 in the unit of the gradients, or a `Schedule`.
        capacity: the share of values there is room for, a float over 0 and at most 1.
        feedback: False goes without error feedback, on purpose: what is not sent is lost.

    Returns:
        The transformation: dense leaves to `Padded`.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if `tau` is negative or not finite, or the capacity not over 0 and at most 1.

    References:
        Strom, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing, 2015; Sahu et
        al., Rethinking Gradient Sparsification as Total Error Minimization, 2021.

    Example:
        >>> import torch, gradtx as gx
        >>> tx = gx.threshold(1.5, capacity=0.75, feedback=False)
        >>> grads = {"w": torch.tensor([1.0, -4.0, 0.0, 2.0])}
        >>> updates, _ = tx.update(grads, tx.init(grads))
        >>> updates["w"].decode()
        tensor([ 0., -4.,  0.,  2.])
    """
    for value in tau.values if isinstance(tau, Schedule) else (tau,):
        _check_tau(value)
    check_ratio("threshold(capacity", capacity)
    check_bool("threshold(feedback", feedback)
    stage = Stage(
        "threshold",
        Kind.COMPRESSOR,
        (
            Argument("tau", tau),
            Argument("capacity", capacity, 0.05),
            Argument("feedback", feedback, True),
        ),
        stateful=isinstance(tau, Schedule),
        gives="padded",
        biased=True,
        varies=True,
        feedback=feedback,
    )
    if isinstance(tau, Schedule):
        return scheduled(stage, tau, lambda value: _threshold(stage, value, capacity), sized=False)
    return _threshold(stage, tau, capacity)


def _threshold(stage: Stage, tau: float, capacity: float) -> Transformation:
    @in_phase("select")
    def update(
        updates: PyTree, state: EmptyState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, EmptyState]:
        context: Context | None = extra.get("context")
        weight = None if context is None else context.weight
        bound = tau if weight is None else tau * weight
        inner = compressor(stage, partial(_encode, bound, capacity))
        out, _ = inner.step(updates, state, params, **extra)
        return out, state

    return Transformation(stage, None, update)


def _encode(bound: Any, capacity: float, flat: Array, shape: tuple[int, ...]) -> Payload:
    ops = backends.of(flat)
    indices = ops.top_k(flat, count(capacity, flat.shape[-1]))
    values = ops.take(flat, indices)
    # Asked this way round, NaN is sent and not hidden.
    values = ops.where(abs(values) <= bound, ops.zeros_like(values), values)
    return Padded(values, indices, shape, ops.dtype_name(flat))


def _check_tau(tau: Any) -> None:
    if isinstance(tau, bool) or not isinstance(tau, float):
        raise TypeError(f"threshold(tau={tau!r}): expected a float of at least 0, such as 1e-3")
    if not (math.isfinite(tau) and tau >= 0.0):
        raise ValueError(f"threshold(tau={tau!r}): expected a float of at least 0")
