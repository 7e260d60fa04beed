"""Ranks whose messages somebody else has chosen."""

import torch

from gradtx.exchange.group import Group


class SilentError(RuntimeError):
    """What a backend raises of a rank that sends nothing in time."""


class Replay(Group):
    """A rank among others, which send what stands in some bytes, one message after the other.

    All sizes are right, as a backend sees to that. Once the bytes are used up, the others are
    silent.

    Args:
        rank: this rank's number.
        size: how many ranks there are.
        data: the bytes; or another such group, to go on with what it has left.
        members: what the ranks are called; by default by their numbers.
    """

    def __init__(self, rank, size, data, members=None):
        super().__init__()
        self.rank, self.size = rank, size
        self._left = data._left if isinstance(data, Replay) else [data]
        self._members = tuple(range(size)) if members is None else members

    @property
    def members(self):
        return self._members

    def part(self, ranks):
        members = tuple(self._members[rank] for rank in ranks)
        return Replay(list(ranks).index(self.rank), len(ranks), self, members)

    def sibling(self):
        return self.part(range(self.size))

    def _said(self, like, length=None):
        """As many bytes as this rank's own message has, or so many, in its dtype."""
        length = like.numel() * like.element_size() if length is None else length
        said, self._left[0] = self._left[0][:length], self._left[0][length:]
        if len(said) < length:
            raise SilentError(f"timed out: {len(said)} of {length} bytes have come")
        return torch.tensor(list(said), dtype=torch.uint8).view(like.dtype)

    def _all_gather(self, message):
        return [message if i == self.rank else self._said(message) for i in range(self.size)]

    def _all_to_all(self, parts, lengths):
        own = parts[self.rank]
        rows = enumerate(lengths)
        return [own if i == self.rank else self._said(own, n) for i, n in rows]

    def _gather(self, message):
        return [] if self.rank else self._all_gather(message)

    def _all_reduce(self, buffer):
        return self._said(buffer)

    def _broadcast(self, buffer):
        return self._said(buffer) if self.rank else buffer


class Recorder(Group):
    """Another group, and what others have sent this rank over it.

    Args:
        inner: the group that does the work.
        heard: where to put the bytes; or another recorder, to add to what that has heard.
    """

    def __init__(self, inner, heard=None):
        super().__init__()
        self.rank, self.size, self._inner = inner.rank, inner.size, inner
        self.heard = bytearray() if heard is None else heard

    @property
    def members(self):
        return self._inner.members

    def part(self, ranks):
        return Recorder(self._inner.part(ranks), self.heard)

    def _note(self, parts):
        for rank, part in enumerate(parts):
            if rank != self.rank:
                self.heard += part.contiguous().view(torch.uint8).numpy().tobytes()
        return parts

    def _all_gather(self, message):
        return self._note(self._inner._all_gather(message))

    def _all_to_all(self, parts, lengths):
        return self._note(self._inner._all_to_all(parts, lengths))

    def _gather(self, message):
        return self._note(self._inner._gather(message))

    def _all_reduce(self, buffer):
        total = self._inner._all_reduce(buffer)
        self.heard += total.view(torch.uint8).numpy().tobytes()
        return total

    def _broadcast(self, buffer):
        found = self._inner._broadcast(buffer)
        if self.rank:
            self.heard += found.view(torch.uint8).numpy().tobytes()
        return found
