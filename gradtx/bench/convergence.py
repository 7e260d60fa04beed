"""``python -m gradtx bench convergence``: how networks train with many chains.

Two tasks: a small convolutional network with BatchNorm on images of digits, and a small transformer
on real text. A run is one process with a thread for each rank, every rank with its own part of each
batch, and plain SGD at a rate that is constant after the warm-up: a long run begins as a short one.
Each chain is compared with the dense gradient, in units of the standard error of that difference.
With ``--out`` finished runs are kept in a file, and are not run again.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import ProcessException

import gradtx as gx
from gradtx.bench import results
from gradtx.bench.arguments import chain_from, whole_number
from gradtx.bench.curves import draw
from gradtx.bench.plot import check_plot
from gradtx.bench.processes import messages_of
from gradtx.bench.summary import Difference, Summary, stages_of, summarise
from gradtx.bench.tables import print_table
from gradtx.bench.tasks import SEQUENCES, TASKS
from gradtx.bench.training import Job, Record, learning_rate, train
from gradtx.core.errors import ChainOrderError
from gradtx.core.parse import FAILURES
from gradtx.core.stage import Kind
from gradtx.files import file_to_write

# Each family at its usual settings, and what it is without feedback.
FAMILIES = (
    "cast('float16'), ef()",
    "natural()",
    "quantize(4)",
    "ternary()",
    "sign(), ef()",
    "sign(feedback=False)",
    "powersgd(4), ef()",
    "topk(0.01), ef()",
    "topk(0.01, feedback=False)",
    "topk(0.01), sign(), ef()",
    "random_k(0.01), ef()",
    "random_k(0.1, unbiased=True)",
)
# Without skip_bn() on both tasks: to see what it changes, and because what it keeps from
# momentum_correction would have no momentum.
UNFILTERED = ("sign(), ef()", "topk(0.01), ef()", "topk(0.01), momentum_correction(0.9)")


def usual_chains(task: str) -> list[str]:
    """The chains that are compared on a task if none are given, as code."""
    filtered = "skip_bn(), " if task == "digits" else ""
    stages = dict.fromkeys([*(filtered + family for family in FAMILIES), *UNFILTERED])
    return [f"chain({code}, allreduce())" for code in stages]


@dataclass(frozen=True)
class Settings:
    """What to run.

    Attributes:
        tasks: some of `TASKS`.
        chains: as given; the usual ones if there are none.
        steps: of each run.
        seeds: how many runs of each chain.
        ranks: how many threads share each batch.
        rate: what all learning rates are multiplied by.
    """

    tasks: tuple[str, ...]
    chains: tuple[str, ...]
    steps: int
    seeds: int
    ranks: int
    rate: float

    def compared(self, task: str) -> list[str]:
        """The chains that are compared on a task, as their own code; the first one is dense."""
        codes = ["chain(allreduce())", *(self.chains or usual_chains(task))]
        return list(dict.fromkeys(chain_from(code).code() for code in codes))

    @property
    def jobs(self) -> list[Job]:
        """All runs; each chain's first seed comes first."""
        return [
            Job(task, chain, seed, self.steps, self.ranks, self.rate)
            for seed in range(self.seeds)
            for task in self.tasks
            for chain in self.compared(task)
        ]


def check(settings: Settings) -> None:
    """Refuses, before anything is run, chains that cannot train.

    Raises:
        ValueError: naming the chain.
    """
    for code in settings.chains:
        try:
            tx = chain_from(chain_from(code).code())
            for task in settings.tasks:
                gx.Pipeline(tx, TASKS[task]().network())
        except FAILURES as error:
            if isinstance(error, ChainOrderError):
                raise
            raise ValueError(f"--chain {code}: {error}") from error
        if any(stage.kind is Kind.UNSCALE and stage.stateful for stage in tx.stages):
            raise ValueError(f"--chain {code}: there is no overflow here to find a loss scale by")


def label(job: Job) -> str:
    """A run in a few words."""
    return f"{job.task}: {stages_of(job.chain)}, seed {job.seed + 1}"


def work(number: int, jobs: Sequence[Job], taken: Any, outbox: Any) -> None:
    """All that one process does: run after run, until all are taken.

    Args:
        number: of the process.
        jobs: all runs.
        taken: how many of them some process has taken, shared.
        outbox: the queue for a text after each evaluation, and for each run's `Record`.
    """
    torch.set_num_threads(1)
    while True:
        with taken.get_lock():
            place, taken.value = taken.value, taken.value + 1
        if place >= len(jobs):
            return
        job = jobs[place]
        outbox.put(train(job, partial(outbox.put, label(job))))


def collect(jobs: Sequence[Job], processes: int, out: Path | None) -> list[Record]:
    """Runs what the file does not have, adds that to it, and gives all.

    Args:
        jobs: the runs that are wanted.
        processes: how many of them at a time.
        out: the file, or None.
    """
    found = [] if out is None else results.read(out)
    done = {record.job: record for record in found if still_holds(record, jobs)}
    left = [job for job in jobs if job not in done]
    if out is not None:
        results.mend(out)
    if left:
        arguments = left, get_context("spawn").Value("i", 0)
        messages = messages_of(work, arguments, min(processes, len(left)))
        with closing(messages), progress(left) as show:
            for message in messages:
                show(message)
                if isinstance(message, Record):
                    done[message.job] = message
                    if out is not None:
                        results.append(out, message)
    return [done[job] for job in jobs]


def still_holds(record: Record, jobs: Sequence[Job]) -> bool:
    """Whether a run is one of those wanted, and would be run in the same way today."""
    return (
        record.job in jobs
        and record.version == gx.__version__
        and record.learning_rate == learning_rate(record.job)
    )


@contextmanager
def progress(jobs: Sequence[Job]) -> Iterator[Callable[[str | Record], None]]:
    """Shows messages: on a terminal by a bar of rich's, else by one line for each run.

    Args:
        jobs: all that is going to run.
    """
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield show_line
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=sum(len(job.points) for job in jobs))

        def show(message: str | Record) -> None:
            if isinstance(message, str):
                bar.update(task, advance=1, description=message)

        yield show


def show_line(message: str | Record) -> None:
    """Prints a line for a run that is done, and none for an evaluation."""
    if isinstance(message, Record):
        print(
            f"{label(message.job)}: loss {message.loss[-1]:.4f}, {message.accuracy[-1]:.2f} % "
            f"right ({message.seconds:.0f} s)",
            file=sys.stderr,
        )


def headings(args: argparse.Namespace) -> list[str]:
    """The titles of the columns that `cells` fills."""
    out = ["stages", "rate", "loss", "to dense", "right", "to dense", "bytes a step", "ratio"]
    out += ["rise", *(f"loss at {step:,}" for step in args.at)]
    return out + [f"steps to {target:g}" for target in args.target]


def cells(summary: Summary, args: argparse.Namespace) -> list[str]:
    """A summary as text."""
    return [
        summary.stages,
        f"{summary.runs[0].learning_rate:g}",
        with_spread(summary.losses, 4),
        in_errors(summary.loss_difference, 4) if summary.runs is not summary.dense else "",
        with_spread(summary.accuracies, 2) + " %",
        in_errors(summary.accuracy_difference, 2) if summary.runs is not summary.dense else "",
        f"{summary.wire_bytes:,.0f}",
        f"{summary.ratio:.1f} ×",
        f"{summary.rise:.3f}",
        *(with_spread(summary.losses_at(step), 4) for step in args.at),
        *(reached(summary.steps_to(target)) for target in args.target),
    ]


def with_spread(values: Sequence[float], digits: int) -> str:
    """Mean and standard deviation; or how many runs have diverged."""
    lost = sum(not math.isfinite(value) for value in values)
    if lost:
        return f"{lost} of {len(values)} diverged"
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def in_errors(difference: Difference, digits: int) -> str:
    """A difference, and how many of its standard errors it is."""
    if math.isnan(difference.value):
        return "–"
    errors = f" ({difference.errors:+.1f} SE)" if math.isfinite(difference.errors) else ""
    return f"{difference.value:+.{digits}f}{errors}"


def reached(steps: Sequence[int | None]) -> str:
    """Mean and standard deviation of the steps taken; or how many runs have not got there."""
    lost = sum(step is None for step in steps)
    return f"{lost} of {len(steps)} never" if lost else with_spread([s or 0 for s in steps], 0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options.

    Args:
        parser: of the subcommand.
    """
    add = parser.add_argument
    add("--task", action="append", choices=list(TASKS), help="one of the tasks; both if not given")
    add(
        "--chain",
        action="append",
        default=[],
        metavar="CODE",
        help='compare this one with dense, such as "chain(skip_bn(), sign(), ef(), allreduce())"; '
        "several if given again, those of all families if not given",
    )
    add("--steps", type=whole_number(1), default=500, help="batches a run (500)")
    add("--seeds", type=whole_number(1, 100), default=3, help="runs a chain (3)")
    add("--ranks", type=whole_number(2, SEQUENCES), default=2, help="threads a run (2)")
    add("--rate", type=positive, default=1.0, help="multiplies all learning rates (1)")
    add("--jobs", type=whole_number(1, 256), default=1, help="runs at a time (1)")
    add(
        "--at",
        action="append",
        default=[],
        type=whole_number(1),
        metavar="STEP",
        help="show the held-out loss at this step too; several if given again",
    )
    add(
        "--target",
        action="append",
        default=[],
        type=positive,
        metavar="LOSS",
        help="show after how many steps the held-out loss is as low; several if given again",
    )
    add(
        "--out",
        type=file_to_write,
        metavar="FILE",
        help="add each finished run to FILE, a line each, and do not run again what is there",
    )
    add("--json", type=file_to_write, metavar="FILE", help="write all results to FILE")
    add("--plot", type=Path, metavar="FILE", help="draw loss against bytes, as .png, .svg or .pdf")


def positive(text: str) -> float:
    """An argparse type: a finite number over zero."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a finite number over 0")
    return number


def main(args: argparse.Namespace) -> int:
    """Trains, and prints what came of it.

    Args:
        args: what `add_arguments` declares.

    Returns:
        The exit status: 0; 1 if a run has failed; 2 for unusable arguments or missing packages;
        130 when interrupted.
    """
    try:
        settings = settings_from(args)
    except (ImportError, OSError, *FAILURES) as error:
        return complain(error, 2)
    try:
        return report(settings, args)
    except (ProcessException, OSError, ValueError) as error:
        return complain(error, 1)
    except KeyboardInterrupt:
        return complain("interrupted", 130)


def complain(error: object, status: int) -> int:
    """Says what is wrong, and gives the exit status back."""
    print(f"gradtx bench convergence: {error}", file=sys.stderr)
    return status


def settings_from(args: argparse.Namespace) -> Settings:
    """The settings that the options ask for, once all that can be checked has been."""
    settings = Settings(
        tuple(dict.fromkeys(args.task or TASKS)),
        tuple(args.chain),
        args.steps,
        args.seeds,
        args.ranks,
        args.rate,
    )
    if "digits" in settings.tasks and importlib.util.find_spec("sklearn") is None:
        raise ImportError("scikit-learn not found: pip install 'gradtx[demo]'")
    if args.plot is not None:
        check_plot(args.plot)
    check(settings)
    first = settings.jobs[0].points[0]
    for step in args.at:
        if not first <= step <= settings.steps:
            raise ValueError(f"--at {step}: expected one of the steps from {first} to {args.steps}")
    return settings


def report(settings: Settings, args: argparse.Namespace) -> int:
    """Runs what is left to run, prints the tables, and writes the files; gives the exit status."""
    records = collect(settings.jobs, args.jobs, args.out)
    summaries = {
        task: summarise([r for r in records if r.job.task == task], settings.compared(task))
        for task in settings.tasks
    }
    for task, rows in summaries.items():
        print_table(headings(args), [cells(row, args) for row in rows])
        print(
            f"{task}: {settings.steps:,} steps, ranks: {settings.ranks}, seeds: {settings.seeds}; "
            "mean ± standard deviation, SE: standard error of the difference, "
            "rise: of the training loss over its lowest"
        )
    if args.json is not None:
        write_json(args.json, settings, summaries)
    if args.plot is not None:
        draw(summaries, args.plot)
    return 0


def write_json(path: Path, settings: Settings, summaries: dict[str, list[Summary]]) -> None:
    """Writes all results to a file."""
    tasks = {task: [row.to_json() for row in rows] for task, rows in summaries.items()}
    written = {"version": gx.__version__, "settings": asdict(settings), "tasks": tasks}
    path.write_text(json.dumps(written, indent=2, allow_nan=False) + "\n")
