"""`threshold`: all magnitudes over a bound, up to a capacity."""

import functools
import operator
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import gradtx as gx
from gradtx.compressors.threshold import Padded
from gradtx.core.transformation import Context
from gradtx.core.tree import layout_of
from gradtx.exchange.group import Group, find_group
from gradtx.exchange.incoming import exchange
from gradtx.exchange.outgoing import Outgoing
from gradtx.exchange.sharded import Sharded
from gradtx.exchange.sparse_sums import SparseSums
from gradtx.exchange.two_shot import TwoShot
from gradtx.testing import check_laws, run_ranks
from gradtx.wire import Header, WireFormatError, indices_nbytes, message_nbytes
from ranks import gloo_ranks

INF, NAN = float("inf"), float("nan")


def payload_of(leaf, tau, capacity=1.0):
    tx = gx.threshold(tau, capacity=capacity, feedback=False)
    return tx.update([leaf], tx.init([leaf]))[0][0]


def decoded(values, tau, capacity=1.0):
    return payload_of(torch.tensor(values), tau, capacity).decode().tolist()


def normal(n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def test_all_over_the_bound_are_sent():
    assert decoded([1.0, -4.0, 0.5, 2.0, 1.5], 1.0) == [0, -4, 0, 2, 1.5]


def test_bound_itself_is_not_over_it():
    assert decoded([1.0, -1.0, 1.0000001], 1.0) == [0, 0, torch.tensor(1.0000001).item()]


def test_magnitudes_count_and_not_values():
    assert decoded([-3.0, -2.0, -0.5], 1.0) == [-3, -2, 0]


def test_all_equal_magnitudes_over_the_bound_are_all_sent():
    leaf = torch.full((1000,), -0.25)
    assert torch.equal(payload_of(leaf, 0.2).decode(), leaf)


def test_few_non_zeros_are_sent_alone():
    leaf = torch.zeros(100_000)
    leaf[::2000] = normal(50)
    payload = payload_of(leaf, 0.0, 0.01)
    assert torch.equal(payload.decode(), leaf)
    assert payload.values.count_nonzero() == 50


def test_largest_are_sent_if_they_do_not_all_fit():
    assert decoded([2.0, -5.0, 3.0, 4.0], 1.0, 0.5) == [0, -5, 0, 4]


def test_ties_beyond_the_capacity_go_to_the_lowest_index():
    assert decoded([2.0, -2.0, 2.0, -2.0], 1.0, 0.5) == [2, -2, 0, 0]


@pytest.mark.parametrize("tau", [0.0, 1.0, 1e9])
def test_room_that_is_not_needed_holds_zeros_at_distinct_places(tau):
    payload = payload_of(torch.tensor([0.0, 2.0, 0.0, 0.5, 0.0]), tau, 0.8)
    indices = payload.indices.tolist()
    assert len(indices) == 4
    assert indices == sorted(set(indices) & set(range(5)))
    assert all(abs(value) > tau or value == 0 for value in payload.values.tolist())


def test_nothing_over_the_bound_sends_zeros():
    assert decoded([0.5, -0.5], 1.0) == [0, 0]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_bad_value_is_sent(bad):
    assert not payload_of(torch.tensor([1.0, bad, 1.0]), 2.0, 0.1).decode().isfinite().all()


@pytest.mark.parametrize("shape", [(0,), (0, 3), (), (1,)])
def test_tiny_leaf(shape):
    tx = gx.chain(gx.threshold(0.5), gx.ef(), gx.allreduce())
    grads = [torch.ones(shape)]
    assert torch.equal(tx.update(grads, tx.init(grads))[0][0], grads[0])


@pytest.mark.parametrize("n", [1, 10, 1000])
def test_size_is_the_capacity_whatever_the_values(n):
    sizes = {payload_of(normal(n) * scale, 1.0, 0.1).values.numel() for scale in (0.0, 1.0, 1e6)}
    assert sizes == {max(1, round(0.1 * n))}


values = hnp.arrays(
    np.float32, st.integers(1, 40), elements=st.floats(-100, 100, width=32, allow_nan=False)
)


@given(values, st.floats(0, 50), st.floats(0.01, 1.0))
def test_error_is_at_most_tau_a_value_or_the_capacity_is_used_up(leaf, tau, capacity):
    leaf = torch.from_numpy(leaf)
    payload = payload_of(leaf, tau, capacity)
    left = (leaf - payload.decode()).abs()
    if (leaf.abs() > tau).sum() <= payload.values.numel():
        assert left.max() <= tau
    else:
        assert (payload.values.abs() > tau).all()
        assert left.max() <= payload.values.abs().min()


@given(values, st.floats(0, 50), st.floats(0.01, 1.0))
def test_what_is_sent_is_exact(leaf, tau, capacity):
    leaf = torch.from_numpy(leaf)
    sent = payload_of(leaf, tau, capacity).decode()
    assert ((sent == leaf) | (sent == 0)).all()


@settings(max_examples=20)
@given(values, st.floats(0, 50), st.integers(-20, 20))
def test_power_of_two_scales_go_through(leaf, tau, exponent):
    leaf, scale = torch.from_numpy(leaf), 2.0**exponent
    tau = float(np.float32(tau))
    assert torch.equal(
        payload_of(leaf * scale, tau * scale).decode(), payload_of(leaf, tau).decode() * scale
    )


def test_feedback_keeps_the_residual_within_tau_and_drains():
    grads, steps, tau = [normal(50) * 0.3], 200, 1.0
    tx = gx.chain(gx.threshold(tau, capacity=1.0), gx.ef(), gx.allreduce())
    state, total = tx.init(grads), torch.zeros(50)
    for _ in range(steps):
        updates, state = tx.update(grads, state)
        total += updates[0]
        assert state.gate.inner_states[0].residual[0].abs().max() <= tau
    assert torch.allclose(total / steps, grads[0], atol=tau / steps + 1e-5)


def test_what_does_not_fit_is_sent_later():
    grads = [torch.tensor([8.0, 7.0, 6.0, 5.0])]
    tx = gx.chain(gx.threshold(1.0, capacity=0.25), gx.ef())
    state, sent = tx.init(grads), []
    for step in range(4):
        updates, state = tx.update([grads[0] * (step == 0)], state)
        sent.append(updates[0].decode().tolist())
    assert sent == [[8, 0, 0, 0], [0, 7, 0, 0], [0, 0, 6, 0], [0, 0, 0, 5]]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "tx",
    [
        gx.chain(gx.unscale(), gx.threshold(0.3, capacity=0.3), gx.ef(), gx.allreduce()),
        gx.chain(gx.skip_bn(), gx.threshold(0.05), gx.ef(), gx.allreduce(op="sum")),
        gx.chain(gx.threshold(0.5, capacity=0.5), gx.ef()),
    ],
    ids=repr,
)
def test_laws(tx, seed):
    check_laws(tx, seed=seed, steps=3, ranks=(1, 3))


def spikes(n, over):
    """`over` of `n` values are over 1."""
    leaf = torch.full((n,), 0.25)
    leaf[torch.randperm(n, generator=torch.Generator().manual_seed(over))[:over]] = -2.0
    return leaf


# What a message holds, by how many values travel, of a leaf of 5,000.
ROUNDED = {
    "threshold": (lambda: (), lambda k: [4 * k]),
    "cast": (lambda: (gx.cast("float16"),), lambda k: [2 * k, 2]),
    "natural": (lambda: (gx.natural(),), lambda k: [k + -(-k // 8)]),
}


@pytest.mark.parametrize("rounded", ROUNDED)
@pytest.mark.parametrize("over", [(0, 0), (3, 0, 1), (7, 200), (5000, 1)])
def test_what_is_over_the_bound_is_all_that_travels(rounded, over):
    parts, sizes = ROUNDED[rounded]
    tx = gx.chain(gx.threshold(1.0, capacity=0.05), *parts(), gx.ef(), gx.allreduce())

    def rank(i):
        group, grads = find_group(), [spikes(5000, over[i])]
        state = tx.init(grads)
        _, state = tx.update([torch.zeros(5000)], state)  # The handshake is in the first step.
        before = group.sent
        updates, state = tx.update(grads, state)
        return group.sent - before, updates[0], grads[0] - state.gate.inner_states[0].residual[0]

    found = run_ranks(len(over), rank)
    sent = [sent for _, _, sent in found]
    assert [int((x != 0).sum()) for x in sent] == [min(n, 250) for n in over]
    largest = min(max(over), 250)
    message = message_nbytes(1, [*sizes(largest), indices_nbytes(largest, 5000)])
    for nbytes, result, _ in found:
        assert nbytes == (len(over) - 1) * (message + 16)
        assert torch.equal(result, functools.reduce(operator.add, sent) / len(over))


def test_values_that_are_packed_travel_with_their_padding():
    tx = gx.chain(
        gx.threshold(1.0, capacity=0.01), gx.quantize(4, block=64), gx.ef(), gx.allreduce()
    )

    def rank(i):
        group, state = find_group(), tx.init([spikes(5000, i)])
        _, state = tx.update([spikes(5000, i)], state)
        before = group.sent
        tx.update([spikes(5000, 3 * i)], state)
        return group.sent - before

    assert run_ranks(2, rank) == 2 * [message_nbytes(1, [25, 4, indices_nbytes(50, 5000)])]


def _over_gloo(rank):
    tx = gx.chain(gx.threshold(1.0), gx.cast("float16"), gx.ef(), gx.allreduce())
    leaves = [{"a": spikes(500, 5 * rank), "b": spikes(3000, step)} for step in range(3)]
    state, out = tx.init(leaves[0]), []
    for grads in leaves:
        updates, state = tx.update(grads, state)
        out.append(updates)
    return out


def test_over_gloo():
    first, *others = gloo_ranks(3, _over_gloo)
    assert torch.allclose(first[0]["a"], sum(spikes(500, 5 * r).clamp(max=0) for r in range(3)) / 3)
    assert torch.equal(first[0]["b"], torch.zeros(3000))
    for step, updates in enumerate(first):
        assert all(torch.equal(updates[k], other[step][k]) for other in others for k in updates)


@pytest.mark.parametrize("failing", [1, 2])
def test_rank_that_fails_tells_the_others_whatever_they_have_to_send(failing):
    tx = gx.chain(gx.threshold(1.0), gx.ef(), gx.allreduce())

    def rank(i):
        state, errors = tx.init([spikes(5000, 0)]), []
        for step in range(4):
            grads = [torch.zeros(7)] if i == 1 and step == failing else [spikes(5000, 40 * step)]
            try:
                updates, state = tx.update(grads, state)
            except (ValueError, gx.RankMismatchError) as error:
                errors.append((step, type(error)))
        return errors, updates[0]

    (others, first), (own, second) = run_ranks(2, rank)
    assert others == [(failing, gx.RankMismatchError)]
    assert own == [(failing, ValueError)]
    assert torch.equal(first, second)


class Liar(Group):
    """One of two ranks; the other tells what it likes of its message."""

    size = 2

    def __init__(self, told):
        super().__init__()
        self.told, self.rounds = told, 0

    def _all_gather(self, message):
        self.rounds += 1
        lie = torch.tensor(self.told, dtype=torch.int64).view(torch.uint8)
        return [message, lie if self.rounds == 1 else message.clone()]


@pytest.mark.parametrize(
    ("told", "text"),
    [
        ([2**62, 10], r"rank 1 has \d+ bytes to send, expected 96"),
        ([96, 11], r"rank 1 has 96 bytes to send, expected \d+"),
        ([96, 251], r"rank 1 has \[251\] values to send, of at most \(250,\)"),
        ([96, -1], r"rank 1 has \[-1\] values to send"),
    ],
)
def test_rank_that_tells_what_cannot_be_is_refused(told, text):
    indices = torch.arange(250)
    payload = Padded(spikes(5000, 10)[:250], indices, (5000,), "float32")
    payload.values[:10], payload.values[10:] = 2.0, 0.0
    context = Context(layout_of([torch.zeros(5000)]), "")
    outgoing = Outgoing([payload], context, 2, "auto")
    header = Header(0, 0, True, False, (False,))
    message = outgoing.message(header)
    assert message.numel() == 96
    group = Liar(told)
    shots = TwoShot(group, outgoing, outgoing.shards, header)
    sharded, sparse = Sharded(group, outgoing.to_owners, header), SparseSums(outgoing, context, 1)
    with pytest.raises(WireFormatError, match=text):
        exchange(group, outgoing, header, message, [], shots, sharded, sparse)


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ((gx.threshold(0.1),), "GX302"),
        ((gx.threshold(0.1, feedback=False), gx.ef()), "GX303"),
        ((gx.topk(0.5), gx.threshold(0.1), gx.ef()), "GX301"),
        ((gx.threshold(0.1), gx.sign(), gx.ef()), "GX301"),
        ((gx.threshold(0.1), gx.topk(0.5), gx.ef()), "GX301"),
        ((gx.threshold(0.1), gx.topk(0.5, scope="global"), gx.ef()), "GX301"),
        ((gx.threshold(0.1), gx.unscale(), gx.ef(), gx.allreduce()), "GX102"),
    ],
    ids=lambda value: value if isinstance(value, str) else repr(gx.chain(*value, check=False)),
)
def test_wrong_order_is_refused(parts, code):
    with pytest.raises(gx.ChainOrderError) as caught:
        gx.chain(*parts)
    assert code in [violation.code for violation in caught.value.violations]


@pytest.mark.parametrize(
    "parts",
    [
        (gx.topk(0.5), gx.threshold(0.1)),
        (gx.threshold(0.1), gx.sign()),
        (gx.threshold(0.1), gx.topk(0.5)),
        (gx.threshold(0.1), gx.topk(0.5, scope="global")),
    ],
    ids=repr,
)
def test_form_that_is_refused_fails_unchecked(parts):
    tx = gx.chain(*parts, check=False)
    with pytest.raises(TypeError):
        tx.update([torch.ones(8)], tx.init([torch.ones(8)]))


@pytest.mark.parametrize(
    "rounding",
    [lambda: gx.cast("float16"), lambda: gx.natural(), lambda: gx.quantize(4)],
    ids=["cast", "natural", "quantize"],
)
def test_rounding_that_keeps_zeros_is_taken(rounding):
    check_laws(
        gx.chain(gx.threshold(0.3, capacity=0.3), rounding(), gx.ef(), gx.allreduce()),
        steps=2,
        ranks=(2,),
        laws=["L2", "L4", "L5"],
    )


def test_padding_keeps_away_what_does_not_keep_zeros():
    payload = payload_of(torch.tensor([2.0, 0.0]), 1.0)
    signs = gx.Signs(torch.zeros(1, dtype=torch.uint8), torch.ones(1), (2,), "float32")
    with pytest.raises(TypeError, match="is padded with zeros, which Signs"):
        payload.with_values(signs)
    assert isinstance(payload.with_values(payload.values * 2), Padded)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_leaf_is_compared_in_fp32(dtype):
    payload = payload_of(torch.tensor([1.0, 2.0], dtype=dtype), 1.5)
    assert (payload.dtype, payload.decode().tolist()) == ("float32", [0, 2])


def test_jax_gives_the_same():
    jnp = pytest.importorskip("jax.numpy")
    leaf = normal(100)
    ours, theirs = payload_of(leaf, 1.0, 0.2), payload_of(jnp.asarray(leaf.numpy()), 1.0, 0.2)
    assert ours.indices.tolist() == theirs.indices.tolist()
    assert ours.values.tolist() == theirs.values.tolist()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: gx.threshold(1),
            TypeError,
            "threshold(tau=1): expected a float of at least 0, such as 1e-3",
        ),
        (
            lambda: gx.threshold(-0.5),
            ValueError,
            "threshold(tau=-0.5): expected a float of at least 0",
        ),
        (
            lambda: gx.threshold(NAN),
            ValueError,
            "threshold(tau=nan): expected a float of at least 0",
        ),
        (
            lambda: gx.threshold(INF),
            ValueError,
            "threshold(tau=inf): expected a float of at least 0",
        ),
        (
            lambda: gx.threshold(0.1, capacity=0.0),
            ValueError,
            "threshold(capacity=0.0): expected a float over 0 and at most 1",
        ),
        (
            lambda: gx.threshold(0.1, feedback="no"),
            TypeError,
            "threshold(feedback='no'): expected True or False",
        ),
    ],
)
def test_wrong_argument_is_refused(call, error, text):
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        call()
