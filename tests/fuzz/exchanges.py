"""Steps of every algorithm, with ranks that send what they like."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import gradtx as gx
from gradtx.core.chain import fail
from gradtx.core.errors import RankMismatchError
from gradtx.core.tree import arrays_in
from gradtx.exchange.group import Group, default_group, find_group
from gradtx.testing import run_ranks
from gradtx.wire import WireFormatError

from .replay import Recorder, Replay, SilentError
from .target import Target, target

SHAPES = {"w": (12, 9), "b": (7,), "empty": (0, 3), "scalar": ()}


def gradients(rank: int, step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    found = {key: torch.randn(shape, generator=generator) for key, shape in SHAPES.items()}
    found["half"] = torch.randn(20, generator=generator).half()
    found["d"] = torch.randn(30, generator=generator, dtype=torch.float64)
    return {**found, "b": None} if rank == 1 else found


def with_rows(rank: int, step: int) -> dict[str, Any]:
    """Gradients of tables, of which a rank has some rows, or none."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    found: dict[str, Any] = {"w": torch.randn(5, generator=generator), "absent": None}
    for key, dtype in (("t", torch.float32), ("d", torch.float64)):
        rows = torch.randint(0, 9, (1, 4 - rank), generator=generator)
        values = torch.randn((4 - rank, 3), generator=generator, dtype=dtype)
        found[key] = torch.sparse_coo_tensor(rows, values, (9, 3), check_invariants=True)
    return {**found, "absent": None if rank else found["t"]}


@dataclass(frozen=True)
class Case:
    """A step of a chain on one of several ranks.

    Attributes:
        make: the chain, for this rank's group.
        rank: which rank is given what others have chosen.
        size: how many there are.
        before: how many steps are made before this one.
        extra: for `update`.
        gated: whether what is not finite may not come out.
        gradients: of a rank and a step; those of rank 0 are all there.
    """

    make: Callable[[Group], gx.Chain]
    rank: int = 0
    size: int = 2
    before: int = 0
    extra: tuple[tuple[str, Any], ...] = ()
    gated: bool = True
    gradients: Callable[[int, int], dict[str, Any]] = gradients

    def steps(self, group: Group) -> tuple[gx.Chain, Any]:
        """The chain and its state before the step, on one rank."""
        tx = self.make(group)
        state = tx.init(self.gradients(0, 0))
        for number in range(self.before):
            _, state = tx.update(self.gradients(group.rank, number), state, **dict(self.extra))
        return tx, state

    def recorded(self) -> "Recorded":
        """What the others send where all is well."""

        def one(rank: int) -> Any:
            group = Recorder(find_group())
            with default_group(group):
                tx, state = self.steps(group)
                # A first time, for what is agreed on in the first step alone.
                tx.update(self.gradients(rank, self.before), state, **dict(self.extra))
                group.heard.clear()
                tx.update(self.gradients(rank, self.before), state, **dict(self.extra))
            return Recorded(self, state, group.agreements, bytes(group.heard))

        return run_ranks(self.size, one)[self.rank]


@dataclass(frozen=True)
class Recorded:
    """A case, and what was heard in it."""

    case: Case
    state: Any
    agreements: dict[Any, Any]
    heard: bytes

    def failed(self, data: bytes) -> None:
        """The step of a rank that has failed, and reads on so that others hear of it."""
        group = Replay(self.case.rank, self.case.size, data)
        group.agreements = dict(self.agreements)
        with default_group(group):
            fail(self.case.make(group), self.state, ValueError("of its own"))

    def replay(self, data: bytes) -> None:
        """The step again, with other bytes; either it raises, or what comes is in order."""
        group = Replay(self.case.rank, self.case.size, data)
        group.agreements = dict(self.agreements)
        own = self.case.gradients(self.case.rank, self.case.before)
        with default_group(group):
            tx = self.case.make(group)
            try:
                updates, state = tx.update(own, self.state, **dict(self.case.extra))
            except (RankMismatchError, WireFormatError, SilentError):
                return
        for leaf in (*(arrays_in(updates) if self.case.gated else ()), *arrays_in(state)):
            leaf = leaf.to_dense() if leaf.is_sparse else leaf
            assert not leaf.is_floating_point() or bool(leaf.isfinite().all())
        for key, like in self.case.gradients(0, 0).items():
            assert updates[key] is None or updates[key].shape == like.shape, key
        assert [x.shape for x in arrays_in(state)] == [x.shape for x in arrays_in(self.state)]


def of_cases(*cases: Case) -> Target:
    found = [case.recorded() for case in cases]

    def run(data: bytes) -> None:
        case = found[data[0] // 2 % len(found)]
        (case.failed if data[0] % 2 else case.replay)(data[1:])

    seeds = [
        bytes([2 * i + fails]) + each.heard
        for i, each in enumerate(found)
        for fails in (False, True)
    ]
    return Target(seeds, run, known=16 * 200)


def chain(*parts: Any, **exchange: Any) -> Callable[[Group], gx.Chain]:
    tx = gx.chain(*parts, gx.allreduce(**exchange))
    return lambda group: tx


@target
def gather() -> Target:
    """Messages of all ranks, of fixed sizes and of sizes that vary."""
    way = {"algorithm": "gather"}
    return of_cases(
        Case(chain(gx.topk(0.2), gx.ef(), **way)),
        Case(chain(gx.unscale(), gx.sign(), gx.ef(), **way), size=3, extra=(("loss_scale", 8.0),)),
        Case(chain(gx.topk(0.2, values="float16"), gx.ef(), **way)),
        Case(chain(gx.topk(0.2, scope="global"), gx.ef(), gx.ternary(), **way)),
        Case(chain(gx.threshold(0.5, capacity=0.5), gx.ef(), **way), rank=1),
        Case(chain(gx.threshold(0.5, capacity=0.5), gx.cast("float16"), gx.ef(), **way), size=3),
        Case(chain(gx.quantize(4), **way)),
        Case(chain(gx.natural(), **way)),
        Case(chain(gx.sign(majority_vote=True), **way), size=3),
        Case(chain(gx.accumulate(2), gx.topk(0.2), gx.ef(), **way), before=1),
    )


@target
def two_shot() -> Target:
    """Runs of values to owners, and their sums back."""
    way = {"algorithm": "two_shot"}
    return of_cases(
        Case(chain(gx.cast("float16"), gx.ef(), **way), size=3),
        Case(chain(gx.cast("float8_e4m3fn"), gx.ef(), **way)),
        Case(chain(gx.cast("bfloat16"), gx.ef(), **way), rank=1),
        Case(chain(gx.quantize(8), gx.ef(), **way), rank=2, size=3),
        Case(chain(gx.accumulate(2), gx.quantize(8, stochastic=False), gx.ef(), **way), before=1),
    )


@target
def sharded() -> Target:
    """Values at positions to owners, and sums back."""
    way = {"algorithm": "sharded"}
    return of_cases(
        Case(chain(gx.topk(0.2), gx.ef(), **way)),
        Case(chain(gx.topk(0.2, values="float16"), gx.ef(), **way), rank=1, size=3),
        Case(chain(gx.topk(0.2), gx.quantize(8), gx.ef(), **way), size=3),
        Case(chain(gx.threshold(0.0, capacity=1.0), gx.ef(), **way)),
        Case(chain(gx.topk(0.2), gx.ef(), density=0.1, **way), size=3),
        Case(chain(gx.topk(0.2, scope="global"), gx.cast("bfloat16"), gx.ef(), **way), rank=1),
        Case(chain(gx.accumulate(2), gx.topk(0.2), gx.ef(), **way), before=1),
    )


@target
def root() -> Target:
    """All to rank 0, and sums back from it."""
    way = {"algorithm": "root"}
    return of_cases(
        Case(chain(gx.topk(0.1), gx.ef(), **way), rank=0),
        Case(chain(gx.topk(0.1), gx.ef(), **way), rank=1),
        Case(chain(gx.threshold(0.5, capacity=0.5), gx.ef(), **way), rank=0, size=3),
        Case(chain(gx.threshold(0.5, capacity=0.5), gx.ef(), **way), rank=2, size=3),
        Case(chain(gx.sign(), gx.ef(), **way), rank=1),
        Case(chain(gx.accumulate(2), gx.topk(0.1), gx.ef(), **way), rank=1, before=1),
    )


@target
def rows() -> Target:
    """Rows of tables, as many as a rank has."""
    own = {"gradients": with_rows}
    return of_cases(
        Case(chain(), gated=False, **own),
        Case(chain(gx.unscale()), rank=1, size=3, extra=(("loss_scale", 8.0),), **own),
        Case(chain(gx.topk(0.5, rows=0.3), gx.ef()), **own),
        Case(chain(gx.topk(0.5, rows=0.3, feedback=False)), rank=2, size=3, **own),
    )


def two_stages(group: Group) -> gx.Chain:
    inner, outer = gx.node_groups(2, group=group)
    return gx.chain(gx.allreduce(inner), gx.topk(0.2), gx.ef(), gx.allreduce(outer))


@target
def dense() -> Target:
    """Sums of dense leaves with flags at their end, of factors, and in two stages."""
    return of_cases(
        Case(chain(), gated=False),
        Case(chain(gx.unscale()), size=3, extra=(("loss_scale", 8.0),)),
        Case(chain(gx.random_k(0.2, feedback=False))),
        Case(chain(gx.powersgd(1), gx.ef())),
        Case(chain(gx.accumulate(2)), before=1),
        Case(chain(gx.accumulate(2), gx.powersgd(1), gx.ef()), before=1, size=3),
        Case(two_stages, size=4),
        Case(two_stages, rank=3, size=4),
    )
