"""Several pipelines over one group at once; one that is dropped and built anew."""

import random

import pytest
import torch

import gradtx as gx
from gradtx import grouped
from killing import digest
from ranks import gloo_ranks

TOPK = gx.topk(0.1), gx.ef()
KINDS = {
    "first": lambda: gx.chain(*TOPK, gx.allreduce()),
    "second": lambda: gx.chain(*TOPK, gx.allreduce()),  # Its messages look like those of the first.
    "dense": lambda: gx.chain(gx.allreduce()),
    "overlap": lambda: gx.chain(*TOPK, gx.allreduce()),
    "delayed": lambda: gx.chain(*TOPK, gx.delayed(steps=2), gx.allreduce()),
    "later": lambda: gx.chain(*TOPK, gx.delayed(steps=1), gx.allreduce()),
}
STEPS = 7


class Loop:
    def __init__(self, rank, kind):
        grouped._LEAST = 2_000
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(*(torch.nn.Linear(30, 30) for _ in range(3)))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        # The second sees other numbers than the first, at other steps.
        self.seed, self.kind = 10 * list(KINDS).index(kind) + rank, kind
        self.build()

    def build(self):
        overlap = "always" if self.kind == "overlap" else False
        self.pipe = gx.Pipeline(KINDS[self.kind](), self.net, overlap=overlap)

    def rebuild(self):
        state = self.pipe.state_dict()
        del self.pipe
        self.build()
        self.pipe.load_state_dict(state)

    def backward(self, step):
        generator = torch.Generator().manual_seed(1000 * step + self.seed)
        self.net(torch.randn(4, 30, generator=generator)).pow(2).mean().backward()

    def sync(self):
        if self.pipe.sync().ready:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def result(self):
        return digest([list(self.net.parameters()), self.optimizer.state_dict()])


def alone(rank):
    found = {}
    for kind in KINDS:
        loop = Loop(rank, kind)
        for step in range(STEPS):
            loop.backward(step)
            loop.sync()
        found[kind] = loop.result()
    return found


def at_once(rank):
    """All of them, in an order that changes, each with something under way while others talk."""
    loops, draw = {kind: Loop(rank, kind) for kind in KINDS}, random.Random(0)
    for step in range(STEPS):
        for kind in draw.sample(list(loops), len(loops)):
            loops[kind].backward(step)
        for kind in draw.sample(list(loops), len(loops)):
            loops[kind].sync()
    return {kind: loop.result() for kind, loop in loops.items()}


def anew(rank):
    """Each dropped in the middle, with what it has under way, and built anew over the group."""
    found = {}
    for kind in KINDS:
        loop = Loop(rank, kind)
        for step in range(STEPS):
            if step in (2, 5):
                loop.rebuild()
            loop.backward(step)
            loop.sync()
        found[kind] = loop.result()
    return found


def ways(rank):
    return alone(rank), at_once(rank), anew(rank)


@pytest.fixture(scope="module")
def results():
    return gloo_ranks(2, ways)


@pytest.mark.parametrize("kind", KINDS)
def test_several_over_one_group_give_what_each_gives_alone(results, kind):
    for single, together, _ in results:
        assert together[kind] == single[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_is_dropped_and_built_anew_goes_on(results, kind):
    for single, _, rebuilt in results:
        assert rebuilt[kind] == single[kind]


def test_they_differ(results):
    assert len(set(results[0][0].values())) == len(KINDS)
