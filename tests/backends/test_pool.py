import torch

import gradtx as gx
from gradtx.backends.pool import Pool
from gradtx.testing import run_ranks


def test_sum_is_that_of_torch_in_a_buffer_of_its_own():
    x, y = torch.randn(3, 5), torch.randn(3, 5)
    out = Pool().sum(x, y)
    assert torch.equal(out, x + y)
    assert out.data_ptr() not in (x.data_ptr(), y.data_ptr())


def test_what_is_held_is_never_given_out_again():
    pool, held = Pool(), []
    for step in range(5):
        held.append(pool.sum(torch.full((4,), float(step)), torch.zeros(4)))
        pool.reclaim(held)
    assert [x[0].item() for x in held] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_view_holds_its_buffer():
    pool = Pool()
    row = pool.sum(torch.ones(2, 3), torch.ones(2, 3))[1]
    pool.reclaim([row])
    pool.sum(torch.zeros(2, 3), torch.zeros(2, 3))
    assert row.tolist() == [2.0, 2.0, 2.0]


def test_what_is_held_no_more_is_used_again_for_the_same_shape_and_dtype():
    pool = Pool()
    first = pool.sum(torch.ones(4), torch.ones(4)).data_ptr()
    pool.reclaim([])
    others = (torch.ones(5), torch.ones(4, dtype=torch.float64), torch.ones(2, 2))
    assert all(pool.sum(x, x).data_ptr() != first for x in others)
    assert pool.sum(torch.ones(4), torch.ones(4)).data_ptr() == first


def test_pipeline_keeps_two_residuals_and_no_more():
    weight = torch.zeros(64, 64, requires_grad=True)
    pipe = gx.Pipeline(gx.chain(gx.topk(0.01), gx.ef(), gx.allreduce()), {"w": weight})
    places = []
    for step in range(6):
        weight.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(step))
        pipe.sync()
        [residual] = [x for x in torch_leaves(pipe.state) if x.shape == weight.shape]
        places.append(residual.data_ptr())
    assert len(set(places[1:])) <= 2


def torch_leaves(tree):
    return [x for x in gx.core.tree.arrays_in(tree) if isinstance(x, torch.Tensor)]


def test_a_bad_step_gives_back_the_residual_bit_for_bit():
    chain = gx.chain(gx.topk(0.1), gx.ef(), gx.allreduce())

    def rank(number):
        weight = torch.zeros(50, requires_grad=True)
        pipe = gx.Pipeline(chain, {"w": weight})
        states = []
        for step in range(6):
            weight.grad = torch.randn(50, generator=torch.Generator().manual_seed(10 * step))
            if number == 1 and step in (2, 3):
                weight.grad[7] = float("nan")
            report = pipe.sync()
            assert report.skipped == (step in (2, 3))
            states.append(pipe.state_dict()["state"])
        return states

    for states in run_ranks(2, rank):
        key = next(k for k in states[0] if "residual" in k)
        assert torch.equal(states[1][key], states[2][key])
        assert torch.equal(states[1][key], states[3][key])
        assert not torch.equal(states[3][key], states[4][key])
