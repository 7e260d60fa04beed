"""`filter_params` and `skip_bn`: which leaves the compressors to the right see."""

import re

import pytest
import torch
from torch import nn

import gradtx as gx


def skipped_by(tx, params, grads):
    """The paths of the leaves that come out dense."""
    out, _ = tx.update(grads, tx.init(params))
    return {path for path, leaf in out.items() if isinstance(leaf, torch.Tensor)}


def skipped_in(model):
    """The parameters of a module that `skip_bn` keeps from a compressor."""
    grads = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    return skipped_by(gx.chain(gx.skip_bn(), gx.topk(0.5), gx.ef()), model, grads)


def skipped_by_path(path):
    *outer, last = path.split(".")
    tree = {last: torch.ones(4)}
    for key in reversed(outer):
        tree = {key: tree}
    tx = gx.chain(gx.skip_bn(), gx.topk(0.5), gx.ef())
    out, _ = tx.update(tree, tx.init(tree))
    for key in path.split("."):
        out = out[key]
    return isinstance(out, torch.Tensor)


class Subclass(nn.BatchNorm2d):
    pass


class Homemade(nn.Module):
    """Normalises with running statistics, without a class of torch's."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))
        self.register_buffer("running_mean", torch.zeros(4))
        self.register_buffer("running_var", torch.ones(4))


class OnlyMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))
        self.register_buffer("running_mean", torch.zeros(4))


class Statless(nn.Module):
    """Has the buffers, but as None: nothing runs."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))
        self.register_buffer("running_mean", None)
        self.register_buffer("running_var", None)


def lazy(layer, *shape):
    layer(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    return layer


WITH_STATISTICS = {
    "BatchNorm1d": nn.BatchNorm1d(4),
    "BatchNorm2d": nn.BatchNorm2d(4),
    "BatchNorm3d": nn.BatchNorm3d(4),
    "SyncBatchNorm": nn.SyncBatchNorm(4),
    "converted": nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm2d(4)),
    "LazyBatchNorm1d": lazy(nn.LazyBatchNorm1d(), 3, 4),
    "LazyBatchNorm2d": lazy(nn.LazyBatchNorm2d(), 2, 4, 3, 3),
    "LazyBatchNorm3d": lazy(nn.LazyBatchNorm3d(), 2, 4, 3, 3, 3),
    "InstanceNorm1d": nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
    "InstanceNorm2d": nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    "InstanceNorm3d": nn.InstanceNorm3d(4, affine=True, track_running_stats=True),
    "LazyInstanceNorm2d": lazy(
        nn.LazyInstanceNorm2d(affine=True, track_running_stats=True), 2, 4, 3, 3
    ),
    "subclass": Subclass(4),
    "homemade": Homemade(),
}
WITHOUT_STATISTICS = {
    "InstanceNorm2d": nn.InstanceNorm2d(4, affine=True),
    "BatchNorm2d": nn.BatchNorm2d(4, track_running_stats=False),
    "LayerNorm": nn.LayerNorm(4),
    "GroupNorm": nn.GroupNorm(2, 4),
    "RMSNorm": nn.RMSNorm(4),
    "Linear": nn.Linear(2, 4),
    "Conv2d": nn.Conv2d(2, 4, 1),
    "PReLU": nn.PReLU(),
    "only a running mean": OnlyMean(),
    "buffers that are None": Statless(),
}


@pytest.mark.parametrize("layer", WITH_STATISTICS.values(), ids=WITH_STATISTICS)
def test_layer_with_running_statistics_is_skipped(layer):
    assert skipped_in(nn.Sequential(layer)) == {f"0.{name}" for name, _ in layer.named_parameters()}


@pytest.mark.parametrize("layer", WITHOUT_STATISTICS.values(), ids=WITHOUT_STATISTICS)
def test_layer_without_running_statistics_is_compressed(layer):
    assert skipped_in(nn.Sequential(layer)) == set()


def test_module_that_is_itself_the_layer_is_skipped():
    assert skipped_in(nn.BatchNorm1d(4)) == {"weight", "bias"}


def test_layer_in_training_or_not_is_skipped():
    assert skipped_in(nn.Sequential(nn.BatchNorm1d(4)).eval()) == {"0.weight", "0.bias"}


def test_layers_deep_in_a_model_are_found():
    block = nn.Sequential(nn.Conv2d(2, 4, 1, bias=False), nn.ModuleList([Subclass(4)]))
    model = nn.ModuleDict({"norms": nn.Sequential(block), "bn": nn.Linear(2, 2)})
    assert skipped_in(model) == {"norms.0.1.0.weight", "norms.0.1.0.bias"}


def test_module_outweighs_the_path():
    assert skipped_in(nn.ModuleDict({"bn1": nn.LayerNorm(4)})) == set()


def test_parameter_shared_with_a_normalisation_layer_is_skipped():
    model = nn.ModuleDict({"gain": nn.LayerNorm(4), "norm": nn.BatchNorm1d(4)})
    model["norm"].weight = model["gain"].weight
    assert skipped_in(model) == {"gain.weight", "norm.bias"}


def test_blog_recipe_matches_nothing():
    model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4), nn.SyncBatchNorm(4))
    assert not any("batchnorm" in str(type(param)).lower() for param in model.parameters())


@pytest.mark.parametrize(
    "path",
    [
        *(
            "bn",
            "bn1",
            "bn2.weight",
            "layer1.0.bn2.bias",
            "downsample_bn.weight",
            "conv1_bn.weight",
        ),
        *(
            "BatchNorm_0.scale",
            "BatchNorm.scale",
            "encoder.BatchNorm_12.bias",
            "BatchNorm2d.weight",
        ),
        *(
            "batch_norm.weight",
            "batchnorm1.bias",
            "sync_bn.weight",
            "SyncBatchNorm_0.scale",
            "bn_1",
        ),
        "stem_BatchNorm2d_3.weight",
    ],
)
def test_path_of_a_normalisation_layer_is_skipped(path):
    assert skipped_by_path(path)


@pytest.mark.parametrize(
    "path",
    [
        *("subnet.weight", "abnormal.weight", "bnet.weight", "cabn.weight", "urban1.weight"),
        *("norm1.weight", "LayerNorm_0.scale", "GroupNorm_0.scale", "layer_norm.weight"),
        *(
            "instance_norm.weight",
            "bnb_linear.weight",
            "bn1_free.weight",
            "1.weight",
            "prebn.weight",
        ),
    ],
)
def test_path_that_only_looks_like_one_is_compressed(path):
    assert not skipped_by_path(path)


def test_number_for_a_name_cannot_be_told_by_path():
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))
    params = dict(model.named_parameters())
    grads = {name: torch.ones_like(p) for name, p in params.items()}
    assert skipped_by(gx.chain(gx.skip_bn(), gx.topk(0.5), gx.ef()), params, grads) == set()


GRADS = {"conv.weight": torch.ones(2, 2), "conv.bias": torch.ones(2), "bn1.weight": torch.ones(2)}


@pytest.mark.parametrize(
    ("test", "dense"),
    [
        (gx.is_matrix, {"conv.bias", "bn1.weight"}),
        (~gx.is_bias, {"conv.bias"}),
        (gx.min_size(3), {"conv.bias", "bn1.weight"}),
        (gx.path_glob("conv.*"), {"bn1.weight"}),
        (lambda path, leaf, info: leaf.ndim == 1, {"conv.weight"}),
        (lambda path, leaf, info: info is None, set()),
    ],
)
def test_leaves_for_which_the_predicate_is_false_bypass_the_compressors(test, dense):
    tx = gx.chain(gx.filter_params(test), gx.topk(0.5), gx.ef())
    assert skipped_by(tx, GRADS, GRADS) == dense


def test_several_filters_intersect():
    tx = gx.chain(gx.filter_params(~gx.is_bias), gx.skip_bn(), gx.topk(0.5), gx.ef())
    assert skipped_by(tx, GRADS, GRADS) == {"conv.bias", "bn1.weight"}


def test_filter_marks_for_all_compressors_to_its_right():
    tx = gx.chain(gx.skip_bn(), gx.topk(0.5), gx.sign(), gx.ef())
    assert skipped_by(tx, GRADS, GRADS) == {"bn1.weight"}


def test_bypassing_leaf_is_handed_on_bit_for_bit():
    generator = torch.Generator().manual_seed(0)
    grads = {path: torch.randn(leaf.shape, generator=generator) for path, leaf in GRADS.items()}
    tx = gx.chain(gx.skip_bn(), gx.topk(0.5), gx.ef(), gx.allreduce())
    out, _ = tx.update(grads, tx.init(grads))
    assert torch.equal(out["bn1.weight"], grads["bn1.weight"])


def test_other_stages_see_every_leaf():
    tx = gx.chain(gx.skip_bn(), gx.unscale(), gx.topk(1.0), gx.ef(), gx.allreduce())
    out, _ = tx.update(GRADS, tx.init(GRADS), loss_scale=2.0)
    assert out.keys() == GRADS.keys()
    assert all(leaf.eq(0.5).all() for leaf in out.values())


def test_bypassing_leaf_has_no_residual():
    tx = gx.chain(gx.skip_bn(), gx.topk(0.5), gx.ef())
    residual = tx.init(GRADS).gate.inner_states[0].inner_state.residual
    assert [path for path, leaf in residual.items() if leaf is None] == ["bn1.weight"]


def test_filter_that_lets_nothing_through_leaves_all_dense():
    tx = gx.chain(gx.filter_params(gx.path_glob("nowhere")), gx.topk(0.5), gx.ef())
    assert skipped_by(tx, GRADS, GRADS) == set(GRADS)


def test_predicate_is_asked_once_a_leaf_at_init():
    asked = []

    def ask(path, leaf, info):
        asked.append((path, tuple(leaf.shape), info))
        return True

    tx = gx.chain(gx.filter_params(ask), gx.topk(0.5), gx.ef())
    state = tx.init({**GRADS, "none": None})
    tx.update({**GRADS, "none": None}, state)
    assert sorted(asked) == [
        ("bn1.weight", (2,), None),
        ("conv.bias", (2,), None),
        ("conv.weight", (2, 2), None),
    ]


def test_module_gives_the_predicate_what_it_knows():
    infos = {}

    def ask(path, leaf, info):
        infos[path] = info
        return True

    gx.chain(gx.filter_params(ask), gx.topk(0.5), gx.ef()).init(nn.BatchNorm1d(2))
    assert infos == {
        name: gx.LeafInfo(nn.BatchNorm1d, name, running_statistics=True)
        for name in ("weight", "bias")
    }


@pytest.mark.parametrize("test", [None, "bias", 3])
def test_predicate_that_is_not_callable_is_refused(test):
    text = f"a predicate is a function (path, leaf, info) -> bool, got {test!r}"
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        gx.filter_params(test)
