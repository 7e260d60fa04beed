"""`scale` and `scale_by_schedule`: gradients times a number."""

import re

import numpy as np
import pytest
import torch

import gradtx as gx
from gradtx.testing import check_laws, run_ranks

INF, NAN = float("inf"), float("nan")
GRADS = {"none": None, "s": torch.tensor(2.0), "w": torch.tensor([[1.0, -4.0]])}


def updated(tx, grads):
    return tx.update(grads, tx.init(grads))[0]


def run(tx, trees, **extra):
    """What comes out of each step, and the last state."""
    state, out = tx.init(trees[0]), []
    for tree in trees:
        updates, state = tx.update(tree, state, **extra)
        out.append(updates)
    return out, state


@pytest.mark.parametrize("factor", [-0.5, 2, 0.0, 0, 1e-30])
def test_gradients_are_multiplied(factor):
    out = updated(gx.scale(factor), GRADS)
    assert out["none"] is None
    assert torch.equal(out["w"], factor * GRADS["w"])
    assert torch.equal(out["s"], factor * GRADS["s"])


def test_factor_that_fp16_does_not_have_is_not_rounded():
    # In FP16 it would be 1e-4 * (1 + 2e-4).
    grads = {"w": torch.full((1,), 1000.0, dtype=torch.float16)}
    tx = gx.chain(gx.scale(1e-4), gx.scale(1e4), gx.allreduce())
    out = updated(tx, grads)["w"]
    assert (out.dtype, out.item()) == (torch.float16, 1000.0)
    assert (grads["w"] * torch.tensor(1e-8, dtype=torch.float16)).item() == 0.0


def test_fp64_stays_fp64():
    value = 1.0 + 2.0**-40
    out = updated(gx.scale(-1.0), [torch.tensor([value], dtype=torch.float64)])
    assert out[0].item() == -value


def test_it_may_stand_before_unscale_and_on_either_side_of_the_exchange():
    trees = [{"w": torch.tensor([3.0, -8.0])}] * 2
    chains = [
        (gx.scale(-0.5), gx.unscale(), gx.allreduce()),
        (gx.unscale(), gx.scale(-0.5), gx.allreduce()),
        (gx.unscale(), gx.allreduce(), gx.scale(-0.5)),
    ]
    for parts in chains:
        out, _ = run(gx.chain(*parts), trees, loss_scale=2.0)
        assert out[0]["w"].tolist() == [-0.75, 2.0]


def test_a_chain_of_it_alone_is_not_gated():
    out = updated(gx.chain(gx.scale(2.0), gx.allreduce()), {"w": torch.tensor([INF, 1.0])})
    assert out["w"].tolist() == [INF, 2.0]


def test_the_schedule_follows_the_steps_that_are_taken():
    tx = gx.chain(gx.unscale(), gx.allreduce(), gx.scale_by_schedule(lambda step: 1.0 + step))
    good, bad = {"w": torch.ones(1)}, {"w": torch.full((1,), NAN)}
    out, state = run(tx, [good, bad, good, good], loss_scale=1.0)
    assert [updates["w"].item() for updates in out] == [1.0, 0.0, 2.0, 3.0]
    assert state.gate.inner_states[1].count.dtype == torch.int32
    assert state.gate.inner_states[1].count.item() == 3


def test_on_torch_the_schedule_is_given_a_python_number():
    steps = []

    def schedule(step):
        steps.append(step)
        return 1.0

    run(gx.scale_by_schedule(schedule), [GRADS] * 3)
    assert steps == [0, 1, 2]
    assert all(type(step) is int for step in steps)


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), np.array(0.5), torch.tensor(0.5)])
def test_a_schedule_may_give_any_number(value):
    out = updated(gx.scale_by_schedule(lambda step: value), GRADS)
    assert torch.equal(out["w"], 0.5 * GRADS["w"])


def test_a_schedule_of_ours_is_followed():
    tx = gx.scale_by_schedule(gx.warmup_density([0.5, 0.25], 2))
    out, _ = run(tx, [{"w": torch.ones(1)}] * 4)
    assert [updates["w"].item() for updates in out] == [0.5, 0.5, 0.25, 0.25]
    assert repr(tx) == "gx.scale_by_schedule(gx.warmup_density([0.5, 0.25], 2))"


def test_a_state_that_is_loaded_goes_on_with_its_step():
    tx = gx.chain(gx.allreduce(), gx.scale_by_schedule(lambda step: 1.0 + step))
    parameters = {"w": torch.nn.Parameter(torch.zeros(2))}
    one, other = gx.Pipeline(tx, parameters), gx.Pipeline(tx, parameters)

    def step(pipeline):
        parameters["w"].grad = torch.ones(2)
        pipeline.sync()
        return parameters["w"].grad.tolist()

    assert step(one) == [1.0, 1.0]
    other.load_state_dict(one.state_dict())
    assert step(other) == [2.0, 2.0]


def linear(start, slope):
    return lambda step: start + slope * step


def test_ranks_with_other_schedules_do_not_run():
    def rank(i):
        tx = gx.chain(gx.allreduce(), gx.scale_by_schedule(linear(1.0, 0.5 * i)))
        return updated(tx, {"w": torch.ones(1)})

    with pytest.raises(gx.RankMismatchError):
        run_ranks(2, rank)


def test_it_prints_what_the_schedule_was_made_with():
    assert repr(gx.scale_by_schedule(linear(1.0, 0.5))) == (
        "gx.scale_by_schedule(linear(slope=0.5, start=1.0))"
    )
    assert repr(gx.scale(-2)) == "gx.scale(-2)"


@pytest.mark.parametrize("value", [NAN, INF, None, torch.ones(2)])
def test_a_schedule_that_gives_no_finite_number_is_refused(value):
    tx = gx.scale_by_schedule(lambda step: value if step == 1 else 1.0)
    text = f" gives {value!r} at step 1: expected a finite number"
    with pytest.raises(ValueError, match=re.escape(text) + "$"):
        run(tx, [GRADS] * 2)


@pytest.mark.parametrize(
    "tx",
    [
        gx.chain(gx.scale(-0.1), gx.unscale(), gx.skip_bn(), gx.topk(0.2), gx.ef(), gx.allreduce()),
        gx.chain(gx.unscale(), gx.scale_by_schedule(linear(1.0, 0.5)), gx.sign(), gx.ef()),
        gx.chain(gx.allreduce(), gx.scale_by_schedule(linear(-1.0, -0.5))),
    ],
    ids=repr,
)
def test_laws(tx):
    check_laws(tx, ranks=(2,), steps=3)


@pytest.mark.parametrize(
    ("parts", "code", "reason"),
    [
        (
            (gx.scale_by_schedule(linear(1.0, 0.5)), gx.unscale(), gx.allreduce()),
            "GX102",
            "scale_by_schedule(linear(slope=0.5, start=1.0)) stands before unscale() and is stat",
        ),
        (
            (gx.topk(0.1), gx.ef(), gx.scale(2.0), gx.allreduce()),
            "GX401",
            "scale(2.0) takes dense gradients only and topk(0.1) hands on a payload",
        ),
    ],
)
def test_wrong_order_is_refused(parts, code, reason):
    with pytest.raises(gx.ChainOrderError) as caught:
        gx.chain(*parts)
    [violation] = caught.value.violations
    assert violation.code == code
    assert violation.reason.startswith(reason)
    assert caught.value.suggestion is not None


def test_a_payload_is_refused():
    tx = gx.chain(gx.topk(0.5, feedback=False), gx.scale(2.0), check=False)
    with pytest.raises(TypeError, match=r"^scale\(\) takes dense gradients only, got Sparse"):
        updated(tx, {"w": torch.ones(4)})


@pytest.mark.parametrize("factor", [NAN, INF, -INF, 1e39, -(10**400)])
def test_factor_that_is_not_finite_is_refused(factor):
    with pytest.raises(ValueError, match=r"^scale\(factor=.*\): expected a finite number$"):
        gx.scale(factor)


@pytest.mark.parametrize("factor", [True, "2", None, torch.tensor(2.0)])
def test_factor_that_is_no_number_is_refused(factor):
    with pytest.raises(TypeError, match=r"^scale\(factor=.*\): expected a number$"):
        gx.scale(factor)


@pytest.mark.parametrize("schedule", [0.1, None, float])
def test_schedule_that_cannot_be_called_is_refused(schedule):
    text = f"scale_by_schedule(schedule={schedule!r}): expected step -> factor"
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        gx.scale_by_schedule(schedule)
