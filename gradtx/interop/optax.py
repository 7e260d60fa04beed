"""gradtx transformations for optax, and optax optimizers for torch parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import optree
import torch

from gradtx import backends
from gradtx.backends.registry import NAMESPACE, register_node
from gradtx.core.chain import chain
from gradtx.core.foreign import describe
from gradtx.core.payload import decode_leaves
from gradtx.core.stage import Argument, Kind, Stage
from gradtx.core.transformation import Transformation, extra_for
from gradtx.core.tree import (
    Info,
    PyTree,
    arranged_like,
    cast_like,
    flatten,
    map_leaves,
    path_of,
    unflatten,
    widen,
)
from gradtx.interop.dlpack import to_jax, to_torch
from gradtx.interop.optional import require


def to_optax(tx: Transformation) -> Any:
    """A gradtx transformation as an `optax.GradientTransformationExtraArgs`.

    optax accepts a gradtx transformation as it is, in `optax.chain`, `optax.masked`,
    `optax.partition`, `optax.MultiSteps` and wherever else it asks for `init` and `update`. But it
    passes extra arguments, such as the `loss_scale` of `unscale`, to nothing but its own type; and
    what comes out of a fragment may be payloads, which no optax transformation knows. This makes
    optax's own type of it, and decodes payloads.

    What cannot be, because of what optax does with it:

    - ``optax.apply_if_finite(to_optax(tx))`` around an exchange. It looks whether the gradients of
      *this* rank are finite, and does not run `tx` if they are not: the other ranks wait for ever,
      or step alone. Leave it out: a chain is gated already, and all ranks decide together.
    - ``optax.inject_hyperparams`` on a ratio, or on anything else that a shape follows from: it
      makes an array of the number, and shapes are known before arrays are. The factory refuses it.
      Use a `Schedule`.
    - ``optax.MultiSteps`` around an exchange over a mesh axis. The sum that it keeps, `acc_grads`,
      is of one device's gradients and differs between devices, which neither it nor
      `partition_specs` knows; and it runs `tx` in one branch of a ``lax.cond``, which
      `jax.shard_map` refuses, as the other branch gives the same on all devices. Nor does it help
      inside the chain, before the exchange: there it hands on zeros in between, and those would be
      exchanged. Accumulate before the chain: sum the gradients of the micro-batches up (in a
      ``lax.scan``, say), and call `update` once for all of them. Without a mesh axis it works; so
      it does under `jax.vmap` over a named axis.

    Args:
        tx: a transformation or chain for JAX arrays. One that is no chain is put into one, and is
            order-checked.

    Returns:
        The `optax.GradientTransformationExtraArgs`. Its state is a `ChainState`.

    Raises:
        ImportError: if optax is not installed.
        TypeError: if `tx` is no gradtx transformation.
        ChainOrderError: if `tx` alone breaks a rule.

    Example:
        >>> import jax.numpy as jnp, optax, gradtx as gx
        >>> compressed = gx.to_optax(gx.chain(gx.unscale(), gx.topk(0.5), gx.ef()))
        >>> tx = optax.chain(compressed, optax.sgd(0.5))
        >>> params = {"w": jnp.zeros(2)}
        >>> grads = {"w": jnp.asarray([8.0, 2.0])}
        >>> updates, state = tx.update(grads, tx.init(params), params, loss_scale=2.0)
        >>> updates["w"].tolist(), optax.tree.get(state, "residual")["w"].tolist()
        ([-2.0, -0.0], [0.0, 1.0])
    """
    optax = require("optax", "to_optax")
    if not isinstance(tx, Transformation):
        raise TypeError(
            f"to_optax({tx!r}): expected a gradtx transformation, such as chain(topk(0.01), ef())"
        )
    built = chain(tx)

    def init(params: PyTree) -> Any:
        with backends.on_jax():
            return built.init(params)

    def update(
        updates: PyTree, state: Any, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        with backends.on_jax():
            out, state = built.update(updates, state, params, **extra)
        leaves, treespec = flatten(out)
        return cast_like(unflatten(treespec, decode_leaves(leaves)), updates), state

    return optax.GradientTransformationExtraArgs(init, update)


class RandomKey:
    """A key of `jax.random` in a state for torch: its bits as a tensor, and which generator."""

    def __init__(self, data: torch.Tensor, impl: str) -> None:
        self.data, self.impl = data, impl


register_node(RandomKey, children=("data",), static=("impl",))


def from_optax(tx: Any) -> Transformation:
    """An optax optimizer for torch parameters, compiled by JAX once.

    In a chain it stands behind the exchange, in the place of the torch optimizer::

        tx = gx.chain(gx.topk(0.01), gx.ef(), gx.allreduce(), gx.from_optax(optax.adamw(1e-3)))

    As in optax, its updates are what is *added* to the parameters: ``p + u``. In a `Pipeline` they
    are in ``p.grad``; ``torch.optim.SGD(parameters, lr=1.0, maximize=True)`` adds them.

    It computes in FP32 (FP64 for FP64 parameters) and keeps its state so, whatever the dtype of the
    parameters. The state has optax's structure, with torch tensors for leaves: it is checkpointed
    like any other. Tensors are passed to JAX by DLPack, and those that come back share JAX's fresh
    memory: on the CPU nothing is copied but tensors that are not contiguous, or begin at no
    multiple of 64 bytes. The call waits for the result. On JAX arrays it is the optax optimizer.

    Args:
        tx: an `optax.GradientTransformation`, or anything like one that can be compiled.

    Returns:
        The transformation: needs true, reduced, dense gradients; stateful. If `tx` takes extra
        arguments, those of `update` that are numbers or arrays (NumPy's too) are passed on to it.

    Raises:
        ImportError: if JAX is not installed.
        TypeError: if `tx` has no `init` and `update`; in `init`, of an FP64 parameter while JAX's
            64-bit mode is off (naming its path), or if the state holds what is no array; in
            `update`, of an FP64 tensor among the extra arguments (naming it), likewise.

    Example:
        >>> import optax, torch, gradtx as gx
        >>> tx = gx.from_optax(optax.sgd(0.5, momentum=0.9))
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> state = tx.init(params)
        >>> updates, state = tx.update({"w": torch.tensor([2.0, 4.0])}, state, params)
        >>> updates
        {'w': tensor([-1., -2.])}
    """
    jax = require("jax", "from_optax")
    init, update = getattr(tx, "init", None), getattr(tx, "update", None)
    if not callable(init) or not callable(update):
        raise TypeError(
            f"from_optax({tx!r}): expected an optax.GradientTransformation, such as "
            "optax.adamw(1e-3)"
        )
    passed_on = extra_for(update)

    def compute(
        updates: PyTree, state: Any, params: PyTree, extra: Mapping[str, Any]
    ) -> tuple[PyTree, Any]:
        out, new = update(updates, state, params, **extra)
        return out, jax.tree.map(lambda x, old: jax.numpy.asarray(x).astype(old.dtype), new, state)

    compiled = jax.jit(compute)

    def setup(params: PyTree, info: Info | None) -> Any:
        params = map_leaves(widen, params)
        if not _is_torch(params):
            return init(params)
        # Copies: some optimizers keep the parameters themselves, and those will be written into.
        copies = to_jax(map_leaves(torch.Tensor.detach, params))
        device = _device(jax, copies)
        with jax.default_device(device):
            # A number in the state would be compiled as another type than what it becomes.
            state = jax.tree.map(jax.numpy.asarray, init(copies))
        kept = _kept(jax, jax.device_put(state, device))
        _check_containers(kept)
        return kept

    def step(
        updates: PyTree, state: Any, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        updates = map_leaves(widen, updates)
        params = None if params is None else map_leaves(widen, params)
        given = passed_on(extra)
        if not _is_torch(updates):
            out, new = update(updates, state, params, **given)
            return arranged_like(out, updates), new
        out, new = compiled(
            _lent(updates),
            _used(jax, state),
            None if params is None else _lent(params),
            {key: _extra(key, value) for key, value in given.items() if _is_value(value)},
        )
        # The gradients and parameters are the caller's again once all is computed.
        out, new = jax.block_until_ready((out, new))
        return arranged_like(to_torch(out, copy=None), updates), _kept(jax, new)

    stage = Stage(
        "from_optax",
        Kind.TRANSFORM,
        (Argument("tx", describe(update)),),
        stateful=True,
        needs_reduced=True,
        identity=tx,
    )
    return Transformation(stage, setup, step)


def _is_torch(tree: PyTree) -> bool:
    leaves = [leaf for leaf in flatten(tree)[0] if leaf is not None]
    return not leaves or isinstance(leaves[0], torch.Tensor)


def _lent(tree: PyTree) -> PyTree:
    """A tree of tensors as JAX arrays in C order, memory shared where that is possible."""
    # Another order of the axes would be another program to compile.
    return to_jax(map_leaves(lambda leaf: leaf.detach().contiguous(), tree), copy=None)


def _device(jax: Any, tree: PyTree) -> Any:
    """The device of the arrays; JAX's default one if there are none."""
    leaves = jax.tree.leaves(tree)
    return next(iter(leaves[0].devices())) if leaves else jax.devices()[0]


def _kept(jax: Any, state: Any) -> Any:
    """A state of JAX arrays that nobody else holds, as torch tensors in the same memory."""
    arrays, treedef = jax.tree.flatten(state)
    impls = [
        str(jax.random.key_impl(x)) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else None
        for x in arrays
    ]
    plain = [jax.random.key_data(x) if key else x for x, key in zip(arrays, impls, strict=True)]
    tensors = zip(to_torch(plain, copy=None), impls, strict=True)
    return jax.tree.unflatten(treedef, [RandomKey(x, key) if key else x for x, key in tensors])


def _check_containers(state: Any) -> None:
    """Refuses a state that JAX can take apart and optree, with it a checkpoint, cannot."""
    accessors, leaves, _ = optree.tree_flatten_with_accessor(state, namespace=NAMESPACE)
    for accessor, leaf in zip(accessors, leaves, strict=True):
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(
                f"the optimizer's state {path_of(accessor)!r} is a {type(leaf).__name__}: expected "
                "arrays in dicts, lists, tuples and NamedTuples"
            )


def _used(jax: Any, state: Any) -> Any:
    """The inverse of `_kept`."""
    leaves, treedef = jax.tree.flatten(state, is_leaf=lambda node: isinstance(node, RandomKey))
    tensors = [leaf.data if isinstance(leaf, RandomKey) else leaf for leaf in leaves]
    arrays = [
        jax.random.wrap_key_data(array, impl=leaf.impl) if isinstance(leaf, RandomKey) else array
        for array, leaf in zip(_lent(tensors), leaves, strict=True)
    ]
    return jax.tree.unflatten(treedef, arrays)


def _is_value(value: Any) -> bool:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype.kind in "biufc"
    return isinstance(value, (bool, int, float, complex)) or backends.is_array(value)


def _extra(name: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return to_jax({name: value.detach()}, copy=True)[name]
