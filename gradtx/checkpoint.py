"""The state of a chain as a flat dict of tensors, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optree
import torch

from gradtx.backends.registry import NAMESPACE
from gradtx.core.tree import path_of


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
    """A state like `state` with what `flatten_state` gave.

    Raises:
        ValueError: naming a key that is missing or unknown, or a tensor of another shape or dtype.
    """
    accessors, leaves, treespec = optree.tree_flatten_with_accessor(state, namespace=NAMESPACE)
    keys = [path_of(accessor) for accessor in accessors]
    known = set(keys)
    missing = [key for key in keys if key not in saved]
    unknown = [key for key in saved if key not in known]
    if missing or unknown:
        raise ValueError(
            "this state_dict is of other parameters: "
            f"missing {missing[:5] or 'nothing'}, unknown {unknown[:5] or 'nothing'}"
        )
    restored = [_restored(key, leaf, saved[key]) for key, leaf in zip(keys, leaves, strict=True)]
    return optree.tree_unflatten(treespec, restored)


def _restored(key: str, leaf: Any, value: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        if type(value) is not type(leaf):
            raise ValueError(f"state_dict[{key!r}] is {value!r}: expected a {type(leaf).__name__}")
        return value
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"state_dict[{key!r}] is a {type(value).__name__}: expected a tensor")
    if value.shape != leaf.shape or value.dtype != leaf.dtype:
        raise ValueError(
            f"state_dict[{key!r}] has shape {tuple(value.shape)} and dtype {value.dtype}: "
            f"expected {tuple(leaf.shape)} and {leaf.dtype}"
        )
    return value.to(leaf.device, copy=True)
