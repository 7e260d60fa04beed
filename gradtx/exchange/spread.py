"""Messages between nodes, each sent by all ranks of a node together, a piece by each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from gradtx.exchange.group import Group

Result = TypeVar("Result")

# Below, what a second collective takes is more than the bytes that it saves.
_WORTH_IT = 1 << 14  # bytes


class Spread(Group):
    """A group of nodes, seen from a rank of one of them.

    All ranks of a node have the same to send, which they have made sure of. So each sends a piece
    of it to its like in other nodes, and they gather inside what has come: a node's link carries
    one copy, not one a rank. What is small goes out whole, from each.

    Args:
        outer: the ranks of this one's number in all nodes.
        inner: the ranks of this node.
    """

    def __init__(self, outer: Group, inner: Group) -> None:
        super().__init__()
        self.rank, self.size = outer.rank, outer.size
        self._outer, self._inner = outer, inner

    @property
    def plain(self) -> Group:
        """Where ranks of one node may say different things."""
        return self._outer

    @property
    def place(self) -> str:
        """The number that all ranks have in their nodes: what they send is one piece of all."""
        return f", number {self._inner.rank} in its node"

    @property
    def members(self) -> tuple[int, ...]:
        """What its ranks are called where all groups are told apart."""
        return self._outer.members

    def sibling(self) -> Group:
        """The same over other groups of the same ranks."""
        return Spread(self._outer.sibling(), self._inner.sibling())

    def give_up(self, reason: str) -> None:
        """Says that this rank will not talk to the others again, inside its node neither."""
        self._outer.give_up(reason)
        self._inner.give_up(reason)

    @property
    def _whole(self) -> bool:
        return self._inner.size == 1

    def all_gather(self, message: torch.Tensor) -> list[torch.Tensor]:
        """The messages of all nodes, in rank order."""
        if self._whole or message.numel() < _WORTH_IT:
            return self._counted(self._outer.all_gather, message)
        received = self._counted(self._outer.all_gather, self._piece(message))
        return self._joined(received, [message.numel()] * self.size)

    def all_to_all(
        self, parts: Sequence[torch.Tensor], lengths: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """What all nodes have for this one, in rank order."""
        lengths = lengths or [parts[self.rank].numel()] * self.size
        if self._whole:
            return self._counted(self._outer.all_to_all, parts, lengths)
        own = [self._piece(part) for part in parts]
        received = self._counted(self._outer.all_to_all, own, list(map(self._length, lengths)))
        return self._joined(received, lengths)

    def all_reduce(self, buffer: torch.Tensor) -> torch.Tensor:
        """The sum over nodes, the same bits on all ranks of all nodes."""
        if self._whole or buffer.numel() * buffer.element_size() < _WORTH_IT:
            return self._counted(self._outer.all_reduce, buffer)
        total = self._counted(self._outer.all_reduce, self._piece(buffer).clone())
        pieces = self._inner.all_gather(total.view(torch.uint8))
        return torch.cat(pieces).view(buffer.dtype)[: buffer.numel()]

    def gather(self, message: torch.Tensor) -> list[torch.Tensor]:
        """At rank 0 of the nodes, the messages of all, in rank order."""
        return self._counted(self._outer.gather, message)

    def broadcast(self, buffer: torch.Tensor) -> torch.Tensor:
        """The buffer of node 0."""
        return self._counted(self._outer.broadcast, buffer)

    def _counted(self, call: Callable[..., Result], *arguments: Any) -> Result:
        before = self._outer.sent
        found = call(*arguments)
        self.sent += self._outer.sent - before
        return found

    def _length(self, numel: int) -> int:
        """Of a piece of so many elements."""
        return math.ceil(numel / self._inner.size)

    def _piece(self, message: torch.Tensor) -> torch.Tensor:
        """What this rank sends of a message, zeros at the end if it is no multiple."""
        length = self._length(message.numel())
        start = length * self._inner.rank
        own = message[start : start + length]
        return own if own.numel() == length else torch.cat([own, own.new_zeros(length - len(own))])

    def _joined(
        self, received: Sequence[torch.Tensor], lengths: Sequence[int]
    ) -> list[torch.Tensor]:
        """The whole messages, of which this rank has received a piece each."""
        sizes = [len(piece) for piece in received]
        gathered = self._inner.all_gather(torch.cat(list(received)))
        pieces = [one.split(sizes) for one in gathered]
        joined = map(torch.cat, zip(*pieces, strict=True))
        return [message[:length] for message, length in zip(joined, lengths, strict=True)]
