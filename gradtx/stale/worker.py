"""`Worker`: pushes compressed gradients to a `ParameterServer`, and pulls parameters."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from gradtx.core.stage import Kind as StageKind
from gradtx.core.tree import PyTree, flatten, unflatten
from gradtx.stale.frames import Frame, Kind
from gradtx.stale.link import Link
from gradtx.stale.mailbox import check_store, check_timeout
from gradtx.stale.parameters import ParameterCodec, trained_parameters
from gradtx.stale.push import PushCodec
from gradtx.wire import WireFormatError


@dataclass(frozen=True)
class PushReport:
    """What one `Worker.push` did.

    Attributes:
        pushed: the server has stepped with the gradient; false after a bad step, or without any
            gradient.
        clock: how many gradients this worker has pushed so far, those before a late start counted.
        staleness: how many updates the server made between this worker's last `pull` and the push.
        wire_bytes: how many bytes the gradient took.
        dense_bytes: how many it takes in FP32.
    """

    pushed: bool
    clock: int
    staleness: int
    wire_bytes: int
    dense_bytes: int


class Worker:
    """One of those that train at their own pace, with a `ParameterServer`.

    At construction it joins: its chain and parameters are compared with the server's, it takes the
    current parameters, and its clock starts at that of the slowest worker. What the chain keeps,
    the residual of `ef()` first of all, stays here.

    `push` and `pull` wait as long as this worker is further ahead of the slowest one than the
    server's bound allows; a server that is alive but waits for others is waited for.

    Args:
        store: the `torch.distributed` store that the server has; over the network a `TCPStore`.
        params: a pytree of torch tensors, or an `nn.Module`, of which those parameters count that
            require a gradient now. `pull` writes into them. Buffers, such as running statistics,
            are this worker's own.
        tx: a fragment, that is a chain without exchange; the server has an equal one.
        timeout: seconds without a sign of life after which the server counts as dead.

    Raises:
        RankMismatchError: if the server runs another chain or has other parameters, naming them.
        ConnectionError: if there is no server, or it has died.
        ValueError: if the fragment cannot be pushed: it has an exchange, a schedule, `accumulate`,
            or payloads that ranks have to be in step for (`random_k`, `powersgd`).
        TypeError: if an argument is of the wrong kind.

    Example:
        >>> import torch, gradtx as gx
        >>> from functools import partial
        >>> store, tx = torch.distributed.HashStore(), gx.chain(gx.topk(0.5), gx.ef())
        >>> start = {"w": torch.ones(4)}
        >>> with gx.ParameterServer(store, start, tx, partial(torch.optim.SGD, lr=0.5)):
        ...     mine = {"w": torch.zeros(4)}
        ...     with gx.Worker(store, mine, tx) as worker:
        ...         report = worker.push({"w": torch.tensor([2.0, 1.0, -4.0, 1.0])})
        ...         updates = worker.pull()
        >>> mine["w"], report.clock, report.staleness, updates
        (tensor([0., 1., 3., 1.]), 1, 0, 1)
        >>> worker.state.residual["w"]
        tensor([0., 1., 0., 1.])
    """

    def __init__(self, store: Any, params: Any, tx: Any, *, timeout: float = 30.0) -> None:
        check_store("Worker(store", store)
        timeout = check_timeout("Worker(timeout", timeout)
        self._params, info = trained_parameters(params)
        self._codec = PushCodec(tx, self._params, info)
        self._state = self._codec.init(self._params)
        self._has_unscale = any(s.kind is StageKind.UNSCALE for s in self._codec.chain.stages)
        layout = self._codec.layout
        self._parameters = ParameterCodec(layout, self._codec.fingerprint)
        self._dense_bytes = 4 * sum(spec.size for spec in layout.leaves)
        self._clock = 0
        self._link = Link(store, timeout)
        # Runs at exit too, before the interpreter takes the thread's ground away.
        self._end = weakref.finalize(self, self._link.end)
        self._codec.rank = self._link.number
        try:
            self._read(Frame(Kind.JOIN, body=self._codec.description.encode()))
        except BaseException:
            self._end()
            raise

    @property
    def number(self) -> int:
        """This worker's number, which no other worker of the server has had."""
        return self._link.number

    @property
    def clock(self) -> int:
        """How many gradients it has pushed so far, those before a late start counted."""
        return self._clock

    @property
    def state(self) -> Any:
        """The chain's state, a pytree."""
        return self._state

    def push(self, gradients: PyTree = None, *, loss_scale: float | None = None) -> PushReport:
        """Runs the chain on gradients, and has the server step with what comes out.

        Args:
            gradients: a tree like the parameters; None where there is none. By default the
                ``.grad`` of each parameter.
            loss_scale: what the loss was multiplied by, for a chain with `unscale`.

        Returns:
            What happened. A gradient that is not finite is not pushed, and leaves no trace: neither
            clock nor residual moves.

        Raises:
            RankMismatchError: if the server has stopped, or no longer counts this worker in.
            ConnectionError: if the server is dead.
            ValueError: if the gradients do not fit the parameters, or the loss scale the chain.
        """
        if loss_scale is not None and not self._has_unscale:
            raise ValueError("loss_scale is given and the chain has no unscale(): put it first")
        if loss_scale is not None and self._state.loss_scale is not None:
            raise ValueError(
                "loss_scale is given and the chain keeps one of its own: multiply the loss by "
                "worker.state.loss_scale and leave the argument out"
            )
        extra = {} if loss_scale is None else {"loss_scale": loss_scale}
        tree = self._gradients() if gradients is None else gradients
        with torch.no_grad():
            outgoing, self._state = self._codec.update(tree, self._state, self._params, **extra)
            if outgoing is None:
                return PushReport(False, self._clock, 0, 0, self._dense_bytes)
            body = self._codec.encode(outgoing, self._clock)
        reply = self._link.ask(Frame(Kind.PUSH, clock=self._clock, body=body))
        _expect(reply, Kind.TAKEN)
        self._clock = reply.clock
        return PushReport(True, reply.clock, reply.staleness, body.numel(), self._dense_bytes)

    def pull(self) -> int:
        """Writes the server's current parameters into this worker's.

        Returns:
            How many updates the server has made for them.

        Raises:
            RankMismatchError: if the server has stopped, or no longer counts this worker in.
            ConnectionError: if the server is dead.
        """
        return self._read(Frame(Kind.PULL, clock=self._clock))

    def close(self) -> None:
        """Leaves, which is no failure; the others wait for this worker no longer.

        At the end of a ``with`` block that an error has ended, it is one.
        """
        self._leave("")

    def _leave(self, why: str) -> None:
        if self._end.detach() is not None:
            self._link.leave(why)

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave("" if kind is None else f"{kind.__name__}: {error}")

    @torch.no_grad()
    def _read(self, request: Frame) -> int:
        reply = self._link.ask(request, self._parameters.nbytes)
        _expect(reply, Kind.PARAMETERS)
        values = self._parameters.decode(reply.body, reply.updates)
        for parameter, value in zip(flatten(self._params)[0], values, strict=True):
            if value is not None:
                parameter.copy_(value)
        self._clock = reply.clock
        return reply.updates

    def _gradients(self) -> PyTree:
        leaves, treespec = flatten(self._params)
        return unflatten(treespec, [p if p is None else p.grad for p in leaves])


def _expect(reply: Frame, kind: Kind) -> None:
    if reply.kind is not kind:
        raise WireFormatError(f"the server answers {reply.kind.name}, expected {kind.name}")
