from weakref import ref

import pytest
import torch

import gradtx as gx
from gradtx.backends.pool import Pool
from gradtx.core.tree import arrays_in
from gradtx.testing import run_ranks

SIZE = 1 << 16  # what is smaller is not kept


def test_sum_is_that_of_torch_in_a_buffer_of_its_own():
    for x in (torch.randn(3, 5), torch.randn(SIZE), torch.randn(SIZE, 2).t()):
        y = torch.randn(x.shape)
        out = Pool().sum(x, y)
        assert torch.equal(out, x + y)
        assert out.is_contiguous()
        assert out.data_ptr() not in (x.data_ptr(), y.data_ptr())


def test_what_is_held_is_never_given_out_again():
    pool, held = Pool(), []
    for step in range(5):
        held.append(pool.sum(torch.full((SIZE,), float(step)), torch.zeros(SIZE)))
        pool.reclaim(lambda: held)
    assert [x[0].item() for x in held] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_view_holds_its_buffer():
    pool, ones, zeros = Pool(), torch.ones(2, SIZE), torch.zeros(2, SIZE)
    row = pool.sum(ones, ones)[1]
    pool.reclaim(lambda: [row])
    pool.sum(zeros, zeros)
    assert row[:3].tolist() == [2.0, 2.0, 2.0]


def test_what_is_held_no_more_is_used_again_for_the_same_shape_and_dtype():
    pool, ones = Pool(), torch.ones(SIZE)
    first = pool.sum(ones, ones).data_ptr()
    pool.reclaim(list)
    others = (torch.ones(SIZE + 1), torch.ones(SIZE).double(), torch.ones(2, SIZE // 2))
    assert all(pool.sum(x, x).data_ptr() != first for x in others)
    assert pool.sum(ones, ones).data_ptr() == first


def test_on_accelerators_nothing_is_kept_between_steps():
    pool, x = Pool(), torch.ones(SIZE, device="meta")
    given = ref(pool.sum(x, x))
    assert given() is None


def test_pipeline_keeps_two_residuals_and_no_more():
    weight = torch.zeros(256, 256, requires_grad=True)
    pipe = gx.Pipeline(gx.chain(gx.topk(0.01), gx.ef(), gx.allreduce()), {"w": weight})
    places = []
    for step in range(6):
        weight.grad = torch.randn(256, 256, generator=torch.Generator().manual_seed(step))
        pipe.sync()
        [residual] = [x for x in arrays_in(pipe.state) if x.shape == weight.shape]
        places.append(residual.data_ptr())
    assert len(set(places[1:])) <= 2


@pytest.mark.parametrize("size", [30, 300])
def test_a_pipeline_gives_the_bits_of_the_function_whatever_the_layout(size):
    generator = torch.Generator().manual_seed(size)
    gradient = torch.randn(size, size, generator=generator).t()
    chain = gx.chain(gx.powersgd(1), gx.ef(), gx.allreduce())
    weight = torch.zeros(size, size, requires_grad=True)
    updates, _ = chain.update({"w": gradient}, chain.init({"w": weight}))
    pipe = gx.Pipeline(chain, {"w": weight})
    weight.grad = gradient.clone(memory_format=torch.preserve_format)
    pipe.sync()
    assert torch.equal(weight.grad, updates["w"])


def test_a_bad_step_gives_back_the_residual_bit_for_bit():
    chain = gx.chain(gx.topk(0.1), gx.ef(), gx.allreduce())

    def rank(number):
        weight = torch.zeros(SIZE, requires_grad=True)
        pipe = gx.Pipeline(chain, {"w": weight})
        states = []
        for step in range(6):
            weight.grad = torch.randn(SIZE, generator=torch.Generator().manual_seed(10 * step))
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
