"""What has been fed into a chain and what has come out of it: law L2, over a whole run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradtx.bench.faults import SHAPES
from gradtx.core.chain import Chain
from gradtx.core.rules import Flow
from gradtx.core.stage import Kind

Leaves = dict[str, torch.Tensor]
# In 16 bits a result is rounded, which nothing makes good.
PATHS = [path for path, (_, dtype) in SHAPES.items() if dtype != torch.bfloat16]
ULPS = 16  # as in `gradtx.testing.laws`


def zeros() -> Leaves:
    """Nothing, by path, in FP64."""
    return {path: torch.zeros(SHAPES[path][0], dtype=torch.float64) for path in PATHS}


def accounts_for_all(tx: Chain) -> bool:
    """Whether what goes into a chain comes out in the end, and nothing else: a mean over ranks."""
    allowed = {Kind.UNSCALE, Kind.FILTER, Kind.COMPRESSOR, Kind.FEEDBACK, Kind.ACCUMULATE}
    allowed |= {Kind.DELAY, Kind.EXCHANGE}
    flow = Flow(tx.stages)
    feedbacks = flow.where(Kind.FEEDBACK)
    fed_back = {i for f in feedbacks for i in flow.covered(f)}
    return all(
        stage.kind in allowed
        and stage.hyperparameters.get("op", "mean") == "mean"
        and stage.hyperparameters.get("mean", True)
        and (not stage.lossy or i in fed_back)
        for i, stage in enumerate(tx.stages)
    ) and not any("momentum" in tx.stages[f].name for f in feedbacks)


class Ledger:
    """Sums in FP64 of what one chain was given, and of what it gave.

    Args:
        window: how many micro-steps one result is for.
        delay: how many steps later results come.

    Attributes:
        given: by path, the mean over ranks of all gradients that were not dropped.
        got: by path, all results.
        mass: by path, the magnitudes in `given`: what rounding errors are relative to.
        count: micro-steps in the window so far.
    """

    def __init__(self, window: int, delay: int) -> None:
        self._window, self._delay = window, delay
        self.given, self.got, self.mass = zeros(), zeros(), zeros()
        self.count, self._bad = 0, False
        self._within, self._magnitudes = zeros(), zeros()
        self._due: list[bool] = []

    def add(self, gradients: Sequence[Mapping[str, torch.Tensor | None]], bad: bool) -> bool | None:
        """Notes a micro-step.

        Args:
            gradients: of each rank, by path.
            bad: whether one of them is not finite.

        Returns:
            What the step is to say: a result is there, or was dropped; None if none is due.
        """
        self.count, self._bad = self.count + 1, self._bad or bad
        for path in PATHS:
            for found in gradients:
                if (own := found[path]) is not None:
                    self._within[path] += own.double() / len(gradients)
                    self._magnitudes[path] += own.double().abs() / len(gradients)
        return self.close() if self.count == self._window else None

    def close(self) -> bool | None:
        """Ends the window, and says what is due."""
        if self.count:
            for path in PATHS if not self._bad else ():
                self.given[path] += self._within[path] / self.count
                self.mass[path] += self._magnitudes[path] / self.count
            self._due.append(not self._bad)
            self.count, self._bad = 0, False
            self._within, self._magnitudes = zeros(), zeros()
        return self._due.pop(0) if len(self._due) > self._delay else None

    def flushed(self) -> bool:
        """Notes that one more result has been brought out; whether one was due."""
        while self._due:
            if self._due.pop(0):
                return True
        return False

    @property
    def owes(self) -> bool:
        """Whether results are still to come."""
        return any(self._due)

    def take(self, results: Mapping[str, torch.Tensor | None]) -> None:
        """Notes a result."""
        for path in PATHS:
            if (own := results[path]) is not None:
                self.got[path] += own.double()

    def error(self, held: Leaves) -> tuple[float, str]:
        """How far what came out and what is held back are from what went in.

        Args:
            held: by path, what residuals and queues add to the results.

        Returns:
            The largest error, as a share of what law L2 tolerates; and at which leaf it is.
        """
        worst, where = 0.0, ""
        for path in PATHS:
            dtype = torch.float64 if SHAPES[path][1] == torch.float64 else torch.float32
            apart = float((self.got[path] + held[path] - self.given[path]).abs().max())
            most = (self.mass[path] + held[path].abs()).max()
            tolerance = ULPS * torch.finfo(dtype).eps * float(most)
            share = apart / tolerance if tolerance else apart and torch.inf
            # What is not a number is larger than all.
            if not share <= worst:
                worst, where = share, path
        return worst, where

    def state_dict(self) -> dict[str, Any]:
        """All of it, as plain tensors and numbers."""
        return {
            "given": self.given,
            "got": self.got,
            "mass": self.mass,
            "within": self._within,
            "magnitudes": self._magnitudes,
            "count": self.count,
            "bad": self._bad,
            "due": self._due,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Takes up what `state_dict` gave."""
        self.given, self.got, self.mass = saved["given"], saved["got"], saved["mass"]
        self._within, self._magnitudes = saved["within"], saved["magnitudes"]
        self.count, self._bad, self._due = saved["count"], saved["bad"], saved["due"]
