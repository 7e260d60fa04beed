"""How each leaf travels in a step.

A payload is gathered by all ranks, or goes to owners that add up runs of it and send the sums on in
its format, or its values to the owners of their positions, or it is decoded and summed densely; of
some, a summand is summed. It follows from shapes and hyperparameters, so all ranks come to the same
plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import optree

from gradtx import backends
from gradtx.backends.registry import NAMESPACE
from gradtx.core.cast import encode_narrow
from gradtx.core.payload import Joined, Member, Parts, Payload, decode_leaves
from gradtx.core.transformation import Context
from gradtx.core.tree import Array, accumulation_dtype, widen
from gradtx.wire import message_nbytes

ON_A_MESH = ("auto", "gather", "two_shot")
FOR_TENSORS = ("sharded", "root")
ALGORITHMS = (*ON_A_MESH, *FOR_TENSORS)
# Algorithms that send every payload to all ranks, directly or not.
_TO_ALL = ("gather", "root")
_ITEMSIZE = {"float32": 4, "float64": 8}
_NARROW = ("float16", "bfloat16")


@dataclass(frozen=True)
class Choice:
    """Which payloads do not travel densely, by position.

    Attributes:
        shared: those that go to owners, in runs.
        scattered: those that go to owners by position.
        gathered: those that go to all ranks.
    """

    shared: frozenset[int]
    scattered: frozenset[int]
    gathered: frozenset[int]


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
        through_root: whether what is gathered goes to rank 0, which sends the sums on.
    """

    def __init__(
        self,
        leaves: Sequence[Any],
        context: Context,
        size: int,
        algorithm: str,
        nbytes: Callable[[Sequence[Payload]], int],
        overhead: Callable[[Sequence[Payload]], int],
        choices: MutableMapping[Any, tuple[Any, Choice]] | None = None,
    ) -> None:
        self.layout = context.layout
        self._size, self._algorithm = size, algorithm
        self.through_root = algorithm == "root"
        order = context.layout.by_path
        self.absent = tuple(bool(context.absent) and context.absent[i] for i in order)
        self.found: dict[int, Payload] = {
            i: leaves[i]
            for i in order
            if isinstance(leaves[i], Payload) and not isinstance(leaves[i], Member)
        }
        self.summed = {i: payload for i, payload in self.found.items() if payload.summed}
        payloads = {i: payload for i, payload in self.found.items() if not payload.summed}
        # The sum of a window is of more bits than its gradients were.
        if size > 1 and algorithm not in _TO_ALL and not context.windowed:
            payloads |= self._narrow(leaves)
            payloads = {i: payloads[i] for i in order if i in payloads}
        choose = partial(self._chosen, payloads, nbytes, overhead)
        key = (context.code, self.layout.fingerprint, size, algorithm, context.windowed)
        choice = choose() if choices is None else _remembered(choices, key, _forms(leaves), choose)
        self.shared = {i: p for i, p in payloads.items() if i in choice.shared}
        self.scattered = {i: p for i, p in payloads.items() if i in choice.scattered}
        payloads = {i: p for i, p in payloads.items() if i in choice.gathered}
        self.payloads = list(payloads.values())
        self.places = [_places(i, payload) for i, payload in payloads.items()]
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

    def _chosen(
        self,
        payloads: dict[int, Payload],
        nbytes: Callable[[Sequence[Payload]], int],
        overhead: Callable[[Sequence[Payload]], int],
    ) -> Choice:
        size, algorithm = self._size, self._algorithm
        scattered = set()
        if algorithm == "sharded":
            scattered = {i for i, payload in payloads.items() if payload.entries() is not None}
            payloads, algorithm = {i: p for i, p in payloads.items() if i not in scattered}, "auto"
        able = algorithm not in _TO_ALL and size > 1
        shared = {i: p for i, p in payloads.items() if able and p.grain is not None and p.size}
        dense_nbytes = {i: self._dense_nbytes(i, payload) for i, payload in payloads.items()}
        if algorithm == "auto":
            header = message_nbytes(len(self.layout.leaves), [])
            shared = _worth_sharing(shared, dense_nbytes, size, nbytes, header)
        rest = {i: payload for i, payload in payloads.items() if i not in shared}
        if algorithm == "auto":
            rest = _worth_it(rest, dense_nbytes, size, nbytes, overhead)
        return Choice(frozenset(shared), frozenset(scattered), frozenset(rest))

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

    def _dense_nbytes(self, position: int, payload: Payload) -> int:
        leaves = [self.layout.leaves[i] for i in _places(position, payload)]
        return sum(x.size * _ITEMSIZE[accumulation_dtype(x.dtype or "float32")] for x in leaves)

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

    def shaped(self, leaves: Sequence[Any], results: Mapping[int, Array]) -> list[Any]:
        """The flat results in the shapes of the leaves; None where a leaf is."""
        return [
            None if leaf is None else backends.of(results[i]).reshape(results[i], spec.shape or ())
            for i, (leaf, spec) in enumerate(zip(leaves, self.layout.leaves, strict=True))
        ]


def _forms(leaves: Sequence[Any]) -> tuple[Any, Any]:
    """What is the same in all steps whose leaves take the same way."""
    given: Any = list(leaves)
    arrays, treespec = optree.tree_flatten(given, namespace=NAMESPACE)
    return treespec, [(x.shape, x.dtype) for x in arrays]


def _remembered(
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
    divisor = divisor_of(size, op)
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


def divisor_of(size: int, op: str) -> int:
    """What sums over ranks are divided by."""
    return size if op == "mean" else 1


def shard_length(payload: Payload, size: int) -> int:
    """How many values each rank owns if it is cut in equal parts, at multiples of the grain."""
    grain = payload.grain or 1
    return -(-payload.size // (size * grain)) * grain


def _worth_sharing(
    payloads: dict[int, Payload],
    dense_nbytes: dict[int, int],
    size: int,
    nbytes: Callable[[Sequence[Payload]], int],
    header: int,
) -> dict[int, Payload]:
    """The payloads to share out among owners: those that cost less than otherwise.

    That puts ``2 (N - 1)`` equal parts on the link. Both backends come to the same here, whatever
    their headers: the sum of what is shared out is rounded, that of what is not is not.
    """
    part = {i: _part_nbytes(payload, size, nbytes) for i, payload in payloads.items()}
    chosen = {
        i: payload
        for i, payload in payloads.items()
        if 2 * size * part[i] < min(size * nbytes([payload]), 2 * dense_nbytes[i])
    }
    taken = 2 * size * (sum(part[i] for i in chosen) + header)
    return chosen if taken < sum(2 * dense_nbytes[i] for i in chosen) else {}


def _part_nbytes(payload: Payload, size: int, nbytes: Callable[[Sequence[Payload]], int]) -> float:
    length = shard_length(payload, size)
    stop = min(length, payload.size)
    return nbytes([payload.cut(0, stop)]) * length / stop


def _worth_it(
    payloads: dict[int, Payload],
    dense_nbytes: dict[int, int],
    size: int,
    nbytes: Callable[[Sequence[Payload]], int],
    overhead: Callable[[Sequence[Payload]], int],
) -> dict[int, Payload]:
    """The payloads to gather: those that cost less than a dense all-reduce.

    Gathering puts ``N - 1`` copies of a payload on the link, a ring all-reduce ``2 (N - 1) / N``
    times the dense leaf.
    """
    ranks = max(size, 2)
    cheaper = {i: p for i, p in payloads.items() if ranks * nbytes([p]) < 2 * dense_nbytes[i]}
    chosen = list(cheaper.values())
    saved = sum(2 * dense_nbytes[i] for i in cheaper)
    return cheaper if ranks * (nbytes(chosen) + overhead(chosen)) < saved else {}


def _places(position: int, payload: Payload) -> list[int]:
    if isinstance(payload, Joined):
        return [i for i, _ in payload.parts.leaves]
    return [position]
