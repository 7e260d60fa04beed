"""`accumulate`: one exchange a window, weights, bad micro-steps, windows cut short."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradtx as gx
from gradtx.exchange.group import find_group
from gradtx.testing import check_laws, run_ranks

INF = float("inf")


def window(tx, params, micro, *, flush=False, **extra):
    """All results of the micro-steps ``(gradients, extra)``, and the last state."""
    state, out = tx.init(params), []
    for gradients, own in micro:
        updates, state = tx.update(gradients, state, params, **{**extra, **own})
        if state.ready:
            out.append(updates)
    while flush:
        updates, state = tx.flush(state, params)
        if state.ready:
            out.append(updates)
        flush = bool(state.pending)
    return out, state


def drawn(seed, count, n=40):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator) for _ in range(count)]


def test_four_ranks_and_two_micro_steps_are_one_large_batch():
    """The classic mistake gives eight times as much: a gradient a micro-step and rank, added up."""
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 1)
    x, y = torch.randn(32, 5), torch.randn(32, 1)
    loss = torch.nn.functional.mse_loss
    large = torch.autograd.grad(loss(model(x), y), list(model.parameters()))
    tx = gx.chain(gx.accumulate(2), gx.allreduce())

    def rank(i):
        state = tx.init(list(model.parameters()))
        for part in range(2):
            rows = slice(8 * i + 4 * part, 8 * i + 4 * part + 4)
            grads = torch.autograd.grad(loss(model(x[rows]), y[rows]), list(model.parameters()))
            updates, state = tx.update(list(grads), state)
        return updates

    for updates in run_ranks(4, rank):
        for got, want in zip(updates, large, strict=True):
            torch.testing.assert_close(got, want)


def test_gradients_that_grow_within_the_window_count_once_each():
    """A hook that averages every micro-step would see 11.5 and 21.5 here."""
    tx = gx.chain(gx.accumulate(2, mean=False), gx.allreduce(op="mean"))

    def rank(i):
        micro = [({"w": torch.tensor(value)}, {}) for value in ((1.0, 10.0), (2.0, 20.0))[i]]
        return window(tx, {"w": torch.zeros(())}, micro)[0]

    assert [out[0]["w"].item() for out in run_ranks(2, rank)] == [16.5, 16.5]


def test_nothing_is_sent_before_the_end_of_a_window():
    tx = gx.chain(gx.accumulate(3), gx.topk(0.1), gx.ef(), gx.allreduce())

    def rank(i):
        group, state, sent = find_group(), tx.init({"w": torch.zeros(100)}), []
        for gradient in drawn(i, 6, 100):
            before = group.sent
            updates, state = tx.update({"w": gradient}, state)
            sent.append(group.sent - before)
            if not state.ready:
                assert not updates["w"].any()
        return sent

    for sent in run_ranks(2, rank):
        assert sent[:2] == sent[3:5] == [0, 0]
        assert sent[2] > sent[5] > 0


@settings(max_examples=60)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=7),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from(
        [
            (),
            (gx.topk(0.25), gx.ef()),
            (gx.sign(), gx.ef()),
            (gx.cast("float8_e4m3fn"), gx.ef()),
            (gx.powersgd(1), gx.ef()),
        ]
    ),
    st.sampled_from(
        [
            *({"algorithm": name} for name in ("auto", "gather", "two_shot", "sharded", "root")),
            {"algorithm": "sharded", "density": 0.1},
            {"link": gx.Link(0.0)},
        ]
    ),
)
def test_unequal_windows_give_the_mean_by_weight_and_lose_nothing(ranks, compressors, exchange):
    """Any numbers of micro-steps, weights, and bad ones left out: law L2 in FP64."""
    n = 3
    leave_out = gx.accumulate(n, on_bad="leave_out")
    # Without compressors a density does nothing, and is refused for it.
    tx = gx.chain(leave_out, *compressors, gx.allreduce(**exchange), check=False)
    gradients = [drawn(i, len(steps)) for i, steps in enumerate(ranks)]

    def rank(i):
        micro = []
        for gradient, (weight, bad) in zip(gradients[i], ranks[i], strict=True):
            given_ = gradient.clone()
            given_[3] = INF if bad else given_[3]
            micro.append(({"w": given_}, {"weight": weight}))
        out, state = window(tx, {"w": torch.zeros(40)}, micro, flush=True)
        return [u["w"] for u in out], state.residual

    found = run_ranks(len(ranks), rank)
    assert all(len(out) == len(found[0][0]) for out, _ in found)
    for out, _ in found[1:]:
        assert all(map(torch.equal, out, found[0][0]))
    total, taken = torch.zeros(40, dtype=torch.float64), 0
    for start in range(0, max(map(len, ranks)), n):
        parts = [
            (w, g.double())
            for steps, own in zip(ranks, gradients, strict=True)
            for (w, bad), g in list(zip(steps, own, strict=True))[start : start + n]
            if not bad
        ]
        weight = sum(w for w, _ in parts)
        if weight:
            taken += 1
            total += sum(w * g for w, g in parts) / weight
    assert len(found[0][0]) == taken
    got = sum((u.double() for u in found[0][0]), torch.zeros(40, dtype=torch.float64))
    for _, residual in found:
        if residual is not None:
            got += residual["w"].double() / len(found)
    torch.testing.assert_close(got, total, rtol=0, atol=1e-5)


def test_a_window_cut_short_is_divided_by_what_is_there():
    tx = gx.chain(gx.accumulate(8), gx.allreduce())
    micro = [({"w": torch.tensor(value)}, {}) for value in (1.0, 2.0, 6.0)]
    out, state = window(tx, {"w": torch.zeros(())}, micro, flush=True)
    assert [u["w"].item() for u in out] == [3.0]
    assert not state.pending


def test_flush_with_nothing_accumulated_gives_nothing():
    tx = gx.chain(gx.accumulate(2), gx.topk(0.5), gx.ef(), gx.allreduce())

    def rank(i):
        state = tx.init({"w": torch.zeros(4)})
        updates, after = tx.flush(state)
        assert not after.ready
        assert not after.pending
        assert int(after.total_notfinite) == 0
        return updates

    assert run_ranks(2, rank) == [{"w": None}] * 2


@pytest.mark.parametrize("counts", [(8, 10), (10, 8), (3, 16), (16, 0), (1, 1, 9)])
def test_any_numbers_of_micro_steps_end_together(counts):
    tx = gx.chain(gx.accumulate(4), gx.sign(), gx.ef(), gx.allreduce(algorithm="gather"))

    def rank(i):
        micro = [({"w": g}, {}) for g in drawn(i, counts[i])]
        return [u["w"] for u in window(tx, {"w": torch.zeros(40)}, micro, flush=True)[0]]

    first, *others = run_ranks(len(counts), rank, timeout=10)
    assert len(first) == math.ceil(max(counts) / 4)
    for other in others:
        assert all(map(torch.equal, first, other))


def test_a_bad_micro_step_drops_the_window_on_all_ranks():
    tx = gx.chain(gx.unscale(), gx.accumulate(2), gx.topk(0.25), gx.ef(), gx.allreduce())

    def rank(i):
        params = {"w": torch.zeros(40)}
        good = [({"w": g}, {}) for g in drawn(i, 2)]
        _, before = window(tx, params, good, loss_scale=1.0)
        bad = ({"w": torch.full((40,), INF if i == 1 else 1.0)}, {})
        state = before
        for gradients, _ in (bad, good[0]):
            updates, state = tx.update(gradients, state, params, loss_scale=1.0)
        assert not state.ready
        assert not state.last_finite
        assert int(state.total_notfinite) == 1
        assert not updates["w"].any()
        assert torch.equal(before.residual["w"], state.residual["w"])
        # The next window begins with nothing of the bad one in it.
        for gradients, _ in good:
            updates, state = tx.update(gradients, state, params, loss_scale=1.0)
        return updates["w"]

    first, second = run_ranks(2, rank)
    assert first.isfinite().all()
    assert first.any()
    assert torch.equal(first, second)


def test_a_window_of_which_nothing_is_left_is_a_bad_step():
    tx = gx.chain(gx.accumulate(2, on_bad="leave_out"), gx.allreduce())
    micro = [({"w": torch.tensor(INF)}, {})] * 2
    out, state = window(tx, {"w": torch.zeros(())}, micro)
    assert out == []
    assert int(state.total_notfinite) == 1


def test_the_loss_scale_may_change_between_micro_steps():
    tx = gx.chain(gx.unscale(), gx.accumulate(2), gx.allreduce())
    micro = [
        ({"w": torch.tensor(3.0 * 1024)}, {"loss_scale": 1024}),
        ({"w": torch.tensor(5.0 * 8)}, {"loss_scale": 8}),
    ]
    assert window(tx, {"w": torch.zeros(())}, micro)[0][0]["w"].item() == 4.0


def test_a_loss_scale_of_its_own_falls_with_the_window():
    for on_bad in ("drop", "leave_out"):
        tx = gx.chain(
            gx.dynamic_loss_scale(1024.0), gx.accumulate(2, on_bad=on_bad), gx.allreduce()
        )
        params = {"w": torch.zeros(())}
        state = tx.init(params)
        _, state = tx.update({"w": torch.tensor(INF)}, state, params)
        assert state.loss_scale == 1024.0
        updates, state = tx.update({"w": torch.tensor(1024.0)}, state, params)
        assert state.loss_scale == 512.0
        assert bool(state.ready) == (on_bad == "leave_out")
        assert updates["w"].item() == float(on_bad == "leave_out")


def test_a_leaf_that_is_there_in_some_micro_steps_counts_as_zero_in_the_others():
    tx = gx.chain(gx.accumulate(2), gx.topk(1.0), gx.ef(), gx.allreduce(algorithm="gather"))

    def rank(i):
        params = {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2)}
        full = {"a": torch.ones(2), "b": torch.full((2,), 4.0), "c": None}
        lacking = {"a": torch.ones(2), "b": None, "c": None}
        micro = [(full, {}), (lacking, {})] if i == 0 else [(lacking, {})] * 2
        return window(tx, params, micro)[0]

    for [updates] in run_ranks(2, rank):
        assert updates["a"].tolist() == [1.0, 1.0]
        assert updates["b"].tolist() == [1.0, 1.0]
        assert updates["c"] is None


def test_sums_are_in_fp32_for_16_bit_leaves():
    tx = gx.chain(gx.accumulate(256, mean=False), gx.allreduce())
    params = {"w": torch.zeros((), dtype=torch.bfloat16)}
    micro = [({"w": torch.tensor(1.0, dtype=torch.bfloat16)}, {})] * 256
    # In bfloat16, 256 + 1 is 256.
    micro[-1] = ({"w": torch.tensor(257.0, dtype=torch.bfloat16)}, {})
    out, _ = window(tx, params, micro)
    assert out[0]["w"].item() == torch.tensor(511.0).bfloat16().item()


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: gx.accumulate(0), ValueError, r"accumulate\(n=0\): expected a whole number"),
        (lambda: gx.accumulate(2.0), TypeError, r"accumulate\(n=2\.0\)"),
        (lambda: gx.accumulate(2, mean=1), TypeError, r"accumulate\(mean=1\)"),
        (lambda: gx.accumulate(2, on_bad="skip"), ValueError, "expected 'drop' or 'leave_out'"),
        (lambda: gx.accumulate(2, gx.ef()), ValueError, "acts on its neighbours"),
    ],
)
def test_wrong_arguments_are_refused(make, error, text):
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize(
    "weight", [-1.0, INF, float("nan"), torch.tensor(-2.0), torch.tensor(INF), torch.ones(2)]
)
def test_weights_that_are_none_are_refused(weight):
    tx = gx.chain(gx.accumulate(2), gx.allreduce())
    grads = {"w": torch.zeros(())}
    with pytest.raises(ValueError, match="weight"):
        tx.update(grads, tx.init(grads), weight=weight)


def test_a_weight_that_is_a_tensor_counts_as_its_value():
    tx, grads = gx.chain(gx.accumulate(2), gx.allreduce()), {"w": torch.ones(2)}
    state = tx.init(grads)
    for weight, value in ((torch.tensor(3.0, requires_grad=True), 1.0), (torch.tensor(1), 5.0)):
        updates, state = tx.update({"w": torch.full((2,), value)}, state, weight=weight)
    assert updates["w"].tolist() == [2.0, 2.0]
    assert not updates["w"].requires_grad


def test_a_window_cannot_be_masked():
    with pytest.raises(ValueError, match=r"mask what is held back, accumulate\(8, masked"):
        gx.masked(gx.accumulate(2, gx.scale(2.0)), gx.is_matrix)


def test_a_stage_alone_says_what_to_write():
    with pytest.raises(TypeError, match=r"write chain\(accumulate\(8\), allreduce\(\)\)"):
        gx.accumulate(8).init({"w": torch.zeros(1)})


def test_both_ways_of_writing_it_are_the_same():
    one = gx.chain(gx.unscale(), gx.accumulate(3), gx.topk(0.5), gx.ef(), gx.allreduce())
    two = gx.chain(gx.unscale(), gx.accumulate(3, gx.error_feedback(gx.topk(0.5)), gx.allreduce()))
    assert one.core == two.core
    assert two.stages == one.stages


def test_a_rank_that_fails_within_a_window_is_heard_at_its_end():
    tx = gx.chain(gx.accumulate(2), gx.topk(0.5), gx.ef(), gx.allreduce())

    def rank(i):
        params = {"w": torch.zeros(4)}
        state = tx.init(params)
        for step in range(4):
            grads = {"v" if (i, step) == (1, 2) else "w": torch.ones(4)}
            _, state = tx.update(grads, state, params)

    with pytest.raises(ValueError, match="'v'"):
        run_ranks(2, rank, timeout=10)


CHAINS = [
    gx.chain(gx.unscale(), gx.skip_bn(), gx.accumulate(2), gx.topk(0.1), gx.ef(), gx.allreduce()),
    gx.chain(gx.accumulate(3, mean=False), gx.sign(), gx.ef(), gx.allreduce(op="sum")),
    gx.chain(
        gx.unscale(),
        gx.accumulate(3, on_bad="leave_out"),
        gx.clip_by_local_norm(1.0),
        gx.topk(0.1),
        gx.momentum_correction(0.9),
        gx.allreduce(algorithm="gather"),
        gx.clip_by_global_norm(1.0),
    ),
    gx.chain(
        gx.dynamic_loss_scale(1024.0), gx.accumulate(2), gx.powersgd(2), gx.ef(), gx.allreduce()
    ),
    gx.chain(gx.scale(0.5), gx.accumulate(2)),
]


@pytest.mark.parametrize("tx", CHAINS, ids=repr)
def test_windows_keep_the_laws(tx):
    check_laws(tx, ranks=(2, 3))


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_mean_of_16_bit_micro_steps_is_rounded_once(size):
    tx = gx.chain(gx.unscale(), gx.accumulate(3), gx.allreduce())
    gradients = [[x.bfloat16() for x in drawn(i, 3, 500)] for i in range(size)]

    def rank(i):
        micro = [({"w": g}, {}) for g in gradients[i]]
        return window(tx, {"w": torch.zeros(500).bfloat16()}, micro, loss_scale=1.0)[0][0]["w"]

    mean = sum(g.double() for own in gradients for g in own) / (3 * size)
    for got in run_ranks(size, rank):
        assert got.dtype == torch.bfloat16
        # All but those that FP32 brings to the other side of a tie.
        assert (got != mean.bfloat16()).float().mean() < 0.01
