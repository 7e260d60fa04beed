"""Buffers that are used again, for whoever owns the state that they end up in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

_LEAST = 1 << 16  # values; below that a new array costs little


class Pool:
    """Gives out buffers, and takes back those that are held no more.

    A new array of many megabytes costs more than what is written to it: the operating system hands
    out its pages one by one, filled with zeros. Accelerators have pools of their own, which others
    draw from too: there it gives out new arrays.
    """

    def __init__(self) -> None:
        self._given: list[torch.Tensor] = []
        self._free: dict[Any, list[torch.Tensor]] = {}

    def sum(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """``x + y``, of one shape and dtype, in a buffer of its own, in C order."""
        if x.numel() < _LEAST or x.device.type != "cpu":
            return (x + y).contiguous()
        free = self._free.get(_kind(x))
        out = free.pop() if free else x.new_empty(x.shape)
        self._given.append(out)
        return torch.add(x, y, out=out)

    def reclaim(self, held: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Takes back all that it has given out but what is held.

        Args:
            held: gives all tensors that are to keep their values.
        """
        if not self._given:
            return
        places = {tensor.untyped_storage().data_ptr() for tensor in held()}
        given, self._given = self._given, []
        for buffer in given:
            if buffer.untyped_storage().data_ptr() in places:
                self._given.append(buffer)
            else:
                self._free.setdefault(_kind(buffer), []).append(buffer)


def _kind(x: torch.Tensor) -> Any:
    return x.shape, x.dtype, x.device
