"""Ranks to measure with: processes on this machine, or those that a launcher has started.

As root on Linux each process is a host of its own, and the links between them are shaped; else they
talk over loopback. Under ``torchrun`` each process is one rank, and the link is what is there.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradtx.bench import link
from gradtx.bench.arguments import whole_number
from gradtx.bench.processes import messages_of
from gradtx.bench.progress import progress

USUAL_RANKS = 2
USUAL_LINK = "1gbit"
LOOPBACK = "loopback"
UNSAID = 0.0  # the rate where none is given
# No packet is split in software, as a smaller one would, and little of a small message is hidden.
BURST = 72 * 1024
PATIENCE = 600.0  # seconds that a rank waits for another one in a collective
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}

Work = Callable[..., Generator[Any, None, None]]


@dataclass(frozen=True)
class Place:
    """Where ranks run.

    Attributes:
        ranks: how many.
        rate: of each link, both ways, in bit/s of Ethernet frames; None if it is not shaped.
        launched: this process is one of the ranks, started by a launcher.
        limit: seconds that all of it may take; what a launcher has started is its business.
    """

    ranks: int
    rate: float | None = None
    launched: bool = False
    limit: float = 3600.0

    def __str__(self) -> str:
        if self.launched:
            return f"{self.ranks} ranks of a launcher, unshaped"
        where = "over loopback" if self.rate is None else f"on links of {in_bits(self.rate)}"
        return f"{self.ranks} ranks {where}"

    @property
    def interface(self) -> str | None:
        """The interface that carries what one rank sends, and nothing else; None if none does."""
        if not self.launched:
            return None if self.rate is None else link.INTERFACE
        alone = os.environ.get("LOCAL_WORLD_SIZE") == "1"
        return os.environ.get("GLOO_SOCKET_IFNAME") if alone else None

    @property
    def speaks(self) -> bool:
        """Whether this process is the one that prints."""
        return not self.launched or os.environ["RANK"] == "0"


def in_bits(rate: float) -> str:
    """A rate in words.

    Example:
        >>> in_bits(2.5e9), in_bits(1e5)
        ('2.5 Gbit/s', '0.1 Mbit/s')
    """
    return f"{rate / 1e9:.4g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:.4g} Mbit/s"


def rate_of(text: str) -> float | None:
    """An argparse type: bit/s, such as ``"1gbit"``; None for ``"loopback"``.

    Example:
        >>> rate_of("2.5gbit")
        2500000000.0
    """
    if text == LOOPBACK:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text, re.ASCII)
    if found is None or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(
            f"{text}: expected {LOOPBACK}, or a rate such as 100mbit, 1gbit or 2.5gbit"
        )
    return float(found[1]) * UNITS[found[2]]


def add_place_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options that `find_place` reads."""
    add = parser.add_argument
    add("--ranks", type=whole_number(2, 64), help="processes (2; under torchrun, all that it has)")
    add(
        "--link",
        type=rate_of,
        default=UNSAID,
        metavar="RATE",
        help="such as 100mbit or 1gbit: each rank is a host in a network namespace of its own, "
        "whose link tc shapes to that rate; needs Linux, root and iproute2. Or loopback. "
        f"({USUAL_LINK} where that can be had, else {LOOPBACK}; not under torchrun)",
    )
    add(
        "--limit",
        type=whole_number(1),
        default=3600,
        metavar="SECONDS",
        help="end the ranks if they take longer (3600)",
    )


def find_place(args: argparse.Namespace) -> Place:
    """Where the options say that ranks are to run.

    Raises:
        ValueError: if they contradict what a launcher has started.
        LinkError: if a shaped link is asked for and is not to be had.
    """
    size = os.environ.get("WORLD_SIZE")
    if size is not None and "RANK" in os.environ:
        if args.link != UNSAID:
            raise ValueError("--link: a launcher has started the ranks; their link is not shaped")
        if args.ranks not in (None, int(size)):
            raise ValueError(f"--ranks {args.ranks}: a launcher has started {size} ranks")
        return Place(int(size), launched=True, limit=args.limit)
    ranks = args.ranks or USUAL_RANKS
    rate = rate_of(USUAL_LINK) if args.link == UNSAID else args.link
    try:
        if rate is not None:
            _try(rate)
    except link.LinkError as error:
        if args.link != UNSAID:
            raise
        print(f"No shaped link, the ranks talk over loopback: {error}", file=sys.stderr)
        rate = None
    return Place(ranks, rate, limit=args.limit)


def _try(rate: float) -> None:
    """Refuses, before anything is measured, a link that cannot be had."""
    with unwound(), link.hosts(2) as hosts:
        hosts.shape(rate, BURST)


def told_by(place: Place, work: Work, *arguments: Any) -> Generator[Any, None, None]:
    """Runs a generator on every rank, and hands on what that on rank 0 yields.

    On other ranks that a launcher has started, the same generator is run and nothing is yielded.

    Args:
        place: where.
        work: a generator function at the top level of a module, called on every rank within a
            process group.
        arguments: for it.

    Raises:
        TimeoutError: if the ranks take longer than the place's limit.
        ProcessException: if one of them fails; with its traceback, if it has raised.
        LinkError: if there is no shaped link to be had after all.
    """
    if place.launched:
        yield from _on_this_rank(work, arguments, None, place.speaks)
        return
    with unwound(), _one_thread_each(), ExitStack() as stack:
        hosts = None
        if place.rate is not None:
            hosts = stack.enter_context(link.hosts(place.ranks))
            hosts.shape(place.rate, BURST)
        store = Path(stack.enter_context(tempfile.TemporaryDirectory()), "store").as_uri()
        given = (place, hosts, store, work, arguments)
        with closing(messages_of(_rank_main, given, place.ranks, place.limit)) as messages:
            yield from messages


def results_of(place: Place, steps: int, work: Work, *arguments: Any) -> Any:
    """Runs a generator on every rank, shows the texts that rank 0 yields, and gives what is none.

    Args:
        place: where.
        steps: how many texts there will be.
        work: as for `told_by`; what it yields last are its results.
        arguments: for it.

    Returns:
        The results; None on other ranks of a launcher.

    Raises:
        RuntimeError: if there are none.
        Exception: as `told_by`.
    """
    results = None
    with progress(steps) as show:
        for message in told_by(place, work, *arguments):
            if isinstance(message, str):
                show(message)
            else:
                results = message
    if results is None and place.speaks:
        raise RuntimeError("the ranks have ended without results")
    return results


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Processes that are started now have one torch thread in each of their own threads.

    `torch.set_num_threads` speaks of the thread that calls it alone, and hooks compute in gloo's.
    """
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_THREADS]
        else:
            os.environ[_THREADS] = before


_THREADS = "OMP_NUM_THREADS"


def _rank_main(
    rank: int,
    place: Place,
    hosts: link.Hosts | None,
    store: str,
    work: Work,
    arguments: tuple[Any, ...],
    outbox: Any,
) -> None:
    if hosts is None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    else:
        hosts.enter(rank)
    for message in _on_this_rank(work, arguments, (store, rank, place.ranks), rank == 0):
        outbox.put(message)


def _on_this_rank(
    work: Work, arguments: tuple[Any, ...], given: tuple[str, int, int] | None, speaks: bool
) -> Generator[Any, None, None]:
    torch.set_num_threads(1)
    patience = timedelta(seconds=PATIENCE)
    if given is None:
        dist.init_process_group("gloo", timeout=patience)
    else:
        store, rank, size = given
        dist.init_process_group("gloo", store, patience, world_size=size, rank=rank)
    try:
        for message in work(*arguments):
            if speaks:
                yield message
    finally:
        dist.destroy_process_group()


@contextmanager
def unwound() -> Iterator[None]:
    """Lets this process leave its blocks when it is told to end, rather than end at once."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    try:
        before = {number: signal.signal(number, leave) for number in _ENDING}
    except ValueError:  # not in the main thread: whose signals they are is not for us to say
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
