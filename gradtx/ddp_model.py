"""What a model in `DistributedDataParallel` is, where a hook reduces its gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gradtx.exchange.group import Group, find_group
from gradtx.fsdp import is_sharded

# By attribute: the option as it is given, and what DDP does where it is set.
_OPTIONS = {
    "skip_all_reduce_unused_params": (
        "skip_all_reduce_unused_params",
        "leaves out buckets that a hook waits for",
    ),
    "_delay_all_reduce_params": (
        "delay_all_reduce_named_params",
        "reduces some parameters itself, and a bad step shows there when the hook has taken it",
    ),
    "_use_python_reducer": (
        "the Python reducer of torch.compile",
        "hands over single gradients, not buckets",
    ),
}


def check_model(model: Any) -> None:
    """Refuses a model that a hook cannot be right for.

    Raises:
        TypeError: if it is not wrapped in DDP.
        ValueError: naming the option of DDP, or the hook that is there already.
    """
    if is_sharded(model):
        raise TypeError(
            "model is sharded by fully_shard, which calls no hook of DDP: use a Pipeline, with the "
            "exchange between replicas: Pipeline(chain(..., allreduce(mesh['replicate'])), model)"
        )
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"model is a {type(model).__name__}: expected a DistributedDataParallel, such as the "
            "hook is to be registered with; without DDP, use a Pipeline"
        )
    found: Any = model
    for attribute, (option, what) in _OPTIONS.items():
        if getattr(found, attribute, None):
            raise ValueError(f"the model is in DDP with {option}: DDP {what}; leave it out")
    if any(hasattr(p, "_in_backward_optimizers") for p in found.parameters()):
        raise ValueError(
            "an optimizer steps in the backward pass, for which DDP registers a hook of its own: "
            "step after the pass"
        )
    if found._comm_hooks:
        raise ValueError(
            f"the model has the hook {found._comm_hooks[0][0].__qualname__} already: DDP takes one"
        )


def check_ranks(model: DistributedDataParallel, group: Group) -> None:
    """Refuses an exchange that is visibly not over the ranks of DDP.

    Raises:
        ValueError: if this rank is another one there.
    """
    own = find_group(model.process_group)
    if (own.rank, own.size) != (group.rank, group.size):
        raise ValueError(
            f"this is rank {group.rank} of {group.size} in the exchange and rank {own.rank} of "
            f"{own.size} in DDP: write allreduce(group=model.process_group)"
        )


def reduced(model: Any, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those of a model's parameters, by path, whose gradients DDP reduces.

    Raises:
        ValueError: if they are not as many as DDP counted when the model was wrapped.
    """
    found = {
        path: p for path, p in parameters.items() if p.requires_grad and not _ignored(model, path)
    }
    counted = model._get_ddp_logging_data().get("num_parameter_tensors", len(found))
    if counted != len(found):
        raise ValueError(
            f"DDP reduces {counted} parameters and {len(found)} require a gradient now: change "
            "requires_grad before the model is wrapped in DDP"
        )
    return found


def _ignored(model: Any, path: str) -> bool:
    """Whether DDP leaves a parameter alone; it looks for those of the root as ``".weight"``."""
    return (path if "." in path else f".{path}") in model.parameters_to_ignore


def arranged_like(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A gradient in a bucket, in the memory format in which DDP has filled it.

    Args:
        gradient: as the bucket shows it: row-major.
        parameter: its parameter.
    """
    if parameter.is_contiguous():
        return gradient
    strides = torch.empty_like(parameter, device="meta").stride()
    if strides != parameter.stride():  # With gaps: DDP fills it in the order of its values.
        return gradient
    return gradient.as_strided(parameter.shape, strides)
