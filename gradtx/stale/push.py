"""What workers push: a fragment at work, and its payloads as a message."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from gradtx.core.chain import Chain, chain
from gradtx.core.rules import check as check_order
from gradtx.core.schedule import Schedule
from gradtx.core.stage import Kind, Stage
from gradtx.core.transformation import Context, Exchange, flat
from gradtx.core.tree import (
    Array,
    Info,
    Layout,
    LeafSpec,
    PyTree,
    accumulation_dtype,
    arrays_in,
    flatten,
    layout_of,
    unflatten,
)
from gradtx.exchange.outgoing import Outgoing
from gradtx.exchange.plan import add_payload
from gradtx.stale.frames import Description
from gradtx.wire import Header, WireFormatError, decode_message, encode_message, message_nbytes

_COUNT_NBYTES = 8


class PushState(NamedTuple):
    """The state of `Push`.

    Attributes:
        finite: 0-d bool: the last gradient was finite, and so is what was made of it.
    """

    finite: Array


class Push(Exchange):
    """The exchange at the end of a worker's chain: takes down what is to be pushed.

    Nothing is sent while the chain runs: `outgoing` holds what is to be sent once it has. What the
    chain gives means nothing.

    Attributes:
        rank: the worker's number, so that random compressors draw differently on each.
        outgoing: what the last step has to push; None after a bad step.
    """

    def __init__(self) -> None:
        super().__init__(
            Stage("push", Kind.EXCHANGE, linear=True, module="gradtx.stale."),
            lambda params, info: PushState(torch.tensor(True)),
            self._take_down,
        )
        self.rank = 0
        self.outgoing: Outgoing | None = None

    def ranks(self, arrays: Sequence[Array]) -> tuple[Any, int]:
        """The worker's number; its gradient is not averaged with that of others."""
        return self.rank, 1

    def fail(
        self, state: Any, context: Context, error: Exception, arriving: PyTree | None = None
    ) -> None:
        """Nobody waits for this worker's gradient, so nobody is told."""

    def _take_down(
        self,
        updates: PyTree,
        state: PushState,
        params: PyTree = None,
        *,
        context: Context,
        finite: Array | None = None,
        **extra: Any,
    ) -> tuple[PyTree, PushState]:
        leaves, treespec = flatten(updates)
        outgoing = Outgoing(leaves, context, 1, "auto")
        sent = [*arrays_in(outgoing.payloads), *outgoing.parts.values()]
        good = (finite is None or bool(finite)) and all(
            bool(x.isfinite().all()) for x in sent if x.is_floating_point()
        )
        self.outgoing = outgoing if good else None
        context.progress.finite = good
        nothing = [
            None
            if spec.shape is None
            else torch.zeros((), dtype=_torch_dtype(spec)).expand(spec.shape)
            for spec in context.layout.leaves
        ]
        return unflatten(treespec, nothing), PushState(torch.tensor(good))


class PushCodec:
    """A fragment at work on a worker, or, on the server, what is known of one.

    Args:
        tx: the fragment: a chain without an exchange.
        params: the parameters, a pytree of torch tensors.
        info: what is known of them, by path.

    Attributes:
        chain: the fragment with a `Push` at its end.
        layout: paths, shapes and dtypes of the parameters.
        fingerprint: 64 bits of a hash over the fragment and the parameters.
        description: the same in words.
        most_nbytes: the most that a push takes, in bytes.

    Raises:
        ValueError: if the fragment has an exchange, holds gradients back, or has sizes that change
            with the step, or payloads that only ranks in step can sum; if gradients of a leaf are
            row-sparse.
        ChainOrderError: if it has stages that need the gradient of all ranks.
        TypeError: if a parameter is no floating-point torch tensor.
    """

    def __init__(self, tx: Any, params: PyTree, info: Info | None) -> None:
        fragment = tx if isinstance(tx, Chain) else Chain(flat((tx,)))
        _check_fragment(fragment)
        self._push = Push()
        well_ordered = not check_order(fragment.stages)
        self.chain = chain(*fragment.transformations, self._push, check=well_ordered)
        self._info = info
        self.layout = layout_of(params, info)
        _check_torch(self.layout, params)
        self._plan = self._rehearsed(fragment)
        key = fragment.shared_code, self.layout.fingerprint
        digest = hashlib.sha256(repr(key).encode()).digest()
        self.fingerprint = int.from_bytes(digest[:8], "little")
        self.most_nbytes = self._most_nbytes()
        forms = self._plan.forms
        leaves = {x.path: [str(x), f"sent {forms[x.path]}"] for x in self.layout.leaves}
        self.description = Description(fragment.shared_code, leaves)

    def init(self, params: PyTree) -> Any:
        """The state of the chain before the first step."""
        return self.chain.init(params, self._info)

    def _rehearsed(self, fragment: Chain) -> Outgoing:
        """What is sent for zeros: all sizes follow from it. On the CPU, where bytes are read."""
        zeros = [
            None if x.dtype is None else torch.zeros(x.shape or (), dtype=getattr(torch, x.dtype))
            for x in self.layout.leaves
        ]
        tree = unflatten(self.layout.treespec, zeros)
        state = self.init(tree)
        extra = {"loss_scale": 1.0} if state.loss_scale is None else {}
        self.chain.update(tree, state, tree, **extra)
        plan = self._push.outgoing
        if plan is None:
            raise ValueError(f"{fragment.code()} makes zeros not finite: it cannot be pushed")
        if plan.summed:
            raise ValueError(
                f"{fragment.code()} has a compressor whose payloads are summed by ranks in step, "
                "and workers are not in step: write topk, threshold, sign, quantize, ternary, "
                "natural or cast"
            )
        return plan

    @property
    def rank(self) -> int:
        """The worker's number."""
        return self._push.rank

    @rank.setter
    def rank(self, number: int) -> None:
        self._push.rank = number

    def update(
        self, gradients: PyTree, state: Any, params: PyTree, **extra: Any
    ) -> tuple[Outgoing | None, Any]:
        """One step of the fragment: what it makes of gradients, and its new state.

        Args:
            gradients: a tree like the parameters, None for leaves that have none.
            state: before the step.
            params: the parameters.
            extra: for the fragment, such as `loss_scale`.

        Returns:
            What is to be pushed: None if the gradients are not finite, or there are none.
        """
        _, state = self.chain.update(gradients, state, params, **extra)
        outgoing = self._push.outgoing
        empty = outgoing is None or all(outgoing.absent)
        return None if empty else outgoing, state

    def encode(self, outgoing: Outgoing, clock: int) -> torch.Tensor:
        """What is to be pushed as uint8 ``[n]``: counts of what varies, 8 bytes each; a message."""
        counts = torch.tensor(outgoing.counts, dtype=torch.int64).view(torch.uint8)
        header = Header(self.fingerprint, clock, True, False, outgoing.absent)
        dense = [
            torch.cat([outgoing.parts[i].reshape(-1) for i in places]).view(torch.uint8)
            for places in outgoing.dense_places.values()
            if places
        ]
        message = encode_message(header, [*outgoing.packing.encode(), *dense], "cpu")
        return torch.cat([counts, message])

    def decode(self, body: torch.Tensor, clock: int) -> list[torch.Tensor | None]:
        """The inverse: the gradients, in FP32 (FP64 for FP64 leaves), in the order of the layout.

        Args:
            body: what `encode` gave on a worker.
            clock: of the worker.

        Returns:
            Tensors in the shapes of the leaves; None for what the worker has no gradient for.

        Raises:
            WireFormatError: if the bytes are no push of a worker that runs the same.
        """
        plan = self._plan
        counts, message = self._counts(body)
        packing = plan.packing_of(counts)
        dense = {dtype: places for dtype, places in plan.dense_places.items() if places}
        lengths = {dtype: sum(map(plan.length, places)) for dtype, places in dense.items()}
        sizes = [n * getattr(torch, dtype).itemsize for dtype, n in lengths.items()]
        packed = len(packing.sizes)
        header, segments = decode_message(
            message, len(plan.absent), [*packing.sizes, *sizes], self.fingerprint
        )
        if header.error or not header.finite or header.step != clock % 2**32:
            raise WireFormatError(f"push {clock} has a header that no worker sends: {header}")
        is_absent = plan.absent_in(header).__contains__
        totals: dict[int, torch.Tensor] = {}
        payloads = packing.decode(segments[:packed])
        for places, payload in zip(plan.places, payloads, strict=True):
            add_payload(totals, payload, plan, places[0], is_absent)
        for dtype, segment in zip(dense, segments[packed:], strict=True):
            totals |= plan.split(dtype, segment.view(getattr(torch, dtype)))
        if not all(bool(total.isfinite().all()) for total in totals.values()):
            raise WireFormatError(f"push {clock} has values that are not finite")
        return [
            totals[i].reshape(spec.shape or ()) if i in totals and not is_absent(i) else None
            for i, spec in enumerate(self.layout.leaves)
        ]

    def _counts(self, body: torch.Tensor) -> tuple[list[int], torch.Tensor]:
        rooms = self._plan.rooms
        start = _COUNT_NBYTES * len(rooms)
        if body.numel() < start:
            raise WireFormatError(f"a push has at least {start} bytes, got {body.numel()}")
        counts = body[:start].clone().view(torch.int64).tolist()
        if not all(0 <= count <= room for count, room in zip(counts, rooms, strict=True)):
            raise WireFormatError(f"a push has {counts} values that vary, of at most {rooms}")
        return counts, body[start:]

    def _most_nbytes(self) -> int:
        plan = self._plan
        dense = [plan.length(i) * plan.parts[i].element_size() for i in plan.parts]
        sizes = [*plan.packing_of(plan.rooms).sizes, *dense]
        return _COUNT_NBYTES * len(plan.rooms) + message_nbytes(len(plan.absent), sizes)


def _torch_dtype(spec: LeafSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, accumulation_dtype(spec.dtype or "float32"))
    return dtype


def _check_torch(layout: Layout, params: PyTree) -> None:
    for spec, leaf in zip(layout.leaves, flatten(params)[0], strict=True):
        if spec.table is not None:
            raise ValueError(
                f"leaf {spec.path!r} has row-sparse gradients, and what is pushed is dense: build "
                "the layer with sparse=False"
            )
        if leaf is not None and not isinstance(leaf, torch.Tensor):
            raise TypeError(
                f"parameter {spec.path!r} is a {type(leaf).__name__}: a parameter server has "
                "torch tensors (gx.to_torch makes one of a JAX array)"
            )


def _check_fragment(fragment: Chain) -> None:
    if fragment.exchange is not None:
        raise ValueError(
            f"{fragment.code()} has an exchange, and workers do not wait for each other: leave "
            f"{fragment.exchange.code()} out"
        )
    holding = [s for s in fragment.stages if s.kind in (Kind.ACCUMULATE, Kind.DELAY)]
    if holding:
        raise ValueError(
            f"{fragment.code()} holds gradients back, and each push is one: leave "
            f"{holding[0].code()} out, and call backward several times before push()"
        )
    varying = [
        argument
        for stage in fragment.stages
        for argument in stage.arguments
        if isinstance(argument.value, Schedule)
    ]
    if varying:
        raise ValueError(
            f"{fragment.code()} sends other sizes at other steps, and the server does not know a "
            f"worker's step: write a number for {varying[0].value!r}"
        )
