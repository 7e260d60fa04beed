"""The state of a chain as a flat dict of tensors, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optree
import torch

from gradtx.core.tree import path_of


def flatten_state(state: Any) -> dict[str, torch.Tensor]:
    """Every tensor of a state, copied, keyed by where it stands and by parameter path."""
    accessors, leaves, _ = optree.tree_flatten_with_accessor(state)
    return {path_of(a): leaf.detach().clone() for a, leaf in zip(accessors, leaves, strict=True)}


def restore_state(state: Any, saved: Mapping[str, Any]) -> Any:
    """A state like `state` with the tensors that `flatten_state` gave.

    Raises:
        ValueError: naming a key that is missing or unknown, or a tensor of another shape or dtype.
    """
    accessors, leaves, treespec = optree.tree_flatten_with_accessor(state)
    keys = [path_of(accessor) for accessor in accessors]
    missing = [key for key in keys if key not in saved]
    unknown = [key for key in saved if key not in set(keys)]
    if missing or unknown:
        raise ValueError(
            "this state_dict is of other parameters: "
            f"missing {missing[:5] or 'nothing'}, unknown {unknown[:5] or 'nothing'}"
        )
    restored = []
    for key, leaf in zip(keys, leaves, strict=True):
        value = saved[key]
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"state_dict[{key!r}] is a {type(value).__name__}: expected a tensor")
        if value.shape != leaf.shape or value.dtype != leaf.dtype:
            raise ValueError(
                f"state_dict[{key!r}] has shape {tuple(value.shape)} and dtype {value.dtype}: "
                f"expected {tuple(leaf.shape)} and {leaf.dtype}"
            )
        restored.append(value.to(leaf.device, copy=True))
    return optree.tree_unflatten(treespec, restored)
