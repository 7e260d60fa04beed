"""Which way leaves travel, and that it is decided once."""

import weakref

import pytest
import torch

import gradtx as gx
from gradtx.core.transformation import Context
from gradtx.core.tree import flatten, layout_of
from gradtx.exchange import choice
from gradtx.exchange.outgoing import Outgoing
from gradtx.testing import run_ranks


def leaves_of(compressor, shapes, dtype=torch.float32):
    grads = [torch.ones(shape, dtype=dtype) for shape in shapes]
    tx = gx.chain(compressor)
    return flatten(tx.update(grads, tx.init(grads))[0])[0], Context(layout_of(grads), "")


@pytest.fixture
def planned(monkeypatch):
    """How often it has been decided which way leaves go."""
    calls, decide = [], choice.Ways.by

    def counting(*arguments):
        calls.append(1)
        return decide(*arguments)

    monkeypatch.setattr(choice.Ways, "by", counting)
    return calls


def test_steps_of_the_same_forms_are_planned_once(planned):
    tx = gx.chain(gx.filter_params(gx.is_matrix), gx.topk(0.1), gx.ef(), gx.allreduce())

    def rank(i):
        grads = {"w": torch.randn(30, 30), "b": torch.randn(9)}
        state = tx.init(grads)
        for step in range(4):
            given = {**grads, "b": None} if step == 2 else grads
            _, state = tx.update(given, state)

    run_ranks(2, rank)
    assert len(planned) == 2


def test_another_ratio_is_planned_anew(planned):
    tx = gx.chain(gx.topk(gx.warmup_density([0.3, 0.1, 0.01], 2)), gx.ef(), gx.allreduce())

    def rank(i):
        grads = {"w": torch.randn(1000)}
        state = tx.init(grads)
        for _ in range(6):
            _, state = tx.update(grads, state)

    run_ranks(1, rank)
    assert len(planned) == 3


@pytest.mark.parametrize("size", [1, 3, 8])
def test_what_is_remembered_is_what_would_be_decided(size):
    """Of chains over the same tree, sizes that go both ways, and several ranks."""
    choices = {}
    shapes = [(5,), (600,), (70, 70), (0,), ()]
    for compressor in (
        gx.topk(0.05, feedback=False),
        gx.topk(0.9, feedback=False),
        gx.topk(0.05, scope="global", feedback=False),
        gx.cast("float16", feedback=False),
        gx.topk(0.05, values="float16", feedback=False),
        gx.sign(feedback=False),
        gx.threshold(0.5, feedback=False),
    ):
        leaves, context = leaves_of(compressor, shapes)
        fresh = Outgoing(leaves, context, size, "auto")
        for _ in range(2):
            out = Outgoing(leaves, context, size, "auto", choices)
            assert (out.ways, out.sizes) == (fresh.ways, fresh.sizes)
    assert len(choices) == 1


@pytest.mark.parametrize("algorithm", ["auto", "gather", "two_shot", "sharded", "root"])
def test_no_plan_outlives_its_step(algorithm):
    """It holds gradients, and would until the next collection of cycles."""
    leaves, context = leaves_of(gx.topk(0.05, feedback=False), [(600,), (70, 70)])
    out = Outgoing(leaves, context, 3, algorithm, {})
    out.compared()
    gone = weakref.ref(out)
    del out
    assert gone() is None
