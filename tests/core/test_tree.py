"""Trees of parameters and gradients: what is taken, what is refused, and how leaves are matched."""

import re
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradtx as gx
from gradtx.core.tree import (
    LeafSpec,
    arrays_in,
    expecting,
    flatten,
    layout_of,
    map_leaves,
    parameters_of,
)


class Affine(NamedTuple):
    weight: Any
    bias: Any


@dataclass
class Block:
    scale: Any
    shift: Any


optree.register_pytree_node(
    Block,
    lambda block: ((block.scale, block.shift), None, ("scale", "shift")),
    lambda _, children: Block(*children),
    namespace=optree.registry.__dict__["__GLOBAL_NAMESPACE"],
)


def leaf(*values):
    return torch.tensor(values)


A, B = leaf(1.0, -4.0), leaf(3.0)

CONTAINERS = {
    "dict": {"a": A, "b": B},
    "nested": {"x": {"a": A}, "y": {"z": {"b": B}}},
    "list": [A, B],
    "tuple": (A, B),
    "named tuple": Affine(A, B),
    "dataclass": Block(A, B),
    "ordered dict": OrderedDict(b=B, a=A),
    "default dict": defaultdict(dict, a=A, b=B),
    "mixed": {"layers": [Affine(A, None), (B, Block(A, B))], "head": {"w": B}},
    "one leaf": A,
    "nothing": {},
    "only None": [None, {"a": None}],
}


def paths_of(tree):
    return [spec.path for spec in layout_of(tree).leaves]


def refused(error, text):
    return pytest.raises(error, match=f"^{re.escape(text)}$")


def identity(tree):
    tx = gx.chain()
    return tx.update(tree, tx.init(tree))[0]


def assert_same(one, other):
    leaves, treespec = optree.tree_flatten(one, none_is_leaf=True)
    others, other_treespec = optree.tree_flatten(other, none_is_leaf=True)
    assert treespec == other_treespec
    for a, b in zip(leaves, others, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("tree", CONTAINERS.values(), ids=CONTAINERS)
def test_identity_keeps_the_containers(tree):
    assert_same(identity(tree), tree)


@pytest.mark.parametrize("tree", CONTAINERS.values(), ids=CONTAINERS)
def test_exchange_alone_keeps_the_containers(tree):
    tx = gx.allreduce()
    assert_same(tx.update(tree, tx.init(tree))[0], tree)


@pytest.mark.parametrize("tree", CONTAINERS.values(), ids=CONTAINERS)
def test_feedback_keeps_a_residual_for_each_container(tree):
    tx = gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce())
    out, state = tx.update(tree, tx.init(tree))
    residual = state.gate.inner_states[0].residual
    total = map_leaves(torch.add, out, residual)
    assert_same(total, tree)


@pytest.mark.parametrize(
    ("tree", "paths"),
    [
        ({"b": A, "a": {"c": A}}, ["a.c", "b"]),
        ([A, (A, A)], ["0", "1.0", "1.1"]),
        (Block(A, {"w": A}), ["scale", "shift.w"]),
        (OrderedDict(b=A, a=A), ["b", "a"]),
        ({1: A, 0: A}, ["0", "1"]),
        ({"a": None, "b": A}, ["a", "b"]),
        (A, [""]),
        ({}, []),
    ],
)
def test_path_is_the_keys_joined_by_dots(tree, paths):
    assert paths_of(tree) == paths


def test_leaf_that_is_none_has_neither_shape_nor_dtype():
    assert layout_of({"a": None}).leaves == (LeafSpec("a", None, None),)


def test_size_of_a_leaf_that_is_none_is_zero():
    assert LeafSpec("a", None, None).size == 0


@pytest.mark.parametrize(("shape", "size"), [((), 1), ((0, 3), 0), ((2, 3), 6)])
def test_size_is_the_number_of_values(shape, size):
    assert LeafSpec("a", shape, "float32").size == size


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        ({"a.b": A, "a": {"b": A}}, "a.b"),
        ({"x": OrderedDict([("1", A), (1, A)])}, "x.1"),
    ],
)
def test_two_leaves_with_one_path_are_refused(tree, path):
    with refused(ValueError, f"several leaves have the path '{path}'"):
        gx.chain().init(tree)


def test_all_paths_that_occur_twice_are_named():
    tree = {"a.b": A, "a": {"b": A, "c": A}, "a.c": A}
    with refused(ValueError, "several leaves have the path 'a.b', 'a.c'"):
        gx.chain().init(tree)


STRUCTURE = "the gradients have another structure than the parameters given to init: "
HINT = " (a leaf without a gradient is None, its key stays)"


@pytest.mark.parametrize(
    ("updates", "text"),
    [
        ({"a": A}, "missing 'b.c'"),
        ({"a": A, "b": {"c": B}, "d": A}, "unknown 'd'"),
        ({"a": A, "b": {"d": B}}, "missing 'b.c'; unknown 'b.d'"),
        ({}, "missing 'a', 'b.c'"),
        ([A, B], "missing 'a', 'b.c'; unknown '0', '1'"),
        ({"a": A, "b": None}, "missing 'b.c'; unknown 'b'"),
    ],
)
def test_other_structure_is_refused_naming_the_paths(updates, text):
    tx = gx.chain(gx.unscale())
    state = tx.init({"a": A, "b": {"c": B}})
    with refused(ValueError, STRUCTURE + text + HINT):
        tx.update(updates, state, loss_scale=1.0)


@pytest.mark.parametrize(
    "tx",
    [
        gx.error_feedback(gx.topk(0.5)),
        gx.masked(gx.topk(0.5, feedback=False), gx.path_glob("a")),
        gx.apply_if_finite(gx.error_feedback(gx.topk(0.5))),
    ],
    ids=repr,
)
def test_combinator_used_alone_refuses_another_structure_naming_the_path(tx):
    state = tx.init({"a": A, "b": B})
    with pytest.raises(ValueError, match="'b'"):
        tx.update({"a": A}, state)


def test_other_shape_is_refused():
    tx = gx.chain()
    state = tx.init({"a": {"w": torch.zeros(2, 3)}})
    with refused(ValueError, "leaf 'a.w' has shape (3, 2): expected (2, 3), as at init"):
        tx.update({"a": {"w": torch.zeros(3, 2)}}, state)


def test_gradient_for_a_leaf_that_was_none_at_init_is_refused():
    tx = gx.chain()
    with refused(ValueError, "leaf 'a' was None at init and has a gradient now"):
        tx.update({"a": A}, tx.init({"a": None}))


EXPECTED = "expected one of float16, bfloat16, float32, float64"
BAD_LEAVES = {
    "int64": (torch.arange(2), f"leaf 'x.w' has dtype int64: {EXPECTED}"),
    "bool": (torch.tensor([True]), f"leaf 'x.w' has dtype bool: {EXPECTED}"),
    "complex": (
        torch.ones(2, dtype=torch.complex64),
        f"leaf 'x.w' has dtype complex64: {EXPECTED}",
    ),
    "fp8": (
        torch.ones(2).to(torch.float8_e4m3fn),
        f"leaf 'x.w' has dtype float8_e4m3fn: {EXPECTED}",
    ),
    "sparse, without rows": (
        torch.tensor(1.0).to_sparse(),
        "leaf 'x.w' is sparse (torch.sparse_coo): expected a dense gradient, as at init; write "
        "sparse=False. Rows are taken of an Embedding's weight, if init has the module and nothing "
        "else uses it, or where init has a sparse tensor",
    ),
    "float": (
        1.0,
        "leaf 'x.w' is a float: expected a torch tensor, a JAX array or None",
    ),
    "numpy": (
        torch.ones(2).numpy(),
        "leaf 'x.w' is a ndarray: expected a torch tensor, a JAX array or None",
    ),
    "str": ("no", "leaf 'x.w' is a str: expected a torch tensor, a JAX array or None"),
}


@pytest.mark.parametrize(("bad", "text"), BAD_LEAVES.values(), ids=BAD_LEAVES)
def test_parameter_that_is_no_float_array_is_refused(bad, text):
    with refused(TypeError, text):
        gx.chain().init({"x": {"w": bad}, "v": A})


@pytest.mark.parametrize(("bad", "text"), BAD_LEAVES.values(), ids=BAD_LEAVES)
def test_gradient_that_is_no_float_array_is_refused(bad, text):
    tx = gx.chain()
    state = tx.init({"x": {"w": torch.ones(2)}, "v": A})
    with refused(TypeError, text):
        tx.update({"x": {"w": bad}, "v": A}, state)


DTYPES = ["float16", "bfloat16", "float32", "float64"]


@pytest.mark.parametrize("parameter", DTYPES)
@pytest.mark.parametrize("gradient", DTYPES)
def test_gradients_may_be_wider_than_the_parameters_but_no_other_dtype(parameter, gradient):
    tx = gx.chain(gx.allreduce())
    state = tx.init({"w": A.to(getattr(torch, parameter))})
    updates = {"w": A.to(getattr(torch, gradient))}
    wide = "float64" if parameter == "float64" else "float32"
    if gradient in (parameter, wide):
        assert tx.update(updates, state)[0]["w"].dtype == getattr(torch, gradient)
        return
    or_wider = "" if wide == parameter else f", or {wide}"
    text = (
        f"leaf 'w' has dtype {gradient}: expected {parameter}, as at init{or_wider}; "
        "give init a tree with the dtypes of the gradients"
    )
    with refused(TypeError, text):
        tx.update(updates, state)


def test_leaves_are_matched_by_path_whatever_the_order():
    tx = gx.chain(gx.topk(0.5), gx.ef())
    state = tx.init({"a": torch.zeros(2), "b": torch.zeros(2)})
    _, state = tx.update({"a": leaf(3.0, 1.0), "b": leaf(30.0, 10.0)}, state)
    out, _ = tx.update(OrderedDict(b=torch.zeros(2), a=torch.zeros(2)), state)
    assert list(out) == ["b", "a"]
    assert out["a"].decode().tolist() == [0.0, 1.0]
    assert out["b"].decode().tolist() == [0.0, 10.0]


def test_combinator_used_alone_matches_leaves_by_path():
    tx = gx.error_feedback(gx.topk(0.5))
    state = tx.init({"a": torch.zeros(2), "b": torch.zeros(2)})
    _, state = tx.update({"a": leaf(3.0, 1.0), "b": leaf(30.0, 10.0)}, state)
    out, _ = tx.update(OrderedDict(b=torch.zeros(2), a=torch.zeros(2)), state)
    assert out["a"].decode().tolist() == [0.0, 1.0]
    assert out["b"].decode().tolist() == [0.0, 10.0]


def test_mask_used_alone_matches_leaves_by_path():
    tx = gx.masked(gx.topk(0.5, feedback=False), gx.path_glob("a"))
    state = tx.init({"a": torch.zeros(2), "b": torch.zeros(2)})
    out, _ = tx.update(OrderedDict(b=torch.ones(2), a=torch.ones(2)), state)
    assert {path: type(value) for path, value in out.items()} == {
        "a": gx.Sparse,
        "b": torch.Tensor,
    }


def test_ordered_dict_at_init_and_dict_at_update_are_matched_by_path():
    tx = gx.chain()
    state = tx.init(OrderedDict(b=torch.zeros(1), a=torch.zeros(2)))
    out, _ = tx.update({"a": A, "b": B}, state)
    assert_same(out, {"a": A, "b": B})


@given(st.permutations(["a", "b", "c", "d"]), st.permutations(["a", "b", "c", "d"]))
def test_order_of_keys_never_matters(first, second):
    values = {key: torch.full((2,), float(i + 1)) for i, key in enumerate("abcd")}
    tx = gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce())
    state = tx.init(OrderedDict((key, values[key]) for key in first))
    for _ in range(2):
        out, state = tx.update(OrderedDict((key, values[key]) for key in second), state)
    assert list(out) == second
    assert {key: value.tolist() for key, value in out.items()} == {
        key: [0.0, 2 * value[1].item()] for key, value in values.items()
    }


def test_layouts_of_other_containers_have_one_fingerprint():
    trees = [{"a": A, "b": B}, OrderedDict(b=B, a=A)]
    assert len({layout_of(tree).fingerprint for tree in trees}) == 1


@pytest.mark.parametrize(
    "tree",
    [{"a": A}, {"a": A, "c": B}, {"a": B, "b": B}, {"a": A.double(), "b": B}],
    ids=["missing", "renamed", "other shape", "other dtype"],
)
def test_layouts_that_differ_have_other_fingerprints(tree):
    assert layout_of(tree).fingerprint != layout_of({"a": A, "b": B}).fingerprint


def test_gradient_that_is_none_counts_as_zero_and_comes_back_none():
    tx = gx.chain(gx.allreduce())
    out, _ = tx.update({"a": None, "b": B}, tx.init({"a": A, "b": B}))
    assert out["a"] is None
    assert torch.equal(out["b"], B)


def test_layout_is_static():
    assert optree.tree_leaves(layout_of({"a": A})) == []


def test_autograd_history_ends_at_the_chain():
    tx = gx.chain(gx.topk(0.5), gx.ef())
    grads = {"w": torch.tensor([3.0, 1.0], requires_grad=True)}
    out, state = tx.update(grads, tx.init(grads))
    assert not out["w"].values.requires_grad
    assert not state.gate.inner_states[0].residual["w"].requires_grad


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Linear(3, 3, bias=False)
        self.decoder = torch.nn.Linear(3, 3, bias=False)
        self.decoder.weight = self.encoder.weight


def test_module_stands_for_its_named_parameters():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    layout = gx.chain().init(model).layout
    assert {spec.path: spec.shape for spec in layout.leaves} == {
        name: tuple(p.shape) for name, p in model.named_parameters()
    }


def test_module_tells_the_layer_of_each_parameter():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    _, info = parameters_of(model)
    assert info["0.weight"] == gx.LeafInfo(torch.nn.Linear, "weight", False)
    assert info["1.bias"] == gx.LeafInfo(torch.nn.BatchNorm1d, "bias", True)


def test_parameter_of_the_module_itself_has_its_bare_name():
    _, info = parameters_of(torch.nn.Linear(2, 3))
    assert sorted(info) == ["bias", "weight"]


def test_shared_parameter_is_one_leaf_under_its_first_name():
    params, info = parameters_of(Tied())
    assert list(params) == list(info) == ["encoder.weight"]


def test_parameter_shared_with_a_normalisation_layer_is_one_of_it():
    model = torch.nn.ModuleDict({"linear": torch.nn.Linear(3, 3), "bn": torch.nn.BatchNorm1d(3)})
    model["bn"].bias = model["linear"].bias
    _, info = parameters_of(model)
    assert info["linear.bias"].running_statistics


def test_gradients_of_a_module_are_taken_by_the_state_made_from_it():
    model = Tied()
    tx = gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce())
    grads = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    out, _ = tx.update(grads, tx.init(model))
    assert list(out) == ["encoder.weight"]


def test_module_without_parameters_is_an_empty_tree():
    tx = gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce())
    assert tx.update({}, tx.init(torch.nn.ReLU()))[0] == {}


@pytest.mark.parametrize(
    ("model", "path"),
    [
        (torch.nn.Sequential(torch.nn.LazyBatchNorm1d()), "0.bias"),
        (torch.nn.LazyLinear(3, bias=False), "weight"),
    ],
)
def test_lazy_parameter_is_refused(model, path):
    text = f"parameter '{path}' is lazy and has no shape yet: run a forward first"
    with refused(ValueError, text):
        gx.chain(gx.skip_bn(), gx.topk(0.5), gx.ef()).init(model)


def test_lazy_parameter_is_taken_after_a_forward():
    model = torch.nn.Sequential(torch.nn.LazyLinear(3))
    model(torch.ones(1, 2))
    assert paths_of(dict(model.named_parameters())) == ["0.bias", "0.weight"]


def test_parameter_frozen_in_the_module_is_a_leaf_like_others():
    model = torch.nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    tx = gx.chain(gx.allreduce())
    out, _ = tx.update({"weight": None, "bias": torch.ones(2)}, tx.init(model))
    assert out["weight"] is None


@pytest.mark.parametrize(
    "tx",
    [gx.topk(0.5, feedback=False), gx.sign(feedback=False), gx.error_feedback(gx.topk(0.5))],
    ids=repr,
)
def test_transformation_used_alone_refuses_whole_numbers_naming_the_path(tx):
    grads = {"w": torch.arange(4)}
    with pytest.raises(TypeError, match="'w'"):
        tx.update(grads, tx.init(grads))


def test_torch_beside_jax_is_refused_at_once():
    jnp = pytest.importorskip("jax.numpy")
    with pytest.raises(TypeError, match="some leaves are torch tensors and some JAX arrays"):
        layout_of({"a": torch.ones(2), "b": jnp.ones(2)})


EXPECTED = {"b": torch.zeros(2), "a": torch.zeros(3), "c": None}


@pytest.mark.parametrize(
    "tree",
    [
        EXPECTED,
        dict(sorted(EXPECTED.items())),
        OrderedDict(EXPECTED),
        {**EXPECTED, "a": [torch.ones(1)]},
        {**EXPECTED, "a": {"x": torch.ones(1)}},
        {"b": torch.zeros(2)},
        {**EXPECTED, "d": torch.zeros(1)},
        list(EXPECTED.values()),
        {},
        torch.zeros(2),
        None,
    ],
)
@pytest.mark.parametrize("expected", [EXPECTED, {"x": EXPECTED}, [torch.zeros(1)], {}])
def test_an_expected_structure_makes_no_difference(tree, expected):
    leaves, treespec = flatten(tree)
    arrays = arrays_in(tree)
    with expecting(layout_of(expected)):
        found, spec = flatten(tree)
        again = arrays_in(tree)
    assert list(map(id, found)) == list(map(id, leaves))
    assert list(map(id, again)) == list(map(id, arrays))
    assert spec == treespec
    back = optree.tree_unflatten(spec, leaves)
    assert type(back) is type(tree)
    if isinstance(tree, dict):
        assert list(back) == list(tree)


def test_results_have_the_keys_in_the_order_of_the_gradients():
    tx = gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce())
    params = {"b": torch.ones(2), "a": torch.ones(2)}
    state = tx.init(params)
    for grads in (params, dict(sorted(params.items())), OrderedDict(params)):
        updates, state = tx.update(grads, state)
        assert (type(updates), list(updates)) == (type(grads), list(grads))
