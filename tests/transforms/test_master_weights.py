"""`master_weights`: small updates are not lost in 16 bits."""

import pytest
import torch

import gradtx as gx
from gradtx.testing import run_ranks

optax = pytest.importorskip("optax")


def test_what_is_too_small_for_16_bits_adds_up():
    tx = gx.chain(gx.allreduce(), gx.master_weights(), gx.scale(-1.0))
    params = {"w": torch.ones(3, dtype=torch.bfloat16), "wide": torch.ones(1)}
    grads = {"w": torch.full((3,), 2.0**-12, dtype=torch.bfloat16), "wide": torch.ones(1)}
    assert (params["w"] - grads["w"] == params["w"]).all()
    state = tx.init(params)
    for _ in range(1024):
        updates, state = tx.update(grads, state, params)
        params = {path: p + updates[path] for path, p in params.items()}
    assert params["w"].tolist() == [0.75] * 3
    assert params["wide"].tolist() == [-1023.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_stay_within_one_rounding_of_an_fp32_run(dtype):
    torch.manual_seed(0)
    start = torch.randn(200)
    tx = gx.chain(gx.allreduce(), gx.master_weights(), gx.from_optax(optax.sgd(0.1, momentum=0.9)))
    wide = gx.chain(gx.allreduce(), gx.from_optax(optax.sgd(0.1, momentum=0.9)))
    params, reference = {"w": start.to(dtype)}, {"w": start.to(dtype).float()}
    state, plain = tx.init(params), wide.init(reference)
    for _ in range(50):
        grads = torch.randn(200).to(dtype)
        updates, state = tx.update({"w": grads}, state, params)
        assert updates["w"].dtype == dtype
        params = {"w": params["w"] + updates["w"]}
        more, plain = wide.update({"w": grads.float()}, plain, reference)
        reference = {"w": reference["w"] + more["w"]}
    off = (params["w"].float() - reference["w"]).abs()
    assert (
        off <= 2 * torch.finfo(dtype).eps * reference["w"].abs() + 1e-3 * (dtype != dtype)
    ).all()


def test_a_bad_step_moves_no_copy():
    tx = gx.chain(gx.unscale(), gx.allreduce(), gx.master_weights(), gx.scale(-1.0))

    def rank(i):
        params = {"w": torch.ones(2, dtype=torch.bfloat16)}
        state = tx.init(params)
        bad = torch.full((2,), float("inf") if i else 1.0, dtype=torch.bfloat16)
        updates, after = tx.update({"w": bad}, state, params, loss_scale=1.0)
        assert not updates["w"].any()
        return after.states[-1].inner_states[-1].masters["w"]

    assert all(x.tolist() == [1.0, 1.0] for x in run_ranks(2, rank))


def test_copies_are_in_fp32_and_only_of_16_bit_parameters():
    tx = gx.chain(gx.allreduce(), gx.master_weights(), gx.scale(-1.0))
    params = {
        "a": torch.ones(1, dtype=torch.float16),
        "b": torch.ones(1),
        "c": torch.ones(1).double(),
    }
    masters = tx.init(params).states[-1].inner_states[-1].masters
    assert masters["a"].dtype == torch.float32
    assert masters["b"] is None
    assert masters["c"] is None


def test_parameters_have_to_be_given():
    tx = gx.chain(gx.master_weights(gx.scale(-1.0)))
    grads = {"w": torch.ones(1, dtype=torch.bfloat16)}
    with pytest.raises(ValueError, match=r"tx\.update\(grads, state, params\)"):
        tx.update(grads, tx.init(grads))


def test_without_an_optimizer_it_says_where_to_put_it():
    tx = gx.chain(gx.allreduce(), gx.master_weights())
    with pytest.raises(TypeError, match="put the optimizer to its right"):
        tx.init({"w": torch.ones(1, dtype=torch.bfloat16)})


def test_before_the_exchange_it_is_refused():
    with pytest.raises(gx.ChainOrderError) as caught:
        gx.chain(gx.master_weights(), gx.scale(-1.0), gx.allreduce())
    assert [violation.code for violation in caught.value.violations] == ["GX403"]
