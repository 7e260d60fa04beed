"""`topk`: the largest magnitudes, and where they are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from gradtx import backends
from gradtx.compressors.compressor import Encode, choose_rows, compressor, each, encode_leaf
from gradtx.core.arguments import check_bool, check_ratio, count
from gradtx.core.cast import encode_cast, encode_casts
from gradtx.core.payload import Entries, Joined, Member, Parts, Payload, dense, register_payload
from gradtx.core.phases import in_phase
from gradtx.core.row_sparse import among_rows, largest_rows
from gradtx.core.schedule import Schedule, scheduled
from gradtx.core.stage import Argument, Kind, Stage
from gradtx.core.transformation import Transformation
from gradtx.core.tree import Array, PyTree, flatten_with_paths, unflatten, widen

VALUES = ("float32", "float16", "bfloat16")


@register_payload
class Sparse(Payload):
    """Some of a leaf's values, and their positions.

    Attributes:
        values: ``[k]``, or a payload of that shape.
        indices: ``[k]``, whole numbers, strictly increasing: positions in the flat leaf.
    """

    children = ("values", "indices")
    codecs = {"indices": "index"}  # noqa: RUF012
    values: Any
    indices: Array

    def decode(self) -> Array:
        """The values at their positions, zeros elsewhere."""
        values = dense(self.values)
        return backends.of(values).scatter(values, self.indices, self.size)

    def add_to(self, total: Array) -> Array:
        """The total with the values added at their positions, and nowhere else."""
        values = dense(self.values)
        ops = backends.of(total)
        return ops.scatter_add(total, ops.cast(values, ops.dtype_name(total)), self.indices)

    def entries(self) -> Entries | None:
        """What it is made of; None if the positions are not sent."""
        sent = self.codecs["indices"] == "index"
        return Entries(self.indices, self.values) if sent else None

    def subtracted_from(self, flat: Array) -> Array:
        """What is left, with the values taken off at their positions, and nowhere else."""
        values = dense(self.values)
        ops = backends.of(flat)
        [flat] = ops.unshared([flat], [values])
        return ops.scatter_add(flat, -ops.cast(values, ops.dtype_name(flat)), self.indices)

    def with_values(self, values: Any) -> Payload:
        """Other values at the same positions; a sparse choice of them is merged into one."""
        if isinstance(values, Sparse):
            indices = backends.of(self.indices).take(self.indices, values.indices)
            return Sparse(values.values, indices, self.shape, self.dtype)
        return Sparse(values, self.indices, self.shape, self.dtype)


def topk_sparsify(
    ratio: float | Schedule,
    *,
    scope: str = "leaf",
    values: str = "float32",
    rows: float | None = None,
    feedback: bool = True,
) -> Transformation:
    r"""Sends the ``max(1, round(ratio * n))`` largest magnitudes of `n`, exactly.

    Ties go to the lowest index. An empty leaf sends none. It is a contraction with
    :math:`\delta = k / n`, and needs error feedback.

    Args:
        ratio: the share of values that is sent, a float over 0 and at most 1, or a `Schedule`,
            such as `warmup_density` gives.
        scope: ``"leaf"`` chooses within each leaf, ``"global"`` over all leaves together.
        values: what the values travel in: ``"float32"`` (FP64 for FP64 leaves), or ``"float16"`` or
            ``"bfloat16"``, scaled as by `cast`; what that rounding leaves out is fed back too.
        rows: of a row-sparse leaf (of ``Embedding(sparse=True)``), the share of all its rows that
            is sent, a float over 0 and at most 1: those of the largest L2 norm, ties to the lowest
            index, whole and in FP32. Feedback then keeps a dense residual of that leaf. None sends
            all rows that have a gradient, and keeps nothing.
        feedback: False goes without error feedback, on purpose: what is not sent is lost.

    Returns:
        The transformation: dense leaves or sparse payloads (whose values it takes) to `Sparse`.

    Raises:
        TypeError: if the ratio, or `rows`, is no float.
        ValueError: if either is not over 0 and at most 1, or the scope or the values' dtype is
            unknown.

    References:
        Aji and Heafield, Sparse Communication for Distributed Gradient Descent, 2017; Stich et al.,
        Sparsified SGD with Memory, 2018.

    Example:
        >>> import torch, gradtx as gx
        >>> tx = gx.topk(0.5, feedback=False)
        >>> grads = {"w": torch.tensor([1.0, -4.0, 0.0, 2.0])}
        >>> updates, _ = tx.update(grads, tx.init(grads))
        >>> updates["w"].indices, updates["w"].values
        (tensor([1, 3]), tensor([-4.,  2.]))
    """
    if isinstance(ratio, Schedule):
        for value in ratio.values:
            check_ratio("topk(ratio", value)
    else:
        ratio = check_ratio("topk(ratio", ratio)
    if rows is not None:
        rows = check_ratio("topk(rows", rows)
    check_bool("topk(feedback", feedback)
    if scope not in ("leaf", "global"):
        raise ValueError(f"topk(scope={scope!r}): expected 'leaf' or 'global'")
    if values not in VALUES:
        raise ValueError(f"topk(values={values!r}): expected {', '.join(map(repr, VALUES))}")
    stage = Stage(
        "topk",
        Kind.COMPRESSOR,
        (
            Argument("ratio", ratio),
            Argument("scope", scope, "leaf"),
            Argument("values", values, "float32"),
            Argument("rows", rows, None),
            Argument("feedback", feedback, True),
        ),
        takes=frozenset({"dense", "sparse"}),
        gives="sparse" if values == "float32" else "codes",
        biased=True,
        homogeneous=values == "float32",
        stateful=isinstance(ratio, Schedule),
        whole=scope == "global",
        feedback=feedback,
    )
    if isinstance(ratio, Schedule):
        return scheduled(stage, ratio, lambda value: _topk(stage, value, scope, values, rows))
    return _topk(stage, ratio, scope, values, rows)


topk = topk_sparsify


def _topk(
    stage: Stage, ratio: float, scope: str, values: str, rows: float | None
) -> Transformation:
    select_rows = None if rows is None else among_rows(partial(largest_rows, rows))

    def select(flat: Array, shape: tuple[int, ...]) -> Sparse:
        ops = backends.of(flat)
        indices = ops.top_k(flat, count(ratio, flat.shape[-1]))
        return Sparse(ops.take(flat, indices), indices, shape, ops.dtype_name(flat))

    def encode(flat: Array, shape: tuple[int, ...]) -> Payload:
        chosen = select(flat, shape)
        if values == "float32":
            return chosen
        return chosen.with_values(encode_cast(chosen.values, chosen.values.shape, values))

    def encode_joined(flat: Array, sizes: Sequence[int]) -> Payload:
        indices = _chosen(flat, sizes, ratio)
        ops = backends.of(flat)
        return Sparse(ops.take(flat, indices), indices, tuple(flat.shape), ops.dtype_name(flat))

    if scope == "leaf":
        if values == "float32":
            return compressor(
                stage, encode, encode_joined=encode_joined, shows=True, select_rows=select_rows
            )
        encode_all = (each(select), partial(encode_casts, dtype=values))
        return compressor(stage, encode, encode_all=encode_all, shows=True, select_rows=select_rows)

    @in_phase("select")
    def update(
        updates: PyTree, state: Any, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        choose_rows(select_rows, state, extra.get("context"))
        paths, leaves, treespec = flatten_with_paths(updates)
        order = sorted(
            (i for i, leaf in enumerate(leaves) if leaf is not None), key=paths.__getitem__
        )
        out = (
            [leaf if leaf is None else encode_leaf(leaf, encode) for leaf in leaves]
            if any(isinstance(leaf, Joined) for leaf in leaves)
            else _joined(leaves, order, encode)
        )
        return unflatten(treespec, out), state

    return Transformation(stage, None, update, select_rows=select_rows)


def _chosen(flat: Array, sizes: Sequence[int], ratio: float) -> Array:
    """The positions of what is sent of leaves that stand one after the other, ascending."""
    ops = backends.of(flat)
    if len(set(sizes)) == 1:
        size = sizes[0]
        chosen = ops.top_k(ops.reshape(flat, (len(sizes), size)), count(ratio, size))
        return ops.ravel(chosen + size * ops.ravel(ops.positions([0], len(sizes), flat))[:, None])
    starts: dict[int, list[int]] = {}
    for size, end in zip(sizes, accumulate(sizes), strict=True):
        starts.setdefault(size, []).append(end - size)
    found = []
    for size, first in starts.items():
        positions = ops.positions(first, size, flat)
        rows = ops.reshape(ops.take(flat, ops.ravel(positions)), (len(first), size))
        chosen = ops.top_k(rows, count(ratio, size))
        found.append(ops.ravel(chosen + positions[:, :1]))
    return ops.ascending(ops.concat(found)) if len(found) > 1 else found[0]


def _joined(leaves: list[Any], order: list[int], encode: Encode) -> list[Any]:
    """The leaves compressed as one: a `Joined` at the first place in `order`, then `Member`s."""
    if not order:
        return leaves
    chosen = [leaves[i] for i in order]
    parts = Parts(tuple((i, tuple(leaves[i].shape)) for i in order))
    payload = encode_leaf(_concatenated(chosen), encode)
    out = list(leaves)
    for i in order:
        out[i] = Member(tuple(leaves[i].shape), payload.dtype)
    out[order[0]] = Joined(payload, parts, payload.shape, payload.dtype)
    return out


def _concatenated(leaves: list[Any]) -> Any:
    """All leaves as one flat array, or, if they are sparse, as one sparse payload."""
    if not any(isinstance(leaf, Payload) for leaf in leaves):
        return _concat_wide([widen(leaf) for leaf in leaves])
    if not all(type(leaf) is Sparse and backends.is_array(leaf.values) for leaf in leaves):
        raise TypeError(f"topk(scope='global') takes all leaves dense or all sparse, got {leaves}")
    start, indices = 0, []
    for leaf in leaves:
        indices.append(leaf.indices + start)
        start += leaf.size
    values = _concat_wide([leaf.values for leaf in leaves])
    ops = backends.of(values)
    return Sparse(values, ops.concat(indices), (start,), ops.dtype_name(values))


def _concat_wide(arrays: list[Array]) -> Array:
    ops = backends.find(arrays)
    dtype = max(ops.dtype_name(array) for array in arrays)  # "float32" < "float64"
    return ops.concat([ops.ravel(ops.cast(array, dtype)) for array in arrays])
