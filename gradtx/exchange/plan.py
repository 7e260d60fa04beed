"""How each leaf travels in a step.

A payload is gathered by all ranks, or goes to owners that add up runs of it and send the sums on in
its format, or its values to the owners of their positions, or it is decoded and summed densely; of
some, a summand is summed. It follows from shapes and hyperparameters, so all ranks come to the same
plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import cached_property
from typing import Any

from gradtx import backends
from gradtx.core.cast import encode_narrow
from gradtx.core.payload import Joined, Member, Parts, Payload, decode_leaves
from gradtx.core.phases import in_phase
from gradtx.core.transformation import Context
from gradtx.core.tree import Array, accumulation_dtype, widen
from gradtx.exchange.choice import (
    TO_ALL,
    Alternative,
    Choice,
    NBytes,
    Ways,
    forms_of,
    remembered,
)
from gradtx.exchange.cost import Link

ON_A_MESH = ("auto", "gather", "two_shot")
FOR_TENSORS = ("sharded", "root")
ALGORITHMS = (*ON_A_MESH, *FOR_TENSORS)
_NARROW = ("float16", "bfloat16")


class Plan:
    """How the leaves of one rank travel.

    Args:
        leaves: the leaves that arrive at the exchange, in the order of the layout.
        context: of the step.
        size: how many ranks there are.
        algorithm: one of `ALGORITHMS`.
        nbytes: what some payloads take on the wire together, in bytes, without header.
        overhead: what gathering takes besides.
        choices: those made in earlier steps, for leaves of what form; added to.
        link: what ``"auto"`` takes the least time on; None for the fewest bytes.
        density: the share of sums that owners of positions send on; None for all.

    Attributes:
        absent: for each leaf, in path order, whether this rank has no gradient for it.
        payloads: those that are gathered, in path order.
        places: for each of them, the positions of its leaves.
        shared: by position, in path order, those that owners add up. Among both are `Narrow`
            payloads of 16-bit leaves that nothing has compressed.
        shared_places: for each of them, the positions of its leaves.
        scattered: by position, in path order, those whose values go to the owners of positions.
        scattered_places: for each of them, the positions of its leaves.
        found: by position, all payloads that arrived, those among them that travel dense too.
        summed: by position, the payloads whose summands travel with the dense leaves.
        parts: by position, in path order, what is summed.
        choice: which payloads go where.
        through_root: whether what is gathered goes to rank 0, which sends the sums on.
    """

    def __init__(
        self,
        leaves: Sequence[Any],
        context: Context,
        size: int,
        algorithm: str,
        nbytes: NBytes,
        overhead: NBytes,
        choices: MutableMapping[Any, tuple[Any, Choice]] | None = None,
        link: Link | None = None,
        density: float | None = None,
    ) -> None:
        self.layout = context.layout
        order = context.layout.by_path
        self.absent = (False,) * len(leaves)
        if context.absent:
            self.absent = tuple(context.absent[i] for i in order)
        self.found: dict[int, Payload] = {
            i: leaves[i]
            for i in order
            if isinstance(leaves[i], Payload) and not isinstance(leaves[i], Member)
        }
        self.summed = {i: payload for i, payload in self.found.items() if payload.summed}
        compressed = {i: payload for i, payload in self.found.items() if not payload.summed}
        narrow: dict[int, Payload] = {}
        # The sum of a window is of more bits than its gradients were.
        if size > 1 and algorithm not in TO_ALL and not context.windowed:
            narrow = self._narrow(leaves)
        # Nothing that refers to this plan, which would then keep gradients until a collection.
        self._compressed, self._narrowed = compressed, narrow
        self._leaves, self._nbytes, self._overhead = leaves, nbytes, overhead
        self._size, self._windowed, self._density = size, context.windowed, density
        both = compressed | narrow
        both = {i: both[i] for i in order if i in both}

        def choose() -> Choice:
            if algorithm == "auto" and link is not None:
                return self._ways().fastest(compressed, narrow, link)
            return self._ways().by(algorithm, both)

        key = (context.code, self.layout.fingerprint, size, algorithm, context.windowed)
        choice = choose() if choices is None else remembered(choices, key, forms_of(leaves), choose)
        self.choice, self.through_root = choice, choice.root
        self.shared = {i: p for i, p in both.items() if i in choice.shared}
        self.scattered = {i: p for i, p in both.items() if i in choice.scattered}
        gathered = {i: p for i, p in both.items() if i in choice.gathered}
        self.payloads = list(gathered.values())
        self.places = [_places(i, payload) for i, payload in gathered.items()]
        self.shared_places = [_places(i, payload) for i, payload in self.shared.items()]
        self.scattered_places = [_places(i, payload) for i, payload in self.scattered.items()]
        moved = [*self.places, *self.shared_places, *self.scattered_places, self.summed]
        elsewhere = {i for places in moved for i in places}
        rest = decode_leaves([None if i in elsewhere else x for i, x in enumerate(leaves)])
        dense = {i: widen(rest[i]) for i in order if rest[i] is not None and i not in elsewhere}
        for i in dense:
            # Zeros stand in for a leaf that is not there; a payload may decode to something else.
            if context.absent and context.absent[i] and isinstance(leaves[i], Payload):
                dense[i] = backends.of(dense[i]).zeros_like(dense[i])
        summands = {i: payload.summand() for i, payload in self.summed.items()}
        summed: dict[int, Any] = dense | summands
        self.parts: dict[int, Array] = {i: summed[i] for i in order if summed.get(i) is not None}

    def _narrow(self, leaves: Sequence[Any]) -> dict[int, Payload]:
        """The 16-bit leaves that nothing has compressed, those of a dtype joined, in that dtype."""
        kinds = {i: spec.dtype for i, spec in enumerate(self.layout.leaves)}
        out: dict[int, Payload] = {}
        for kind in _NARROW:
            places = [
                i
                for i in self.layout.by_path
                if kinds[i] == kind and backends.is_array(leaves[i]) and backends.size(leaves[i])
            ]
            if not places:
                continue
            ops = backends.of(leaves[places[0]])
            flat = ops.concat([ops.ravel(widen(leaves[i])) for i in places])
            joined = encode_narrow(flat, kind)
            parts = Parts(tuple((i, tuple(leaves[i].shape)) for i in places))
            out[places[0]] = Joined(joined, parts, joined.shape, joined.dtype)
        return out

    def compared(self) -> tuple[list[Alternative], float]:
        """What each algorithm would put on the links; and what a dense ring would, in bytes."""
        return self._ways().compared(self._compressed, self._narrowed)

    def _ways(self) -> Ways:
        lengths, rest = self._lengths()
        nbytes = self._nbytes, self._overhead
        of_step = self._windowed, self._density
        return Ways(self._size, len(self._leaves), lengths, rest, *nbytes, *of_step)

    def _lengths(self) -> tuple[dict[int, dict[str, int]], dict[str, int]]:
        """How many values each payload stands for, and how many are summed besides, by dtype."""
        payloads = self._compressed | self._narrowed
        lengths: dict[int, dict[str, int]] = {}
        rest: dict[str, int] = {}
        elsewhere: set[int] = set()
        for i, payload in payloads.items():
            lengths[i] = {}
            for j in _places(i, payload):
                elsewhere.add(j)
                kind, length = self.dtype(j), self.layout.leaves[j].size
                lengths[i][kind] = lengths[i].get(kind, 0) + length
        for i, leaf in enumerate(self._leaves):
            if i in self.summed:
                leaf = self.summed[i].summand()
            if i not in elsewhere and backends.is_array(leaf):
                rest[self.dtype(i)] = rest.get(self.dtype(i), 0) + backends.size(leaf)
        return lengths, dict(sorted(rest.items()))

    @cached_property
    def dense_places(self) -> dict[str, list[int]]:
        """The positions of the leaves that are summed, in path order, by accumulation dtype."""
        places: dict[str, list[int]] = {}
        for i in self.parts:
            places.setdefault(self.dtype(i), []).append(i)
        if not (places or self.payloads or self.shared or self.scattered):
            places["float32"] = []
        return dict(sorted(places.items()))

    @property
    def gathered_lengths(self) -> dict[str, dict[int, int]]:
        """For the dtypes that sums are made in, the lengths of the leaves gathered, by position."""
        out: dict[str, dict[int, int]] = {"float32": {}, "float64": {}}
        for i in (i for places in self.places for i in places):
            out[self.dtype(i)][i] = self.layout.leaves[i].size
        return out

    def dtype(self, position: int) -> str:
        """The dtype that a leaf is summed in."""
        return accumulation_dtype(self.layout.leaves[position].dtype or "float32")

    def length(self, position: int) -> int:
        """How many values of a leaf, or of what is sent in its place, are summed."""
        return backends.size(self.parts[position])

    def split(self, dtype: str, total: Array) -> dict[int, Array]:
        """The summed buffer of a dtype in its parts, flat, by position."""
        out, start = {}, 0
        for i in self.dense_places[dtype]:
            out[i] = total[start : start + self.length(i)]
            start += self.length(i)
        return out

    def parted(self, sent_on: Mapping[int, Array]) -> dict[int, Array]:
        """What owners have sent on, flat, by position of the payload, for each leaf."""
        found = [_split(self.shared[i], i, flat) for i, flat in sent_on.items()]
        return {i: part for parts in found for i, part in parts.items()}

    def parts_of(self, sums: Mapping[int, Array]) -> dict[int, Array]:
        """What owners of positions say of payloads, flat, by position, for each of their leaves."""
        found = [_split(self.scattered[i], i, flat) for i, flat in sums.items()]
        parts = {i: part for own in found for i, part in own.items()}
        return {i: backends.of(x).cast(x, self.dtype(i)) for i, x in parts.items()}

    def late(self, summed: Mapping[int, Payload]) -> dict[int, Payload]:
        """Of the payloads that are summed, at their end, those whose values are known only now."""
        return {i: payload for i, payload in summed.items() if self.summed[i].late}

    @in_phase("apply")
    def shaped(self, leaves: Sequence[Any], results: Mapping[int, Array]) -> list[Any]:
        """The flat results in the shapes of the leaves; None where a leaf is."""
        out = [None if leaf is None else results[i] for i, leaf in enumerate(leaves)]
        for i, (x, shape) in enumerate(zip(out, self.layout.shapes, strict=True)):
            if x is not None and x.shape != shape:
                out[i] = backends.of(x).reshape(x, shape or ())
        return out


def add_payload(
    totals: dict[int, Array],
    payload: Payload,
    plan: Plan,
    place: int,
    is_absent: Callable[[int], bool],
) -> None:
    """Adds one rank's payload to the sums, except for leaves that this rank has no gradient for.

    Args:
        totals: the sums so far, flat, by position; changed.
        payload: what the rank has sent.
        plan: of the step.
        place: the position of the payload.
        is_absent: whether the rank has no gradient for the leaf at a position.
    """
    if isinstance(payload, Joined) or is_absent(place):
        parts = _parts_of(payload, place)
    elif place in totals:
        totals[place] = payload.add_to(totals[place])
        return
    else:
        parts = {place: payload.decode()}
    for i, part in parts.items():
        ops = backends.of(part)
        part = ops.cast(part, plan.dtype(i))
        if is_absent(i):
            part = ops.zeros_like(part)
        totals[i] = totals[i] + part if i in totals else part


def _parts_of(payload: Payload, place: int) -> dict[int, Array]:
    return _split(payload, place, payload.decode())


def _split(payload: Payload, place: int, flat: Array) -> dict[int, Array]:
    if not isinstance(payload, Joined):
        return {place: flat}
    return {i: backends.of(x).ravel(x) for i, x in payload.parts.split(flat).items()}


@in_phase("encode")
def further_rounds(
    all_reduce: Callable[[Array], Array], size: int, plan: Plan, totals: dict[int, Array]
) -> dict[int, Payload]:
    """Brings the payloads that are summed to their end.

    Args:
        all_reduce: gives the sum of a flat array over ranks.
        size: how many ranks there are.
        plan: of the step.
        totals: the sums of the first round; those of the summed payloads are taken out.

    Returns:
        By position, the payloads, which decode to the mean over ranks.
    """
    done: dict[int, Payload] = {}
    pending = plan.summed
    while pending:
        received: dict[int, Payload] = {}
        for cls in {type(payload): None for payload in pending.values()}:
            places = [i for i, payload in pending.items() if type(payload) is cls]
            sums = [totals.pop(i) for i in places]
            payloads = cls.receive_all([pending[i] for i in places], sums, size)
            received.update(zip(places, payloads, strict=True))
        summands = {i: p.summand() for i, p in received.items()}
        done.update({i: received[i] for i, summand in summands.items() if summand is None})
        pending = {i: received[i] for i, summand in summands.items() if summand is not None}
        by_dtype: dict[str, list[int]] = {}
        for i in pending:
            by_dtype.setdefault(backends.of(summands[i]).dtype_name(summands[i]), []).append(i)
        for _, places in sorted(by_dtype.items()):
            ops, start = backends.of(summands[places[0]]), 0
            total = all_reduce(ops.concat([summands[i] for i in places]))
            for i in places:
                length = backends.size(summands[i])
                totals[i] = total[start : start + length]
                start += length
    return done


@in_phase("apply")
def results_of(
    plan: Plan,
    totals: Mapping[int, Array],
    summed: Mapping[int, Payload],
    size: int,
    op: str,
    factor: Any = None,
) -> dict[int, Array]:
    """What the exchange gives, flat, by position.

    Args:
        plan: of the step.
        totals: the sums over ranks.
        summed: the payloads that decode to the mean over ranks.
        size: how many ranks there are.
        op: ``"mean"`` or ``"sum"``.
        factor: what the results are multiplied by: 0-d; None for one.
    """
    divisor = divisor_of(size, op)
    results = {i: total if divisor == 1 else total / divisor for i, total in totals.items()}
    for i, payload in summed.items():
        mean = payload.decode()
        result = backends.of(mean).cast(mean, plan.dtype(i))
        results[i] = result if size == divisor else result * size
    if factor is not None:
        results = {i: result * factor for i, result in results.items()}
    for i, payload in plan.found.items():
        combined = payload.combined(totals[i]) if i in totals else None
        if combined is not None:
            results[i] = combined
    return results


def divisor_of(size: int, op: str) -> int:
    """What sums over ranks are divided by."""
    return size if op == "mean" else 1


def _places(position: int, payload: Payload) -> list[int]:
    if isinstance(payload, Joined):
        return [i for i, _ in payload.parts.leaves]
    return [position]
