"""Which rank owns which position, so that no region of the positions is one rank's."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_GOLDEN = 0x9E3779B1  # 2**32 over the golden ratio: multiples of it lie evenly, at any stride


@dataclass(frozen=True)
class Owners:
    r"""The owners of positions ``0 .. length - 1`` on some ranks, without a table.

    Of each run of `size` positions in a row every rank owns one: that with the number :math:`j`
    of the run begins with rank :math:`h(j)`, a hash. So a cluster of positions is shared out evenly
    to within one, and so are, nearly, positions at any stride. In the run with the number `j` the
    position that a rank owns is its *slot* `j`: slots are in the order of positions.

    Args:
        length: how many positions there are.
        size: how many ranks.

    Example:
        >>> owners = Owners(7, 3)
        >>> owner, slots = owners.find(torch.arange(7))
        >>> owner.tolist(), slots.tolist()
        ([0, 1, 2, 1, 2, 0, 0], [0, 0, 0, 1, 1, 1, 2])
        >>> owners.positions(0, torch.tensor([0, 1, 2])).tolist()
        [0, 5, 6]
    """

    length: int
    size: int

    @property
    def slots(self) -> int:
        """How many slots a rank has, the last of which may be that of no position."""
        return -(-self.length // self.size)

    def room(self, rank: int) -> int:
        """How many positions a rank owns."""
        last = torch.tensor([self.slots - 1])
        filled = bool(self.length) and int(self.positions(rank, last)) < self.length
        return max(self.slots - 1, 0) + filled

    def find(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The owner and the slot of each position.

        Args:
            positions: int64.
        """
        slots = positions.div(self.size, rounding_mode="floor")
        owner = (positions - slots * self.size + self._first(slots)).remainder_(self.size)
        return owner, slots

    def positions(self, rank: int, slots: torch.Tensor) -> torch.Tensor:
        """The position of each slot of a rank; of the last slot, maybe one past the end.

        Args:
            rank: who owns them.
            slots: int64.
        """
        return slots * self.size + (rank - self._first(slots)).remainder_(self.size)

    def _first(self, slots: torch.Tensor) -> torch.Tensor:
        """The rank that a run begins with: 32 bits of a hash, scaled down to the ranks."""
        return ((slots * _GOLDEN).bitwise_and_(0xFFFFFFFF) * self.size).bitwise_right_shift_(32)
