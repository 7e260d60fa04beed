"""Which way payloads travel: the fewest bytes each, or the least time for all of them.

All of it follows from shapes, hyperparameters and the number of ranks, so that all ranks choose
alike; values have no part in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import optree

from gradtx import backends
from gradtx.backends.registry import NAMESPACE
from gradtx.core.payload import Member, Payload, plain
from gradtx.exchange.cost import (
    NOTHING,
    Link,
    Sparse,
    Traffic,
    all_gather,
    all_reduce,
    all_to_all,
    gathered,
    sharded,
    through_root,
)
from gradtx.exchange.flags import Slots
from gradtx.exchange.uneven import tell_nbytes
from gradtx.wire import message_nbytes

# Algorithms that send every payload to all ranks, directly or not.
TO_ALL = ("gather", "root")
_ITEMSIZE = {"float32": 4, "float64": 8}

Payloads = Mapping[int, Payload]
NBytes = Callable[[Sequence[Payload]], int]


@dataclass(frozen=True)
class Choice:
    """Which payloads do not travel densely, by position.

    Attributes:
        shared: those that go to owners, in runs.
        scattered: those that go to owners by position.
        gathered: those that go to all ranks.
        root: whether these go there by way of rank 0, which adds them up.
    """

    shared: frozenset[int] = frozenset()
    scattered: frozenset[int] = frozenset()
    gathered: frozenset[int] = frozenset()
    root: bool = False

    def __or__(self, other: Choice) -> Choice:
        return Choice(
            self.shared | other.shared,
            self.scattered | other.scattered,
            self.gathered | other.gathered,
            self.root or other.root,
        )


@dataclass(frozen=True)
class Alternative:
    """One way for all payloads, and what it costs.

    Attributes:
        name: the algorithm; ``"dense"`` for none, or ``"by leaf"``, for each the fewest bytes;
            ``"all dense"`` where narrow leaves are to be dense too.
        choice: what goes where.
        traffic: what that puts on the links, at most.
    """

    name: str
    choice: Choice
    traffic: Traffic


@dataclass(frozen=True)
class Ways:
    """The ways that payloads may take on some ranks, and what these cost.

    Attributes:
        size: how many ranks there are.
        leaves: how many leaves a header speaks of.
        lengths: for each payload, by position, how many values its leaves have together, by the
            dtype that they are summed in.
        rest: how many values are summed besides, by dtype.
        nbytes: what some payloads take on the wire together, in bytes, without header.
        overhead: what gathering takes besides.
        windowed: whether ranks bring unequal parts.
        density: the share of sums that owners of positions send on; None for all.
    """

    size: int
    leaves: int
    lengths: Mapping[int, Mapping[str, int]]
    rest: Mapping[str, int]
    nbytes: NBytes
    overhead: NBytes
    windowed: bool = False
    density: float | None = None

    def by(self, algorithm: str, payloads: Payloads) -> Choice:
        """What an algorithm does with payloads, ``"auto"`` in the fewest bytes."""
        if algorithm == "dense":
            return Choice()
        if algorithm == "sharded":
            placed = {i for i, payload in payloads.items() if payload.entries() is not None}
            others = {i: payload for i, payload in payloads.items() if i not in placed}
            return Choice(scattered=frozenset(placed)) | self.by("auto", others)
        able = algorithm not in TO_ALL and self.size > 1
        shared = {i: p for i, p in payloads.items() if able and p.grain is not None and p.size}
        if algorithm == "auto":
            shared = self._worth_sharing(shared)
        rest = {i: payload for i, payload in payloads.items() if i not in shared}
        if algorithm == "auto":
            rest = self._worth_it(rest)
        root = algorithm == "root" and bool(rest)
        return Choice(frozenset(shared), gathered=frozenset(rest), root=root)

    def fastest(self, payloads: Payloads, narrow: Payloads, link: Link) -> Choice:
        """What takes the least time on a link, of what sends no more than a dense ring."""
        found, limit = self.compared(payloads, narrow)
        able = [x for x in found if x.traffic.sent <= limit]
        return min(able, key=lambda x: (x.traffic.seconds(link), x.traffic.sent)).choice

    def compared(self, payloads: Payloads, narrow: Payloads) -> tuple[list[Alternative], float]:
        """One way each for the payloads, and for `narrow` ones that of the fewest bytes.

        Args:
            payloads: by position, in path order.
            narrow: those of 16-bit leaves that nothing has compressed.

        Returns:
            The ways; and how many bytes a rank would send if all values, and the flags, went
            through the backend's all-reduce.
        """
        others = self.by("auto", narrow)
        both = {**payloads, **narrow}
        names = ("dense", "gather", "two_shot", "sharded", "root")
        ways = {name: self.by(name, payloads) | others for name in names}
        ways["by leaf"] = self.by("auto", both)
        found = [Alternative(name, way, self.traffic(both, way)) for name, way in ways.items()]
        dense = self.traffic({}, Choice(), self.lengths)
        # On many ranks the shares of narrow leaves, rounded up, may come to more than FP32.
        if all(way.traffic.sent > dense.sent for way in found):
            found.append(Alternative("all dense", Choice(), dense))
        return found, dense.sent

    def traffic(
        self,
        payloads: Payloads,
        choice: Choice,
        dense: Mapping[int, Mapping[str, int]] | None = None,
    ) -> Traffic:
        """What a choice puts on the links, at most; of payloads in rounds, the first of these.

        Args:
            payloads: by position, in path order.
            choice: what goes where.
            dense: as `lengths`, what is summed densely; by default what is not in the choice.
        """
        moved = choice.shared | choice.scattered | choice.gathered
        if dense is None:
            dense = {i: own for i, own in self.lengths.items() if i in payloads and i not in moved}
        parts = (
            self._gathered(
                {i: p for i, p in payloads.items() if i in choice.gathered}, choice.root
            ),
            self._shared({i: p for i, p in payloads.items() if i in choice.shared}),
            self._scattered({i: p for i, p in payloads.items() if i in choice.scattered}),
            self._dense(dense, with_flags=not moved),
        )
        return sum(parts, NOTHING)

    def _gathered(self, payloads: Payloads, root: bool) -> Traffic:
        if not payloads:
            return NOTHING
        own = list(payloads.values())
        told = tell_nbytes(sum(payload.used() is not None for payload in own))
        nbytes = self.nbytes(own) + self.overhead(own) - told
        if not root:
            return gathered(nbytes, self.size, told)
        unions: dict[str, tuple[int, int]] = {}
        for i, payload in payloads.items():
            for kind, length in self.lengths[i].items():
                count, whole = unions.get(kind, (0, 0))
                unions[kind] = count + _union(payload, length, self.size), whole + length
        slots = Slots(self.leaves, self.size, "float64", windowed=self.windowed)
        return through_root(
            nbytes,
            [(count, whole, _ITEMSIZE[kind]) for kind, (count, whole) in unions.items()],
            self.size,
            8 * (slots.length + 3),
            told,
        )

    def _shared(self, payloads: Payloads) -> Traffic:
        if not payloads:
            return NOTHING
        # Each owns as many bytes of all of them, and a part of a grain more.
        own = list(payloads.values())
        grain = max(self.nbytes([p.cut(0, min(p.grain or 1, p.size))]) for p in own)
        part = self.nbytes(own) / self.size + grain + message_nbytes(self.leaves, [])
        return all_to_all(part, self.size) + all_gather(part, self.size)

    def _scattered(self, payloads: Payloads) -> Traffic:
        if not payloads:
            return NOTHING
        return sharded(lanes_in(payloads), self.size, self.leaves, density=self.density)

    def _dense(self, lengths: Mapping[int, Mapping[str, int]], *, with_flags: bool) -> Traffic:
        values = dict(self.rest)
        for own in lengths.values():
            for kind, length in own.items():
                values[kind] = values.get(kind, 0) + length
        if with_flags:
            first = min(values, default="float32")
            slots = Slots(self.leaves, self.size, first, windowed=self.windowed)
            values[first] = values.get(first, 0) + slots.length
        parts = [all_reduce(length * _ITEMSIZE[kind], self.size) for kind, length in values.items()]
        return sum(parts, NOTHING)

    def _dense_nbytes(self, position: int) -> int:
        return sum(length * _ITEMSIZE[kind] for kind, length in self.lengths[position].items())

    def _worth_sharing(self, payloads: dict[int, Payload]) -> dict[int, Payload]:
        """The payloads to share out among owners: those that cost less than otherwise.

        That puts ``2 (N - 1)`` equal parts on the link. Both backends come to the same here,
        whatever their headers: the sum of what is shared out is rounded, that of what is not is
        not.
        """
        size, header = self.size, message_nbytes(self.leaves, [])
        part = {i: self._part_nbytes(payload) for i, payload in payloads.items()}
        chosen = {
            i: payload
            for i, payload in payloads.items()
            if 2 * size * part[i] < min(size * self.nbytes([payload]), 2 * self._dense_nbytes(i))
        }
        taken = 2 * size * (sum(part[i] for i in chosen) + header)
        return chosen if taken < sum(2 * self._dense_nbytes(i) for i in chosen) else {}

    def _part_nbytes(self, payload: Payload) -> float:
        length = shard_length(payload, self.size)
        stop = min(length, payload.size)
        return self.nbytes([payload.cut(0, stop)]) * length / stop

    def _worth_it(self, payloads: dict[int, Payload]) -> dict[int, Payload]:
        """The payloads to gather: those that cost less than a dense all-reduce.

        Gathering puts ``N - 1`` copies of a payload on the link, a ring all-reduce
        ``2 (N - 1) / N`` times the dense leaf.
        """
        ranks = max(self.size, 2)
        dense = {i: 2 * self._dense_nbytes(i) for i in payloads}
        cheaper = {i: p for i, p in payloads.items() if ranks * self.nbytes([p]) < dense[i]}
        chosen = list(cheaper.values())
        saved = sum(dense[i] for i in cheaper)
        return cheaper if ranks * (self.nbytes(chosen) + self.overhead(chosen)) < saved else {}


def shard_length(payload: Payload, size: int) -> int:
    """How many values each rank owns if it is cut in equal parts, at multiples of the grain."""
    grain = payload.grain or 1
    return -(-payload.size // (size * grain)) * grain


def lanes_in(payloads: Payloads) -> list[Sparse]:
    """Values at positions as `gradtx.exchange.sharded` lays them out, with none left out."""
    lanes: dict[tuple[str, bool], Sparse] = {}
    for payload in payloads.values():
        entries = payload.entries()
        if entries is None:
            continue
        values, exponents = plain(entries.values)
        kind, scaled = str(values.dtype), exponents is not None
        total = 8 if values.dtype.itemsize == 8 else 4
        lane = lanes.get((kind, scaled), Sparse(0, 0, values.dtype.itemsize, total))
        lanes[kind, scaled] = replace(
            lane,
            length=lane.length + payload.size,
            count=lane.count + backends.size(entries.indices),
            exponents=lane.exponents + 2 * scaled,
        )
    return list(lanes.values())


def _union(payload: Payload, length: int, size: int) -> int:
    """How many values of a leaf are not zero on some rank, at most."""
    entries = payload.entries()
    return length if entries is None else min(size * backends.size(entries.indices), length)


def forms_of(leaves: Sequence[Any]) -> tuple[Any, Any]:
    """What is the same in all steps whose leaves take the same way."""
    # A `Joined` says which leaves its members are.
    given: Any = [None if isinstance(leaf, Member) else leaf for leaf in leaves]
    arrays, treespec = optree.tree_flatten(given, namespace=NAMESPACE)
    return treespec, [(x.shape, x.dtype) for x in arrays]


def remembered(
    choices: MutableMapping[Any, tuple[Any, Choice]],
    key: Any,
    forms: Any,
    choose: Callable[[], Choice],
) -> Choice:
    """The choice of the last step, unless the leaves have other forms in this one."""
    known = choices.get(key)
    if known is None or known[0] != forms:
        known = choices[key] = forms, choose()
    return known[1]
