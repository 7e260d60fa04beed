"""Trees of leaves: how they are flattened, and what is fixed about them from `init` on.

Leaves are known by their key path, such as ``"layer1.0.bn1.weight"``: the keys from the root to
the leaf joined by dots. ``None`` is a leaf that is not there.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeAlias

import optree
import torch

from gradtx import backends
from gradtx.backends.registry import (
    NAMESPACE,
    Entry,
    adopt_type,
    in_box,
    is_jax_node,
    register_node,
)
from gradtx.core.payload import Parts, Payload
from gradtx.core.row_sparse import LOOKUPS, Rows, Table, rows_of

_SHAPE, _DTYPE, _LAYOUT, _REQUIRES_GRAD = map(
    attrgetter, ("shape", "dtype", "layout", "requires_grad")
)

Array: TypeAlias = Any
PyTree: TypeAlias = Any

SMALL = 4096
"""Values of a leaf; a call for each costs more than what it does to so few."""
FLOATS = ("float16", "bfloat16", "float32", "float64")


def accumulation_dtype(dtype: str) -> str:
    """The dtype sums and residuals are kept in: FP64 for FP64 leaves, FP32 for all others."""
    return "float64" if dtype == "float64" else "float32"


def widen(leaf: Array) -> Array:
    """The leaf in its accumulation dtype."""
    ops = backends.of(leaf)
    dtype = ops.dtype_name(leaf)
    return leaf if dtype == "float32" else ops.cast(leaf, accumulation_dtype(dtype))


def widen_all(leaves: Sequence[Array]) -> list[Array]:
    """`widen` of each leaf."""
    if all_tensors(leaves) and set(map(_DTYPE, leaves)) <= {torch.float32, torch.float64}:
        return list(leaves)
    return [widen(leaf) for leaf in leaves]


def _is_payload(node: Any) -> bool:
    return isinstance(node, Payload)


_expected: ContextVar[Layout | None] = ContextVar("gradtx_expected", default=None)


@contextmanager
def expecting(layout: Layout) -> Iterator[None]:
    """Makes `flatten` faster in a ``with`` block, for flat dicts with the keys of a layout."""
    token = _expected.set(layout)
    try:
        yield
    finally:
        _expected.reset(token)


def _as_expected(tree: PyTree) -> tuple[list[Any], Any] | None:
    """What `flatten` gives, if the tree is a flat dict with the keys that are expected."""
    layout = _expected.get()
    if layout is None or type(tree) is not dict or list(tree) != layout.inserted:
        return None
    leaves = list(map(tree.__getitem__, layout.keys))
    if any(not issubclass(kind, _LEAVES) for kind in set(map(type, leaves))):
        return None
    return leaves, layout.treespec


_LEAVES = (torch.Tensor, Payload, type(None))


def all_tensors(leaves: Sequence[Any]) -> bool:
    """Whether all are plain torch tensors: there are then shorter ways than leaf by leaf."""
    return set(map(type, leaves)) <= {torch.Tensor, torch.nn.Parameter}


def flatten(tree: PyTree) -> tuple[list[Any], Any]:
    """The leaves (arrays, payloads, None) and the structure, in the order of optree."""
    if (found := _as_expected(tree)) is not None:
        return found
    leaves, treespec = optree.tree_flatten(
        tree, _is_payload, none_is_leaf=True, namespace=NAMESPACE
    )
    return leaves, treespec


def flatten_with_paths(tree: PyTree) -> tuple[list[str], list[Any], Any]:
    """As `flatten`, with the key path of each leaf first."""
    accessors, leaves, treespec = optree.tree_flatten_with_accessor(
        tree, _is_payload, none_is_leaf=True, namespace=NAMESPACE
    )
    return [path_of(accessor) for accessor in accessors], leaves, treespec


def adopt(tree: PyTree) -> PyTree:
    """The tree, once all its nodes are known: those that only JAX knows are registered here."""
    while unknown := {
        type(leaf)
        for leaf in flatten(tree)[0]
        if not (leaf is None or backends.is_array(leaf) or _is_payload(leaf)) and is_jax_node(leaf)
    }:
        for cls in unknown:
            adopt_type(cls)
    return tree


def path_of(accessor: Any) -> str:
    """A key path as text: dict keys, positions, and the names of fields, joined by dots."""
    return ".".join(
        str(getattr(entry, "field", entry.entry))
        for entry in accessor
        if entry.entry is not Entry.OMITTED
    )


def unboxed(tree: PyTree) -> PyTree:
    """The tree with the values in place of their boxes: flax unwraps its variables after `init`."""
    leaves, treespec = optree.tree_flatten(tree, _is_whole, none_is_leaf=True, namespace=NAMESPACE)
    boxes = list(map(in_box, leaves))
    if not any(boxes):
        return tree
    values = [unboxed(*box) if box else leaf for box, leaf in zip(boxes, leaves, strict=True)]
    return unflatten(treespec, values)


def _is_whole(node: Any) -> bool:
    return _is_payload(node) or bool(in_box(node))


def structure(tree: PyTree) -> Any:
    """The structure down to the arrays, those within payloads too."""
    return optree.tree_structure(tree, namespace=NAMESPACE)


def unflatten(treespec: Any, leaves: Sequence[Any]) -> PyTree:
    """The inverse of `flatten`."""
    return optree.tree_unflatten(treespec, leaves)


def arrays_in(tree: PyTree) -> list[Array]:
    """All arrays of a tree, those within payloads too."""
    leaves = tree if isinstance(tree, list) else (_as_expected(tree) or [()])[0]
    if leaves and all_tensors(leaves):
        return list(leaves)
    return [
        leaf for leaf in optree.tree_leaves(tree, namespace=NAMESPACE) if backends.is_array(leaf)
    ]


def map_arrays(fn: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """`fn` over all arrays of trees of one structure, those within payloads too."""
    return optree.tree_map(fn, tree, *rest, namespace=NAMESPACE)


def map_leaves(fn: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """`fn` over the leaves (arrays and payloads); a leaf that is None stays None."""
    leaves, treespec = flatten(tree)
    others = [flatten(other)[0] for other in rest]
    mapped = [
        None if leaf is None else fn(leaf, *args)
        for leaf, *args in zip(leaves, *others, strict=True)
    ]
    return unflatten(treespec, mapped)


def leaves_like(tree: PyTree, reference: PyTree) -> list[Any]:
    """The leaves of `tree` in the order of those of `reference`, matched by path.

    Raises:
        ValueError: if the trees do not have the same paths.
    """
    leaves, treespec = flatten(tree)
    if treespec == flatten(reference)[1]:
        return leaves
    paths, leaves, _ = flatten_with_paths(tree)
    return reorder(dict(zip(paths, leaves, strict=True)), flatten_with_paths(reference)[0])


def arranged_like(tree: PyTree, reference: PyTree) -> PyTree:
    """The leaves of `tree` in the structure of `reference`, matched by path."""
    wanted = flatten(reference)[1]
    if flatten(tree)[1] == wanted:
        return tree
    return unflatten(wanted, leaves_like(tree, reference))


def reorder(found: Mapping[str, Any], paths: Sequence[str]) -> list[Any]:
    """The values of `found` in the order of `paths`.

    Raises:
        ValueError: naming the paths that are missing or unknown.
    """
    expected = set(paths)
    missing = [path for path in paths if path not in found]
    unknown = [path for path in found if path not in expected]
    if missing or unknown:
        raise ValueError(
            "the gradients have another structure than the parameters given to init: "
            + "; ".join(
                f"{what} {', '.join(map(repr, which))}"
                for what, which in (("missing", missing), ("unknown", unknown))
                if which
            )
            + " (a leaf without a gradient is None, its key stays)"
        )
    return [found[path] for path in paths]


def checked(updates: PyTree) -> PyTree:
    """The updates without autograd history, each leaf a payload or a floating-point array.

    Boxes are gone, as they are from the parameters in `init`.

    Raises:
        TypeError: naming the path of a leaf that is neither.
    """
    paths, leaves, treespec = flatten_with_paths(unboxed(adopt(updates)))
    for path, leaf in zip(paths, leaves, strict=True):
        if leaf is not None and not _is_payload(leaf):
            check_leaf(path, leaf)
    return unflatten(
        treespec,
        [backends.of(x).detach(x) if backends.is_array(x) else x for x in leaves],
    )


def cast_like(tree: PyTree, reference: PyTree) -> PyTree:
    """The arrays of `tree` in the dtypes of those of `reference`; payloads stay as they are."""

    def cast(leaf: Any, like: Any) -> Any:
        if not (backends.is_array(leaf) and backends.is_array(like)):
            return leaf
        ops = backends.of(leaf)
        return ops.cast(leaf, ops.dtype_name(like))

    return map_leaves(cast, tree, reference)


@dataclass(frozen=True)
class LeafInfo:
    """What a model says about one of its parameters.

    Attributes:
        layer: the class of the module that owns the parameter.
        name: the parameter's own name in that module, such as ``"weight"``.
        running_statistics: whether the module keeps a running mean and variance.
        row_sparse: whether its gradients are row-sparse.
    """

    layer: type
    name: str
    running_statistics: bool
    row_sparse: bool = False


@dataclass(frozen=True)
class LeafSpec:
    """A leaf's path, shape and dtype.

    Attributes:
        path: the key path.
        shape: None for a leaf that is None, or row-sparse.
        dtype: None for such a leaf.
        table: of a row-sparse leaf, shape and dtype of the whole.
    """

    path: str
    shape: tuple[int, ...] | None
    dtype: str | None
    table: Table | None = None

    @property
    def size(self) -> int:
        """How many values the leaf has."""
        return 0 if self.shape is None else math.prod(self.shape)

    def __str__(self) -> str:
        if self.table is not None:
            return str(self.table)
        return "None" if self.shape is None else f"{list(self.shape)} {self.dtype}"


@dataclass(frozen=True)
class Layout:
    """The paths, shapes, dtypes and the structure of a parameter tree; a static pytree node."""

    leaves: tuple[LeafSpec, ...]
    treespec: Any

    @cached_property
    def fingerprint(self) -> int:
        """64 bits of a hash over paths, shapes and dtypes, whatever the containers."""
        lines = sorted(f"{leaf.path!r}: {leaf}" for leaf in self.leaves)
        return int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:8], "little")

    @cached_property
    def tables(self) -> Mapping[int, Table]:
        """The row-sparse leaves by position, in path order."""
        found = ((i, self.leaves[i].table) for i in self.by_path)
        return {i: table for i, table in found if table is not None}

    @cached_property
    def by_path(self) -> tuple[int, ...]:
        """The positions of the leaves in the order of their paths, the same on all ranks."""
        return tuple(sorted(range(len(self.leaves)), key=lambda i: self.leaves[i].path))

    @cached_property
    def path_ranks(self) -> tuple[int, ...]:
        """For each leaf, its place in the order of paths: the inverse of `by_path`."""
        ranks = [0] * len(self.leaves)
        for rank, position in enumerate(self.by_path):
            ranks[position] = rank
        return tuple(ranks)

    @cached_property
    def inserted(self) -> list[Any] | None:
        """The keys of a flat dict, in its own order; None for any other tree."""
        if self.treespec is None or self.treespec.num_nodes != len(self.leaves) + 1:
            return None
        tree = unflatten(self.treespec, range(len(self.leaves)))
        return list(tree) if type(tree) is dict else None

    @cached_property
    def keys(self) -> list[Any]:
        """The keys of a flat dict, in the order of the leaves."""
        return list(self.treespec.entries())

    @cached_property
    def shapes(self) -> list[tuple[int, ...] | None]:
        """The shape of each leaf."""
        return [leaf.shape for leaf in self.leaves]

    @cached_property
    def sizes(self) -> list[int]:
        """How many values each leaf has."""
        return [leaf.size for leaf in self.leaves]

    @cached_property
    def small(self) -> Parts:
        """The leaves of up to `SMALL` values that are summed in FP32, in path order."""
        places = [
            i
            for i in self.by_path
            if 0 < self.sizes[i] <= SMALL and self.leaves[i].dtype != "float64"
        ]
        return Parts(tuple((i, self.leaves[i].shape or ()) for i in places))

    @cached_property
    def _torch_dtypes(self) -> list[torch.dtype | None]:
        return [None if x.dtype is None else getattr(torch, x.dtype) for x in self.leaves]

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """The position of each path."""
        return {leaf.path: i for i, leaf in enumerate(self.leaves)}

    def match(self, updates: PyTree) -> list[Any]:
        """The leaves of `updates` in the order of this layout, found by path.

        Returns:
            Arrays, `Rows` of row-sparse leaves, and None for those that are not there.

        Raises:
            ValueError: if a path is missing or unknown, or a shape differs.
            TypeError: if a leaf is no floating-point array of the dtype it had at init.
        """
        leaves = self.arrange(updates)
        if self._as_at_init(leaves):
            return [x.detach() for x in leaves] if any(map(_REQUIRES_GRAD, leaves)) else leaves
        return [
            None if leaf is None else _matched(leaf, spec)
            for leaf, spec in zip(leaves, self.leaves, strict=True)
        ]

    def _as_at_init(self, leaves: Sequence[Any]) -> bool:
        """Whether all are dense torch tensors of the shapes and dtypes at `init`."""
        return (
            all_tensors(leaves)
            and list(map(_SHAPE, leaves)) == self.shapes
            and list(map(_DTYPE, leaves)) == self._torch_dtypes
            and set(map(_LAYOUT, leaves)) <= {torch.strided}
        )

    def arrange(self, tree: PyTree) -> list[Any]:
        """The leaves of a tree in the order of this layout, found by path, as they are.

        Raises:
            ValueError: if a path is missing or unknown.
        """
        leaves, treespec = flatten(tree)
        if treespec == self.treespec:
            return leaves
        paths, leaves, _ = flatten_with_paths(adopt(tree))
        found = dict(zip(paths, leaves, strict=True))
        return reorder(found, [leaf.path for leaf in self.leaves])


register_node(Layout, static=("leaves", "treespec"))


def without_tables(params: PyTree) -> PyTree:
    """The parameters, with None for those that a chain has given as sparse stand-ins."""
    leaves, treespec = flatten(params)
    in_rows = [isinstance(x, torch.Tensor) and x.is_sparse for x in leaves]
    return unflatten(treespec, [None if yes else x for x, yes in zip(leaves, in_rows, strict=True)])


def check_leaf(path: str, leaf: Any) -> None:
    """Refuses a leaf that is no dense floating-point array, naming its path."""
    _check_floats(path, leaf)
    if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided:
        raise TypeError(
            f"leaf {path!r} is sparse ({leaf.layout}): expected a dense gradient, as at init; "
            "write sparse=False. Rows are taken of an Embedding's weight, if init has the module "
            "and nothing else uses it, or where init has a sparse tensor"
        )


def _check_floats(path: str, leaf: Any) -> None:
    if not backends.is_array(leaf):
        raise TypeError(
            f"leaf {path!r} is a {type(leaf).__name__}: "
            "expected a torch tensor, a JAX array or None"
        )
    dtype = backends.of(leaf).dtype_name(leaf)
    if dtype not in FLOATS:
        raise TypeError(f"leaf {path!r} has dtype {dtype}: expected one of {', '.join(FLOATS)}")


def _matched(leaf: Any, spec: LeafSpec) -> Array | Rows:
    if spec.table is not None:
        return rows_of(spec.path, leaf, spec.table)
    check_leaf(spec.path, leaf)
    _check_against(leaf, spec)
    return backends.of(leaf).detach(leaf)


def _check_against(leaf: Any, spec: LeafSpec) -> None:
    if spec.shape is None or spec.dtype is None:
        raise ValueError(f"leaf {spec.path!r} was None at init and has a gradient now")
    if tuple(leaf.shape) != spec.shape:
        raise ValueError(
            f"leaf {spec.path!r} has shape {tuple(leaf.shape)}: expected {spec.shape}, as at init"
        )
    dtype = backends.of(leaf).dtype_name(leaf)
    # A result must fit the dtype that the leaf had at init, for ranks to judge it alike: so a wider
    # gradient is welcome, and a narrower one is not.
    if dtype not in (spec.dtype, accumulation_dtype(spec.dtype)):
        wide = accumulation_dtype(spec.dtype)
        raise TypeError(
            f"leaf {spec.path!r} has dtype {dtype}: expected {spec.dtype}, as at init"
            + ("" if wide == spec.dtype else f", or {wide}")
            + "; give init a tree with the dtypes of the gradients"
        )


def layout_of(params: PyTree, info: Info | None = None) -> Layout:
    """The layout of a parameter tree.

    Args:
        params: the tree. A sparse COO tensor stands for a leaf with row-sparse gradients.
        info: what is known of the leaves, by path.

    Raises:
        TypeError: if a leaf is no floating-point array, or some are torch's and some JAX's.
        ValueError: if two leaves have the same path.
    """
    paths, leaves, treespec = flatten_with_paths(params)
    specs = []
    for path, leaf in zip(paths, leaves, strict=True):
        if leaf is None:
            specs.append(LeafSpec(path, None, None))
            continue
        if isinstance(leaf, torch.nn.parameter.UninitializedParameter):
            raise ValueError(
                f"parameter {path!r} is lazy and has no shape yet: run a forward first"
            )
        known = (info or {}).get(path)
        in_rows = isinstance(leaf, torch.Tensor) and leaf.is_sparse and leaf.ndim > 0
        (_check_floats if in_rows else check_leaf)(path, leaf)
        shape, dtype = tuple(leaf.shape), backends.of(leaf).dtype_name(leaf)
        if in_rows or (known is not None and known.row_sparse):
            specs.append(LeafSpec(path, None, None, Table(shape, dtype)))
        else:
            specs.append(LeafSpec(path, shape, dtype))
    kinds = {backends.of(leaf).__name__ for leaf in leaves if leaf is not None}
    if len(kinds) > 1:
        raise TypeError(
            "some leaves are torch tensors and some JAX arrays: give all of one kind (gx.to_jax "
            "and gx.to_torch make one of the other)"
        )
    twice = (
        {path for path in paths if paths.count(path) > 1} if len(set(paths)) < len(paths) else ()
    )
    if twice:
        raise ValueError(f"several leaves have the path {', '.join(map(repr, sorted(twice)))}")
    return Layout(tuple(specs), treespec)


Info: TypeAlias = Mapping[str, LeafInfo]


def parameters_of(params: PyTree, info: Info | None = None) -> tuple[PyTree, Info | None]:
    """The tree of parameters and what is known of them.

    Args:
        params: a pytree of arrays, or an `nn.Module`.
        info: what is known already, handed through for a pytree.

    Returns:
        For a module, its `named_parameters()` as a dict, and a `LeafInfo` for each; else the
        arguments, boxes opened.
    """
    if not isinstance(params, torch.nn.Module):
        return unboxed(adopt(params)), info
    found: dict[str, LeafInfo] = {}
    by_identity: dict[int, str] = {}
    for prefix, module in params.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            path = f"{prefix}.{name}" if prefix else name
            first = by_identity.setdefault(id(parameter), path)
            known = found.get(first)
            # A parameter that several modules share is a normalisation layer's if one of them is,
            # and has row-sparse gradients if it has them in all.
            in_rows = isinstance(module, LOOKUPS) and module.sparse and name == "weight"
            in_rows = in_rows and (known is None or known.row_sparse)
            if known is None or not known.running_statistics:
                known = LeafInfo(type(module), name, keeps_running_statistics(module))
            found[first] = replace(known, row_sparse=in_rows)
    return dict(params.named_parameters()), found


def keeps_running_statistics(module: torch.nn.Module) -> bool:
    """Says whether a module normalises with a running mean and variance."""
    if isinstance(module, torch.nn.modules.batchnorm._NormBase):
        return bool(module.track_running_stats)
    buffers = dict(module.named_buffers(recurse=False))
    return "running_mean" in buffers and "running_var" in buffers
