"""Some leaves at a time: they go out while the backward pass goes on to others."""

from __future__ import annotations

import statistics
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from gradtx.backends.pool import Pool
from gradtx.background import Background, Job
from gradtx.checkpoint import flatten_state, restore_state
from gradtx.core.chain import Chain, ChainState, fail
from gradtx.core.combinators import Gate, judge, run
from gradtx.core.stage import Kind
from gradtx.core.transformation import Exchange, Transformation
from gradtx.core.tree import Info, PyTree, arrays_in, flatten, unflatten, widen
from gradtx.engine import Outcome, over_siblings, window_state

_GROUPS = 24
_LEAST = 1 << 20  # bytes of a group in FP32: for less, a round of messages of its own is too much

Extra = dict[str, Any]
Levels = list[tuple[Any, ...]]


class Group:
    """Leaves that go out together.

    Attributes:
        places: their positions.
        state: the chain's, for them.
        waiting: those of them that the backward pass has not come to.
        pool: of the buffers that are theirs.
    """

    def __init__(self, places: Sequence[int], state: ChainState) -> None:
        self.places = tuple(places)
        self.state = state
        self.waiting = set(places)
        self.pool = Pool()


@dataclass(frozen=True)
class Done:
    """What has come of a group.

    Attributes:
        updates: for all leaves, those of other groups None.
        state: the new one, which counts only if all groups are good.
        seconds: how long it has taken.
    """

    updates: list[Any]
    state: ChainState
    seconds: float


class Grouped:
    """Runs a chain on some leaves at a time, as soon as their gradients are there.

    Each group goes through all up to the exchange, in a thread of its own, one after the other, in
    an order that is the same on all ranks. What that makes of the state is kept apart until all
    have come through: if one was bad, or a rank has failed before the last, none has moved. What is
    behind the exchange sees all leaves.

    Args:
        tx: a chain with an exchange, that `reason_against` has nothing against.
        params: the parameters, a tree of tensors.
        order: the positions of the leaves, in the order in which the forward pass uses them.
        info: what is known of them, by path, or None.
        state: of the chain, to begin with.
        known: gives the extra arguments of `update`, as they are known before the backward pass: a
            method of who holds this engine, and so held weakly, or dropping both would leave hooks.
        trial: of whether it pays.
        widens: whether gradients go into the chain in FP32.
    """

    def __init__(
        self,
        tx: Chain,
        params: PyTree,
        order: Sequence[int],
        info: Info | None,
        state: ChainState,
        known: Callable[[], Extra],
        trial: Trial,
        *,
        widens: bool,
    ) -> None:
        self._tx, self._params, self._info = tx, params, info
        self._known = weakref.WeakMethod(known)
        self._leaves, self._treespec = flatten(params)
        exchange = max(i for i, t in enumerate(tx.transformations) if _exchanges(t))
        self._front = Chain(over_siblings(tx.transformations[: exchange + 1]))
        self._front.overwrites = tx.overwrites
        self._widens = widens or exchange + 1 < len(tx.transformations)
        self._groups = [
            Group(places, self._front.init(self._parameters(places), info))
            for places in partition(self._leaves, order)
        ]
        self._group_of = {i: group for group in self._groups for i in group.places}
        self._background = Background()
        self._lock = threading.RLock()
        self._paused = False
        self.trial = trial
        self._layout = state.layout
        self._ranks = self._front.groups[0]
        self._sent = self._ranks.sent
        self._begin()
        self._take_up(state)
        self._unhook = weakref.finalize(self, _remove, _hooked(self, self._leaves))

    def _tree(self, leaves: Mapping[int, Any]) -> PyTree:
        """A tree with some leaves, by position, and None for the others."""
        return unflatten(self._treespec, [leaves.get(i) for i in range(len(self._leaves))])

    def _parameters(self, places: Sequence[int]) -> PyTree:
        return self._tree({i: self._leaves[i] for i in places})

    def _begin(self) -> None:
        """Begins a step: nothing has gone out."""
        self._jobs: list[Job] = []
        self._went_with: Extra = {}
        for group in self._groups:
            group.waiting = {i for i in group.places if self._leaves[i].requires_grad}

    # Before the exchange, what stands at one place of the state is of the leaves of one group, or
    # the same for all groups.

    @property
    def state(self) -> ChainState:
        """As the functional form has it, after the last step."""
        found: Extra = {}
        for group in self._groups:
            for key, value in flatten_state(group.state).items():
                found[key] = _both(found[key], value) if key in found else value
        template: ChainState = self._tx.init(self._params, self._info)
        states = _with_behind(self._tx.core, template.states, self._levels)
        whole = ChainState(template.layout, states)
        return restored(whole, flatten_state(whole) | found)

    @state.setter
    def state(self, state: ChainState) -> None:
        self._check_idle()
        self._take_up(state)

    def _check_idle(self) -> None:
        if self._jobs:
            raise RuntimeError("a backward pass has come since the last sync(): call that first")

    def _take_up(self, state: ChainState) -> None:
        saved = flatten_state(state)
        for group in self._groups:
            own = flatten_state(group.state)
            group.state = restored(group.state, {key: saved[key] for key in own})
        behind = list(_behind(self._tx.core, state.states))
        self._behind = [parts for parts, _ in behind]
        self._levels: Levels = [states for _, states in behind]

    def arrived(self, place: int) -> None:
        """Says that the backward pass has given the gradient of a leaf.

        Raises:
            RuntimeError: if it has before, in this step.
        """
        with self._lock:
            known = self._known()
            if self._paused or not self.trial.on or known is None:
                return
            group = self._group_of[place]
            if place not in group.waiting:
                raise RuntimeError(
                    "a second backward pass before sync(), with overlap=True: gradients of the "
                    "first have gone out already. Write accumulate(n) into the chain, or run all "
                    "passes but the last within `with pipe.no_sync():`"
                )
            group.waiting.discard(place)
            # The last goes out in `step`: until then a rank that fails can tell the others.
            while len(self._jobs) < len(self._groups) - 1:
                following = self._groups[len(self._jobs)]
                if following.waiting:
                    break
                if not self._jobs:
                    self._went_with = known()
                there = {i: self._leaves[i].grad for i in following.places}
                self._send(following, there, self._went_with)

    def _send(self, group: Group, gradients: Mapping[int, Any], extra: Extra) -> None:
        """Begins a group with its gradients, by position."""
        found = {i: None if x is None else x.detach() for i, x in gradients.items()}
        if self._widens:
            found = {i: None if x is None else widen(x) for i, x in found.items()}
        tree = self._tree(found)
        self._jobs.append(self._background.submit(lambda: self._through(group, tree, extra)))

    def _through(self, group: Group, gradients: PyTree, extra: Extra) -> Done:
        """In the background: one group up to the exchange."""
        start = time.perf_counter()
        params = self._parameters(group.places)
        with torch.no_grad():
            updates, state = self._front.update(
                gradients, group.state, params, pool=group.pool, **extra
            )
        return Done(flatten(updates)[0], state, time.perf_counter() - start)

    def step(self, gradients: PyTree, **extra: Any) -> Outcome:
        """Sends what has not gone out yet, waits for all, and gives one update."""
        with self._lock:
            if self._jobs and extra != self._went_with:
                error = ValueError(
                    f"sync() has {extra}, and some gradients have gone out with {self._went_with} "
                    "in the backward pass: with overlap=True what is known only afterwards cannot "
                    "count; leave weight= and scaler.unscale_() out"
                )
                self.fail(error)
                raise error
            leaves = flatten(gradients)[0]
            for group in self._groups[len(self._jobs) :]:
                self._send(group, {i: leaves[i] for i in group.places}, extra)
        return self._finished(extra)

    def fail(self, error: Exception) -> None:
        """Tells the other ranks that this one will not come to the next exchange, and why."""
        if len(self._jobs) < len(self._groups):
            state = self._groups[len(self._jobs)].state
            self._jobs.append(self._background.submit(lambda: fail(self._front, state, error)))
        self._give_up()

    def _give_up(self) -> None:
        """Ends a step that has failed: nothing has moved, and gradients are gone.

        Sums may have taken the place of those of some groups.
        """
        for job in self._jobs:
            with suppress(Exception):
                job.result()
        for leaf in self._leaves:
            if leaf is not None:
                leaf.grad = None
        self._background.close()
        self._background = Background()
        self._begin()

    def _finished(self, extra: Extra) -> Outcome:
        start = time.perf_counter()
        try:
            done: list[Done] = [job.result() for job in self._jobs]
            waited = time.perf_counter() - start
            outcome = self._taken(done, extra)
        except BaseException:
            self._give_up()
            raise
        self._begin()
        seconds = sum(each.seconds for each in done)
        self.trial.note(time.perf_counter())
        before, self._sent = self._sent, self._ranks.sent
        hidden = max(0.0, seconds - waited)
        return replace(outcome, sent=self._sent - before, seconds=seconds, hidden=hidden)

    def _taken(self, done: Sequence[Done], extra: Extra) -> Outcome:
        """The step, once all groups have come through: on all of them, or on none."""
        olds = [group.state for group in self._groups]
        news = [each.state for each in done]
        pairs = list(zip(olds, news, strict=True))
        skipped = any(int(new.total_notfinite) > int(old.total_notfinite) for old, new in pairs)
        ready = all(bool(state.ready) for state in news)
        updates = [None] * len(self._leaves)
        for group, each in zip(self._groups, done, strict=True):
            for i in group.places:
                updates[i] = each.updates[i]
        levels = self._levels
        if ready and not skipped and any(levels):
            updates, levels, skipped = self._run_behind(updates, extra)
        if skipped:
            ready = False
            updates = [x if x is None else torch.zeros_like(x) for x in updates]
        if skipped and self._gated:
            news = [
                new._replace(states=undone(self._front.core, old.states, new.states))
                for old, new in pairs
            ]
        self._levels = levels
        for group, state in zip(self._groups, news, strict=True):
            group.state = state
            group.pool.reclaim(partial(arrays_in, state))
        window = window_state(news[0].states)
        closed = window is None or bool(window.closed) or skipped
        tree = unflatten(self._treespec, updates)
        return Outcome(tree if closed else None, ready, skipped)

    def _run_behind(self, updates: Sequence[Any], extra: Extra) -> tuple[list[Any], Levels, bool]:
        """What stands behind the exchange, on all leaves; its states, and whether that was bad."""
        zeros = [
            torch.zeros_like(widen(like)) if x is None and like is not None else x
            for x, like in zip(updates, self._leaves, strict=True)
        ]
        context = self._tx.context(ChainState(self._layout, ()))
        context = replace(context, rank=self._ranks.rank, size=self._ranks.size)
        given: Extra = {**extra, "context": context, "finite": torch.tensor(True)}
        tree, levels, bad = unflatten(self._treespec, zeros), [], False
        with torch.no_grad():
            for parts, states in zip(self._behind, self._levels, strict=True):
                before = [s.total_notfinite for s in states if hasattr(s, "total_notfinite")]
                tree, new = run(parts, tree, states, self._params, given)
                after = [s.total_notfinite for s in new if hasattr(s, "total_notfinite")]
                bad |= any(int(x) > int(y) for x, y in zip(after, before, strict=True))
                levels.append(tuple(new))
            out = flatten(tree)[0]
            if self._gated and not bad and not bool(judge(tree, context)):
                return out, self._levels, True
        kept = [None if x is None else y for x, y in zip(updates, out, strict=True)]
        return kept, levels, bad

    def flush(self, **extra: Any) -> Outcome:
        """One step of what is held back."""
        self._check_idle()
        for group in self._groups:
            self._jobs.append(self._background.submit(partial(self._flushed, group, extra)))
        return self._finished(extra)

    def _flushed(self, group: Group, extra: Extra) -> Done:
        start = time.perf_counter()
        with torch.no_grad():
            params = self._parameters(group.places)
            updates, state = self._front.flush(group.state, params, **extra)
        return Done(flatten(updates)[0], state, time.perf_counter() - start)

    @property
    def _gated(self) -> bool:
        """Whether a gate stands around the exchange, and not only around what is behind it."""
        return len(self._levels) > 1

    @property
    def pending(self) -> bool:
        """Whether there is more to flush."""
        return any(bool(group.state.pending) for group in self._groups)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing goes out of backward passes within."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def close(self) -> None:
        """Ends the thread, and takes the hooks off the parameters."""
        self._unhook()
        self._background.close()


class Trial:
    """Finds whether it pays to send during the backward pass: some steps with, some without.

    Args:
        verdict: what is known already.

    Attributes:
        on: whether to, now.
        verdict: what came of it, in words; empty as long as nothing has.
    """

    _SKIPPED, _TRIED = 2, 5

    def __init__(self, verdict: str = "") -> None:
        self.on, self.verdict = True, verdict
        self._seconds: dict[bool, list[float]] = {True: [], False: []}
        self._last: float | None = None

    def note(self, now: float) -> None:
        """Says that a step has ended, at a time in seconds."""
        last, self._last = self._last, now
        if last is None or self.verdict:
            return
        seconds = self._seconds[self.on]
        seconds.append(now - last)
        if len(seconds) < self._SKIPPED + self._TRIED:
            return
        if self.on:
            self.on = False
            return
        with_, without = (
            statistics.median(self._seconds[way][self._SKIPPED :]) for way in (True, False)
        )
        self.on = with_ <= without
        self.verdict = (
            f"a step took {1e3 * with_:.3g} ms with it and {1e3 * without:.3g} ms without"
        )


def _both(one: Any, other: Any) -> Any:
    """What several groups say of a window: what some have seen, and what none has left out."""
    if not isinstance(one, torch.Tensor) or not one.ndim:
        return one
    return one | other if one.dtype == torch.bool else torch.minimum(one, other)


def partition(leaves: Sequence[Any], order: Sequence[int]) -> list[list[int]]:
    """The positions of leaves that go together, the last leaves first: their gradients are too.

    Args:
        leaves: tensors, or None.
        order: their positions, in the order in which the forward pass uses them, about.
    """
    sizes = {i: 4 * leaves[i].numel() for i in order if leaves[i] is not None}
    least = max(_LEAST, sum(sizes.values()) // _GROUPS)
    groups: list[list[int]] = [[]]
    filled = 0
    for i in reversed(sizes):
        if filled >= least:
            groups.append([])
            filled = 0
        groups[-1].append(i)
        filled += sizes[i]
    return groups


def reason_against(tx: Chain) -> str:
    """Why a chain cannot be run on some leaves at a time; empty if it can."""
    kinds = [stage.kind for stage in tx.stages]
    if Kind.EXCHANGE not in kinds:
        return "the chain exchanges nothing"
    if tx.delay:
        return "the exchange is delayed, and hidden by that"
    last = len(kinds) - 1 - kinds[::-1].index(Kind.EXCHANGE)
    for stage in tx.stages[:last]:
        if stage.whole:
            return f"{stage} looks at all leaves together"
        if stage.hyperparameters.get("on_bad") == "leave_out":
            return f"{stage} leaves a micro-step out once all of it is known"
    if tx.stages[last].leaves_out:
        return f"{tx.stages[last]} chooses among the sums of all leaves"
    if any(_exchanges(part) and not isinstance(part, Exchange) for part in tx.transformations):
        return "the chain is written as combinators: write its stages one after the other"
    return ""


def _exchanges(part: Transformation) -> bool:
    return part.stage.kind is Kind.EXCHANGE


def _behind(
    parts: Sequence[Transformation], states: Sequence[Any]
) -> Iterator[tuple[Sequence[Transformation], tuple[Any, ...]]]:
    """What stands to the right of the exchange, and its states, the innermost combinator first."""
    for i, (part, state) in enumerate(zip(parts, states, strict=True)):
        if _exchanges(part):
            if not isinstance(part, Exchange):
                yield from _behind(part.parts, state.inner_states)
            yield parts[i + 1 :], tuple(states[i + 1 :])
            return


def _with_behind(
    parts: Sequence[Transformation], states: Sequence[Any], levels: Levels
) -> tuple[Any, ...]:
    """The states with others behind the exchange."""
    for i, (part, state) in enumerate(zip(parts, states, strict=True)):
        if _exchanges(part):
            *inside, here = levels
            if inside:
                inner = _with_behind(part.parts, state.inner_states, inside)
                state = state._replace(inner_states=inner)
            return (*states[:i], state, *here)
    return tuple(states)


def undone(
    parts: Sequence[Transformation], old: Sequence[Any], new: Sequence[Any]
) -> tuple[Any, ...]:
    """The states after a step that turned out to be bad elsewhere, as if it had been bad here."""
    out: list[Any] = []
    for part, before, after in zip(parts, old, new, strict=True):
        if isinstance(part, Exchange):
            out.append(after._replace(finite=torch.tensor(False)))
        elif not isinstance(part, Gate):
            out.append(part.conclude(before, torch.tensor(False)))
        else:
            inner = undone(part.parts, before.inner_states, after.inner_states)
            state = after._replace(inner_states=inner)
            fields = state._fields
            if "total_notfinite" in fields:
                total = before.total_notfinite + 1
                state = state._replace(last_finite=torch.tensor(False), total_notfinite=total)
            if "clean" in fields:
                state = state._replace(ready=torch.tensor(False), clean=torch.tensor(False))
            out.append(state)
    return tuple(out)


def restored(state: ChainState, saved: Mapping[str, Any]) -> ChainState:
    """A state like another one, with other values."""
    found: ChainState = restore_state(state, saved)
    return found


def _hooked(engine: Grouped, leaves: Sequence[Any]) -> list[Any]:
    """Hooks that tell an engine, as long as it is there, of gradients that arrive."""
    reference = weakref.ref(engine)

    def tell(place: int) -> None:
        there = reference()
        if there is not None:
            there.arrived(place)

    return [
        leaf.register_post_accumulate_grad_hook(lambda _, i=i: tell(i))
        for i, leaf in enumerate(leaves)
        if leaf is not None and leaf.requires_grad
    ]


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()
