"""``python -m gradtx bench soak``: thousands of steps in which all goes wrong that may go wrong.

Several chains in turn, each in a `Pipeline` on real processes over gloo: gradients that are not
finite on some rank, leaves without a gradient, loss scales that change, ranks that come late. Every
fifty steps or so the ranks save their states, each its own, and go on from there: in the same
process group, in another one, in other processes, or, resharded, on another number of ranks. All
that happens follows from the seed, so a run that ends in a broken law can be repeated.

Checked are, in every step, that parameters are the same bits on all ranks (law L4), that a step is
good or bad as it ought to be, and that a bad one moves no state but counters (L5); after every
tenth and over all restarts, that no state has anything that is not finite (L5), and that results
and mean residuals add up to the mean gradients (L2), with "error" the largest deviation, as a share
of what rounding is granted. Memory and open files of each process are to be flat, from the second
turn of all chains to the last.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessException

import gradtx as gx
from gradtx.bench.arguments import chain_from, whole_number
from gradtx.bench.faults import Life, lives_of
from gradtx.bench.progress import progress
from gradtx.bench.ranks import Place, told_by
from gradtx.bench.soaking import Broken, Counts, Ended, Task, live
from gradtx.bench.summary import stages_of
from gradtx.bench.tables import print_table
from gradtx.core.chain import Chain
from gradtx.core.errors import ChainOrderError
from gradtx.core.parse import FAILURES
from gradtx.core.stage import Kind
from gradtx.files import file_to_write
from gradtx.state_files import reshard_files

CHAINS = (
    "chain(unscale(), skip_bn(), topk(0.05), ef(), allreduce())",
    "chain(unscale(), sign(), ef(), allreduce())",
    "chain(unscale(), cast('float16'), ef(), allreduce())",
    "chain(unscale(), accumulate(3), topk(0.1, values='float16'), ef(), allreduce())",
    "chain(topk(0.1), ef(), delayed(steps=2), allreduce())",
    "chain(dynamic_loss_scale(), powersgd(1), ef(), allreduce())",
    "chain(topk(0.05), ef(), allreduce(algorithm='sharded', density=0.05))",
)
STEPS, RANKS = 10_000, 3
GROWTH = 8 * 2**20  # bytes of memory that a process may have more at its end
FILES = 0  # and open files


@dataclass(frozen=True)
class Flat:
    """What a process holds at the ends of its episodes.

    Attributes:
        ended: the episodes of one life.
        chains: how many there are: one turn of all.
    """

    ended: Sequence[Ended]
    chains: int

    def growth(self, name: str) -> int | None:
        """How much more there is of `resident` or `files` in the last turn than in the second.

        None if there are fewer than three turns, or the system does not tell.
        """
        values: list[int] = [getattr(each, name) for each in self.ended]
        if len(values) < 3 * self.chains or -1 in values:
            return None
        return max(values[-self.chains :]) - max(values[self.chains : 2 * self.chains])

    def complaint(self) -> str:
        """What is not flat; empty if all is."""
        for name, what, most in (
            ("resident", "bytes of memory", GROWTH),
            ("files", "files", FILES),
        ):
            grown = self.growth(name)
            if grown is not None and grown > most:
                return f"a process has {grown:,} {what} more at its end than after its second turn"
        return ""


@dataclass
class Soaked:
    """What a run came to.

    Attributes:
        counts: for each chain.
        lives: what was done, in order.
        memory: for each life with three turns, by how many bytes processes have grown.
        files: likewise, by how many open files.
        broken: the law that was broken; None if none was.
        complaint: what else was wrong.
        seconds: for all of it.
        episodes: how many came to their end.
    """

    counts: list[Counts]
    lives: list[Life]
    memory: list[int]
    files: list[int]
    broken: Broken | None = None
    complaint: str = ""
    seconds: float = 0.0
    episodes: int = 0

    @property
    def restarts(self) -> int:
        """How often a chain went on from its checkpoints."""
        return max(0, self.episodes - len(self.counts))


def soak(task: Task, lives: Sequence[Life], limit: float) -> Iterator[str | Soaked]:
    """Lets processes live one after the other.

    Args:
        task: what to soak.
        lives: what they do.
        limit: seconds that each of them may take.

    Yields:
        A text after each step; at last, what it came to.

    Raises:
        TimeoutError: if one takes longer.
        ProcessException: if a process fails.
    """
    start, found = time.monotonic(), Soaked([Counts() for _ in task.chains], [], [], [])
    for number, life in enumerate(lives):
        if number and lives[number - 1].ranks != life.ranks:
            reshard(task, life.ranks)
        found.lives.append(life)
        ended: list[Ended] = []
        for message in told_by(Place(life.ranks, limit=limit), live, task, number, life):
            if isinstance(message, Ended):
                add(found.counts[message.chain], message.counts)
                ended.append(message)
                found.episodes += 1
            elif isinstance(message, Broken):
                found.broken = message
            else:
                yield message
        flat = Flat(ended, len(task.chains))
        found.memory += [x for x in [flat.growth("resident")] if x is not None]
        found.files += [x for x in [flat.growth("files")] if x is not None]
        found.complaint = flat.complaint()
        if found.broken is not None or found.complaint:
            break
    found.seconds = time.monotonic() - start
    yield found


def add(total: Counts, more: Counts) -> None:
    """Adds up what has happened to a chain."""
    for name, value in asdict(more).items():
        before = getattr(total, name)
        setattr(total, name, max(before, value) if name == "error" else before + value)


def reshard(task: Task, ranks: int) -> None:
    """Makes the checkpoints of all chains those of another number of ranks."""
    for chain in range(len(task.chains)):
        folder = task.checkpoints(chain)
        aside = folder.with_name(f"{folder.name}_resharded")
        if not folder.exists():
            continue
        reshard_files(sorted(folder.glob("state_*.pt")), ranks, aside)
        for rank in range(ranks):
            shutil.copy(folder / "run_0.pt", aside / f"run_{rank}.pt")
        shutil.rmtree(folder)
        os.replace(aside, folder)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options.

    Args:
        parser: of the subcommand.
    """
    parser.description = __doc__.split("\n\n", 1)[1]
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_ = parser.add_argument
    add_(
        "--chain",
        action="append",
        default=[],
        metavar="CODE",
        help='such as "chain(topk(0.01), ef(), allreduce())"; several if given again, the usual '
        "ones if not given",
    )
    add_("--steps", type=whole_number(1), default=STEPS, help=f"of all chains together ({STEPS})")
    add_("--ranks", type=whole_number(2, 64), default=RANKS, help=f"processes ({RANKS})")
    add_("--seed", type=whole_number(0), default=0, help="of all that happens (0)")
    add_(
        "--limit",
        type=whole_number(1),
        default=3600,
        metavar="SECONDS",
        help="end processes that live longer (3600)",
    )
    add_("--json", type=file_to_write, metavar="FILE", help="write all results to FILE")


def main(args: argparse.Namespace) -> int:
    """Soaks and prints.

    Args:
        args: what `add_arguments` declares.

    Returns:
        The exit status: 0; 1 if something was broken, or a process failed; 2 for unusable
        arguments; 130 when interrupted.
    """
    try:
        chains = tuple(dict.fromkeys(checked(code) for code in args.chain or CHAINS))
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            raise ValueError("it starts and ends processes itself: run it without a launcher")
    except FAILURES as error:
        return complain(error, 2)
    lives = lives_of(args.seed, args.steps, args.ranks, len(chains))
    try:
        with tempfile.TemporaryDirectory() as folder, progress(args.steps) as show:
            for message in soak(Task(chains, args.seed, Path(folder)), lives, args.limit):
                if isinstance(message, str):
                    show(message)
                else:
                    found = message
    except (ProcessException, OSError, RuntimeError, ValueError) as error:
        return complain(f"{error}\n{again(args)}", 1)
    except KeyboardInterrupt:
        return complain("interrupted", 130)
    return report(chains, found, args)


def complain(error: object, status: int) -> int:
    """Says what is wrong, and gives the exit status back."""
    print(f"gradtx bench soak: {error}", file=sys.stderr)
    return status


def again(args: argparse.Namespace) -> str:
    """How to have the same happen again."""
    own = " ".join(f'--chain "{code}"' for code in args.chain)
    return (
        f"again: python -m gradtx bench soak --seed {args.seed} --steps {args.steps} "
        f"--ranks {args.ranks} {own}".rstrip()
    )


def checked(code: str) -> str:
    """A chain's own code, once it has been seen to be one that can be soaked.

    Raises:
        ValueError: naming the chain.
    """
    try:
        tx = chain_from(code)
        gx.Pipeline(tx, {"weight": torch.zeros(2)}).close()
        reason = _unfit(tx)
    except ChainOrderError:
        raise
    except (*FAILURES, RuntimeError) as error:
        raise ValueError(f"--chain {code}: {error}") from error
    if reason:
        raise ValueError(f"--chain {code}: {reason}")
    return tx.code()


def _unfit(tx: Chain) -> str:
    """Why a chain's steps cannot be judged from outside; empty if they can."""
    if not any(s.kind is Kind.UNSCALE or s.lossy or s.stateful for s in tx.stages):
        return "it lets what is not finite through: put unscale() first"
    if any(s.hyperparameters.get("on_bad", "drop") != "drop" for s in tx.stages):
        return "expected accumulate(on_bad='drop'): a window is dropped as a whole"
    return ""


HEADINGS = ("chain", "steps", "bad", "absent", "late", "rescaled", "results", "checks", "error")


def cells(chain: str, counts: Counts) -> list[str]:
    """A row as text."""
    happened = (
        counts.steps,
        counts.bad,
        counts.absent,
        counts.late,
        counts.rescaled,
        counts.results,
        counts.checks,
    )
    error = f"{counts.error:.3f}" if counts.checks else "–"
    return [stages_of(chain), *(f"{number:,}" for number in happened), error]


def report(chains: Sequence[str], found: Soaked, args: argparse.Namespace) -> int:
    """Prints what a run came to, and writes the file; gives the exit status."""
    rows = zip(chains, found.counts, strict=True)
    print_table(HEADINGS, [cells(chain, counts) for chain, counts in rows])
    numbers = [life.ranks for life in found.lives]
    print(
        f"seed {args.seed}; {len(numbers)} sets of processes, of {', '.join(map(str, numbers))} "
        f"ranks; {found.restarts} restarts from checkpoints; {found.seconds:.0f} s"
    )
    if found.memory:
        memory = max(found.memory) / 2**20
        print(f"at most {memory:+.1f} MiB of memory and {max(found.files):+} open files")
    if args.json is not None:
        write_json(args.json, chains, found, args)
    if found.broken is not None:
        broken = found.broken
        return complain(
            f"step {broken.step} of {broken.chain}, rank {broken.rank}: {broken.text}\n"
            f"{again(args)}",
            1,
        )
    return complain(f"{found.complaint}\n{again(args)}", 1) if found.complaint else 0


def write_json(path: Path, chains: Sequence[str], found: Soaked, args: argparse.Namespace) -> None:
    """Writes all results to a file."""
    results: dict[str, Any] = {
        "version": gx.__version__,
        "torch": torch.__version__,
        "seed": args.seed,
        "steps": args.steps,
        "ranks": args.ranks,
        "chains": [
            {"code": chain, **asdict(counts)}
            for chain, counts in zip(chains, found.counts, strict=True)
        ],
        "lives": [{"ranks": life.ranks, "episodes": len(life.episodes)} for life in found.lives],
        "restarts": found.restarts,
        "memory_growth": found.memory,
        "file_growth": found.files,
        "seconds": found.seconds,
        "broken": None if found.broken is None else asdict(found.broken),
        "complaint": found.complaint or None,
    }
    path.write_text(json.dumps(results, indent=2, allow_nan=False) + "\n")
