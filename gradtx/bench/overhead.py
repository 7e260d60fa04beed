"""What many small leaves cost: a chain of gradtx and one of torchopt on the same leaves."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gradtx.bench.arguments import chain_from
from gradtx.bench.shapes import shapes_of
from gradtx.interop.optional import require

CHAIN = "chain(unscale(), topk(0.01), ef(), allreduce())"
LOSS_SCALE = 1024.0
WARM_UP = 3


@dataclass(frozen=True)
class Overhead:
    """What an update of many leaves takes, on one rank.

    Attributes:
        names: of both chains, as code, ours first.
        seconds: of each of them, round by round.
    """

    names: tuple[str, str]
    seconds: tuple[list[float], list[float]]

    @property
    def ratio(self) -> float:
        """How many times as long ours takes; median of the ratios of each round."""
        return statistics.median(own / other for own, other in zip(*self.seconds, strict=True))


def measure(rounds: int, model: str = "leaves") -> Overhead:
    """Updates with both chains in turn, functionally: nothing is written in place.

    Args:
        rounds: how many times each.
        model: as for `shapes_of`.

    Raises:
        ImportError: without torchopt.
    """
    torchopt = require("torchopt", "bench sync --overhead")
    generator = torch.Generator().manual_seed(0)
    grads = {
        f"{i:04}": torch.randn(shape, generator=generator)
        for i, shape in enumerate(shapes_of(model))
    }
    own = chain_from(CHAIN)
    # Three stages that look at every value, one of them with a state as large as the gradient.
    stages = "clip_grad_norm(1.0), trace(0.9), scale(-0.1)"
    transform = torchopt.transform
    other = torchopt.chain(
        torchopt.clip_grad_norm(1.0), transform.trace(0.9), transform.scale(-0.1)
    )
    states = [own.init(grads), other.init(grads)]

    def update_own() -> None:
        states[0] = own.update(grads, states[0], loss_scale=LOSS_SCALE)[1]

    def update_other() -> None:
        states[1] = other.update(grads, states[1], inplace=False)[1]

    seconds: tuple[list[float], list[float]] = ([], [])
    with torch.no_grad():
        for number in range(-WARM_UP, rounds):
            for update, taken in zip((update_own, update_other), seconds, strict=True):
                once = _seconds(update)
                if number >= 0:
                    taken.append(once)
    return Overhead((own.code().replace("gx.", ""), f"torchopt.chain({stages})"), seconds)


def _seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
