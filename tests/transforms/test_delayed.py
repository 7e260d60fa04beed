"""`delayed`: the same results, some steps later."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradtx as gx
from gradtx.testing import check_laws, run_ranks

NAN = float("nan")


def chain_of(steps, *, accumulate=1, behind=()):
    window = [gx.accumulate(accumulate)] if accumulate > 1 else []
    delay = [] if steps is None else [gx.delayed(steps=steps)]
    return gx.chain(
        gx.unscale(),
        *window,
        gx.skip_bn(),
        gx.topk(0.25),
        gx.ef(),
        *delay,
        gx.allreduce(algorithm="gather"),
        *behind,
    )


def results(tx, gradients, params, flush):
    """The results that are ready, at which call each came, and the last state."""
    state, out, when = tx.init(params), [], []
    for number, tree in enumerate(gradients):
        updates, state = tx.update(tree, state, params, loss_scale=1.0)
        if state.ready:
            out.append(updates)
            when.append(number)
    while flush:
        updates, state = tx.flush(state, params)
        if state.ready:
            out.append(updates)
        flush = bool(state.pending)
    return out, when, state


def gradients_of(rank, count, bad=()):
    generator = torch.Generator().manual_seed(rank)
    out = []
    for number in range(count):
        tree = {
            "w": torch.randn(20, generator=generator),
            "bn1": torch.randn(3, generator=generator),
        }
        if (rank, number) in bad:
            tree["w"][7] = NAN
        out.append(tree)
    return out


PARAMS = {"w": torch.zeros(20), "bn1": torch.zeros(3)}


@settings(max_examples=20)
@given(
    st.integers(0, 4),
    st.integers(1, 3),
    st.integers(1, 10),
    st.sets(st.tuples(st.integers(0, 1), st.integers(0, 9)), max_size=3),
)
def test_every_result_comes_once_in_order_and_late(steps, accumulate, count, bad):
    late, now = (chain_of(s, accumulate=accumulate) for s in (steps, None))

    def rank(i):
        gradients = gradients_of(i, count, bad)
        flushed = bool(steps) or accumulate > 1
        one = results(late, gradients, PARAMS, flushed)
        two = results(now, gradients, PARAMS, accumulate > 1)
        return one, two

    for (out, when, state), (expected, due, plain) in run_ranks(2, rank):
        assert len(out) == len(expected)
        for a, b in zip(out, expected, strict=True):
            assert all(torch.equal(a[path], b[path]) for path in PARAMS)
        later = [t + steps * accumulate for t in due if t + steps * accumulate < count]
        assert when == later
        assert torch.equal(state.residual["w"], plain.residual["w"])
        assert int(state.total_notfinite) == int(plain.total_notfinite)


def test_a_window_that_weighs_nothing_has_its_turn_too():
    tx = gx.chain(gx.accumulate(1), gx.delayed(steps=1), gx.allreduce())
    state, out = tx.init({"w": torch.zeros(1)}), []
    for weight, value in ((1.0, 1.0), (0.0, 2.0), (1.0, 3.0), (1.0, 4.0)):
        updates, state = tx.update({"w": torch.tensor([value])}, state, weight=weight)
        out.append((updates["w"].item(), bool(state.ready)))
    assert out == [(0.0, False), (1.0, True), (0.0, False), (3.0, True)]


def test_no_delay_is_the_chain_without_it():
    assert chain_of(0).core == chain_of(None).core


def test_what_is_behind_acts_on_results_as_they_come():
    behind = (gx.scale_by_schedule(lambda step: 10.0**step),)
    tx = chain_of(1, behind=behind)
    gradients = [{"w": torch.ones(20), "bn1": torch.ones(3)}] * 4
    out, when, state = results(tx, gradients, PARAMS, True)
    # The schedule counts results, not calls.
    assert [u["bn1"][0].item() for u in out] == [1.0, 10.0, 100.0, 1000.0]
    assert when == [1, 2, 3]
    assert not state.pending


def test_updates_are_zeros_until_the_first_result():
    tx = chain_of(2, behind=(gx.add_decayed_weights(0.5),))
    state = tx.init(PARAMS)
    for _ in range(2):
        updates, state = tx.update(gradients_of(0, 1)[0], state, PARAMS, loss_scale=1.0)
        assert not state.ready
        assert not any(x.any() for x in updates.values())
        assert int(state.total_notfinite) == 0


def test_a_leaf_without_gradients_stays_none_in_its_turn():
    tx = gx.chain(gx.delayed(steps=1), gx.allreduce())
    params = {"a": torch.zeros(1), "b": torch.zeros(1)}
    state = tx.init(params)
    _, state = tx.update({"a": torch.ones(1), "b": None}, state)
    updates, state = tx.update({"a": torch.ones(1), "b": torch.ones(1)}, state)
    assert updates == {"a": torch.ones(1), "b": None}
    assert tx.flush(state)[0] == {"a": torch.ones(1), "b": torch.ones(1)}


@pytest.mark.parametrize("steps", [-1, 1.0, True])
def test_wrong_arguments_are_refused(steps):
    with pytest.raises((TypeError, ValueError), match=r"delayed\(steps"):
        gx.delayed(steps=steps)


def test_a_combinator_needs_an_exchange():
    with pytest.raises(ValueError, match=r"delayed\(gx\.topk\(0\.1\), steps=1\): expected an exch"):
        gx.delayed(gx.topk(0.1), steps=1)


def test_a_stage_alone_says_what_to_write():
    with pytest.raises(TypeError, match=r"write chain\(delayed\(steps=1\), allreduce\(\)\)"):
        gx.delayed(steps=1).init({"w": torch.zeros(1)})


def test_both_ways_of_writing_it_are_the_same():
    one = gx.chain(gx.topk(0.5), gx.ef(), gx.delayed(steps=2), gx.allreduce())
    two = gx.chain(gx.topk(0.5), gx.ef(), gx.delayed(gx.allreduce(), steps=2))
    assert one.core == two.core
    assert one.stages == two.stages


def descended(eta, steps):
    """How far from the minimum of a parabola of curvature one a run ends."""
    tx = gx.chain(gx.delayed(steps=steps), gx.allreduce(), gx.scale(-eta))
    x = torch.ones((), dtype=torch.float64)
    state = tx.init({"x": x})
    for _ in range(4000):
        updates, state = tx.update({"x": x}, state)
        x = x + updates["x"]
        if not 1e-12 < x.abs() < 1e12:
            break
    return float(x.abs())


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_the_largest_stable_learning_rate_is_as_documented(steps):
    bound = gx.stable_learning_rate(1.0, steps=steps)
    assert bound == pytest.approx({0: 2.0, 1: 1.0}.get(steps, bound))
    assert descended(0.97 * bound, steps) < 1
    assert descended(1.03 * bound, steps) > 100


CHAINS = [
    gx.chain(gx.unscale(), gx.delayed(steps=1), gx.allreduce()),
    chain_of(2),
    gx.chain(
        gx.dynamic_loss_scale(1024.0),
        gx.accumulate(2),
        gx.topk(0.1),
        gx.ef(),
        gx.delayed(steps=1),
        gx.allreduce(),
        gx.clip_by_global_norm(1.0),
    ),
]


@pytest.mark.parametrize("tx", CHAINS, ids=repr)
def test_late_results_keep_the_laws(tx):
    check_laws(tx, ranks=(2, 3))


def test_no_delay_within_another_combinator_is_none():
    tx = gx.chain(gx.apply_if_finite(gx.delayed(gx.allreduce(), steps=0)))
    grads = {"w": torch.tensor([1.0, 2.0])}
    updates, state = tx.update(grads, tx.init(grads))
    assert torch.equal(updates["w"], grads["w"])
    assert state.ready
