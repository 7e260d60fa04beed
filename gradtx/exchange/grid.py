"""Ranks in rows: groups inside nodes, groups between them, and both together."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from gradtx.core.arguments import check_whole
from gradtx.core.errors import RankMismatchError
from gradtx.core.transformation import Context
from gradtx.exchange.group import Group, find_group
from gradtx.exchange.handshake import agree


def node_groups(local_size: int | None = None, *, group: Any = None) -> tuple[Group, Group]:
    """The two groups of a rank for an exchange in two stages: inside its node, and between nodes.

    Ranks are taken to be numbered node by node, as `torchrun` does it. All ranks of the group call
    it, in the same order as all else that makes process groups. What a `DeviceMesh` of two
    dimensions has made already can be given to `allreduce` as it is, ``mesh["node"]``.

    Args:
        local_size: how many ranks a node has. By default what `torchrun` says, the environment's
            ``LOCAL_WORLD_SIZE``.
        group: all ranks; as for `allreduce`.

    Returns:
        ``(inner, outer)``: the ranks of this node, and those that have this one's number in theirs.

    Raises:
        TypeError: if `local_size` is no int.
        ValueError: if it is less than 1 or does not divide the number of ranks; without it, if
            there is no ``LOCAL_WORLD_SIZE``.

    Example:
        >>> import torch, gradtx as gx
        >>> from gradtx.testing import run_ranks
        >>> def rank(i):
        ...     inner, outer = gx.node_groups(2)
        ...     tx = gx.chain(gx.allreduce(inner), gx.topk(0.5), gx.ef(), gx.allreduce(outer))
        ...     grads = {"w": torch.tensor([1.0 + i, 0.0])}
        ...     return inner.rank, outer.rank, tx.update(grads, tx.init(grads))[0]["w"]
        >>> run_ranks(4, rank)[3]
        (1, 1, tensor([2.5000, 0.0000]))
    """
    if local_size is None:
        given = os.environ.get("LOCAL_WORLD_SIZE", "")
        if not given.isdecimal():
            raise ValueError(
                "node_groups(): there is no LOCAL_WORLD_SIZE, which torchrun sets; say how many "
                "ranks a node has, such as node_groups(8)"
            )
        local_size = int(given)
    check_whole("node_groups(local_size", local_size, 1)
    found = find_group(group)
    if found.size % local_size:
        raise ValueError(
            f"node_groups(local_size={local_size}): expected a divisor of the {found.size} ranks"
        )
    node, number = divmod(found.rank, local_size)
    first = node * local_size
    inner = found.part(range(first, first + local_size))
    return inner, found.part(range(number, found.size, local_size))


class Grid(Group):
    """All ranks of several groups that are the axes of a grid.

    Args:
        groups: those of one rank, that whose ranks lie furthest apart first.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        super().__init__()
        self._groups = groups
        self.size = math.prod(group.size for group in groups)
        for group in groups:
            self.rank = self.rank * group.size + group.rank

    def all_gather(self, message: torch.Tensor) -> list[torch.Tensor]:
        """The messages of all ranks, in rank order."""
        gathered = message
        for group in reversed(self._groups):
            gathered = torch.cat(group.all_gather(gathered))
        return list(gathered.split(message.numel()))

    def all_reduce(self, buffer: torch.Tensor) -> torch.Tensor:
        """The sum over ranks."""
        for group in reversed(self._groups):
            buffer = group.all_reduce(buffer)
        return buffer

    def broadcast(self, buffer: torch.Tensor) -> torch.Tensor:
        """Rank 0's buffer."""
        for group in self._groups:
            buffer = group.broadcast(buffer)
        return buffer

    def give_up(self, reason: str) -> None:
        """Says that this rank will not talk to the others again, along any axis."""
        for group in self._groups:
            group.give_up(reason)


def joint(groups: Sequence[Group]) -> Group:
    """All ranks of the groups, those between nodes first."""
    return groups[0] if len(groups) == 1 else Grid([group.plain for group in groups])


def agree_on_grid(
    groups: Sequence[Group], context: Context, step: int = 0, error: str = ""
) -> None:
    """As `agree`, for all ranks of several groups, which have to be the axes of a grid.

    The ranks of a group have one place along all other axes. They compare it group by group, those
    inside nodes first and last, so that all ranks of a grid hear what some of them have to tell.

    Args:
        groups: those of one rank, that between nodes first.
        context: the chain and the layout.
        step: how many steps this rank's state has seen.
        error: why this rank cannot go on, if it cannot.

    Raises:
        RankMismatchError: on every rank, if one has failed, or they differ.
    """
    found: RankMismatchError | None = None
    for group in (*reversed(groups), *groups[1:]):
        apart = [str(other.rank) if other is not group else "*" for other in groups]
        where = f", at {' x '.join(apart)} in their grid" if len(groups) > 1 else ""
        try:
            agree(group.plain, replace(context, code=context.code + where), step, error)
        except RankMismatchError as mismatch:
            found, error = found or mismatch, error or str(mismatch)
    if found is not None:
        raise found


def check_meeting(inner: Group, outer: Group) -> None:
    """Refuses two groups that are not two axes of a grid, as far as one rank can tell.

    Raises:
        ValueError: naming the ranks that are in both.
    """
    both = sorted(set(inner.members) & set(outer.members))
    if len(both) > 1:
        raise ValueError(
            f"ranks {both} are in both groups of allreduce(): the second would exchange again what "
            "the first has. Give the first the ranks of one node and the second one rank of each "
            "node: inner, outer = node_groups(8), or two dimensions of a DeviceMesh"
        )
