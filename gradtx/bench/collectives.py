"""``python -m gradtx bench link``: what the link between ranks gives, by its collectives.

Each collective is made of rounds in which every rank sends one message: an all-gather of `n` bytes
a rank on `N` ranks of ``N - 1`` rounds and ``(N - 1) n`` bytes, a ring all-reduce of `n` bytes of
``2 (N - 1)`` rounds and ``2 (N - 1) n / N`` bytes. What they take is fitted as rounds times a
latency plus bytes over a bandwidth, so that the ratios to what was measured are near one: all
together, and each collective alone. A shaped link lets some bytes pass at once after it has been
idle; messages of about that size are shown, and are left out of the fit.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException

import gradtx as gx
from gradtx.bench.arguments import whole_number
from gradtx.bench.peers import ring_nbytes
from gradtx.bench.ranks import BURST, Place, add_place_arguments, find_place, in_bits, results_of
from gradtx.bench.tables import print_table
from gradtx.exchange.group import find_group
from gradtx.files import file_to_write

SIZES = tuple(4**power for power in range(5, 13))  # 1 KiB to 16 MiB
LONGEST = 1.0  # seconds: a collective that takes longer is not made larger
REPEATS = 7
WARM_UP = 2
ITERATIONS = 20
HIDDEN = range(BURST // 16, 4 * BURST)  # bytes whose time a shaped link's burst hides in part
HEADINGS = ("collective", "bytes", "measured", "fitted", "bytes over time")


@dataclass(frozen=True)
class Sample:
    """How long a collective of one size takes.

    Attributes:
        collective: ``"all_gather"`` or ``"all_reduce"``.
        nbytes: that each rank brings.
        ranks: how many there are.
        seconds: on the slowest rank, median.
    """

    collective: str
    nbytes: int
    ranks: int
    seconds: float

    @property
    def rounds(self) -> int:
        """Messages that a rank sends, one after the other."""
        return (self.ranks - 1) * (2 if self.collective == "all_reduce" else 1)

    @property
    def wire_bytes(self) -> int:
        """Bytes that a rank sends."""
        if self.collective == "all_reduce":
            return ring_nbytes(self.nbytes, self.ranks)
        return (self.ranks - 1) * self.nbytes


@dataclass(frozen=True)
class Fit:
    """What a link gives.

    Attributes:
        latency: seconds that each round of messages takes besides its bytes.
        bandwidth: bytes per second that each rank sends, while it gets as many.
        error: root mean square of the logarithms of fitted over measured seconds.
    """

    latency: float
    bandwidth: float
    error: float

    def seconds(self, sample: Sample) -> float:
        """What a collective would take."""
        return sample.rounds * self.latency + sample.wire_bytes / self.bandwidth


def fit(samples: Sequence[Sample]) -> Fit:
    """Latency and bandwidth, neither of them negative.

    Least squares, weighted by measured times fitted seconds, which is again and again found anew:
    so twice as long counts as much as half as long.

    Args:
        samples: of two sizes at least.

    Example:
        >>> samples = [Sample("all_gather", n, 2, 0.001 + n / 1e6) for n in (10, 1000, 100_000)]
        >>> found = fit(samples)
        >>> round(found.latency, 6), round(found.bandwidth), found.error < 1e-9
        (0.001, 1000000, True)
    """
    seconds = np.array([sample.seconds for sample in samples])
    columns = np.array([(x.rounds, x.wire_bytes) for x in samples], dtype=float)
    fitted = seconds
    for _ in range(ITERATIONS):
        latency, per_byte = _weighted(columns, seconds, 1 / np.sqrt(seconds * fitted))
        fitted = columns @ (latency, per_byte)
    errors = np.log(fitted / seconds)
    return Fit(latency, 1 / per_byte, float(np.sqrt((errors**2).mean())))


def _weighted(columns: Any, seconds: Any, weights: Any) -> tuple[float, float]:
    """Seconds a round and seconds a byte."""
    rows, wanted = columns * weights[:, None], seconds * weights
    # The bytes are large numbers, the rounds small ones.
    scale = rows.max(axis=0)
    latency, per_byte = np.linalg.lstsq(rows / scale, wanted)[0] / scale
    if latency > 0 and per_byte > 0:
        return float(latency), float(per_byte)
    # One of them does not show beside the other.
    alone = [float(column @ wanted / (column @ column)) for column in rows.T]
    return (0.0, alone[1]) if latency <= 0 else (alone[0], float(np.finfo(float).tiny))


def probe(
    repeats: int = REPEATS, largest: int = SIZES[-1]
) -> Generator[str | list[Sample], None, None]:
    """Measures on this rank, together with all others.

    Args:
        repeats: of each collective and size, after some that do not count.
        largest: no more bytes than that.

    Yields:
        A text for each size, and all samples at the end.
    """
    samples: list[Sample] = []
    for name, maker in COLLECTIVES.items():
        taken = 0.0
        for nbytes in SIZES:
            if nbytes <= largest and taken <= LONGEST:
                taken = _seconds(maker(nbytes), repeats)
                samples.append(Sample(name, nbytes, dist.get_world_size(), taken))
            yield f"{name}, {nbytes:,} bytes"
    yield samples


def probed() -> Fit:
    """What the link is found to be; on this rank, together with all others."""
    *_, samples = probe()
    assert not isinstance(samples, str)
    return fit(samples)


def _all_gather(nbytes: int) -> Callable[[], Any]:
    # As an exchange makes it: over gloo, large messages go in pieces.
    group, own = find_group(), torch.zeros(nbytes, dtype=torch.uint8)
    return lambda: group.all_gather(own)


def _all_reduce(nbytes: int) -> Callable[[], Any]:
    buffer = torch.zeros(nbytes // 4)
    return lambda: dist.all_reduce(buffer)


COLLECTIVES = {"all_gather": _all_gather, "all_reduce": _all_reduce}


def _seconds(collective: Callable[[], Any], repeats: int) -> float:
    """The median over repeats of what the slowest rank takes; the same on all ranks."""
    seconds = []
    for _ in range(WARM_UP + repeats):
        dist.barrier()
        start = time.perf_counter()
        collective()
        taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        seconds.append(float(taken))
    return statistics.median(seconds[WARM_UP:])


def cells(sample: Sample, found: Fit) -> tuple[str, ...]:
    """A sample as text."""
    return (
        sample.collective,
        f"{sample.nbytes:,}",
        f"{1000 * sample.seconds:.3f} ms",
        f"{1000 * found.seconds(sample):.3f} ms",
        in_bits(8 * sample.wire_bytes / sample.seconds),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options.

    Args:
        parser: of the subcommand.
    """
    parser.description = __doc__.split("\n\n", 1)[1]
    add_place_arguments(parser)
    parser.add_argument(
        "--repeats", type=whole_number(1), default=REPEATS, help=f"of each ({REPEATS})"
    )
    parser.add_argument(
        "--largest",
        type=whole_number(SIZES[1], SIZES[-1]),
        default=SIZES[-1],
        metavar="BYTES",
        help=f"leave larger messages out ({SIZES[-1]})",
    )
    parser.add_argument(
        "--out",
        type=file_to_write,
        metavar="FILE",
        help="write latency (seconds a round), bandwidth (bytes a second) and all that was "
        "measured to FILE, as JSON",
    )


def main(args: argparse.Namespace) -> int:
    """Measures and prints.

    Args:
        args: what `add_arguments` declares.

    Returns:
        The exit status: 0; 1 if the ranks have failed; 2 for unusable arguments; 130 when
        interrupted.
    """
    try:
        place = find_place(args)
    except (OSError, ValueError) as error:
        return complain(error, 2)
    try:
        return report(place, args)
    except (ProcessException, OSError, RuntimeError) as error:
        return complain(error, 1)
    except KeyboardInterrupt:
        return complain("interrupted", 130)


def complain(error: object, status: int) -> int:
    """Says what is wrong, and gives the exit status back."""
    print(f"gradtx bench link: {error}", file=sys.stderr)
    return status


def report(place: Place, args: argparse.Namespace) -> int:
    """Measures, prints the table, and writes the file; gives the exit status."""
    steps = len(COLLECTIVES) * len(SIZES)
    samples: list[Sample] | None = results_of(place, steps, probe, args.repeats, args.largest)
    if samples is None:
        return 0
    kept = [x for x in samples if place.rate is None or x.wire_bytes not in HIDDEN]
    found = fit(kept)
    each = {name: fit([x for x in kept if x.collective == name]) for name in COLLECTIVES}
    print_table(HEADINGS, [cells(sample, found) for sample in samples])
    print(f"{place}, fitted:")
    for name, own in {"together": found, **each}.items():
        print(
            f"  {name}: latency {1e6 * own.latency:.0f} µs a round, bandwidth "
            f"{in_bits(8 * own.bandwidth)}, off by a factor of {math.exp(own.error):.2f} (rms)"
        )
    if args.out is not None:
        write_json(args.out, place, found, each, samples)
    return 0


def write_json(
    path: Path, place: Place, found: Fit, each: Mapping[str, Fit], samples: Sequence[Sample]
) -> None:
    """Writes what a cost model reads, and what it was found by."""
    results = {
        "latency": found.latency,
        "bandwidth": found.bandwidth,
        "ranks": place.ranks,
        "error": found.error,
        "collectives": {name: asdict(own) for name, own in each.items()},
        "rate": None if place.rate is None else place.rate / 8,
        "where": str(place),
        "version": gx.__version__,
        "samples": [asdict(sample) for sample in samples],
    }
    path.write_text(json.dumps(results, indent=2, allow_nan=False) + "\n")
