"""What all compressors share: from `encode`, on one flat leaf, to a transformation."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gradtx import backends
from gradtx.core.payload import Member, Payload, values_of
from gradtx.core.phases import in_phase
from gradtx.core.row_sparse import SelectRows
from gradtx.core.stage import Stage
from gradtx.core.transformation import Context, EncodeFn, Transformation
from gradtx.core.tree import (
    Array,
    Info,
    PyTree,
    arrays_in,
    flatten,
    flatten_with_paths,
    unflatten,
    widen,
)

Encode = Callable[[Array, tuple[int, ...]], Payload]
EncodeAll = Callable[[Sequence[Array], Sequence[tuple[int, ...]]], list[Payload]]


def compressor(
    stage: Stage,
    encode: Encode,
    *,
    encode_all: tuple[EncodeAll, ...] = (),
    encode_joined: Callable[..., Payload] | None = None,
    shows: bool = False,
    select_rows: SelectRows | None = None,
) -> Transformation:
    """A stateless compressor, leaf by leaf.

    Args:
        stage: its declaration.
        encode: ``encode(flat, shape) -> Payload``: `flat` are the values of one leaf in FP32 (FP64
            for FP64 leaves), `shape` is the shape of the leaf.
        encode_all: ``encode_all(flats, shapes) -> payloads``: the same for several leaves, where it
            pays to treat them together; several such functions, if the further ones encode the
            values that are left.
        encode_joined: ``encode_joined(flat, sizes) -> Payload``: the same for leaves of some sizes
            that stand one after the other, all at once, if that can be.
        shows: whether an infinity or a NaN is always among the values of the payload.
        select_rows: chooses among the rows of row-sparse leaves; None leaves them all.

    Returns:
        The transformation. A payload that arrives has its float child compressed.
    """

    def encoder(encode_all: EncodeAll) -> EncodeFn:
        @in_phase("select")
        def encoded(leaves: Sequence[Any]) -> list[Payload]:
            check_form(stage, leaves)
            return encode_leaves(leaves, encode_all)

        return encoded

    encoders = tuple(map(encoder, encode_all or (each(encode),)))

    @in_phase("select")
    def update(
        updates: PyTree, state: Any, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        choose_rows(select_rows, state, extra.get("context"))
        leaves, treespec = flatten(updates)
        check_form(stage, leaves)
        places = [i for i, leaf in enumerate(leaves) if leaf is not None]
        ops = backends.find(arrays_in(leaves))
        found = ops.each(lambda leaf: encode_leaf(leaf, encode), [leaves[i] for i in places])
        for i, payload in zip(places, found, strict=True):
            leaves[i] = payload
        return unflatten(treespec, leaves), state

    return Transformation(
        stage,
        None,
        update,
        encoders=encoders,
        encode_joined=encode_joined,
        shows=shows,
        select_rows=select_rows,
    )


def choose_rows(select_rows: SelectRows | None, state: Any, context: Context | None) -> None:
    """Chooses among the rows of row-sparse leaves, where that is asked for."""
    if select_rows is not None and context is not None:
        context.progress.rows = select_rows(context.progress.rows, state)


class RandomState(NamedTuple):
    """The state of a compressor that draws random numbers.

    Attributes:
        count: 0-d int32: steps so far; with the seed, the compressor's name, the leaf's path and
            the rank it is all that the numbers depend on.
    """

    count: Array


def random_compressor(
    stage: Stage,
    encode: Callable[[Array, tuple[int, ...], Array], Payload],
    *,
    seed: int,
    shared: bool,
) -> Transformation:
    """A compressor that draws random numbers, leaf by leaf, from a stream of its own.

    Args:
        stage: its declaration.
        encode: ``encode(flat, shape, key) -> Payload``, as for `compressor`; the key is for
            `ops.uniform(key, n, like)` and differs for every leaf and step.
        seed: of the stream.
        shared: whether all ranks draw the same numbers, rather than independent ones.

    Returns:
        The transformation.
    """

    def init(params: PyTree, info: Info | None) -> RandomState:
        return RandomState(backends.find(flatten(params)[0]).counter())

    @in_phase("select")
    def update(
        updates: PyTree, state: RandomState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, RandomState]:
        context: Context | None = extra.get("context")
        rank = 0 if shared or context is None else context.rank
        paths, leaves, treespec = flatten_with_paths(updates)
        check_form(stage, leaves)
        ops = backends.of(state.count)
        places = [i for i, leaf in enumerate(leaves) if leaf is not None]
        # The name, so that two compressors of one seed in a chain draw independently.
        words = [zlib.crc32(f"{stage.name} {paths[i]}".encode()) for i in places]
        keys = ops.random_keys(seed, words, rank, state.count)

        def encoded(leaf: Any, key: Array) -> Payload:
            return encode_leaf(leaf, lambda flat, shape: encode(flat, shape, key))

        found = ops.each(encoded, [leaves[i] for i in places], list(keys))
        for i, payload in zip(places, found, strict=True):
            leaves[i] = payload
        return unflatten(treespec, leaves), RandomState(state.count + 1)

    return Transformation(stage, init, update)


def check_form(stage: Stage, leaves: Sequence[Any]) -> None:
    """Refuses payloads where a stage takes dense leaves only.

    Raises:
        TypeError: naming the first of them.
    """
    for leaf in leaves:
        if isinstance(leaf, Payload) and stage.takes == {"dense"}:
            raise TypeError(f"{stage.code()} takes dense leaves only, got {leaf!r}")


def encode_leaf(leaf: Any, encode: Encode) -> Payload:
    """One leaf encoded: an array, or the float child of a payload, however deep."""
    if not isinstance(leaf, Payload):
        wide = widen(leaf)
        return encode(backends.of(wide).ravel(wide), tuple(leaf.shape))
    if isinstance(leaf, Member):
        return leaf
    values = values_of(leaf)
    if values is None:
        raise TypeError(f"{leaf!r} has no values left to compress")
    return leaf.with_values(encode_leaf(values, encode))


def each(encode: Encode) -> EncodeAll:
    """What encodes several leaves, one after the other."""

    def encode_all(flats: Sequence[Array], shapes: Sequence[tuple[int, ...]]) -> list[Payload]:
        return [encode(flat, shape) for flat, shape in zip(flats, shapes, strict=True)]

    return encode_all


def encode_leaves(leaves: Sequence[Any], encode_all: EncodeAll) -> list[Payload]:
    """Leaves encoded, all of them arrays, or the float children of payloads, however deep."""
    if not any(isinstance(leaf, Payload) for leaf in leaves):
        wide = [widen(leaf) for leaf in leaves]
        shapes = [tuple(leaf.shape) for leaf in leaves]
        return encode_all([backends.of(x).ravel(x) for x in wide], shapes)
    values = [values_of(leaf) for leaf in leaves]
    for leaf, own in zip(leaves, values, strict=True):
        if own is None:
            raise TypeError(f"{leaf!r} has no values left to compress")
    found = zip(leaves, encode_leaves(values, encode_all), strict=True)
    return [leaf.with_values(payload) for leaf, payload in found]
