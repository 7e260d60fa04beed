"""Two exchanges in one chain: dense inside a node, compressed between nodes."""

import gc
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradtx as gx
from gradtx.exchange.grid import Grid
from gradtx.exchange.group import find_group
from gradtx.exchange.spread import Spread
from gradtx.testing import check_laws, run_ranks
from ranks import gloo_ranks

SHAPES = {"b": (3, 5), "s": (), "w": (40,)}
PARTS = {
    "dense": [],
    "topk": [gx.topk(0.2), gx.ef()],
    "topk fp16": [gx.topk(0.2), gx.cast("float16"), gx.ef()],
    "masked": [gx.filter_params(gx.is_matrix), gx.sign(), gx.ef()],
    "global": [gx.topk(0.1, scope="global"), gx.ef()],
    "random_k": [gx.random_k(0.3), gx.ef()],
    "quantize": [gx.quantize(8), gx.ef()],
    "powersgd": [gx.powersgd(1), gx.ef()],
    "momentum": [gx.topk(0.2), gx.momentum_correction(0.9)],
    "stochastic": [gx.ternary()],
}
EXCHANGES = {
    "auto": {},
    "sum": {"op": "sum"},
    "sharded": {"algorithm": "sharded"},
    "two_shot": {"algorithm": "two_shot"},
}


def zeros():
    return {path: torch.zeros(shape) for path, shape in SHAPES.items()}


def gradients(rank, step, *, bad=(), absent=()):
    """Those of a rank; `bad` and `absent` are pairs of rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    out = {path: torch.randn(shape, generator=generator) for path, shape in SHAPES.items()}
    if (rank, step) in bad:
        out["w"][7] = math.inf
    if (rank, step) in absent:
        out["b"] = None
    return out


def equal(one, other):
    return one.keys() == other.keys() and all(
        (x is None and other[path] is None) or torch.equal(x, other[path])
        for path, x in one.items()
    )


def train(tx, steps, given, **extra):
    """The updates of all steps, and the state in the end."""
    state, out = tx.init(zeros()), []
    for step in range(steps):
        updates, state = tx.update(given(step), state, loss_scale=2.0, **extra)
        out.append(updates)
    return out, state


places = st.sets(st.tuples(st.integers(0, 8), st.integers(0, 3)), max_size=3)


@settings(max_examples=40)
@given(
    st.sampled_from(list(PARTS)),
    st.sampled_from(list(EXCHANGES)),
    st.integers(1, 3),
    st.integers(1, 3),
    places,
    st.sets(st.tuples(st.integers(0, 8), st.integers(0, 3)), max_size=12),
)
def test_a_node_is_one_rank_with_the_mean_of_its_gradients(
    parts, exchange, nodes, local, bad, absent
):
    steps = 4
    own = partial(gradients, bad=bad, absent=absent)

    def means(node):
        """What the ranks of a node have together, by a dense exchange; it keeps what is bad."""

        def rank(i):
            tx = gx.allreduce()
            ranks = (own(node * local + i, step) for step in range(steps))
            state, out = tx.init(zeros()), []
            for grads in ranks:
                grads = {k: None if x is None else x / 2.0 for k, x in grads.items()}
                updates, state = tx.update(grads, state)
                out.append({k: None if x is None else x * 2.0 for k, x in updates.items()})
            return out

        return run_ranks(local, rank)[0]

    given = [means(node) for node in range(nodes)]

    def in_two_stages(rank):
        inner, outer = gx.node_groups(local)
        tx = gx.chain(
            gx.unscale(),
            gx.allreduce(inner),
            *PARTS[parts],
            gx.allreduce(outer, **EXCHANGES[exchange]),
        )
        return train(tx, steps, partial(own, rank))

    def in_one(rank):
        tx = gx.chain(gx.unscale(), *PARTS[parts], gx.allreduce(**EXCHANGES[exchange]))
        return train(tx, steps, given[rank].__getitem__)

    expected = run_ranks(nodes, in_one)
    for rank, (updates, state) in enumerate(run_ranks(nodes * local, in_two_stages)):
        found, after = expected[rank // local]
        assert all(map(equal, updates, found))
        assert int(state.total_notfinite) == int(after.total_notfinite)
        if state.residual is not None:
            assert equal(state.residual, after.residual)


@settings(max_examples=30)
@given(
    st.sampled_from(["dense", "topk", "topk fp16", "powersgd"]),
    st.sampled_from(["drop", "leave_out"]),
    st.integers(1, 3),
    st.integers(1, 3),
    places,
    st.data(),
)
def test_windows_of_unequal_weight(parts, on_bad, nodes, local, bad, data):
    """The result is that of the nodes, each with the weighted sums of its ranks."""
    steps, n = 4, 2
    ranks = nodes * local
    weights = data.draw(
        st.lists(
            st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=steps, max_size=steps),
            min_size=ranks,
            max_size=ranks,
        )
    )

    def run(tx, given, weight):
        state, out = tx.init(zeros()), []
        for step in range(steps):
            extra = {"weight": weight(step)}
            updates, state = tx.update(given(step), state, loss_scale=2.0, **extra)
            out.append((updates, bool(state.ready)))
        return out, state

    def in_two_stages(rank):
        inner, outer = gx.node_groups(local)
        tx = gx.chain(
            gx.unscale(),
            gx.accumulate(n, on_bad=on_bad),
            gx.allreduce(inner),
            *PARTS[parts],
            gx.allreduce(outer),
        )
        return run(tx, partial(gradients, rank, bad=bad), weights[rank].__getitem__)

    def of_node(node, step):
        """Mean by weight over the ranks of a node, and the mean of their weights."""
        members = range(node * local, (node + 1) * local)
        left_out = {rank for rank in members if (rank, step) in bad and on_bad == "leave_out"}
        own = [0.0 if rank in left_out else weights[rank][step] for rank in members]
        total, out = sum(own) or 1.0, zeros()
        for rank, weight in zip(members, own, strict=True):
            if rank not in left_out:
                each = gradients(rank, step, bad=bad)
                out = {path: out[path] + each[path] * (weight / total) for path in out}
        return out, sum(own) / local, bool(left_out)

    def in_one(rank):
        tx = gx.chain(
            gx.unscale(),
            gx.accumulate(n, on_bad=on_bad),
            *PARTS[parts],
            gx.allreduce(),
        )

        def given(step):
            return of_node(rank, step)[0]

        return run(tx, given, lambda step: of_node(rank, step)[1])

    expected = run_ranks(nodes, in_one)
    for rank, (updates, _) in enumerate(run_ranks(ranks, in_two_stages)):
        for (one, ready), (other, wanted) in zip(updates, expected[rank // local][0], strict=True):
            assert ready == wanted
            for path, x in one.items():
                torch.testing.assert_close(x, other[path], rtol=1e-4, atol=1e-5)


def test_a_delay_is_that_of_the_whole():
    def run(rank, delayed):
        inner, outer = gx.node_groups(2)
        delay = [gx.delayed(steps=1)] if delayed else []
        tx = gx.chain(
            gx.unscale(),
            gx.allreduce(inner),
            gx.topk(0.2),
            gx.ef(),
            *delay,
            gx.allreduce(outer),
            gx.scale(0.5),
        )
        out, state = train(tx, 4, partial(gradients, rank, bad={(3, 1)}))
        if delayed:
            out.append(tx.flush(state, loss_scale=2.0)[0])
        return out

    ways = [run_ranks(4, lambda rank, delayed=d: run(rank, delayed)) for d in (True, False)]
    for late, now in zip(*ways, strict=True):
        assert all(map(equal, late[1:], now))
        assert equal(late[0], zeros())


def test_three_levels():
    def run(rank):
        board, rest = gx.node_groups(2)
        node, between = gx.node_groups(2, group=rest)
        parts = gx.allreduce(board), gx.allreduce(node), gx.topk(0.2), gx.ef()
        tx = gx.chain(gx.unscale(), *parts, gx.allreduce(between))
        return train(tx, 3, partial(gradients, rank, bad={(5, 1)}))[0]

    def in_two(rank):
        inner, outer = gx.node_groups(4)
        tx = gx.chain(gx.unscale(), gx.allreduce(inner), gx.topk(0.2), gx.ef(), gx.allreduce(outer))
        return train(tx, 3, partial(gradients, rank, bad={(5, 1)}))[0]

    for three, two in zip(run_ranks(8, run), run_ranks(8, in_two), strict=True):
        for one, other in zip(three, two, strict=True):
            for path, x in one.items():
                torch.testing.assert_close(x, other[path])


class Failing:
    """A stage that raises on one rank in one step."""

    def __init__(self, rank, step):
        self._rank, self._step, self._calls = rank, step, 0

    def init(self, params):
        return ()

    def update(self, updates, state, params=None):
        if find_group().rank == self._rank:
            self._calls += 1
            if self._calls == self._step + 1:
                raise ArithmeticError("on purpose")
        return updates, state


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("where", ["before", "between", "compressing"])
def test_a_rank_that_fails_is_one_error_on_all(where, rank, step):
    def run(i):
        inner, outer = gx.node_groups(2)
        stage = gx.declare(Failing(rank, step), stateful=False, needs_reduced=False, linear=True)
        parts = [gx.topk(0.2), gx.ef()]
        if where == "compressing":
            parts = [gx.error_feedback(Broken(rank, step))]
        before = [stage] if where == "before" else []
        between = [stage] if where == "between" else []
        tx = gx.chain(
            gx.unscale(),
            *before,
            gx.allreduce(inner),
            *between,
            *parts,
            gx.allreduce(outer),
        )
        state = tx.init(zeros())
        for t in range(3):
            try:
                _, state = tx.update(gradients(i, t), state, loss_scale=2.0)
            except (ArithmeticError, gx.RankMismatchError) as error:
                return t, type(error).__name__, str(error)
        return None

    for i, found in enumerate(run_ranks(6, run, timeout=10.0)):
        assert found is not None, f"rank {i} has heard nothing"
        t, kind, text = found
        assert t == step
        assert kind == ("ArithmeticError" if i == rank else "RankMismatchError")
        assert "on purpose" in text
        assert i == rank or "ArithmeticError" in text


def Broken(rank, step):
    """A compressor that raises on one rank in one step, but not on the zeros of a rehearsal."""
    whole, calls = gx.topk(0.2), [0] * 6

    def update(updates, state, params=None, **extra):
        here = find_group().rank
        if any(x is not None and bool(x.any()) for x in updates.values()):
            calls[here] += 1
            if here == rank and calls[here] == step + 1:
                raise ArithmeticError("on purpose")
        return whole.step(updates, state, params, **extra)

    return gx.Transformation(whole.stage, whole.setup, update)


def test_groups_that_have_more_than_one_rank_in_common():
    def run(rank):
        inner, _ = gx.node_groups(2)
        tx = gx.chain(gx.allreduce(inner), gx.topk(0.5), gx.ef(), gx.allreduce())
        with pytest.raises(ValueError, match=r"ranks \[[02], [13]\] are in both groups") as caught:
            tx.update(zeros(), tx.init(zeros()))
        return str(caught.value)

    assert "node_groups(8)" in run_ranks(4, run)[0]


def test_unequal_nodes_are_refused():
    """The mean of means is not the mean where one node has more ranks than another."""

    def run(rank):
        world = find_group()
        members = [0, 1, 2] if rank < 3 else [3]
        between = [0, 3] if rank in (0, 3) else [rank]
        tx = gx.chain(
            gx.allreduce(world.part(members)),
            gx.topk(0.5),
            gx.ef(),
            gx.allreduce(world.part(between)),
        )
        with pytest.raises(gx.RankMismatchError) as caught:
            tx.update(zeros(), tx.init(zeros()))
        return str(caught.value)

    for text in run_ranks(4, run):
        assert "on 2 x 3 ranks" in text
        assert "on 1 x 3 ranks" in text


@pytest.mark.parametrize("n", [200, 60_000])
@pytest.mark.parametrize("parts", ["topk", "quantize", "powersgd"])
def test_ranks_of_a_node_with_unlike_states(parts, n):
    """Nothing is sent in pieces of two messages: all ranks of all nodes raise, in the same step."""

    def run(rank):
        inner, outer = gx.node_groups(2)
        tx = gx.chain(gx.allreduce(inner), *PARTS[parts], gx.allreduce(outer))
        params = {"w": torch.zeros(n // 20, 20)}
        state = tx.init(params)
        generator = torch.Generator().manual_seed(rank)
        grads = {"w": torch.randn(n // 20, 20, generator=generator)}
        _, state = tx.update(grads, state)
        if rank == 3:
            state.residual["w"].neg_()
        try:
            tx.update(grads, state)
        except gx.RankMismatchError as error:
            return str(error)
        return ""

    texts = run_ranks(4, run, timeout=10.0)
    assert all("ranks [2, 3] of one node have compressed different things" in x for x in texts)


class TestNodeGroups:
    def test_ranks_node_by_node(self):
        def run(rank):
            inner, outer = gx.node_groups(3)
            return inner.members, inner.rank, outer.members, outer.rank

        assert run_ranks(6, run)[4] == ((3, 4, 5), 1, (1, 4), 1)

    def test_what_torchrun_says(self, monkeypatch):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        assert run_ranks(4, lambda rank: gx.node_groups()[1].size) == [2] * 4

    def test_without_a_launcher(self, monkeypatch):
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        with pytest.raises(ValueError, match=r"no LOCAL_WORLD_SIZE.*node_groups\(8\)"):
            gx.node_groups()

    def test_what_does_not_divide(self):
        with pytest.raises(ValueError, match=r"local_size=4\): expected a divisor of the 6 ranks"):
            run_ranks(6, lambda rank: gx.node_groups(4))
        with pytest.raises(ValueError, match="local_size"):
            gx.node_groups(0)
        with pytest.raises(TypeError, match="local_size"):
            gx.node_groups(2.0)


def test_a_grid_is_one_group_of_all():
    def run(rank):
        inner, outer = gx.node_groups(3)
        grid = Grid([outer, inner])
        mine = torch.tensor([float(rank)])
        gathered = torch.cat(grid.all_gather(mine)).tolist()
        return grid.rank, grid.size, gathered, grid.all_reduce(mine + 1), grid.broadcast(mine)

    for i, (rank, size, gathered, total, first) in enumerate(run_ranks(6, run)):
        assert (rank, size) == (i, 6)
        assert gathered == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
        assert total.item() == 21.0
        assert first.item() == 0.0


class TestRules:
    inner = gx.allreduce(axis_name="node")
    outer = gx.allreduce(axis_name="data")

    def refused(self, *parts):
        with pytest.raises(gx.ChainOrderError) as caught:
            gx.chain(*parts)
        return {violation.code for violation in caught.value.violations}, caught.value

    def test_compressed_inside(self):
        parts = gx.topk(0.1), gx.ef(), self.inner, self.outer
        codes, error = self.refused(*parts)
        assert codes == {"GX406"}
        assert error.suggestion == gx.chain(self.inner, gx.topk(0.1), gx.ef(), self.outer)

    def test_compressed_inside_saves_nothing_between(self):
        """The witness of GX406."""

        def run(rank):
            inner, outer = gx.node_groups(2)
            compressed = gx.topk(0.01), gx.ef()
            tx = gx.chain(*compressed, gx.allreduce(inner), gx.allreduce(outer), check=False)
            grads = {"w": torch.arange(20_000.0)}
            _, state = tx.update(grads, tx.init(grads))
            before = outer.sent
            tx.update(grads, state)
            return outer.sent - before

        assert all(sent >= 4 * 20_000 / 2 for sent in run_ranks(4, run))

    def test_behind_both(self):
        assert self.refused(self.inner, self.outer, gx.topk(0.1), gx.ef())[0] == {"GX305"}

    def test_twice_the_same(self):
        assert self.refused(self.inner, gx.topk(0.1), gx.ef(), self.inner)[0] == {"GX402"}
        assert self.refused(gx.allreduce(), gx.allreduce())[0] == {"GX402"}

    def test_needs_the_gradient_of_all(self):
        clip = gx.clip_by_global_norm(1.0)
        assert self.refused(self.inner, clip, gx.topk(0.1), gx.ef(), self.outer)[0] == {"GX403"}

    def test_a_delay_of_the_inner_one(self):
        delay = gx.delayed(steps=1)
        assert self.refused(delay, self.inner, gx.topk(0.1), gx.ef(), self.outer)[0] == {"GX502"}

    def test_accumulating_between(self):
        parts = self.inner, gx.accumulate(2), gx.topk(0.1), gx.ef(), self.outer
        assert self.refused(*parts)[0] == {"GX501"}

    def test_a_filter_before_the_inner_one(self):
        parts = gx.skip_bn(), self.inner, gx.topk(0.1), gx.ef(), self.outer
        assert self.refused(*parts)[0] == {"GX201"}

    def test_one_over_a_mesh_and_one_over_processes(self):
        with pytest.raises(ValueError, match="write axis_name in both, or in none"):
            gx.chain(self.inner, gx.topk(0.1), gx.ef(), gx.allreduce())

    @pytest.mark.parametrize(
        "write",
        [
            lambda one, two: gx.accumulate(2, one, gx.error_feedback(gx.topk(0.1)), two),
            lambda one, two: gx.apply_if_finite(one, gx.error_feedback(gx.topk(0.1)), two),
            lambda one, two: gx.delayed(one, gx.error_feedback(gx.topk(0.1)), two, steps=1),
            lambda one, two: gx.chain(gx.accumulate(2, one), gx.topk(0.1), gx.ef(), two),
            lambda one, two: gx.chain(gx.apply_if_finite(one), gx.topk(0.1), gx.ef(), two),
        ],
    )
    def test_the_first_in_a_combinator(self, write):
        """On a bad step, or in windows of unequal weight, nodes would decide apart."""
        with pytest.raises(ValueError, match="written as stages of a chain"):
            write(self.inner, self.outer)

    def test_the_second_in_a_combinator(self):
        held = gx.apply_if_finite(gx.error_feedback(gx.topk(0.1)), self.outer)
        assert len(gx.chain(self.inner, held).inners) == 1

    def test_the_core_form_is_a_chain_again(self):
        tx = gx.chain(gx.unscale(), self.inner, gx.topk(0.1), gx.ef(), self.outer)
        assert len(gx.chain(*tx.core).inners) == 1

    def test_what_is_known_between(self):
        tx = gx.chain(self.inner, gx.topk(0.1), gx.ef(), self.outer)
        lines = gx.explain(tx).splitlines()
        assert lines[2].endswith("true, partly reduced, dense, exact")
        assert lines[5].endswith("true, reduced, dense, compensated")


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 40), torch.nn.BatchNorm1d(40), torch.nn.ReLU(), torch.nn.Linear(40, 3)
    )


def on_gloo(rank, kind, delay):
    """Trains on a grid of two by two; what the rank has in the end, and what it sent."""
    if kind == "mesh":
        mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "node"))
        inner, outer = mesh["node"], mesh["data"]
    else:
        inner, outer = gx.node_groups(2)
    late = [gx.delayed(steps=1)] if delay else []
    tx = gx.chain(
        gx.allreduce(inner), gx.skip_bn(), gx.topk(0.1), gx.ef(), *late, gx.allreduce(outer)
    )
    net = model()
    with torch.no_grad():
        net[0].weight += rank  # Those of rank 0 count.
    pipe = gx.Pipeline(tx, net)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    reports = []

    def step(report):
        reports.append(report)
        if report.ready:
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(5):
        x = torch.randn(8, 6, generator=generator)
        torch.nn.functional.cross_entropy(net(x), torch.arange(8) % 3).backward()
        step(pipe.sync(optimizer))
    for report in pipe.flush(optimizer):
        step(report)
    pipe.sync_buffers()
    saved = pipe.state_dict()
    pipe.load_state_dict(saved)
    pipe.close()
    names = {name: saved[name] for name in ("rank", "world_size", "chain")}
    weights = {name: x.clone() for name, x in net.state_dict().items()}
    return weights, reports[-1].wire_bytes, reports[-1].dense_bytes, names


@pytest.mark.parametrize("delay", [False, True])
def test_a_pipeline_on_process_groups(delay):
    ranks = gloo_ranks(4, on_gloo, "groups", delay)
    (first, sent, dense, _), *others = ranks
    for other, *_ in others:
        assert all(torch.equal(x, other[name]) for name, x in first.items())
    values = sum(p.numel() for p in model().parameters())
    assert dense == 4 * values
    assert 0 < sent < dense / 2
    assert [names["rank"] for *_, names in ranks] == [0, 1, 2, 3]
    assert {names["world_size"] for *_, names in ranks} == {4}


def test_a_device_mesh_of_two_dimensions():
    meshes, groups = gloo_ranks(4, on_gloo, "mesh", False), gloo_ranks(4, on_gloo, "groups", False)
    for (mesh, *_), (group, *_) in zip(meshes, groups, strict=True):
        assert all(torch.equal(x, group[name]) for name, x in mesh.items())


def whole_mesh(rank):
    mesh = torch.distributed.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "node"))
    with pytest.raises(ValueError, match=r"has 2 dimensions.*mesh\['data'\]"):
        gx.allreduce(mesh)


def test_a_mesh_of_two_dimensions_is_no_group():
    gloo_ranks(2, whole_mesh)


def test_on_a_mesh_of_two_axes():
    """The same values as on process groups, and a state that is whole inside a node."""
    jax = pytest.importorskip("jax")
    jnp, spec = jax.numpy, jax.sharding.PartitionSpec
    mesh = jax.make_mesh((2, 2), ("data", "node"), devices=jax.devices()[:4])
    tx = gx.chain(
        gx.unscale(),
        gx.accumulate(2),
        gx.allreduce(axis_name="node"),
        gx.topk(0.2),
        gx.ef(),
        gx.allreduce(axis_name="data"),
    )
    params = jax.tree.map(lambda x: jnp.zeros(x.shape), zeros())
    specs = gx.partition_specs(jax.eval_shape(tx.init, params), axis_name=("node", "data"))
    assert specs.residual["w"] == spec("data")
    window = specs.states[1]
    assert window.total["w"] == spec(("node", "data"))

    def step(stacked, state):
        own = jax.tree.map(lambda x: x[0], stacked)
        return tx.update(own, state, loss_scale=2.0)

    both = spec(("data", "node"))
    init = jax.jit(jax.shard_map(tx.init, mesh=mesh, in_specs=spec(), out_specs=specs))
    update = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(both, specs), out_specs=(spec(), specs))
    )
    own = partial(gradients, bad={(2, 3)})
    state, found = init(params), []
    for t in range(6):
        rows = [own(rank, t) for rank in range(4)]
        stacked = {path: jnp.stack([jnp.asarray(x[path].numpy()) for x in rows]) for path in SHAPES}
        updates, state = update(jax.device_put(stacked, jax.NamedSharding(mesh, both)), state)
        found.append(updates)

    def on_processes(rank):
        inner, outer = gx.node_groups(2)
        parts = gx.allreduce(inner), gx.topk(0.2), gx.ef(), gx.allreduce(outer)
        return train(gx.chain(gx.unscale(), gx.accumulate(2), *parts), 6, partial(own, rank))

    for updates, after in run_ranks(4, on_processes):
        assert int(after.total_notfinite) == int(state.total_notfinite) == 1
        for one, other in zip(found, updates, strict=True):
            for path, x in other.items():
                torch.testing.assert_close(torch.tensor(one[path].tolist()), x)


def test_a_chain_on_a_mesh_says_the_axes_of_all_its_exchanges():
    jax = pytest.importorskip("jax")
    params = {"w": jax.numpy.zeros(3)}
    one = gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce(axis_name="data"))
    two = gx.chain(
        gx.allreduce(axis_name="node"), gx.topk(0.5), gx.ef(), gx.allreduce(axis_name="data")
    )
    for tx, axes in ((one, ("node", "data")), (two, "data"), (two, ("a", "node", "data"))):
        with pytest.raises(ValueError, match=r"the chain has [12] exchanges; give the axis"):
            gx.partition_specs(jax.eval_shape(tx.init, params), axis_name=axes)


class TestSpread:
    """What the ranks of a node send together is what one of them would have sent alone."""

    def run(self, fn, nodes=3, local=2):
        def rank(i):
            inner, outer = gx.node_groups(local)
            spread = Spread(outer, inner)
            node = i // local
            return [fn(group, node, i % local) for group in (outer, spread)], outer, spread

        out = []
        for (alone, together), outer, spread in run_ranks(nodes * local, rank):
            out.append((alone, together, outer.sent, spread.sent))
        return out

    @pytest.mark.parametrize("n", [0, 1, 20_000, 20_001])
    @pytest.mark.parametrize("local", [1, 2, 3])
    def test_all_gather(self, n, local):
        def gather(group, node, _):
            message = torch.arange(n, dtype=torch.int64).add(7 * node).to(torch.uint8)
            return torch.stack(group.all_gather(message))

        for alone, together, *_ in self.run(gather, local=local):
            assert torch.equal(alone, together)

    @pytest.mark.parametrize("n", [1, 5000, 5001])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_all_reduce(self, n, dtype):
        def reduce(group, node, _):
            generator = torch.Generator().manual_seed(node)
            return group.all_reduce(torch.randn(n, generator=generator, dtype=dtype))

        found = self.run(reduce)
        for alone, together, *_ in found:
            assert torch.equal(alone, together)
            assert torch.equal(found[0][1], together)

    def test_all_to_all_of_unequal_parts(self):
        def swap(group, node, _):
            parts = [torch.full((10 * node + to,), 16 * node + to).byte() for to in range(3)]
            return torch.cat(group.all_to_all(parts, [10 * source + node for source in range(3)]))

        for alone, together, *_ in self.run(swap):
            assert torch.equal(alone, together)

    def test_a_node_sends_one_copy(self):
        n = 120_000

        def gather(group, node, _):
            before = group.sent
            group.all_gather(torch.zeros(n, dtype=torch.uint8))
            return group.sent - before

        found = self.run(gather)
        assert [alone for alone, *_ in found] == [2 * n] * 6
        assert [together for _, together, *_ in found] == [n] * 6


@pytest.mark.parametrize(
    "parts", [[], [gx.topk(0.2), gx.ef()], [gx.quantize(8), gx.ef()], [gx.powersgd(40), gx.ef()]]
)
@pytest.mark.parametrize("algorithm", ["auto", "sharded"])
def test_in_one_piece_or_spread_the_result_is_the_same(parts, algorithm, monkeypatch):
    large = {"w": torch.zeros(200, 300)}

    def run(rank):
        inner, outer = gx.node_groups(2)
        tx = gx.chain(gx.allreduce(inner), *parts, gx.allreduce(outer, algorithm=algorithm))
        state, out = tx.init(large), []
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + rank)
            grads = {"w": torch.randn(200, 300, generator=generator)}
            updates, state = tx.update(grads, state)
            out.append(updates)
        return out, tx.exchange.group.sent

    spread = run_ranks(4, run)
    monkeypatch.setattr(Spread, "_whole", True)
    for (one, less), (other, more) in zip(spread, run_ranks(4, run), strict=True):
        assert all(map(equal, one, other))
        assert less < 0.6 * more


def test_a_loss_scale_behind_the_inner_exchange_moves():
    def run(rank):
        inner, outer = gx.node_groups(2)
        scale = gx.dynamic_loss_scale(4.0, growth_interval=2)
        tx = gx.chain(gx.allreduce(inner), scale, gx.topk(0.2), gx.ef(), gx.allreduce(outer))
        state, scales = tx.init(zeros()), []
        for step in range(5):
            _, state = tx.update(gradients(rank, step, bad={(3, 0)}), state)
            scales.append(float(state.loss_scale))
        return scales, int(state.total_notfinite)

    assert run_ranks(4, run) == [([2.0, 2.0, 4.0, 4.0, 8.0], 1)] * 4


def test_the_state_of_another_chain_on_one_rank():
    def run(rank):
        inner, outer = gx.node_groups(2)
        tx = gx.chain(gx.allreduce(inner), gx.topk(0.2), gx.ef(), gx.allreduce(outer))
        other = gx.chain(gx.topk(0.2), gx.ef(), gx.allreduce())
        state = (other if rank == 1 else tx).init(zeros())
        with pytest.raises((AttributeError, gx.RankMismatchError)) as caught:
            tx.update(gradients(rank, 0), state)
        return type(caught.value).__name__

    mismatch = "RankMismatchError"
    assert run_ranks(4, run, timeout=10.0) == [mismatch, "AttributeError", mismatch, mismatch]


def test_laws_are_those_of_one_exchange():
    tx = gx.chain(
        gx.allreduce(axis_name="node"), gx.topk(0.1), gx.ef(), gx.allreduce(axis_name="data")
    )
    with pytest.raises(ValueError, match=r"two stages.*leave gx.allreduce\(axis_name='node'\) out"):
        check_laws(tx)


def test_what_is_sent_is_explained_for_nodes():
    def run(rank):
        inner, outer = gx.node_groups(2)
        tx = gx.chain(gx.allreduce(inner), gx.topk(0.1), gx.ef(), gx.allreduce(outer))
        return gx.explain(tx, zeros()), gx.explain(tx, zeros(), ranks=8)

    here, wanted = run_ranks(6, run)[0]
    assert "\non 3 nodes, for each of them" in here
    assert "\non 8 nodes, for each of them" in wanted


class TestPipelines:
    """On threads, in two stages."""

    def pipe(self, *behind, local=2, **options):
        inner, outer = gx.node_groups(local)
        tx = gx.chain(gx.allreduce(inner), gx.topk(0.1), gx.ef(), gx.allreduce(outer), *behind)
        return gx.Pipeline(tx, model(), **options)

    def test_what_is_sent_for_master_weights(self):
        def run(rank, *behind):
            pipe = self.pipe(*behind)
            for parameter in pipe.parameters():
                parameter.grad = torch.ones_like(parameter)
            return pipe.sync(torch.optim.SGD(pipe.parameters(), lr=0.1)).wire_bytes

        with_masters = run_ranks(4, lambda rank: run(rank, gx.master_weights()))
        assert with_masters == run_ranks(4, run)
        assert min(with_masters) > 0

    def test_one_that_is_built_wrong_on_one_rank(self):
        def run(rank):
            with pytest.raises((ValueError, gx.RankMismatchError), match="max_skips") as caught:
                self.pipe(max_skips=0 if rank == 3 else 100)
            return type(caught.value).__name__

        assert run_ranks(4, run, timeout=10.0) == ["RankMismatchError"] * 3 + ["ValueError"]

    def test_a_state_dict_from_another_grid(self):
        saved = run_ranks(4, lambda rank: self.pipe(local=2).state_dict())

        def run(rank):
            with pytest.raises(ValueError, match=r"has nodes 2: expected 1; gx.reshard"):
                self.pipe(local=4).load_state_dict(saved[rank])
            self.pipe(local=2).load_state_dict(saved[rank])

        run_ranks(4, run)


GRIDS = {
    "a node turned round": [[0, 1], [3, 2]],
    "ranks of two nodes in one": [[0, 3], [2, 1]],
    "two of three turned round": [[0, 1, 2], [3, 5, 4]],
    "one of three nodes turned round": [[0, 1], [2, 3], [5, 4]],
}


def of_grid(rank, grid):
    """The groups of a rank, numbered as torch does it: by rank, wherever they stand."""
    (node,) = (row for row in grid if rank in row)
    between = [row[node.index(rank)] for row in grid]
    world = find_group()
    return world.part(sorted(node)), world.part(sorted(between))


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("parts", [[], [gx.topk(0.9), gx.ef()]], ids=["dense", "topk"])
def test_groups_that_do_not_number_their_ranks_alike(grid, parts):
    """Pieces of a message would be put together in the wrong places."""
    large = {"w": torch.ones(20_000)}

    def update(rank):
        inner, outer = of_grid(rank, grid)
        tx = gx.chain(gx.allreduce(inner), *parts, gx.allreduce(outer))
        with pytest.raises((gx.RankMismatchError, TimeoutError)) as caught:
            tx.update(large, tx.init(large))
        return str(caught.value)

    texts = run_ranks(sum(map(len, grid)), update, timeout=10.0)
    assert any("in its node" in text or ", node " in text for text in texts)

    def build(rank):
        inner, outer = of_grid(rank, grid)
        tx = gx.chain(gx.allreduce(inner), *parts, gx.allreduce(outer))
        with pytest.raises(gx.RankMismatchError, match="in their grid"):
            gx.Pipeline(tx, large)

    run_ranks(sum(map(len, grid)), build, timeout=10.0)


def destroyed(rank):
    inner, outer = gx.node_groups(2)
    tx = gx.chain(gx.allreduce(inner), gx.allreduce(outer))
    tx.update(zeros(), tx.init(zeros()))
    torch.distributed.destroy_process_group(inner._group)
    gc.collect()
    with pytest.raises(RuntimeError, match=r"rank . of 2 has been destroyed: make groups"):
        tx.update(zeros(), tx.init(zeros()))


def test_a_group_that_is_gone_is_not_the_default_one():
    gloo_ranks(4, destroyed)


def unequal_nodes(rank):
    world = torch.distributed.new_group
    inner = [world(ranks) for ranks in ([0, 1, 2], [3])][rank // 3]
    between = [world(ranks) for ranks in ([0, 3], [1], [2])]
    tx = gx.chain(gx.allreduce(inner), gx.topk(0.1), gx.ef(), gx.allreduce(between[rank % 3]))
    with pytest.raises(gx.RankMismatchError, match=r"on 2 x 3 ranks|on 1 x 3 ranks"):
        gx.Pipeline(tx, model())


def test_a_pipeline_on_unequal_nodes():
    """Over gloo messages of unequal sizes would end the process."""
    gloo_ranks(4, unequal_nodes)
