"""What a chain has to be for a training loop, however its gradients come to it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from gradtx.core.chain import Chain
from gradtx.core.errors import ChainOrderError, RankMismatchError
from gradtx.core.row_sparse import LOOKUPS
from gradtx.core.rules import NO_EXCHANGE, PAYLOAD_AT_END, check
from gradtx.core.stage import Kind, Stage
from gradtx.core.transformation import Context
from gradtx.core.tree import Layout
from gradtx.exchange.grid import agree_on_grid
from gradtx.exchange.group import Group
from gradtx.transforms.unscale import unscale


def check_chain(tx: Chain, group: Group, by: str) -> None:
    """Refuses a chain that does not give all ranks the same dense gradients.

    Args:
        tx: the chain.
        group: the ranks.
        by: who refuses it, such as ``"a Pipeline"``.

    Raises:
        ChainOrderError: if a payload comes out at the end (GX404), or there are several ranks and
            no exchange (GX405).
    """
    rules = [PAYLOAD_AT_END] + [NO_EXCHANGE] * (group.size > 1)
    violations = check(tx.stages, rules)
    if violations:
        lines = [f"{v.code}: {v.reason}\n    fix: {v.fix}" for v in violations]
        raise ChainOrderError("\n".join([f"{by} refuses {tx.code()}", *lines]), violations)


def check_lookups(model: Any, group: Group) -> None:
    """Refuses lookups that change their table in the forward pass, on each rank other rows.

    Args:
        model: an `nn.Module`; nothing is known of anything else.
        group: the ranks.

    Raises:
        ValueError: naming the layer, if there are several ranks.
    """
    if group.size == 1 or not isinstance(model, torch.nn.Module):
        return
    for path, module in model.named_modules():
        if isinstance(module, LOOKUPS) and module.max_norm is not None:
            raise ValueError(
                f"layer {path!r} has max_norm={module.max_norm!r}: its forward pass shrinks the "
                "rows that this rank looks up, in place, and the replicas drift apart; leave it "
                "out, and shrink rows after optimizer.step(), all of them"
            )


def check_one_loss_scale(tx: Chain, name: str) -> None:
    """Refuses a chain that cannot go with a GradScaler.

    Args:
        tx: the chain.
        name: of what runs it, as its user would call it.

    Raises:
        ValueError: if it has no `unscale`, or a loss scale of its own.
    """
    own = own_loss_scale(tx)
    if own is not None:
        raise ValueError(
            f"a GradScaler is given and the chain has {own}: two loss scales; leave the scaler "
            f"out and multiply the loss by {name}.state.loss_scale, or write unscale()"
        )
    if not has_unscale(tx):
        raise ValueError(
            "a GradScaler is given and the chain has no unscale(): the loss scale would stay "
            f"in the gradients; write {Chain((unscale(), *tx.transformations)).code()}"
        )


def has_unscale(tx: Chain) -> bool:
    """Whether a chain divides by a loss scale."""
    return any(stage.kind is Kind.UNSCALE for stage in tx.stages)


def own_loss_scale(tx: Chain) -> Stage | None:
    """The stage that keeps a loss scale of its own, if there is one."""
    unscales = (stage for stage in tx.stages if stage.kind is Kind.UNSCALE)
    return next((stage for stage in unscales if stage.stateful), None)


def tell_why(groups: Sequence[Group], error: Exception) -> None:
    """Tells the other ranks, which wait in the handshake, why this one does not come.

    Args:
        groups: those of this rank, that between nodes first.
        error: what has gone wrong.
    """
    with suppress(RankMismatchError):
        text = f"{type(error).__name__}: {error}"
        agree_on_grid(groups, Context(Layout((), None), ""), error=text)
