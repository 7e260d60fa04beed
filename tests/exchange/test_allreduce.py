import math
import re
from collections import OrderedDict

import numpy as np
import pytest
import torch

import gradtx as gx
from gradtx.core.transformation import Context
from gradtx.core.tree import layout_of
from gradtx.exchange.outgoing import Outgoing
from gradtx.testing import run_ranks
from ranks import gloo_ranks, spied

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SIZES = [1, 2, 3, 4]


def gradients(rank, dtype=torch.float32, step=0, w=(6, 50), b=(7,)):
    """Gradients that differ by rank and step; `b` has another dtype where there are FP64 leaves."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {
        "w": torch.randn(*w, generator=generator).to(dtype),
        "b": torch.randn(*b, generator=generator).to(dtype),
        "empty": torch.zeros(0, 3, dtype=dtype),
        "scalar": torch.randn((), generator=generator).to(dtype),
    }


def wide(tensor):
    """As an array in the dtype sums are made in. NumPy has no bfloat16."""
    return (tensor if tensor.dtype == torch.float64 else tensor.float()).numpy()


def numpy_sum(arrays):
    total = arrays[0].copy()
    for array in arrays[1:]:
        total = total + array
    return total


def numpy_topk(array, ratio):
    flat = array.reshape(-1)
    k = max(1, round(ratio * flat.size)) if flat.size else 0
    keep = np.argsort(-np.abs(flat), kind="stable")[:k]
    out = np.zeros_like(flat)
    out[keep] = flat[keep]
    return out.reshape(array.shape)


def expected(size, op, dtype, local=lambda path, array: array):
    """The result for each leaf, from NumPy, in rank order."""
    grads = [gradients(rank, dtype) for rank in range(size)]
    out = {}
    for path in grads[0]:
        total = numpy_sum([local(path, wide(g[path])) for g in grads])
        array = total / total.dtype.type(size if op == "mean" else 1)
        out[path] = torch.tensor(array).to(dtype)
    return out


def update(tx, grads, state=None, **extra):
    return tx.update(grads, tx.init(grads) if state is None else state, **extra)


def one_step(rank, tx, dtype):
    return update(tx, gradients(rank, dtype))[0]


def bits(tree):
    """The exact bits of a tree's leaves, for comparison with ==."""
    return {
        k: v if v is None else v.reshape(-1).view(torch.uint8).tolist() for k, v in tree.items()
    }


def assert_close(out, wanted, dtype):
    """Equal to rounding in the dtype of the leaf."""
    for path, leaf in out.items():
        assert leaf.dtype == dtype
        torch.testing.assert_close(leaf, wanted[path])


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_dense_leaves_are_what_numpy_gives(size, dtype, op):
    tx = gx.chain(gx.allreduce(op=op))
    outs = run_ranks(size, lambda rank: one_step(rank, tx, dtype))
    assert [bits(out) for out in outs] == [bits(expected(size, op, dtype))] * size


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_gathered_leaves_are_what_numpy_gives(size, dtype, op):
    tx = gx.chain(gx.topk(0.1, feedback=False), gx.allreduce(op=op, algorithm="gather"))
    outs = run_ranks(size, lambda rank: one_step(rank, tx, dtype))
    wanted = expected(size, op, dtype, lambda path, array: numpy_topk(array, 0.1))
    for out in outs:
        # NumPy's sums have no sign of zero to keep: -0.0 + 0.0 is 0.0 there and here.
        assert {path: leaf.tolist() for path, leaf in out.items()} == {
            path: leaf.tolist() for path, leaf in wanted.items()
        }


@pytest.mark.parametrize("dtype", DTYPES)
def test_gathered_and_dense_leaves_go_in_one_step(dtype):
    tx = gx.chain(gx.filter_params(gx.is_matrix), gx.topk(0.1, feedback=False), gx.allreduce())
    outs = run_ranks(3, lambda rank: one_step(rank, tx, dtype))

    def local(path, array):
        return numpy_topk(array, 0.1) if path == "w" else array

    assert_close(outs[0], expected(3, "mean", dtype, local), dtype)


_GLOO_CASES = [
    (kind, op, dtype)
    for kind in ("dense", "gathered")
    for op in ("mean", "sum")
    for dtype in DTYPES
]


def _over_gloo(rank):
    out = []
    for kind, op, dtype in _GLOO_CASES:
        compressors = [gx.topk(0.1, feedback=False)] if kind == "gathered" else []
        algorithm = "gather" if kind == "gathered" else "auto"
        tx = gx.chain(*compressors, gx.allreduce(op=op, algorithm=algorithm))
        out.append(one_step(rank, tx, dtype))
    return out


@pytest.fixture(scope="module", params=[2, 3])
def over_gloo(request):
    return gloo_ranks(request.param, _over_gloo)


@pytest.mark.parametrize("case", range(len(_GLOO_CASES)), ids=lambda i: str(_GLOO_CASES[i]))
def test_over_gloo_the_result_is_what_numpy_gives(over_gloo, case):
    kind, op, dtype = _GLOO_CASES[case]
    local = (lambda path, a: numpy_topk(a, 0.1)) if kind == "gathered" else (lambda path, a: a)
    assert_close(over_gloo[0][case], expected(len(over_gloo), op, dtype, local), dtype)


@pytest.mark.parametrize("case", range(len(_GLOO_CASES)), ids=lambda i: str(_GLOO_CASES[i]))
def test_over_gloo_all_ranks_get_the_same_bits(over_gloo, case):
    first, *others = (bits(out[case]) for out in over_gloo)
    assert all(other == first for other in others)


CHAINS = [
    gx.chain(gx.allreduce()),
    gx.chain(gx.topk(0.1), gx.ef(), gx.allreduce()),
    gx.chain(gx.topk(0.1, scope="global"), gx.ef(), gx.allreduce(algorithm="gather")),
    gx.chain(gx.sign(), gx.ef(), gx.allreduce()),
    gx.chain(gx.topk(0.2), gx.sign(), gx.ef(), gx.allreduce(algorithm="gather")),
    gx.chain(gx.unscale(), gx.filter_params(gx.is_matrix), gx.topk(0.1), gx.ef(), gx.allreduce()),
]


def _mixed(rank, step=0):
    leaves = [
        gradients(rank, dtype, step, w=(40, 30), b=(5,))
        for dtype in (torch.float16, torch.float32, torch.float64)
    ]
    return {f"{i}.{k}": v for i, tree in enumerate(leaves) for k, v in tree.items()}


def _three_steps(rank, i):
    """The results of three steps with one of the chains."""
    tx = CHAINS[i]
    state, outs = tx.init(_mixed(rank)), []
    for step in range(3):
        out, state = tx.update(_mixed(rank, step), state, loss_scale=2.0)
        outs.append(bits(out))
    return outs


@pytest.mark.parametrize("i", range(len(CHAINS)), ids=lambda i: repr(CHAINS[i]))
def test_replicas_agree_bit_for_bit(i):
    first, *others = run_ranks(4, lambda rank: _three_steps(rank, i))
    assert all(other == first for other in others)


@pytest.mark.parametrize("i", range(len(CHAINS)), ids=lambda i: repr(CHAINS[i]))
def test_replicas_agree_bit_for_bit_over_gloo(i):
    first, *others = gloo_ranks(3, _three_steps, i)
    assert all(other == first for other in others)


def calls_of(tx, make, size=2, steps=2, **extra):
    """What each rank calls in its last step."""

    def rank(i):
        def run(spy):
            state = tx.init(make(i))
            for _ in range(steps):
                spy.calls.clear()
                _, state = tx.update(make(i), state, **extra)
            return spy.calls

        return spied(run)

    return run_ranks(size, rank)


@pytest.mark.parametrize("tx", CHAINS, ids=repr)
def test_a_step_has_one_call_for_what_is_gathered_and_one_a_dtype_for_what_is_dense(tx):
    for calls in calls_of(tx, _mixed, loss_scale=1.0):
        kinds = [(name, dtype) for name, dtype, _ in calls]
        allowed = {("all_gather", "uint8"), ("all_reduce", "float32"), ("all_reduce", "float64")}
        assert set(kinds) <= allowed
        assert len(set(kinds)) == len(kinds)


def test_gathered_fp32_and_fp64_leaves_take_three_calls():
    tx = gx.chain(gx.filter_params(gx.is_matrix), gx.topk(0.01), gx.ef(), gx.allreduce())
    kinds = [(name, dtype) for name, dtype, _ in calls_of(tx, _mixed)[0]]
    assert kinds == [("all_gather", "uint8"), ("all_reduce", "float32"), ("all_reduce", "float64")]


def test_the_first_step_has_one_call_more_for_the_handshake():
    tx = gx.chain(gx.allreduce())
    assert calls_of(tx, gradients, steps=1)[0] == [
        ("all_gather", "uint8", 1024),
        ("all_reduce", "float32", 300 + 7 + 1 + 4 + 1),
    ]


def test_a_bad_step_has_the_calls_of_a_good_one():
    tx = gx.chain(gx.unscale(), gx.topk(0.1), gx.ef(), gx.allreduce())

    def bad(rank):
        return {**gradients(rank), "b": torch.full((7,), math.inf if rank else 1.0)}

    good = calls_of(tx, gradients, loss_scale=1.0)
    assert calls_of(tx, bad, loss_scale=1.0) == good


@pytest.mark.parametrize("compressors", [(), (gx.topk(1.0, feedback=False),)], ids=repr)
@pytest.mark.parametrize("size", [2, 3])
def test_fp16_gradients_do_not_overflow_in_the_sum(size, compressors):
    tx = gx.chain(*compressors, gx.allreduce(algorithm="gather"))
    grads = [torch.tensor([60000.0, -60000.0], dtype=torch.float16)]
    outs = run_ranks(size, lambda rank: update(tx, grads)[0][0])
    assert [out.tolist() for out in outs] == [[60000.0, -60000.0]] * size


def test_small_fp16_gradients_do_not_vanish_in_the_sum():
    tx = gx.chain(gx.allreduce(op="sum"))
    grads = [torch.tensor([2048.0, 1.0][i : i + 1], dtype=torch.float16) for i in range(2)]
    outs = run_ranks(4, lambda rank: update(tx, {"w": grads[min(rank, 1)]})[0]["w"])
    # 2048 + 1 is 2048 in FP16, three times; in FP32 it is 2051, which rounds to 2052.
    assert [out.item() for out in outs] == [2052.0] * 4


DENSE = [("all_reduce", "float32")]
GATHERED = [("all_gather", "uint8")]


@pytest.mark.parametrize(
    ("tx", "shape", "size", "wanted"),
    [
        (gx.chain(gx.topk(1.0), gx.ef(), gx.allreduce()), (1000,), 2, DENSE),
        (gx.chain(gx.topk(1.0), gx.ef(), gx.allreduce()), (1000,), 4, DENSE),
        (gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce()), (3,), 2, DENSE),
        (gx.chain(gx.sign(), gx.ef(), gx.allreduce()), (2,), 2, DENSE),
        (gx.chain(gx.sign(), gx.ef(), gx.allreduce()), (), 2, DENSE),
        (gx.chain(gx.sign(), gx.ef(), gx.allreduce()), (0,), 2, DENSE),
        (gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce()), (1000,), 4, DENSE),
        (gx.chain(gx.topk(0.1), gx.ef(), gx.allreduce()), (1000,), 4, GATHERED),
        (gx.chain(gx.sign(), gx.ef(), gx.allreduce()), (1000,), 2, GATHERED),
        (gx.chain(gx.sign(), gx.ef(), gx.allreduce()), (1000,), 1, GATHERED),
    ],
    ids=str,
)
def test_auto_sends_dense_where_compressed_costs_more(tx, shape, size, wanted):
    calls = calls_of(tx, lambda rank: {"w": torch.ones(shape)}, size=size)[0]
    assert [(name, dtype) for name, dtype, _ in calls] == wanted


def outgoing(compressor, leaves, size, algorithm="auto"):
    """What a rank of so many would send."""
    tx = gx.chain(compressor)
    payloads, _ = tx.update(leaves, tx.init(leaves))
    context = Context(layout_of(leaves), "")
    return Outgoing([payloads[k] for k in sorted(leaves)], context, size, algorithm)


@pytest.mark.parametrize(("size", "gathered"), [(2, 1), (32, 1), (63, 1), (64, 0), (1000, 0)])
def test_auto_sends_signs_dense_from_64_ranks_on(size, gathered):
    leaves = {"w": torch.ones(100_000)}
    assert len(outgoing(gx.sign(feedback=False), leaves, size).payloads) == gathered


def test_auto_decides_leaf_by_leaf():
    leaves = {"big": torch.ones(1000), "small": torch.ones(1)}
    out = outgoing(gx.sign(feedback=False), leaves, 2)
    assert (out.places, out.dense_places) == ([[0]], {"float32": [1]})


def test_gather_sends_every_payload_compressed():
    leaves = {"big": torch.ones(1000), "small": torch.ones(1)}
    out = outgoing(gx.sign(feedback=False), leaves, 1000, "gather")
    assert (out.places, out.dense_places) == ([[0], [1]], {})


COMPRESSORS = [
    (gx.topk(0.001),),
    (gx.topk(0.1),),
    (gx.topk(0.4),),
    (gx.topk(0.6),),
    (gx.topk(1.0),),
    (gx.topk(0.3, scope="global"),),
    (gx.sign(),),
    (gx.topk(0.9), gx.sign()),
]


@pytest.mark.parametrize("shapes", [[(1,)], [(3, 5), ()], [(7,), (0,), (40, 30)], [(9,)] * 40])
@pytest.mark.parametrize("compressors", COMPRESSORS, ids=repr)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_auto_sends_no_more_than_a_dense_ring_and_its_flags(size, compressors, shapes):
    tx = gx.chain(*compressors, gx.ef(), gx.allreduce())
    values = sum(math.prod(shape) for shape in shapes)

    def rank(i):
        generator = torch.Generator().manual_seed(i)
        grads = [torch.randn(shape, generator=generator) for shape in shapes]
        state, sent = tx.init(grads), []
        exchange = tx.exchange
        for _ in range(2):
            before = exchange.group.sent
            _, state = tx.update(grads, state)
            sent.append(exchange.group.sent - before)
        return sent[1]

    digits = int(math.log(2**24, size + 1))
    flags = 4 * (4 + math.ceil(len(shapes) / digits))
    assert max(run_ranks(size, rank)) <= 2 * (size - 1) * (4 * values + flags) / size


@pytest.mark.parametrize("compressors", [(gx.topk(0.3), gx.ef()), (gx.sign(), gx.ef())], ids=repr)
def test_auto_and_gather_give_the_same_values(compressors):
    def rank(i, algorithm):
        tx = gx.chain(*compressors, gx.allreduce(algorithm=algorithm))
        return bits(one_step(i, tx, torch.float32))

    auto = run_ranks(3, lambda i: rank(i, "auto"))
    assert auto == run_ranks(3, lambda i: rank(i, "gather"))


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0, 3)])
def test_gather_takes_leaves_of_every_shape(shape):
    tx = gx.chain(gx.sign(feedback=False), gx.allreduce(algorithm="gather"))
    outs = run_ranks(2, lambda rank: update(tx, [torch.full(shape, 2.0 + rank)])[0][0])
    assert torch.equal(outs[1], torch.full(shape, 2.5))


def test_leaves_that_are_not_contiguous_arrive():
    tx = gx.chain(gx.allreduce())
    leaf = torch.arange(12.0).reshape(3, 4).t()
    outs = run_ranks(2, lambda rank: update(tx, [leaf])[0][0])
    assert torch.equal(outs[0], leaf)


@pytest.mark.parametrize("compressors", [(), (gx.topk(0.1), gx.ef())], ids=repr)
def test_the_gradients_are_not_written_to(compressors):
    tx = gx.chain(*compressors, gx.allreduce())

    def rank(i):
        grads = gradients(i)
        before = bits(grads)
        update(tx, grads)
        return bits(grads) == before

    assert run_ranks(2, rank) == [True, True]


ABSENT_CHAINS = [
    gx.chain(gx.allreduce()),
    gx.chain(gx.topk(0.9, feedback=False), gx.allreduce(algorithm="gather")),
    gx.chain(gx.topk(1.0), gx.ef(), gx.allreduce()),
    gx.chain(gx.topk(1.0, scope="global"), gx.ef(), gx.allreduce(algorithm="gather")),
]


@pytest.mark.parametrize("tx", ABSENT_CHAINS, ids=repr)
def test_a_leaf_that_some_ranks_lack_counts_as_zero_there(tx):
    def rank(i):
        full = {"w": torch.full((4,), 3.0), "v": torch.ones(2)}
        state = tx.init(full)
        return tx.update({**full, "w": None if i == 1 else full["w"]}, state)[0]["w"].tolist()

    # Top 90 % of four is all of them.
    assert run_ranks(3, rank) == [[2.0] * 4] * 3


@pytest.mark.parametrize("tx", ABSENT_CHAINS, ids=repr)
def test_a_leaf_that_all_ranks_lack_stays_none(tx):
    def rank(i):
        full = {"w": torch.full((4,), 3.0), "v": torch.ones(2)}
        return tx.update({**full, "w": None}, tx.init(full))[0]

    assert [out["w"] for out in run_ranks(2, rank)] == [None, None]


@pytest.mark.parametrize("tx", ABSENT_CHAINS, ids=repr)
def test_the_other_leaves_do_not_mind_one_that_all_ranks_lack(tx):
    def rank(i):
        full = {"w": torch.full((4,), 3.0), "v": torch.full((2,), 1.0 + i)}
        return tx.update({**full, "w": None}, tx.init(full))[0]["v"].tolist()

    assert run_ranks(2, rank) == [[1.5, 1.5]] * 2


@pytest.mark.parametrize("tx", ABSENT_CHAINS, ids=repr)
def test_all_leaves_may_lack_on_all_ranks(tx):
    full = {"w": torch.ones(4), "v": torch.ones(2)}
    outs = run_ranks(2, lambda rank: tx.update(dict.fromkeys(full), tx.init(full))[0])
    assert outs == [{"w": None, "v": None}] * 2


def test_which_of_many_leaves_lack_is_told_leaf_by_leaf():
    tx = gx.chain(gx.allreduce())
    full = {f"{i:02}": torch.ones(1) for i in range(50)}

    def rank(i):
        grads = {k: None if int(k) % 3 == 0 or int(k) % 7 == i else v for k, v in full.items()}
        return tx.update(grads, tx.init(full))[0]

    wanted = {k: None if int(k) % 3 == 0 else 1 - (int(k) % 7 < 3) / 3 for k in full}
    for out in run_ranks(3, rank):
        found = {k: None if v is None else v.item() for k, v in out.items()}
        assert found == pytest.approx(wanted)


@pytest.mark.parametrize("algorithm", ["auto", "gather"])
@pytest.mark.parametrize("lacking", [(0,), (1,), (0, 1)])
def test_the_residual_of_a_leaf_without_a_gradient_is_kept(lacking, algorithm):
    tx = gx.chain(gx.topk(0.3), gx.ef(), gx.allreduce(algorithm=algorithm))

    def rank(i):
        _, state = update(tx, gradients(i))
        before = residual_of(state)["w"].clone()
        second = gradients(i, step=1)
        _, state = tx.update({**second, "w": None if i in lacking else second["w"]}, state)
        return torch.equal(residual_of(state)["w"], before)

    assert run_ranks(2, rank) == [i in lacking for i in range(2)]


def residual_of(state):
    return state.gate.inner_states[0].residual


@pytest.mark.parametrize("tx", CHAINS, ids=repr)
def test_the_order_of_keys_and_the_kind_of_dict_do_not_matter(tx):
    def rank(i, shuffled):
        grads = _mixed(i)
        if shuffled and i == 1:
            grads = OrderedDict(reversed(list(grads.items())))
        elif shuffled and i == 2:
            grads = dict(reversed(list(grads.items())))
        out, state = update(tx, grads, loss_scale=1.0)
        out, _ = tx.update(grads, state, loss_scale=1.0)
        return bits(out)

    assert run_ranks(3, lambda i: rank(i, True)) == run_ranks(3, lambda i: rank(i, False))


def test_the_result_has_the_containers_of_the_gradients():
    tx = gx.chain(gx.allreduce())
    grads = OrderedDict(b=torch.ones(1), a=[torch.zeros(2), None])
    out, _ = update(tx, grads)
    assert isinstance(out, OrderedDict)
    assert list(out) == ["b", "a"]


@pytest.mark.parametrize("algorithm", ["auto", "gather"])
def test_finite_gradients_whose_sum_is_not_are_a_bad_step_on_all_ranks(algorithm):
    tx = gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce(algorithm=algorithm))

    def rank(i):
        _, state = update(tx, {"w": torch.tensor([1.0, 2.0, 3.0, 4.0])})
        before = residual_of(state)["w"].tolist()
        out, state = tx.update({"w": torch.tensor([3e38, 0.0, 0.0, 1.0])}, state)
        same = residual_of(state)["w"].tolist() == before
        return out["w"].tolist(), bool(state.last_finite), int(state.total_notfinite), same

    assert run_ranks(2, rank) == [([0.0] * 4, False, 1, True)] * 2


def test_a_sum_that_the_leafs_dtype_cannot_hold_is_a_bad_step():
    tx = gx.chain(gx.unscale(), gx.allreduce(op="sum"))
    grads = {"w": torch.full((3,), 60000.0, dtype=torch.float16)}

    def rank(i):
        out, state = update(tx, grads, loss_scale=1.0)
        return out["w"].tolist(), bool(state.last_finite)

    assert run_ranks(2, rank) == [([0.0] * 3, False)] * 2


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_an_ungated_exchange_lets_non_finite_values_through_on_all_ranks(bad):
    tx = gx.chain(gx.allreduce())

    def rank(i):
        out, state = update(tx, {"w": torch.tensor([1.0, bad if i == 1 else 2.0])})
        return str(out["w"].tolist()), bool(state.last_finite)

    assert run_ranks(3, rank) == [(str([1.0, bad]), True)] * 3


class Clamp:
    """A user's stage that hides what is not finite."""

    def init(self, params):
        return ()

    def update(self, updates, state, params=None):
        return {k: v.nan_to_num(0.0, 1.0, -1.0) for k, v in updates.items()}, state


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize(
    "compressors", [(), (gx.topk(0.5), gx.ef()), (gx.sign(), gx.ef())], ids=repr
)
@pytest.mark.parametrize("algorithm", ["auto", "gather"])
def test_a_non_finite_gradient_that_a_stage_hides_is_a_bad_step_on_all_ranks(
    algorithm, compressors, bad
):
    clamp = gx.declare(Clamp(), name="clamp", stateful=False, needs_reduced=False)
    tx = gx.chain(gx.unscale(), clamp, *compressors, gx.allreduce(algorithm=algorithm))

    def rank(i):
        grads = {"w": torch.tensor([1.0, 2.0, bad if i == 2 else 3.0, 4.0])}
        out, state = update(tx, grads, loss_scale=1.0)
        return out["w"].tolist(), bool(state.last_finite)

    assert run_ranks(3, rank) == [([0.0] * 4, False)] * 3


def test_counters_count_bad_steps_too():
    tx = gx.chain(gx.unscale(), gx.allreduce())

    def rank(i):
        grads = {"w": torch.ones(1)}
        _, state = update(tx, grads, loss_scale=1.0)
        _, state = tx.update({"w": torch.tensor([math.inf])}, state, loss_scale=1.0)
        _, state = tx.update(grads, state, loss_scale=1.0)
        return int(state.gate.inner_states[0].count), int(state.total_notfinite)

    assert run_ranks(2, rank) == [(3, 1)] * 2


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"op": "max"}, ValueError, "allreduce(op='max'): expected 'mean' or 'sum'"),
        (
            {"algorithm": "ring"},
            ValueError,
            "allreduce(algorithm='ring'): expected 'auto', 'gather', 'two_shot', 'sharded' or "
            "'root'",
        ),
        (
            {"axis_name": 3},
            TypeError,
            "allreduce(axis_name=3): expected the name of a mesh axis",
        ),
    ],
)
def test_wrong_arguments_are_refused_where_they_are_written(arguments, error, text):
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        gx.allreduce(**arguments)


def test_alone_nothing_is_sent():
    tx = gx.chain(gx.topk(0.1), gx.ef(), gx.allreduce())
    update(tx, gradients(0))
    assert tx.exchange.group.sent == 0


def test_alone_the_result_is_the_decoded_payload():
    tx = gx.chain(gx.topk(0.1, feedback=False), gx.allreduce())
    out, _ = update(tx, gradients(0))
    assert out["w"].tolist() == numpy_topk(gradients(0)["w"].numpy(), 0.1).tolist()


def test_an_empty_tree_is_exchanged():
    tx = gx.chain(gx.allreduce())
    assert run_ranks(2, lambda rank: update(tx, {})[0]) == [{}, {}]


def test_a_dense_step_tells_that_ranks_are_at_different_steps():
    tx = gx.chain(gx.allreduce())

    def rank(i):
        state = tx.init(gradients(i))
        _, first = tx.update(gradients(i), state)
        _, second = tx.update(gradients(i), first)
        with pytest.raises(gx.RankMismatchError, match=f"on rank {i}, but not on all ranks"):
            tx.update(gradients(i), second if i else first)

    run_ranks(2, rank)


def test_a_leaf_that_a_rank_lacks_adds_nothing_where_a_payload_travels_dense():
    tx = gx.chain(gx.topk(1.0, scope="global"), gx.sign(), gx.ef(), gx.allreduce())
    full = {"a": torch.ones(4), "b": torch.ones(4)}

    def rank(i):
        grads = {**full, "b": None} if i else full
        out, state = tx.update(grads, tx.init(full))
        return out["b"].tolist(), state.residual["b"].tolist()

    first, second = run_ranks(2, rank)
    assert first == ([0.5] * 4, [0.0] * 4)
    assert second == ([0.5] * 4, [0.0] * 4)


def test_leaves_joined_with_an_fp64_one_send_no_more_than_the_ring():
    tx = gx.chain(gx.topk(0.6, scope="global"), gx.ef(), gx.allreduce())
    grads = {"a": torch.linspace(-1, 1, 20_000), "b": torch.ones((), dtype=torch.float64)}

    def rank(i):
        group, state = tx.exchange.group, tx.init(grads)
        _, state = tx.update(grads, state)
        before = group.sent
        tx.update(grads, state)
        return group.sent - before

    assert max(run_ranks(2, rank)) <= 20_000 * 4 + 8 + 4 * 5
