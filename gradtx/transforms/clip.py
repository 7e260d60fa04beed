"""`clip_by_global_norm` and `clip_by_local_norm`: all leaves shrunk together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradtx import backends
from gradtx.core.arguments import check_positive
from gradtx.core.norms import clip_locally, clip_together
from gradtx.core.stage import Argument, Kind, Stage
from gradtx.core.transformation import Context, EmptyState, Transformation
from gradtx.core.tree import Array, PyTree, flatten, leaves_like, unflatten
from gradtx.transforms.dense import dense


def clip_by_global_norm(
    max_norm: float, *, axis_name: str | tuple[str, ...] | None = None
) -> Transformation:
    r"""Shrinks the reduced gradient to a norm of at most `max_norm`, by one factor for all leaves.

    .. math:: g \leftarrow g \cdot \frac{c}{\max(\lVert g \rVert, c)}

    The norm is over all leaves together, in FP32 or better (FP64 for FP64 leaves), and all ranks
    find the same. It stands behind the exchange. A gradient of zeros stays zero; if a value is not
    finite, all become NaN, which a chain's gate makes a bad step of.

    On a JAX mesh the parameters may be spread over other axes than the exchange's. All parts then
    count, and leaves that are whole on every device count once: the `params` given to `update` show
    which are which, where JAX keeps track (``check_vma``, the default of `jax.shard_map`). Where it
    does not, `axis_name` says over which axes all leaves are spread; on a mesh of several axes it
    has to be given.

    Args:
        max_norm: the largest norm, over 0.
        axis_name: an axis of the mesh that leaves are spread over, or several; ``()`` if all are
            whole on every device. Not needed if `update` is given `params` under ``check_vma``.

    Returns:
        The transformation. It has no state and takes dense gradients only.

    Raises:
        TypeError: if `max_norm` is no number, or `axis_name` no name; in `update`, if a leaf is
            compressed, or a DTensor, or a torch tensor where an axis is named.
        ValueError: if `max_norm` is not over 0; in `update`, if there is no such axis, or if it
            cannot be told which leaves are spread.

    References:
        Pascanu et al., On the Difficulty of Training Recurrent Neural Networks, 2013.

    Example:
        >>> import torch, gradtx as gx
        >>> tx = gx.clip_by_global_norm(1.0)
        >>> grads = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
        >>> tx.update(grads, tx.init(grads))[0]
        {'a': tensor([0.6000]), 'b': tensor([0.8000])}
    """
    max_norm = check_positive("clip_by_global_norm(max_norm", max_norm)
    names = _names(axis_name)
    stage = Stage(
        "clip_by_global_norm",
        Kind.TRANSFORM,
        (Argument("max_norm", max_norm), Argument("axis_name", axis_name, None)),
        needs_reduced=True,
        whole=True,
        row_sparse=True,
    )

    def update(
        updates: PyTree, state: EmptyState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, EmptyState]:
        leaves, treespec = _dense_leaves(updates, stage.name)
        given = leaves if params is None else leaves_like(params, updates)
        pairs = zip(leaves, given, strict=True)
        spread = _Spread([(x, p) for x, p in pairs if x is not None], params is not None)
        axes = spread.axes(names, extra.get("context"))
        clipped = clip_together(leaves, max_norm, axes, extra.get("context"))
        return unflatten(treespec, clipped), state

    return Transformation(stage, None, update)


def clip_by_local_norm(max_norm: float) -> Transformation:
    r"""Shrinks each rank's own gradient to a norm of at most `max_norm` over the root of the ranks.

    .. math:: g \leftarrow g \cdot \frac{c}{\max(\lVert g \rVert, c)}, \quad c = c_{max} / \sqrt{N}

    It stands before the exchange, and before error feedback: so no rank's outlier gets into its
    residual. The norm is over all leaves of the rank together, in FP32 or better. `N` is the number
    of ranks of the exchange in the chain, 1 where there is none: the sum of `N` independent
    gradients is about :math:`\sqrt N` as long as one of them.

    Args:
        max_norm: the largest norm of the sum over ranks, over 0.

    Returns:
        The transformation. It has no state and takes dense gradients only.

    Raises:
        TypeError: if `max_norm` is no number; in `update`, if a leaf is compressed.
        ValueError: if `max_norm` is not over 0.

    References:
        Lin et al., Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed
        Training, 2018, section 3.2.

    Example:
        >>> import torch, gradtx as gx
        >>> tx = gx.chain(gx.clip_by_local_norm(1.0), gx.topk(0.5), gx.ef(), gx.allreduce())
        >>> grads = {"w": torch.tensor([3.0, 4.0])}
        >>> tx.update(grads, tx.init(grads))[0]
        {'w': tensor([0.0000, 0.8000])}
    """
    max_norm = check_positive("clip_by_local_norm(max_norm", max_norm)
    arguments = (Argument("max_norm", max_norm),)
    stage = Stage("clip_by_local_norm", Kind.TRANSFORM, arguments, whole=True, row_sparse=True)

    def update(
        updates: PyTree, state: EmptyState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, EmptyState]:
        leaves, treespec = _dense_leaves(updates, stage.name)
        return unflatten(treespec, clip_locally(leaves, max_norm, extra.get("context"))), state

    return Transformation(stage, None, update)


def _dense_leaves(updates: PyTree, name: str) -> tuple[list[Any], Any]:
    leaves, treespec = flatten(updates)
    return [None if leaf is None else dense(leaf, name) for leaf in leaves], treespec


def _names(axis_name: Any) -> tuple[str, ...] | None:
    if axis_name is None:
        return None
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"clip_by_global_norm(axis_name={axis_name!r}): expected the name of a mesh axis, "
            "or a tuple of names"
        )
    return names


class _Spread:
    """Finds out over which axes of a mesh leaves are spread.

    Args:
        pairs: the leaves that are there, each with its parameter.
        known: whether these are the parameters; otherwise they are the leaves themselves.
    """

    def __init__(self, pairs: Sequence[tuple[Array, Array]], known: bool) -> None:
        self._pairs, self._known = pairs, known
        self._ops: Any = backends.find([leaf for leaf, _ in pairs])
        if any(backends.is_dtensor(leaf) for leaf, _ in pairs):
            raise TypeError(
                "clip_by_global_norm() got a DTensor, a part of a parameter that is spread over "
                "ranks: one rank's parts have another norm; exchange and clip whole gradients"
            )

    def axes(self, names: tuple[str, ...] | None, context: Context | None) -> list[tuple[str, ...]]:
        """For each leaf, the axes along which other devices have other parts of it."""
        self._check(names or ())
        mesh: dict[str, bool] = self._ops.mesh_axes()
        exchanges = context is not None and not context.alone
        untold = [name for name, told in mesh.items() if not told]
        if names is None and len(untold) > exchanges:
            raise ValueError(
                f"clip_by_global_norm() inside a mesh with the axes {list(mesh)}, where JAX does "
                "not keep track of what varies: say over which of them parameters are spread, such "
                f"as axis_name={untold[-1]!r}, or axis_name=() if over none"
            )
        named = {name for name in names or () if not mesh.get(name)}
        told = [self._told(leaf, parameter) for leaf, parameter in self._pairs]
        if names is None and exchanges and not self._known and len(told) > 1 and any(told):
            # What an exchange has laid into one buffer varies alike.
            raise ValueError(
                f"clip_by_global_norm(): some leaves are spread over {sorted(set().union(*told))}, "
                "and behind an exchange only the parameters show which: tx.update(grads, state, "
                "params); or, if all of them are, give axis_name"
            )
        return [tuple(sorted(named | axes)) for axes in told]

    def _told(self, leaf: Array, parameter: Array) -> set[str]:
        return set(self._ops.varying_axes(leaf)) & set(self._ops.varying_axes(parameter))

    def _check(self, names: Sequence[str]) -> None:
        for name in names:
            if self._ops.has_axis(name):
                continue
            given = f"clip_by_global_norm(axis_name={name!r})"
            if self._ops is backends.torch_ops:
                raise TypeError(f"{given}: an axis is for JAX arrays, and these are torch tensors")
            raise ValueError(
                f"{given}: no axis of that name; the axes here are {list(self._ops.mesh_axes())} "
                "(call update inside jax.shard_map over a mesh that has it)"
            )
