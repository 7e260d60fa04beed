"""As `test_completeness`, for the stages that hold something back: `accumulate` and `delayed`.

All orders of up to three of eight stages that have one of the two are tried, and every twentieth of
four and of five. A refused one has a witness: an update that raises, a law that breaks, or a stage
that can go without a change. An accepted one keeps the laws, and none of the two can go.
"""

import itertools

import pytest
import torch

import gradtx as gx
from gradtx.core.payload import decode_leaves
from gradtx.core.rules import check
from gradtx.core.tree import flatten
from gradtx.testing import LawViolation, check_laws
from gradtx.testing.trace import Case, trace

STAGES = {
    "unscale": gx.unscale(),
    "skip_bn": gx.skip_bn(),
    "accumulate": gx.accumulate(2),
    "clip": gx.clip_by_local_norm(0.5),
    "topk": gx.topk(0.5),
    "ef": gx.ef(),
    "delayed": gx.delayed(steps=1),
    "allreduce": gx.allreduce(),
}
HOLDING = {"accumulate", "delayed"}
PARAMS = {"bn": torch.zeros(3), "w": torch.zeros(4, 3)}


def orders(length):
    return [names for names in itertools.product(STAGES, repeat=length) if HOLDING & {*names}]


def violations_of(names):
    return check([STAGES[name].stage for name in names])


def built(names):
    return gx.chain(*(STAGES[name] for name in names), check=False)


ORDERS = [names for length in (1, 2, 3) for names in orders(length)]
ORDERS += orders(4)[::20]
# The longest that make sense, too.
FULL = ("unscale", "skip_bn", "accumulate", "clip", "topk", "ef", "delayed", "allreduce")
ORDERS += [FULL[:i] + FULL[i + 1 :] for i in range(len(FULL))] + [FULL]
ORDERS += [
    (*FULL[:i], FULL[j], *FULL[i + 1 : j], FULL[i], *FULL[j + 1 :])
    for i, j in itertools.combinations(range(len(FULL)), 2)
]
ORDERS = list(dict.fromkeys(ORDERS))
REFUSED = [names for names in ORDERS if violations_of(names)]
ACCEPTED = [names for names in ORDERS if not violations_of(names)]


def results(names):
    """All numbers that come out on two ranks; or the error."""
    tx = built(names)
    case = Case(tx, params=PARAMS, ranks=(2,), steps=3)
    try:
        traces = trace(tx, PARAMS, case.draw(2), 2)
    except Exception as error:
        return type(error).__name__
    found = [decode_leaves(flatten(updates)[0]) for one in traces for updates in one.outputs]
    return repr([[x if x is None else x.tolist() for x in leaves] for leaves in found])


def broken_law(names, laws=None):
    try:
        check_laws(built(names), params=PARAMS, ranks=(1, 2), steps=3, laws=laws)
    except LawViolation as violation:
        return f"breaks {violation.law}"
    return None


def witness(names):
    own = results(names)
    if not own.startswith("["):
        return "raises"
    for i in range(len(names)):
        if results(names[:i] + names[i + 1 :]) == own:
            return "a stage without effect"
    return broken_law(names)


def test_there_are_many_of_each():
    assert len(REFUSED) > 200
    assert len(ACCEPTED) > 20
    codes = {violation.code for names in REFUSED for violation in violations_of(names)}
    assert {"GX501", "GX502"} <= codes


@pytest.mark.parametrize("part", range(4))
def test_every_refused_order_has_a_witness(part):
    # A bare delay is refused in all of them for the same reason; some will do.
    found = {names: witness(names) for names in REFUSED[part::4]}
    assert [names for names, how in found.items() if how is None] == []


def test_an_order_that_only_windows_forbid_breaks_a_law_of_theirs():
    for names in (("allreduce", "accumulate"), ("clip", "accumulate", "allreduce")):
        assert [v.code for v in violations_of(names)] == ["GX501"]
        assert broken_law(names, ["L6"]) == "breaks L6"


@pytest.mark.parametrize("part", range(2))
def test_accepted_orders_keep_the_laws(part):
    found = {names: broken_law(names) for names in ACCEPTED[part::2]}
    assert {names: how for names, how in found.items() if how} == {}
