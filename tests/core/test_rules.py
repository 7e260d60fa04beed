"""Each order rule on the smallest chain that breaks it."""

import inspect

import optax
import pytest

import gradtx as gx
from gradtx.core.rules import RULES

LOCAL = {"needs_reduced": False, "stateful": False}
clip = gx.declare(optax.clip(1.0), name="clip", **LOCAL)
scale = gx.declare(optax.scale(2.0), name="scale", linear=True, **LOCAL)
momentum = gx.declare(optax.trace(0.9), name="momentum", linear=True, needs_reduced=False)
plain_topk = gx.topk(0.5, feedback=False)
plain_sign = gx.sign(feedback=False)


def error_of(*parts):
    with pytest.raises(gx.ChainOrderError) as caught:
        gx.chain(*parts)
    return caught.value


def found_in(*parts):
    """The codes of a chain and their positions."""
    return [(violation.code, violation.stages) for violation in error_of(*parts).violations]


# A code, positions, a chain that breaks this rule and no other, what the reason says, and the fix.
ONE_RULE = [
    ("GX101", (0, 1), [gx.unscale(), gx.unscale()], "unscale() is the second unscale", "leave it"),
    (
        "GX102",
        (0, 1),
        [clip, gx.unscale()],
        "clip(max_delta=1.0) stands before unscale()",
        "before clip(max_delta=1.0)",
    ),
    ("GX102", (0, 1), [momentum, gx.unscale()], "stateful or not linear", "before momentum("),
    (
        "GX102",
        (1, 2),
        [gx.allreduce(), clip, gx.unscale()],
        "clip(max_delta=1.0) stands before unscale()",
        "put unscale() before clip(max_delta=1.0)",
    ),
    ("GX201", (0,), [gx.skip_bn()], "skip_bn() has no compressor to its right", "leave it out"),
    (
        "GX201",
        (0,),
        [gx.filter_params(gx.is_matrix), gx.allreduce()],
        "filter_params(gx.is_matrix) has no compressor",
        "put it before a compressor",
    ),
    (
        "GX202",
        (0, 1),
        [plain_topk, gx.skip_bn(), plain_sign],
        "to the right of topk(0.5, feedback=False)",
        "put skip_bn() before topk",
    ),
    ("GX301", (0, 1), [gx.sign(), gx.topk(0.5), gx.ef()], "cannot take what", "before sign()"),
    ("GX301", (0, 1), [gx.sign(), gx.sign(), gx.ef()], "no values left", "leave it out"),
    (
        "GX302",
        (0,),
        [gx.topk(0.5), gx.allreduce()],
        "topk(0.5) is biased",
        "give topk(0.5) the argument feedback=False",
    ),
    ("GX302", (2,), [gx.topk(0.5), gx.ef(), gx.sign()], "sign() is biased", "feedback=False"),
    ("GX303", (0,), [gx.ef()], "no lossy compressor directly to its left", "leave it out"),
    ("GX303", (2,), [plain_topk, gx.allreduce(), gx.ef()], "no lossy compressor", "leave it out"),
    ("GX303", (0, 1), [plain_topk, gx.ef()], "says feedback=False", "leave it out"),
    (
        "GX304",
        (1, 3),
        [gx.topk(0.5), gx.ef(), gx.topk(0.5), gx.ef()],
        "second error feedback before one exchange",
        "keep one",
    ),
    (
        "GX305",
        (0, 1),
        [gx.allreduce(), plain_topk],
        "compresses after allreduce() has sent",
        "before allreduce()",
    ),
    (
        "GX306",
        (0, 1),
        [gx.random_k(0.5, unbiased=True), gx.ef()],
        "is no contraction",
        "leave ef() out",
    ),
    (
        "GX307",
        (0, 1),
        [plain_topk, gx.allreduce(algorithm="sharded", density=0.1)],
        "allreduce(algorithm='sharded', density=0.1) leaves the small ones among the sums",
        "or leave the density out",
    ),
    ("GX307", (0,), [gx.allreduce(algorithm="sharded", density=0.1)], "no error feedback", "ef()"),
    (
        "GX406",
        (0, 1, 2),
        [plain_topk, gx.allreduce(axis_name="node"), gx.allreduce(axis_name="data")],
        "goes on through allreduce(axis_name='data'), densely",
        "behind allreduce(axis_name='node')",
    ),
    (
        "GX401",
        (0, 1),
        [plain_topk, clip],
        "clip(max_delta=1.0) takes dense gradients only",
        "put clip(max_delta=1.0) before",
    ),
    (
        "GX402",
        (0, 1),
        [gx.allreduce(), gx.allreduce(op="sum")],
        "allreduce(op='sum') exchanges a second time",
        "leave it out",
    ),
    (
        "GX403",
        (0, 1),
        [optax.clip_by_global_norm(1.0), gx.allreduce()],
        "needs the gradient of all ranks and stands before allreduce()",
        "put clip_by_global_norm(max_norm=1.0) behind allreduce()",
    ),
    (
        "GX501",
        (0, 1),
        [gx.allreduce(), gx.accumulate(2)],
        "accumulate(2) stands to the right of allreduce()",
        "put accumulate(2) before allreduce()",
    ),
    ("GX501", (0, 1), [clip, gx.accumulate(2)], "acts on every micro-step", "before clip("),
    ("GX501", (0, 1), [momentum, gx.accumulate(2)], "once a window", "before momentum("),
    ("GX501", (0, 1), [gx.accumulate(2), gx.accumulate(3)], "of accumulate(2)", "accumulate(3)"),
    (
        "GX502",
        (0,),
        [gx.delayed(steps=1), clip, gx.allreduce()],
        "delayed(steps=1) has no exchange directly to its right",
        "directly before allreduce()",
    ),
    ("GX502", (1,), [gx.allreduce(), gx.delayed(steps=1)], "no exchange", "before allreduce()"),
    (
        "GX502",
        (0,),
        [gx.delayed(steps=1), gx.delayed(steps=1), gx.allreduce()],
        "no exchange directly",
        "before allreduce()",
    ),
]


def shown(code, parts):
    """A test id without addresses."""
    return f"{code} {gx.chain(*parts, check=False)!r}"


@pytest.mark.parametrize(
    ("code", "stages", "parts", "reason", "fix"),
    ONE_RULE,
    ids=[shown(row[0], row[2]) for row in ONE_RULE],
)
def test_one_rule(code, stages, parts, reason, fix):
    error = error_of(*parts)
    (violation,) = error.violations
    assert (violation.code, violation.stages) == (code, stages)
    assert reason in violation.reason
    assert fix in violation.fix
    assert f"{code} at {', '.join(map(str, stages))}: {violation.reason}" in str(error)
    assert f"fix: {violation.fix}" in str(error)
    marked = [line for line in str(error).splitlines() if line.endswith(f"# <- {code}")]
    assert len(marked) == len(stages)


def test_every_rule_has_its_example():
    assert {row[0] for row in ONE_RULE} == {rule.code for rule in RULES}


@pytest.mark.parametrize("row", ONE_RULE, ids=lambda row: shown(row[0], row[2]))
def test_check_false_builds_it_all_the_same(row):
    parts = row[2]
    assert len(gx.chain(*parts, check=False).stages) == len(parts)


@pytest.mark.parametrize(
    "parts",
    [
        [gx.allreduce(), gx.unscale()],
        [scale, gx.unscale(), gx.allreduce()],
        [gx.unscale(), clip, gx.topk(0.5), gx.ef(), gx.allreduce()],
        [plain_topk, plain_sign, gx.allreduce(), gx.unscale()],
        [gx.allreduce(), optax.clip_by_global_norm(1.0)],
        [optax.clip_by_global_norm(1.0)],
        [gx.topk(0.5), gx.ef(), gx.allreduce(), optax.sgd(0.1)],
        [plain_topk, gx.allreduce()],
        [gx.topk(0.5), gx.ef(), plain_sign, gx.allreduce()],
        [gx.skip_bn(), gx.filter_params(gx.is_matrix), gx.topk(0.5), gx.sign(), gx.ef()],
        [gx.error_feedback(gx.topk(0.5)), gx.allreduce()],
        [gx.masked(gx.error_feedback(gx.topk(0.5), gx.sign()), gx.is_matrix), gx.allreduce()],
        [scale, gx.unscale(), scale, gx.accumulate(2), clip, gx.topk(0.5), gx.ef(), gx.allreduce()],
        [
            gx.skip_bn(),
            gx.accumulate(2),
            gx.topk(0.5),
            gx.ef(),
            gx.delayed(steps=1),
            gx.allreduce(),
        ],
        [gx.dynamic_loss_scale(), gx.accumulate(2), gx.delayed(steps=0), gx.allreduce(), clip],
        [gx.delayed(gx.allreduce(), steps=2), gx.master_weights(), optax.sgd(0.1)],
    ],
    ids=lambda parts: shown("accepted", parts),
)
def test_accepted(parts):
    assert gx.chain(*parts).stages == gx.chain(*parts, check=False).stages


def test_all_violations_are_reported_the_most_telling_first():
    parts = [gx.topk(0.5), gx.unscale(), gx.ef(), gx.allreduce(), gx.allreduce()]
    assert found_in(*parts) == [
        ("GX102", (0, 1)),
        ("GX302", (0,)),
        ("GX303", (2,)),
        ("GX401", (0, 1)),
        ("GX402", (3, 4)),
    ]


def test_every_third_unscale_counts():
    parts = [gx.unscale()] * 3
    assert found_in(*parts) == [("GX101", (0, 1)), ("GX101", (0, 2))]


def test_positions_are_those_of_the_flat_chain():
    nested = gx.chain(gx.unscale(), gx.topk(0.5, feedback=False))
    assert found_in(nested, gx.chain(gx.allreduce()), gx.allreduce()) == [("GX402", (2, 3))]


def test_the_stages_of_a_combinator_count_one_by_one():
    assert found_in(gx.error_feedback(gx.topk(0.5)), gx.unscale())[0] == ("GX102", (0, 2))


def test_an_explicit_feedback_takes_hold_of_its_own_compressors_only():
    assert found_in(gx.topk(0.5), gx.error_feedback(gx.topk(0.5))) == [("GX302", (0,))]


def test_a_foreign_transformation_counts_as_stateful_and_in_need_of_reduced_gradients():
    foreign = optax.scale(1.0)
    assert found_in(foreign, gx.unscale(), gx.allreduce()) == [
        ("GX102", (0, 1)),
        ("GX403", (0, 2)),
    ]
    gx.chain(gx.unscale(), gx.declare(foreign, needs_reduced=False), gx.allreduce())


def test_an_object_with_init_and_update_is_enough():
    class Optimizer:
        def init(self, params):
            return ()

        def update(self, updates, state, params=None):
            return updates, state

    assert found_in(Optimizer(), gx.allreduce()) == [("GX403", (0, 1))]
    assert not inspect.signature(Optimizer().init).parameters.keys() - {"params"}
    gx.chain(gx.allreduce(), Optimizer())
