"""One chain on torch tensors and on JAX arrays: the same values, step by step, from equal states.

Selections, indices, signs, packed bytes and counters agree bit for bit. Sums and means agree within
2 units in the last place of the largest value that goes into the leaf or comes out, and what they
are rounded to at the end within one more of the leaf's own dtype. Gradients are in the normal range
(XLA flushes smaller numbers to zero on CPU), loss scales powers of two. PowerSGD factorises, and
agrees within 1e-4 of the largest value; its factors are not compared, which are not unique where a
matrix has less than full rank.

``HYPOTHESIS_PROFILE=soak`` draws 5,000 examples.
"""

import optree
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import gradtx as gx
from gradtx.core.tree import flatten, flatten_with_paths, map_leaves, unflatten
from gradtx.testing import run_ranks
from gradtx.testing import strategies as gs
from gradtx.testing.trace import Step, trace

pytest.importorskip("jax")

from meshes import over_axis

EXAMPLES = 5000 if settings.get_current_profile_name() == "soak" else 10
EPSILON = torch.finfo(torch.float32).eps
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KINDS = tuple(kind for kind in gs.KINDS if kind != "tiny")
POWERS = st.sampled_from((1.0, 2.0, 8.0, 256.0, 1024.0, 0.5))

FAMILIES = [
    [gx.topk(0.3, values="float16"), gx.ef()],
    [gx.topk(0.3), gx.cast("bfloat16"), gx.ef()],
    [gx.threshold(0.5), gx.ef()],
    [gx.random_k(0.3), gx.ef()],
    [gx.random_k(0.3, unbiased=True)],
    [gx.sign(majority_vote=True, feedback=False)],
    [gx.cast("float16"), gx.ef()],
    [gx.cast("float8_e4m3fn"), gx.ef()],
    [gx.cast("float8_e5m2", feedback=False)],
    [gx.quantize(4, block=64)],
    [gx.quantize(8), gx.ef()],
    [gx.ternary()],
    [gx.natural()],
    [gx.natural(), gx.ef()],
    [gx.powersgd(2), gx.ef()],
    [gx.topk(0.3), gx.momentum_correction(0.9)],
    [gx.topk(gx.warmup_density([0.5, 0.25], 1)), gx.ef()],
]


@st.composite
def families(draw):
    """A chain around a compressor that `gs.transformations` does not draw."""
    front = [gx.unscale()] if draw(st.booleans()) else []
    filters = draw(st.lists(gs.filters(), max_size=1))
    exchange, family = draw(gs.exchanges()), draw(st.sampled_from(FAMILIES))
    if {part.name for part in family} == {"cast", "ef"} or family[0].name == "quantize":
        # Whose residual takes what the sum has lost follows from who adds it up, and on a mesh all
        # devices own as much of each leaf: the same in the mean over ranks, not in each step.
        exchange = gx.allreduce(op=exchange.hyperparameters["op"], algorithm="gather")
    return [*front, *filters, *family, exchange]


@st.composite
def runs(draw, parts):
    """Parameters, two or three steps and a world size; a leaf is None on all ranks or on none."""
    params = draw(gs.params(DTYPES, max_leaves=4))
    exchanges = any(part.name == "allreduce" for part in parts)
    size = draw(gs.world_sizes(3)) if exchanges else 1
    unscales = any(part.name == "unscale" for part in parts)
    steps = []
    for _ in range(draw(st.integers(2, 3))):
        scale = draw(POWERS) if unscales else 1.0
        if draw(st.integers(0, 4)) == 4:
            step = draw(gs.bad_steps(params, size, loss_scale=scale))
        else:
            step = draw(gs.gradients(params, size, loss_scale=scale, kinds=KINDS))
        steps.append(in_one_program(step))
    return params, steps, size


def in_one_program(step):
    """The step, but where a rank lacks a leaf, all do."""
    rows = [flatten(tree)[0] for tree in step.gradients]
    lacking = [any(leaf is None for leaf in leaves) for leaves in zip(*rows, strict=True)]
    treespec = flatten(step.gradients[0])[1]
    return Step(
        tuple(
            unflatten(
                treespec,
                [None if gone else x for x, gone in zip(row, lacking, strict=True)],
            )
            for row in rows
        ),
        step.loss_scale,
    )


def assert_parity(parts, params, steps, size):
    """Torch goes on from the state that JAX has come to: so errors do not add up."""
    tx = gx.chain(*parts)
    traces = trace(over_axis(tx), params, steps, size, "jax")
    for one in traces:
        Near(parts, params, {}).check("init", one.states[0], tx.init(params))
    for number, step in enumerate(steps):

        def rank(i, number=number, step=step):
            state = traces[i].states[number]
            return tx.update(step.gradients[i], state, params, loss_scale=step.loss_scale)

        near = Near(parts, params, [true_gradients(step), [one.states[number] for one in traces]])
        for i, (updates, state) in enumerate(run_ranks(size, rank)):
            where = f"step {number}, rank {i} of {size}"
            near.check(where, traces[i].outputs[number], updates)
            near.check(where, traces[i].states[number + 1], state)


def true_gradients(step):
    return [map_leaves(lambda leaf: leaf.float() / step.loss_scale, t) for t in step.gradients]


def largest(array):
    """The largest finite magnitude; 0 if there is none."""
    return float(array.double().nan_to_num(0, 0, 0).abs().max()) if array.numel() else 0.0


class Near:
    """What is equal enough, given what goes into a step."""

    def __init__(self, parts, params, given):
        self.paths = sorted(flatten_with_paths(params)[0], key=len, reverse=True)
        self.units = 2 * EPSILON
        if any(part.name == "powersgd" for part in parts):
            self.units = 1e-4
        self.scales = dict.fromkeys([*self.paths, None], 0.0)
        for path, array in self._named(given):
            if array.is_floating_point():
                self.scales[path] = max(self.scales[path], largest(array))
        if any(part.hyperparameters.get("scope") == "global" for part in parts):
            # Leaves that are compressed together share a scale.
            self.scales = dict.fromkeys(self.scales, max(self.scales.values()))

    def check(self, where, found, expected):
        assert optree.tree_structure(found) == optree.tree_structure(expected), where
        for (path, a), (_, b) in zip(self._named(found), self._named(expected), strict=True):
            assert a.shape == b.shape, (where, path)
            if not b.is_floating_point() or b.itemsize == 1:
                assert torch.equal(a.double(), b.double()), (where, path, a, b)
                continue
            assert a.dtype == b.dtype, (where, path)
            scale = max(self.scales[path], largest(b))
            own = torch.finfo(b.dtype).eps * b.double().abs() if b.itemsize == 2 else 0.0
            allowed = self.units * scale + own
            same = (a == b) | (a.isnan() & b.isnan())
            near = same | ((a.double() - b.double()).abs() <= allowed)
            assert near.all(), (where, path, a, b, scale)

    def _named(self, tree):
        """The arrays of a tree, with the path of the parameter that each belongs to, or None."""
        for name, leaf in zip(*flatten_with_paths(tree)[:2], strict=True):
            if "guess" in name.split("."):
                continue
            path = next((p for p in self.paths if f".{name}".endswith(f".{p}")), None)
            for array in optree.tree_leaves(leaf):
                yield path, array


@pytest.mark.parametrize("parts", [gs.transformations(valid=True), families()], ids=["some", "all"])
@settings(
    max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.too_slow],
    # Each try at a smaller example is another program to compile.
    phases=[phase for phase in Phase if phase not in (Phase.shrink, Phase.explain)],
)
@given(data=st.data())
def test_torch_and_jax_give_the_same(parts, data):
    drawn = data.draw(parts)
    assert_parity(drawn, *data.draw(runs(drawn)))
