"""The exchange through a root, which gets all messages and sends the sums to all."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradtx as gx
from damage import as_bytes, as_tensor, damaged
from gradtx.exchange.group import Group, default_group, find_group
from gradtx.testing import check_laws, run_ranks
from ranks import gloo_ranks, spied

ROOT, GATHER = gx.allreduce(algorithm="root"), gx.allreduce(algorithm="gather")
COMPRESSORS = {
    "topk": (gx.topk(0.05),),
    "all of it": (gx.topk(1.0),),
    "joined": (gx.topk(0.1, scope="global"),),
    "fp16": (gx.topk(0.1, values="float16"),),
    "sign": (gx.sign(),),
    "8 bits": (gx.quantize(8),),
    "cast": (gx.cast("float16"),),
    "threshold": (gx.threshold(1.5, capacity=0.2),),
    "votes": (gx.sign(majority_vote=True),),
    "powersgd": (gx.powersgd(1),),
}


def tree(rank, step=0):
    generator = torch.Generator().manual_seed(100 * step + rank)
    shapes = {"w": (30, 40), "b": (7,), "empty": (0, 3), "scalar": ()}
    out = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    out["half"] = torch.randn(20, generator=generator).half()
    return {**out, "d": torch.randn(100, generator=generator, dtype=torch.float64)}


def bits(out):
    return {
        k: None if v is None else as_bytes(v.reshape(-1).view(torch.uint8)) for k, v in out.items()
    }


def chain_of(name, exchange):
    feedback = () if name == "votes" else (gx.ef(),)
    return gx.chain(*COMPRESSORS[name], *feedback, exchange)


def steps(rank, name, exchange):
    """The results of three steps, and the bytes sent in the last; a leaf is missing once."""
    tx, outs, sent = chain_of(name, exchange), [], 0
    state = tx.init(tree(rank))
    for step in range(3):
        given = {**tree(rank, step), **({"w": None} if (rank, step) == (1, 1) else {})}
        before = find_group().sent
        out, state = tx.update(given, state)
        outs.append(out)
        sent = find_group().sent - before
    return outs, sent


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 8])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_it_gives_what_a_gather_gives(name, size):
    found = run_ranks(size, lambda i: steps(i, name, ROOT)[0])
    expected = run_ranks(size, lambda i: steps(i, name, GATHER)[0])
    assert [list(map(bits, own)) for own in found[1:]] == [list(map(bits, found[0]))] * (size - 1)
    for out, other in zip(found[0], expected[0], strict=True):
        # A sum that is -0.0 may come as 0.0.
        assert all(torch.equal(out[path], leaf) for path, leaf in other.items())


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("parts", [(gx.topk(0.05), gx.ef()), (gx.sign(), gx.ef())], ids=repr)
def test_it_keeps_the_laws(parts, op):
    exchange = gx.allreduce(op=op, algorithm="root")
    check_laws(gx.chain(gx.unscale(), *parts, exchange), ranks=(1, 2, 3))


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize(("k", "sums"), [(100, 0.1), (5000, 4.0)])
def test_the_root_sends_the_sums_to_all_and_the_others_their_message(size, k, sums):
    """Equal supports: few sums at their positions, or all of them, at 4 bytes each."""
    n = 10_000

    def rank(i):
        grads = [torch.zeros(n)]
        grads[0][:k] = 1.0 + i
        tx = gx.chain(gx.topk(k / n), gx.ef(), ROOT)
        _, state = tx.update(grads, tx.init(grads))
        before = find_group().sent
        tx.update(grads, state)
        return find_group().sent - before

    root, *others = run_ranks(size, rank)
    message = 4 * k + k * 1.3 + 50 if k == 100 else 4 * k + n / 8 + 50
    assert others == [pytest.approx(message, rel=0.2)] * (size - 1)
    body = 4 * k + k * 1.3 if sums < 1 else min(4 * n, 4 * k + n / 8)
    assert root == pytest.approx((size - 1) * (body + 70), rel=0.2)


def test_the_collectives_of_a_step():
    tx = gx.chain(gx.filter_params(gx.is_matrix), gx.topk(0.1), gx.ef(), ROOT)

    def rank(i):
        def last(spy):
            state = tx.init(tree(i))
            for step in range(2):
                spy.calls.clear()
                _, state = tx.update(tree(i, step), state)
            return [name for name, _, _ in spy.calls]

        return spied(last)

    reduced = ["all_reduce", "all_reduce"]  # FP32 and FP64
    assert run_ranks(3, rank) == [["gather", "broadcast", "broadcast", *reduced]] * 3


def _over_gloo(rank):
    return {
        name: ([bits(out) for out in outs], sent)
        for name in COMPRESSORS
        if name != "powersgd"  # Its sums are made by the ring, in another order.
        for outs, sent in [steps(rank, name, gx.chain(ROOT).transformations[0])]
    }


def test_over_gloo_it_gives_what_threads_give_and_sends_as_much():
    assert gloo_ranks(3, _over_gloo) == run_ranks(3, _over_gloo)


@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_bad_gradient_leaves_no_trace(value, bad):
    tx = gx.chain(gx.unscale(), gx.topk(0.1), gx.ef(), ROOT)

    def one(i):
        grads = {"w": torch.randn(100, generator=torch.Generator().manual_seed(i))}
        _, state = tx.update(grads, tx.init(grads), loss_scale=1.0)
        spoilt = {"w": grads["w"].clone()}
        spoilt["w"][70] = value if i == bad else 1.0
        out, after = tx.update(spoilt, state, loss_scale=1.0)
        same = torch.equal(after.residual["w"], state.residual["w"])
        return bool(out["w"].any()), same, bool(after.last_finite)

    assert run_ranks(3, one) == [(False, True, False)] * 3


class Noise(Group):
    """A group in which a rank gets other bytes than were sent: the root, or rank 1 from it."""

    def __init__(self, inner, change, kind):
        super().__init__()
        self.rank, self.size, self._inner = inner.rank, inner.size, inner
        self._change, self._kind = change, kind

    def _all_gather(self, message):
        return self._inner._all_gather(message)

    def _gather(self, message):
        received = self._inner._gather(message)
        if self._kind != "gather" or not received:
            return received
        return [received[0], self._change(received[1]), *received[2:]]

    def _broadcast(self, buffer):
        received = self._inner._broadcast(buffer)
        last = self._kind == "body" and buffer.dtype == torch.uint8 and self.rank == 1
        return self._change(received) if last else received


def outcomes(change, kind):
    tx = gx.chain(gx.topk(0.1), gx.ef(), ROOT)
    grads = {"w": torch.randn(300, generator=torch.Generator().manual_seed(0))}

    def rank(i):
        with default_group(Noise(find_group(), change, kind)):
            try:
                tx.update(grads, tx.init(grads))
            except Exception as error:
                return type(error).__name__
            return ""

    return run_ranks(3, rank)


class TestDamage:
    @pytest.mark.parametrize("position", [0, 4, 8, 20, 24, 40])
    def test_a_root_that_cannot_read_tells_the_others(self, position):
        def change(data):
            data[position] ^= 0xFC
            return data

        mismatch = "RankMismatchError"
        assert outcomes(change, "gather") == ["WireFormatError", mismatch, mismatch]

    def test_a_step_that_is_another_is_told(self):
        def change(data):
            data[16] ^= 1
            return data

        assert outcomes(change, "gather") == ["RankMismatchError"] * 3

    @pytest.mark.parametrize("kind", ["gather", "body"])
    @settings(max_examples=30)
    @given(st.data())
    def test_any_bytes_raise_nothing_else(self, kind, data):
        seen = []
        assert outcomes(lambda found: seen.append(as_bytes(found)) or found, kind) == [""] * 3
        changed = as_tensor(data.draw(damaged(seen[0])))
        if kind == "gather" or changed.numel() == len(seen[0]):
            found = set(outcomes(lambda _: changed, kind))
            assert found <= {"", "WireFormatError", "RankMismatchError"}


def test_on_a_mesh_it_is_refused():
    with pytest.raises(ValueError, match=r"algorithm='root'\): for torch tensors only; on a mesh"):
        gx.allreduce(axis_name="data", algorithm="root")
