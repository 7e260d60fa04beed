"""What each rank does in ``bench sync``: all methods in turn, again and again."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

import gradtx as gx
from gradtx.bench.arguments import chain_from
from gradtx.bench.collectives import Fit, probed
from gradtx.bench.peers import PEERS, Gradients, Method
from gradtx.bench.resources import PeakMemory, bytes_sent, memory_bandwidth
from gradtx.bench.shapes import shapes_of
from gradtx.bench.summary import stages_of
from gradtx.core.phases import PHASES, PhaseClock
from gradtx.core.stage import Kind

LOSS_SCALE = 1024.0  # for chains with unscale()
WARM_UP = 2  # rounds of each method alone, in which its buffers come about
SHARED_WARM_UP = 1  # round of all methods, as they are measured
KINDS = (*PHASES, "hook")


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        model: as for `shapes_of`.
        chains: as code.
        peers: names in `PEERS`.
        rounds: how many times each.
        interface: whose counters tell what a rank has sent, or None.
        probe: whether to measure the link, which is not known.
    """

    model: str
    chains: tuple[str, ...]
    peers: tuple[str, ...]
    rounds: int
    interface: str | None
    probe: bool

    @property
    def steps(self) -> int:
        """How many texts `measure` yields."""
        methods = len(self.chains) + len(self.peers)
        return methods * (WARM_UP + SHARED_WARM_UP + self.rounds)


@dataclass(frozen=True)
class Round:
    """One synchronisation, as the slowest rank saw it.

    Attributes:
        seconds: from the barrier to the averaged gradients.
        wire_bytes: what a rank was to send, the most of all ranks.
        counted_bytes: what its interface has sent, the most of all ranks; None if there is none.
        phases: seconds on the slowest rank, by the names in `KINDS`.
    """

    seconds: float
    wire_bytes: int
    counted_bytes: int | None
    phases: dict[str, float]


@dataclass(frozen=True)
class Measured:
    """All rounds of one method.

    Attributes:
        name: as in tables.
        code: of a chain; None for a peer.
        feedback: whether it keeps a residual as large as the gradient.
        rounds: in order.
        peak_bytes: by how much memory grew, its state included, the most of all ranks; None where
            the system does not tell.
    """

    name: str
    code: str | None
    feedback: bool
    rounds: list[Round]
    peak_bytes: int | None


@dataclass(frozen=True)
class Results:
    """All that was measured.

    Attributes:
        measured: in the order of the plan, the peers first.
        left_out: why, for each peer that cannot be run here.
        memory_bandwidth: bytes read and written a second, with all ranks at it, the slowest one.
        link: what the link was found to be, or None.
    """

    measured: list[Measured]
    left_out: dict[str, str]
    memory_bandwidth: float
    link: Fit | None


class ChainMethod:
    """A chain in a `Pipeline`.

    Args:
        code: of the chain.
        parameters: whose gradients it synchronises.
    """

    def __init__(self, code: str, parameters: Sequence[torch.Tensor]) -> None:
        tx = chain_from(code)
        self.name = stages_of(tx.code())
        self.feedback = any(stage.kind is Kind.FEEDBACK for stage in tx.stages)
        scaled = any(stage.kind is Kind.UNSCALE and not stage.stateful for stage in tx.stages)
        self._loss_scale = LOSS_SCALE if scaled else None
        self._pipe = gx.Pipeline(tx, {f"{i:04}": p for i, p in enumerate(parameters)})

    def sync(self) -> int:
        """One `Pipeline.sync`."""
        report = self._pipe.sync(loss_scale=self._loss_scale)
        if not report.ready:
            raise RuntimeError(f"{self.name}: no gradients to step with: {report}")
        return report.wire_bytes


def measure(plan: Plan) -> Generator[str | Results, None, None]:
    """Measures on this rank, together with all others.

    Yields:
        A text after each synchronisation, and the results at the end.
    """
    rank = dist.get_rank()
    gradients = Gradients(shapes_of(plan.model), rank)
    dist.barrier()  # so that all copy at once, as they synchronise at once
    bandwidth = _least(memory_bandwidth(gradients.values))
    found = probed() if plan.probe else None
    bench = _Bench(gradients, plan.interface)
    left_out: dict[str, str] = {}
    for name in plan.peers:
        try:
            yield from bench.add(partial(PEERS[name], gradients), None)
        except RuntimeError as error:
            # Such as a dtype that this torch's gloo does not sum: all ranks find that alike.
            if not bench.lanes:
                raise
            left_out[name] = str(error).split("\n")[0]
    for code in plan.chains:
        yield from bench.add(partial(ChainMethod, code, gradients.parameters), code)
    for number in range(-SHARED_WARM_UP, plan.rounds):
        for lane in bench.lanes:
            done = bench.run(lane.method)
            if number >= 0:
                lane.rounds.append(done)
            where = f"round {number + 1} of {plan.rounds}" if number >= 0 else "warming up"
            yield f"{where}: {lane.method.name}"
    yield Results([lane.measured for lane in bench.lanes], left_out, bandwidth, found)


def _least(value: float) -> float:
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MIN)
    return float(tensor)


def _of_all(values: Sequence[float]) -> torch.Tensor:
    """What each rank has, in rank order: FP64 ``[ranks, n]``."""
    own = torch.tensor(values, dtype=torch.float64)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return torch.stack(found)


@dataclass
class _Lane:
    """A method on its way, and what has come of it so far."""

    method: Method
    code: str | None
    peak_bytes: int | None = None
    rounds: list[Round] = field(default_factory=list)

    @property
    def measured(self) -> Measured:
        method = self.method
        return Measured(method.name, self.code, method.feedback, self.rounds, self.peak_bytes)


class _Bench:
    """All methods on this rank, over the same gradients."""

    def __init__(self, gradients: Gradients, interface: str | None) -> None:
        self._gradients, self._interface, self._count = gradients, interface, 0
        self.lanes: list[_Lane] = []

    def add(self, make: Callable[[], Method], code: str | None) -> Generator[str, None, None]:
        """Makes a method, and runs it for the first times."""
        memory = PeakMemory()
        lane = _Lane(make(), code)
        # Making a Pipeline broadcasts all parameters, which is no part of a step.
        memory.restart()
        for _ in range(WARM_UP):
            self.run(lane.method)
            yield f"warming up: {lane.method.name}"
        growth = memory.growth()
        most = int(_of_all([-1 if growth is None else growth]).max())
        lane.peak_bytes = most if most >= 0 else None
        self.lanes.append(lane)

    def run(self, method: Method) -> Round:
        """Synchronises new gradients once."""
        self._gradients.refresh(self._count)
        self._count += 1
        clock = PhaseClock()
        dist.barrier()
        before = self._sent()
        start = time.perf_counter()
        with torch.no_grad(), clock.running():
            wire_bytes = method.sync()
        seconds = time.perf_counter() - start
        # What is still on its way is there before what the others say here.
        dist.barrier()
        counted = self._sent() - before
        phases = [clock.seconds.get(kind, 0.0) for kind in KINDS]
        told = _of_all([seconds, wire_bytes, counted, *phases])
        slowest = told[told[:, 0].argmax()].tolist()
        return Round(
            slowest[0],
            int(told[:, 1].max()),
            None if self._interface is None else int(told[:, 2].max()),
            dict(zip(KINDS, slowest[3:], strict=True)),
        )

    def _sent(self) -> int:
        return 0 if self._interface is None else bytes_sent(self._interface)
