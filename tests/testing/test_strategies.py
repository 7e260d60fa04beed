"""The strategies draw what they say, and the rare things too."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from gradtx.core.rules import check
from gradtx.core.tree import flatten
from gradtx.testing import strategies as gs

PARAMS = {"w": torch.zeros(8), "e": torch.zeros(0), "n": None}
SEARCH = settings(
    max_examples=2000,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def finds(strategy, condition):
    return find(strategy, condition, settings=SEARCH)


def violations(parts):
    return check([stage for part in parts for stage in part.stages])


@pytest.mark.parametrize("valid", [True, False])
@pytest.mark.parametrize("exchange", [True, False, None])
@settings(max_examples=60)
@given(data=st.data(), max_stages=st.integers(2, 7), dense=st.booleans())
def test_transformations(data, valid, exchange, max_stages, dense):
    strategy = gs.transformations(valid, exchange=exchange, max_stages=max_stages, dense=dense)
    parts = data.draw(strategy)
    assert (not violations(parts)) is valid
    assert len(parts) <= max_stages
    assert exchange in (None, any(part.name == "allreduce" for part in parts))


@pytest.mark.parametrize("valid", [True, False])
def test_chains_of_both_kinds(valid):
    tx = finds(gs.chains(), lambda tx: (not check(tx.stages)) is valid)
    assert finds(gs.chains(valid), lambda tx: len(tx.stages) >= 4)
    assert (not check(tx.stages)) is valid


@pytest.mark.parametrize(
    "wanted",
    [
        lambda parts: [part.name for part in parts].count("skip_bn") == 2,
        lambda parts: [part.name for part in parts].count("topk") == 3,
        lambda parts: [part.name for part in parts] == ["allreduce", "unscale"],
        lambda parts: any(part.hyperparameters.get("scope") == "global" for part in parts),
        lambda parts: any(part.hyperparameters.get("feedback") is False for part in parts),
        lambda parts: any(part.hyperparameters.get("op") == "sum" for part in parts),
        lambda parts: any(part.hyperparameters.get("ratio") == 1.0 for part in parts),
        lambda parts: len(parts) == 8,
        lambda parts: parts == [],
    ],
)
def test_accepted_chains_are_varied(wanted):
    finds(gs.transformations(True, max_stages=8), wanted)


DENSE = {
    "add_decayed_weights",
    "clip_by_global_norm",
    "clip_by_local_norm",
    "scale",
    "scale_by_schedule",
}


def test_transforms_are_drawn_when_asked_for():
    @settings(SEARCH, max_examples=200)
    @given(gs.transformations())
    def none_otherwise(parts):
        assert not DENSE & {part.name for part in parts}

    none_otherwise()
    for name in sorted(DENSE):
        finds(
            gs.transformations(True, dense=True),
            lambda parts, name=name: name in [part.name for part in parts],
        )
    finds(gs.transformations(False, dense=True), lambda parts: DENSE & {p.name for p in parts})


@pytest.mark.parametrize("behind", [True, False])
def test_transforms_stand_on_both_sides_of_the_exchange(behind):
    def wanted(parts):
        names = [part.name for part in parts]
        return "scale" in names and (names.index("scale") > names.index("allreduce")) is behind

    finds(gs.transformations(True, exchange=True, dense=True), wanted)


@pytest.mark.parametrize(
    "wanted",
    [
        lambda leaf: leaf is None,
        lambda leaf: leaf is not None and leaf.ndim == 0,
        lambda leaf: leaf is not None and leaf.numel() == 0,
        lambda leaf: leaf is not None and leaf.numel() == 1 and leaf.ndim,
        lambda leaf: leaf is not None and not leaf.is_contiguous(),
        *(lambda leaf, d=dtype: leaf is not None and leaf.dtype == d for dtype in gs.DTYPES),
    ],
)
def test_parameters_are_varied(wanted):
    finds(gs.params(), lambda tree: any(map(wanted, flatten(tree)[0])))


@pytest.mark.parametrize("container", [dict, list, tuple, gs.Layer])
def test_trees_are_varied(container):
    finds(gs.params(), lambda tree: any(type(child) is container for child in tree.values()))


@pytest.mark.parametrize("kind", gs.KINDS)
@pytest.mark.parametrize("dtype", gs.DTYPES)
def test_values_are_finite_and_follow_from_the_seed(kind, dtype):
    one, same, other = (gs.values(kind, 50, dtype, seed) for seed in (1, 1, 2))
    assert one.dtype == dtype
    assert one.isfinite().all()
    assert one.equal(same)
    assert one.equal(other) == (kind == "zeros")


def test_kinds():
    def drawn(kind):
        return gs.values(kind, 200, torch.float16, 0)

    assert not drawn("zeros").any()
    assert drawn("ties").abs().unique().tolist() == [0.5]
    assert (drawn("negative") <= 0).all()
    assert (drawn("positive") >= 0).all()
    assert 0 < drawn("few").count_nonzero() < 80
    assert drawn("huge").abs().max() > 500
    assert 0 < drawn("tiny").abs().max() < 3e-4
    assert drawn("spread").abs().max() > 1e5 * drawn("spread").abs().min()


@given(step=gs.gradients(PARAMS, 3, loss_scale=8.0, kinds=("ties",)))
def test_gradients_are_multiplied_by_the_loss_scale(step):
    assert len(step.gradients) == 3
    assert step.loss_scale == 8.0
    for tree in step.gradients:
        assert tree["n"] is None
        assert tree["w"] is None or tree["w"].abs().unique().tolist() == [4.0]


@pytest.mark.parametrize("ranks", [1, 3])
def test_leaves_are_absent_on_some_ranks_and_on_all(ranks):
    finds(
        gs.gradients(PARAMS, 3),
        lambda step: sum(tree["w"] is None for tree in step.gradients) == ranks,
    )


@given(step=gs.bad_steps(PARAMS, 3))
def test_bad_steps_have_one_bad_value(step):
    values = [tree["w"] for tree in step.gradients]
    assert sum(int((~value.isfinite()).sum()) for value in values) == 1


def test_sequences_have_bad_steps_and_changing_scales():
    def bad(step):
        return any(
            leaf is not None and not leaf.isfinite().all()
            for tree in step.gradients
            for leaf in flatten(tree)[0]
        )

    steps = finds(
        gs.sequences(PARAMS, 2, min_steps=3),
        lambda steps: bad(steps[1]) and not bad(steps[2]) and not bad(steps[0]),
    )
    assert len(steps) >= 3
    finds(gs.sequences(PARAMS, 1), lambda steps: len({step.loss_scale for step in steps}) > 2)
