"""What runs a chain for a `Pipeline`: at once, or in the background while the loop goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from gradtx.backends.pool import Pool
from gradtx.backends.torch_ops import flags
from gradtx.background import Background, Job
from gradtx.core.chain import Chain, ChainState, fail
from gradtx.core.stage import Kind
from gradtx.core.transformation import Exchange, Transformation
from gradtx.core.tree import PyTree, arrays_in, flatten, map_leaves, unflatten, widen
from gradtx.exchange.group import Group
from gradtx.transforms.delayed import DelayedState, Result, delayed, outcome_of


@dataclass(frozen=True)
class Outcome:
    """What one step gave.

    Attributes:
        updates: for the gradients; None if there are none to write, now.
        ready: there is something to step with.
        skipped: it was bad on some rank.
        left_out: a rank has left a bad micro-step out.
        sent: bytes that this rank put on the link for it.
        seconds: how long compressing and exchanging took in the background.
        hidden: how much of that nobody waited for.
    """

    updates: Any = None
    ready: bool = False
    skipped: bool = False
    left_out: bool = False
    sent: int = 0
    seconds: float = 0.0
    hidden: float = 0.0


class Direct:
    """Runs each step of a chain when it is asked to.

    Args:
        tx: the chain.
        group: the ranks.
        params: the parameters, a tree of tensors.
        state: of the chain, to begin with.
    """

    def __init__(self, tx: Chain, group: Group, params: PyTree, state: Any) -> None:
        self._tx, self._group = tx, group
        self._params = params
        self._pool = Pool()
        self.state = state

    @property
    def params(self) -> PyTree:
        """The parameters, as the chain sees them."""
        return self._params

    def step(self, gradients: PyTree, **extra: Any) -> Outcome:
        """One update; gradients may be written over."""
        extra["pool"] = self._pool
        return self._run(lambda: self._tx.update(gradients, self.state, self.params, **extra))

    def fail(self, error: Exception) -> None:
        """Tells the other ranks that this one will not come to the next exchange, and why."""
        fail(self._tx, self.state, error)

    def flush(self, **extra: Any) -> Outcome:
        """One step of what is held back."""
        return self._run(lambda: self._tx.flush(self.state, self.params, **extra))

    @property
    def pending(self) -> bool:
        """Whether there is more to flush."""
        return bool(self.state.pending)

    def _run(self, update: Callable[[], tuple[PyTree, Any]]) -> Outcome:
        sent, before = self._group.sent, int(self.state.total_notfinite)
        with torch.no_grad():
            updates, self.state = self._taken(update)
        self._pool.reclaim(lambda: arrays_in(self.state))
        window = window_state(self.state.states)
        decided = window is None or bool(window.closed)
        return Outcome(
            updates,
            bool(self.state.ready),
            int(self.state.total_notfinite) > before,
            decided and window is not None and not window.clean and bool(self.state.ready),
            self._group.sent - sent,
        )

    def _taken(self, update: Callable[[], tuple[PyTree, Any]]) -> tuple[PyTree, Any]:
        """What a step gives, and the state that it leads to."""
        return update()

    def close(self) -> None:
        """Ends all that it has begun."""


def window_state(states: tuple[Any, ...]) -> Any:
    """The state of `accumulate` among those of some parts, or None."""
    return next((state for state in states if hasattr(state, "closed")), None)


def over_siblings(parts: Sequence[Transformation]) -> list[Transformation]:
    """The same, exchanging over groups of their own; all ranks come here."""
    return [
        part.over(part.group.plain.sibling()) if isinstance(part, Exchange) else part
        for part in parts
    ]


class Overlapped:
    """Runs what is up to a delayed exchange in the background, and what is behind it at its turn.

    Args:
        tx: a chain with a delay.
        group: the ranks; the exchange is made on a group of its own.
        params: the parameters, a tree of tensors.
        state: of the chain, to begin with.
    """

    def __init__(self, tx: Chain, group: Group, params: PyTree, state: Any) -> None:
        _, *behind = tx.core
        exchange: Any = tx.exchange
        self._params = params
        # The same parts as those of the chain, over another group.
        *before, own = over_siblings([*tx.before_delay, exchange])
        again = Chain([*before, delayed(own, steps=tx.delay)])
        self._front = Chain(again.core[0].parts)
        self._own = self._front.groups[0]
        self._behind = Chain(behind) if behind else None
        self._background = Background()
        window = next((s for s in self._front.stages if s.kind is Kind.ACCUMULATE), None)
        self._window = 1 if window is None else window.hyperparameters["n"]
        self._windowed = window is not None
        self._take_up(state)

    @property
    def state(self) -> ChainState:
        """As the functional form has it, after the last step; waits for what is under way."""
        self._background.wait()
        results = tuple(entry.result() for entry in self._queue)
        queue = tuple(outcome.updates for outcome in results)
        late = DelayedState(queue, self._ready, self._front_state.states)
        behind = () if self._behind is None else self._behind_state.states
        return ChainState(self._front_state.layout, (late, *behind))

    @state.setter
    def state(self, state: ChainState) -> None:
        self._background.wait()
        self._take_up(state)

    def _take_up(self, state: ChainState) -> None:
        late, *behind = state.states
        self._front_state = ChainState(state.layout, late.inner_states)
        self._behind_state: Any = ChainState(state.layout, tuple(behind)) if behind else None
        self._ready = late.ready
        window = window_state(late.inner_states)
        self._count = 0 if window is None else int(window.count)
        self._queue: deque[Job] = deque(
            Job.done(Outcome(result, bool(result.good))) for result in late.queue
        )

    def step(self, gradients: PyTree, **extra: Any) -> Outcome:
        """Begins one update, and gives the one whose turn it is, if one is due.

        Args:
            gradients: they are this engine's from now on.
            extra: as for `update`.
        """
        job = self._background.submit(
            lambda: self._update(
                lambda: self._front.update(gradients, self._front_state, self._params, **extra)
            )
        )
        self._count += 1
        if self._count < self._window:
            return Outcome()
        self._count = 0
        return self._next(job)

    def fail(self, error: Exception) -> None:
        """Tells the other ranks that this one will not come to the next exchange, and why."""
        job = self._background.submit(lambda: fail(self._front, self._front_state, error))
        with suppress(Exception):
            job.result()

    def flush(self, **extra: Any) -> Outcome:
        """Ends a window, if there are windows, and gives the next result."""
        if not self._windowed:
            return self._next(Job.done(self._empty()))
        job = self._background.submit(
            lambda: self._update(
                lambda: self._front.flush(self._front_state, self._params, **extra)
            )
        )
        self._count = 0
        return self._next(job)

    @property
    def pending(self) -> bool:
        """Whether there is more to flush."""
        return bool(self.state.pending)

    def _update(self, update: Callable[[], tuple[PyTree, Any]]) -> Outcome:
        """In the background: one step up to the exchange."""
        sent, before = self._own.sent, int(self._front_state.total_notfinite)
        with torch.no_grad():
            updates, self._front_state = update()
        _, good = outcome_of(self._front_state.states)
        leaves, treespec = flatten(updates)
        absent = flags([leaf is None for leaf in leaves])
        likes = flatten(self._params)[0]
        filled = [
            torch.zeros_like(like) if leaf is None and like is not None else leaf
            for leaf, like in zip(leaves, likes, strict=True)
        ]
        result = Result(map_leaves(widen, unflatten(treespec, filled)), good, absent)
        skipped = int(self._front_state.total_notfinite) > before
        return Outcome(result, bool(good), skipped, sent=self._own.sent - sent)

    def _empty(self) -> Outcome:
        zeros = map_leaves(lambda x: torch.zeros_like(widen(x.detach())), self._params)
        leaves = len(flatten(self._params)[0])
        return Outcome(Result(zeros, torch.tensor(False), flags([False] * leaves)))

    def _next(self, job: Job) -> Outcome:
        self._queue.append(job)
        outcome: Outcome = self._queue.popleft().result()
        self._ready = torch.tensor(outcome.ready)
        if not outcome.ready:
            return replace(outcome, updates=None)
        leaves, treespec = flatten(outcome.updates.updates)
        absent = outcome.updates.absent.tolist()
        shown = [None if gone else leaf for leaf, gone in zip(leaves, absent, strict=True)]
        updates: PyTree = unflatten(treespec, shown)
        if self._behind is not None:
            with torch.no_grad():
                updates, self._behind_state = self._behind.update(
                    updates, self._behind_state, self._params
                )
            taken = bool(self._behind_state.last_finite)
            return replace(outcome, updates=updates, ready=taken, skipped=not taken)
        return replace(outcome, updates=updates)

    def close(self) -> None:
        """Waits for what is under way, and ends the thread."""
        self._background.close()
