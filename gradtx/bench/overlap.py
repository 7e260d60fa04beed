"""What of an exchange the backward pass hides: a `Pipeline` with overlap beside one without."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

import gradtx as gx
from gradtx.bench.arguments import chain_from
from gradtx.bench.shapes import shapes_of
from gradtx.bench.summary import stages_of

CHAINS = (
    "chain(allreduce())",
    "chain(cast('float16'), ef(), allreduce())",
    "chain(topk(0.01, values='float16'), ef(), allreduce())",
)
MOST = 1 << 14  # rows of a batch
WARM_UP = 2
STEPS = ("warming up", "finding a batch")


@dataclass(frozen=True)
class Hidden:
    """What one chain came to; all in seconds, on the slowest rank, one for each round.

    Attributes:
        name: as in tables.
        code: the chain.
        batch: rows that the model is given, so that its backward pass takes about as long as the
            exchange.
        backward: the backward pass alone.
        plain: the backward pass, and then the exchange.
        overlapped: both, the one during the other.
    """

    name: str
    code: str
    batch: int
    backward: list[float]
    plain: list[float]
    overlapped: list[float]

    @property
    def exchange(self) -> float:
        """What the exchange adds to a step without overlap; median."""
        pairs = zip(self.plain, self.backward, strict=True)
        return statistics.median(plain - alone for plain, alone in pairs)

    @property
    def share(self) -> float:
        """How much of that overlap takes away; median of the shares of each round."""
        rounds = zip(self.backward, self.plain, self.overlapped, strict=True)
        return statistics.median((p - o) / (p - b) if p > b else 0.0 for b, p, o in rounds)


class _Way:
    """A model of its own, with a pipeline."""

    def __init__(self, code: str, shapes: Sequence[tuple[int, ...]], overlap: bool) -> None:
        torch.manual_seed(0)
        self._width = shapes[0][0]
        layers = [torch.nn.Linear(self._width, self._width, bias=False) for _ in shapes]
        self._model = torch.nn.Sequential(*layers)
        self._pipe = gx.Pipeline(
            chain_from(code), self._model, overlap="always" if overlap else False
        )
        self._generator = torch.Generator().manual_seed(dist.get_rank())

    def step(self, batch: int, *, sync: bool) -> float:
        """Seconds of a backward pass, and of what comes after it, on the slowest rank."""
        loss = self._model(torch.randn(batch, self._width, generator=self._generator))
        loss = loss.pow(2).mean()
        dist.barrier()
        start = time.perf_counter()
        if sync:
            loss.backward()
            self._pipe.sync()
        else:
            with self._pipe.no_sync():
                loss.backward()
        seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        for parameter in self._model.parameters():
            parameter.grad = None
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return float(seconds)


def _fitting(way: _Way) -> int:
    """How many rows make a backward pass as long as the exchange behind it."""

    def taken(batch: int, *, sync: bool) -> float:
        return statistics.median(way.step(batch, sync=sync) for _ in range(3))

    batch = 64
    for _ in range(2):
        backward = taken(batch, sync=False)
        exchange = taken(batch, sync=True) - backward
        batch = max(1, min(MOST, round(batch * exchange / backward)))
    return batch


def layers_of(model: str) -> list[tuple[int, ...]]:
    """The shapes of a model that is matrices, one after the other.

    Args:
        model: as for `shapes_of`.

    Raises:
        ValueError: if they are not square, or of several sizes.

    Example:
        >>> layers_of("2x8x8")
        [(8, 8), (8, 8)]
    """
    shapes = shapes_of(model)
    if len(set(shapes)) != 1 or len(shapes[0]) != 2 or len(set(shapes[0])) != 1:
        raise ValueError(f"--model {model}: with --overlap expected square matrices, 24x1024x1024")
    return list(shapes)


def measure(
    codes: tuple[str, ...], model: str, rounds: int
) -> Generator[str | list[Hidden], None, None]:
    """Measures on this rank, together with all others.

    Args:
        codes: the chains.
        model: as for `layers_of`.
        rounds: how many steps of each kind, in turn.

    Yields:
        A text after each round, `steps` of them, and the results at the end.
    """
    found, shapes = [], layers_of(model)
    for code in codes:
        name = stages_of(chain_from(code).code())
        plain, overlapped = _Way(code, shapes, False), _Way(code, shapes, True)
        for way in (plain, overlapped):
            for _ in range(WARM_UP):
                way.step(8, sync=True)
        yield f"{STEPS[0]}: {name}"
        batch = _fitting(plain)
        yield f"{STEPS[1]}: {name}"
        kinds: dict[str, Callable[[], float]] = {
            "backward": partial(plain.step, batch, sync=False),
            "plain": partial(plain.step, batch, sync=True),
            "overlapped": partial(overlapped.step, batch, sync=True),
        }
        taken: dict[str, list[float]] = {kind: [] for kind in kinds}
        for number in range(rounds):
            for kind, step in kinds.items():
                taken[kind].append(step())
            yield f"round {number + 1} of {rounds}: {name}"
        found.append(Hidden(name, code, batch, **taken))
    yield found


def steps(codes: tuple[str, ...], rounds: int) -> int:
    """How many texts `measure` yields."""
    return len(codes) * (len(STEPS) + rounds)
