"""`ParameterServer`: owns the parameters, and steps with what workers push."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from gradtx.core.arguments import check_whole
from gradtx.core.errors import RankMismatchError
from gradtx.core.tree import PyTree
from gradtx.stale.frames import Description, Frame, Kind
from gradtx.stale.mailbox import LONGEST_TEXT, POLL, check_store, check_timeout
from gradtx.stale.master import Master, OptimizerFactory, Values
from gradtx.stale.parameters import ParameterCodec, trained_parameters
from gradtx.stale.push import PushCodec
from gradtx.stale.switchboard import Caller, Switchboard
from gradtx.wire import WireFormatError


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


@dataclass
class _Member:
    """What the server knows of a worker that it counts in.

    Attributes:
        clock: how many gradients it has pushed.
        read_at: how many updates had been made for what it has read last.
        read: what it has read last, if that is to be known.
    """

    clock: int
    read_at: int = 0
    read: Values = field(default_factory=list)


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
        timeout = check_timeout("ParameterServer(timeout", timeout)
        if on_failure not in ("continue", "stop"):
            raise ValueError(
                f"ParameterServer(on_failure={on_failure!r}): expected 'continue' or 'stop'"
            )
        if on_update is not None and not callable(on_update):
            raise TypeError(f"ParameterServer(on_update={on_update!r}): expected a function")
        self._bound, self._on_failure, self._on_update = bound, on_failure, on_update
        tree, info = trained_parameters(params)
        self._pushes = PushCodec(tx, tree, info)
        layout = self._pushes.layout
        self._codec = ParameterCodec(layout, self._pushes.fingerprint)
        self._master = Master(tree, layout, optimizer, staleness_scaling, delay_compensation)
        self._switchboard = Switchboard(store, timeout, self._lose)
        self._members: dict[int, _Member] = {}
        self._lost: dict[int, str] = {}
        self._updates = self._admitted = self._slowest = 0
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._closing, self._exiting = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="gradtx server", daemon=True)

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
            return self._master.tree()

    def start(self) -> ParameterServer:
        """Begins to serve, in a thread; once.

        Raises:
            ValueError: if the store has had a server before.
        """
        self._switchboard.open()
        # Runs at exit, before the interpreter takes the thread's ground away.
        weakref.finalize(self, _end, self._closing, self._exiting, self._thread)
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
                    f"{workers}, and {len(self._members)} are there"
                )

    def close(self) -> None:
        """Stops serving. Workers that are still there get an error.

        Called by `on_update`, it does not wait for the end.
        """
        self._closing.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
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

    def _over(self, workers: int) -> bool:
        if self._failure is not None or self._closing.is_set():
            return True
        return self._admitted >= workers and not self._members

    def _clocks(self) -> dict[int, int]:
        return {number: member.clock for number, member in self._members.items()}

    def _run(self) -> None:
        why = "the parameter server was closed"
        try:
            while not self._closing.is_set():
                self._switchboard.tick()
                self._switchboard.collect()
                if not self._answer_all():
                    self._closing.wait(POLL)
        except BaseException as error:  # An exit in `on_update` too: nobody may wait for ever.
            self._failure = error
            name = "" if isinstance(error, RankMismatchError) else f"{type(error).__name__}: "
            why = f"the parameter server has stopped: {name}{error}"
        try:
            self._on_failure = "continue"
            self._switchboard.stop_all(why, self._exiting)
        except Exception as error:  # Without a store nobody can be told; they will notice.
            self._failure = self._failure or error
        with self._changed:
            self._changed.notify_all()

    def _answer_all(self) -> bool:
        """Answers all who are not too far ahead, the slowest first; says whether any was."""
        answered = False
        callers = self._switchboard.callers
        for number in sorted(callers, key=lambda n: (self._clocks().get(n, 0), n)):
            caller = callers.get(number)
            if caller is None or caller.pending is None or not self._may_go(caller):
                continue
            request, caller.pending = caller.pending, None
            answered = True
            try:
                self._answer(caller, request)
            except WireFormatError as error:
                self._switchboard.fail(number, f"has sent damaged bytes: {error}")
        return answered

    def _may_go(self, caller: Caller) -> bool:
        member = self._members.get(caller.number)
        if member is None or (caller.pending is not None and caller.pending.kind is Kind.LEAVE):
            return True
        return member.clock - min(self._clocks().values()) <= self._bound

    def _answer(self, caller: Caller, request: Frame) -> None:
        member = self._members.get(caller.number)
        if request.kind is Kind.LEAVE and request.body.numel():
            self._switchboard.fail(caller.number, f"has failed: {request.text}")
        elif request.kind is Kind.LEAVE:
            self._forget(caller.number)
        elif request.kind is Kind.JOIN and member is None:
            self._admit(caller, request)
        elif request.kind is Kind.PUSH and member is not None:
            self._take(caller, member, request)
        elif request.kind is Kind.PULL and member is not None:
            self._give(caller, member)
        else:
            raise WireFormatError(f"a worker cannot ask to {request.kind.name} now")

    def _admit(self, caller: Caller, request: Frame) -> None:
        difference = self._pushes.description.difference(Description.decode(request))
        if difference:
            why = f"the parameter server refuses this worker: {difference}"
            self._switchboard.refuse(caller, why)
            self._forget(caller.number)
            return
        caller.most = max(self._pushes.most_nbytes, LONGEST_TEXT)
        with self._changed:
            member = _Member(min(self._clocks().values(), default=self._slowest))
            self._members[caller.number] = member
            self._admitted += 1
        self._give(caller, member)

    @torch.no_grad()
    def _give(self, caller: Caller, member: _Member) -> None:
        body = self._codec.encode(self._master.values, self._updates)
        member.read_at = self._updates
        if self._master.compensates:
            member.read = self._codec.decode(body, self._updates)
        reply = Frame(Kind.PARAMETERS, member.clock, self._updates, body=body)
        self._switchboard.reply(caller, reply)

    def _take(self, caller: Caller, member: _Member, request: Frame) -> None:
        if request.clock != member.clock:
            raise WireFormatError(f"push {request.clock} comes when {member.clock} is due")
        gradients = self._pushes.decode(request.body, member.clock)
        staleness = self._updates - member.read_at
        with self._changed:
            self._master.step(gradients, member.read, staleness)
            self._updates += 1
            member.clock += 1
            clocks = self._clocks()
            self._slowest = min(clocks.values())
        reply = Frame(Kind.TAKEN, member.clock, self._updates, staleness)
        self._switchboard.reply(caller, reply)
        if self._on_update is not None:
            self._on_update(ServerUpdate(self._updates, caller.number, staleness, clocks))

    def _forget(self, number: int) -> None:
        self._switchboard.hang_up(number)
        with self._changed:
            self._members.pop(number, None)
            self._changed.notify_all()

    def _lose(self, number: int, why: str) -> None:
        """A worker has failed: without it, or the end for all."""
        with self._changed:
            self._lost[number] = f"worker {number} {why}"
            self._members.pop(number, None)
            self._changed.notify_all()
        if self._on_failure == "stop":
            raise RankMismatchError(self._lost[number])


def _end(closing: threading.Event, exiting: threading.Event, thread: threading.Thread) -> None:
    exiting.set()
    closing.set()
    if thread.ident is not None:
        thread.join()
