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
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import optree
import torch

from gradtx.backends import torch_ops
from gradtx.backends.registry import NAMESPACE

__all__ = [
    "find",
    "full_precision",
    "is_array",
    "is_dtensor",
    "of",
    "on_jax",
    "size",
    "torch_ops",
    "within",
]


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


def is_dtensor(x: Any) -> bool:
    """Says whether `x` is a torch DTensor: a parameter that may be spread over ranks."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def size(x: Any) -> int:
    """How many values an array has."""
    return math.prod(x.shape)


_nothing: ContextVar[ModuleType] = ContextVar("nothing", default=torch_ops)
_call: ContextVar[Any] = ContextVar("call", default=None)


@contextmanager
def within(*trees: Any) -> Iterator[None]:
    """Tells `find` what the call at hand was given, for parts that are given no array of it."""
    token = _call.set(trees)
    try:
        yield
    finally:
        _call.reset(token)


@contextmanager
def on_jax() -> Iterator[None]:
    """What is given no array at all inside is JAX's: a tree of no leaves, say."""
    from gradtx.backends import jax_ops

    token = _nothing.set(jax_ops)
    try:
        yield
    finally:
        _nothing.reset(token)


def find(leaves: Any) -> ModuleType:
    """The operations for the first array among `leaves`.

    Where there is none, those for the first one that the call at hand was given: a part that is
    masked everywhere keeps its counters in arrays of the same kind as the others. Else JAX's within
    `on_jax`, and torch's anywhere else.
    """
    for leaf in leaves:
        if is_array(leaf):
            return of(leaf)
    for leaf in optree.tree_leaves(_call.get(), namespace=NAMESPACE):
        if is_array(leaf):
            return of(leaf)
    return _nothing.get()


@contextmanager
def full_precision() -> Iterator[None]:
    """No autocast inside: it would choose other dtypes for sums than the ones asked for."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
