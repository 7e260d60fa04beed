"""Payloads as one array of bytes, under JAX; importing it imports jax.

Sizes are static. Positions in a leaf take 16 bits each, within blocks of 65,536, and each further
block its count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from gradtx.backends import rows
from gradtx.core.payload import Joined, Payload
from gradtx.core.transformation import Context
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


@dataclass(frozen=True)
class Said:
    """What a device says of its step, or what all say together.

    Attributes:
        numbers: FP32: whether its gradients were not finite; and, where devices bring unequal
            parts, whether it has left something bad out, and what its part weighs.
        partial: whether others are still to be heard, in an exchange to come.
    """

    numbers: Array
    partial: bool = False

    @classmethod
    def of(cls, context: Context, finite: Array | None) -> Said:
        """What this device says."""
        bad = jnp.asarray(False) if finite is None else ~finite
        share = context.share
        said = [bad] if share is None else [bad, share.left_out, share.weight]
        numbers = jnp.stack([jnp.asarray(x, jnp.float32) for x in said])
        return cls(numbers, share is not None and share.partial)

    @property
    def length(self) -> int:
        """How many numbers."""
        return int(self.numbers.shape[0])

    @property
    def in_bytes(self) -> Array:
        """uint8: one byte, or as many as the numbers take where there are several."""
        bad = (self.numbers[:1] != 0).astype(jnp.uint8)
        return bad if self.length == 1 else jnp.concatenate([_to_bytes(self.numbers[1:]), bad])

    def heard(self, received: Array) -> Said:
        """What all devices say, at the end of their messages ``[size, n]``."""
        flags = received[:, -(1 + 4 * (self.length - 1)) :]
        numbers = flags[:, -1:].astype(jnp.float32)
        if self.length > 1:
            rest = jax.vmap(lambda row: _from_bytes(row, jnp.dtype(jnp.float32)))(flags[:, :-1])
            numbers = jnp.concatenate([numbers, rest], axis=1)
        return replace(self, numbers=numbers.sum(0))

    def summed(self, total: Array) -> Said:
        """What all devices say, from the sum of their numbers."""
        return replace(self, numbers=total.astype(jnp.float32))

    @property
    def good(self) -> Array:
        """0-d bool: all gradients were finite, and not all of them left out."""
        good: Array = self.numbers[0] == 0
        if self.length > 1 and not self.partial:
            good = good & ~((self.numbers[1] > 0) & (self.numbers[2] == 0))
        return good

    def factor(self, context: Context, size: int) -> Any:
        """What results are to be multiplied by; None for one."""
        if self.length == 1 or context.weight is None:
            return None
        weight = self.numbers[2]
        return size / jnp.where(weight == 0, size, weight)

    def tell(self, context: Context, size: int) -> None:
        """Says of the step what the devices have brought together."""
        if self.length == 1:
            return
        told, (bad, left_out, weight) = context.progress, self.numbers
        told.weight, told.left_out = weight, left_out > 0
        told.nothing = (weight == 0) & ~told.left_out & (bad == 0)
        told.factor = self.factor(context, size)


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

    def encode(self, said: Said | None = None) -> Array:
        """uint8 ``[n]``: all fields, and what is said of the step, where that is given."""
        parts = [jnp.ravel(part) for field in self._fields for part in _encoded(field)]
        groups = [jnp.concatenate([x for x in parts if x.dtype == kind]) for kind in self._dtypes]
        flags = [] if said is None else [said.in_bytes]
        return jnp.concatenate([*map(_to_bytes, groups), *flags])

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
