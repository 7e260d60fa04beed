"""Pytrees of torch tensors as pytrees of JAX arrays, and back, through DLPack."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import optree
import torch

from gradtx.backends.registry import NAMESPACE
from gradtx.core.tree import PyTree, adopt, path_of
from gradtx.interop.optional import require

_WIDE = ("int64", "uint64", "float64", "complex128")
# What both libraries have, and can say in DLPack.
DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)
# XLA reads memory on the CPU in vectors, and takes over no buffer that begins elsewhere.
_ALIGNMENT = 64


def to_jax(tree: PyTree, *, copy: bool | None = True) -> PyTree:
    """A tree of torch tensors as one of JAX arrays of the same shapes, dtypes and devices.

    A JAX array never changes; a torch tensor may at any time. So the arrays are copies, unless you
    ask for shared memory. Shared memory is safe while nobody writes into the tensors or resizes
    them: not before a computation on the arrays has *finished* (``jax.block_until_ready``), since
    JAX computes while Python goes on.

    Args:
        tree: a pytree of torch tensors; a leaf that is None stays None.
        copy: True copies every tensor. None shares memory where the layout allows, and copies the
            rest (see `needs_copy`). False shares, and refuses what would have to be copied.

    Returns:
        A tree of the same structure. Strides are no part of a JAX array: its values are those of
        the tensor, whatever its strides were.

    Raises:
        TypeError: naming the key path of a leaf that is no torch tensor, is sparse, or has a dtype
            that JAX has not; of a 64-bit leaf while JAX's 64-bit mode is off (it would be
            narrowed).
        ValueError: naming the key path of a leaf that requires a gradient, as torch and NumPy
            refuse it (the gradient would stop there: detach it yourself), that is on a device
            without values or unknown to JAX, or that ``copy=False`` cannot share.
        ImportError: if JAX is not installed.

    Example:
        >>> import torch, gradtx as gx
        >>> weight = torch.tensor([1.0, 2.0])
        >>> array = gx.to_jax({"w": weight})["w"]
        >>> _ = weight.zero_()
        >>> array.tolist()
        [1.0, 2.0]
    """
    _check_copy("to_jax", copy)
    jax = require("jax", "to_jax")
    return _mapped(lambda path, leaf: _array(jax, path, leaf, copy), tree)


def to_torch(tree: PyTree, *, copy: bool | None = True) -> PyTree:
    """A tree of JAX arrays as one of torch tensors of the same shapes, dtypes and devices.

    The tensors are copies, unless you ask for shared memory: torch has no tensors that are read
    only, so an in-place operation on a tensor that shares memory changes the JAX array, which
    everyone (the compiler, too) takes for immutable, and all that shares memory with it, such as
    a NumPy array that it was made of. Share only what you never write into: no ``add_``, no
    ``out=``, no parameter of an optimizer.

    Args:
        tree: a pytree of JAX arrays, each on one device; a leaf that is None stays None.
        copy: True copies every array. None shares memory where that is possible, False refuses
            what would have to be copied.

    Returns:
        A tree of the same structure, the tensors without a gradient. Copies are contiguous.

    Raises:
        TypeError: naming the key path of a leaf that is no JAX array, or has a dtype that torch has
            not (such as ``int4``, or that of a random key).
        ValueError: naming the key path of an array that is being traced (by ``jax.jit``, ...), has
            been deleted or donated, is on several devices, or that ``copy=False`` cannot share.
        ImportError: if JAX is not installed.

    Example:
        >>> import jax.numpy as jnp, gradtx as gx
        >>> array = jnp.asarray([1.0, 2.0])
        >>> tensor = gx.to_torch([array])[0]
        >>> tensor.add_(1.0), array.tolist()
        (tensor([2., 3.]), [1.0, 2.0])
    """
    _check_copy("to_torch", copy)
    jax = require("jax", "to_torch")
    return _mapped(lambda path, leaf: _tensor(jax, path, leaf, copy), tree)


def needs_copy(tree: PyTree) -> dict[str, str]:
    """Which leaves cannot share memory with the other library, and why: key path to reason.

    Those are what ``to_jax(tree, copy=None)`` copies and ``to_jax(tree, copy=False)`` refuses. An
    empty dict says that all can be shared; JAX arrays on one device always can.

    Args:
        tree: a pytree of torch tensors or JAX arrays.

    Returns:
        The reasons. Leaves that cannot be handed over at all are not looked for.

    Example:
        >>> import torch
        >>> needs_copy({"a": torch.zeros(4), "b": torch.zeros(4, 4)[:, ::2]})
        {'b': 'its values have gaps or overlaps between them'}
    """
    leaves, treespec = _flat(tree)
    found = zip(_paths(treespec), leaves, strict=True)
    why = {p: _why_not_shared(x) for p, x in found if isinstance(x, torch.Tensor)}
    return {path: reason for path, reason in why.items() if reason is not None}


def _check_copy(name: str, copy: Any) -> None:
    if copy is not None and not isinstance(copy, bool):
        raise TypeError(f"{name}(copy={copy!r}): expected True, False or None")


def _flat(tree: PyTree) -> tuple[list[Any], Any]:
    """The leaves down to the arrays, those within payloads too."""
    leaves, treespec = optree.tree_flatten(adopt(tree), none_is_leaf=True, namespace=NAMESPACE)
    return leaves, treespec


def _paths(treespec: Any) -> list[str]:
    return [path_of(accessor) for accessor in treespec.accessors()]


class _Path:
    """The key path of a leaf, found when it is printed: finding all of them takes time."""

    def __init__(self, treespec: Any, position: int) -> None:
        self._treespec, self._position = treespec, position

    def __repr__(self) -> str:
        return repr(_paths(self._treespec)[self._position])


def _mapped(convert: Callable[[_Path, Any], Any], tree: PyTree) -> PyTree:
    leaves, treespec = _flat(tree)
    converted = [
        None if leaf is None else convert(_Path(treespec, i), leaf) for i, leaf in enumerate(leaves)
    ]
    return optree.tree_unflatten(treespec, converted)


def _array(jax: Any, path: _Path, leaf: Any, copy: bool | None) -> Any:
    if not isinstance(leaf, torch.Tensor):
        raise TypeError(f"leaf {path!r} is a {type(leaf).__name__}: expected a torch tensor")
    _check_tensor(jax, path, leaf)
    reason = _why_not_shared(leaf)
    if copy is False and reason is not None:
        raise ValueError(f"leaf {path!r} cannot be shared, {reason}: use copy=None or copy=True")
    if copy or reason is not None:
        # JAX's own copy=True does not copy (seen in 0.10), so it is made here.
        leaf = _plain_copy(leaf)
    try:
        return jax.dlpack.from_dlpack(_canonical(leaf))
    except Exception as error:
        raise ValueError(
            f"leaf {path!r}, {list(leaf.shape)} {_name(leaf)} on {leaf.device}, cannot be handed "
            f"to JAX: {error}"
        ) from error


def _check_tensor(jax: Any, path: _Path, leaf: torch.Tensor) -> None:
    if leaf.layout is not torch.strided:
        raise TypeError(f"leaf {path!r} is sparse ({leaf.layout}): expected a dense tensor")
    _check_dtype(path, _name(leaf), "JAX")
    if leaf.requires_grad:
        raise ValueError(
            f"leaf {path!r} requires a gradient, which would stop at JAX: give leaf.detach()"
        )
    if leaf.device.type == "meta":
        raise ValueError(f"leaf {path!r} is on the meta device: it has no values")
    if torch._C._functorch.is_functorch_wrapped_tensor(leaf):
        raise ValueError(
            f"leaf {path!r} is being transformed by torch.func: it has no values of its own"
        )
    if _name(leaf) in _WIDE and not jax.config.jax_enable_x64:
        raise TypeError(
            f"leaf {path!r} has dtype {_name(leaf)} and JAX would narrow it to 32 bits: cast it "
            'yourself, or say jax.config.update("jax_enable_x64", True) first'
        )


def _check_dtype(path: _Path, name: str, other: str) -> None:
    if name not in DTYPES:
        raise TypeError(
            f"leaf {path!r} has dtype {name}, which cannot be handed to {other}: expected one of "
            + ", ".join(DTYPES)
        )


def _name(leaf: torch.Tensor) -> str:
    return str(leaf.dtype).removeprefix("torch.")


def _why_not_shared(leaf: torch.Tensor) -> str | None:
    if leaf.is_conj() or leaf.is_neg():
        return f"it is {'conjugated' if leaf.is_conj() else 'negated'} only when it is read"
    if not leaf.numel():
        return None
    if not _is_compact(leaf):
        return "its values have gaps or overlaps between them"
    if leaf.device.type == "cpu" and leaf.data_ptr() % _ALIGNMENT:
        return f"its memory does not begin at a multiple of {_ALIGNMENT} bytes"
    return None


def _is_compact(leaf: torch.Tensor) -> bool:
    """Whether it is one block of memory, in any order of its axes."""
    axes = [(s, n) for s, n in zip(leaf.stride(), leaf.shape, strict=True) if n > 1]
    expected = 1
    for stride, length in sorted(axes):
        if stride != expected:
            return False
        expected *= length
    return True


def _plain_copy(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _canonical(leaf: torch.Tensor) -> torch.Tensor:
    """The same memory, with the strides that its shape implies where they make no difference.

    Axes of length one may have any stride, and readers of DLPack have stumbled over that.
    """
    if not leaf.numel():
        return leaf.new_empty(leaf.shape)
    if 1 not in leaf.shape or not leaf.is_contiguous():
        return leaf
    strides = [math.prod(leaf.shape[i + 1 :]) for i in range(leaf.ndim)]
    return leaf.as_strided(leaf.shape, strides)


def _tensor(jax: Any, path: _Path, leaf: Any, copy: bool | None) -> torch.Tensor:
    _check_array(jax, path, leaf)
    try:
        # What is not computed yet must not be read, nor written to by JAX later.
        shared: torch.Tensor = torch.utils.dlpack.from_dlpack(leaf.block_until_ready())
    except Exception as error:
        raise ValueError(
            f"leaf {path!r}, {list(leaf.shape)} {leaf.dtype}, cannot be handed to torch: {error}"
        ) from error
    return shared.clone(memory_format=torch.contiguous_format) if copy else shared


def _check_array(jax: Any, path: _Path, leaf: Any) -> None:
    if not isinstance(leaf, jax.Array):
        raise TypeError(f"leaf {path!r} is a {type(leaf).__name__}: expected a JAX array")
    if isinstance(leaf, jax.core.Tracer):
        raise ValueError(
            f"leaf {path!r} is being traced by JAX and has no values yet: convert it outside of "
            "jax.jit, jax.grad, jax.vmap and the like"
        )
    _check_dtype(path, str(leaf.dtype), "torch")
    if leaf.is_deleted():
        raise ValueError(f"leaf {path!r} has been deleted, or donated to a jitted function")
    if len(leaf.devices()) > 1:
        raise ValueError(
            f"leaf {path!r} is on {len(leaf.devices())} devices: hand over one shard at a time "
            "(leaf.addressable_shards), or gather it first (jax.device_put)"
        )
