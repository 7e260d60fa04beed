"""The two-shot exchange over an axis of a JAX mesh; importing it imports jax.

All devices run one program, so what they own is of one shape: of each leaf, one of as many parts of
one length as there are devices, the last ones filled up with zeros. See `gradtx.exchange.two_shot`.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp

from gradtx.backends import rows
from gradtx.core.payload import Payload
from gradtx.exchange.arrays import Group, Packing, Said, added
from gradtx.exchange.choice import shard_length
from gradtx.exchange.plan import Plan, divisor_of

Array = jax.Array


class Axis(Protocol):
    """What is used here of `gradtx.exchange.mesh.MeshAxis`."""

    size: int

    @property
    def rank(self) -> Any:
        """This device's number."""

    def all_to_all(self, messages: Array) -> Array:
        """What all devices have for this one."""

    def all_gather(self, message: Array) -> Array:
        """What all devices have."""


class TwoShot:
    """One step of the exchange, as the program on one device sees it.

    Args:
        axis: the devices.
        plan: of the step.
        said: what this device says of it.

    Attributes:
        heard: what all devices say, once the first shot is made.
    """

    def __init__(self, axis: Axis, plan: Plan, said: Said) -> None:
        self._axis, self._plan, self._said = axis, plan, said
        self.heard = said
        self._groups = Group.of(list(plan.shared.values()), [[i] for i in plan.shared])
        self._parts = [_in_rows(group, axis.size) for group in self._groups]
        self._first: list[Payload] = []
        self._sums: list[Array] = []

    def add_up(self) -> None:
        """The first shot: adds up what this device owns."""
        encode: Any = jax.vmap(lambda payloads: Packing(payloads).encode())
        messages = encode(self._parts)
        flags = self._said.in_bytes
        if self._said.length > 1:  # How much the parts weigh has to be known before the second.
            each = jnp.broadcast_to(flags, (self._axis.size, flags.shape[0]))
            messages = jnp.concatenate([messages, each], axis=1)
        received = self._axis.all_to_all(messages)
        if self._said.length > 1:
            self.heard = self._said.heard(received)
        packing = Packing([rows.row(part, 0) for part in self._parts])
        self._first = packing.decode(received[0])
        self._sums = added(self._groups, packing, received)

    def send_on(
        self, op: str, factor: Any = 1.0
    ) -> tuple[dict[int, Array], dict[int, Array], Said]:
        """The second shot: sends on what this device has added up.

        Args:
            op: ``"mean"`` or ``"sum"``.
            factor: what results are multiplied by.

        Returns:
            What the exchange gives, flat, by position; by position, flat, what this device has left
            out of its parts, as it is to be sent again; and what all devices say.
        """
        divisor = divisor_of(self._axis.size, op)
        exact = [total / divisor * factor for total in self._sums]
        encoded = [
            group.mapped(self._again)(first, values)
            for group, first, values in zip(self._groups, self._first, exact, strict=True)
        ]
        received = self._axis.all_gather(Packing(encoded).encode(self._said))
        packing = Packing(encoded)

        def decoded(message: Array) -> list[Array]:
            found = zip(self._groups, packing.decode(message), strict=True)
            return [group.decode(payload) for group, payload in found]

        results = self._by_place(jax.vmap(decoded)(received))
        here = jnp.arange(self._axis.size) == self._axis.rank
        left_out = [
            (values - group.decode(payload)) * divisor
            for group, values, payload in zip(self._groups, exact, encoded, strict=True)
        ]
        returned = self._by_place([_at(here, values) for values in left_out])
        kept = {i: x for i, x in returned.items() if i in self._plan.found}
        return results, kept, self._said.heard(received)

    def _again(self, first: Payload, values: Array) -> Payload:
        return first.again(values, self._axis.rank * values.shape[0])

    def _by_place(self, parts: list[Array]) -> dict[int, Array]:
        """The leaves, flat, by position: of the parts of all devices, ``[size, ..., length]``."""
        out = {}
        for group, values in zip(self._groups, parts, strict=True):
            for number, [place] in enumerate(group.places):
                own = values[:, number] if len(group.places) > 1 else values
                out[place] = jnp.ravel(own)[: group.size].astype(self._plan.dtype(place))
        return out


def _in_rows(group: Group, size: int) -> Any:
    length = shard_length(group.payload, size)
    return group.mapped(lambda payload: payload.in_rows(size, length), out_axes=1)(group.payload)


def _at(here: Array, values: Array) -> Array:
    """``[size, ...]``: the values where it is this device's turn, else zeros."""
    return jnp.where(jnp.reshape(here, (-1,) + (1,) * values.ndim), values, 0.0)
