"""What an exchange costs: bytes on the link, and the time they take.

The time of a collective on `N` ranks is what its longest chain of messages waits, one latency each,
and what the busiest rank puts on its link or takes from it, whichever is more, at the bandwidth:

=============  ==========  ====================
of `b` bytes   latencies   busiest rank, bytes
=============  ==========  ====================
all-reduce     2 (N - 1)   2 (N - 1) / N b
all-gather     N - 1       (N - 1) b
all-to-all     1           b, to all others
gather         1           (N - 1) b, received
broadcast      1           (N - 1) b, sent
=============  ==========  ====================

The first two are counted as rings (over gloo a large all-gather goes to all others at once, which
waits less); the last two count all copies at the root. Python and arithmetic take time too; that is
not in it.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradtx.exchange.lanes import part_nbytes, whole_nbytes
from gradtx.wire import message_nbytes


@dataclass(frozen=True, repr=False)
class Link:
    """What is known of the link between ranks.

    Args:
        latency: seconds that a message takes, however small; 50 microseconds by default.
        bandwidth: bytes a second, each way; 1 Gbit/s by default.

    Raises:
        TypeError: if one is no number.
        ValueError: if one is not finite, the latency negative, or the bandwidth not over 0.

    Example:
        >>> import gradtx as gx
        >>> gx.Link(bandwidth=10e9 / 8)
        gx.Link(latency=5e-05, bandwidth=1250000000.0)
    """

    latency: float = 50e-6
    bandwidth: float = 1e9 / 8

    def __post_init__(self) -> None:
        for name in ("latency", "bandwidth"):
            value: Any = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"Link({name}={value!r}): expected a number")
            # A comparison, as whole numbers may be too large for a float.
            if not 0 <= value <= sys.float_info.max or (name == "bandwidth" and value == 0):
                least = "over 0" if name == "bandwidth" else "of at least 0"
                raise ValueError(f"Link({name}={value!r}): expected a finite number {least}")
            object.__setattr__(self, name, float(value))

    def __repr__(self) -> str:
        return f"gx.Link(latency={self.latency!r}, bandwidth={self.bandwidth!r})"

    def text(self) -> str:
        """In microseconds and Gbit/s."""
        return f"{1e6 * self.latency:.4g} us and {8e-9 * self.bandwidth:.4g} Gbit/s"

    @classmethod
    def load(cls, path: str | Path) -> Link:
        """The link that ``python -m gradtx bench link`` has measured.

        Args:
            path: of a JSON file, an object with the numbers ``"latency"`` and ``"bandwidth"``.

        Raises:
            ValueError: if it is no such file.
        """
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls(found["latency"], found["bandwidth"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(
                f"{path} is no measured link, an object with 'latency' in seconds and 'bandwidth' "
                f"in bytes a second: {error}"
            ) from error


@dataclass(frozen=True)
class Traffic:
    """What an exchange puts on the links.

    Attributes:
        sent: bytes that the rank which sends most puts on its link.
        busiest: bytes that the busiest link carries one way, in each collective.
        steps: how many messages wait for one another.
    """

    sent: float = 0
    busiest: float = 0
    steps: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.sent + other.sent, self.busiest + other.busiest, self.steps + other.steps
        )

    def seconds(self, link: Link) -> float:
        """The time it takes."""
        return self.steps * link.latency + self.busiest / link.bandwidth


NOTHING = Traffic()


def seconds_text(seconds: float) -> str:
    """A time in the unit that suits it.

    Example:
        >>> seconds_text(0.00025), seconds_text(0.125), seconds_text(30)
        ('250 us', '125 ms', '30 s')
    """
    for unit, name in ((1e-6, "us"), (1e-3, "ms")):
        if seconds < 999.5 * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.4g} s"


def all_reduce(nbytes: float, size: int) -> Traffic:
    """Of so many bytes, in a ring."""
    sent = 2 * (size - 1) * nbytes / size
    return Traffic(sent, sent, 2 * (size - 1))


def all_gather(nbytes: float, size: int) -> Traffic:
    """Of so many bytes of each rank, in a ring."""
    return Traffic((size - 1) * nbytes, (size - 1) * nbytes, size - 1)


def all_to_all(nbytes: float, size: int) -> Traffic:
    """Of so many bytes from each rank to each."""
    return Traffic((size - 1) * nbytes, (size - 1) * nbytes, int(size > 1))


def gather(nbytes: float, size: int) -> Traffic:
    """Of so many bytes of each rank, by the root; what it sends is counted in `broadcast`."""
    return Traffic(0, (size - 1) * nbytes, int(size > 1))


def broadcast(nbytes: float, size: int) -> Traffic:
    """Of so many bytes, by the root, a copy to each."""
    return Traffic((size - 1) * nbytes, (size - 1) * nbytes, int(size > 1))


@dataclass(frozen=True)
class Sparse:
    """Values at positions, as far as bytes go.

    Attributes:
        length: how many positions there are.
        count: how many of them a rank sends.
        itemsize: of a value as it is sent, in bytes.
        total: of a sum, in bytes.
        exponents: what the exponents of all leaves take, in bytes.
    """

    length: int
    count: int
    itemsize: int = 4
    total: int = 4
    exponents: int = 0

    def union(self, size: int, support: str = "disjoint") -> int:
        """How many positions some rank has chosen.

        Args:
            size: how many ranks there are.
            support: ``"equal"`` on all ranks; ``"random"``, the mean of it; or ``"disjoint"``, as
                far as there is room: the most it can be.
        """
        if support == "equal":
            return self.count
        if support == "disjoint":
            return min(size * self.count, self.length)
        rest = 1 - self.count / max(self.length, 1)
        return math.ceil(self.length * (1 - rest**size))


def gathered(nbytes: int, size: int, told: int = 0) -> Traffic:
    """Messages to all ranks; and before them how much is to come, where that varies."""
    ahead = all_gather(told, size) if told else NOTHING
    return ahead + all_gather(nbytes, size)


def sharded(
    lanes: Sequence[Sparse],
    size: int,
    leaves: int,
    *,
    support: str = "disjoint",
    density: float | None = None,
) -> Traffic:
    """Values at positions to their owners, and the sums to all; see `gradtx.exchange.sharded`."""
    ahead = message_nbytes(leaves, [8 * len(lanes), sum(lane.exponents for lane in lanes)])
    values, sums = 0, 8 * (density is not None)
    for lane in lanes:
        slots = -(-lane.length // size)
        values += part_nbytes(-(-lane.count // size), slots, lane.itemsize)
        union = lane.union(size, support)
        if density is None:
            count = -(-union // size)
        else:
            count = min(max(1, round(density * lane.length / size)), slots)
        sums += min(part_nbytes(count, slots, lane.total), whole_nbytes(slots, lane.total))
    counts = NOTHING if density is not None else all_gather(8 * len(lanes), size)
    return all_to_all(ahead, size) + all_to_all(values, size) + counts + all_gather(sums, size)


def through_root(
    nbytes: int,
    unions: Sequence[tuple[int, int, int]],
    size: int,
    flags: int,
    told: int = 0,
) -> Traffic:
    """Messages to the root, and the sums to all; see `gradtx.exchange.root`.

    Args:
        nbytes: of a message.
        unions: for each dtype of sums, how many are not zero, of how many, and the bytes of one.
        size: how many ranks there are.
        flags: what the flags of all ranks take, in bytes.
        told: what is told before, where sizes vary, in bytes.
    """
    body = sum(
        min(part_nbytes(count, length, itemsize), whole_nbytes(length, itemsize))
        for count, length, itemsize in unions
    )
    ahead = all_gather(told, size) if told else NOTHING
    return ahead + gather(nbytes, size) + broadcast(flags, size) + broadcast(body, size)
