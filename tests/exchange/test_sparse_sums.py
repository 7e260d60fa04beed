"""Sums of sparse payloads: against dense sums, and in the place of the gradients."""

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradtx as gx
from gradtx.testing import run_ranks

SIZES = st.integers(1, 5)


def outcomes(chain, gradients):
    """The updates that each rank gets; `gradients` are by rank."""

    def rank(number):
        tree = gradients[number]
        return chain.update(tree, chain.init(tree))[0]

    return run_ranks(len(gradients), rank)


def pipeline_outcomes(chain, gradients):
    """The same by way of a `Pipeline`, and whether each result is where its gradient was."""

    def rank(number):
        params = {k: torch.zeros_like(g, requires_grad=True) for k, g in gradients[number].items()}
        pipe = gx.Pipeline(chain, params)
        for k, g in gradients[number].items():
            params[k].grad = g.clone()
        places = {k: p.grad.data_ptr() for k, p in params.items()}
        pipe.sync()
        there = [p.grad.data_ptr() == places[k] for k, p in params.items()]
        return {k: p.grad for k, p in params.items()}, all(there)

    return run_ranks(len(gradients), rank)


@given(
    size=SIZES,
    seed=st.integers(0, 10_000),
    ratio=st.sampled_from([0.02, 0.3, 1.0]),
    op=st.sampled_from(["mean", "sum"]),
    scope=st.sampled_from(["leaf", "global"]),
    together=st.booleans(),
)
def test_sums_are_those_of_what_ranks_decode(size, seed, ratio, op, scope, together):
    generator = torch.Generator().manual_seed(seed)

    def tree():
        grads = {
            "a": torch.randn(6, 9, generator=generator),
            "b": torch.randn(40, generator=generator),
        }
        if together:  # All ranks choose the same places.
            grads["a"][:2] += 100
        return grads

    gradients = [tree() for _ in range(size)]
    local = gx.topk(ratio, scope=scope, feedback=False)
    chain = gx.chain(local, gx.allreduce(op=op, algorithm="gather"))
    decoded = []
    for grads in gradients:
        payloads, _ = local.update(grads, local.init(grads))
        leaves = gx.core.payload.decode_leaves([payloads["a"], payloads["b"]])
        decoded.append([x.reshape(-1) for x in leaves])
    for k, name in enumerate(("a", "b")):
        total = decoded[0][k].clone()
        for others in decoded[1:]:
            total = total + others[k]
        expected = total / (size if op == "mean" else 1)
        for updates in outcomes(chain, gradients):
            assert torch.equal(updates[name].reshape(-1), expected)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("scope", ["leaf", "global"])
def test_pipeline_writes_them_over_the_gradients(size, scope):
    generator = torch.Generator().manual_seed(size)
    gradients = [
        {"a": torch.randn(8, 8, generator=generator), "b": torch.randn(30, generator=generator)}
        for _ in range(size)
    ]
    chain = gx.chain(gx.topk(0.1, scope=scope), gx.ef(), gx.allreduce(algorithm="gather"))
    expected = outcomes(chain, gradients)
    for (found, there), updates in zip(pipeline_outcomes(chain, gradients), expected, strict=True):
        assert there
        assert all(torch.equal(found[k], updates[k]) for k in updates)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(8, 6).t(),  # not contiguous
        lambda: torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
        lambda: torch.randn(40).to(torch.bfloat16),
        lambda: torch.randn(40).double(),
    ],
)
def test_gradients_of_any_layout_and_dtype_come_out_as_by_the_pure_function(make):
    torch.manual_seed(0)
    gradients = [{"a": make()} for _ in range(2)]
    chain = gx.chain(gx.topk(0.1), gx.ef(), gx.allreduce(algorithm="gather"))
    for (found, _), updates in zip(
        pipeline_outcomes(chain, gradients), outcomes(chain, gradients), strict=True
    ):
        assert found["a"].dtype == gradients[0]["a"].dtype
        assert torch.equal(found["a"], updates["a"])


class Last(NamedTuple):
    updates: Any


class AddLast:
    """Adds the update before, which it keeps as it is."""

    def init(self, params):
        return Last({k: torch.zeros_like(x) for k, x in params.items()})

    def update(self, updates, state, params=None):
        return {k: x + state.updates[k] for k, x in updates.items()}, Last(dict(updates))


def test_what_a_state_behind_the_exchange_keeps_is_not_the_gradient():
    chain = gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce(algorithm="gather"), AddLast())
    param = torch.zeros(4, requires_grad=True)
    pipe = gx.Pipeline(chain, {"a": param})
    param.grad = torch.tensor([1.0, 2.0, 3.0, 4.0])
    pipe.sync()
    param.grad.fill_(1.0)  # As a loop does that zeroes gradients in place, and adds to them.
    pipe.sync()
    assert param.grad.tolist() == [2.0, 3.0, 3.0, 4.0]


def test_pure_function_never_writes_into_gradients():
    gradients = [{"a": torch.randn(64)} for _ in range(2)]
    before = [{"a": g["a"].clone()} for g in gradients]
    outcomes(gx.chain(gx.topk(0.1), gx.ef(), gx.allreduce(algorithm="gather")), gradients)
    assert all(torch.equal(g["a"], b["a"]) for g, b in zip(gradients, before, strict=True))


def test_a_sum_that_overflows_is_a_bad_step():
    largest = torch.finfo(torch.float32).max
    gradients = [{"a": torch.tensor([largest, 0.0, 1.0])} for _ in range(2)]
    chain = gx.chain(gx.topk(0.4), gx.ef(), gx.allreduce(op="sum", algorithm="gather"))
    for updates in outcomes(chain, gradients):
        assert updates["a"].tolist() == [0.0, 0.0, 0.0]


def test_a_leaf_that_only_some_ranks_have():
    def tree(number):
        return {"a": torch.tensor([4.0, 0.0]) if number else None, "b": torch.ones(3)}

    chain = gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce(algorithm="gather"))

    def rank(number):
        state = chain.init({"a": torch.zeros(2), "b": torch.zeros(3)})
        return chain.update(tree(number), state)[0]

    for updates in run_ranks(2, rank):
        assert updates["a"].tolist() == [2.0, 0.0]
