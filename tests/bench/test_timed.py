import time

import pytest
import torch

import gradtx as gx
from gradtx.bench.timed import TimedGroup
from gradtx.exchange.group import Group, ThreadGroup, find_group
from gradtx.testing import run_ranks


class SlowGroup(Group):
    """Two ranks, seen by one that waits in its collectives as told."""

    size = 2

    def __init__(self, barrier: float, collective: float) -> None:
        super().__init__()
        self._barrier, self._collective = barrier, collective

    def _all_reduce(self, buffer: torch.Tensor) -> torch.Tensor:
        time.sleep(self._barrier if buffer.numel() == 1 else self._collective)
        return buffer

    def _all_gather(self, message: torch.Tensor) -> list[torch.Tensor]:
        time.sleep(self._collective)
        return [message, message]

    def _broadcast(self, buffer: torch.Tensor) -> torch.Tensor:
        time.sleep(self._collective)
        return buffer


@pytest.mark.parametrize("collective", ["all_gather", "all_reduce", "broadcast"])
def test_waiting_for_ranks_is_told_from_transport(collective: str) -> None:
    group = TimedGroup(SlowGroup(barrier=0.03, collective=0.01))
    getattr(group, collective)(torch.zeros(8))
    assert group.waiting >= 0.03
    assert group.transport >= 0.01
    other = TimedGroup(SlowGroup(barrier=0.0, collective=0.03))
    getattr(other, collective)(torch.zeros(8))
    assert other.transport >= 0.03


@pytest.mark.parametrize(
    "parts",
    [[gx.allreduce], [lambda group: gx.chain(gx.topk(0.25), gx.ef(), gx.allreduce(group))]],
    ids=["dense", "compressed"],
)
def test_a_chain_gives_and_sends_the_same_over_it(parts) -> None:
    def rank(number: int):
        grads = {"w": torch.arange(256.0) * (number + 1)}
        results = []
        for group in (find_group(), TimedGroup(find_group().sibling())):
            tx = gx.chain(*(part(group) for part in parts))
            results.append((tx.update(grads, tx.init(grads))[0]["w"], group.sent))
        assert isinstance(find_group(), ThreadGroup)
        assert group.transport > 0
        return results

    for (plain, sent), (timed, timed_sent) in run_ranks(2, rank):
        assert torch.equal(plain, timed)
        assert sent == timed_sent > 0


def test_a_sibling_has_a_clock_of_its_own() -> None:
    def rank(number: int):
        group = TimedGroup(find_group())
        sibling = group.sibling()
        sibling.all_reduce(torch.ones(4))
        return sibling.transport > 0, group.transport

    assert run_ranks(2, rank) == [(True, 0.0)] * 2
