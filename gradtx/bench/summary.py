"""What the runs of one chain come to, over all seeds, and against the dense ones."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from gradtx.bench.arguments import chain_from
from gradtx.bench.training import Record


@dataclass(frozen=True)
class Summary:
    """The runs of one chain; those of the dense one, to compare with.

    Attributes:
        stages: of the chain, but for the exchange.
        runs: one for each seed.
        dense: the runs of ``allreduce()`` alone.
    """

    stages: str
    runs: Sequence[Record]
    dense: Sequence[Record]

    @property
    def losses(self) -> list[float]:
        """On the held-out data, at the end of each run, in nats."""
        return [run.loss[-1] for run in self.runs]

    @property
    def accuracies(self) -> list[float]:
        """On the held-out data, at the end of each run, in percent."""
        return [run.accuracy[-1] for run in self.runs]

    @property
    def loss_difference(self) -> Difference:
        """How much more the loss is than that of the dense runs."""
        return Difference.of(self.losses, [run.loss[-1] for run in self.dense])

    @property
    def accuracy_difference(self) -> Difference:
        """How many more percent are right than in the dense runs."""
        return Difference.of(self.accuracies, [run.accuracy[-1] for run in self.dense])

    @property
    def wire_bytes(self) -> float:
        """What rank 0 put on the link in a step, mean over all steps."""
        return statistics.fmean(run.wire_bytes[-1] / run.job.steps for run in self.runs)

    @property
    def dense_bytes(self) -> float:
        """What a dense FP32 ring all-reduce would have put there."""
        return statistics.fmean(run.dense_bytes / run.job.steps for run in self.runs)

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than a dense FP32 ring all-reduce."""
        return self.dense_bytes / self.wire_bytes

    @property
    def rise(self) -> float:
        """By how much the training loss of a run rose at most over what it had been, mean."""
        return statistics.fmean(largest_rise(run.train_loss) for run in self.runs)

    @property
    def seconds(self) -> float:
        """Of a run, mean."""
        return statistics.fmean(run.seconds for run in self.runs)

    def losses_at(self, step: int) -> list[float]:
        """The held-out loss of each run at the last evaluation up to a step.

        Raises:
            ValueError: if there is none.
        """
        points = self.runs[0].job.points
        if step < points[0]:
            raise ValueError(f"no run is evaluated before step {points[0]}, got {step}")
        place = max(i for i, point in enumerate(points) if point <= step)
        return [run.loss[place] for run in self.runs]

    def steps_to(self, target: float) -> list[int | None]:
        """The step at which each run's held-out loss is first found at most a target, or None."""
        return [
            next((step for step, loss in found if loss <= target), None)
            for found in (zip(run.job.points, run.loss, strict=True) for run in self.runs)
        ]

    def to_json(self) -> dict[str, Any]:
        """All numbers, and the curves as means over seeds; null for what is not finite."""
        return {
            "stages": self.stages,
            "chain": self.runs[0].job.chain,
            "learning_rate": self.runs[0].learning_rate,
            "seeds": [run.job.seed for run in self.runs],
            "losses": [_finite(x) for x in self.losses],
            "accuracies": [_finite(x) for x in self.accuracies],
            "loss_difference": self.loss_difference.to_json(),
            "accuracy_difference": self.accuracy_difference.to_json(),
            "wire_bytes": self.wire_bytes,
            "dense_bytes": self.dense_bytes,
            "largest_rise": _finite(self.rise),
            "applied": [run.applied for run in self.runs],
            "skipped": [run.skipped for run in self.runs],
            "seconds": self.seconds,
            "steps": self.runs[0].job.points,
            **{
                f"mean_{name}": [_finite(x) for x in mean_curve(self.runs, name)] for name in CURVES
            },
        }


CURVES = ("train_loss", "loss", "accuracy", "wire_bytes")


def mean_curve(runs: Sequence[Record], name: str) -> list[float]:
    """One of `CURVES`, mean over runs, at each point."""
    return [statistics.fmean(x) for x in zip(*(getattr(run, name) for run in runs), strict=True)]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class Difference:
    """Of two means.

    Attributes:
        value: the first minus the second.
        error: its standard error, from the spread of both; NaN with fewer than two runs of either.
    """

    value: float
    error: float

    @classmethod
    def of(cls, ours: Sequence[float], others: Sequence[float]) -> Difference:
        """The difference of two samples' means, with Welch's standard error.

        Example:
            >>> Difference.of([3.0, 5.0], [1.0, 1.0])
            Difference(value=3.0, error=1.0)
        """
        value = statistics.fmean(ours) - statistics.fmean(others)
        if min(len(ours), len(others)) < 2 or not math.isfinite(value):
            return cls(value, math.nan)
        squares = (statistics.variance(sample) / len(sample) for sample in (ours, others))
        return cls(value, math.sqrt(sum(squares)))

    @property
    def errors(self) -> float:
        """The value in units of its standard error; NaN where that is unknown or zero."""
        return self.value / self.error if self.error else math.nan

    def to_json(self) -> dict[str, float | None]:
        """Plain numbers."""
        parts = {"value": self.value, "standard_error": self.error, "errors": self.errors}
        return {name: _finite(part) for name, part in parts.items()}


def largest_rise(losses: Sequence[float]) -> float:
    """By how much a curve is at most over its lowest point so far.

    Example:
        >>> largest_rise([3.0, 1.0, 2.5, 2.0])
        1.5
    """
    if not all(map(math.isfinite, losses)):
        return math.nan
    return max(loss - lowest for loss, lowest in zip(losses, accumulate(losses, min), strict=True))


def summarise(records: Sequence[Record], chains: Sequence[str]) -> list[Summary]:
    """Sums up one task's runs by chain, in the order of the chains.

    Args:
        records: of one task, with those of all chains.
        chains: as code; the first one is dense.
    """
    of = {chain: [r for r in records if r.job.chain == chain] for chain in chains}
    return [Summary(stages_of(chain), runs, of[chains[0]]) for chain, runs in of.items()]


def stages_of(chain: str) -> str:
    """A chain's stages, without the exchange that ends all of them.

    Example:
        >>> stages_of("gx.chain(gx.topk(0.01), gx.ef(), gx.allreduce())")
        'topk(0.01), ef()'
        >>> stages_of("gx.chain(gx.allreduce())")
        'dense'
    """
    codes = [stage.code().removeprefix("gx.") for stage in chain_from(chain).stages]
    if codes[-1] == "allreduce()":
        del codes[-1]
    return ", ".join(codes) or "dense"
