"""The exchange over an axis of a JAX mesh: inside the compiled program, all shapes static.

Importing it imports jax. There is no handshake and no header: all devices run one program. What
is gathered, or goes to owners, travels as one array of bytes, and all gather one byte for the bad
step; what is summed travels as one array a dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradtx.backends.jax_ops import varying_axes
from gradtx.core.payload import Payload
from gradtx.core.transformation import Context
from gradtx.core.tree import arrays_in
from gradtx.exchange.arrays import Group, Packing, Said, added, nbytes_of
from gradtx.exchange.mesh_shards import TwoShot
from gradtx.exchange.plan import Plan, further_rounds, results_of

Array = jax.Array


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

    def all_to_all(self, messages: Array) -> Array:
        """``[size, n]``: what all devices have for this one, in their order.

        Args:
            messages: ``[size, n]``: what this device has for each.
        """
        if self.name is None:
            return messages
        self._count((self.size - 1) * messages[0].size * messages.dtype.itemsize)
        all_to_all: Any = jax.lax.all_to_all
        exchanged: Array = all_to_all(messages, self.name, 0, 0, tiled=True)
        return exchanged

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
        return self.name in varying_axes(x)

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
            varying = {axis for x in arrays_in(leaves) for axis in varying_axes(x)}
            others = [axis for axis in others if axis in varying]
        if not others:
            return good
        psum: Any = jax.lax.psum
        everywhere: Array = psum((~good).astype(jnp.int32), tuple(others)) == 0
        return everywhere


class Exchanged(NamedTuple):
    """What an exchange gives.

    Attributes:
        leaves: the dense leaves.
        settled: by position, the payloads whose values are known only now.
        returned: by position, flat, what this device has left out of the sums that it sent on.
        good: 0-d bool: the gradients of all devices were finite.
    """

    leaves: list[Any]
    settled: dict[int, Payload]
    returned: dict[int, Array]
    good: Array


def exchange(
    axis: MeshAxis,
    leaves: Sequence[Any],
    context: Context,
    *,
    op: str,
    algorithm: str,
    finite: Array | None,
) -> Exchanged:
    """Sends what leaves this device, and adds up what comes in.

    Args:
        axis: the devices.
        leaves: as they arrive, in the order of the layout.
        context: of the step.
        op: ``"mean"`` or ``"sum"``.
        algorithm: one of `gradtx.exchange.plan.ALGORITHMS`.
        finite: 0-d bool: this device's gradients were finite; None does not say.
    """
    plan = Plan(leaves, context, axis.size, algorithm, nbytes_of, lambda payloads: 1)
    said = Said.of(context, finite)
    totals: dict[int, Array] = {}
    heard: Said | None = None
    if plan.payloads:
        groups = Group.of(plan.payloads, plan.places)
        packing = Packing([group.payload for group in groups])
        received = axis.all_gather(packing.encode(said))
        for group, sums in zip(groups, added(groups, packing, received), strict=True):
            totals.update((i, x.astype(plan.dtype(i))) for i, x in group.split(sums))
        heard = said.heard(received)
    shots = TwoShot(axis, plan, said)
    if plan.shared:
        shots.add_up()
    for dtype, places in plan.dense_places.items():
        parts = [jnp.ravel(plan.parts[i]).astype(dtype) for i in places]
        if heard is None:
            total = axis.all_reduce(jnp.concatenate([*parts, said.numbers.astype(dtype)]))
            heard, total = said.summed(total[-said.length :]), total[: -said.length]
        else:
            total = axis.all_reduce(jnp.concatenate(parts))
        totals |= plan.split(dtype, total)
    summed = further_rounds(axis.all_reduce, axis.size, plan, totals)
    factor = None if heard is None else heard.factor(context, axis.size)
    results = results_of(plan, totals, summed, axis.size, op, factor)
    returned: dict[int, Array] = {}
    if plan.shared:
        # What owners hear in the first shot is the same on all; JAX knows that of the second.
        factor = shots.heard.factor(context, axis.size) if heard is None else factor
        sent_on, returned, told = shots.send_on(op, 1.0 if factor is None else factor)
        results |= plan.parted(sent_on)
        heard = told if heard is None else heard
    if heard is None:
        raise AssertionError("an exchange has a message or a buffer")
    heard.tell(context, axis.size)
    return Exchanged(plan.shaped(leaves, results), plan.late(summed), returned, heard.good)


def _listed(axes: Sequence[str]) -> str:
    return ", ".join(map(repr, axes))
