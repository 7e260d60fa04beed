"""``python -m gradtx bench sync``: what synchronising one gradient takes, by chain and by peer.

Timed is what a training loop waits for once the backward pass has ended: from the gradients in
`.grad` to their means over the ranks in `.grad`, on the slowest rank, with a barrier before and new
gradients each time, which are not timed. For a chain that is `Pipeline.sync`; for a peer, torch's
own hooks for DistributedDataParallel on buckets as it makes them (1 MB, then 25 MB), each `.grad` a
view of its bucket. All methods run in the same processes, in turn, one round after the other; times
are medians, and the ratio is that of FP32 all-reduce to the method, round by round, then the
median. Every rank has one torch thread.

The floor is what nobody gets below: the gradient read once and the result written once, the
residual read and written where there is one, over the bandwidth of memory (that of a copy, measured
in the same run, all ranks at once), plus the bytes to send over the rate of the link.

"counted" is what the interface has sent, headers and acknowledgements too, beside "sent", what the
method says. Phases are those of the round of median length, on its slowest rank; "transport" has
the waiting for other ranks in it, "hook" is all that happens inside torch's hooks, which do not
tell more, and "rest" is what belongs to no phase. "memory" is by how much a process grows, at most,
with what the method keeps between steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessException

import gradtx as gx
from gradtx.bench import overhead, overlap
from gradtx.bench.arguments import chain_from, whole_number
from gradtx.bench.bars import draw
from gradtx.bench.peers import PEERS
from gradtx.bench.plot import check_plot
from gradtx.bench.ranks import Place, add_place_arguments, find_place, in_bits, results_of
from gradtx.bench.rounds import ChainMethod, Measured, Plan, Results, measure
from gradtx.bench.shapes import MODELS, described, shapes_of
from gradtx.bench.tables import print_table
from gradtx.core.errors import ChainOrderError
from gradtx.core.parse import FAILURES
from gradtx.exchange.group import Group, default_group
from gradtx.files import file_to_write

CHAINS = (
    "chain(topk(0.01, values='float16'), ef(), allreduce())",
    "chain(topk(0.01), quantize(8), ef(), allreduce())",
    "chain(powersgd(4), ef(), allreduce())",
    "chain(cast('float16'), ef(), allreduce())",
    "chain(sign(), ef(), allreduce())",
)
BASELINE = "allreduce"
MODEL = "24x1024x1024"
ROUNDS = 5
OVERHEAD_ROUNDS = 20
REST = "rest"


@dataclass(frozen=True)
class Row:
    """What one method came to.

    Attributes:
        name: as in tables.
        code: of a chain; None for a peer.
        seconds: of a round, median.
        ratio: how many times as fast as FP32 all-reduce, median of the ratios of each round.
        wire_bytes: what a rank sends, by its own account; median.
        counted_bytes: what its interface has sent; median; None if there is no such counter.
        floor: seconds that it takes at least.
        distance: how many times the floor the median is.
        peak_bytes: by how much memory grows; None if the system does not tell.
        phases: seconds of the round of median length, by phase; they add up to its length.
        rounds: seconds of each round.
    """

    name: str
    code: str | None
    seconds: float
    ratio: float
    wire_bytes: int
    counted_bytes: int | None
    floor: float
    distance: float
    peak_bytes: int | None
    phases: dict[str, float]
    rounds: list[float]


def summarise(results: Results, values: int, link: float) -> list[Row]:
    """What each method came to.

    Args:
        results: FP32 all-reduce first.
        values: how many the gradient has.
        link: bytes that a rank can send in a second.
    """
    baseline, memory = results.measured[0], results.memory_bandwidth
    return [_row(found, baseline, values, memory, link) for found in results.measured]


def _row(found: Measured, baseline: Measured, values: int, memory: float, link: float) -> Row:
    rounds = found.rounds
    seconds = statistics.median(r.seconds for r in rounds)
    wire_bytes = round(statistics.median(r.wire_bytes for r in rounds))
    counted = [r.counted_bytes for r in rounds if r.counted_bytes is not None]
    moved = 4 * values * (4 if found.feedback else 2)
    floor = moved / memory + wire_bytes / link
    middle = sorted(rounds, key=lambda r: r.seconds)[(len(rounds) - 1) // 2]
    pairs = zip(baseline.rounds, rounds, strict=True)
    return Row(
        found.name,
        found.code,
        seconds,
        statistics.median(dense.seconds / own.seconds for dense, own in pairs),
        wire_bytes,
        round(statistics.median(counted)) if counted else None,
        floor,
        seconds / floor,
        found.peak_bytes,
        {**middle.phases, REST: middle.seconds - sum(middle.phases.values())},
        [r.seconds for r in rounds],
    )


HEADINGS = (
    "method",
    "median",
    "ratio",
    "sent",
    "counted",
    "over",
    "floor",
    "distance",
    "memory",
)

OVERLAP_HEADINGS = (
    "chain",
    "batch",
    "backward",
    "and then the exchange",
    "overlapped",
    "exchange",
    "hidden",
)


def cells(row: Row) -> list[str]:
    """A row as text."""
    counted = row.counted_bytes
    over = None if counted is None or not row.wire_bytes else counted / row.wire_bytes - 1
    return [
        row.name,
        in_ms(row.seconds),
        f"{row.ratio:.2f} ×",
        f"{row.wire_bytes:,}",
        "–" if counted is None else f"{counted:,}",
        "–" if over is None else f"{100 * over:+.1f} %",
        in_ms(row.floor),
        f"{row.distance:.2f} ×",
        "–" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:.0f} MiB",
    ]


def in_ms(seconds: float) -> str:
    """Milliseconds, as text."""
    return f"{1000 * seconds:,.1f} ms"


def phase_cells(row: Row) -> list[str]:
    """The phases of a row as text."""
    return [row.name, *(in_ms(x) if x else "–" for x in row.phases.values())]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options.

    Args:
        parser: of the subcommand.
    """
    parser.description = __doc__.split("\n\n", 1)[1]
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "--model",
        default=MODEL,
        help=f"{', '.join(MODELS)} (a thousand leaves of 64 values), or so many leaves of one "
        f"shape ({MODEL})",
    )
    add(
        "--chain",
        action="append",
        default=[],
        metavar="CODE",
        help='such as "chain(topk(0.01), ef(), allreduce())"; several if given again, the usual '
        "ones if not given",
    )
    add(
        "--peer",
        action="append",
        choices=[*PEERS, "none"],
        help=f"beside {BASELINE}, which is always there; several if given again, all if not given",
    )
    add("--rounds", type=whole_number(1, 10_000), help=f"of each method ({ROUNDS})")
    add_place_arguments(parser)
    add(
        "--overhead",
        action="store_true",
        help="measure instead what an update of a thousand small leaves takes on one rank, by a "
        f"chain and by one of torchopt ({OVERHEAD_ROUNDS} rounds)",
    )
    add(
        "--overlap",
        action="store_true",
        help="measure instead how much of the exchange a backward pass hides that takes as long, "
        "with Pipeline(overlap=True); of square matrices",
    )
    add("--json", type=file_to_write, metavar="FILE", help="write all results to FILE")
    add("--plot", type=Path, metavar="FILE", help="draw all phases, as .png, .svg or .pdf")


def main(args: argparse.Namespace) -> int:
    """Measures and prints.

    Args:
        args: what `add_arguments` declares.

    Returns:
        The exit status: 0; 1 if the ranks have failed; 2 for unusable arguments or missing
        packages; 130 when interrupted.
    """
    try:
        if args.overhead:
            return report_overhead(args)
        if args.plot is not None:
            check_plot(args.plot)
        place = find_place(args)
        plan = None if args.overlap else plan_from(args, place)
        overlap.layers_of(args.model if args.overlap else MODEL)
        codes = tuple(dict.fromkeys(map(_checked, args.chain or overlap.CHAINS)))
    except (ImportError, OSError, *FAILURES) as error:
        return complain(error, 2)
    try:
        if plan is None:
            return report_overlap(codes, place, args)
        return report(plan, place, args)
    except (ProcessException, OSError, RuntimeError) as error:
        return complain(error, 1)
    except KeyboardInterrupt:
        return complain("interrupted", 130)


def complain(error: object, status: int) -> int:
    """Says what is wrong, and gives the exit status back."""
    print(f"gradtx bench sync: {error}", file=sys.stderr)
    return status


def plan_from(args: argparse.Namespace, place: Place) -> Plan:
    """What the options ask for, once all that can be checked has been.

    Raises:
        ValueError: for a model or a chain that cannot be measured.
    """
    shapes_of(args.model)
    chains = list(dict.fromkeys(map(_checked, args.chain or CHAINS)))
    peers = [name for name in args.peer or PEERS if name != "none"]
    return Plan(
        args.model,
        tuple(chains),
        tuple(dict.fromkeys([BASELINE, *peers])),
        args.rounds or ROUNDS,
        place.interface,
        place.rate is None,
    )


def _checked(code: str) -> str:
    """A chain's own code, once it has been seen to synchronise on one rank, alone.

    Raises:
        ValueError: naming the chain.
    """
    parameter = torch.zeros(8, 8)
    parameter.grad = gradient = torch.ones(8, 8)
    try:
        tx = chain_from(code)
        if not tx.delay:
            with default_group(Group()):
                ChainMethod(tx.code(), [parameter]).sync()
            if parameter.grad is gradient:
                return tx.code()
    except ChainOrderError:
        raise
    except (*FAILURES, RuntimeError) as error:
        raise ValueError(f"--chain {code}: {error}") from error
    raise ValueError(f"--chain {code}: expected one that gives a result in .grad in the same step")


def report(plan: Plan, place: Place, args: argparse.Namespace) -> int:
    """Measures, prints the tables, and writes the files; gives the exit status."""
    results: Results | None = results_of(place, plan.steps, measure, plan)
    if results is None:
        return 0
    values = sum(torch.Size(shape).numel() for shape in shapes_of(plan.model))
    link = results.link.bandwidth if results.link is not None else (place.rate or 0.0) / 8
    rows = summarise(results, values, link)
    print_table(HEADINGS, [cells(row) for row in rows])
    print()
    print_table(["phases", *rows[0].phases], [phase_cells(row) for row in rows])
    found = "" if results.link is None else " (measured)"
    print(
        f"{described(plan.model)}; {place}; rounds: {plan.rounds}; memory "
        f"{results.memory_bandwidth / 1e9:.1f} GB/s, link {in_bits(8 * link)}{found}"
    )
    for name, reason in results.left_out.items():
        print(f"{name} cannot be run here: {reason}")
    if args.json is not None:
        write_json(args.json, plan, place, results, rows)
    if args.plot is not None:
        draw(rows, args.plot, f"{described(plan.model)}; {place}")
    return 0


def write_json(path: Path, plan: Plan, place: Place, results: Results, rows: Sequence[Row]) -> None:
    """Writes all results to a file."""
    _write(
        path,
        {
            "version": gx.__version__,
            "torch": torch.__version__,
            "plan": asdict(plan),
            "place": asdict(place),
            "memory_bandwidth": results.memory_bandwidth,
            "left_out": results.left_out,
            "link": None if results.link is None else asdict(results.link),
            "methods": [asdict(row) for row in rows],
        },
    )


def _write(path: Path, results: dict[str, Any]) -> None:
    path.write_text(json.dumps(results, indent=2, allow_nan=False) + "\n")


def report_overlap(codes: tuple[str, ...], place: Place, args: argparse.Namespace) -> int:
    """Measures what a backward pass hides, prints, and writes the file; gives the exit status."""
    rounds = args.rounds or ROUNDS
    found: list[overlap.Hidden] | None = results_of(
        place, overlap.steps(codes, rounds), overlap.measure, codes, args.model, rounds
    )
    if found is None:
        return 0
    lines = [
        [
            each.name,
            str(each.batch),
            *(in_ms(statistics.median(x)) for x in (each.backward, each.plain, each.overlapped)),
            in_ms(each.exchange),
            f"{100 * each.share:.0f} %",
        ]
        for each in found
    ]
    print_table(OVERLAP_HEADINGS, lines)
    print(
        f"{described(args.model)}; {place}; rounds: {rounds}. Hidden: of what the exchange adds to "
        "a step behind the backward pass."
    )
    if args.json is not None:
        results = [{**asdict(each), "share": each.share} for each in found]
        _write(args.json, {"version": gx.__version__, "place": asdict(place), "chains": results})
    return 0


def report_overhead(args: argparse.Namespace) -> int:
    """Measures on this rank alone, prints, and writes the file; gives the exit status.

    Raises:
        ImportError: without torchopt.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = overhead.measure(args.rounds or OVERHEAD_ROUNDS)
    finally:
        torch.set_num_threads(before)
    lines = [
        [name, in_ms(statistics.median(seconds))]
        for name, seconds in zip(found.names, found.seconds, strict=True)
    ]
    print_table(["chain", "median"], lines)
    print(f"{described('leaves')}, one rank; the first takes {found.ratio:.2f} × as long")
    if args.json is not None:
        _write(args.json, {"version": gx.__version__, **asdict(found), "ratio": found.ratio})
    return 0
