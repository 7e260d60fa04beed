"""A value that is not finite makes the step bad, wherever it is and whoever looks at it."""

import math

import pytest
import torch

import gradtx as gx
from gradtx.core.stage import Stage
from gradtx.core.transformation import Context
from gradtx.core.tree import arrays_in, flatten, layout_of
from gradtx.testing import run_ranks

CHAINS = {
    "top-k": (gx.topk(0.01), gx.ef()),
    "16-bit values": (gx.topk(0.01, values="float16"), gx.ef()),
    "top-k and 8 bits": (gx.topk(0.01), gx.quantize(8), gx.ef()),
    "top-k and cast": (gx.topk(0.01), gx.cast("float8_e4m3fn"), gx.ef()),
    "masked": (gx.skip_bn(), gx.topk(0.01), gx.ef()),
    "threshold": (gx.threshold(2.0), gx.ef()),
    "cast": (gx.cast("float8_e5m2"), gx.ef()),
    "signs": (gx.sign(), gx.ef()),
    "momentum": (gx.topk(0.01), gx.momentum_correction(0.9)),
}
LEAVES = {
    "large": (300, 300),
    "bn1.weight": (8,),
    **{f"small{i:02}": (10,) for i in range(20)},
}


def gradients(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in LEAVES.items()}


def tx_of(name):
    return gx.chain(gx.unscale(), *CHAINS[name], gx.allreduce())


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("leaf", ["large", "bn1.weight", "small07"])
def test_no_state_moves(name, leaf):
    tx = tx_of(name)

    def rank(number):
        state = tx.init(gradients(0))
        _, state = tx.update(gradients(number), state, loss_scale=2.0)
        kept = [x.clone() for x in arrays_in(state.gate.inner_states[0])]
        for value in (math.inf, -math.inf, math.nan):
            grads = gradients(number + 2)
            if number == 1:
                grads[leaf].view(-1)[-1] = value
            updates, state = tx.update(grads, state, loss_scale=2.0)
            assert all(not update.any() for update in updates.values())
            assert not state.last_finite
        after = arrays_in(state.gate.inner_states[0])
        assert all(torch.equal(a, b) for a, b in zip(kept, after, strict=True))
        return int(state.total_notfinite)

    assert run_ranks(2, rank) == [3, 3]


@pytest.mark.parametrize("name", ["top-k", "16-bit values", "masked"])
def test_what_topk_has_read_is_not_read_again(name):
    tx = tx_of(name)
    grads = gradients(0)
    state = tx.init(grads)
    [part, _] = tx.core[1].parts
    leaves, _ = flatten(grads)
    told = part.tells(leaves, state.gate.inner_states[0])
    assert told == [name != "masked" or path != "bn1.weight" for path in sorted(LEAVES)]
    context = Context(layout_of(grads), "")
    part.step(grads, state.gate.inner_states[0], None, context=context)
    assert sum(x.numel() for x in context.progress.shown) < 0.02 * sum(x.numel() for x in leaves)
    assert all(x.isfinite().all() for x in context.progress.shown)


@pytest.mark.parametrize("value", [1.0, math.inf, math.nan])
@pytest.mark.parametrize("leaf", ["large", "small07"])
def test_who_comes_behind_topk_is_told_what_that_has_seen(leaf, value):
    """The exchange tells other ranks of a bad step by this flag, before it knows the result."""
    found = []

    def update(updates, state, params=None, *, finite, **extra):
        found.append(bool(finite))
        return updates, state

    look = gx.Transformation(Stage("look", takes=frozenset({"sparse"})), None, update)
    tx = gx.chain(gx.unscale(), gx.topk(0.01), gx.ef(), look, gx.allreduce(), check=False)
    grads = gradients(0)
    grads[leaf].view(-1)[-1] = value
    tx.update(grads, tx.init(grads), loss_scale=2.0)
    assert found == [value == 1.0]
