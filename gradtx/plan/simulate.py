"""Bytes and predicted times of the exchange algorithms, on up to thousands of ranks.

Nothing is sent: the bytes are counted by the functions that `allreduce` chooses and `explain` tells
by (`gradtx.exchange.cost`), the time is that of their model of a link. One leaf of `n` values of
which each rank chooses `k`: the same ones (*equal*), each any (*random*), or other ones than all
others as long as there is room (*disjoint*). What really happens lies between the first two.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradtx.bench.tables import print_table
from gradtx.core.arguments import check_ratio, check_whole, count
from gradtx.exchange import cost
from gradtx.exchange.cost import Link, Sparse, Traffic, seconds_text
from gradtx.exchange.flags import Slots
from gradtx.wire import indices_nbytes, message_nbytes

SUPPORTS = ("equal", "random", "disjoint")
_LEAVES = 1


@dataclass(frozen=True)
class Gradient:
    """What each rank has to send.

    Args:
        values: how many values it has.
        ratio: the share of them that a rank chooses.
        support: which ones: one of `SUPPORTS`.

    Raises:
        TypeError: if the numbers are of another type.
        ValueError: if there is no value, or the ratio is not over 0 and at most 1, or there is no
            such support.
    """

    values: int
    ratio: float
    support: str = "random"

    def __post_init__(self) -> None:
        check_whole("Gradient(values", self.values, 1)
        check_ratio("Gradient(ratio", self.ratio)
        if self.support not in SUPPORTS:
            allowed = ", ".join(map(repr, SUPPORTS))
            raise ValueError(f"Gradient(support={self.support!r}): expected one of {allowed}")

    @property
    def sparse(self) -> Sparse:
        """Values at positions."""
        return Sparse(self.values, count(self.ratio, self.values))

    @property
    def message(self) -> int:
        """A gathered message, in bytes."""
        k = self.sparse.count
        return message_nbytes(_LEAVES, [4 * k, indices_nbytes(k, self.values)])


def _gather(gradient: Gradient, size: int) -> Traffic:
    return cost.gathered(gradient.message, size)


def _sharded(gradient: Gradient, size: int) -> Traffic:
    return cost.sharded([gradient.sparse], size, _LEAVES, support=gradient.support)


def _with_density(gradient: Gradient, size: int) -> Traffic:
    return cost.sharded([gradient.sparse], size, _LEAVES, density=gradient.ratio)


def _root(gradient: Gradient, size: int) -> Traffic:
    union = gradient.sparse.union(size, gradient.support)
    flags = 8 * (Slots(_LEAVES, size, "float64").length + 3)
    return cost.through_root(gradient.message, [(union, gradient.values, 4)], size, flags)


def _ring(gradient: Gradient, size: int) -> Traffic:
    flags = Slots(_LEAVES, size, "float32").length
    return cost.all_reduce(4 * (gradient.values + flags), size)


def _two_shot(gradient: Gradient, size: int) -> Traffic:
    part = message_nbytes(_LEAVES, [2, 2 * -(-gradient.values // size)])
    return cost.all_to_all(part, size) + cost.all_gather(part, size)


ALGORITHMS: dict[str, Callable[[Gradient, int], Traffic]] = {
    "gather": _gather,
    "sharded": _sharded,
    "sharded, density": _with_density,
    "root": _root,
    "dense FP32": _ring,
    "dense 16 bits": _two_shot,
}
"""What each algorithm puts on the links, by its name; the last two send all values. With a density
owners send on as large a share of the sums as a rank has chosen."""


def simulate(gradient: Gradient, sizes: Sequence[int]) -> dict[str, list[Traffic]]:
    """What a step puts on the links.

    Args:
        gradient: of each rank.
        sizes: numbers of ranks, of 1 or more each.

    Returns:
        For each of `ALGORITHMS`, the traffic on so many ranks.

    Raises:
        TypeError: if a number of ranks is no int.
        ValueError: if it is less than 1.

    Example:
        >>> found = simulate(Gradient(1_000_000, 0.01, "random"), [8, 1024])
        >>> for name, row in found.items():
        ...     print(f"{name:17}", *(f"{x.sent / 1e6:8.2f} MB" for x in row))
        gather                0.36 MB    51.91 MB
        sharded               0.36 MB     4.12 MB
        sharded, density      0.09 MB     0.18 MB
        root                  2.54 MB  4092.07 MB
        dense FP32            7.00 MB     7.99 MB
        dense 16 bits         3.50 MB     4.09 MB
    """
    for size in sizes:
        check_whole("simulate(sizes", size, 1)
    return {name: [fn(gradient, size) for size in sizes] for name, fn in ALGORITHMS.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options.

    Args:
        parser: of the subcommand.
    """
    powers = [2**i for i in range(1, 11)]
    add = parser.add_argument
    add("--values", type=int, default=25_000_000, metavar="N", help="of a gradient (25,000,000)")
    add("--ratio", type=float, default=0.01, help="the share that a rank chooses (0.01)")
    add("--support", choices=SUPPORTS, default="random", help="which values ranks choose (random)")
    add("--ranks", type=int, nargs="+", default=powers, metavar="N", help="(2, 4, 8, ... 1024)")
    add("--gbits", type=float, nargs="+", default=[1.0, 10.0, 100.0], help="per s (1 10 100)")
    add("--latency", type=float, default=Link().latency, metavar="S", help="in seconds (50e-6)")


def main(options: argparse.Namespace) -> int:
    """Prints the tables.

    Args:
        options: what `add_arguments` declares.

    Returns:
        The exit status: 0; 2 for unusable arguments.
    """
    try:
        gradient = Gradient(options.values, options.ratio, options.support)
        links = [Link(options.latency, 1e9 * gbits / 8) for gbits in options.gbits]
        found = simulate(gradient, options.ranks)
    except (TypeError, ValueError) as error:
        print(f"gradtx plan: {error}", file=sys.stderr)
        return 2
    k = gradient.sparse.count
    print(f"{gradient.values:,} values, of which each rank chooses {k:,}: {gradient.support}")
    sent = {name: [f"{x.sent / 1e6:,.2f}" for x in row] for name, row in found.items()}
    _print("MB sent by a rank", options.ranks, sent)
    for link in links:
        times = {name: [seconds_text(x.seconds(link)) for x in row] for name, row in found.items()}
        _print(f"time at {link.text()}", options.ranks, times)
    return 0


def _print(title: str, sizes: Sequence[int], rows: dict[str, list[str]]) -> None:
    print()
    headings = [title, *(f"{size:,}" for size in sizes)]
    print_table(headings, [[name, *cells] for name, cells in rows.items()])
