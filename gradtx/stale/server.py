"""`ParameterServer`: owns the parameters, and steps with what workers push."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from gradtx.core.arguments import check_bool, check_whole
from gradtx.core.errors import RankMismatchError
from gradtx.core.tree import PyTree, flatten, unflatten, widen
from gradtx.stale.codec import ParameterCodec, PushCodec, trained_parameters
from gradtx.stale.frames import HEAD_NBYTES, Description, Frame, Kind, as_body
from gradtx.stale.mailbox import (
    BELL,
    JOINED,
    POLL,
    SERVER,
    STOP,
    Clockwork,
    Mailbox,
    check_store,
    check_timeout,
    gone_key,
    silence_limit,
)
from gradtx.wire import WireFormatError

Optimizer = torch.optim.Optimizer
# That of a million leaves is shorter.
_LONGEST_DESCRIPTION = 1 << 28
_LONGEST_TEXT = 1 << 20
OptimizerFactory = Callable[[list[tuple[str, torch.nn.Parameter]]], Optimizer]


@dataclass(frozen=True)
class ServerUpdate:
    """One step of the server.

    Attributes:
        updates: how many it has made, this one counted.
        worker: whose gradient it was.
        staleness: how many updates were made between that worker's read and its push.
        clocks: of all workers that are there, after the step: how many gradients each has pushed.
    """

    updates: int
    worker: int
    staleness: int
    clocks: Mapping[int, int]


class _Peer:
    """What the server knows of one worker."""

    def __init__(self) -> None:
        self.admitted = False
        self.clock = 0
        self.read_at = 0
        self.read: list[torch.Tensor | None] = []
        self.requests = 0
        self.pending: Frame | None = None
        self.beats = 0
        self.heard = time.monotonic()


class ParameterServer:
    r"""Owns the parameters, takes the gradients of workers as they come, and steps with each.

    It works in a thread of its own, from `start` (or the beginning of a ``with`` block) on, in a
    process of its own or in that of a worker. The process that holds a `TCPStore` should be this
    one: it then is the only one whose death ends the training.

    No worker gets more than ``bound + 1`` gradients ahead of the slowest one that is alive, and
    none reads parameters while it is more than `bound` ahead: so what it reads holds all gradients
    but the last `bound` of each worker (stale synchronous parallel).

    Args:
        store: a `torch.distributed` store, the same for all; over the network a `TCPStore`. Several
            servers share one if each has its own `PrefixStore`.
        params: a pytree of torch tensors, or an `nn.Module`: where the parameters start. They are
            copied, in FP32 (FP64 for FP64 leaves).
        tx: a fragment, that is a chain without exchange; workers have an equal one.
        optimizer: makes the optimizer of the named copies, such as
            ``functools.partial(torch.optim.SGD, lr=0.1)``. Each push is one step of it.
        bound: how far a worker may be ahead and still go on.
        timeout: seconds without a sign of life after which a worker counts as dead.
        on_failure: what happens if a worker dies or sends damaged bytes: ``"continue"`` goes on
            without it, ``"stop"`` ends the work of all.
        staleness_scaling: whether a step is scaled by ``1 / max(1, staleness)``.
        delay_compensation: :math:`\lambda \ge 0`. The gradient that a worker has found at
            :math:`w_\text{read}` becomes :math:`g + \lambda\, g \odot g \odot (w - w_\text{read})`.
            If it is over 0, the server keeps what each worker has read: one copy of the parameters
            a worker.
        on_update: called after each step, in the server's thread, which waits for it.

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if one is out of range, or the fragment cannot be pushed; see `Worker`.

    References:
        Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server,
        2013; Li et al., Scaling Distributed Machine Learning with the Parameter Server, 2014; Zhang
        et al., Staleness-Aware Async-SGD, 2016; Zheng et al., Asynchronous Stochastic Gradient
        Descent with Delay Compensation, 2017.

    Example:
        >>> import torch, gradtx as gx
        >>> from functools import partial
        >>> store, start = torch.distributed.HashStore(), {"w": torch.zeros(2)}
        >>> with gx.ParameterServer(
        ...     store, start, gx.chain(), partial(torch.optim.SGD, lr=1.0)
        ... ) as server:
        ...     with gx.Worker(store, {"w": torch.zeros(2)}, gx.chain()) as worker:
        ...         report = worker.push({"w": torch.tensor([1.0, -1.0])})
        ...     server.join()
        >>> server.parameters()["w"], server.updates
        (tensor([-1.,  1.]), 1)
    """

    def __init__(
        self,
        store: Any,
        params: Any,
        tx: Any,
        optimizer: OptimizerFactory,
        *,
        bound: int = 5,
        timeout: float = 30.0,
        on_failure: str = "continue",
        staleness_scaling: bool = False,
        delay_compensation: float = 0.0,
        on_update: Callable[[ServerUpdate], None] | None = None,
    ) -> None:
        check_store("ParameterServer(store", store)
        check_whole("ParameterServer(bound", bound, 0)
        check_bool("ParameterServer(staleness_scaling", staleness_scaling)
        if on_failure not in ("continue", "stop"):
            raise ValueError(
                f"ParameterServer(on_failure={on_failure!r}): expected 'continue' or 'stop'"
            )
        if on_update is not None and not callable(on_update):
            raise TypeError(f"ParameterServer(on_update={on_update!r}): expected a function")
        self._timeout = check_timeout("ParameterServer(timeout", timeout)
        self._compensation = _checked_compensation(delay_compensation)
        self._bound, self._on_failure = bound, on_failure
        self._scaling, self._on_update = staleness_scaling, on_update
        tree, info = trained_parameters(params)
        self._pushes = PushCodec(tx, tree, info)
        self._layout = self._pushes.layout
        self._codec = ParameterCodec(self._layout, self._pushes.fingerprint)
        self._parameters = [
            None if x is None else torch.nn.Parameter(widen(x.detach()).clone())
            for x in flatten(tree)[0]
        ]
        self._dtypes = [None if x is None else x.dtype for x in flatten(tree)[0]]
        self._optimizer = self._make(optimizer)

        self._mailbox = Mailbox(store, self._tick)
        self._clockwork = Clockwork(self._timeout)
        self._peers: dict[int, _Peer] = {}
        self._lost: dict[int, str] = {}
        self._updates = self._bell = self._seen = self._admitted = self._slowest = 0
        self._failure: Exception | None = None
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gradtx server", daemon=True)
        weakref.finalize(self, _end, self._closing, self._thread)

    @property
    def updates(self) -> int:
        """How many steps it has made."""
        return self._updates

    @property
    def clocks(self) -> dict[int, int]:
        """How many gradients each worker that is there has pushed."""
        with self._changed:
            return self._clocks()

    @property
    def lost(self) -> dict[int, str]:
        """Why each worker that was lost was lost."""
        with self._changed:
            return dict(self._lost)

    def parameters(self) -> PyTree:
        """A copy of the current parameters, in their own dtypes, a tree like the one given.

        For a module, a dict by path: ``model.load_state_dict(server.parameters(), strict=False)``.
        """
        with self._changed:
            values = [
                None if p is None else p.detach().to(dtype, copy=True)
                for p, dtype in zip(self._parameters, self._dtypes, strict=True)
            ]
        return unflatten(self._layout.treespec, values)

    def start(self) -> ParameterServer:
        """Begins to serve, in a thread; once."""
        self._thread.start()
        return self

    def join(self, workers: int = 1, timeout: float | None = None) -> None:
        """Waits until workers have come, and all that have come are gone.

        Args:
            workers: how many have to come, at least.
            timeout: seconds to wait at most.

        Raises:
            RankMismatchError: if all were stopped because a worker was lost.
            TimeoutError: if it takes longer.
            Exception: whatever has made the server fail.
        """
        check_whole("join(workers", workers, 1)
        if self._thread.ident is None:
            raise RuntimeError("this server has not been started: call start() first")
        with self._changed:
            done = self._changed.wait_for(lambda: self._over(workers), timeout)
            if self._failure is not None:
                raise self._failure
            if not done:
                raise TimeoutError(
                    f"after {timeout:g} s {self._admitted} workers have come, of at least "
                    f"{workers}, and {len(self._clocks())} are there"
                )

    def close(self) -> None:
        """Stops serving. Workers that are still there get an error."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()

    def __enter__(self) -> ParameterServer:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _make(self, factory: OptimizerFactory) -> Optimizer:
        if not callable(factory):
            raise TypeError(
                f"ParameterServer(optimizer={factory!r}): expected a function of the parameters, "
                "such as functools.partial(torch.optim.SGD, lr=0.1)"
            )
        specs = zip(self._layout.leaves, self._parameters, strict=True)
        optimizer = factory([(spec.path, p) for spec, p in specs if p is not None])
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"ParameterServer(optimizer={factory!r}): it gives a {type(optimizer).__name__}, "
                "expected a torch optimizer"
            )
        own = {id(p) for p in self._parameters}
        if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                f"ParameterServer(optimizer={factory!r}): it steps on other tensors than it was "
                "given: the server has copies of the parameters"
            )
        return optimizer

    def _over(self, workers: int) -> bool:
        if self._failure is not None or not self._thread.is_alive():
            return True
        return self._admitted >= workers and not self._peers

    def _clocks(self) -> dict[int, int]:
        return {number: peer.clock for number, peer in self._peers.items() if peer.admitted}

    def _run(self) -> None:
        why = "the parameter server was closed"
        try:
            while not self._closing.is_set():
                self._tick()
                self._collect()
                if not self._answer_those_who_may_go():
                    self._closing.wait(POLL)
        except Exception as error:
            why = f"the parameter server has stopped: {type(error).__name__}: {error}"
            if isinstance(error, RankMismatchError):
                why = f"the parameter server has stopped: {error}"
            self._failure = error
        try:
            self._stop(why)
        except Exception as error:  # Without a store nobody can be told; they will notice.
            self._failure = self._failure or error
        with self._changed:
            self._changed.notify_all()

    def _stop(self, why: str) -> None:
        """Tells all workers to stop, and waits until they have gone, up to the time-out."""
        if not self._peers:
            return
        self._on_failure = "continue"
        self._mailbox.store.set(STOP, why)
        deadline = time.monotonic() + self._timeout
        while self._peers and time.monotonic() < deadline:
            self._tick()
            self._collect()
            for number, peer in list(self._peers.items()):
                request, peer.pending = peer.pending, None
                if request is not None and request.kind is Kind.LEAVE:
                    self._remove(number)
                elif request is not None:
                    self._refuse(number, peer, why)
            time.sleep(POLL)

    def _tick(self) -> None:
        """Gives a sign of life, and looks for those of the workers, if it is time."""
        if not self._clockwork.due():
            return
        self._mailbox.beat(SERVER)
        for number, peer in list(self._peers.items()):
            beats, now = self._mailbox.beats(str(number)), time.monotonic()
            if beats != peer.beats:
                peer.beats, peer.heard = beats, now
            elif now - peer.heard > silence_limit(self._timeout):
                self._lose(number, peer, f"has given no sign of life in {self._timeout:g} s")

    def _collect(self) -> None:
        """Takes in what workers have asked since the last time."""
        bell = int(self._mailbox.store.add(BELL, 0))
        if bell == self._bell:
            return
        self._bell = bell
        joined = int(self._mailbox.store.add(JOINED, 0))
        with self._changed:
            self._peers.update({number: _Peer() for number in range(self._seen, joined)})
        self._seen = joined
        for number, peer in list(self._peers.items()):
            try:
                # Who asks anew no longer waits for the reply to what was asked before.
                while (data := self._next(number, peer)) is not None:
                    peer.requests += 1
                    peer.pending = Frame.decode(data)
            except WireFormatError as error:
                self._lose(number, peer, f"has sent damaged bytes: {error}")

    def _next(self, number: int, peer: _Peer) -> bytes | None:
        most = self._pushes.most_nbytes if peer.admitted else _LONGEST_DESCRIPTION
        key = f"request/{number}/{peer.requests + 1}"
        return self._mailbox.take(key, HEAD_NBYTES + max(most, _LONGEST_TEXT))

    def _answer_those_who_may_go(self) -> bool:
        """Answers what workers have asked that are not too far ahead; says whether any was."""
        waiting = [(peer.clock, n) for n, peer in self._peers.items() if peer.pending is not None]
        answered = False
        for _, number in sorted(waiting):
            peer = self._peers.get(number)
            if peer is None or peer.pending is None or not self._may_go(peer, peer.pending):
                continue
            request, peer.pending = peer.pending, None
            answered = True
            try:
                self._answer(number, peer, request)
            except WireFormatError as error:
                self._lose(number, peer, f"has sent damaged bytes: {error}")
        return answered

    def _may_go(self, peer: _Peer, request: Frame) -> bool:
        if request.kind is Kind.LEAVE or not peer.admitted:
            return True
        return peer.clock - min(self._clocks().values()) <= self._bound

    def _answer(self, number: int, peer: _Peer, request: Frame) -> None:
        if request.kind is Kind.LEAVE and request.body.numel():
            self._lose(number, peer, f"has failed: {request.text}")
        elif request.kind is Kind.LEAVE:
            self._remove(number)
        elif request.kind is Kind.JOIN and not peer.admitted:
            self._admit(number, peer, request)
        elif request.kind is Kind.PUSH and peer.admitted:
            self._take(number, peer, request)
        elif request.kind is Kind.PULL and peer.admitted:
            self._give(number, peer)
        else:
            raise WireFormatError(f"a worker cannot ask to {request.kind.name} now")

    def _reply(self, number: int, peer: _Peer, reply: Frame) -> None:
        self._mailbox.post(f"reply/{number}/{peer.requests}", reply.encode())

    def _admit(self, number: int, peer: _Peer, request: Frame) -> None:
        difference = self._pushes.description.difference(Description.decode(request))
        if difference:
            self._refuse(number, peer, f"the parameter server refuses this worker: {difference}")
            self._remove(number)
            return
        with self._changed:
            peer.clock = min(self._clocks().values(), default=self._slowest)
            peer.admitted = True
            self._admitted += 1
        self._give(number, peer)

    @torch.no_grad()
    def _give(self, number: int, peer: _Peer) -> None:
        body = self._codec.encode(self._parameters, self._updates)
        peer.read_at = self._updates
        if self._compensation:
            peer.read = self._codec.decode(body, self._updates)
        reply = Frame(Kind.PARAMETERS, peer.clock, self._updates, body=body)
        self._reply(number, peer, reply)

    def _take(self, number: int, peer: _Peer, request: Frame) -> None:
        if request.clock != peer.clock:
            raise WireFormatError(f"push {request.clock} comes when {peer.clock} is due")
        gradients = self._pushes.decode(request.body, peer.clock)
        staleness = self._updates - peer.read_at
        with self._changed:
            self._step(gradients, peer.read, staleness)
            self._updates += 1
            peer.clock += 1
            clocks = self._clocks()
            self._slowest = min(clocks.values())
        self._reply(number, peer, Frame(Kind.TAKEN, peer.clock, self._updates, staleness))
        if self._on_update is not None:
            self._on_update(ServerUpdate(self._updates, number, staleness, clocks))

    @torch.no_grad()
    def _step(
        self,
        gradients: list[torch.Tensor | None],
        read: list[torch.Tensor | None],
        staleness: int,
    ) -> None:
        for i, (parameter, gradient) in enumerate(zip(self._parameters, gradients, strict=True)):
            if parameter is None:
                continue
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
            if parameter.grad is not None and self._compensation:
                then = read[i]
                assert then is not None
                moved = parameter - then.to(parameter)
                parameter.grad += self._compensation * parameter.grad.square() * moved
        scale = 1 / max(1, staleness) if self._scaling else 1.0
        before = [] if scale == 1 else [p.clone() for p in self._parameters if p is not None]
        self._optimizer.step()
        # The step is scaled, not the gradient: that is the same for SGD alone, and not for Adam.
        after = [p for p in self._parameters if p is not None]
        for old, new in zip(before, after, strict=False):
            new.copy_(old + scale * (new - old))

    def _refuse(self, number: int, peer: _Peer, why: str) -> None:
        self._reply(number, peer, _refusal(why))

    def _lose(self, number: int, peer: _Peer, why: str) -> None:
        """A worker has failed: without it, or the end for all."""
        self._lost[number] = f"worker {number} {why}"
        self._mailbox.store.set(
            gone_key(number), f"the parameter server no longer counts this worker in: it {why}"
        )
        self._remove(number)
        if self._on_failure == "stop":
            raise RankMismatchError(self._lost[number])

    def _remove(self, number: int) -> None:
        with self._changed:
            self._peers.pop(number, None)
            self._changed.notify_all()


def _refusal(why: str) -> Frame:
    return Frame(Kind.REFUSED, body=as_body(why.encode()))


def _checked_compensation(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, float):
        raise TypeError(
            f"ParameterServer(delay_compensation={value!r}): expected a float of 0.0 or more"
        )
    if not (math.isfinite(value) and value >= 0.0):
        raise ValueError(
            f"ParameterServer(delay_compensation={value!r}): expected a float of 0.0 or more"
        )
    return value


def _end(closing: threading.Event, thread: threading.Thread) -> None:
    closing.set()
    if thread.ident is not None:
        thread.join(1.0)
