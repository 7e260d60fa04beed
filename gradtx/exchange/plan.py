"""How each leaf travels in a step: gathered as a payload, or summed, alone or in its summand.

It follows from shapes and hyperparameters, so all ranks come to the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from gradtx import backends
from gradtx.core.payload import Joined, Member, Payload, decode_leaves
from gradtx.core.transformation import Context
from gradtx.core.tree import Array, accumulation_dtype, widen

_ITEMSIZE = {"float32": 4, "float64": 8}


class Plan:
    """How the leaves of one rank travel.

    Args:
        leaves: the leaves that arrive at the exchange, in the order of the layout.
        context: of the step.
        size: how many ranks there are.
        algorithm: ``"auto"`` or ``"gather"``.
        nbytes: what some payloads take on the wire together, in bytes, without header.
        overhead: what gathering takes besides.

    Attributes:
        absent: for each leaf, in path order, whether this rank has no gradient for it.
        payloads: those that travel compressed, in path order.
        places: for each of them, the positions of its leaves.
        found: by position, all payloads that arrived, those among them that travel dense too.
        summed: by position, the payloads whose summands travel with the dense leaves.
        parts: by position, in path order, what is summed.
    """

    def __init__(
        self,
        leaves: Sequence[Any],
        context: Context,
        size: int,
        algorithm: str,
        nbytes: Callable[[Sequence[Payload]], int],
        overhead: Callable[[Sequence[Payload]], int],
    ) -> None:
        self.layout = context.layout
        order = context.layout.by_path
        self.absent = tuple(bool(context.absent) and context.absent[i] for i in order)
        self.found: dict[int, Payload] = {
            i: leaves[i]
            for i in order
            if isinstance(leaves[i], Payload) and not isinstance(leaves[i], Member)
        }
        self.summed = {i: payload for i, payload in self.found.items() if payload.summed}
        payloads = {i: payload for i, payload in self.found.items() if not payload.summed}
        dense_nbytes = {i: self._dense_nbytes(i, payload) for i, payload in payloads.items()}
        chosen = list(payloads)
        if algorithm == "auto":
            chosen = _worth_it(payloads, dense_nbytes, size, nbytes, overhead)
        self.payloads = [payloads[i] for i in chosen]
        self.places = [_places(i, payloads[i]) for i in chosen]
        elsewhere = {i for places in self.places for i in places} | set(self.summed)
        rest = decode_leaves([None if i in elsewhere else x for i, x in enumerate(leaves)])
        dense = {i: widen(rest[i]) for i in order if rest[i] is not None and i not in elsewhere}
        for i in dense:
            # Zeros stand in for a leaf that is not there; a payload may decode to something else.
            if context.absent and context.absent[i] and isinstance(leaves[i], Payload):
                dense[i] = backends.of(dense[i]).zeros_like(dense[i])
        summands = {i: payload.summand() for i, payload in self.summed.items()}
        summed: dict[int, Any] = dense | summands
        self.parts: dict[int, Array] = {i: summed[i] for i in order if summed.get(i) is not None}

    def _dense_nbytes(self, position: int, payload: Payload) -> int:
        leaves = [self.layout.leaves[i] for i in _places(position, payload)]
        return sum(x.size * _ITEMSIZE[accumulation_dtype(x.dtype or "float32")] for x in leaves)

    @cached_property
    def dense_places(self) -> dict[str, list[int]]:
        """The positions of the leaves that are summed, in path order, by accumulation dtype."""
        places: dict[str, list[int]] = {}
        for i in self.parts:
            places.setdefault(self.dtype(i), []).append(i)
        if not places and not self.payloads:
            places["float32"] = []
        return dict(sorted(places.items()))

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

    def late(self, summed: Mapping[int, Payload]) -> dict[int, Payload]:
        """Of the payloads that are summed, at their end, those whose values are known only now."""
        return {i: payload for i, payload in summed.items() if self.summed[i].late}

    def shaped(self, leaves: Sequence[Any], results: Mapping[int, Array]) -> list[Any]:
        """The flat results in the shapes of the leaves; None where a leaf is."""
        return [
            None if leaf is None else backends.of(results[i]).reshape(results[i], spec.shape or ())
            for i, (leaf, spec) in enumerate(zip(leaves, self.layout.leaves, strict=True))
        ]


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
    if not isinstance(payload, Joined):
        return {place: payload.decode()}
    parts = payload.parts.split(payload.decode())
    return {i: backends.of(part).ravel(part) for i, part in parts.items()}


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
    divisor = size if op == "mean" else 1
    results = {i: total / divisor for i, total in totals.items()}
    for i, payload in summed.items():
        mean = payload.decode()
        results[i] = backends.of(mean).cast(mean, plan.dtype(i)) * (size // divisor)
    if factor is not None:
        results = {i: result * factor for i, result in results.items()}
    for i, payload in plan.found.items():
        combined = payload.combined(totals[i]) if i in totals else None
        if combined is not None:
            results[i] = combined
    return results


def _worth_it(
    payloads: dict[int, Payload],
    dense_nbytes: dict[int, int],
    size: int,
    nbytes: Callable[[Sequence[Payload]], int],
    overhead: Callable[[Sequence[Payload]], int],
) -> list[int]:
    """The positions of the payloads to gather: those that cost less than a dense all-reduce.

    Gathering puts ``N - 1`` copies of a payload on the link, a ring all-reduce ``2 (N - 1) / N``
    times the dense leaf.
    """
    ranks = max(size, 2)
    cheaper = [i for i, p in payloads.items() if ranks * nbytes([p]) < 2 * dense_nbytes[i]]
    chosen = [payloads[i] for i in cheaper]
    saved = sum(2 * dense_nbytes[i] for i in cheaper)
    return cheaper if ranks * (nbytes(chosen) + overhead(chosen)) < saved else []


def _places(position: int, payload: Payload) -> list[int]:
    if isinstance(payload, Joined):
        return [i for i, _ in payload.parts.leaves]
    return [position]
