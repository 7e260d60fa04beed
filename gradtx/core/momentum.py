"""`momentum_correction`: error feedback with the momentum inside."""

from __future__ import annotations

import math
import sys
from functools import partial
from typing import Any, NamedTuple

from gradtx import backends
from gradtx.core.combinators import (
    Feedback,
    absent_here,
    compressors_in,
    kept_residuals,
    left_out,
    reweighed,
    run,
    settled,
    settled_residual,
    stages_in,
    weighed,
    zero_residual,
)
from gradtx.core.norms import clip_locally
from gradtx.core.payload import decode_leaves
from gradtx.core.phases import in_phase
from gradtx.core.stage import Argument, Kind, Stage
from gradtx.core.transformation import Context, Settlement, Transformation
from gradtx.core.tree import (
    Array,
    Info,
    PyTree,
    arranged_like,
    flatten,
    leaves_like,
    map_leaves,
    unflatten,
    widen,
)


class MomentumCorrectionState(NamedTuple):
    """The state of `momentum_correction`: trees like the parameters, FP32 (FP64 for FP64 leaves).

    Attributes:
        velocity: the momentum of this rank's gradients.
        residual: the velocities that have not been sent yet, added up.
        inner_states: the states of the compressors.
    """

    velocity: PyTree
    residual: PyTree
    inner_states: tuple[Any, ...]

    @property
    def per_rank(self) -> tuple[str, ...]:
        """The fields that differ between ranks."""
        return ("velocity", "residual")


def momentum_correction(
    m: float, *compressors: Transformation, masking: bool = True, clip: float | None = None
) -> Transformation:
    r"""Accumulates velocities, not gradients, until they are sent (deep gradient compression).

    With the compressors' composition :math:`C`, the velocity :math:`u` and the residual :math:`v`,
    both zero at the start: :math:`u \leftarrow m u + g`, :math:`v \leftarrow v + u`,
    :math:`\hat g = C(v)`, :math:`v \leftarrow v - \hat g`; and, with `masking`, :math:`u` is
    cleared where :math:`\hat g` is not zero, so that an old direction does not carry on once it is
    sent.

    It stands in the place of `error_feedback`, and takes the place of the optimizer's momentum: the
    optimizer is to have none. Leaves that are kept from the compressors are kept from it as well;
    give their parameters a group with momentum in the optimizer. When everything is sent, it is
    momentum SGD without masking and plain SGD with it.

    Called with `m` alone it is a stage for `chain`, and takes hold of the run of compressors
    directly to its left. Called with compressors it is an ordinary combinator.

    Args:
        m: the momentum, a float of at least 0 and less than 1.
        *compressors: what loses information, applied from left to right.
        masking: whether to clear the velocity where it has been sent. Behind a compressor that
            sends something for every value (`sign`, `powersgd`) that leaves no momentum: use False.
        clip: limits the norm of this rank's gradient, over all leaves that arrive here, to
            ``clip / sqrt(N)`` on `N` ranks, before it is accumulated; None does not.

    Returns:
        The transformation. A leaf without a gradient sends nothing and keeps both buffers.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if `m` is not at least 0 and less than 1, or `clip` not over 0.

    References:
        Lin et al., Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed
        Training, 2018.

    Example:
        >>> import torch, gradtx as gx
        >>> tx = gx.momentum_correction(0.5, gx.topk(0.5))
        >>> grads = {"w": torch.tensor([3.0, 1.0])}
        >>> sent, state = tx.update(grads, tx.init(grads))
        >>> sent["w"].decode(), state.velocity["w"], state.residual["w"]
        (tensor([3., 0.]), tensor([0., 1.]), tensor([0., 1.]))
        >>> sent, state = tx.update({"w": torch.zeros(2)}, state)
        >>> sent["w"].decode()
        tensor([0.0000, 1.5000])
    """
    _check(m, masking, clip)
    arguments = (
        Argument("m", m),
        Argument("masking", masking, True),
        Argument("clip", clip, None),
    )
    parts = compressors_in("momentum_correction", compressors)
    stage = Stage(
        "momentum_correction",
        Kind.FEEDBACK,
        arguments,
        stateful=True,
        whole=clip is not None,
        over=stages_in(parts) or None,
    )
    if not compressors:
        return Feedback(
            stage,
            partial(momentum_correction, m, masking=masking, clip=clip),
            "write chain(topk(0.01), momentum_correction(0.9)), or "
            "momentum_correction(0.9, topk(0.01))",
        )

    def init(params: PyTree, info: Info | None) -> MomentumCorrectionState:
        return MomentumCorrectionState(
            map_leaves(zero_residual, params),
            map_leaves(zero_residual, params),
            tuple(part.setup(params, info) for part in parts),
        )

    @in_phase("feedback")
    def update(
        updates: PyTree, state: MomentumCorrectionState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, MomentumCorrectionState]:
        context: Context | None = extra.get("context")
        leaves, treespec = flatten(updates)
        absent = absent_here(leaves, context)
        velocities = leaves_like(state.velocity, updates)
        residuals = leaves_like(state.residual, updates)
        if clip is None:
            gradients = [leaf if leaf is None else widen(leaf) for leaf in leaves]
        else:
            weight = 1 if context is None or context.weight is None else context.weight
            # Of nothing, which weighs nothing, any bound will do.
            gradients = clip_locally(leaves, clip * (weight + (weight == 0)), context)
        present = [i for i, skip in enumerate(absent) if not skip]
        to_send = list(leaves)
        for i in present:
            velocities[i] = m * weighed(velocities[i], context) + gradients[i]
            to_send[i] = weighed(residuals[i], context) + velocities[i]
        payloads, inner_states = run(
            parts, unflatten(treespec, to_send), state.inner_states, params, extra
        )
        parts_sent = flatten(payloads)[0]
        sent = decode_leaves(list(parts_sent))
        left = [
            None if skip else left_out(x, part)
            for x, part, skip in zip(to_send, sent, absent, strict=True)
        ]
        residuals = kept_residuals(residuals, left, leaves, parts_sent, absent, context)
        if masking:
            for i in present:
                velocities[i] = _unsent(velocities[i], sent[i])
        velocity = arranged_like(unflatten(treespec, velocities), state.velocity)
        residual = arranged_like(unflatten(treespec, residuals), state.residual)
        return payloads, MomentumCorrectionState(velocity, residual, inner_states)

    @in_phase("feedback")
    def settle(
        before: MomentumCorrectionState, state: MomentumCorrectionState, settlement: Settlement
    ) -> MomentumCorrectionState:
        old, treespec = flatten(before.velocity)
        decayed = [None if x is None else m * x for x in old]
        new = flatten(state.velocity)[0]
        velocities = reweighed(decayed, new, settlement)
        if masking:
            velocities = [
                x if x is None or x is y else _unsent(x, y == 0)
                for x, y in zip(velocities, new, strict=True)
            ]
            for i, payload in settlement.payloads.items():
                velocities[i] = _unsent(velocities[i], payload.decode())
        # The residual has had the whole velocity added, what was left of the old one included.
        kept = [
            None if x is None else x + y
            for x, y in zip(flatten(before.residual)[0], decayed, strict=True)
        ]
        return MomentumCorrectionState(
            unflatten(treespec, velocities),
            settled_residual(unflatten(treespec, kept), state.residual, settlement),
            tuple(settled(parts, before.inner_states, state.inner_states, settlement)),
        )

    def code(local: bool) -> str:
        inner = [repr(m), *(part.code(local=local) for part in parts)]
        named = [str(argument) for argument in arguments[1:] if argument.printed]
        return f"gx.momentum_correction({', '.join((*inner, *named))})"

    return Transformation(
        stage,
        init,
        update,
        stages=(*(s for part in parts for s in part.stages), stage),
        parts=parts,
        settle=settle,
        code=code,
    )


def _check(m: Any, masking: Any, clip: Any) -> None:
    name = "momentum_correction"
    if isinstance(m, bool) or not isinstance(m, float):
        raise TypeError(
            f"{name}(m={m!r}): expected a float of at least 0 and less than 1, such as 0.9"
        )
    if not 0.0 <= m < 1.0:
        raise ValueError(f"{name}(m={m!r}): expected a float of at least 0 and less than 1")
    if not isinstance(masking, bool):
        raise TypeError(f"{name}(masking={masking!r}): expected True or False")
    if clip is None:
        return
    if isinstance(clip, bool) or not isinstance(clip, (int, float)):
        raise TypeError(f"{name}(clip={clip!r}): expected a number over 0, or None")
    if not 0 < clip < math.inf or clip > sys.float_info.max:
        raise ValueError(f"{name}(clip={clip!r}): expected a number over 0, or None")


def _unsent(velocity: Array, sent: Array) -> Array:
    """The velocity, zero where something has been sent."""
    ops = backends.of(velocity)
    sent = ops.reshape(sent, tuple(velocity.shape))
    return ops.where(sent == 0, velocity, 0.0)
