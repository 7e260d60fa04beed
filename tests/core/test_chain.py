"""`chain`: composition, what prints and compares, what is refused and how, what it resolves to."""

import itertools
import math
import os
import pickle
import re
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optax
import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradtx as gx
from gradtx.core.combinators import Gate
from gradtx.core.payload import Payload, decode_leaves

INF = float("inf")


def values_of(tree):
    """All numbers of a tree of tensors and payloads, payloads decoded, as lists by path."""
    paths, leaves, _ = optree.tree_flatten_with_path(
        tree, is_leaf=lambda node: isinstance(node, Payload)
    )
    return {path: leaf.tolist() for path, leaf in zip(paths, decode_leaves(leaves), strict=True)}


def gradients(seed, *, steps=4):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"conv.weight": (4, 3), "bn1.weight": (4,), "head.bias": (5,)}
    return [
        {path: torch.randn(shape, generator=generator) for path, shape in shapes.items()}
        for _ in range(steps)
    ]


def feedback_state(state):
    """The residuals in a state, wherever they are."""
    found = []
    optree.tree_map(
        found.append,
        state,
        is_leaf=lambda node: hasattr(node, "residual"),
    )
    return [node.residual for node in found if hasattr(node, "residual")]


def played(tx, steps, **extra):
    """The outputs and the residuals, step by step."""
    state, out = tx.init(steps[0]), []
    for grads in steps:
        updates, state = tx.update(grads, state, **extra)
        out.append((values_of(updates), values_of(feedback_state(state))))
    return out


MISSION = gx.chain(gx.unscale(), gx.skip_bn(), gx.topk(0.01), gx.ef(), gx.allreduce())

CHAINS = [
    gx.chain(),
    gx.chain(gx.allreduce()),
    gx.chain(gx.allreduce(op="sum", algorithm="gather")),
    MISSION,
    gx.chain(gx.unscale(), gx.topk(0.01), gx.sign(), gx.ef(), gx.allreduce()),
    gx.chain(gx.topk(1.0, scope="global"), gx.ef()),
    gx.chain(gx.topk(0.5, feedback=False), gx.sign(feedback=False)),
    gx.chain(gx.filter_params(gx.is_matrix & ~gx.path_glob("h.*", "b")), gx.sign(), gx.ef()),
    gx.chain(gx.filter_params(gx.min_size(3) | gx.is_bias), gx.topk(1e-05), gx.ef()),
    gx.chain(gx.masked(gx.error_feedback(gx.topk(0.5), gx.sign()), gx.is_matrix)),
    gx.chain(gx.unscale(), gx.apply_if_finite(gx.error_feedback(gx.topk(0.5)), gx.allreduce())),
    gx.unscale(),
    gx.skip_bn(),
    gx.ef(),
    gx.topk(0.25),
    gx.sign(),
    gx.masked(gx.topk(0.5), ~gx.is_bias),
    gx.error_feedback(gx.topk(0.5), gx.sign()),
    gx.apply_if_finite(gx.error_feedback(gx.topk(0.5)), gx.allreduce()),
]


class TestComposition:
    def test_nested_chains_flatten(self):
        nested = gx.chain(
            gx.unscale(), gx.chain(gx.skip_bn(), gx.chain(gx.topk(0.01), gx.ef())), gx.allreduce()
        )
        assert nested == MISSION

    def test_flat_chain_holds_its_transformations(self):
        assert [part.name for part in MISSION.transformations] == [
            *("unscale", "skip_bn", "topk", "ef", "allreduce")
        ]

    def test_chain_in_a_chain_with_nothing_else_is_itself(self):
        assert gx.chain(MISSION) == MISSION

    def test_stages_of_a_neighbour_in_a_nested_chain_are_the_outer_neighbours(self):
        tx = gx.chain(gx.topk(0.5), gx.chain(gx.ef(), check=False))
        assert tx == gx.chain(gx.topk(0.5), gx.ef())

    def test_empty_chain_is_the_identity(self):
        grads = {"a": torch.tensor([INF, 1.0]), "b": [torch.zeros(0)], "c": None}
        out, _ = gx.chain().update(grads, gx.chain().init(grads))
        assert values_of(out) == values_of(grads)

    def test_empty_chains_inside_vanish(self):
        assert gx.chain(gx.chain(), gx.allreduce(), gx.chain()) == gx.chain(gx.allreduce())

    def test_fragment_can_be_used_in_several_chains(self):
        fragment = gx.chain(gx.topk(0.5), gx.ef())
        assert gx.chain(fragment, gx.allreduce()) != gx.chain(gx.unscale(), fragment)

    @pytest.mark.parametrize("bad", [3, None, "topk", gx.topk, gx], ids=lambda bad: str(bad)[:12])
    def test_what_is_no_transformation_is_refused(self, bad):
        text = (
            f"{bad!r} is no transformation: it needs init(params) and "
            "update(updates, state, params=None); did you forget to call a factory?"
        )
        with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
            gx.chain(gx.unscale(), bad)

    def test_object_with_init_only_is_refused(self):
        class Half:
            def init(self, params):
                return None

        with pytest.raises(TypeError, match="is no transformation: it needs init"):
            gx.chain(Half())

    def test_exchange_is_found_in_the_core(self):
        assert MISSION.exchange == gx.allreduce()

    def test_fragment_has_no_exchange(self):
        assert gx.chain(gx.topk(0.5), gx.ef()).exchange is None


@pytest.mark.parametrize("tx", CHAINS, ids=repr)
class TestInspection:
    def test_repr_can_be_pasted(self, tx):
        assert eval(repr(tx), {"gx": gx}) == tx

    def test_pasted_repr_has_the_same_hash(self, tx):
        assert hash(eval(repr(tx), {"gx": gx})) == hash(tx)

    def test_pasted_repr_has_the_same_fingerprint(self, tx):
        assert eval(repr(tx), {"gx": gx}).fingerprint == tx.fingerprint

    def test_no_other_is_equal(self, tx):
        assert [other for other in CHAINS if other == tx] == [tx]

    def test_no_other_has_this_fingerprint(self, tx):
        assert [other for other in CHAINS if other.fingerprint == tx.fingerprint] == [tx]

    def test_fingerprint_is_16_hexadecimal_digits(self, tx):
        assert re.fullmatch("[0-9a-f]{16}", tx.fingerprint)

    def test_is_not_equal_to_something_else(self, tx):
        assert tx != repr(tx)


def test_repr_of_the_mission():
    assert repr(MISSION) == (
        "gx.chain(gx.unscale(), gx.skip_bn(), gx.topk(0.01), gx.ef(), gx.allreduce())"
    )


def test_default_arguments_are_not_printed():
    assert repr(gx.topk(0.5, scope="leaf", feedback=True)) == "gx.topk(0.5)"


def test_arguments_other_than_the_default_are_printed():
    assert repr(gx.topk(0.5, scope="global", feedback=False)) == (
        "gx.topk(0.5, scope='global', feedback=False)"
    )


def test_hyperparameters_are_given_by_name():
    assert gx.topk(0.5).hyperparameters == {
        "ratio": 0.5,
        "scope": "leaf",
        "values": "float32",
        "rows": None,
        "feedback": True,
    }


def test_ratio_as_a_numpy_float_prints_as_code():
    tx = gx.topk(np.float64(0.1))
    assert eval(repr(tx), {"gx": gx}) == tx


def test_ratio_as_a_numpy_float_is_the_same_transformation():
    assert gx.topk(np.float64(0.1)) == gx.topk(0.1)


@given(st.floats(0, 1, exclude_min=True), st.floats(0, 1, exclude_min=True))
def test_fingerprints_differ_with_the_ratio(one, other):
    same = gx.topk(one).fingerprint == gx.topk(other).fingerprint
    assert same == (one == other)


@given(st.floats(0, 1, exclude_min=True))
def test_ratio_survives_printing(ratio):
    tx = gx.chain(gx.topk(ratio), gx.ef())
    assert eval(repr(tx), {"gx": gx}).transformations[0].hyperparameters["ratio"] == ratio


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (gx.allreduce(), gx.allreduce(op="sum")),
        (gx.allreduce(), gx.allreduce(algorithm="gather")),
        (gx.topk(0.5), gx.topk(0.5, scope="global")),
        (gx.topk(0.5), gx.topk(0.5, feedback=False)),
        (gx.sign(), gx.sign(feedback=False)),
        (gx.skip_bn(), gx.filter_params(~gx.is_batch_norm)),
        (gx.filter_params(gx.path_glob("a")), gx.filter_params(gx.path_glob("b"))),
        (gx.chain(gx.unscale(), gx.allreduce()), gx.chain(gx.allreduce(), gx.unscale())),
    ],
)
def test_other_hyperparameters_make_another_transformation(one, other):
    assert one != other
    assert one.fingerprint != other.fingerprint


def keep_all(path, leaf, info):
    return True


def test_plain_function_is_printed_by_its_name():
    name = f"{__name__}.keep_all"
    assert repr(gx.filter_params(keep_all)) == f"gx.filter_params({name})"


def test_plain_function_in_masked_is_printed_by_its_name():
    name = f"{__name__}.keep_all"
    assert repr(gx.masked(gx.topk(0.5), keep_all)) == f"gx.masked(gx.topk(0.5), {name})"


def test_two_different_functions_are_not_equal():
    assert gx.filter_params(lambda *leaf: True) != gx.filter_params(lambda *leaf: False)


def in_new_process(code, seed):
    """What an interpreter with another hash seed prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(gx.__file__).parents[1],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@pytest.fixture(scope="module")
def fingerprints_elsewhere():
    """Those of all chains above and of a mask by a plain function, with two hash seeds."""
    code = (
        "import gradtx as gx\n"
        "def keep(path, leaf, info): return True\n"
        f"for tx in [{', '.join(map(repr, CHAINS))}, gx.masked(gx.topk(0.5), keep)]:\n"
        "    print(tx.fingerprint)"
    )
    return [in_new_process(code, seed) for seed in ("1", "2")]


@pytest.mark.parametrize("run", [0, 1])
def test_fingerprints_are_the_same_in_another_process(fingerprints_elsewhere, run):
    assert fingerprints_elsewhere[run][:-1] == [tx.fingerprint for tx in CHAINS]


def test_fingerprint_of_a_mask_by_a_plain_function_is_the_same_on_every_rank(
    fingerprints_elsewhere,
):
    one, other = fingerprints_elsewhere
    assert one[-1] == other[-1]


def refusal(*parts):
    with pytest.raises(gx.ChainOrderError) as caught:
        gx.chain(*parts)
    return caught.value


VOCABULARY = (gx.unscale(), gx.skip_bn(), gx.topk(0.5), gx.sign(), gx.ef(), gx.allreduce())


def refused_orders(length):
    """All orders of so many stages that are refused, and how."""
    found = []
    for parts in itertools.product(VOCABULARY, repeat=length):
        try:
            gx.chain(*parts)
        except gx.ChainOrderError as error:
            found.append((parts, error))
    return found


class TestRefusal:
    def test_whole_message(self):
        assert str(refusal(gx.topk(0.01), gx.unscale(), gx.ef(), gx.allreduce())) == (
            "this chain breaks 4 rules:\n"
            "\n"
            "    gx.chain(\n"
            "        gx.topk(0.01),  # <- GX102, GX302, GX401\n"
            "        gx.unscale(),  # <- GX102, GX401\n"
            "        gx.ef(),  # <- GX303\n"
            "        gx.allreduce(),\n"
            "    )\n"
            "\n"
            "GX102 at 0, 1: topk(0.01) stands before unscale() and is stateful or not linear: it "
            "sees gradients that are still multiplied by the loss scale, so what it remembers or "
            "compares changes its unit with the scale, and an overflow can hide\n"
            "    fix: put unscale() before topk(0.01)\n"
            "GX302 at 0: topk(0.01) is biased and has no error feedback over it: what it leaves "
            "out is lost for ever\n"
            "    fix: put ef() directly behind the run of compressors, or, to go without on "
            "purpose, give topk(0.01) the argument feedback=False\n"
            "GX303 at 2: ef() has no lossy compressor directly to its left, or one that says "
            "feedback=False: there is no error for it to feed back\n"
            "    fix: put it directly behind the compressor it is for, or leave it out\n"
            "GX401 at 0, 1: unscale() takes dense gradients only and topk(0.01) hands on a "
            "payload\n"
            "    fix: put unscale() before topk(0.01)\n"
            "\n"
            "write instead:\n"
            "\n"
            "    gx.chain(gx.unscale(), gx.topk(0.01), gx.ef(), gx.allreduce())"
        )

    def test_it_is_a_value_error(self):
        assert isinstance(refusal(gx.ef()), ValueError)

    def test_one_rule_is_counted_in_the_singular(self):
        assert str(refusal(gx.unscale(), gx.ef())).startswith("this chain breaks 1 rule:\n")

    def test_violations_are_given_as_data(self):
        error = refusal(gx.topk(0.01), gx.unscale(), gx.ef(), gx.allreduce())
        assert [(v.code, v.stages) for v in error.violations] == [
            ("GX102", (0, 1)),
            ("GX302", (0,)),
            ("GX303", (2,)),
            ("GX401", (0, 1)),
        ]

    def test_positions_are_those_of_the_flat_chain(self):
        error = refusal(gx.chain(gx.unscale(), gx.chain()), gx.chain(gx.ef(), check=False))
        assert [v.stages for v in error.violations] == [(1,)]

    def test_positions_count_the_stages_inside_a_combinator(self):
        error = refusal(gx.error_feedback(gx.topk(0.5), gx.sign()), gx.allreduce(), gx.ef())
        assert [(v.code, v.stages) for v in error.violations] == [("GX303", (4,))]
        assert "        gx.ef(),  # <- GX303\n" in str(error)

    def test_no_suggestion_where_no_order_passes(self):
        error = refusal(gx.unscale(), gx.unscale())
        assert error.suggestion is None
        assert "write instead" not in str(error)

    def test_suggestion_of_many_transformations_is_tried_in_the_usual_order_only(self):
        parts = [gx.allreduce(), *[gx.filter_params(gx.min_size(n)) for n in range(1, 8)]]
        assert refusal(*parts, gx.topk(0.5), gx.ef()).suggestion == gx.chain(
            *parts[1:], gx.topk(0.5), gx.ef(), gx.allreduce()
        )

    @pytest.mark.parametrize("length", [1, 2, 3])
    def test_every_violation_is_in_the_message(self, length):
        refused = refused_orders(length)
        assert refused
        for _, error in refused:
            text = str(error)
            for violation in error.violations:
                where = ", ".join(map(str, violation.stages))
                assert f"{violation.code} at {where}: {violation.reason}\n" in text
                assert f"    fix: {violation.fix}" in text

    @pytest.mark.parametrize("length", [2, 3])
    def test_pasted_suggestion_is_the_suggestion(self, length):
        suggested = [e for _, e in refused_orders(length) if e.suggestion is not None]
        assert suggested
        for error in suggested:
            pasted = str(error).split("write instead:")[1].strip()
            assert eval(pasted, {"gx": gx}) == error.suggestion

    @pytest.mark.parametrize("length", [2, 3])
    def test_suggestion_holds_the_same_transformations(self, length):
        for parts, error in refused_orders(length):
            if error.suggestion is not None:
                suggested = map(repr, error.suggestion.transformations)
                assert sorted(suggested) == sorted(map(repr, parts))

    def test_stage_at_fault_is_marked_and_no_other(self):
        error = refusal(gx.unscale(), gx.topk(0.5), gx.ef(), gx.allreduce(), gx.allreduce(op="sum"))
        marked = [line for line in str(error).splitlines() if "# <-" in line]
        assert marked == [
            "        gx.allreduce(),  # <- GX402",
            "        gx.allreduce(op='sum'),  # <- GX402",
        ]

    def test_unchecked_chain_is_built(self):
        tx = gx.chain(gx.topk(0.5), gx.allreduce(), check=False)
        out, _ = tx.update([torch.tensor([1.0, 2.0])], tx.init([torch.zeros(2)]))
        assert values_of(out) == {(0,): [0.0, 2.0]}

    def test_unchecked_chain_is_checked_again_inside_another(self):
        with pytest.raises(gx.ChainOrderError):
            gx.chain(gx.chain(gx.topk(0.5), check=False), gx.allreduce())


SAME = {
    "mission": (
        gx.chain(gx.unscale(), gx.skip_bn(), gx.topk(0.25), gx.ef(), gx.allreduce()),
        gx.chain(
            gx.unscale(),
            gx.apply_if_finite(
                gx.masked(gx.error_feedback(gx.topk(0.25)), ~gx.is_batch_norm), gx.allreduce()
            ),
        ),
    ),
    "gate left to the chain": (
        gx.chain(gx.unscale(), gx.skip_bn(), gx.topk(0.25), gx.ef(), gx.allreduce()),
        gx.chain(
            gx.unscale(),
            gx.masked(gx.error_feedback(gx.topk(0.25)), ~gx.is_batch_norm),
            gx.allreduce(),
        ),
    ),
    "filter left to the chain": (
        gx.chain(gx.unscale(), gx.skip_bn(), gx.sign(), gx.ef(), gx.allreduce()),
        gx.chain(gx.unscale(), gx.skip_bn(), gx.error_feedback(gx.sign()), gx.allreduce()),
    ),
    "two compressors": (
        gx.chain(gx.unscale(), gx.topk(0.5), gx.sign(), gx.ef(), gx.allreduce()),
        gx.chain(gx.unscale(), gx.error_feedback(gx.topk(0.5), gx.sign()), gx.allreduce()),
    ),
    "global": (
        gx.chain(gx.unscale(), gx.skip_bn(), gx.topk(0.25, scope="global"), gx.ef()),
        gx.chain(
            gx.unscale(),
            gx.masked(gx.error_feedback(gx.topk(0.25, scope="global")), ~gx.path_glob("bn1.*")),
        ),
    ),
    "skip_bn before unscale": (
        gx.chain(gx.unscale(), gx.skip_bn(), gx.topk(0.25), gx.ef(), gx.allreduce()),
        gx.chain(gx.skip_bn(), gx.unscale(), gx.topk(0.25), gx.ef(), gx.allreduce()),
    ),
}


class TestCore:
    @pytest.mark.parametrize(
        ("tx", "core"),
        [
            (gx.chain(), ()),
            (gx.chain(gx.allreduce()), (gx.allreduce(),)),
            (
                MISSION,
                (
                    gx.unscale(),
                    gx.apply_if_finite(
                        gx.masked(gx.error_feedback(gx.topk(0.01)), ~gx.is_batch_norm),
                        gx.allreduce(),
                    ),
                ),
            ),
            (
                gx.chain(gx.topk(0.5), gx.sign(), gx.ef()),
                (gx.apply_if_finite(gx.error_feedback(gx.topk(0.5), gx.sign())),),
            ),
            (
                gx.chain(
                    gx.unscale(), gx.filter_params(gx.is_matrix), gx.skip_bn(), gx.sign(), gx.ef()
                ),
                (
                    gx.unscale(),
                    gx.apply_if_finite(
                        gx.masked(gx.error_feedback(gx.sign()), gx.is_matrix & ~gx.is_batch_norm)
                    ),
                ),
            ),
            (
                gx.chain(gx.topk(0.5, feedback=False), gx.allreduce()),
                (gx.apply_if_finite(gx.topk(0.5, feedback=False), gx.allreduce()),),
            ),
            (
                gx.chain(gx.allreduce(), gx.unscale()),
                (gx.allreduce(), gx.unscale(), gx.apply_if_finite()),
            ),
        ],
        ids=lambda value: repr(value) if isinstance(value, gx.Transformation) else "",
    )
    def test_chain_resolves_into(self, tx, core):
        assert tx.core == core

    @pytest.mark.parametrize(("one", "other"), SAME.values(), ids=SAME)
    def test_both_ways_of_writing_give_the_same(self, one, other):
        steps = gradients(0)
        steps[2]["head.bias"][1] = INF
        assert played(one, steps, loss_scale=4.0) == played(other, steps, loss_scale=4.0)

    def test_outermost_combinators_alone_are_the_chain(self):
        one = gx.chain(gx.topk(0.25), gx.ef(), gx.allreduce())
        other = gx.apply_if_finite(gx.error_feedback(gx.topk(0.25)), gx.allreduce())
        assert played(one, gradients(1)) == played(other, gradients(1))

    def test_plain_loop_gives_the_same_as_error_feedback(self):
        steps = [grads["conv.weight"] for grads in gradients(2, steps=6)]
        tx = gx.chain(gx.topk(0.25), gx.ef(), gx.allreduce())
        state, residual = tx.init(steps[0]), torch.zeros(12)
        for grad in steps:
            out, state = tx.update(grad, state)
            corrected = grad.reshape(-1) + residual
            kept = corrected.abs().argsort(descending=True, stable=True)[:3]
            sent = torch.zeros(12).scatter(0, kept, corrected[kept])
            residual = corrected - sent
            assert torch.equal(out.reshape(-1), sent)


class TestBareNeighbours:
    @pytest.mark.parametrize(
        ("stage", "text"),
        [
            (
                gx.ef(),
                "gx.ef() acts on its neighbours in a chain and does nothing alone: "
                "write chain(topk(0.01), ef()), or error_feedback(topk(0.01))",
            ),
            (
                gx.skip_bn(),
                "gx.skip_bn() acts on its neighbours in a chain and does nothing alone: "
                "write chain(skip_bn(), topk(0.01), ef()), or masked(inner, predicate)",
            ),
            (
                gx.filter_params(gx.is_matrix),
                "gx.filter_params(gx.is_matrix) acts on its neighbours in a chain and does nothing "
                "alone: write chain(skip_bn(), topk(0.01), ef()), or masked(inner, predicate)",
            ),
        ],
        ids=["ef", "skip_bn", "filter_params"],
    )
    @pytest.mark.parametrize("used", ["init", "update"])
    def test_used_alone_says_what_to_write(self, stage, text, used):
        grads = {"w": torch.ones(2)}
        use = {
            "init": lambda: stage.init(grads),
            "update": lambda: stage.update(grads, ()),
        }[used]
        with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
            use()


BAD = {"w": torch.tensor([INF, 1.0])}


class TestGate:
    def test_chain_of_stateless_linear_stages_lets_the_bad_values_through(self):
        tx = gx.chain(gx.allreduce())
        out, state = tx.update(BAD, tx.init(BAD))
        assert values_of(out) == {("w",): [INF, 1.0]}
        assert state.gate is None

    def test_ungated_chain_skips_nothing(self):
        tx = gx.chain(gx.allreduce())
        _, state = tx.update(BAD, tx.init(BAD))
        assert bool(state.last_finite)
        assert int(state.total_notfinite) == 0

    @pytest.mark.parametrize(
        "tx",
        [
            gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce()),
            gx.chain(gx.sign(feedback=False), gx.allreduce()),
            gx.chain(gx.sign(), gx.ef()),
        ],
        ids=repr,
    )
    def test_lossy_chain_without_unscale_is_gated(self, tx):
        out, state = tx.update(BAD, tx.init(BAD))
        assert values_of(out) == {("w",): [0.0, 0.0]}
        assert not state.last_finite
        assert int(state.total_notfinite) == 1

    def test_gate_starts_at_the_first_lossy_stage(self):
        linear = gx.declare(
            Doubled(), name="doubled", linear=True, stateful=False, needs_reduced=False
        )
        tx = gx.chain(linear, gx.topk(0.5), gx.ef(), gx.allreduce())
        assert tx.core == (
            linear,
            gx.apply_if_finite(gx.error_feedback(gx.topk(0.5)), gx.allreduce()),
        )

    def test_gate_starts_at_the_first_stateful_stage(self):
        doubled = Doubled()
        tx = gx.chain(gx.allreduce(), doubled)
        assert tx.core == (gx.allreduce(), gx.apply_if_finite(gx.declare(doubled)))

    def test_gate_starts_behind_unscale(self):
        tx = gx.chain(gx.unscale(), gx.allreduce())
        assert tx.core == (gx.unscale(), gx.apply_if_finite(gx.allreduce()))

    def test_explicit_gate_is_not_doubled(self):
        gate = gx.apply_if_finite(gx.error_feedback(gx.topk(0.5)), gx.allreduce())
        assert gx.chain(gx.unscale(), gate).core == (gx.unscale(), gate)

    @pytest.mark.parametrize("value", [INF, -INF, float("nan")])
    def test_protected_leaf_is_judged_too(self, value):
        tx = gx.chain(gx.filter_params(gx.path_glob("w")), gx.topk(0.5), gx.ef(), gx.allreduce())
        grads = {"w": torch.ones(2), "b": torch.tensor([value])}
        out, state = tx.update(grads, tx.init(grads))
        assert values_of(out) == {("w",): [0.0, 0.0], ("b",): [0.0]}
        assert not state.last_finite

    def test_steps_skipped_are_counted(self):
        tx = gx.chain(gx.unscale(), gx.allreduce())
        state = tx.init(BAD)
        for scale in (2.0, 2.0, 2.0):
            _, state = tx.update(BAD, state, loss_scale=scale)
        _, state = tx.update({"w": torch.ones(2)}, state, loss_scale=2.0)
        assert int(state.total_notfinite) == 3
        assert bool(state.last_finite)


class DoubledState(NamedTuple):
    count: Any


class Doubled:
    """A foreign transformation: `init` and `update`, and nothing else of ours."""

    def init(self, params):
        return DoubledState(torch.zeros((), dtype=torch.int32))

    def update(self, updates, state, params=None):
        doubled = optree.tree_map(lambda leaf: leaf * 2, updates)
        return doubled, DoubledState(state.count + 1)


class TestForeign:
    def test_foreign_object_runs_behind_the_exchange(self):
        tx = gx.chain(gx.unscale(), gx.allreduce(), Doubled())
        out, state = tx.update([torch.ones(1)], tx.init([torch.ones(1)]), loss_scale=4.0)
        assert values_of(out) == {(0,): [0.5]}
        assert int(state.gate.inner_states[1].count) == 1

    def test_state_of_a_foreign_object_is_kept_on_a_bad_step(self):
        tx = gx.chain(gx.allreduce(), Doubled())
        _, state = tx.update([torch.tensor([INF])], tx.init([torch.ones(1)]))
        assert int(state.gate.inner_states[0].count) == 0

    @pytest.mark.parametrize(
        ("parts", "codes"),
        [
            ((Doubled(), gx.allreduce()), ["GX403"]),
            ((Doubled(), gx.unscale(), gx.allreduce()), ["GX102", "GX403"]),
            ((gx.topk(0.5), gx.ef(), Doubled(), gx.allreduce()), ["GX401", "GX403"]),
        ],
    )
    def test_foreign_object_counts_as_needing_true_reduced_dense_gradients(self, parts, codes):
        assert [v.code for v in refusal(*parts).violations] == codes

    def test_declared_object_may_stand_elsewhere(self):
        local = gx.declare(Doubled(), needs_reduced=False)
        tx = gx.chain(gx.unscale(), local, gx.topk(0.5), gx.ef(), gx.allreduce())
        assert repr(tx).startswith("gx.chain(gx.unscale(), Doubled(), gx.topk(0.5)")

    def test_declared_name_is_printed(self):
        assert repr(gx.declare(Doubled(), name="twice")) == "twice()"

    def test_declaring_what_is_no_transformation_is_refused(self):
        with pytest.raises(TypeError, match=r"^3 is no transformation: it needs init\(params\)"):
            gx.declare(3)

    def test_extra_arguments_do_not_reach_an_object_that_takes_none(self):
        tx = gx.chain(gx.unscale(), gx.allreduce(), Doubled())
        tx.update([torch.ones(1)], tx.init([torch.ones(1)]), loss_scale=1.0, value=3)

    def test_extra_arguments_reach_an_object_that_takes_them(self):
        class Scaled(Doubled):
            def update(self, updates, state, params=None, *, factor, **extra):
                return [leaf * factor for leaf in updates], state

        tx = gx.chain(gx.allreduce(), Scaled())
        out, _ = tx.update([torch.ones(1)], tx.init([torch.ones(1)]), factor=3.0)
        assert values_of(out) == {(0,): [3.0]}

    def test_parameters_reach_a_foreign_object(self):
        class Decayed(Doubled):
            def update(self, updates, state, params=None):
                return [u + p for u, p in zip(updates, params, strict=True)], state

        tx = gx.chain(gx.allreduce(), Decayed())
        out, _ = tx.update([torch.ones(1)], tx.init([torch.ones(1)]), [torch.full((1,), 5.0)])
        assert values_of(out) == {(0,): [6.0]}

    def test_parameters_are_matched_by_path_like_the_gradients(self):
        class Decayed(Doubled):
            def update(self, updates, state, params=None):
                leaves, treespec = optree.tree_flatten(updates)
                added = map(torch.add, leaves, optree.tree_leaves(params))
                return optree.tree_unflatten(treespec, added), state

        tx = gx.chain(gx.allreduce(), Decayed())
        state = tx.init({"a": torch.zeros(1), "b": torch.zeros(1)})
        grads = OrderedDict(b=torch.full((1,), 1.0), a=torch.full((1,), 2.0))
        params = OrderedDict(b=torch.full((1,), 10.0), a=torch.full((1,), 20.0))
        out, _ = tx.update(grads, state, params)
        assert values_of(out) == {("b",): [11.0], ("a",): [22.0]}

    def test_two_foreign_objects_that_differ_are_not_equal(self):
        optax = pytest.importorskip("optax")
        assert gx.declare(optax.clip(1.0)) != gx.declare(optax.clip(2.0))

    def test_optax_is_placed_behind_the_exchange(self):
        optax = pytest.importorskip("optax")
        tx = gx.chain(gx.unscale(), gx.topk(0.5), gx.ef(), gx.allreduce(), optax.scale_by_adam())
        assert ", gx.allreduce(), scale_by_adam(" in repr(tx)

    def test_optax_before_the_exchange_is_refused(self):
        optax = pytest.importorskip("optax")
        error = refusal(gx.unscale(), optax.scale_by_adam(), gx.allreduce())
        assert [v.code for v in error.violations] == ["GX403"]
        assert error.suggestion.stages[-1].name == "scale_by_adam"

    def test_declared_optax_clip_may_stand_before_the_compressors(self):
        optax = pytest.importorskip("optax")
        clip = gx.declare(optax.clip(1.0), stateful=False, needs_reduced=False)
        tx = gx.chain(gx.unscale(), clip, gx.topk(0.5), gx.ef(), gx.allreduce())
        assert [part.name for part in tx.transformations][1] == "clip"

    def test_optax_runs_on_jax_arrays(self):
        optax, jnp = pytest.importorskip("optax"), pytest.importorskip("jax.numpy")
        grads = {"w": jnp.asarray([3.0, -0.5])}
        clip = gx.declare(optax.clip(1.0), stateful=False, needs_reduced=False)
        tx = gx.chain(gx.unscale(), clip, optax.scale_by_adam())
        out, state = tx.update(grads, tx.init(grads), loss_scale=2.0)
        adam = optax.scale_by_adam()
        expected, _ = adam.update({"w": jnp.asarray([1.0, -0.25])}, adam.init(grads))
        assert values_of(out) == values_of(expected)
        assert bool(state.last_finite)

    def test_optax_state_is_kept_on_a_bad_step(self):
        optax, jnp = pytest.importorskip("optax"), pytest.importorskip("jax.numpy")
        grads = {"w": jnp.asarray([INF, 1.0])}
        tx = gx.chain(gx.unscale(), optax.scale_by_adam())
        out, state = tx.update(grads, tx.init(grads), loss_scale=2.0)
        assert values_of(out) == {("w",): [0.0, 0.0]}
        assert values_of(state.gate.inner_states) == values_of(tx.init(grads).gate.inner_states)


class Clip:
    def init(self, params):
        return ()

    def update(self, updates, state, params=None):
        return [u.clamp(-1.0, 1.0) for u in updates], state


@pytest.mark.parametrize("rest", [(), (gx.topk(0.5), gx.ef())], ids=repr)
def test_a_stage_that_may_hide_an_overflow_is_gated_without_unscale_too(rest):
    clip = gx.declare(Clip(), stateful=False, needs_reduced=False)
    tx = gx.chain(clip, *rest, gx.allreduce())
    state = tx.init([torch.zeros(2)])
    updates, state = tx.update([torch.tensor([math.inf, 1.0])], state)
    assert updates[0].tolist() == [0.0, 0.0]
    assert not state.last_finite


def test_a_foreign_gate_is_a_foreign_stage():
    tx = gx.chain(optax.apply_if_finite(optax.identity(), 3))
    assert isinstance(tx.core[-1], Gate)


def test_chains_with_other_functions_are_not_equal():
    def chain(keep):
        return gx.chain(gx.filter_params(keep), gx.topk(0.5), gx.ef())

    assert chain(lambda *leaf: True) != chain(lambda *leaf: False)


def test_the_error_can_be_pickled():
    with pytest.raises(gx.ChainOrderError) as caught:
        gx.chain(gx.topk(0.5), gx.unscale(), gx.ef())
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.violations == caught.value.violations


def test_another_state_is_refused():
    tx = gx.chain(gx.topk(0.5), gx.ef())
    with pytest.raises(TypeError, match="this is no state of"):
        tx.update([torch.zeros(2)], ())


def test_a_foreign_stage_may_hand_on_another_container():
    class Plain:
        def init(self, params):
            return ()

        def update(self, updates, state, params=None):
            return dict(updates.items()), state

    tx = gx.chain(gx.declare(Plain(), linear=True, stateful=False, needs_reduced=False))
    grads = OrderedDict(w=torch.tensor([1.0]), b=torch.tensor([10.0]))
    out, _ = tx.update(grads, tx.init(grads))
    assert {path: value.item() for path, value in out.items()} == {"w": 1.0, "b": 10.0}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_autocast_does_not_reach_inside(dtype):
    tx = gx.chain(gx.topk(0.5), gx.ef(), gx.allreduce())
    grads = {"a": torch.ones(4, dtype=dtype), "b": torch.ones(4)}
    plain, _ = tx.update(grads, tx.init(grads))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under, _ = tx.update(grads, tx.init(grads))
    assert all(torch.equal(plain[path], under[path]) for path in grads)
