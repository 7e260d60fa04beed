"""As `test_completeness`, for the stages that are not in the mission's chain: each of them among
that chain's, and each pair of them with a feedback and the exchange.

Of the former all orders of up to three stages are tried and some of four, of the pairs some of up
to four; which ones is a matter of counting, so that all stages and pairs have their turn.
"""

import itertools

from gradtx.core.rules import RULES
from gradtx.testing import check_laws
from witness import (
    COMPRESSORS,
    FOREIGN,
    OPEN,
    PARAMS,
    TRANSFORMS,
    built,
    check_suggestion,
    lawless,
    orders,
    superfluous_stage,
    useless_compressor,
    violations_of,
    witness,
)

ALONE = [(name, ("unscale", "skip_bn", name, "ef", "allreduce")) for name in COMPRESSORS | OPEN]
ALONE += [(name, ("unscale", name, "topk", "ef", "allreduce")) for name in FOREIGN | TRANSFORMS]
ALONE += [
    ("momentum_correction", ("unscale", "skip_bn", name, "momentum_correction", "allreduce"))
    for name in ("topk", "sign", "powersgd")
]
ALONE += [("momentum_correction", ("unscale", "topk", "ef", "momentum_correction", "allreduce"))]
PAIRED = dict.fromkeys(
    (
        *itertools.combinations([*COMPRESSORS, *OPEN, *FOREIGN], 2),
        *itertools.combinations([*FOREIGN, *TRANSFORMS], 2),
        *itertools.product(("topk", "sign", "vote"), TRANSFORMS),
    )
)
PAIRS = [
    (pair, (*pair, ("ef", "momentum_correction")[number % 2], "allreduce"))
    for number, pair in enumerate(PAIRED)
]


def chains_of_one():
    for name, names in ALONE:
        longer = [order for order in orders(names, 4) if name in order]
        yield from (order for order in orders(names, 1, 2, 3) if name in order)
        yield from longer[::31]


def chains_of_two():
    """The start differs from pair to pair, so that all orders have their turn."""
    for number, (pair, names) in enumerate(PAIRS):
        found = [order for order in orders(names, 2, 3) if {*pair} <= {*order}]
        yield from [*found, *itertools.permutations(names)][number % 11 :: 11]


def accepted_of_two():
    """Of each pair the longest order that is accepted, if one is."""
    for pair, names in PAIRS:
        tried = [*itertools.permutations(names), *orders(names, 3, 2)]
        yield from [o for o in tried if {*pair} <= {*o} and not violations_of(o)][:1]


ONE, TWO = dict.fromkeys(chains_of_one()), dict.fromkeys(chains_of_two())
REFUSED = [names for names in {**ONE, **TWO} if violations_of(names)]
ACCEPTED = dict.fromkeys([names for names in ONE if not violations_of(names)][::3])
ACCEPTED |= dict.fromkeys(accepted_of_two())


def test_every_pair_is_among_them():
    for pair, _ in PAIRS:
        assert sum({*pair} <= {*names} for names in REFUSED) > 1, pair


def test_every_rule_is_broken_by_some():
    found = {violation.code for names in REFUSED for violation in violations_of(names)}
    # Windows and delays are in `test_completeness_holding`, a density in `test_sharded`, two stages
    # of an exchange in `test_inner`.
    assert found == {rule.code for rule in RULES} - {"GX307", "GX406", "GX501", "GX502"}


def test_every_refused_chain_has_a_witness():
    witnesses = {names: witness(names) for names in REFUSED}
    assert [names for names, found in witnesses.items() if found is None] == []
    # Each kind of search finds something that no other does.
    assert set(witnesses.values()) >= {
        "raises",
        "a stage without effect",
        "a compressor that saves nothing",
        "a feedback=False without effect",
        "loses more than it says",
        "breaks L1",
        "breaks L2",
        "breaks L3",
        "breaks L5",
        "breaks L9",
        "a bad step shows",
        "depends on the loss scale",
        "ranks part",
        "falls behind",
        "leaves more than came in",
    }


def test_accepted_chains_keep_the_laws_at_once_on_average_and_in_time():
    assert {names: found for names in ACCEPTED if (found := lawless(names))} == {}


def test_accepted_stages_are_pure_and_keep_the_laws_on_three_ranks():
    for name, names in ALONE:
        for order in [o for o in orders(names, 3) if name in o and o in ACCEPTED]:
            check_laws(built(order), params=PARAMS, ranks=(3,), steps=2, laws=["L2", "L4", "L7"])


def test_no_stage_of_an_accepted_chain_can_go():
    """But for a filter or clip that is there twice, and for what changes no sign before a vote."""
    clips = ("clip_global", "clip_local")
    for names in ACCEPTED:
        i = superfluous_stage(names)
        name = names[i or 0]
        repeated = any(
            name in same and sum(other in same for other in names) > 1
            for same in (("skip_bn",), clips)
        )
        before_vote = "vote" in names and name in ("unscale", *FOREIGN, *clips)
        assert i is None or repeated or before_vote, names
        assert useless_compressor(names) is None, names


def test_suggestions_pass_and_hold_the_same_transformations():
    for names in REFUSED[::7]:
        check_suggestion(names)
