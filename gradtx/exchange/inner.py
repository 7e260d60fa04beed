"""An exchange before another one: dense inside a node, so that what is between nodes is one rank's.

Where two exchanges stand in a chain, the first takes hold of everything to its right: its ranks
bring their gradients together, and each goes on with what all of them have. From there on they do
the same, and a rank stands for its node.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from gradtx.core.chain import next_exchange
from gradtx.core.combinators import Enclosing, Gate, gate, run
from gradtx.core.payload import Payload
from gradtx.core.stage import Kind, Stage
from gradtx.core.transformation import Context, Exchange, Progress, Share, Transformation
from gradtx.core.tree import Array, Info, PyTree, arrays_in
from gradtx.exchange.grid import check_meeting
from gradtx.exchange.handshake import confirm
from gradtx.exchange.spread import Spread


class InnerState(NamedTuple):
    """The state of an exchange before another one.

    Attributes:
        exchange: its own.
        inner_states: the states of what is to its right, last that of the gate around it.
    """

    exchange: Any
    inner_states: tuple[Any, ...]

    @property
    def finite(self) -> Array:
        """What an enclosing gate asks an exchange for."""
        return self.last_finite

    @property
    def last_finite(self) -> Array:
        """0-d bool: the last step was taken, on all ranks of all nodes."""
        found: Array = self.inner_states[-1].last_finite
        return found


class Inner(Gate, Enclosing):
    """An exchange before another one, and everything to its right.

    Args:
        exchange: among the ranks inside.
        right: what is to its right, the other exchange in it.

    Raises:
        ValueError: if one of the two is over the axis of a mesh and the other is not.
    """

    _needs_chain = True

    def __init__(self, exchange: Exchange, right: Sequence[Transformation]) -> None:
        self.exchange = exchange
        self._right = tuple(self._together(part) for part in right)
        # A loss scale of its own waits for what the gate decides: it stands before that.
        unscales = [i + 1 for i, part in enumerate(right) if part.stage.kind is Kind.UNSCALE]
        start = (unscales or [0])[0]
        parts = (*self._right[:start], gate(self._right[start:]))
        self._between = next_exchange(self._right)
        if self._between is not None and self._between.one_program != exchange.one_program:
            raise ValueError(
                f"{exchange.code()} and {self._between.code()}: one is over the axis of a mesh and "
                "the other is not; write axis_name in both, or in none"
            )
        self._looked_at: tuple[Any, Any] | None = None
        super().__init__(
            Stage(exchange.name, Kind.EXCHANGE, exchange.stage.arguments, stateful=True),
            self._init,
            self._update,
            stages=(exchange.stage, *(s for part in right for s in part.stages)),
            parts=parts,
            code=lambda local: ", ".join(part.code(local=local) for part in (exchange, *parts)),
        )

    def _together(self, part: Transformation) -> Transformation:
        """An exchange to the right as the ranks of a node make it together."""
        if not isinstance(part, Exchange) or part.one_program or self.exchange.one_program:
            return part
        group = part.group
        if isinstance(group, Spread):
            return part
        return part.over(Spread(group, self.exchange.group))

    def around(self, right: Sequence[Transformation]) -> Inner:
        """The same with more to its right."""
        return Inner(self.exchange, (*self._right, *right))

    def _init(self, params: PyTree, info: Info | None) -> InnerState:
        inner_states = tuple(part.setup(params, info) for part in self.parts)
        return InnerState(self.exchange.setup(params, info), inner_states)

    def _update(
        self,
        updates: PyTree,
        state: InnerState,
        params: PyTree = None,
        *,
        context: Context,
        finite: Array | None = None,
        **extra: Any,
    ) -> tuple[PyTree, InnerState]:
        self._check()
        rank, size = self.exchange.ranks(arrays_in(updates) or arrays_in(state))
        own = replace(self._own(context), rank=rank, size=size)
        meeting = context.progress.meetings[id(self)] = Meeting(self.exchange, own)
        reduced, after = self.exchange.step(
            updates, state.exchange, params, context=own, finite=finite
        )
        meeting.met = True
        heard, told = own.progress, context.progress
        told.rows = heard.rows
        told.finite, told.absent = heard.finite, heard.absent
        share = context.share
        if share is not None:
            # What the others of the mean weigh together is told where all of them meet.
            share = replace(
                share,
                weight=heard.weight / size,
                left_out=heard.left_out,
                flushing=share.flushing and heard.through,
            )
        absent = heard.absent if any(heard.absent) else ()
        within = replace(context, absent=absent, share=share)
        # What this rank knows of its own gradients is in what they have heard.
        extra["context"] = within
        out, inner_states = run(self.parts, reduced, state.inner_states, params, extra)
        return out, InnerState(after, inner_states)

    def _check(self) -> None:
        """Looks once at how the groups lie.

        Raises:
            ValueError: if this rank does not have just itself in common with both.
        """
        if self.exchange.one_program or self._between is None:
            return
        groups = self.exchange.group, self._between.group
        if groups != self._looked_at:
            check_meeting(*groups)
            self._looked_at = groups

    def _own(self, context: Context) -> Context:
        """The context of the exchange inside, in a step that has not come to it yet."""
        code = context.code
        if self._between is not None and not self.exchange.one_program:
            code += f", node {self._between.group.rank}"  # The same for all that meet here.
        progress = Progress()
        progress.absent, progress.rows = context.absent, context.progress.rows
        share: Share | None = context.share
        if share is not None:
            share = replace(share, mean=False, partial=True)
        return replace(context, code=code, share=share, over=(), joins=False, progress=progress)

    def fail(
        self, state: Any, context: Context, error: Exception, arriving: PyTree | None = None
    ) -> None:
        """Tells the ranks inside that this one has failed, if they wait to hear from it here."""
        meeting = context.progress.meetings.get(id(self))
        if meeting is None or not meeting.context.progress.sent:
            own = self._own(context) if meeting is None else meeting.context
            exchange = getattr(state, "exchange", None)  # The state may be one of another chain.
            self.exchange.fail(exchange, own, error, arriving)


class Meeting:
    """The ranks inside, in one step.

    Before one of them talks to other nodes, all have to be ready to: `confirm` is where they say
    so, and where one that has failed since they met tells the others.

    Args:
        exchange: the one inside.
        context: of that.

    Attributes:
        met: what they have brought is together.
        confirmed: all have heard from all.
    """

    def __init__(self, exchange: Exchange, context: Context) -> None:
        self.context = context
        self.met = self.confirmed = False
        self._exchange = exchange

    def confirm(self, error: Exception | None = None, digest: int = 0) -> None:
        """Says that this rank is ready, or has failed, and hears of the others.

        Args:
            error: why it has failed.
            digest: of what it is about to send.

        Raises:
            RankMismatchError: if one has failed, or they are about to send different things.
        """
        if not self.met or self.confirmed or self._exchange.one_program:
            return
        self.confirmed = True
        confirm(self._exchange.group, error, digest)


def digest_of(payloads: Iterable[Payload]) -> int:
    """32 bits of a hash over payloads of torch tensors."""
    found = 0
    for x in arrays_in(list(payloads)):
        data = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        found = zlib.crc32(data.numpy(), found)
    return found
