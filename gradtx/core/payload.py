"""Payloads: compressed leaves, as they stand in the stream between compressor and exchange."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import optree

from gradtx import backends
from gradtx.backends.registry import is_registered, register_node


class Entries(NamedTuple):
    """Values at positions.

    Attributes:
        indices: ``[k]``, whole numbers, strictly increasing: positions in the flat leaf.
        values: ``[k]``, or a payload of that shape; zeros are everywhere else.
    """

    indices: Any
    values: Any


class Payload:
    """A compressed leaf.

    A subclass names its array fields in `children`, which its constructor takes first, by
    position, followed by those in `static`, `shape` (of the leaf, dense) and `dtype` (of the
    decoded values: ``"float32"``, or ``"float64"`` for FP64 leaves), and registers itself with
    `register_payload`. All shapes follow from `shape` and the compressor's hyperparameters, never
    from the values; a payload with room to spare says in `used` what an exchange may leave out.

    A gathered payload, the ordinary kind, is sent to all ranks, and their decoded values are
    added. One that says its `grain` may go by way of owners instead: each rank adds up a run of
    the values of all, and sends the sum on in the same format. A payload with ``summed = True`` is
    never sent as it is: the ranks sum its `summand`, once or several times (see `receive`).

    Attributes:
        children: the array fields, in the order of the constructor.
        static: hyperparameters that `decode` needs: hashable, compared by value.
        codecs: how a field is sent: ``"index"`` for strictly increasing positions in the leaf,
            ``"local"`` for what is not sent; by default as its bytes.
        summed: whether ranks sum its `summand` rather than gather it.
        late: of a summed payload, whether `decode` is right only after the last round; before that
            it gives zeros.
        keeps_zeros: whether a value of zero decodes to zero, so that it may be one of a payload
            that pads its values.
        shape: the shape of the dense leaf.
        dtype: the dtype that `decode` gives.
    """

    children: ClassVar[tuple[str, ...]] = ()
    static: ClassVar[tuple[str, ...]] = ()
    codecs: ClassVar[dict[str, str]] = {}
    summed: ClassVar[bool] = False
    late: ClassVar[bool] = False
    keeps_zeros: ClassVar[bool] = False

    shape: tuple[int, ...]
    dtype: str

    def __init__(self, *fields: Any) -> None:
        if not is_registered(type(self)):
            raise TypeError(
                f"{type(self).__name__} is no pytree node: decorate the class with register_payload"
            )
        names = (*self.children, *self.static, "shape", "dtype")
        for name, value in zip(names, fields, strict=True):
            setattr(self, name, value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype!r})"

    @property
    def size(self) -> int:
        """How many values the dense leaf has."""
        return math.prod(self.shape)

    @property
    def positions(self) -> int:
        """How many positions there are for what is sent as an ``"index"``."""
        return self.size

    def decode(self) -> Any:
        """The dense leaf as one flat axis of `size` values."""
        raise NotImplementedError

    @classmethod
    def decode_all(cls, payloads: Sequence[Any]) -> list[Any]:
        """`decode` of several payloads of this class, where it pays to treat them together."""
        return [payload.decode() for payload in payloads]

    def add_to(self, total: Any) -> Any:
        """The decoded values added to a flat `total`, which may be written to."""
        ops = backends.of(total)
        return total + ops.cast(self.decode(), ops.dtype_name(total))

    def subtracted_from(self, flat: Any) -> Any:
        """`flat`, which may be written to, less the decoded values.

        A payload may hold views of `flat`: whoever writes to it copies what is shared.
        """
        ops = backends.of(flat)
        return flat - ops.cast(self.decode(), ops.dtype_name(flat))

    def summand(self) -> Any:
        """What the ranks sum in the next round, flat; None once there is no further round."""
        return None

    def receive(self, total: Any, size: int) -> Payload:
        """The payload after a round: its next `summand`, or, at the end, the mean in `decode`.

        Args:
            total: the sum of `summand` over ranks.
            size: how many ranks there are.
        """
        raise NotImplementedError

    @classmethod
    def receive_all(
        cls, payloads: Sequence[Payload], totals: Sequence[Any], size: int
    ) -> list[Payload]:
        """`receive` for several payloads of this class, where it pays to treat them together."""
        return [
            payload.receive(total, size) for payload, total in zip(payloads, totals, strict=True)
        ]

    def combined(self, total: Any) -> Any:
        """The result, where it is not the sum of the decoded values (`total`) of all ranks."""
        return None

    def used(self) -> Any:
        """Which of its values need to be sent, as bools; None if all do, whatever they are."""
        return None

    def at(self, places: Any) -> Payload | None:
        """A payload of its values at some places alone; None if they cannot be taken apart."""
        return None

    def entries(self) -> Entries | None:
        """Its values at positions that are sent; None for what is no such payload."""
        return None

    def plain(self) -> tuple[Any, Any]:
        """The values in the smallest dtype of floats that has them exactly, flat.

        Returns:
            The values, and int16 ``[1]``, the exponent of two that they are to be multiplied by, or
            None for what they are.
        """
        return self.decode(), None

    @property
    def grain(self) -> int | None:
        """Every so many values it can be cut; None if it cannot be."""
        return None

    def cut(self, start: int, stop: int) -> Payload:
        """The payload of a run of its values, of shape ``[stop - start]``.

        Args:
            start: a multiple of the grain.
            stop: a multiple of it, or the end.
        """
        raise NotImplementedError

    def in_rows(self, count: int, length: int) -> Payload:
        """Runs of its values, of shape ``[length]``: a payload whose arrays have them as rows.

        Args:
            count: how many; the last ones are filled up with zeros.
            length: a multiple of the grain.
        """
        raise NotImplementedError

    def again(self, flat: Any, start: Any) -> Payload:
        """Other values in the format of this payload, and as exact; where that is at random, anew.

        Args:
            flat: a run of values of the leaf, in the dtype of this payload.
            start: where the run starts; a whole number, which may be traced.
        """
        raise NotImplementedError

    def with_values(self, values: Any) -> Payload:
        """This payload with its float child replaced, by an array or a further payload."""
        raise TypeError(f"{type(self).__name__} has no values left to compress")

    def decoded_values(self, values: Any) -> Payload:
        """This payload with its values, which were a payload, as an array."""
        return self.with_values(values)


def register_payload(cls: type[Payload]) -> type[Payload]:
    """Registers a payload class as a pytree node (use it as a class decorator)."""
    return register_node(cls, cls.children, (*cls.static, "shape", "dtype"))


def values_of(payload: Payload) -> Any:
    """The float child of a payload that a later compressor may compress, or None."""
    return getattr(payload, "values", None)


def dense(value: Any) -> Any:
    """The flat values of an array or of a payload."""
    return value.decode() if isinstance(value, Payload) else value


def with_dense_values(payloads: Sequence[Payload]) -> list[Payload]:
    """The payloads, with values that are payloads decoded, those of one class together."""
    out = list(payloads)
    found: dict[type[Payload], list[int]] = {}
    for i, payload in enumerate(payloads):
        if isinstance(values := values_of(payload), Payload):
            found.setdefault(type(values), []).append(i)
    for cls, places in found.items():
        decoded = cls.decode_all([values_of(payloads[i]) for i in places])
        for i, values in zip(places, decoded, strict=True):
            out[i] = payloads[i].decoded_values(values)
    return out


def plain(value: Any) -> tuple[Any, Any]:
    """As `Payload.plain`, of an array too."""
    return value.plain() if isinstance(value, Payload) else (value, None)


@register_payload
class Joined(Payload):
    """Several leaves compressed as one: the flat leaves one after the other, in path order.

    It stands at the place of the first of them; a `Member` stands for each of the others.
    ``shape`` is the length of the concatenation, as a 1-tuple.
    """

    children = ("payload", "parts")
    payload: Payload
    parts: Parts

    @property
    def values(self) -> Any:
        """The float child of what is joined."""
        return values_of(self.payload)

    def with_values(self, values: Any) -> Payload:
        """The joined payload with other values."""
        return Joined(self.payload.with_values(values), self.parts, self.shape, self.dtype)

    def entries(self) -> Entries | None:
        """Those of what is joined."""
        return self.payload.entries()

    @property
    def grain(self) -> int | None:
        """That of what is joined."""
        return self.payload.grain

    def cut(self, start: int, stop: int) -> Payload:
        """A run of the values, not joined any more."""
        return self.payload.cut(start, stop)

    def in_rows(self, count: int, length: int) -> Payload:
        """Runs of the values, not joined any more."""
        return self.payload.in_rows(count, length)

    def decode(self) -> Any:
        """All leaves, flat, one after the other."""
        return self.payload.decode()


class Parts:
    """Which leaves a `Joined` holds: position in the tree and shape of each; a static node."""

    def __init__(self, leaves: tuple[tuple[int, tuple[int, ...]], ...]) -> None:
        self.leaves = leaves

    @property
    def sizes(self) -> list[int]:
        """How many values each of them has."""
        return [math.prod(shape) for _, shape in self.leaves]

    def split(self, flat: Any) -> dict[int, Any]:
        """The dense leaves by position."""
        out, start, ops = {}, 0, backends.of(flat)
        for position, shape in self.leaves:
            size = math.prod(shape)
            out[position] = ops.reshape(flat[start : start + size], shape)
            start += size
        return out


register_node(Parts, static=("leaves",))


@register_payload
class Member(Payload):
    """A leaf whose values are in the `Joined` payload at another place of the tree."""

    def decode(self) -> Any:
        """Refuses: the values are in the `Joined` payload."""
        raise TypeError("a Member is decoded with its Joined, by decode_leaves")


def decode_leaves(leaves: list[Any]) -> list[Any]:
    """The dense leaves of a list of arrays, payloads and Nones."""
    out: list[Any] = list(leaves)
    places = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Joined):
            for position, part in leaf.parts.split(leaf.decode()).items():
                out[position] = part
        elif isinstance(leaf, Payload) and not isinstance(leaf, Member):
            places.append(i)
    if not places:
        return out
    first: Any = [leaves[i] for i in places[:1]]
    ops = backends.find(optree.tree_leaves(first))
    for i, leaf in zip(places, ops.each(_decoded, [leaves[i] for i in places]), strict=True):
        out[i] = leaf
    return out


def _decoded(payload: Payload) -> Any:
    flat = payload.decode()
    return backends.of(flat).reshape(flat, payload.shape)
