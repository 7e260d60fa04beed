"""The exchange over an axis of a JAX mesh: inside the compiled program, all shapes static.

Importing it imports jax. There is no handshake and no header: all devices run one program. What
is gathered travels as one array of bytes, with one byte for the bad step; what is summed as one
array a dtype. Positions in a leaf take 16 bits each, within blocks of 65,536, and each further
block its count.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gradtx.backends import rows
from gradtx.core.payload import Joined, Payload
from gradtx.core.transformation import Context
from gradtx.core.tree import arrays_in, structure, unflatten
from gradtx.exchange.message import Field, fields
from gradtx.exchange.plan import Plan, further_rounds, results_of

Array = jax.Array

BLOCK = 2**16


class Link:
    """What one device puts on the link to its neighbour in a ring.

    Attributes:
        sent: bytes, all copies counted.
    """

    def __init__(self) -> None:
        self.sent = 0


_link: ContextVar[Link | None] = ContextVar("link", default=None)


@contextmanager
def counted() -> Iterator[Link]:
    """Counts the bytes that are sent by the programs traced inside (not by running them).

    Where a program branches on the step, all branches are counted.
    """
    link = Link()
    token = _link.set(link)
    try:
        yield link
    finally:
        _link.reset(token)


class MeshAxis:
    """The devices along one axis of a mesh, as the program on one of them sees them.

    It stands for `gradtx.exchange.group.Group` on arrays. Alone, without a name.

    Args:
        name: of the axis, bound by `jax.shard_map` (or `jax.vmap`); None for this device alone.

    Raises:
        ValueError: if there is no such axis here, naming those that there are; or, without a name,
            if there are axes of a mesh that the gradients may vary over.
    """

    def __init__(self, name: str | None) -> None:
        self.name = name
        axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
        self._axes = axes
        self._of_mesh = name in axes
        if name is None:
            if axes:
                raise ValueError(
                    f"allreduce() inside a mesh with the axes {_listed(axes)}: say over which to "
                    f"exchange, such as allreduce(axis_name={axes[0]!r})"
                )
            self.size = 1
            return
        try:
            self.size = int(jax.lax.axis_size(name))
        except NameError:
            there = f"the axes here are {_listed(axes)}" if axes else "there is no axis here"
            raise ValueError(
                f"allreduce(axis_name={name!r}): no axis of that name; {there} (call update inside "
                "jax.shard_map over a mesh that has it)"
            ) from None

    @property
    def rank(self) -> Any:
        """This device's number along the axis: 0-d int32."""
        return 0 if self.name is None else jax.lax.axis_index(self.name)

    def all_gather(self, message: Array) -> Array:
        """``[size, n]``: the arrays ``[n]`` of all devices, in their order."""
        if self.name is None:
            return message[None]
        self._count((self.size - 1) * message.size * message.dtype.itemsize)
        # All devices get the same, and JAX, which keeps track of that, is told so.
        to = "invarying" if self._of_mesh else "varying"
        gathered: Array = jax.lax.all_gather(message, self.name, to=to)
        return gathered

    def all_reduce(self, buffer: Array) -> Array:
        """The sum over devices."""
        if self.name is None:
            return buffer
        self._count(2 * (self.size - 1) * buffer.size * buffer.dtype.itemsize // self.size)
        psum: Any = jax.lax.psum
        total: Array = psum(buffer, self.name)
        return total

    def _count(self, nbytes: int) -> None:
        link = _link.get()
        if link is not None:
            link.sent += nbytes

    def varies(self, x: Array) -> bool:
        """Whether JAX knows an array to vary along the axis: it does only under ``check_vma``."""
        return self.name in _varying(x)

    def check(self, leaves: Mapping[str, Array]) -> None:
        """Refuses gradients that JAX has summed already, where it keeps track of that.

        Args:
            leaves: by path, as they were given to the chain.

        Raises:
            ValueError: naming those that do not vary along the axis.
        """
        if not (self._of_mesh and self.varies(self.rank)):
            return
        same = [path for path, leaf in leaves.items() if leaf.size and not self.varies(leaf)]
        if same:
            raise ValueError(
                f"the gradients of {_listed(same)} are the same on all devices along "
                f"{self.name!r}: with respect to parameters that do not vary along it, jax.grad "
                "has summed them, uncompressed; take the gradient with respect to "
                f"jax.lax.pcast(params, {self.name!r}, to='varying')"
            )

    def everywhere(self, good: Array, leaves: Sequence[Any]) -> Array:
        """Whether a step is good along all axes of the mesh that some leaf varies over."""
        others = [axis for axis in self._axes if axis != self.name]
        if self._of_mesh and self.varies(self.rank):
            varying = {axis for x in arrays_in(leaves) for axis in _varying(x)}
            others = [axis for axis in others if axis in varying]
        if not others:
            return good
        psum: Any = jax.lax.psum
        everywhere: Array = psum((~good).astype(jnp.int32), tuple(others)) == 0
        return everywhere


def exchange(
    axis: MeshAxis,
    leaves: Sequence[Any],
    context: Context,
    *,
    op: str,
    algorithm: str,
    finite: Array | None,
) -> tuple[list[Any], dict[int, Payload], Array]:
    """Sends what leaves this device, and adds up what comes in.

    Args:
        axis: the devices.
        leaves: as they arrive, in the order of the layout.
        context: of the step.
        op: ``"mean"`` or ``"sum"``.
        algorithm: ``"auto"`` or ``"gather"``.
        finite: 0-d bool: this device's gradients were finite; None does not say.

    Returns:
        The dense leaves; the payloads whose values are known only now, by position; and whether
        the gradients of all devices were finite.
    """
    plan = Plan(leaves, context, axis.size, algorithm, _nbytes, lambda payloads: 1)
    said = _Said.of(context, finite)
    totals: dict[int, Array] = {}
    heard: _Said | None = None
    if plan.payloads:
        groups = _Group.of(plan)
        packing = _Packing([group.payload for group in groups])
        received = axis.all_gather(packing.encode(said))
        for group, sums in zip(groups, _added(groups, packing, received), strict=True):
            totals.update((i, x.astype(plan.dtype(i))) for i, x in group.split(sums))
        heard = packing.heard(received, said)
    for dtype, places in plan.dense_places.items():
        parts = [jnp.ravel(plan.parts[i]).astype(dtype) for i in places]
        if heard is None:
            total = axis.all_reduce(jnp.concatenate([*parts, said.numbers.astype(dtype)]))
            heard, total = said.like(total[-said.length :]), total[: -said.length]
        else:
            total = axis.all_reduce(jnp.concatenate(parts))
        totals |= plan.split(dtype, total)
    if heard is None:
        raise AssertionError("an exchange has a message or a buffer")
    heard.tell(context, axis.size)
    summed = further_rounds(axis.all_reduce, axis.size, plan, totals)
    results = results_of(plan, totals, summed, axis.size, op, context.progress.factor)
    return plan.shaped(leaves, results), plan.late(summed), heard.good


@dataclass(frozen=True)
class _Said:
    """What a device says of its step, or what all say together.

    Attributes:
        numbers: FP32: whether its gradients were not finite; and, where devices bring unequal
            parts, whether it has left something bad out, and what its part weighs.
    """

    numbers: Array

    @classmethod
    def of(cls, context: Context, finite: Array | None) -> _Said:
        """What this device says."""
        bad = jnp.asarray(False) if finite is None else ~finite
        share = context.share
        said = [bad] if share is None else [bad, share.left_out, share.weight]
        return cls(jnp.stack([jnp.asarray(x, jnp.float32) for x in said]))

    @property
    def length(self) -> int:
        """How many numbers."""
        return int(self.numbers.shape[0])

    def like(self, total: Array) -> _Said:
        """The same of all devices, from the sum of their numbers."""
        return _Said(total.astype(jnp.float32))

    @property
    def good(self) -> Array:
        """0-d bool: all gradients were finite, and not all of them left out."""
        good: Array = self.numbers[0] == 0
        if self.length > 1:
            good = good & ~((self.numbers[1] > 0) & (self.numbers[2] == 0))
        return good

    def tell(self, context: Context, size: int) -> None:
        """Says of the step what the devices have brought together."""
        if self.length == 1:
            return
        told, (bad, left_out, weight) = context.progress, self.numbers
        told.left_out = left_out > 0
        told.nothing = (weight == 0) & ~told.left_out & (bad == 0)
        if context.weight is not None:
            told.factor = size / jnp.where(weight == 0, size, weight)


@dataclass(frozen=True)
class _Group:
    """Payloads of leaves of one shape, or one that stands alone.

    Attributes:
        places: for each payload, the positions of its leaves.
        payload: the payload; of several, one whose arrays have them as rows.
    """

    places: list[list[int]]
    payload: Payload

    @classmethod
    def of(cls, plan: Plan) -> list[_Group]:
        """All that is gathered."""
        # The positions in a large leaf are told block by block, in those of one leaf.
        small = [i for i, payload in enumerate(plan.payloads) if payload.size <= BLOCK]
        groups = rows.groups([plan.payloads[i] for i in small])
        found = [[small[i] for i in group] for group in groups]
        found += [[i] for i, payload in enumerate(plan.payloads) if payload.size > BLOCK]
        out = []
        for members in found:
            payloads = [plan.payloads[i] for i in members]
            payload = rows.stacked(payloads) if len(members) > 1 else payloads[0]
            out.append(cls([plan.places[i] for i in members], payload))
        return out

    def decode(self, payload: Payload) -> Array:
        """The dense values, flat; of several payloads in rows."""
        decode: Any = jax.vmap(_decode) if len(self.places) > 1 else _decode
        values: Array = decode(payload)
        return values

    def add(self, payload: Payload, total: Array) -> Array:
        """The values added to those of other devices."""
        add: Any = jax.vmap(_add) if len(self.places) > 1 else _add
        values: Array = add(payload, total)
        return values

    def split(self, total: Array) -> Iterator[tuple[int, Array]]:
        """The values by position of the leaf, flat."""
        if isinstance(self.payload, Joined):
            for i, part in self.payload.parts.split(total).items():
                yield i, jnp.ravel(part)
            return
        for number, [place] in enumerate(self.places):
            yield place, rows.row(total, number) if len(self.places) > 1 else total


def _added(groups: Sequence[_Group], packing: _Packing, received: Array) -> list[Array]:
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


def _nbytes(payloads: Sequence[Payload]) -> int:
    return sum(_field_nbytes(field) for payload in payloads for field in fields(payload))


def _field_nbytes(field: Field) -> int:
    if field.universe is None:
        return field.nbytes
    return 2 * int(field.array.size) + 4 * _further_blocks(field.universe)


def _further_blocks(universe: int) -> int:
    return max(0, -(-universe // BLOCK) - 1)


class _Packing:
    """How the arrays of some payloads are laid into one array of bytes: those of a dtype together.

    Args:
        payloads: on this device; those of the others have the same shapes.
    """

    def __init__(self, payloads: Sequence[Payload]) -> None:
        self._treespec = structure(list(payloads))
        self._fields = [field for payload in payloads for field in fields(payload)]
        self._forms = [form for field in self._fields for form in _forms(field)]
        self._dtypes = sorted({jnp.dtype(dtype) for _, dtype in self._forms}, key=str)

    def encode(self, said: _Said) -> Array:
        """uint8 ``[n]``: all fields, and what is said of the step."""
        parts = [jnp.ravel(part) for field in self._fields for part in _encoded(field)]
        groups = [jnp.concatenate([x for x in parts if x.dtype == kind]) for kind in self._dtypes]
        return jnp.concatenate([*map(_to_bytes, groups), _flags_in_bytes(said)])

    def heard(self, received: Array, said: _Said) -> _Said:
        """What all devices say, from their messages."""
        flags = received[:, -_nbytes_said(said) :]
        numbers = flags[:, -1:].astype(jnp.float32)
        if said.length > 1:
            rest = jax.vmap(lambda row: _from_bytes(row, jnp.dtype(jnp.float32)))(flags[:, :-1])
            numbers = jnp.concatenate([numbers, rest], axis=1)
        return said.like(numbers.sum(0))

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


def _nbytes_said(said: _Said) -> int:
    return 1 + 4 * (said.length - 1)


def _flags_in_bytes(said: _Said) -> Array:
    bad = (said.numbers[:1] != 0).astype(jnp.uint8)
    return bad if said.length == 1 else jnp.concatenate([_to_bytes(said.numbers[1:]), bad])


def _to_bytes(x: Array) -> Array:
    return jnp.ravel(jax.lax.bitcast_convert_type(x, jnp.uint8))


def _from_bytes(data: Array, dtype: Any) -> Array:
    rows = jnp.reshape(data, (-1, dtype.itemsize)) if dtype.itemsize > 1 else data
    values: Array = jax.lax.bitcast_convert_type(rows, dtype)
    return values


def _varying(x: Array) -> Any:
    """The axes that JAX knows an array to vary over."""
    kind: Any = jax.typeof(x)
    tracked: Any = getattr(kind, "mat", None)
    return kind.vma if tracked is None else tracked.varying


def _listed(axes: Sequence[str]) -> str:
    return ", ".join(map(repr, axes))
