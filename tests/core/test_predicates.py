"""Ready-made predicates, their combinations, and how they print."""

import re
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradtx as gx
from gradtx.core.predicates import all_of, predicate

LEAVES = {
    "conv.weight": torch.zeros(4, 3, 3, 3),
    "conv.bias": torch.zeros(4),
    "head.weight": torch.zeros(2, 4),
    "head.bias": torch.zeros(2),
    "scale": torch.zeros(()),
    "empty": torch.zeros(0, 5),
    "bias": torch.zeros(3),
}


def chosen(test):
    return {path for path, leaf in LEAVES.items() if test(path, leaf, None)}


def keep_weights(path, leaf, info):
    return path.endswith("weight")


@pytest.mark.parametrize(
    ("test", "paths"),
    [
        (gx.is_matrix, {"conv.weight", "head.weight", "empty"}),
        (gx.is_bias, {"conv.bias", "head.bias", "bias"}),
        (gx.min_size(1), set(LEAVES) - {"empty"}),
        (gx.min_size(8), {"conv.weight", "head.weight"}),
        (gx.min_size(9), {"conv.weight"}),
        (gx.path_glob("head.*"), {"head.weight", "head.bias"}),
        (gx.path_glob("*.weight", "scale"), {"conv.weight", "head.weight", "scale"}),
        (gx.path_glob("Head.*"), set()),
        (gx.path_glob("?onv.[bw]*"), {"conv.weight", "conv.bias"}),
        (gx.is_batch_norm, set()),
        (gx.is_matrix & ~gx.path_glob("head.*"), {"conv.weight", "empty"}),
        (gx.is_bias | gx.min_size(9), {"conv.weight", "conv.bias", "head.bias", "bias"}),
        (~(gx.is_bias | gx.is_matrix), {"scale"}),
        (gx.is_bias & gx.is_matrix, set()),
        (gx.is_matrix & keep_weights, {"conv.weight", "head.weight"}),
        (
            gx.is_bias | keep_weights,
            {"conv.weight", "conv.bias", "head.weight", "head.bias", "bias"},
        ),
        (all_of(gx.is_matrix, keep_weights, gx.min_size(9)), {"conv.weight"}),
        (all_of(gx.is_matrix), {"conv.weight", "head.weight", "empty"}),
        (predicate(keep_weights), {"conv.weight", "head.weight"}),
    ],
    ids=lambda value: repr(value) if callable(value) else "",
)
def test_predicate_chooses(test, paths):
    assert chosen(test) == paths


def test_name_that_only_ends_in_bias_is_no_bias():
    assert not gx.is_bias("layer.rebias", torch.zeros(2))


def test_info_may_be_left_out():
    assert gx.is_matrix("w", torch.zeros(2, 2))


def test_info_is_handed_to_a_plain_function():
    info = gx.LeafInfo(torch.nn.Embedding, "weight", False)
    test = gx.is_matrix & (lambda path, leaf, info: info.layer is torch.nn.Embedding)
    assert test("w", torch.zeros(2, 2), info)


def test_what_a_function_gives_is_made_a_bool():
    assert predicate(lambda *leaf: [1])("w", torch.zeros(1)) is True


PRINTED = [
    (gx.is_matrix, "gx.is_matrix"),
    (gx.is_bias, "gx.is_bias"),
    (gx.is_batch_norm, "gx.is_batch_norm"),
    (gx.min_size(7), "gx.min_size(7)"),
    (gx.path_glob("a.*", "b"), "gx.path_glob('a.*', 'b')"),
    (~gx.is_bias, "~gx.is_bias"),
    (~~gx.is_bias, "~~gx.is_bias"),
    (gx.is_matrix & ~gx.is_bias, "gx.is_matrix & ~gx.is_bias"),
    (gx.is_matrix & gx.min_size(2) & gx.is_bias, "(gx.is_matrix & gx.min_size(2)) & gx.is_bias"),
    (~(gx.is_matrix | gx.is_bias), "~(gx.is_matrix | gx.is_bias)"),
    (gx.is_matrix | gx.path_glob("a b"), "gx.is_matrix | (gx.path_glob('a b'))"),
]


@pytest.mark.parametrize(("test", "code"), PRINTED, ids=[code for _, code in PRINTED])
def test_predicate_prints_as_code(test, code):
    assert repr(test) == code


@pytest.mark.parametrize(("test", "code"), PRINTED, ids=[code for _, code in PRINTED])
def test_printed_predicate_can_be_pasted(test, code):
    pasted = eval(code, {"gx": gx})
    assert pasted == test
    assert hash(pasted) == hash(test)


def test_predicates_that_differ_are_not_equal():
    tests = [test for test, _ in PRINTED]
    assert len(set(tests)) == len(tests)


def test_predicate_is_not_equal_to_its_code():
    assert gx.is_bias != "gx.is_bias"


def test_plain_function_prints_by_its_module_and_name():
    assert repr(predicate(keep_weights)) == f"{__name__}.keep_weights"


def test_two_different_lambdas_are_not_equal():
    assert predicate(lambda *leaf: True) != predicate(lambda *leaf: False)


ATOMS = [gx.is_matrix, gx.is_bias, gx.min_size(3), gx.path_glob("conv.*"), gx.path_glob("a b")]
combined = st.recursive(
    st.sampled_from(ATOMS),
    lambda inner: st.one_of(
        inner.map(lambda a: ~a),
        st.tuples(inner, inner).map(lambda pair: pair[0] & pair[1]),
        st.tuples(inner, inner).map(lambda pair: pair[0] | pair[1]),
    ),
    max_leaves=6,
)


@given(combined)
def test_pasted_combination_chooses_the_same(test):
    assert chosen(eval(repr(test), {"gx": gx})) == chosen(test)


@given(combined, combined)
def test_combinations_are_those_of_sets(one, other):
    assert chosen(one & other) == chosen(one) & chosen(other)
    assert chosen(one | other) == chosen(one) | chosen(other)
    assert chosen(~one) == set(LEAVES) - chosen(one)


def refused(error, text):
    return pytest.raises(error, match=f"^{re.escape(text)}$")


@pytest.mark.parametrize("n", [0, -1, 2.0, True, "3", None])
def test_size_that_is_no_positive_whole_number_is_refused(n):
    with refused(ValueError, f"min_size(n) takes a whole number of 1 or more, got {n!r}"):
        gx.min_size(n)


@pytest.mark.parametrize("patterns", [(), (3,), ("a", None), (["a"],)])
def test_pattern_that_is_no_string_is_refused(patterns):
    with refused(TypeError, f"path_glob takes one or more strings, got {patterns!r}"):
        gx.path_glob(*patterns)


@pytest.mark.parametrize("test", [None, "bias", 3])
def test_what_is_not_callable_is_refused(test):
    with refused(TypeError, f"a predicate is a function (path, leaf, info) -> bool, got {test!r}"):
        gx.is_matrix & test


def test_mask_with_what_is_not_callable_is_refused():
    with refused(TypeError, "a predicate is a function (path, leaf, info) -> bool, got 'bias'"):
        gx.masked(gx.topk(0.5), "bias")


class Keep:
    def __call__(self, path, leaf, info):
        return True


def test_no_address_is_in_the_code_of_a_predicate():
    assert repr(predicate(Keep())) == f"{__name__}.Keep"
    assert repr(predicate(partial(Keep.__call__, Keep()))) == f"{__name__}.Keep.__call__"
