"""``python -m gradtx demo``: a small network trained on two local ranks, dense and compressed.

The task is scikit-learn's bundled digits: 1797 images of 8 x 8 pixels, 540 of them held out. The
part to read is `train`: a loop under mixed precision, with the three lines that gradtx adds to it.
All else loads data, starts processes and prints.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import ProcessException
from torch.nn import functional as F

import gradtx as gx
from gradtx.bench.arguments import chain_from, whole_number
from gradtx.bench.digits import BATCH, Digits, network
from gradtx.bench.processes import messages_of
from gradtx.core.parse import FAILURES
from gradtx.files import file_to_write

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PEAK_LEARNING_RATE = 0.2
COLLECTIVE_TIMEOUT = timedelta(seconds=60)
TIME_LIMIT = 450.0  # seconds, for all runs of a chain


def chains(ratio: float, codes: Sequence[str] = ()) -> dict[str, gx.Chain]:
    """The ways to synchronise gradients that the demo compares; the first one is dense.

    Args:
        ratio: the share of each compressed leaf's values to send, in (0, 1].
        codes: other chains, as text, in the place of the compressed one.
    """
    compressed = [chain_from(code) for code in codes] or [
        gx.chain(gx.unscale(), gx.skip_bn(), gx.topk(ratio), gx.ef(), gx.allreduce())
    ]
    names = ["compressed", *(f"compressed {i + 1}" for i in range(1, len(compressed)))]
    dense = gx.chain(gx.unscale(), gx.allreduce())
    return {"dense": dense, **dict(zip(names, compressed, strict=True))}


@dataclass(frozen=True)
class Run:
    """What one training run came to.

    Attributes:
        chain: which of `chains`.
        seed: of the initial weights and the order of the images.
        accuracy: on the held-out images, in percent.
        wire_bytes: bytes that rank 0 put on the link in a step, mean over the steps.
        dense_bytes: bytes that a dense FP32 ring all-reduce would have put there.
        seconds: for the training loop alone.
        identical: all ranks ended with the same bits in all parameters and buffers.
    """

    chain: str
    seed: int
    accuracy: float
    wire_bytes: float
    dense_bytes: float
    seconds: float
    identical: bool


def train(
    name: str, tx: gx.Chain, data: Digits, seed: int, epochs: int, on_epoch: Callable[[], None]
) -> Run:
    """Trains on this rank's part of every batch, in step with the other ranks.

    Args:
        name: of the chain, for the `Run`.
        tx: how gradients are synchronised.
        data: the same on all ranks.
        seed: of the initial weights and the order of the images.
        epochs: how often each image is seen.
        on_epoch: called after each epoch.
    """
    torch.manual_seed(seed)
    model = network()
    scaler = torch.amp.GradScaler("cpu")
    optimizer, schedule = optimizer_for(model, epochs * data.batches)
    pipe = gx.Pipeline(tx, model, scaler=scaler)  # 1: once, before the loop
    place = dist.get_rank(), dist.get_world_size()
    reports = []
    start = time.perf_counter()
    for epoch in range(epochs):
        for images, labels in data.epoch(1000 * seed + epoch, *place):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
            scaler.scale(loss).backward()
            reports.append(pipe.sync(optimizer))  # 2: between backward and step
            scaler.step(optimizer)
            scaler.update()
            if reports[-1].ready:
                schedule.step()
        on_epoch()
    seconds = time.perf_counter() - start
    pipe.sync_buffers()  # 3: before evaluating or saving
    return Run(
        name,
        seed,
        accuracy(model, data),
        wire_bytes=statistics.fmean(report.wire_bytes for report in reports),
        dense_bytes=statistics.fmean(report.dense_bytes for report in reports),
        seconds=seconds,
        identical=replicas_identical(model),
    )


def optimizer_for(
    model: nn.Module, steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Plain SGD; its rate rises for a fifth of the steps, then falls to nearly zero."""
    optimizer = torch.optim.SGD(model.parameters(), lr=PEAK_LEARNING_RATE, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PEAK_LEARNING_RATE, total_steps=steps + 1, pct_start=0.2, cycle_momentum=False
    )
    return optimizer, schedule


@torch.no_grad()
def accuracy(model: nn.Module, data: Digits) -> float:
    """The share of the held-out images that the model gets right, in percent."""
    model.eval()
    right = model(data.test_images).argmax(1) == data.test_labels
    return 100 * float(right.double().mean())


def replicas_identical(model: nn.Module) -> bool:
    """Says whether all ranks hold the same bits in every parameter and buffer."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    return len(set(digests)) == 1


@dataclass(frozen=True)
class Settings:
    """What to run."""

    ranks: int
    seeds: int
    epochs: int
    ratio: float
    chains: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """How many chains are compared."""
        return 1 + max(1, len(self.chains))

    @property
    def compared(self) -> dict[str, gx.Chain]:
        """What is compared, by name."""
        return chains(self.ratio, self.chains)


# What rank 0 tells the parent: after each epoch what is on, and each run once it has ended.
Message = str | Run


def rank_main(rank: int, settings: Settings, rendezvous: str, outbox: Any) -> None:
    """All that one rank does.

    Args:
        rank: its number.
        settings: the same on all ranks.
        rendezvous: the URI of a file, in an empty folder, by which the ranks find each other.
        outbox: the queue that rank 0 puts every `Message` into.
    """
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    dist.init_process_group(
        "gloo", rendezvous, COLLECTIVE_TIMEOUT, world_size=settings.ranks, rank=rank
    )

    def tell(message: Message) -> None:
        if rank == 0:
            outbox.put(message)

    data = Digits.load()
    for seed in range(settings.seeds):
        for name, tx in settings.compared.items():
            on_epoch = partial(tell, f"{name}, seed {seed + 1} of {settings.seeds}")
            tell(train(name, tx, data, seed, settings.epochs, on_epoch))
    dist.destroy_process_group()


def run_ranks(settings: Settings) -> Generator[Message, None, None]:
    """Starts the ranks and hands on what rank 0 tells; no rank outlives this generator.

    Raises:
        TimeoutError: if they take longer than `TIME_LIMIT` a chain.
        ProcessException: if a rank fails; with its traceback, if it has raised.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = settings, Path(folder, "rendezvous").as_uri()
        yield from messages_of(
            rank_main, arguments, settings.ranks, limit=TIME_LIMIT * settings.count
        )


def collect(settings: Settings, console: Console) -> list[Run]:
    """Runs the ranks to their end; on a terminal with one line of progress, else one line a run."""
    from rich.progress import Progress

    runs: list[Run] = []
    steps = settings.count * settings.seeds * settings.epochs
    with (
        Progress(console=console, transient=True, disable=not console.is_terminal) as progress,
        closing(run_ranks(settings)) as messages,
    ):
        task = progress.add_task("starting", total=steps)
        for message in messages:
            if isinstance(message, str):
                progress.update(task, advance=1, description=message)
                continue
            runs.append(message)
            if not console.is_terminal:
                console.print(f"{message.chain}, seed {message.seed + 1}: {message.accuracy:.2f} %")
    return runs


@dataclass(frozen=True)
class Summary:
    """The runs of one chain, over all seeds.

    Attributes:
        chain: as code.
        accuracy: of each run, in percent.
        wire_bytes: a step and rank, mean over all steps.
        dense_bytes: what a dense FP32 ring all-reduce would take.
        seconds: of a run, mean.
    """

    chain: str
    accuracy: list[float]
    wire_bytes: float
    dense_bytes: float
    seconds: float

    @classmethod
    def of(cls, code: str, runs: list[Run]) -> Summary:
        """Sums up runs of one chain."""
        return cls(
            code,
            [run.accuracy for run in runs],
            statistics.fmean(run.wire_bytes for run in runs),
            statistics.fmean(run.dense_bytes for run in runs),
            statistics.fmean(run.seconds for run in runs),
        )

    @property
    def mean(self) -> float:
        """Mean accuracy over seeds, in percent."""
        return statistics.fmean(self.accuracy)

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than the dense FP32 ring all-reduce."""
        return self.dense_bytes / self.wire_bytes


def summarise(settings: Settings, runs: list[Run]) -> dict[str, Summary]:
    """The runs summed up by chain."""
    return {
        name: Summary.of(tx.code(), [run for run in runs if run.chain == name])
        for name, tx in settings.compared.items()
    }


def table(summaries: dict[str, Summary]) -> Table:
    """The summaries as a table, a row a chain."""
    from rich.table import Table

    out = Table("chain")
    for title in ("test accuracy", "bytes a step", "ratio", "time a run"):
        out.add_column(title, justify="right", no_wrap=True)
    for summary in summaries.values():
        out.add_row(
            summary.chain.replace("gx.", ""),
            with_spread(summary.accuracy),
            f"{summary.wire_bytes:,.0f}",
            f"{summary.ratio:.1f} ×",
            f"{summary.seconds:.1f} s",
        )
    return out


def with_spread(values: list[float]) -> str:
    """Mean and standard deviation of percentages."""
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread} %"


def differences(summaries: dict[str, Summary]) -> dict[str, float]:
    """How many points of accuracy the runs of each other chain have over the dense ones."""
    dense = summaries["dense"].mean
    return {name: s.mean - dense for name, s in summaries.items() if name != "dense"}


def write_json(
    path: Path, settings: Settings, summaries: dict[str, Summary], identical: bool
) -> None:
    """Writes all results to a file."""
    points = differences(summaries)
    rows = {name: {**vars(s), "ratio": s.ratio} for name, s in summaries.items()}
    results = {
        **vars(settings),
        "ratio": None if settings.chains else settings.ratio,
        "chains": rows,
        "difference_points": points if settings.chains else points["compressed"],
        "replicas_identical": identical,
    }
    path.write_text(json.dumps(results, indent=2) + "\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the demo.

    Args:
        parser: of the subcommand.
    """
    add = parser.add_argument
    add("--seeds", type=whole_number(1), help="training runs a chain (3; with --quick 1)")
    add("--epochs", type=whole_number(1), help="epochs a run (15; with --quick 4)")
    add("--ranks", type=whole_number(2, BATCH // 4), default=2, help="processes (2)")
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--ratio", type=float, default=0.01, help="share of values that topk sends (0.01)"
    )
    either.add_argument(
        "--chain",
        action="append",
        default=[],
        metavar="CODE",
        help='compare this one with dense, such as "chain(unscale(), sign(), ef(), allreduce())"; '
        "several if given again",
    )
    add("--quick", action="store_true", help="a short run, for CI")
    add("--json", type=file_to_write, metavar="FILE", help="write all results to FILE")


def main(args: argparse.Namespace) -> int:
    """Runs the demo.

    Args:
        args: what `add_arguments` declares.

    Returns:
        The exit status: 0; 1 if the replicas have come apart or a rank has failed; 2 for unusable
        arguments or missing packages; 130 when interrupted.
    """
    try:
        require_extras()
        settings = settings_from(args)
    except (ImportError, *FAILURES) as error:
        return complain(error, 2)
    try:
        return report(settings, args.json)
    except (ProcessException, TimeoutError, OSError) as error:
        return complain(error, 1)
    except KeyboardInterrupt:
        return complain("interrupted", 130)


def complain(error: object, status: int) -> int:
    """Says what is wrong, and gives the exit status back."""
    print(f"gradtx demo: {error}", file=sys.stderr)
    return status


def require_extras() -> None:
    """Refuses to start without the packages that only the demo needs."""
    packages = {"rich": "rich", "sklearn": "scikit-learn"}
    missing = [packages[name] for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"{' and '.join(missing)} not found: pip install 'gradtx[demo]'")


def settings_from(args: argparse.Namespace) -> Settings:
    """The settings that the options ask for, once they have been tried on one process."""
    for tx in chains(args.ratio, args.chain).values():
        gx.Pipeline(tx, network(), scaler=torch.amp.GradScaler("cpu"))
    seeds, epochs = (1, 4) if args.quick else (3, 15)
    return Settings(
        args.ranks, args.seeds or seeds, args.epochs or epochs, args.ratio, tuple(args.chain)
    )


def report(settings: Settings, json_path: Path | None) -> int:
    """Trains, prints the table and the verdict, and writes the results; gives the exit status."""
    from rich.console import Console

    console = Console(highlight=False)
    start = time.perf_counter()
    runs = collect(settings, console)
    summaries = summarise(settings, runs)
    identical = all(run.identical for run in runs)
    console.print(table(summaries))
    against = (
        f"{name} against dense: {x:+.2f} points" for name, x in differences(summaries).items()
    )
    console.print(
        f"{'; '.join(against)}; "
        f"replicas identical: {'yes' if identical else 'NO'} "
        f"(ranks: {settings.ranks}, seeds: {settings.seeds}, {time.perf_counter() - start:.0f} s)",
        soft_wrap=True,
    )
    if json_path is not None:
        write_json(json_path, settings, summaries, identical)
    return 0 if identical else 1
