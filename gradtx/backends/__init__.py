"""The array namespace: what compressors and combinators are written over.

`of(array)` gives the operations for an array, `gradtx.backends.torch_ops` or
`gradtx.backends.jax_ops`. The two modules have the same functions; they are the only files that
do arithmetic with torch or jax. jax is imported only once a jax array has been seen.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch

from gradtx.backends import torch_ops

__all__ = ["find", "full_precision", "is_array", "of", "size"]


def _is_jax_array(x: Any) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.Array)


def is_array(x: Any) -> bool:
    """Says whether `x` is a torch tensor or a JAX array (traced ones included)."""
    return isinstance(x, torch.Tensor) or _is_jax_array(x)


def of(x: Any) -> ModuleType:
    """The operations for the array `x`.

    Raises:
        TypeError: if `x` is neither a torch tensor nor a JAX array.
    """
    if isinstance(x, torch.Tensor):
        return torch_ops
    if _is_jax_array(x):
        from gradtx.backends import jax_ops

        return jax_ops
    raise TypeError(f"expected a torch tensor or a JAX array, got {type(x).__name__}")


def size(x: Any) -> int:
    """How many values an array has."""
    return math.prod(x.shape)


def find(leaves: Any) -> ModuleType:
    """The operations for the first array among `leaves` (torch's, where there is none)."""
    for leaf in leaves:
        if is_array(leaf):
            return of(leaf)
    return torch_ops


@contextmanager
def full_precision() -> Iterator[None]:
    """No autocast inside: it would choose other dtypes for sums than the ones asked for."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
