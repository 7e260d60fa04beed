"""Payloads as one array of bytes, under JAX; importing it imports jax.

Sizes are static. Positions in a leaf take 16 bits each, within blocks of 65,536, and each further
block its count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gradtx.backends import rows
from gradtx.core.payload import Joined, Payload
from gradtx.core.tree import structure, unflatten
from gradtx.exchange.message import Field, fields

Array = jax.Array

BLOCK = 2**16


@dataclass(frozen=True)
class Group:
    """Payloads of leaves of one shape, or one that stands alone.

    Attributes:
        places: for each payload, the positions of its leaves.
        payload: the payload; of several, one whose arrays have them as rows.
    """

    places: list[list[int]]
    payload: Payload

    @classmethod
    def of(cls, payloads: Sequence[Payload], places: Sequence[list[int]]) -> list[Group]:
        """All that is sent, and the positions of its leaves."""
        # The positions in a large leaf are told block by block, in those of one leaf.
        small = [i for i, payload in enumerate(payloads) if payload.size <= BLOCK]
        found = [[small[i] for i in group] for group in rows.groups([payloads[i] for i in small])]
        found += [[i] for i, payload in enumerate(payloads) if payload.size > BLOCK]
        out = []
        for members in found:
            chosen = [payloads[i] for i in members]
            payload = rows.stacked(chosen) if len(members) > 1 else chosen[0]
            out.append(cls([places[i] for i in members], payload))
        return out

    @property
    def size(self) -> int:
        """How many values a leaf has."""
        return self.payload.size

    def mapped(self, fn: Callable[..., Any], **axes: Any) -> Callable[..., Any]:
        """`fn`, which is written for one payload, over those of the group."""
        over_rows: Callable[..., Any] = jax.vmap(fn, **axes)
        return over_rows if len(self.places) > 1 else fn

    def decode(self, payload: Payload) -> Array:
        """The dense values, flat; of several payloads in rows."""
        values: Array = self.mapped(_decode)(payload)
        return values

    def add(self, payload: Payload, total: Array) -> Array:
        """The values added to those of other devices."""
        values: Array = self.mapped(_add)(payload, total)
        return values

    def split(self, total: Array) -> Iterator[tuple[int, Array]]:
        """The values by position of the leaf, flat."""
        if isinstance(self.payload, Joined):
            for i, part in self.payload.parts.split(total).items():
                yield i, jnp.ravel(part)
            return
        for number, [place] in enumerate(self.places):
            yield place, rows.row(total, number) if len(self.places) > 1 else total


def added(groups: Sequence[Group], packing: Packing, received: Array) -> list[Array]:
    """For each group, the sum over all devices, in their order."""
    first = [
        group.decode(payload)
        for group, payload in zip(groups, packing.decode(received[0]), strict=True)
    ]

    def add(totals: list[Array], message: Array) -> tuple[list[Array], None]:
        found = zip(groups, packing.decode(message), totals, strict=True)
        return [group.add(payload, total) for group, payload, total in found], None

    # A loop, so that the program does not grow with the number of devices.
    totals: list[Array] = jax.lax.scan(add, first, received[1:])[0]
    return totals


def _add(payload: Payload, total: Array) -> Any:
    return payload.add_to(total)


def _decode(payload: Payload) -> Any:
    return payload.decode()


def nbytes_of(payloads: Sequence[Payload]) -> int:
    """What some payloads take on the link, in bytes."""
    return sum(_field_nbytes(field) for payload in payloads for field in fields(payload))


def _field_nbytes(field: Field) -> int:
    if field.universe is None:
        return field.nbytes
    return 2 * int(field.array.size) + 4 * _further_blocks(field.universe)


def _further_blocks(universe: int) -> int:
    return max(0, -(-universe // BLOCK) - 1)


class Packing:
    """How the arrays of some payloads are laid into one array of bytes: those of a dtype together.

    Args:
        payloads: on this device; those of the others have the same shapes.
    """

    def __init__(self, payloads: Sequence[Payload]) -> None:
        self._treespec = structure(list(payloads))
        self._fields = [field for payload in payloads for field in fields(payload)]
        self._forms = [form for field in self._fields for form in _forms(field)]
        self._dtypes = sorted({jnp.dtype(dtype) for _, dtype in self._forms}, key=str)

    def encode(self, good: Array | None = None) -> Array:
        """uint8 ``[n]``: all fields, and whether the gradients were finite, where that is given."""
        parts = [jnp.ravel(part) for field in self._fields for part in _encoded(field)]
        groups = [jnp.concatenate([x for x in parts if x.dtype == kind]) for kind in self._dtypes]
        flags = [] if good is None else [good.astype(jnp.uint8)[None]]
        return jnp.concatenate([*map(_to_bytes, groups), *flags])

    def all_good(self, received: Array) -> Array:
        """0-d bool: the gradients of all devices were finite."""
        good: Array = received[:, -1].all()
        return good

    def decode(self, message: Array) -> list[Payload]:
        """The payloads of one device."""
        parts: list[Any] = [None] * len(self._forms)
        start = 0
        for kind in self._dtypes:
            places = [i for i, (_, dtype) in enumerate(self._forms) if dtype == kind]
            sizes = [math.prod(self._forms[i][0]) for i in places]
            end = start + sum(sizes) * kind.itemsize
            values, first = _from_bytes(message[start:end], kind), 0
            for i, size in zip(places, sizes, strict=True):
                parts[i] = jnp.reshape(values[first : first + size], self._forms[i][0])
                first += size
            start = end
        rest = iter(parts)
        arrays = [_decoded(field, [next(rest) for _ in _forms(field)]) for field in self._fields]
        payloads: list[Payload] = list(unflatten(self._treespec, arrays))
        return payloads


def _encoded(field: Field) -> Iterator[Array]:
    if field.local:
        return
    if field.universe is None:
        yield field.array
        return
    indices = jnp.ravel(field.array)
    yield (indices % BLOCK).astype(jnp.uint16)
    if blocks := _further_blocks(field.universe):
        starts = jnp.arange(1, blocks + 1, dtype=indices.dtype) * BLOCK
        yield jnp.searchsorted(indices, starts).astype(jnp.int32)


def _forms(field: Field) -> Iterator[tuple[tuple[int, ...], Any]]:
    if field.local:
        return
    if field.universe is None:
        yield tuple(field.array.shape), field.array.dtype
        return
    yield (int(field.array.size),), jnp.uint16
    if blocks := _further_blocks(field.universe):
        yield (blocks,), jnp.int32


def _decoded(field: Field, parts: Sequence[Array]) -> Any:
    if field.local:
        return field.array
    if field.universe is None:
        return parts[0]
    indices = parts[0].astype(field.array.dtype)
    if len(parts) > 1:
        # Which block each is in: how many of the further blocks have begun by then.
        begun = jnp.searchsorted(parts[1], jnp.arange(indices.size), side="right")
        indices = indices + begun.astype(indices.dtype) * BLOCK
    return jnp.reshape(indices, field.array.shape)


def _to_bytes(x: Array) -> Array:
    return jnp.ravel(jax.lax.bitcast_convert_type(x, jnp.uint8))


def _from_bytes(data: Array, dtype: Any) -> Array:
    rows = jnp.reshape(data, (-1, dtype.itemsize)) if dtype.itemsize > 1 else data
    values: Array = jax.lax.bitcast_convert_type(rows, dtype)
    return values
