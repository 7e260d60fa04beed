"""States for another number of ranks: nothing is lost, and what cannot be carried over is named."""

import copy
import importlib
import math
import pkgutil
import re
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradtx as gx
from gradtx.core.per_rank import per_rank_fields
from gradtx.core.tree import flatten
from gradtx.resharding import Resharded, rules_of
from gradtx.testing import run_ranks

SHAPES = {"bn1.bias": (3,), "m": (6, 5), "s": (), "w": (40,)}
COMPRESSORS = {
    "topk": [gx.topk(0.2)],
    "warm-up": [gx.topk(gx.warmup_density((0.5, 0.2, 0.1), 2))],
    "global": [gx.topk(0.1, scope="global")],
    "signs": [gx.topk(0.5), gx.sign()],
    "cast": [gx.cast("float16")],
    "random_k": [gx.random_k(0.3)],
    "powersgd": [gx.powersgd(1)],
}
POSITIONS = ("topk", "warm-up", "global")


def params():
    tree = {path: torch.zeros(shape) for path, shape in SHAPES.items()}
    return {**tree, "d": torch.zeros(4, dtype=torch.float64)}


def nothing():
    return {path: leaf.double() for path, leaf in params().items()}


def gradients(rank, step, seed, *, bad=False, absent=False):
    """Those of a rank: random; with an infinity, or without those of a leaf."""
    generator = torch.Generator().manual_seed(1000 * seed + 10 * step + rank)
    out = {k: torch.randn(x.shape, generator=generator, dtype=x.dtype) for k, x in params().items()}
    if bad:
        out["w"][7] = math.inf
    if absent:
        out["m"] = None
    return out


@st.composite
def chains(draw):
    """Chains that keep residuals or velocities, and the momentum and what the exchange makes."""
    name = draw(st.sampled_from(list(COMPRESSORS)))
    mask = draw(st.sampled_from(([], [gx.skip_bn()], [gx.filter_params(gx.is_matrix)])))
    m = draw(st.sampled_from((0.0, 0.5)))
    masking = draw(st.booleans())
    feedback = gx.momentum_correction(m, masking=masking) if m else gx.ef()
    op = draw(st.sampled_from(("mean", "sum")))
    algorithms = ["auto", "gather", "two_shot"] + ["sharded"] * (name in POSITIONS)
    algorithm = draw(st.sampled_from(algorithms))
    density = draw(st.sampled_from((None, 0.05))) if algorithm == "sharded" else None
    exchange = gx.allreduce(op=op, algorithm=algorithm, density=density)
    return gx.chain(*mask, *COMPRESSORS[name], feedback, exchange), m, op


class Account:
    """What has gone in and what has come out, in FP64.

    Law L2: the sum of what was fed in is that of what came out and what the residuals add.
    """

    def __init__(self, op, momentum):
        self.op, self.momentum = op, momentum
        self.fed, self.out, self.mass = (
            {k: x.double() for k, x in params().items()} for _ in "123"
        )

    def reduced(self, trees):
        """What trees of all ranks add to the result."""
        total = nothing()
        for tree in trees:
            for key, leaf in tree.items():
                if leaf is not None:
                    total[key] = total[key] + leaf
        return {k: x / (len(trees) if self.op == "mean" else 1) for k, x in total.items()}

    def add(self, given_, before, outputs):
        """One step that was taken."""
        carried = [self._carried(g, state) for g, state in zip(given_, before, strict=True)]
        for trees in (given_, carried):
            for key, leaf in self.reduced(trees).items():
                self.fed[key] += leaf
            for tree in trees:
                for key, leaf in tree.items():
                    self.mass[key] += 0 if leaf is None else leaf.abs()
        for key, leaf in outputs.items():
            self.out[key] += 0 if leaf is None else leaf

    def _carried(self, gradient, state):
        """The old velocity's part in the new one; a leaf without a gradient keeps its own."""
        kept = velocity(state).items()
        return {
            key: None if x is None or gradient[key] is None else self.momentum * x
            for key, x in kept
        }

    def balances(self, states):
        left = self.reduced([residual(state) for state in states])
        for key, fed in self.fed.items():
            epsilon = torch.finfo(params()[key].dtype).eps
            tolerance = 16 * epsilon * float(self.mass[key].max())
            assert ((self.out[key] + left[key] - fed).abs() <= tolerance).all(), key


def field(state, name):
    """The tree of a field, wherever it stands in a state; empty if it is nowhere."""
    if name in getattr(state, "_fields", ()):
        return getattr(state, name)
    parts = state if isinstance(state, tuple) else ()
    return next((found for part in parts if (found := field(part, name))), {})


def residual(state):
    return field(state, "residual")


def velocity(state):
    return field(state, "velocity")


def phase(tx, states, steps):
    """The updates and states of all steps, by rank: what each step is given, by rank."""

    def rank(i):
        state, outs, seen = states[i], [], [states[i]]
        for step in steps:
            updates, state = tx.update(step[i], state)
            outs.append(updates)
            seen.append(state)
        return outs, seen

    return run_ranks(len(states), rank)


sizes = st.lists(st.integers(1, 5), min_size=2, max_size=3)


@settings(max_examples=60)
@given(chains(), sizes, st.integers(0, 2**16), st.data())
def test_law_l2_holds_across_changes_of_the_number_of_ranks(drawn, sizes, seed, data):
    tx, momentum, op = drawn
    account, number = Account(op, momentum), 0
    states = [tx.init(params())] * sizes[0]
    for size in sizes:
        if size != len(states):
            states = gx.reshard(states, size, tx=tx)
            account.balances(states)
        steps = []
        for _ in range(data.draw(st.integers(1, 3))):
            bad = data.draw(st.sampled_from((None, None, None, size - 1)))
            absent = data.draw(st.sampled_from((None, None, 0)))
            steps.append(
                [gradients(i, number, seed, bad=i == bad, absent=i == absent) for i in range(size)]
            )
            number += 1
        ranks = phase(tx, states, steps)
        for i, given_ in enumerate(steps):
            if ranks[0][1][i + 1].last_finite:
                account.add(given_, [seen[i] for _, seen in ranks], ranks[0][0][i])
        states = [seen[-1] for _, seen in ranks]
        account.balances(states)


@settings(max_examples=60)
@given(chains(), st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**16))
def test_what_residuals_and_velocities_add_is_conserved_to_a_rounding(drawn, old, new, seed):
    tx, _, op = drawn
    steps = [[gradients(i, number, seed) for i in range(old)] for number in range(3)]
    before = [seen[-1] for _, seen in phase(tx, [tx.init(params())] * old, steps)]
    after = gx.reshard(before, new, tx=tx)
    assert len(after) == new
    account = Account(op, 0.0)
    for part in (residual, velocity):
        one, other = (account.reduced(list(map(part, states))) for states in (before, after))
        for key, x in one.items():
            close = (x - other[key]).abs() <= torch.finfo(params()[key].dtype).eps * x.abs()
            assert close.all(), key


def test_with_as_many_ranks_each_keeps_what_it_has():
    tx = gx.chain(gx.topk(0.2), gx.ef(), gx.allreduce())
    states = trained(tx, 3)
    for one, other in zip(states, gx.reshard(states, 3, tx=tx), strict=True):
        assert all(torch.equal(x, residual(other)[key]) for key, x in residual(one).items())


def trained(tx, size, steps=2, seed=1):
    """The states of some ranks after some steps."""
    given_ = [[gradients(i, number, seed) for i in range(size)] for number in range(steps)]
    return [seen[-1] for _, seen in phase(tx, [tx.init(params())] * size, given_)]


def test_powersgd_goes_on_as_if_nothing_had_changed():
    """Its result depends on nothing but the mean."""
    tx = gx.chain(gx.powersgd(1), gx.ef(), gx.allreduce())
    states = trained(tx, 4)
    alike = [gradients(0, 9, 1)]
    expected = phase(tx, states, [alike * 4])[0][0][0]
    found = phase(tx, gx.reshard(states, 3, tx=tx), [alike * 3])[0][0][0]
    for key, x in expected.items():
        assert torch.allclose(x, found[key], rtol=1e-4, atol=1e-5), key


def test_queued_results_stay():
    tx = gx.chain(gx.topk(0.2), gx.ef(), gx.delayed(steps=2), gx.allreduce())
    states = trained(tx, 4)
    again = gx.reshard(states, 3, tx=tx)
    queued = flatten(field(states[0], "queue"))[0]
    for state in again:
        found = flatten(field(state, "queue"))[0]
        assert all(torch.equal(x, y) for x, y in zip(queued, found, strict=True))
    before = run_ranks(4, lambda i: tx.flush(states[i])[0])[0]
    after = run_ranks(3, lambda i: tx.flush(again[i])[0])[0]
    assert all(torch.equal(x, after[key]) for key, x in before.items())


WINDOWS = {
    "by weight": (gx.accumulate(4), "mean"),
    "sum": (gx.accumulate(4, mean=False), "mean"),
    "sum over ranks": (gx.accumulate(4, mean=False), "sum"),
}


@settings(max_examples=40)
@given(
    st.sampled_from(list(WINDOWS)),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 3),
    st.lists(st.sampled_from((0.0, 1.0, 3.0)), min_size=20, max_size=20),
    st.booleans(),
)
def test_a_window_under_way_goes_on(name, old, new, first, weights, absent):
    window, op = WINDOWS[name]
    if name != "by weight":
        weights = [1.0] * len(weights)
    tx = gx.chain(window, gx.allreduce(op=op))
    total, weighed = nothing(), 0.0

    def micro_steps(states, numbers):
        def rank(i):
            state, out = states[i], None
            for number in numbers:
                given_ = gradients(i, number, 5, absent=absent and i == 0)
                out, state = tx.update(given_, state, weight=weights[5 * number + i])
            return out, state

        nonlocal weighed
        for number in numbers:
            for i in range(len(states)):
                weight = weights[5 * number + i]
                weighed += weight
                share = 1.0 if name == "by weight" or op == "sum" else 1.0 / len(states)
                for key, x in gradients(i, number, 5, absent=absent and i == 0).items():
                    total[key] += 0 if x is None else share * weight * x
        return run_ranks(len(states), rank)

    states = [state for _, state in micro_steps([tx.init(params())] * old, range(first))]
    anew = gx.reshard(states, new, tx=tx)
    (out, state), *_ = micro_steps(anew, range(first, 4))
    divisor = weighed if name == "by weight" else 1.0
    if not weighed:
        assert not state.ready
        return
    for key, x in total.items():
        got = 0 if out[key] is None else out[key]
        assert (got - x / divisor).abs().max() < 1e-5, key


def test_a_bad_micro_step_drops_the_window_on_the_new_ranks_too():
    tx = gx.chain(gx.accumulate(2), gx.topk(0.2), gx.ef(), gx.allreduce())
    steps = [[gradients(i, 0, 1, bad=i == 1) for i in range(2)]]
    states = [seen[-1] for _, seen in phase(tx, [tx.init(params())] * 2, steps)]
    later = [[gradients(i, 1, 1) for i in range(3)]]
    ranks = phase(tx, gx.reshard(states, 3, tx=tx), later)
    assert [int(seen[-1].total_notfinite) for _, seen in ranks] == [1, 1, 1]


def on_nodes(fn, nodes, local, states=None):
    """Calls a function with the chain of each rank of a grid and its state."""

    def rank(i):
        inner, outer = gx.node_groups(local)
        tx = gx.chain(gx.allreduce(inner), gx.topk(0.2), gx.ef(), gx.allreduce(outer))
        return fn(i, tx, tx.init(params()) if states is None else states[i])

    return run_ranks(nodes * local, rank)


@pytest.mark.parametrize("before", [(2, 2), (3, 1), (1, 3)])
@pytest.mark.parametrize("after", [(2, 2), (3, 1), (1, 3), (4, 1), (1, 1)])
def test_law_l2_holds_where_nodes_change(before, after):
    account = Account("mean", 0.0)

    def step(number):
        def update(i, tx, state):
            given_ = gradients(i, number, 1)
            out, state = tx.update(given_, state)
            return given_, out, state, tx

        return update

    def stepped(number, grid, states=None):
        ranks = on_nodes(step(number), *grid, states)
        account.add([g for g, *_ in ranks], [{} for _ in ranks], ranks[0][1])
        assert all(torch.equal(x, one[1][key]) for one in ranks for key, x in ranks[0][1].items())
        states = [state for *_, state, _ in ranks]
        account.balances(states)
        return states, ranks[0][-1]

    states, _ = stepped(0, before)
    states, tx = stepped(1, before, states)
    states = gx.reshard(states, math.prod(after), tx=tx)
    account.balances(states)
    states, _ = stepped(2, after, states)
    stepped(3, after, states)


@pytest.mark.parametrize(
    ("before", "after"), [((2, 2), (3, 1)), ((1, 3), (2, 2)), ((3, 1), (1, 2))]
)
def test_a_window_under_way_goes_on_where_nodes_change(before, after):
    total, weighed = nothing(), 0.0

    def micro_step(number, grid, states):
        def rank(i):
            inner, outer = gx.node_groups(grid[1])
            tx = gx.chain(gx.accumulate(2), gx.allreduce(inner), gx.allreduce(outer))
            state = tx.init(params()) if states is None else states[i]
            return *tx.update(gradients(i, number, 3), state, weight=1.0 + i), tx

        nonlocal weighed
        ranks = run_ranks(math.prod(grid), rank)
        for i in range(len(ranks)):
            weighed += 1.0 + i
            for key, x in gradients(i, number, 3).items():
                total[key] += (1.0 + i) * x
        return ranks

    ranks = micro_step(0, before, None)
    states = gx.reshard([state for _, state, _ in ranks], math.prod(after), tx=ranks[0][2])
    for out, state, _ in micro_step(1, after, states):
        assert state.ready
        for key, x in total.items():
            assert torch.allclose(out[key].double(), x / weighed, atol=1e-6), key


def test_a_pipeline_goes_on_where_nodes_change():
    """A state of other nodes is refused: its ranks have residuals that differ within a new node."""

    def job(local, states=None):
        def rank(i):
            inner, outer = gx.node_groups(local)
            tx = gx.chain(gx.allreduce(inner), gx.topk(0.2), gx.ef(), gx.allreduce(outer))
            torch.manual_seed(0)
            net = torch.nn.Linear(8, 4)
            pipe = gx.Pipeline(tx, net)
            if states is not None:
                pipe.load_state_dict(states[i])
            generator = torch.Generator().manual_seed(i)
            for parameter in net.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            pipe.sync()
            return pipe.state_dict(), net.weight.grad.tolist()

        return run_ranks(4, rank)

    states = [state for state, _ in job(2)]
    assert states[0]["nodes"] == 2
    expected = "this state_dict has nodes 2: expected 1; gx.reshard makes states for other nodes"
    with pytest.raises(ValueError, match=expected):
        job(4, states)
    first, *others = [found for _, found in job(4, gx.reshard(states, 4))]
    assert all(other == first for other in others)


def test_a_sum_over_nodes_is_refused():
    def rank(i):
        inner, outer = gx.node_groups(2)
        tx = gx.chain(gx.allreduce(inner), gx.topk(0.2), gx.ef(), gx.allreduce(outer, op="sum"))
        return tx, tx.init(params()), tx.update(gradients(i, 0, 1), tx.init(params()))[1]

    ranks = run_ranks(4, rank)
    tx = ranks[0][0]
    assert len(gx.reshard([state for _, state, _ in ranks], 2, tx=tx)) == 2
    with pytest.raises(ValueError, match=r"bn1\.bias' of rank 0 is not zero: it adds to a sum"):
        gx.reshard([state for *_, state in ranks], 2, tx=tx)


@pytest.mark.parametrize(
    "tx",
    [
        gx.chain(gx.accumulate(3), gx.allreduce(op="sum")),
        gx.chain(gx.accumulate(3), gx.topk(0.5), gx.ef(), gx.allreduce(op="sum")),
    ],
)
def test_a_window_under_way_is_refused_where_its_part_depends_on_the_number_of_ranks(tx):
    states = trained(tx, 2, steps=3)
    assert len(gx.reshard(states, 3, tx=tx)) == 3
    states = trained(tx, 2, steps=2)
    with pytest.raises(ValueError, match=r"total\.bn1\.bias' of rank 0 is not zero: a window of"):
        gx.reshard(states, 3, tx=tx)


class TraceState(NamedTuple):
    trace: Any


class Trace:
    """Momentum that is not gradtx's own."""

    def init(self, tree):
        return TraceState({key: torch.zeros_like(x) for key, x in tree.items()})

    def update(self, updates, state, params=None):
        trace = {key: 0.9 * x + updates[key] for key, x in state.trace.items()}
        return trace, TraceState(trace)


def test_what_a_foreign_transformation_keeps_before_the_exchange_is_refused_by_name():
    local = gx.declare(Trace(), name="trace", linear=True, needs_reduced=False)
    tx = gx.chain(local, gx.allreduce())
    assert len(gx.reshard([tx.init(params())] * 2, 3, tx=tx)) == 3
    expected = (
        "state 'states.0.inner_states.0.trace.bn1.bias' is not the same in states[0] and "
        "states[1], and nothing is known of how to share it out: a transformation that is not "
        "gradtx's own keeps it before the exchange of gx.chain(trace(), gx.allreduce()), or"
    )
    with pytest.raises(ValueError, match=re.escape(expected)):
        gx.reshard(trained(tx, 2), 3, tx=tx)


def test_what_a_foreign_transformation_keeps_behind_the_exchange_is_carried_over():
    tx = gx.chain(gx.topk(0.2), gx.ef(), gx.allreduce(), gx.declare(Trace(), name="trace"))
    states = trained(tx, 2)
    for state in gx.reshard(states, 3, tx=tx):
        for key, x in field(states[0], "trace").items():
            assert torch.equal(x, field(state, "trace")[key])


def saved(tx=None, size=3, steps=2, model=None):
    """The state_dicts of all ranks after some steps."""
    tx = tx or gx.chain(gx.topk(0.2), gx.ef(), gx.allreduce())

    def rank(i):
        torch.manual_seed(0)
        net = torch.nn.Linear(6, 4) if model is None else model()
        pipe = gx.Pipeline(tx, net)
        for number in range(steps):
            generator = torch.Generator().manual_seed(10 * number + i)
            for parameter in net.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            pipe.sync()
        state = pipe.state_dict()
        pipe.close()
        return state

    return run_ranks(size, rank)


def changed(saved_, /, **changes):
    return {**saved_, **changes}


def with_value(state, end, value):
    key = next(key for key in state["state"] if key.endswith(end))
    return changed(state, state={**state["state"], key: value})


@pytest.fixture(scope="module")
def three():
    return saved()


COUNT = "states.0.inner_states.1.count"
REFUSED = [
    (lambda a, b, c: [], ValueError, "reshard(states=[]): expected the states of all ranks"),
    (lambda a, b, c: [a, b], ValueError, "the states are those of 2 of 3 ranks: rank 2 is missing"),
    (lambda a, b, c: [a, b, b], ValueError, "rank 1 is there twice: states[1] and states[2]"),
    (lambda a, b, c: [a, b, c, c], ValueError, "rank 2 is there twice: states[2] and states[3]"),
    (lambda a, b, c: [a, b, 3], TypeError, "states[2] is a int: expected what Pipeline.state_dict"),
    (lambda a, b, c: [a, {}, c], ValueError, "states[1] is no state_dict of a Pipeline: it lacks"),
    (
        lambda a, b, c: [a, b, changed(c, format=2)],
        ValueError,
        "states[2] has format 2: expected",
    ),
    (lambda a, b, c: [a, b, changed(c, rank=3)], ValueError, "states[2] is of rank 3 of 3: there"),
    (lambda a, b, c: [a, b, changed(c, rank=None)], ValueError, "is of rank None of 3"),
    (lambda a, b, c: [changed(a, world_size=0), b, c], ValueError, "has world_size 0: expected"),
    (
        lambda a, b, c: [a, b, changed(c, world_size=4)],
        ValueError,
        "states[2] is of 4 ranks, states[0] of 3",
    ),
    (
        lambda a, b, c: [a, b, changed(c, chain="gx.chain()")],
        ValueError,
        "states[2] has chain 'gx.chain()': expected 'gx.chain(gx.topk(0.2), ",
    ),
    (
        lambda a, b, c: [a, b, changed(c, per_rank={})],
        ValueError,
        "states[2] is of other parameters than that of rank 0: in 'per_rank' missing ['states.0",
    ),
    (
        lambda a, b, c: [{k: x for k, x in a.items() if k != "per_rank"}, b, c],
        ValueError,
        "states[0] does not say what differs between ranks, in 'per_rank': it was saved by an",
    ),
    (
        lambda a, b, c: [a, b, changed(c, state=3)],
        ValueError,
        "states[2]['state'] is a int: expected a dict",
    ),
    (
        lambda a, b, c: [a, b, changed(c, state={**c["state"], "more": 1})],
        ValueError,
        "states[2] is of other parameters than that of rank 0: in 'state' missing nothing, "
        "unknown ['more']",
    ),
    (
        lambda a, b, c: [a, changed(b, masters={}), c],
        ValueError,
        "states[1] and states[0] do not both have ['masters']",
    ),
    (
        lambda a, b, c: [a, b, with_value(c, "residual.weight", torch.zeros(2))],
        ValueError,
        "residual.weight' of rank 2 has shape (2,) and dtype torch.float32, that of rank 0 (4, 6)",
    ),
    (
        lambda a, b, c: [a, b, with_value(c, "residual.weight", [1.0])],
        ValueError,
        "residual.weight' of rank 2 is a list: expected a tensor",
    ),
    (
        lambda a, b, c: [a, b, with_value(c, "1.count", torch.tensor(7, dtype=torch.int32))],
        ValueError,
        "states[0] and states[2] are not of one step: state 'states.0.inner_states.1.count' is 2 "
        "on rank 0 and 7 on rank 2",
    ),
    (
        lambda *abc: [changed(x, per_rank=dict.fromkeys(x["per_rank"], "half")) for x in abc],
        ValueError,
        "has the rule 'half': expected one of 'mean', 'node mean', 'sum', 'any', 'window', 'node",
    ),
    (
        lambda *abc: [changed(x, per_rank={"nowhere": "mean"}) for x in abc],
        ValueError,
        "states[0] has rules for what is not there: ['nowhere']",
    ),
    (
        lambda *abc: [changed(x, per_rank={**x["per_rank"], COUNT: "mean"}) for x in abc],
        ValueError,
        "count' has dtype torch.int32: expected float32 or float64",
    ),
    (
        lambda *abc: [changed(x, world_size=10**15) for x in abc],
        ValueError,
        "those of 3 of 1000000000000000 ranks: ranks 3, 4, 5, 6, 7, 8, 9, 10, ... are missing",
    ),
    (
        lambda a, b, c: [a, b, changed(c, format=torch.ones(2))],
        ValueError,
        "states[2] has format a Tensor: expected 1",
    ),
    (
        lambda *abc: [with_value(x, "residual.weight", torch.eye(4, 6).to_sparse()) for x in abc],
        ValueError,
        "residual.weight' of rank 0 is sparse: expected a dense tensor",
    ),
    (
        lambda *abc: [changed(x, per_rank={**x["per_rank"], COUNT: torch.ones(2)}) for x in abc],
        ValueError,
        "count' has the rule a Tensor: expected one of",
    ),
    (
        lambda *abc: [changed(x, state={**x["state"], 7: 1}, per_rank={7: "sum"}) for x in abc],
        ValueError,
        "states[0] has rules for what is not there: ['7']",
    ),
]


@pytest.mark.parametrize(("change", "kind", "text"), REFUSED, ids=[text for *_, text in REFUSED])
def test_states_that_are_not_those_of_one_job_are_refused_by_name(three, change, kind, text):
    with pytest.raises(kind, match=re.escape(text)):
        gx.reshard(change(*three), 2)


def test_what_else_a_job_has_saved_is_carried_over(three):
    """Such as the state of its optimizer, whose tensors lie deeper."""
    momentum = {0: {"momentum_buffer": torch.ones(4, 6)}}
    optimizer = {"state": momentum, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    found = gx.reshard([changed(x, optimizer=copy.deepcopy(optimizer)) for x in three], 2)
    assert torch.equal(found[1]["optimizer"]["state"][0]["momentum_buffer"], torch.ones(4, 6))
    assert found[1]["optimizer"]["param_groups"] == optimizer["param_groups"]
    other = copy.deepcopy(optimizer)
    other["state"][0]["momentum_buffer"][1, 2] = 0
    owned = zip(three, [optimizer, optimizer, other], strict=True)
    given = [changed(x, optimizer=own) for x, own in owned]
    with pytest.raises(ValueError, match=r"optimizer 'state' is not the same in states\[0\] and"):
        gx.reshard(given, 2)


@pytest.mark.parametrize(("size", "kind"), [(0, ValueError), (True, TypeError), (2.0, TypeError)])
def test_a_number_of_ranks_that_is_none_is_refused(three, size, kind):
    with pytest.raises(kind, match=re.escape(f"reshard(new_size={size}")):
        gx.reshard(three, size)


def test_states_of_a_chain_need_it():
    tx = gx.chain(gx.topk(0.2), gx.ef(), gx.allreduce())
    states = [tx.init(params())] * 2
    with pytest.raises(TypeError, match=r"reshard\(\.\.\., tx=tx\)"):
        gx.reshard(states, 3)
    with pytest.raises(TypeError, match=r"states\[0\] is no state of gx\.chain\(gx\.allreduce"):
        gx.reshard(states, 3, tx=gx.chain(gx.allreduce(), gx.scale(1.0), gx.scale(2.0)))
    with pytest.raises(ValueError, match=r"states\[1\] is of other parameters than states\[0\]"):
        gx.reshard([states[0], tx.init({"w": torch.zeros(2)})], 3, tx=tx)


def test_a_state_for_the_devices_of_a_mesh_is_refused():
    tx = gx.chain(gx.topk(0.2), gx.ef(), gx.allreduce(axis_name="data"))
    with pytest.raises(TypeError, match="its state is one for all devices of a mesh, of JAX"):
        gx.reshard([], 3, tx=tx)


def test_states_may_come_in_any_order(three):
    one, other = gx.reshard(three, 2), gx.reshard(three[::-1], 2)
    for a, b in zip(one, other, strict=True):
        assert (a["rank"], a["world_size"]) == (b["rank"], b["world_size"])
        assert all(torch.equal(x, b["state"][key]) for key, x in a["state"].items())


def test_states_are_not_written_to(three):
    before = [{k: x.clone() for k, x in state["state"].items()} for state in three]
    gx.reshard(three, 2)
    for old, state in zip(before, three, strict=True):
        assert all(torch.equal(x, state["state"][key]) for key, x in old.items())
        assert state["world_size"] == 3


def test_masters_are_carried_over():
    def model():
        return torch.nn.Linear(6, 4).bfloat16()

    def rank(i):
        torch.manual_seed(0)
        net = model()
        tx = gx.chain(gx.topk(0.2), gx.ef(), gx.allreduce(), gx.master_weights())
        pipe = gx.Pipeline(tx, net)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for parameter in net.parameters():
            parameter.grad = torch.randn(parameter.shape).bfloat16() + i
        pipe.sync(optimizer)
        optimizer.step()
        return pipe.state_dict()

    states = run_ranks(2, rank)
    again = gx.reshard(states, 3)
    for state in again:
        for key, x in states[0]["masters"].items():
            assert torch.equal(x, state["masters"][key])
    spoilt = {**states[1]["masters"], "bias": states[1]["masters"]["bias"] + 1}
    with pytest.raises(ValueError, match="masters 'bias' is not the same in"):
        gx.reshard([states[0], changed(states[1], masters=spoilt)], 3)


PIPELINES = {
    "warm-up": [gx.topk(gx.warmup_density((0.5, 0.2), 2)), gx.ef(), gx.allreduce()],
    "delayed": [gx.topk(0.2), gx.momentum_correction(0.5), gx.delayed(steps=1), gx.allreduce()],
    "windows": [gx.accumulate(3), gx.topk(0.2), gx.ef(), gx.allreduce()],
    "all of it": [
        gx.dynamic_loss_scale(4.0),
        gx.accumulate(3),
        gx.filter_params(gx.is_matrix),
        gx.powersgd(1),
        gx.ef(),
        gx.allreduce(),
        gx.clip_by_global_norm(1.0),
    ],
    "owners": [
        gx.topk(0.2),
        gx.cast("float16"),
        gx.ef(),
        gx.allreduce(algorithm="sharded", density=0.1),
    ],
}


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize(("old", "new"), [(3, 2), (1, 3)])
def test_a_pipeline_goes_on(name, old, new):
    tx = gx.chain(*PIPELINES[name])
    states = gx.reshard(saved(tx, old, steps=5), new)

    def rank(i):
        torch.manual_seed(0)
        net = torch.nn.Linear(6, 4)
        pipe = gx.Pipeline(tx, net)
        pipe.load_state_dict(states[i])
        assert pipe.state_dict()["per_rank"] == states[i]["per_rank"]
        reports = []
        for number in range(3):
            for parameter in net.parameters():
                parameter.grad = torch.ones_like(parameter) * (1 + i + number)
            reports.append(pipe.sync())
        found = [None if p.grad is None else p.grad.tolist() for p in net.parameters()]
        pipe.close()
        return reports, found

    (reports, found), *others = run_ranks(new, rank)
    # Two of the three micro-steps of a window are from the old ranks, and one result in a queue is.
    assert reports[0].ready
    assert all(other == found for _, other in others)


class Counting(Mapping):
    """Values that are made when they are asked for; knows how many of them there are at once."""

    alive = most = 0

    def __init__(self, values):
        self._values = values

    def __getitem__(self, key):
        value = self._values[key]
        if value.numel() < 1000:
            return value
        made = _Counted(value)
        return made.tensor

    def __iter__(self):
        return iter(self._values)

    def __len__(self):
        return len(self._values)


class _Counted:
    """A copy of a tensor that is counted until its memory is given back."""

    def __init__(self, value):
        self.tensor = value.clone()
        Counting.alive += 1
        Counting.most = max(Counting.most, Counting.alive)
        weakref.finalize(self.tensor.untyped_storage(), self._gone)

    @staticmethod
    def _gone():
        Counting.alive -= 1


def test_one_leaf_is_in_memory_at_a_time():
    """Of four ranks, with fifteen leaves each: of two ranks at once, one being fetched."""

    def model():
        return torch.nn.Sequential(*(torch.nn.Linear(40, 40, bias=False) for _ in range(15)))

    states = saved(size=4, model=model)
    lazy = [changed(state, state=Counting(state["state"])) for state in states]
    Counting.alive = Counting.most = 0
    seen = 0
    for _, key, values in Resharded(lazy, 3):
        seen += ".residual." in key
        assert len(values) == 3
        del values
    assert seen == 15
    assert Counting.most == 2
    assert Counting.alive == 0


def states_in(module):
    return [
        cls
        for cls in vars(module).values()
        if isinstance(cls, type) and isinstance(getattr(cls, "per_rank", None), property)
    ]


def test_every_field_that_differs_between_ranks_has_a_rule():
    found = {
        cls
        for info in pkgutil.walk_packages(gx.__path__, "gradtx.")
        if not info.name.endswith("__main__")
        for cls in states_in(importlib.import_module(info.name))
    }
    tx = gx.chain(
        gx.accumulate(2), gx.topk(0.5), gx.momentum_correction(0.9), gx.allreduce(), check=False
    )
    plain = gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce())
    tree = {"w": torch.zeros(2)}
    met, keys = set(), set()
    for chain in (tx, plain):
        state = chain.init(tree)
        keys |= set(rules_of(chain, state))
        met |= {type(part) for part in parts_of(state) if per_rank_fields(part)}
        expected = {f"{name}" for part in parts_of(state) for name in per_rank_fields(part)}
        assert all(any(f".{name}" in key for key in keys) for name in expected)
    assert found == met


def parts_of(state):
    yield state
    for part in state if isinstance(state, tuple) else ():
        yield from parts_of(part)
