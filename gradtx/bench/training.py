"""One training run of ``bench convergence``, and what it came to."""

from __future__ import annotations

import copy
import hashlib
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import nn

import gradtx as gx
from gradtx.bench.arguments import chain_from
from gradtx.bench.tasks import TASKS, Task, evaluate, loss_of
from gradtx.core.stage import Kind
from gradtx.testing import run_ranks

POINTS = 50  # at which a run is evaluated
WARM_UP = 100  # steps, over which the learning rate rises
LOSS_SCALE = 1024.0  # for chains with unscale()
PATIENCE = 600.0  # seconds that ranks wait for one that evaluates, or for a busy machine


@dataclass(frozen=True)
class Job:
    """A run to do.

    Attributes:
        task: one of `TASKS`.
        chain: how gradients are synchronised, as code.
        seed: of the initial weights and of the batches.
        steps: how many batches are seen.
        ranks: how many threads share each batch.
        factor: what the learning rate is multiplied by.
    """

    task: str
    chain: str
    seed: int
    steps: int
    ranks: int
    factor: float = 1.0

    @property
    def points(self) -> list[int]:
        """The steps after which the run is evaluated; the last one is among them.

        Example:
            >>> Job("digits", "allreduce()", 0, 130, 2).points[-3:]
            [126, 128, 130]
        """
        every = max(1, self.steps // POINTS)
        return [*range(every, self.steps, every), self.steps]


@dataclass(frozen=True)
class Record:
    """A run that is done. What is not finite is NaN.

    Attributes:
        job: what was to do.
        version: of gradtx.
        learning_rate: after the warm-up.
        train_loss: on this run's own batches, mean since the point before, for each point.
        loss: on the held-out data, in nats, at each point.
        accuracy: on the held-out data, in percent, at each point.
        wire_bytes: that rank 0 had put on the link at each point.
        dense_bytes: that a dense FP32 ring all-reduce would have put there by the end.
        applied: how many steps the optimizer took.
        skipped: how many steps were bad.
        seconds: for all of it.
    """

    job: Job
    version: str
    learning_rate: float
    train_loss: list[float]
    loss: list[float]
    accuracy: list[float]
    wire_bytes: list[int]
    dense_bytes: int
    applied: int
    skipped: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Plain values, those of the job first; null for what is not finite."""
        plain = asdict(self)
        return {key: _nulled(value) for key, value in {**plain.pop("job"), **plain}.items()}

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Record:
        """The record that `to_json` gave.

        Raises:
            ValueError: if it is none.
        """
        expected = [f.name for part in (Job, cls) for f in fields(part) if f.name != "job"]
        if not isinstance(plain, dict) or sorted(plain) != sorted(expected):
            raise ValueError(f"expected an object of {', '.join(expected)}")
        for part in (*fields(Job), *fields(cls)):
            if part.name != "job" and not _is_of(plain[part.name], str(part.type)):
                raise ValueError(f"{part.name} is no {part.type}")
        job = Job(**{f.name: plain[f.name] for f in fields(Job)})
        rest = {f.name: plain[f.name] for f in fields(cls) if f.name != "job"}
        curves = ("train_loss", "loss", "accuracy")
        return cls(job, **{**rest, **{name: _filled(rest[name]) for name in curves}})


def _nulled(value: Any) -> Any:
    if isinstance(value, list):
        return [_nulled(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_of(value: Any, kind: str) -> bool:
    """Whether a value from JSON is of a type, as it is written in a class; null is a float."""
    if kind.startswith("list["):
        return isinstance(value, list) and all(_is_of(x, kind[5:-1]) for x in value)
    allowed: dict[str, tuple[type, ...]] = {
        "str": (str,),
        "int": (int,),
        "float": (int, float, type(None)),
    }
    return isinstance(value, allowed[kind]) and not isinstance(value, bool)


def _filled(values: list[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def rate_factor(tx: gx.Chain) -> float:
    """What a chain's learning rate is, with that of the dense gradient as 1.

    Nearly all chains train at the dense rate: with error feedback because all is sent in the end,
    unbiased because the mean is right, and without either so that nothing but the feedback differs.
    What hands on something longer than the gradient, or far noisier, needs less:

    - `momentum_correction`: it takes the place of momentum, and a constant gradient makes steps
      :math:`1 / (1 - m)` times as long;
    - ``sign(majority_vote=True)``: it hands on 1 and -1, whatever the gradient;
    - ``random_k(unbiased=True)``: the variance that it adds is :math:`n / k - 1` times the
      gradient's square;
    - `random_k` with error feedback: a value waits for :math:`n / k` steps in the mean, whatever
      its magnitude, and then comes as the sum of them all.

    Example:
        >>> tx = chain_from("chain(topk(0.01), momentum_correction(0.75), allreduce())")
        >>> rate_factor(tx)
        0.25
    """
    factor = 1.0
    for stage in tx.stages:
        given = stage.hyperparameters
        if stage.name == "momentum_correction":
            factor *= 1 - given["m"]
        if given.get("majority_vote"):
            factor *= 0.025
        if stage.name == "random_k":
            factor *= 0.25
    return factor


def learning_rate(job: Job) -> float:
    """The learning rate of a run, after the warm-up."""
    return TASKS[job.task]().learning_rate * rate_factor(chain_from(job.chain)) * job.factor


def train(job: Job, on_point: Callable[[], None] = lambda: None) -> Record:
    """Trains one network, on as many threads as there are ranks.

    Args:
        job: what to do.
        on_point: called after each evaluation.

    Raises:
        RuntimeError: if the replicas have come apart.
    """
    start = time.perf_counter()
    task, tx = TASKS[job.task](), chain_from(job.chain)
    rate = learning_rate(job)
    torch.manual_seed(job.seed)
    model = task.network()

    def call(rank: int) -> Replica:
        replica = Replica(job, task, copy.deepcopy(model), tx, rate, rank)
        replica.train(on_point)
        return replica

    first, *others = replicas = run_ranks(job.ranks, call, timeout=PATIENCE)
    if any(other.digest != first.digest for other in others):
        raise RuntimeError(f"{job}: the replicas have come apart")
    losses = zip(*(replica.train_loss for replica in replicas), strict=True)
    return Record(
        job,
        gx.__version__,
        rate,
        [statistics.fmean(parts) for parts in losses],
        first.loss,
        first.accuracy,
        first.wire_bytes,
        first.dense_bytes,
        first.applied,
        first.skipped,
        time.perf_counter() - start,
    )


class Replica:
    """A rank's own network, and what became of it.

    Args:
        job: what to do.
        task: what to train on.
        model: the network, for this rank alone.
        tx: how gradients are synchronised.
        rate: the learning rate.
        rank: this rank's number; only rank 0 evaluates.
    """

    def __init__(
        self, job: Job, task: Task, model: nn.Module, tx: gx.Chain, rate: float, rank: int
    ) -> None:
        self._job, self._task, self._model, self._rate, self._rank = job, task, model, rate, rank
        self._pipe = gx.Pipeline(tx, model)
        scaled = any(stage.kind is Kind.UNSCALE for stage in tx.stages)
        self._loss_scale = LOSS_SCALE if scaled else None
        self.train_loss: list[float] = []
        self.loss: list[float] = []
        self.accuracy: list[float] = []
        self.wire_bytes: list[int] = []
        self.dense_bytes = self.applied = self.skipped = 0

    def train(self, on_point: Callable[[], None]) -> None:
        """Takes all steps."""
        torch.set_num_threads(1)  # The number is each thread's own.
        optimizer = torch.optim.SGD(self._model.parameters(), lr=self._rate)
        batches = self._task.batches(self._job.seed, self._rank, self._job.ranks)
        points, losses, sent = set(self._job.points), [], 0
        for step in range(1, self._job.steps + 1):
            optimizer.param_groups[0]["lr"] = self._rate * min(1.0, step / WARM_UP)
            optimizer.zero_grad()
            loss = loss_of(self._model, next(batches))
            (loss * (self._loss_scale or 1.0)).backward()
            report = self._pipe.sync(optimizer, loss_scale=self._loss_scale)
            if report.ready:
                optimizer.step()
            losses.append(loss.item())
            sent += report.wire_bytes
            self.dense_bytes += report.dense_bytes
            self.applied += report.ready
            self.skipped += report.skipped
            if step in points:
                self._record(losses, sent)
                losses.clear()
                if self._rank == 0:
                    on_point()

    def _record(self, losses: list[float], sent: int) -> None:
        self._pipe.sync_buffers()
        self.train_loss.append(statistics.fmean(losses))
        self.wire_bytes.append(sent)
        if self._rank == 0:
            loss, accuracy = evaluate(self._model, self._task.held_out)
            self.loss.append(loss)
            self.accuracy.append(accuracy)

    @property
    def digest(self) -> str:
        """Of all bits in parameters and buffers."""
        found = hashlib.sha256()
        for tensor in self._model.state_dict().values():
            found.update(tensor.numpy().tobytes())
        return found.hexdigest()
