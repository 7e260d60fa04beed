"""The state of a chain as a flat dict of tensors, and back, and what it is the state of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optree
import torch

from gradtx.backends.registry import NAMESPACE
from gradtx.core.chain import Chain
from gradtx.core.tree import path_of
from gradtx.exchange.group import Group, find_group
from gradtx.untrusted import is_same, shown, tensor_like


def identity(tx: Chain, group: Group, shards: Group | None = None) -> dict[str, Any]:
    """What a saved state is of: the format, the chain, the rank and how many there are.

    Args:
        tx: the chain.
        group: the ranks that exchange.
        shards: those that the parameters are spread over, if they are.
    """
    return {
        "format": 1,
        "chain": tx.shared_code,
        "rank": group.rank,
        "world_size": group.size,
        **({"nodes": tx.groups[0].size} if tx.inners else {}),
        **({"shard": shards.rank, "shards": shards.size} if shards and shards.size > 1 else {}),
    }


_TO_BE_RESHARDED = {
    "world_size": "; gx.reshard makes states for another number of ranks",
    "nodes": "; gx.reshard makes states for other nodes",
}


def check_identity(saved: Mapping[str, Any], here: Mapping[str, Any], owner: str) -> None:
    """Refuses a saved state that is not of this chain, rank and number of ranks.

    Args:
        saved: what was given.
        here: the `identity` that it has to have.
        owner: what it ought to be the state of, such as ``"a Pipeline"``.

    Raises:
        ValueError: naming what is missing or differs.
    """
    if not isinstance(saved, Mapping):
        raise ValueError(f"this is no state_dict of {owner}: it is {shown(saved)}")
    # Without nodes it is one that does for any.
    missing = sorted({*here, "state"} - {"nodes"} - saved.keys())
    if missing:
        raise ValueError(f"this is no state_dict of {owner}: it lacks {missing}")
    for name in here:
        if not is_same(saved.get(name, here[name]), here[name]):
            raise ValueError(
                f"this state_dict has {name} {shown(saved.get(name))}: expected {here[name]!r}"
                f"{_TO_BE_RESHARDED.get(name, '')}"
            )


class PerRank:
    """What a rank has of its own, in a checkpoint of `torch.distributed.checkpoint`.

    That takes tensors of the same key on several ranks for copies of one, and saves one of them:
    the residuals of the others would be gone. This puts the number of the rank before the keys::

        import torch.distributed.checkpoint as dcp

        dcp.save({"model": ..., "pipe": gx.PerRank(pipe)}, checkpoint_id=folder)
        dcp.load({"model": ..., "pipe": gx.PerRank(pipe)}, checkpoint_id=folder)

    Args:
        owner: the `Pipeline` or `DDPHook`, or what else has a ``state_dict`` and a
            ``load_state_dict``.

    Raises:
        TypeError: if it has not.

    Example:
        >>> import torch, gradtx as gx
        >>> pipe = gx.Pipeline(gx.chain(gx.allreduce()), [torch.ones(2, requires_grad=True)])
        >>> list(gx.PerRank(pipe).state_dict())
        ['rank_0']
    """

    def __init__(self, owner: Any) -> None:
        if not (hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")):
            raise TypeError(
                f"PerRank({owner!r}): expected what has a state_dict and a load_state_dict, such "
                "as a Pipeline"
            )
        self._owner = owner

    @property
    def _key(self) -> str:
        return f"rank_{find_group(None).rank}"

    def state_dict(self) -> dict[str, Any]:
        """The owner's, under the number of this rank."""
        return {self._key: self._owner.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Gives the owner what is there under the number of this rank.

        Raises:
            ValueError: if nothing is, or the owner refuses it.
        """
        if self._key not in state_dict:
            raise ValueError(f"this state_dict has {sorted(state_dict)}: expected {self._key!r}")
        self._owner.load_state_dict(state_dict[self._key])


def flatten_state(state: Any) -> dict[str, Any]:
    """Every tensor of a state, copied, and every number, keyed by where it stands and by path.

    Raises:
        TypeError: if something else is in the state, naming its key.
    """
    accessors, leaves, _ = optree.tree_flatten_with_accessor(state, namespace=NAMESPACE)
    saved: dict[str, Any] = {}
    for accessor, leaf in zip(accessors, leaves, strict=True):
        key = path_of(accessor)
        if isinstance(leaf, torch.Tensor):
            saved[key] = leaf.detach().clone()
        elif isinstance(leaf, (bool, int, float)):
            saved[key] = leaf
        else:
            raise TypeError(f"state {key!r} is a {type(leaf).__name__}: expected tensor or number")
    return saved


def restore_state(state: Any, saved: Mapping[str, Any]) -> Any:
    """A state like `state` with what `flatten_state` gave; a new one, which shares nothing with it.

    Raises:
        ValueError: naming a key that is missing or unknown, or a tensor of another shape or dtype.
    """
    if not isinstance(saved, Mapping):
        raise ValueError(f"state_dict['state'] is a {type(saved).__name__}: expected a dict")
    accessors, leaves, treespec = optree.tree_flatten_with_accessor(state, namespace=NAMESPACE)
    keys = [path_of(accessor) for accessor in accessors]
    known = set(keys)
    missing = [key for key in keys if key not in saved]
    unknown = [key if isinstance(key, str) else shown(key) for key in saved if key not in known]
    if missing or unknown:
        raise ValueError(
            "this state_dict is of other parameters: "
            f"missing {missing[:5] or 'nothing'}, unknown {unknown[:5] or 'nothing'}"
        )
    restored = [_restored(key, leaf, saved[key]) for key, leaf in zip(keys, leaves, strict=True)]
    return optree.tree_unflatten(treespec, restored)


def _restored(key: str, leaf: Any, value: Any) -> Any:
    name = f"state_dict[{key!r}]"
    if isinstance(leaf, torch.Tensor):
        return tensor_like(name, value, leaf)
    if type(value) is not type(leaf):
        raise ValueError(f"{name} is {shown(value)}: expected a {type(leaf).__name__}")
    return value
