"""What happens to training runs in ``bench soak``: all of it follows from a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "conv.weight": ((8, 3, 3, 3), torch.float32),
    "bn.weight": ((8,), torch.float32),
    "head.weight": ((40, 25), torch.float32),
    "head.bias": ((40,), torch.float32),
    "scalar": ((), torch.float32),
    "wide": ((30,), torch.float64),
    "half": ((7, 11), torch.bfloat16),
}
ALWAYS = "head.weight"  # has a gradient on every rank, so that every good step has a result
BAD = 0.01  # of the steps of a rank
ABSENT = 0.03  # of the leaves of a rank
ABSENT_EVERYWHERE = 0.02
LATE = 0.005
LATEST = 0.03  # seconds
RESCALED = 0.05
EXPONENTS = range(-4, 17)  # of two, for loss scales
LIFE = 2000  # steps, about
EPISODE = 50


@dataclass(frozen=True)
class Moment:
    """One step on one rank.

    Attributes:
        bad: the leaf whose gradient is not finite; None if all are.
        value: what stands in it.
        absent: the leaves that have no gradient.
        late: seconds that the rank comes late.
    """

    bad: str | None
    value: float
    absent: frozenset[str]
    late: float


@dataclass(frozen=True)
class Episode:
    """Steps of one chain between two restarts.

    Attributes:
        chain: which one.
        steps: how many.
        anew: whether ranks meet in a process group of its own.
        flush: whether all that is held back is brought out at the end.
    """

    chain: int
    steps: int
    anew: bool
    flush: bool


@dataclass(frozen=True)
class Life:
    """What processes do from their start to their end.

    Attributes:
        ranks: how many there are.
        episodes: one after the other; each chain has its turn in each round.
    """

    ranks: int
    episodes: tuple[Episode, ...]


def lives_of(seed: int, steps: int, ranks: int, chains: int) -> list[Life]:
    """So many steps, cut up: all chains in turn, and several processes after one another.

    At least one life has another number of ranks, if there are more than two.

    Example:
        >>> lives = lives_of(0, 100, 3, 2)
        >>> [life.ranks for life in lives], sum(e.steps for life in lives for e in life.episodes)
        ([3, 2], 100)
    """
    drawn = random.Random(f"{seed} lives")
    count = max(2, round(steps / LIFE))
    lives = []
    for number in range(count):
        own = steps * (number + 1) // count - steps * number // count
        fewer = number == 1 or (number > 2 and drawn.random() < 0.3)
        rounds = max(1, round(own / (chains * EPISODE)))
        lengths = _lengths(drawn, own, rounds * chains)
        episodes = [
            Episode(i % chains, length, drawn.random() < 0.5, i >= (rounds - 1) * chains)
            for i, length in enumerate(lengths)
        ]
        lives.append(Life(max(2, ranks - fewer), tuple(episodes)))
    return lives


def _lengths(drawn: random.Random, total: int, count: int) -> list[int]:
    """A number as so many addends, each between a half and one and a half of the mean, or so."""
    ends = [total * (i + 1) // count for i in range(count)]
    room = total // (4 * count)
    ends = [end + drawn.randint(-room, room) for end in ends[:-1]] + [total]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def moment(seed: int, chain: int, step: int, rank: int) -> Moment:
    """What happens to a rank in a step."""
    everywhere = random.Random(f"{seed} {chain} {step}")
    gone = {path for path in SHAPES if everywhere.random() < ABSENT_EVERYWHERE}
    drawn = random.Random(f"{seed} {chain} {step} {rank}")
    gone |= {path for path in SHAPES if drawn.random() < ABSENT}
    absent = frozenset(gone - {ALWAYS})
    there = [path for path in SHAPES if path not in absent]
    bad = drawn.choice(there) if drawn.random() < BAD else None
    value = drawn.choice([math.inf, -math.inf, math.nan])
    late = drawn.uniform(0, LATEST) if drawn.random() < LATE else 0.0
    return Moment(bad, value, absent, late)


def loss_scale(seed: int, chain: int, step: int) -> float:
    """What the loss is multiplied by in a step; it changes now and then."""
    while step and random.Random(f"{seed} {chain} {step} scale").random() >= RESCALED:
        step -= 1
    return 2.0 ** random.Random(f"{seed} {chain} {step} exponent").choice(EXPONENTS)


def gradients(seed: int, chain: int, step: int, rank: int) -> dict[str, torch.Tensor]:
    """The true gradients of a rank, by path: finite, and there for every leaf."""
    drawn = random.Random(f"{seed} {chain} {step} {rank} gradients")
    generator = torch.Generator().manual_seed(drawn.getrandbits(62))
    size = 10 ** drawn.uniform(-2, 1)
    return {
        path: size * torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
        for path, (shape, dtype) in SHAPES.items()
    }


def parameters(seed: int) -> dict[str, torch.Tensor]:
    """Where training starts, by path."""
    generator = torch.Generator().manual_seed(seed)
    return {
        path: torch.randn(shape, generator=generator).to(dtype)
        for path, (shape, dtype) in SHAPES.items()
    }


def moments(seed: int, chain: int, step: int, ranks: int) -> Sequence[Moment]:
    """What happens to all ranks in a step."""
    return [moment(seed, chain, step, rank) for rank in range(ranks)]
