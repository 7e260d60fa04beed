"""Accumulation, bf16 autocast, FP32 masters and top 5 % in 16 bits together, on a slow link.

python examples/combination.py            ten minutes on two cores that are free
python examples/combination.py --short    half a minute

A character-level transformer learns the source code of Python's standard library on two ranks. As
root on Linux each rank is a host of its own, in a network namespace, and the link between them is
shaped so that dense FP32 gradients take 40 % of a step. Otherwise the ranks talk over loopback.
Tables in colour need rich: pip install 'gradtx[demo]'.
"""

import argparse
import hashlib
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import gradtx as gx
from gradtx.bench import link
from gradtx.bench.arguments import whole_number
from gradtx.bench.processes import messages_of
from gradtx.bench.tables import print_table
from gradtx.bench.text import CONTEXT, Corpus, Transformer, windows
from gradtx.bench.timed import TimedGroup
from gradtx.exchange.group import Group, find_group
from gradtx.files import file_to_write

RANKS, SEQUENCES, WINDOW, RATIO = 2, 8, 8, 0.05
WARM_UP = 0.1  # the share of steps until the rate is full
DENSE_SHARE = 0.4  # of a dense step, on the link
HELD_OUT = 1024  # sequences
BURST = 4096  # bytes that an idle link passes at once: a quarter of a compressed message


def dense(group: Group) -> gx.Chain:
    return gx.chain(gx.allreduce(group))


def compressed(group: Group) -> gx.Chain:
    exchange = (gx.topk(RATIO, scope="global"), gx.cast("float16"), gx.ef(), gx.allreduce(group))
    return gx.chain(*exchange, gx.master_weights())


def dense_window(group: Group) -> gx.Chain:
    return gx.chain(gx.accumulate(WINDOW), dense(group))


def compressed_window(group: Group) -> gx.Chain:
    return gx.chain(gx.accumulate(WINDOW), compressed(group))


@dataclass(frozen=True)
class Variant:
    chain: Any
    window: int  # micro-steps a step
    against: str  # the dense variant of the same number of steps


VARIANTS = {
    "dense": Variant(dense, 1, "dense"),
    "compressed": Variant(compressed, 1, "dense"),
    f"dense, {WINDOW} accumulated": Variant(dense_window, WINDOW, f"dense, {WINDOW} accumulated"),
    f"compressed, {WINDOW} accumulated": Variant(
        compressed_window, WINDOW, f"dense, {WINDOW} accumulated"
    ),
}
DENSE, COMPRESSED, DENSE_WINDOW, COMPRESSED_WINDOW = VARIANTS


@dataclass(frozen=True)
class Settings:
    steps: int  # micro-steps of each run, so that all runs see the same text
    seeds: int
    width: int
    layers: int
    probe: int  # steps to find the rate of the link by
    rate: float  # of plain SGD, the same for all


@dataclass(frozen=True)
class Split:
    """Where the time of a step goes, in seconds: medians over steps, means over ranks."""

    computing: float
    compressing: float
    waiting: float
    transport: float

    @property
    def step(self) -> float:
        return sum(vars(self).values())

    @property
    def share(self) -> float:
        """Of the step that is spent on the link."""
        return self.transport / self.step


@dataclass(frozen=True)
class Run:
    variant: str
    seed: int
    loss: float  # on held-out text, in nats
    split: Split
    wire_bytes: int  # of a rank and step
    rate: float | None  # of the link, in bit/s
    identical: bool


class Clock:
    """Times the parts of each step."""

    def __init__(self, group: TimedGroup) -> None:
        self._group = group
        self._steps: list[list[float]] = []
        self._start = self._mark()
        self._syncing = 0.0

    def _mark(self) -> list[float]:
        return [time.perf_counter(), self._group.waiting, self._group.transport]

    def sync(self, pipe: gx.Pipeline, optimizer: torch.optim.Optimizer) -> gx.SyncReport:
        start = time.perf_counter()
        report = pipe.sync(optimizer)
        self._syncing += time.perf_counter() - start
        return report

    def step(self) -> None:
        """Says that a step is over."""
        mark = self._mark()
        whole, waiting, transport = (x - y for x, y in zip(mark, self._start, strict=True))
        compressing = self._syncing - waiting - transport
        self._steps.append([whole - self._syncing, compressing, waiting, transport])
        self._start, self._syncing = mark, 0.0

    def split(self) -> Split:
        """Without the first steps, which make buffers and shake hands."""
        steps = self._steps[min(3, len(self._steps) - 1) :]
        medians = torch.tensor([statistics.median(part) for part in zip(*steps, strict=True)])
        return Split(*(find_group().all_reduce(medians.double()) / RANKS).tolist())


def network(corpus: Corpus, settings: Settings, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Transformer(len(corpus.vocabulary), settings.width, settings.layers)


def halve(model: nn.Module) -> None:
    """Keeps in bfloat16 what autocast multiplies in bfloat16 anyway: the matrices."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.to(torch.bfloat16)


def batches(corpus: Corpus, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's part of each batch, the same text for every variant."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(
            len(corpus.train) - CONTEXT, (SEQUENCES * RANKS,), generator=generator
        )
        yield windows(corpus.train, starts[dist.get_rank() :: RANKS])


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def train(
    name: str, corpus: Corpus, settings: Settings, seed: int, rate: float | None = None
) -> Run:
    variant, group = VARIANTS[name], TimedGroup(find_group())
    model = network(corpus, settings, seed)
    tx = variant.chain(group)
    if tx.stages[-1].name == "master_weights":
        halve(model)
    pipe = gx.Pipeline(tx, model)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=settings.rate)
    clock, sent = Clock(group), 0
    steps = settings.steps // variant.window
    text = batches(corpus, seed)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = settings.rate * rate_at((step + 1) / steps)
        report = None
        while report is None or not report.ready:
            loss_of(model, *next(text)).backward()
            report = clock.sync(pipe, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        clock.step()
        sent = report.wire_bytes
    return Run(name, seed, held_out(model, corpus), clock.split(), sent, rate, identical(model))


def rate_at(progress: float) -> float:
    """The share of the learning rate: it rises, and then falls to nothing, half a cosine."""
    fallen = max(0.0, progress - WARM_UP) / (1 - WARM_UP)
    return min(progress / WARM_UP, (1 + math.cos(math.pi * fallen)) / 2)


@torch.no_grad()
def held_out(model: nn.Module, corpus: Corpus) -> float:
    last = len(corpus.held_out) - CONTEXT - 1
    starts = torch.arange(HELD_OUT) * last // HELD_OUT
    return loss_of(model, *windows(corpus.held_out, starts)).item()


def identical(model: nn.Module) -> bool:
    """Says whether all ranks hold the same bits."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.view(torch.uint8).numpy().tobytes())
    digests: list[Any] = [None] * RANKS
    dist.all_gather_object(digests, digest.hexdigest())
    return len(set(digests)) == 1


def rank_main(
    rank: int, settings: Settings, hosts: link.Hosts | None, store: str, out: Any
) -> None:
    torch.set_num_threads(1)
    if hosts is None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    else:
        hosts.enter(rank)
    dist.init_process_group("gloo", store, timedelta(seconds=120), world_size=RANKS, rank=rank)
    corpus, rate = Corpus.load(), None
    for seed in range(settings.seeds):
        if hosts is not None:
            rate = find_rate(hosts, corpus, settings, rate)
        for name in VARIANTS:
            run = train(name, corpus, settings, seed, rate)
            if rank == 0:
                out.put(run)
    dist.destroy_process_group()


def find_rate(hosts: link.Hosts, corpus: Corpus, settings: Settings, rate: float | None) -> float:
    """Shapes the link so that a dense step spends `DENSE_SHARE` on it; gives bit/s.

    From what a step takes without its transport follows how long transport is to take. The first
    rate is what the bytes need at least; what there is beside them shows in the next steps.
    """
    probe = replace(settings, steps=settings.probe)
    for _ in range(3):
        run = train(DENSE, corpus, probe, 0)
        wanted = (run.split.step - run.split.transport) * DENSE_SHARE / (1 - DENSE_SHARE)
        bits = 8 * run.wire_bytes
        rate = bits / wanted if rate is None else rate * run.split.transport / wanted
        if dist.get_rank() == 0:
            hosts.shape(rate, BURST)
        dist.barrier()
    return rate


def run_all(settings: Settings, shaped: bool) -> Iterator[Run]:
    """Starts the ranks, and gives what they tell."""
    with ExitStack() as stack:
        hosts = None
        if shaped:
            try:
                hosts = stack.enter_context(link.hosts(RANKS))
            except link.LinkError as error:
                print(f"No shaped link, the ranks talk over loopback: {error}", file=sys.stderr)
        store = Path(stack.enter_context(tempfile.TemporaryDirectory()), "store").as_uri()
        yield from messages_of(rank_main, (settings, hosts, store), RANKS)


@dataclass(frozen=True)
class Summary:
    """The runs of one variant, one a seed, and those of others to compare them with."""

    runs: Sequence[Run]
    peers: Sequence[Run]  # dense, of the same number of steps
    dense: Sequence[Run]  # dense, of the same number of samples

    @property
    def split(self) -> Split:
        """Means over seeds."""
        parts = zip(*(vars(run.split).values() for run in self.runs), strict=True)
        return Split(*map(statistics.fmean, parts))

    @property
    def losses(self) -> list[float]:
        return [run.loss for run in self.runs]

    @property
    def shares(self) -> list[float]:
        """Of a step that is spent on the link, in percent."""
        return [100 * run.split.share for run in self.runs]

    @property
    def against_peers(self) -> list[float]:
        """How much higher the loss is, in percent, after equal steps and samples."""
        return above(self.runs, self.peers)

    @property
    def against_dense(self) -> list[float]:
        """The same, after equal samples, in fewer steps if it accumulates."""
        return above(self.runs, self.dense)

    def row(self) -> list[str]:
        split = self.split
        parts = (split.step, split.computing, split.compressing, split.waiting, split.transport)
        return [
            self.runs[0].variant,
            *(f"{1000 * part:.1f}" for part in parts),
            f"{spread(self.shares, 2)} %",
            f"{self.runs[0].wire_bytes:,}",
            spread(self.losses, 4),
            f"{statistics.fmean(self.against_peers):+.2f} %",
            f"{statistics.fmean(self.against_dense):+.2f} %",
        ]

    def to_json(self) -> dict[str, Any]:
        lists = ("losses", "shares", "against_peers", "against_dense")
        return {
            **{name: getattr(self, name) for name in lists},
            "splits": [asdict(run.split) for run in self.runs],
            "wire_bytes": self.runs[0].wire_bytes,
            "rates": [run.rate for run in self.runs],
        }


def above(runs: Sequence[Run], others: Sequence[Run]) -> list[float]:
    return [100 * (x.loss / y.loss - 1) for x, y in zip(runs, others, strict=True)]


def spread(values: Sequence[float], digits: int) -> str:
    """Mean and, of several values, standard deviation."""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{deviation}"


def summarise(runs: Sequence[Run]) -> dict[str, Summary]:
    of = {name: [run for run in runs if run.variant == name] for name in VARIANTS}
    return {
        name: Summary(of[name], of[variant.against], of[DENSE])
        for name, variant in VARIANTS.items()
    }


HEADINGS = (
    "a step, in ms",
    "all",
    "computing",
    "compressing",
    "waiting",
    "transport",
    "on the link",
    "bytes",
    "loss",
    "equal steps",
    "equal samples",
)


def report(settings: Settings, runs: Sequence[Run]) -> None:
    summaries = summarise(runs)
    print_table(HEADINGS, [summary.row() for summary in summaries.values()])
    print(
        "Computing is forward, backward and optimizer; compressing all that sync() does but for "
        "waiting for the\nother rank and for transport: adding up, feedback, choosing, encoding, "
        "decoding. Medians over steps.\nThe loss is on held-out text, and compared with dense: "
        "after equal steps and samples, and after equal\nsamples in steps of one batch each."
    )
    rates = [run.rate for run in runs if run.rate is not None]
    where = f"link of {statistics.fmean(rates) / 1e6:.0f} Mbit/s" if rates else "loopback, unshaped"
    print(
        f"{where}; ranks: {RANKS}, seeds: {settings.seeds}, batches a run: {settings.steps}; "
        f"replicas identical: {'yes' if all(run.identical for run in runs) else 'NO'}"
    )
    if rates:
        print(verdicts(summaries))


def verdicts(summaries: dict[str, Summary]) -> str:
    """What was to be shown, and whether it was."""
    shares = {name: statistics.fmean(summary.shares) for name, summary in summaries.items()}
    lines = [f"communication, dense: {shares[DENSE]:.1f} % of a step (wanted: 40 %)"]
    for name, most in ((COMPRESSED, 10.0), (COMPRESSED_WINDOW, 2.0)):
        kept = "yes" if shares[name] <= most else "NO"
        lines.append(f"communication, {name}: {shares[name]:.2f} %; at most {most:.0f} %: {kept}")
        off = summaries[name].against_peers
        kept = "yes" if max(off) <= 1 else "NO"
        found = ", ".join(f"{x:+.2f} %" for x in off)
        lines.append(f"loss, {name}, against dense: {found}; at most 1 % more: {kept}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    most = "batches a run, whatever is accumulated (2,000; with --short 64)"
    add("--steps", type=whole_number(2 * WINDOW), help=most)
    add("--seeds", type=whole_number(1), help="runs of each variant (3; with --short 1)")
    add("--rate", type=float, help="of plain SGD (0.1; with --short 1)")
    add("--short", action="store_true", help="a small network for a moment: for tests")
    add("--loopback", action="store_true", help="no shaped link, even as root")
    add("--json", type=file_to_write, metavar="FILE", help="write all results to FILE")
    options = parser.parse_args()
    if options.rate is not None and not 0 < options.rate < math.inf:
        parser.error(f"argument --rate: {options.rate} is no rate over 0")
    # A rate so low that no run oscillates: at a rate of 1 the loss of one chain differs by some
    # percent between seeds, and a comparison says nothing.
    full = Settings(2000, 3, 64, 2, 100, 0.1)
    usual = Settings(64, 1, 32, 1, 8, 1.0) if options.short else full
    settings = replace(
        usual,
        # Whole windows, so that all see as many batches.
        steps=(options.steps or usual.steps) // WINDOW * WINDOW,
        seeds=options.seeds or usual.seeds,
        rate=options.rate or usual.rate,
    )
    # So that what is begun is also ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    runs = []
    for run in run_all(settings, shaped=not options.loopback):
        runs.append(run)
        found = f"loss {run.loss:.4f}, {100 * run.split.share:.2f} % on the link"
        print(f"{run.variant}, seed {run.seed + 1}: {found}", file=sys.stderr)
    report(settings, runs)
    if options.json is not None:
        results = {name: summary.to_json() for name, summary in summarise(runs).items()}
        options.json.write_text(json.dumps({**vars(settings), "variants": results}, indent=2))
    return 0 if all(run.identical for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
