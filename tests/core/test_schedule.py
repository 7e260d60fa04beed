"""Schedules: hyperparameters that change with the step."""

import re

import pytest
import torch

import gradtx as gx
from gradtx.core.chain import arriving
from gradtx.core.transformation import Context
from gradtx.exchange.group import find_group
from gradtx.testing import check_laws, run_ranks

DENSITIES = [0.5, 0.25, 0.1]


def halves(step):
    return 0.5 if step < 2 else 0.05


def grads(n=20, seed=0):
    return {"w": torch.randn(n, generator=torch.Generator().manual_seed(seed))}


def sent(tx, steps, tree=None):
    """How many values were sent in each step."""
    tree = grads() if tree is None else tree
    state, out = tx.init(tree), []
    for _ in range(steps):
        updates, state = tx.update(tree, state)
        out.append(updates["w"].values.shape[0])
    return out


def test_warmup_goes_through_the_densities_and_stays_at_the_last():
    schedule = gx.warmup_density(DENSITIES, 3)
    assert [schedule(step) for step in range(11)] == [0.5] * 3 + [0.25] * 3 + [0.1] * 5
    assert schedule(10**12) == 0.1


def test_warmup_of_the_paper():
    schedule = gx.warmup_density([0.25, 0.0625, 0.015625, 0.004, 0.001], 100)
    assert [schedule(100 * i) for i in range(6)] == [0.25, 0.0625, 0.015625, 0.004, 0.001, 0.001]


def test_values_are_declared():
    assert gx.warmup_density(DENSITIES, 3).values == tuple(DENSITIES)


def test_it_prints_as_the_call_that_makes_it():
    schedule = gx.warmup_density((0.5, 0.1), 3)
    assert repr(schedule) == "gx.warmup_density([0.5, 0.1], 3)"
    assert repr(gx.topk(schedule)) == "gx.topk(gx.warmup_density([0.5, 0.1], 3))"
    assert repr(gx.Schedule(halves, (0.5, 0.05))) == "gx.Schedule(halves, (0.5, 0.05))"
    assert repr(gx.Schedule(halves, (0.5, 0.05), "mine")) == "mine"


def test_equal_schedules_are_equal():
    one, other = (gx.topk(gx.warmup_density(DENSITIES, 3)) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert one.fingerprint == other.fingerprint
    assert one != gx.topk(gx.warmup_density(DENSITIES, 4))
    assert gx.Schedule(halves, (0.5, 0.05)) == gx.Schedule(halves, (0.5, 0.05))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: gx.warmup_density(DENSITIES, 0),
            ValueError,
            "warmup_density(steps_each=0): expected a whole number of 1 or more",
        ),
        (
            lambda: gx.warmup_density(DENSITIES, 1.5),
            TypeError,
            "warmup_density(steps_each=1.5): expected a whole number of 1 or more",
        ),
        (
            lambda: gx.warmup_density(0.001, 100),
            TypeError,
            "warmup_density(0.001): expected several floats, such as [0.25, 0.01]",
        ),
        (
            lambda: gx.warmup_density([], 1),
            ValueError,
            "Schedule(values=()): expected at least one",
        ),
        (lambda: gx.warmup_density([1], 1), TypeError, "Schedule(values=(1,)): expected floats"),
        (
            lambda: gx.Schedule(0.5, (0.5,)),
            TypeError,
            "Schedule(function=0.5): expected step -> val",
        ),
        (
            lambda: gx.topk(gx.warmup_density([0.5, 2.0], 1)),
            ValueError,
            "topk(ratio=2.0): expected a",
        ),
        (
            lambda: gx.random_k(gx.warmup_density([0.0], 1)),
            ValueError,
            "random_k(ratio=0.0): expected a float over 0",
        ),
        (
            lambda: gx.threshold(gx.warmup_density([-1.0], 1)),
            ValueError,
            "threshold(tau=-1.0): expected a float of at least 0",
        ),
    ],
)
def test_wrong_argument_is_refused(call, error, text):
    with pytest.raises(error, match=f"^{re.escape(text)}"):
        call()


def test_value_that_was_not_declared_is_refused():
    schedule = gx.Schedule(lambda step: 0.1 * (step + 1), (0.1, 0.2), "rising")
    assert schedule(1) == 0.2
    with pytest.raises(
        ValueError, match=r"^rising gives 0\.3\d* at step 2: declare it among its v"
    ):
        schedule(2)


@pytest.mark.parametrize("compressor", [gx.topk, gx.random_k])
def test_ratio_follows_the_steps(compressor):
    tx = compressor(gx.warmup_density(DENSITIES, 2), feedback=False)
    assert sent(tx, 7) == [10, 10, 5, 5, 2, 2, 2]


def test_any_function_of_the_step_will_do():
    assert sent(gx.topk(gx.Schedule(halves, (0.5, 0.05)), feedback=False), 4) == [10, 10, 1, 1]


def test_all_other_arguments_hold():
    schedule = gx.warmup_density(DENSITIES, 1)
    tx = gx.chain(gx.topk(schedule, scope="global"), gx.ef(), gx.allreduce())
    tree = {"a": torch.ones(4), "b": torch.arange(16.0) + 2}
    state, out = tx.init(tree), []
    for _ in range(3):
        updates, state = tx.update(tree, state)
        out.append(sum(int(leaf.count_nonzero()) for leaf in updates.values()))
    assert out == [10, 5, 2]


def test_threshold_follows_the_steps():
    tx = gx.threshold(gx.warmup_density([0.5, 2.0], 1), capacity=1.0, feedback=False)
    tree = {"w": torch.tensor([1.0, 3.0])}
    first, state = tx.update(tree, tx.init(tree))
    second, _ = tx.update(tree, state)
    assert [updates["w"].decode().tolist() for updates in (first, second)] == [[1, 3], [0, 3]]


def test_bad_step_does_not_count():
    tx = gx.chain(gx.topk(gx.warmup_density([0.5, 0.1], 1)), gx.ef(), gx.allreduce())
    tree = grads()
    state = tx.init(tree)
    _, state = tx.update({"w": torch.full((20,), torch.inf)}, state)
    updates, state = tx.update(tree, state)
    assert updates["w"].count_nonzero() == 10
    updates, _ = tx.update(tree, state)
    assert updates["w"].count_nonzero() == 2


def test_resumed_state_goes_on_where_it_was():
    tx = gx.chain(gx.topk(gx.warmup_density(DENSITIES, 1)), gx.ef(), gx.allreduce())
    parameters = {"w": torch.nn.Parameter(torch.zeros(20))}
    one, other = gx.Pipeline(tx, parameters), gx.Pipeline(tx, parameters)
    parameters["w"].grad = grads()["w"]
    one.sync()
    other.load_state_dict(one.state_dict())
    parameters["w"].grad = grads()["w"]
    other.sync()
    assert parameters["w"].grad.count_nonzero() == 5


@pytest.mark.parametrize(
    "tx",
    [
        gx.chain(gx.unscale(), gx.topk(gx.warmup_density([0.5, 0.1], 1)), gx.ef(), gx.allreduce()),
        gx.chain(gx.random_k(gx.warmup_density([0.5, 0.1], 2)), gx.ef(), gx.allreduce()),
        gx.chain(gx.topk(gx.warmup_density([0.5, 0.1], 1)), gx.sign(), gx.ef()),
    ],
    ids=repr,
)
def test_laws(tx):
    laws = ["L1", "L2", "L4", "L7", "L8", "L10"]
    check_laws(tx, steps=3, ranks=(1, 2), laws=laws)


def test_schedule_before_unscale_is_refused():
    with pytest.raises(gx.ChainOrderError, match="GX102"):
        gx.chain(gx.topk(gx.warmup_density(DENSITIES, 1)), gx.ef(), gx.unscale(), gx.allreduce())


def test_ranks_with_other_schedules_are_told():
    def rank(i):
        tx = gx.chain(gx.topk(gx.warmup_density(DENSITIES, 1 + i)), gx.ef(), gx.allreduce())
        return tx.update(grads(), tx.init(grads()))

    with pytest.raises(gx.RankMismatchError, match=r"density\(.*, 1\).*, rank 1 runs .*, 2\)"):
        run_ranks(2, rank)


SCHEDULED = {
    "gathered": gx.chain(gx.topk(gx.warmup_density(DENSITIES, 2)), gx.ef(), gx.allreduce()),
    "summed": gx.chain(gx.random_k(gx.warmup_density(DENSITIES, 2)), gx.ef(), gx.allreduce()),
    "unscaled": gx.chain(
        gx.unscale(),
        gx.skip_bn(),
        gx.topk(gx.warmup_density(DENSITIES, 2)),
        gx.ef(),
        gx.allreduce(),
    ),
}


@pytest.mark.parametrize("name", SCHEDULED)
@pytest.mark.parametrize("failing", [1, 2, 3, 4])
def test_rank_that_fails_sends_as_much_as_the_others_do_in_that_step(name, failing):
    tx, tree = SCHEDULED[name], grads(2000)

    def rank(i):
        state, errors = tx.init(tree), []
        for step in range(6):
            given = {"v": tree["w"]} if step == failing and i == 1 else tree
            try:
                updates, state = tx.update(given, state, loss_scale=1.0)
            except (ValueError, gx.RankMismatchError) as error:
                errors.append((step, type(error), str(error)))
        return errors, updates["w"]

    (others, first), (own, second) = run_ranks(2, rank)
    assert [(step, kind) for step, kind, _ in own] == [(failing, ValueError)]
    assert [(step, kind) for step, kind, _ in others] == [(failing, gx.RankMismatchError)]
    assert "rank 1 failed in this step: ValueError: the gradients have another" in others[0][2]
    # Both tried again, and went on in step.
    assert torch.equal(first, second)


class Failing:
    """Raises on one rank, once, whatever it is given."""

    def __init__(self, steps):
        self.calls, self.steps = 0, steps

    def init(self, params):
        return ()

    def update(self, updates, state, params=None):
        if find_group().rank == 1 and self.calls >= self.steps:
            raise RuntimeError("out of luck")
        self.calls += find_group().rank == 1
        return updates, state


def test_rank_whose_stage_fails_on_anything_sends_as_much_as_in_the_step_before():
    def rank(i):
        stage = gx.declare(Failing(3), needs_reduced=False, stateful=False)
        tx = gx.chain(stage, gx.topk(gx.warmup_density([0.5, 0.1], 2)), gx.ef(), gx.allreduce())
        tree, state = grads(2000), None
        state = tx.init(tree)
        for _ in range(3):
            _, state = tx.update(tree, state)
        with pytest.raises((RuntimeError, gx.RankMismatchError), match="out of luck") as caught:
            tx.update(tree, state)
        return caught.type

    assert run_ranks(2, rank) == [gx.RankMismatchError, RuntimeError]


def test_zeros_arrive_at_the_exchange_as_the_gradients_of_the_step_would():
    tx, tree = SCHEDULED["unscaled"], grads(2000)
    state = tx.init(tree)
    for ratio in (0.5, 0.5, 0.25):
        context = Context(state.layout, "")
        extra = {"loss_scale": 1.0, "context": context}
        out = arriving(tx.exchange, tx.core, {"w": torch.zeros(2000)}, state.states, extra)
        assert out["w"].values.numel() == 2000 * ratio
        _, state = tx.update(tree, state, loss_scale=1.0)


def test_under_jit_the_error_says_why():
    jax = pytest.importorskip("jax")
    tx = gx.topk(gx.warmup_density(DENSITIES, 2), feedback=False)
    tree = {"w": jax.numpy.ones(20)}
    assert sent(tx, 3, tree) == [10, 10, 5]
    with pytest.raises(TypeError, match=r"follows the step, which is not known under jax.jit"):
        jax.jit(tx.update)(tree, tx.init(tree))


def test_what_cannot_be_traced_is_said_where_it_is_written():
    jax = pytest.importorskip("jax")
    tree = {"w": jax.numpy.ones(20)}
    tx = gx.chain(gx.topk(gx.Schedule(halves, (0.5, 0.05))), gx.ef(), gx.allreduce())
    with pytest.raises(TypeError, match=r"gx\.Schedule\(halves, .*\) cannot be followed under jax"):
        jax.jit(tx.update)(tree, tx.init(tree))


@pytest.mark.parametrize(
    "schedule",
    [
        gx.warmup_density([0.5, 0.25, 0.1], 1),
        gx.Schedule(lambda step: 0.5 / (1 + step), (0.5, 0.25, 0.5 / 3), "falling"),
    ],
    ids=repr,
)
def test_under_jit_a_chain_follows_it(schedule):
    jax = pytest.importorskip("jax")
    tx = gx.chain(gx.unscale(), gx.topk(schedule), gx.ef(), gx.allreduce())
    rows = grads(20)["w"].numpy()
    tree, update = {"w": jax.numpy.asarray(rows)}, jax.jit(tx.update)
    state, bad = tx.init(tree), {"w": jax.numpy.full(20, jax.numpy.inf, "float32")}
    found = []
    for number in range(4):
        updates, state = update(bad if number == 1 else tree, state, loss_scale=1.0)
        found.append(int((updates["w"] != 0).sum()))
    assert found == [10, 0, 5, round(20 * schedule.values[2])]
    assert update._cache_size() == 1


def test_two_schedules_under_jit_follow_each_their_own():
    jax = pytest.importorskip("jax")
    outer, inner = gx.warmup_density([1.0, 0.5], 1), gx.warmup_density([0.5, 0.25, 1.0], 1)
    tx = gx.chain(gx.topk(outer), gx.topk(inner), gx.ef(), gx.allreduce())
    tree = {"w": jax.numpy.asarray(grads(16)["w"].numpy())}
    state, found = tx.init(tree), []
    for _ in range(3):
        updates, state = jax.jit(tx.update)(tree, state)
        found.append(int((updates["w"] != 0).sum()))
    assert found == [8, 2, 8]


def test_a_function_for_jit_does_outside_of_it():
    jnp = pytest.importorskip("jax.numpy")
    schedule = gx.Schedule(lambda step: jnp.where(step < 2, 0.5, 0.1), (0.5, 0.1), "stairs")
    assert [schedule(step) for step in range(4)] == [0.5, 0.5, 0.1, 0.1]  # 0.1 is no FP32 number
    assert sent(gx.topk(schedule, feedback=False), 3) == [10, 10, 2]
    tree = {"w": jnp.ones(20)}
    assert sent(gx.topk(schedule, feedback=False), 3, tree) == [10, 10, 2]


class Stairs:
    def __call__(self, step):
        return 0.5 + 0 * step

    def __eq__(self, other):
        return isinstance(other, Stairs)

    __hash__ = None


def test_an_object_that_has_no_hash_will_do():
    jax = pytest.importorskip("jax")
    tx = gx.chain(gx.topk(gx.Schedule(Stairs(), (0.5,))), gx.ef(), gx.allreduce())
    tree = {"w": jax.numpy.arange(20.0)}
    updates, _ = jax.jit(tx.update)(tree, tx.init(tree))
    assert int((updates["w"] != 0).sum()) == 10


def test_a_bound_may_follow_a_schedule_under_jit_without_an_exchange():
    jax = pytest.importorskip("jax")
    tx = gx.chain(gx.threshold(gx.warmup_density([0.5, 2.0], 1), capacity=1.0, feedback=False))
    tree, update = {"w": jax.numpy.asarray([1.0, 3.0])}, jax.jit(tx.update)
    first, state = update(tree, tx.init(tree))
    second, _ = update(tree, state)
    assert [out["w"].decode().tolist() for out in (first, second)] == [[1, 3], [0, 3]]


def test_under_jit_values_far_apart_are_those_that_were_given():
    jax = pytest.importorskip("jax")
    bounds = gx.warmup_density([1e4, 1e-4, 2e-4], 1)
    tx = gx.chain(gx.threshold(bounds, capacity=1.0, feedback=False))
    tree, update = {"w": jax.numpy.asarray([1.5e-4])}, jax.jit(tx.update)
    state, found = tx.init(tree), []
    for _ in range(3):
        updates, state = update(tree, state)
        found.append(bool(updates["w"].decode()[0] != 0))
    assert found == [False, True, False]
