"""The oracle itself, on examples small enough to work out by hand."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import pytest

from reference import Array, Reference, Shapes, Spec, StepResult, cast_to, round_to_bfloat16

INF = math.inf
Values: TypeAlias = list[float] | None

COMPENSATED: list[tuple[str, dict[str, Any]]] = [
    ("topk", {"ratio": 0.5}),
    ("ef", {}),
    ("allreduce", {}),
]
MISSION: Spec = [
    ("unscale", {}),
    ("filter_params", {"keep": lambda path: path != "bn"}),
    *COMPENSATED,
]


@pytest.fixture(autouse=True)
def warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def vectors(dtype: str = "float32", **lengths: int) -> Shapes:
    return {path: ((length,), dtype) for path, length in lengths.items()}


def take_step(
    oracle: Reference, *ranks: dict[str, Values], loss_scale: float | None = None
) -> StepResult:
    """One step, the gradients of each rank given as lists in the leaf's dtype."""
    gradients = []
    for values in ranks:
        leaves: dict[str, Array | None] = {}
        for path, value in values.items():
            name = oracle.shapes[path][1].replace("bfloat16", "float32")
            leaves[path] = None if value is None else np.array(value, np.dtype(name))
        gradients.append(leaves)
    return oracle.step(gradients, loss_scale)


def array(leaf: Array | None) -> Array:
    assert leaf is not None
    return leaf


def lists(ranks: list[dict[str, Array | None]]) -> list[dict[str, Values]]:
    return [
        {path: None if leaf is None else leaf.tolist() for path, leaf in leaves.items()}
        for leaves in ranks
    ]


def output_of(spec: Spec, values: list[float], dtype: str = "float32") -> Values:
    """What one rank alone gets for its only leaf in its first step."""
    result = take_step(Reference(spec, vectors(dtype, w=len(values)), 1), {"w": values})
    assert not result.skipped
    return lists(result.outputs)[0]["w"]


def test_empty_chain_is_the_identity() -> None:
    assert output_of([], [1.0, -2.0]) == [1.0, -2.0]


def test_unscale_divides_in_fp32() -> None:
    oracle = Reference([("unscale", {})], vectors("float16", w=2), 1)
    result = take_step(oracle, {"w": [3.0, -1.0]}, loss_scale=1024.0)
    leaf = array(result.outputs[0]["w"])
    assert leaf.dtype == np.float32
    assert leaf.tolist() == [0.0029296875, -0.0009765625]


def test_unscale_keeps_fp64_leaves_in_fp64() -> None:
    oracle = Reference([("unscale", {})], vectors("float64", w=1), 1)
    result = take_step(oracle, {"w": [2.0 + 2.0**-40]}, loss_scale=2.0)
    assert lists(result.outputs) == [{"w": [1.0 + 2.0**-41]}]


def test_unscale_without_a_loss_scale_is_an_error() -> None:
    oracle = Reference([("unscale", {})], vectors(w=1), 1)
    with pytest.raises(ValueError, match="loss_scale is None: give a number"):
        take_step(oracle, {"w": [1.0]})


def test_inputs_are_not_written_into() -> None:
    spec: Spec = [("unscale", {}), ("topk", {"ratio": 0.5}), ("ef", {}), ("allreduce", {})]
    oracle = Reference(spec, vectors(w=2), 1)
    gradient = np.array([4.0, 2.0], np.float32)
    before = array(oracle.residuals[0]["w"])
    oracle.step([{"w": gradient}], 2.0)
    assert gradient.tolist() == [4.0, 2.0]
    assert before.tolist() == [0.0, 0.0]


def test_ranks_do_not_share_their_outputs() -> None:
    result = take_step(Reference([("allreduce", {})], vectors(w=1), 2), {"w": [1.0]}, {"w": [3.0]})
    first, second = (array(leaves["w"]) for leaves in result.outputs)
    assert not np.shares_memory(first, second)


@pytest.mark.parametrize(("op", "expected"), [("mean", [2.0, -1.0]), ("sum", [4.0, -2.0])])
def test_allreduce(op: str, expected: list[float]) -> None:
    oracle = Reference([("allreduce", {"op": op})], vectors(w=2), 2)
    result = take_step(oracle, {"w": [1.0, -4.0]}, {"w": [3.0, 2.0]})
    assert lists(result.outputs) == [{"w": expected}, {"w": expected}]


def test_allreduce_sums_in_rank_order_in_fp32() -> None:
    oracle = Reference([("allreduce", {"op": "sum"})], vectors(w=1), 3)
    # Next to 2**24 an FP32 sum loses a 1, unless the large terms cancel first.
    large = 2.0**24
    lost = take_step(oracle, {"w": [large]}, {"w": [1.0]}, {"w": [-large]})
    kept = take_step(oracle, {"w": [large]}, {"w": [-large]}, {"w": [1.0]})
    assert lists(lost.outputs)[0] == {"w": [0.0]}
    assert lists(kept.outputs)[0] == {"w": [1.0]}


def test_allreduce_sums_fp64_leaves_in_fp64() -> None:
    oracle = Reference([("allreduce", {"op": "sum"})], vectors("float64", w=1), 3)
    large = 2.0**24
    result = take_step(oracle, {"w": [large]}, {"w": [1.0]}, {"w": [-large]})
    assert lists(result.outputs)[0] == {"w": [1.0]}


def test_fp16_leaves_are_summed_in_fp32() -> None:
    oracle = Reference([("allreduce", {"op": "mean"})], vectors("float16", w=1), 2)
    result = take_step(oracle, {"w": [60000.0]}, {"w": [60000.0]})
    assert lists(result.outputs)[0] == {"w": [60000.0]}


@pytest.mark.parametrize(
    ("ratio", "kept"),
    [
        (1.0, [1.0, 2.0, 3.0, 4.0, 5.0]),
        (0.7, [0.0, 2.0, 3.0, 4.0, 5.0]),  # 3.5 rounds to 4
        (0.5, [0.0, 0.0, 0.0, 4.0, 5.0]),  # 2.5 rounds to 2, the even one
        (0.01, [0.0, 0.0, 0.0, 0.0, 5.0]),  # never none
    ],
)
def test_topk_keeps_this_many(ratio: float, kept: list[float]) -> None:
    spec: Spec = [("topk", {"ratio": ratio, "feedback": False})]
    assert output_of(spec, [1.0, 2.0, 3.0, 4.0, 5.0]) == kept


def test_topk_goes_by_magnitude_and_keeps_the_sign() -> None:
    spec: Spec = [("topk", {"ratio": 0.5, "feedback": False})]
    assert output_of(spec, [1.0, -4.0, 3.0, 2.0]) == [0.0, -4.0, 3.0, 0.0]


def test_topk_breaks_ties_by_lowest_index() -> None:
    spec: Spec = [("topk", {"ratio": 0.5, "feedback": False})]
    assert output_of(spec, [1.0, -2.0, 2.0, -2.0]) == [0.0, -2.0, 2.0, 0.0]


def test_topk_counts_positions_in_c_order() -> None:
    oracle = Reference([("topk", {"ratio": 0.5, "feedback": False})], {"w": ((2, 2), "float32")}, 1)
    result = oracle.step([{"w": np.array([[1.0, 5.0], [5.0, 5.0]], np.float32)}])
    expected = np.array([[0.0, 5.0], [5.0, 0.0]])
    np.testing.assert_array_equal(array(result.outputs[0]["w"]), expected)


@pytest.mark.parametrize("name", ["topk", "sign"])
def test_empty_leaf(name: str) -> None:
    assert output_of([(name, {"ratio": 0.5}), ("ef", {}), ("allreduce", {})], []) == []


def test_scalar_leaf() -> None:
    spec: Spec = [("topk", {"ratio": 0.01}), ("sign", {}), ("ef", {}), ("allreduce", {})]
    oracle = Reference(spec, {"w": ((), "float32")}, 2)
    result = oracle.step([{"w": np.array(-3.0, np.float32)}, {"w": np.array(1.0, np.float32)}])
    leaf = array(result.outputs[1]["w"])
    assert leaf.shape == ()
    assert leaf == -1.0


def test_topk_by_leaf_counts_each_leaf() -> None:
    oracle = Reference([("topk", {"ratio": 0.5, "feedback": False})], vectors(a=2, b=2), 1)
    result = take_step(oracle, {"a": [9.0, 8.0], "b": [1.0, 2.0]})
    assert lists(result.outputs) == [{"a": [9.0, 0.0], "b": [0.0, 2.0]}]


def test_topk_global_counts_all_leaves_together() -> None:
    spec: Spec = [("topk", {"ratio": 0.5, "scope": "global", "feedback": False})]
    result = take_step(Reference(spec, vectors(a=2, b=2), 1), {"a": [9.0, 8.0], "b": [1.0, 2.0]})
    assert lists(result.outputs) == [{"a": [9.0, 8.0], "b": [0.0, 0.0]}]


def test_topk_global_breaks_ties_in_sorted_path_order() -> None:
    spec: Spec = [("topk", {"ratio": 0.5, "scope": "global", "feedback": False})]
    result = take_step(Reference(spec, vectors(b=2, a=2), 1), {"b": [3.0, 3.0], "a": [1.0, 3.0]})
    assert lists(result.outputs) == [{"b": [3.0, 0.0], "a": [0.0, 3.0]}]


def test_topk_global_counts_only_compressed_leaves() -> None:
    spec: Spec = [
        ("filter_params", {"keep": lambda path: path != "bn"}),
        ("topk", {"ratio": 0.5, "scope": "global", "feedback": False}),
    ]
    oracle = Reference(spec, vectors(a=1, b=1, bn=2), 1)
    result = take_step(oracle, {"a": [1.0], "b": [2.0], "bn": [9.0, 9.0]})
    assert lists(result.outputs) == [{"a": [0.0], "b": [2.0], "bn": [9.0, 9.0]}]


def test_second_topk_takes_its_ratio_of_what_is_left() -> None:
    spec: Spec = [("topk", {"ratio": 0.5}), ("topk", {"ratio": 0.75}), ("ef", {})]
    # 4 of 8, then 3 of 4; of the equal last two the first is kept.
    values = [1.0, -6.0, 1.0, 5.0, 1.0, 7.0, -5.0, 1.0]
    assert output_of(spec, values) == [0.0, -6.0, 0.0, 5.0, 0.0, 7.0, 0.0, 0.0]


def test_global_topk_after_topk_by_leaf_picks_among_all_that_is_left() -> None:
    spec: Spec = [("topk", {"ratio": 0.5}), ("topk", {"ratio": 0.5, "scope": "global"}), ("ef", {})]
    oracle = Reference(spec, vectors(a=4, b=4), 1)
    result = take_step(oracle, {"a": [9.0, 8.0, 7.0, 6.0], "b": [1.0, 2.0, 3.0, 4.0]})
    assert lists(result.outputs) == [{"a": [9.0, 8.0, 0.0, 0.0], "b": [0.0, 0.0, 0.0, 0.0]}]


def test_sign_sends_the_mean_magnitude() -> None:
    spec: Spec = [("sign", {"feedback": False})]
    assert output_of(spec, [1.0, -2.0, 0.0, -0.0, -7.0]) == [2.0, -2.0, 2.0, 2.0, -2.0]


def test_sign_has_one_scale_for_each_leaf() -> None:
    oracle = Reference([("sign", {"feedback": False})], vectors(a=2, b=1), 1)
    result = take_step(oracle, {"a": [1.0, -3.0], "b": [8.0]})
    assert lists(result.outputs) == [{"a": [2.0, -2.0], "b": [8.0]}]


def test_sign_takes_its_mean_in_fp64_and_sends_it_in_fp32() -> None:
    spec: Spec = [("sign", {"feedback": False})]
    # An FP32 running sum would stay at 2**24 and give 2**22.
    assert output_of(spec, [2.0**24, 1.0, 1.0, 0.0]) == [2.0**22 + 0.5] * 4
    # 2**23 + 0.5 is halfway between FP32 neighbours.
    assert output_of(spec, [2.0**24, 1.0]) == [2.0**23] * 2


def test_sign_keeps_the_scale_of_fp64_leaves_in_fp64() -> None:
    spec: Spec = [("sign", {"feedback": False})]
    scale = 2.0**23 + 0.5
    assert output_of(spec, [2.0**24, -1.0], "float64") == [scale, -scale]


def test_sign_after_topk_acts_on_the_kept_values() -> None:
    spec: Spec = [("topk", {"ratio": 0.5}), ("sign", {}), ("ef", {})]
    assert output_of(spec, [1.0, -4.0, 2.0, 0.0]) == [0.0, -3.0, 3.0, 0.0]


def test_sign_after_global_topk_has_one_scale_for_all_leaves() -> None:
    spec: Spec = [("topk", {"ratio": 0.75, "scope": "global"}), ("sign", {}), ("ef", {})]
    oracle = Reference(spec, vectors(a=2, b=2), 1)
    result = take_step(oracle, {"a": [9.0, -2.0], "b": [0.0, 1.0]})
    assert lists(result.outputs) == [{"a": [4.0, -4.0], "b": [0.0, 4.0]}]
    assert lists(oracle.residuals) == [{"a": [5.0, 2.0], "b": [0.0, -3.0]}]


def test_what_was_not_sent_is_added_next_time() -> None:
    oracle = Reference(COMPENSATED, vectors(w=2), 2)
    assert lists(oracle.residuals) == [{"w": [0.0, 0.0]}] * 2
    first = take_step(oracle, {"w": [4.0, 3.0]}, {"w": [1.0, -2.0]})
    assert lists(first.outputs) == [{"w": [2.0, -1.0]}] * 2
    assert lists(oracle.residuals) == [{"w": [0.0, 3.0]}, {"w": [1.0, 0.0]}]
    second = take_step(oracle, {"w": [4.0, 3.0]}, {"w": [1.0, -2.0]})
    # Corrected: [4, 6] sends 6; [2, -2] is a tie and sends the first.
    assert lists(second.outputs) == [{"w": [1.0, 3.0]}] * 2
    assert lists(oracle.residuals) == [{"w": [4.0, 0.0]}, {"w": [0.0, -2.0]}]


def test_feedback_spans_the_whole_run_of_compressors() -> None:
    spec: Spec = [("topk", {"ratio": 0.5}), ("sign", {}), ("ef", {})]
    oracle = Reference(spec, vectors(w=4), 1)
    take_step(oracle, {"w": [1.0, -4.0, 2.0, 0.0]})
    assert lists(oracle.residuals) == [{"w": [1.0, -1.0, -1.0, 0.0]}]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_residuals_are_fp32(dtype: str) -> None:
    oracle = Reference([("topk", {"ratio": 0.5}), ("ef", {})], vectors(dtype, w=2), 1)
    for _ in range(2):
        take_step(oracle, {"w": [1.0, 2.0]})
        assert array(oracle.residuals[0]["w"]).dtype == np.float32


def test_residuals_of_fp64_leaves_are_fp64() -> None:
    oracle = Reference([("sign", {}), ("ef", {})], vectors("float64", w=2), 1)
    take_step(oracle, {"w": [2.0**24, 1.0]})
    half = 2.0**23 - 0.5
    assert lists(oracle.residuals) == [{"w": [half, -half]}]


def test_without_feedback_there_is_no_residual() -> None:
    oracle = Reference([("topk", {"ratio": 0.5, "feedback": False})], vectors(w=2), 1)
    for _ in range(2):
        result = take_step(oracle, {"w": [4.0, 3.0]})
        assert lists(result.outputs) == [{"w": [4.0, 0.0]}]
    assert oracle.residuals == [{"w": None}]


@pytest.mark.parametrize("position", [0, 1])
def test_filtered_leaves_go_densely(position: int) -> None:
    spec: list[tuple[str, dict[str, Any]]] = [("unscale", {}), *COMPENSATED]
    spec.insert(position, ("filter_params", {"keep": lambda path: path != "bn"}))
    oracle = Reference(spec, vectors(bn=2, w=2), 2)
    result = take_step(
        oracle,
        {"bn": [2.0, 4.0], "w": [8.0, 2.0]},
        {"bn": [6.0, 0.0], "w": [4.0, 0.0]},
        loss_scale=2.0,
    )
    assert lists(result.outputs) == [{"bn": [2.0, 1.0], "w": [3.0, 0.0]}] * 2
    assert lists(oracle.residuals) == [{"bn": None, "w": [0.0, 1.0]}, {"bn": None, "w": [0.0, 0.0]}]


def test_filters_intersect() -> None:
    spec: Spec = [
        ("filter_params", {"keep": lambda path: path != "a"}),
        ("filter_params", {"keep": lambda path: path != "b"}),
        ("sign", {"feedback": False}),
    ]
    result = take_step(
        Reference(spec, vectors(a=2, b=2, c=2), 1), {path: [1.0, 3.0] for path in "abc"}
    )
    assert lists(result.outputs) == [{"a": [1.0, 3.0], "b": [1.0, 3.0], "c": [2.0, 2.0]}]


def test_leaf_absent_on_one_rank_counts_as_zero() -> None:
    result = take_step(Reference([("allreduce", {})], vectors(w=1), 2), {"w": None}, {"w": [4.0]})
    assert lists(result.outputs) == [{"w": [2.0]}] * 2


def test_leaf_left_out_is_absent() -> None:
    result = take_step(Reference([("allreduce", {})], vectors(v=1, w=1), 1), {"w": [4.0]})
    assert lists(result.outputs) == [{"v": None, "w": [4.0]}]


@pytest.mark.parametrize("scope", ["leaf", "global"])
def test_absent_leaf_keeps_its_residual(scope: str) -> None:
    spec: Spec = [("topk", {"ratio": 0.5, "scope": scope}), ("ef", {}), ("allreduce", {})]
    oracle = Reference(spec, vectors(w=2), 2)
    take_step(oracle, {"w": [4.0, 3.0]}, {"w": [4.0, 3.0]})
    result = take_step(oracle, {"w": None}, {"w": [0.0, 1.0]})
    assert lists(result.outputs) == [{"w": [0.0, 2.0]}] * 2
    assert lists(oracle.residuals) == [{"w": [0.0, 3.0]}, {"w": [0.0, 0.0]}]


def test_leaf_absent_everywhere_stays_absent_and_keeps_its_residual() -> None:
    oracle = Reference(COMPENSATED, vectors(v=1, w=2), 2)
    take_step(oracle, {"v": [1.0], "w": [4.0, 3.0]}, {"v": [1.0], "w": [4.0, 3.0]})
    result = take_step(oracle, {"v": [1.0], "w": None}, {"v": [3.0], "w": None})
    assert lists(result.outputs) == [{"v": [2.0], "w": None}] * 2
    assert lists(oracle.residuals) == [{"v": [0.0], "w": [0.0, 3.0]}] * 2


def test_absent_leaf_enters_a_global_topk_as_zeros_and_contributes_none() -> None:
    spec: Spec = [("topk", {"ratio": 0.75, "scope": "global"}), ("sign", {}), ("ef", {})]
    oracle = Reference(spec, vectors(a=2, b=2), 1)
    result = take_step(oracle, {"a": None, "b": [6.0, -3.0]})
    # 3 of 4: 6, -3 and the first zero of a; the mean counts that zero, a gets nothing.
    assert lists(result.outputs) == [{"a": None, "b": [3.0, -3.0]}]
    assert lists(oracle.residuals) == [{"a": [0.0, 0.0], "b": [3.0, 0.0]}]


@pytest.mark.parametrize("path", ["bn", "w"])
@pytest.mark.parametrize("value", [INF, -INF, math.nan])
def test_bad_step_leaves_no_trace(value: float, path: str) -> None:
    oracle = Reference(MISSION, vectors(bn=1, v=1, w=2), 2)
    good: dict[str, Values] = {"bn": [1.0], "v": None, "w": [4.0, 3.0]}
    take_step(oracle, good, good, loss_scale=1.0)
    bad = dict(good)
    bad[path] = [value] * oracle.shapes[path][0][0]
    result = take_step(oracle, good, bad, loss_scale=1.0)
    assert result.skipped
    assert lists(result.outputs) == [{"bn": [0.0], "v": None, "w": [0.0, 0.0]}] * 2
    assert lists(oracle.residuals) == [{"bn": None, "v": [0.0], "w": [0.0, 3.0]}] * 2
    after = take_step(oracle, good, good, loss_scale=1.0)
    assert not after.skipped
    assert lists(after.outputs) == [{"bn": [1.0], "v": None, "w": [0.0, 6.0]}] * 2


@pytest.mark.parametrize("value", [INF, math.nan])
@pytest.mark.parametrize("name", ["topk", "sign"])
def test_lossy_chain_without_unscale_is_gated(name: str, value: float) -> None:
    spec: Spec = [(name, {"ratio": 0.5, "feedback": False}), ("allreduce", {})]
    result = take_step(Reference(spec, vectors(w=2), 2), {"w": [1.0, value]}, {"w": [1.0, 1.0]})
    assert result.skipped
    assert lists(result.outputs) == [{"w": [0.0, 0.0]}] * 2


@pytest.mark.parametrize(
    "spec", [[("unscale", {}), ("allreduce", {})], [("allreduce", {}), ("unscale", {})]]
)
def test_unscale_gates_on_either_side_of_the_exchange(spec: Spec) -> None:
    oracle = Reference(spec, vectors(w=2), 2)
    good = take_step(oracle, {"w": [2.0, 4.0]}, {"w": [6.0, 0.0]}, loss_scale=2.0)
    assert not good.skipped
    assert lists(good.outputs) == [{"w": [2.0, 1.0]}] * 2
    bad = take_step(oracle, {"w": [INF, 4.0]}, {"w": [-INF, 0.0]}, loss_scale=2.0)
    assert bad.skipped
    assert lists(bad.outputs) == [{"w": [0.0, 0.0]}] * 2


def test_overflow_in_the_division_is_a_bad_step() -> None:
    result = take_step(Reference([("unscale", {})], vectors(w=1), 1), {"w": [3e38]}, loss_scale=0.5)
    assert result.skipped


def test_overflow_in_the_sum_is_a_bad_step() -> None:
    oracle = Reference(COMPENSATED, vectors(w=2), 2)
    result = take_step(oracle, {"w": [3e38, 1.0]}, {"w": [3e38, 1.0]})
    assert result.skipped
    assert lists(oracle.residuals) == [{"w": [0.0, 0.0]}] * 2


def test_overflow_in_the_corrected_gradient_is_a_bad_step() -> None:
    oracle = Reference([("topk", {"ratio": 0.5}), ("ef", {})], vectors(w=2), 1)
    assert not take_step(oracle, {"w": [2.0**127, 2.0**127]}).skipped
    assert take_step(oracle, {"w": [0.0, 2.0**127]}).skipped
    assert lists(oracle.residuals) == [{"w": [0.0, 2.0**127]}]


@pytest.mark.parametrize(
    ("dtype", "value", "skipped"),
    [
        ("float16", 32752.0, False),  # 65504 is the largest
        ("float16", 32768.0, True),
        ("bfloat16", 2.0**127 - 2.0**119, False),
        ("bfloat16", 2.0**127, True),
        ("float32", 2.0**126, False),
        ("float64", 2.0**127, False),
    ],
)
def test_overflow_in_the_cast_is_a_bad_step(dtype: str, value: float, skipped: bool) -> None:
    spec: Spec = [("unscale", {}), ("allreduce", {"op": "sum"})]
    oracle = Reference(spec, vectors(dtype, w=1), 2)
    result = take_step(oracle, {"w": [value]}, {"w": [value]}, loss_scale=1.0)
    assert result.skipped == skipped
    assert lists(result.outputs) == [{"w": [0.0 if skipped else 2 * value]}] * 2


def test_stateless_linear_chain_lets_non_finite_values_through() -> None:
    oracle = Reference([("allreduce", {"op": "sum"})], vectors("float16", w=3), 2)
    result = take_step(oracle, {"w": [INF, INF, 60000.0]}, {"w": [1.0, -INF, 60000.0]})
    assert not result.skipped
    leaf = array(result.outputs[0]["w"])
    np.testing.assert_array_equal(leaf, np.array([INF, math.nan, 120000.0], np.float32))


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (1.0, 1.0),
        (-0.0, -0.0),
        (1.0 + 2.0**-9, 1.0),
        (1.0 + 2.0**-8, 1.0),  # halfway, down to the even one
        (1.0 + 2.0**-8 + 2.0**-20, 1.0 + 2.0**-7),
        (1.0 + 3 * 2.0**-8, 1.0 + 2.0**-6),  # halfway, up to the even one
        (-(1.0 + 3 * 2.0**-8), -(1.0 + 2.0**-6)),
        (2.0**-133, 2.0**-133),  # the smallest
        (2.0**-134, 0.0),
        (2.0**128 - 2.0**120, 2.0**128 - 2.0**120),  # the largest, 3.3895314e38
        (2.0**128 - 2.0**119 - 2.0**104, 2.0**128 - 2.0**120),
        (2.0**128 - 2.0**119, INF),
        (-(2.0**128) + 2.0**104, -INF),
        (INF, INF),
        (math.nan, math.nan),
    ],
)
def test_round_to_bfloat16(value: float, rounded: float) -> None:
    result = round_to_bfloat16(np.array([value], np.float32))
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result, np.array([rounded], np.float32))
    assert math.copysign(1.0, float(result[0])) == math.copysign(1.0, rounded)


def test_round_to_bfloat16_keeps_every_nan() -> None:
    # Rounded as a number, this one would become -0.
    nan = np.array([0x7FFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(round_to_bfloat16(nan)).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_cast_overflows_to_infinity(dtype: str) -> None:
    result = cast_to(np.array([-3.4e38, 2.0], np.float32), dtype)
    assert result.tolist() == [-INF, 2.0]


def test_nothing_is_lost_over_many_steps() -> None:
    spec: Spec = [("topk", {"ratio": 0.25}), ("ef", {}), ("allreduce", {})]
    oracle = Reference(spec, vectors(w=8), 2)
    random = np.random.default_rng(0)
    given, received = np.zeros(8), np.zeros(8)
    # Small integers are summed exactly, so the law holds bit for bit.
    for _, scale in zip(range(20), itertools.cycle([1, 8]), strict=False):
        ranks = [scale * random.integers(-9, 10, 8).astype(np.float32) for _ in range(2)]
        result = oracle.step([{"w": rank} for rank in ranks])
        given += np.mean(ranks, axis=0)
        received += array(result.outputs[0]["w"])
    residuals = [array(leaves["w"]) for leaves in oracle.residuals]
    assert np.any(residuals)
    np.testing.assert_array_equal(received + np.mean(residuals, axis=0), given)
