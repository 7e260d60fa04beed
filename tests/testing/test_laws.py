"""The laws find what is broken: for each, a chain or a transformation that breaks it.

The same tests for torch tensors on threads and for JAX arrays in one program.
"""

import itertools
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch

import gradtx as gx
from gradtx import backends
from gradtx.core.tree import flatten, map_leaves
from gradtx.exchange.group import find_group
from gradtx.testing import LawViolation, check_laws, laws, run_ranks
from gradtx.testing.trace import default_params

PARAMS = {"bn": torch.zeros(2), "half": torch.zeros(3, dtype=torch.float16), "w": torch.zeros(3, 4)}


class Stage:
    """A foreign transformation: `fn(leaf)` on every leaf, and a state that `fn` may not see."""

    def __init__(self, fn, init=lambda params: (), after=lambda updates, state: state):
        self.fn, self.init, self.after = fn, init, after

    def update(self, updates, state, params=None):
        return map_leaves(self.fn, updates), self.after(updates, state)


def stage(*args, **declared):
    return gx.declare(Stage(*args), name="custom", **declared)


def unchecked(*parts):
    return gx.chain(*parts, check=False)


class On:
    """The laws on one backend; a chain's exchange is written as that backend has it."""

    def __init__(self, backend):
        self.backend = backend
        # On JAX each number of ranks, and each leaf that is lacking, is a program to compile.
        few = {} if backend == "torch" else {"ranks": (2,), "steps": 2}
        self.options = {"params": PARAMS} | few

    def chain(self, tx):
        if self.backend == "torch":
            return tx
        from meshes import over_axis

        return over_axis(tx)

    def law(self, name, tx, **options):
        laws.LAWS[name](self.chain(tx), backend=self.backend, **{**self.options, **options})

    def broken(self, tx, law, **options):
        """The message of the law's violation."""
        with pytest.raises(LawViolation, match=rf"^{law}: ") as caught:
            self.law(law, tx, **options)
        assert caught.value.law == law
        return str(caught.value)

    def rank(self):
        if self.backend == "torch":
            return find_group().rank
        import jax

        return jax.lax.axis_index("data")


@pytest.fixture(params=["torch", "jax"])
def on(request):
    if request.param == "jax":
        pytest.importorskip("jax")
    return On(request.param)


def test_l0_a_sum_over_ranks_that_is_made_twice(on):
    tx = unchecked(gx.allreduce(op="sum"), gx.allreduce(op="sum"))
    message = on.broken(tx, "L0")
    assert "rank 0 of 2, step 0: the result is" in message
    assert "within" in message


def test_l0_gradients_that_are_divided_twice(on):
    on.broken(unchecked(gx.unscale(), gx.unscale()), "L0")


def test_l0_says_nothing_of_lossy_chains(on):
    on.law("L0", unchecked(gx.topk(0.5), gx.allreduce()))


def test_l0_leaves_out_what_stands_before_the_exchange(on):
    double = stage(lambda leaf: 2 * leaf, linear=True, stateful=False, needs_reduced=False)
    on.law("L0", gx.chain(gx.unscale(), double, gx.allreduce(), double))


def test_l1_a_residual_in_loss_scaled_units(on):
    tx = unchecked(gx.topk(0.5), gx.ef(), gx.allreduce(), gx.unscale())
    assert "loss scale" in on.broken(tx, "L1")


def test_l1_a_stage_that_clips_before_the_unscale(on):
    clip = stage(lambda leaf: leaf.clip(-1, 1))
    on.broken(unchecked(clip, gx.unscale(), gx.allreduce()), "L1")


def test_l1_holds_where_nothing_is_unscaled(on):
    on.law("L1", gx.chain(gx.allreduce()))


@pytest.mark.parametrize(
    "parts",
    [
        (gx.topk(0.5), gx.allreduce()),
        (gx.sign(),),
        (gx.topk(0.5), gx.sign(), gx.allreduce(op="sum")),
        (gx.topk(0.5), gx.ef(), gx.sign(), gx.allreduce()),
        (gx.topk(0.5), gx.ef(), gx.allreduce(), gx.sign()),
    ],
    ids=repr,
)
def test_l2_a_compressor_without_feedback(on, parts):
    assert "results + mean residual is" in on.broken(unchecked(*parts), "L2")


def test_l2_a_feedback_that_forgets(on):
    ef = gx.error_feedback(gx.topk(0.5))

    def update(updates, state, params=None, **extra):
        out, new = ef.step(updates, state, params, **extra)
        return out, new._replace(residual=map_leaves(lambda x: 0.9 * x, new.residual))

    forgetful = gx.Transformation(ef.stage, ef.setup, update, stages=ef.stages, parts=ef.parts)
    on.law("L2", gx.chain(ef, gx.allreduce()))
    on.broken(gx.chain(forgetful, gx.allreduce()), "L2")


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_l2_speaks_of_velocities_behind_momentum(on, op):
    momentum = gx.momentum_correction(0.5)
    on.law("L2", gx.chain(gx.topk(0.5), momentum, gx.allreduce(op=op)))
    on.broken(unchecked(gx.topk(0.5), momentum, gx.sign(), gx.allreduce(op=op)), "L2")
    on.broken(unchecked(gx.topk(0.5), gx.allreduce(op=op), gx.sign(), momentum), "L2")


def test_l2_holds_in_expectation_only_behind_the_feedback(on):
    on.law("L2", gx.chain(gx.topk(0.5), gx.ef(), gx.natural(), gx.allreduce()))


def test_l2_is_waived_where_that_is_written(on):
    on.law("L2", gx.chain(gx.topk(0.5, feedback=False), gx.allreduce()))


def test_l3_a_filter_that_comes_too_late(on):
    tx = unchecked(gx.topk(0.5), gx.ef(), gx.skip_bn(), gx.allreduce())
    assert "a protected leaf" in on.broken(tx, "L3")


def test_l4_a_rank_that_goes_its_own_way(on):
    own = stage(lambda leaf: leaf + on.rank())
    assert "rank 1 against rank 0 of 2" in on.broken(gx.chain(gx.allreduce(), own), "L4")


def test_l5_a_state_in_front_of_the_gate(on):
    seen = stage(
        lambda leaf: leaf,
        lambda params: map_leaves(lambda leaf: 0 * leaf, params),
        lambda updates, state: map_leaves(
            lambda new, old: old if new is None else new + 0, updates, state
        ),
    )
    on.broken(unchecked(seen, gx.unscale(), gx.allreduce()), "L5", ranks=(1,))


def test_l5_an_infinity_that_is_hidden_before_it_is_seen(on):
    clip = stage(lambda leaf: leaf.clip(-1, 1))
    assert "expected zeros" in on.broken(unchecked(clip, gx.unscale(), gx.allreduce()), "L5")


def test_l5_exempts_chains_that_are_not_gated(on):
    on.law("L5", gx.chain(gx.allreduce()))


def test_l7_a_stage_that_writes_into_the_gradients():
    """JAX arrays cannot be written to."""
    on = On("torch")
    assert "writes into the gradients" in on.broken(stage(lambda leaf: leaf.mul_(2)), "L7")


def test_l7_a_stage_that_writes_into_its_state(on):
    def count(updates, state):
        state["n"] = state["n"] + 1
        return state

    tx = stage(lambda leaf: leaf, lambda params: {"n": 0 * params["bn"]}, count)
    assert "writes into the state" in on.broken(tx, "L7")


def test_l7_a_stage_that_remembers_elsewhere(on):
    calls, lock = itertools.count(), threading.Lock()

    def add(leaf):
        with lock:
            return leaf + next(calls)

    assert "a second time" in on.broken(stage(add), "L7")


@pytest.mark.parametrize(
    "fn",
    [
        lambda leaf: leaf.reshape(-1),
        lambda leaf: leaf[..., :1],
    ],
)
def test_l8_another_shape(on, fn):
    assert "expected" in on.broken(gx.chain(gx.allreduce(), stage(fn)), "L8")


def test_l8_a_state_in_another_dtype(on):
    tx = stage(
        lambda leaf: leaf,
        lambda params: backends.of(params["bn"]).cast(params["bn"], "int32"),
        lambda updates, state: backends.of(state).cast(state, "float32"),
    )
    assert "the state changed" in on.broken(tx, "L8")


def test_l8_a_payload_behind_the_exchange(on):
    tx = unchecked(gx.allreduce(), gx.topk(0.5), gx.ef())
    assert "comes out compressed" in on.broken(tx, "L8")


class Clip:
    """As `clip_by_global_norm`, with the norm times a factor."""

    def __init__(self, max_norm, factor=lambda: 1.0):
        self.max_norm, self.factor = max_norm, factor

    def init(self, params):
        return ()

    def update(self, updates, state, params=None):
        leaves = [leaf for leaf in flatten(updates)[0] if leaf is not None]
        norm = sum((leaf**2).sum() for leaf in leaves) ** 0.5 * self.factor()
        ops = backends.of(leaves[0])
        by = ops.where(norm > self.max_norm, self.max_norm / norm, 1.0)
        return map_leaves(lambda leaf: leaf * by, updates), state


def clip(*args, **declared):
    return gx.declare(Clip(*args), name="clip_by_global_norm", **declared)


def test_l9_a_norm_that_differs_between_ranks(on):
    on.law("L9", gx.chain(gx.allreduce(), clip(0.1)), steps=1)
    own = clip(0.1, lambda: 1.0 + on.rank())
    assert "on 2 ranks, step 0: the clipped" in on.broken(
        gx.chain(gx.allreduce(), own), "L9", steps=1
    )


def test_l9_a_norm_that_is_wrong_by_little_on_all_ranks(on):
    wrong = clip(0.1, lambda: 1.0 + 2e-5)
    on.broken(gx.chain(gx.allreduce(), wrong), "L9", steps=1)


@pytest.mark.parametrize("after", [(gx.allreduce(),), (gx.topk(0.5), gx.ef(), gx.allreduce())])
def test_l9_a_norm_of_each_rank_before_the_exchange(on, after):
    early = gx.clip_by_global_norm(0.1)
    on.broken(unchecked(early, *after), "L9", ranks=(2,), steps=1)
    on.law("L9", gx.chain(*after, early), ranks=(2,), steps=1)


def test_l9_a_second_clip(on):
    parts = gx.clip_by_global_norm(0.1), gx.scale(3.0), gx.clip_by_global_norm(0.2)
    on.law("L9", gx.chain(gx.unscale(), gx.allreduce(), *parts), steps=1)


def test_l9_exempts_fragments_and_what_no_limit_is_known_of(on):
    on.law("L9", gx.chain(clip(0.1, lambda: 2.0)))
    unknown = stage(lambda leaf: 3 * leaf)
    on.law("L9", gx.chain(gx.allreduce(), gx.declare(unknown, name="clip_by_global_norm")), steps=1)


@pytest.mark.parametrize(
    "parts",
    [
        (gx.allreduce(), gx.allreduce()),
        (gx.allreduce(), gx.topk(0.1), gx.ef()),
        (gx.topk(0.2), gx.ef(), gx.allreduce(), gx.allreduce()),
    ],
    ids=repr,
)
def test_l10_traffic_that_does_not_pay(on, parts):
    assert "bytes a step on 2 ranks" in on.broken(unchecked(*parts), "L10")


def test_l10_exempts_an_exchange_told_to_gather(on):
    tx = gx.chain(gx.topk(1.0), gx.ef(), gx.allreduce(algorithm="gather"))
    on.law("L10", tx)
    on.broken(gx.chain(*tx.transformations[:2], gx.allreduce(), gx.allreduce(), check=False), "L10")


@pytest.mark.parametrize("ranks", [(2,), (3,), (4,)])
def test_l10_a_compressor_that_never_saves_is_not_blamed(on, ranks):
    on.law("L10", gx.chain(gx.topk(1.0), gx.ef(), gx.allreduce()), ranks=ranks)


def test_check_laws_checks_the_laws_it_is_told(on):
    tx = unchecked(gx.topk(0.5), gx.allreduce())
    tx = on.chain(tx)
    check_laws(tx, params=PARAMS, laws=["L0", "L1", "L4"], ranks=(2,))
    with pytest.raises(LawViolation, match=r"^L2: "):
        check_laws(tx, params=PARAMS, ranks=(2,))


def test_check_laws_refuses_unknown_laws():
    with pytest.raises(ValueError, match=r"unknown laws \['L11'\]: expected some of L0, L1, L2"):
        check_laws(gx.chain(), laws=["L2", "L11"])


def test_other_seeds_draw_other_gradients(on):
    tx = unchecked(gx.sign())
    found = {on.broken(tx, "L2", seed=seed) for seed in range(3)}
    assert len(found) == 3


def test_a_violation_is_an_assertion_error():
    assert issubclass(LawViolation, AssertionError)


@pytest.mark.parametrize("tx", [gx.chain(), gx.unscale(), gx.topk(0.5, feedback=False)], ids=repr)
def test_fragments_and_single_transformations(on, tx):
    params = default_params() if on.backend == "torch" else None
    check_laws(tx, params=params, steps=2, backend=on.backend)


def test_only_the_strategies_need_hypothesis():
    code = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "import gradtx as gx, torch\n"
        "from gradtx import testing\n"
        "assert testing.run_ranks(2, lambda rank: rank) == [0, 1]\n"
        "testing.check_laws(gx.chain(gx.allreduce()), params={'w': torch.zeros(2)})\n"
        "assert 'jax' not in sys.modules\n"
        "try:\n    testing.strategies\n"
        "except ImportError as error:\n    assert 'hypothesis' in str(error)\n"
        "else:\n    raise AssertionError('hypothesis is not there')\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=300)


def test_the_strategies_are_there_when_asked_for():
    from gradtx import testing

    assert testing.strategies.chains
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = testing.nothing


def test_ranks_see_the_violation_of_one():
    with pytest.raises(LawViolation):
        run_ranks(2, lambda rank: laws.meaning(unchecked(gx.unscale(), gx.unscale())))


def declared(tx, **changes):
    """The transformation, with a stage that says something else of it."""
    stage = replace(tx.stage, **changes)
    return gx.Transformation(stage, tx.setup, tx.step, settle=tx.settle)


def test_l2_a_compressor_that_says_it_is_unbiased_and_is_not(on):
    sign = gx.sign()
    assert "says biased=True" in on.broken(
        unchecked(declared(sign, biased=False), gx.allreduce()), "L2"
    )
    on.law("L2", gx.chain(gx.ternary(), gx.allreduce()))


@pytest.mark.parametrize("factor", [0.0, 0.9, 3.0])
def test_l2_a_result_that_is_off_by_a_factor_on_average(factor):
    ternary = gx.ternary()

    def update(updates, state, params=None, **extra):
        scaled = map_leaves(lambda x: factor * x, updates)
        return ternary.step(scaled, state, params, **extra)

    tx = gx.Transformation(ternary.stage, ternary.setup, update)
    with pytest.raises(LawViolation, match=r"^L2: over 256 steps of one gradient"):
        laws.nothing_lost(gx.chain(tx, gx.allreduce()), params=PARAMS)


def test_l2_a_compressor_that_says_it_is_a_contraction_and_is_not():
    sign = gx.sign()

    def update(updates, state, params=None, **extra):
        return sign.step(map_leaves(lambda x: 4.0 * x, updates), state, params, **extra)

    tx = gx.Transformation(sign.stage, sign.setup, update)
    with pytest.raises(LawViolation, match=r"^L2: the residual of gradient 0 .* contraction=False"):
        laws.nothing_lost(gx.chain(tx, gx.ef(), gx.allreduce()), params=PARAMS)
