"""Bytes through a `torch.distributed` store, and who is still there.

Every key is written by one side and deleted by the other, so nothing piles up. No call waits inside
the store, where one thread would hold up the others: who waits, looks again after `POLL` seconds.
"""

from __future__ import annotations

import math
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from gradtx.wire import WireFormatError

POLL = 1e-3  # seconds
BELL = "bell"
JOINED = "joined"
STOP = "stop"
SERVER = "server"
# A refusal has a text: of twenty differences, or of an error.
LONGEST_TEXT = 1 << 20  # bytes

_HEAD = struct.Struct("<4sQ")
_MAGIC = b"GRTB"
# A TCPStore closes the connection on more than 8 MiB in one value.
_PIECE = 1 << 22
_BEATS = 10


def gone_key(worker: int) -> str:
    """Where a worker finds why the server no longer counts it in."""
    return f"gone/{worker}"


def beat_interval(timeout: float) -> float:
    """Seconds between two signs of life."""
    return min(timeout / _BEATS, 1.0)


def check_store(argument: str, store: Any) -> None:
    """Refuses what is no store.

    Raises:
        TypeError: if it is none.
    """
    if not isinstance(store, dist.Store):  # type: ignore[attr-defined]
        raise TypeError(
            f"{argument}={store!r}): expected a torch.distributed store, such as a TCPStore"
        )


def check_timeout(argument: str, timeout: Any) -> float:
    """Refuses what is no time-out.

    Returns:
        The seconds as a float.

    Raises:
        TypeError: if it is no number.
        ValueError: if it is not over 0, or infinite.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"{argument}={timeout!r}): expected seconds over 0, such as 30.0")
    if not 0 < timeout <= sys.float_info.max:
        raise ValueError(f"{argument}={timeout!r}): expected seconds over 0, such as 30.0")
    return float(timeout)


class Mailbox:
    """Bytes of any size under keys of a store.

    Args:
        store: of `torch.distributed`; not shared with other threads.
        tick: called now and then while much is carried.
    """

    def __init__(self, store: Any, tick: Callable[[], None]) -> None:
        self.store: Any = dist.PrefixStore("gradtx/stale", store)  # type: ignore[attr-defined]
        self._tick = tick

    def post(self, key: str, data: bytes) -> None:
        """Leaves bytes under a key."""
        for i, start in enumerate(range(0, len(data), _PIECE)):
            self.store.set(f"{key}/{i}", data[start : start + _PIECE])
            self._tick()
        self.store.set(key, _HEAD.pack(_MAGIC, len(data)))

    def take(self, key: str, most: int) -> bytes | None:
        """Takes the bytes under a key away; None if there are none yet.

        Args:
            key: where they are.
            most: how many bytes there may be.

        Raises:
            WireFormatError: if there are more, or some are missing.
        """
        if not self.store.check([key]):
            return None
        head = self.store.get(key)
        self.store.delete_key(key)
        if len(head) != _HEAD.size or head[:4] != _MAGIC:
            raise WireFormatError(f"a letter begins with {head[:16]!r}, expected {_MAGIC!r}")
        _, nbytes = _HEAD.unpack(head)
        if nbytes > most:
            raise WireFormatError(f"a letter has {nbytes} bytes, expected at most {most}")
        pieces = []
        for i in range(-(-nbytes // _PIECE)):
            pieces.append(self._piece(f"{key}/{i}"))
            self._tick()
        data = b"".join(pieces)
        if len(data) != nbytes:
            raise WireFormatError(f"a letter has {len(data)} bytes, expected {nbytes}")
        return data

    def _piece(self, key: str) -> bytes:
        if not self.store.check([key]):
            raise WireFormatError(f"a letter lacks its piece {key!r}")
        data: bytes = self.store.get(key)
        self.store.delete_key(key)
        return data

    def beat(self, who: str) -> None:
        """Gives a sign of life."""
        self.store.add(f"beat/{who}", 1)

    def beats(self, who: str) -> int:
        """How many signs of life a side has given."""
        return int(self.store.add(f"beat/{who}", 0))

    def note(self, key: str) -> str | None:
        """The text under a key that stays there; None if there is none."""
        if not self.store.check([key]):
            return None
        text: bytes = self.store.get(key)
        return text.decode(errors="replace")


class Silence:
    """How long there has been no sign of life, as far as this side has been awake to notice.

    A process that was suspended, or kept from running, does not take that time for the silence of
    others: between two looks, two intervals count at most.

    Args:
        timeout: seconds after which a silent side counts as dead. Its last sign may be seen one
            interval late, and the silence as well, so that both are taken off.
    """

    def __init__(self, timeout: float) -> None:
        self._interval = beat_interval(timeout)
        self._limit = timeout - 2 * self._interval
        self.end()

    def end(self) -> None:
        """Says that there has been a sign of life."""
        self._last, self._seconds = time.monotonic(), 0.0

    def is_death(self) -> bool:
        """Looks how long it has lasted; says whether that is too long."""
        now = time.monotonic()
        self._seconds += min(now - self._last, 2 * self._interval)
        self._last = now
        return self._seconds > self._limit


class Clockwork:
    """Says when it is time for a sign of life.

    Args:
        timeout: seconds after which a silent side counts as dead.
    """

    def __init__(self, timeout: float) -> None:
        self._interval = beat_interval(timeout)
        self._last = -math.inf

    def due(self) -> bool:
        """Whether it is time; then it will be again one interval later."""
        now = time.monotonic()
        if now - self._last < self._interval:
            return False
        self._last = now
        return True
