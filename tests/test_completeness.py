"""Every chain that is refused has a witness, and what is suggested instead passes.

The search for witnesses is in `witness`; here it goes over all orders of the mission's chain.
"""

import pytest

import gradtx as gx
from gradtx.core.rules import RULES
from witness import (
    check_suggestion,
    orders,
    superfluous_stage,
    useless_compressor,
    violations_of,
    witness,
)

CHAINS = orders(("unscale", "skip_bn", "topk", "sign", "ef", "allreduce"), *range(6))
REFUSED = [names for names in CHAINS if violations_of(names)]
ACCEPTED = [names for names in CHAINS if not violations_of(names)]


def test_there_are_9331_chains_of_up_to_five_stages_and_65_are_accepted():
    assert len(CHAINS) == 9331
    assert len(ACCEPTED) == 65
    assert sum("allreduce" in names for names in ACCEPTED) == 23
    assert len(REFUSED) == 9266


def test_codes_are_from_the_table():
    found = {violation.code for names in REFUSED for violation in violations_of(names)}
    known = {rule.code for rule in RULES}
    assert found <= known
    # A stage that needs reduced gradients, an unbiased compressor, an exchange with a density, one
    # inside nodes and what holds something back are not among the six.
    assert known - found == {"GX306", "GX307", "GX403", "GX406", "GX501", "GX502"}


def test_every_refused_chain_has_a_witness():
    witnesses = {names: witness(names) for names in REFUSED}
    assert [names for names, found in witnesses.items() if found is None] == []
    # Each kind of search finds something: none of them is idle.
    assert set(witnesses.values()) >= {
        "raises",
        "a stage without effect",
        "a compressor that saves nothing",
        "breaks L2",
    }


def test_no_stage_of_an_accepted_chain_can_go():
    """But for a filter that is there twice, which harms nobody."""
    for names in ACCEPTED:
        superfluous = superfluous_stage(names)
        repeated = names.count("skip_bn") > 1 and names[superfluous or 0] == "skip_bn"
        assert superfluous is None or repeated, names
        assert useless_compressor(names) is None, names


@pytest.mark.parametrize(("length", "every"), [(1, 1), (2, 1), (3, 1), (4, 3), (5, 71)])
def test_suggestions_pass_and_hold_the_same_transformations(length, every):
    """There is none only where no order passes."""
    for names in [names for names in REFUSED if len(names) == length][::every]:
        check_suggestion(names)


def test_a_suggestion_keeps_hyperparameters():
    parts = [gx.topk(0.25), gx.unscale(), gx.ef(), gx.allreduce(op="sum")]
    with pytest.raises(gx.ChainOrderError) as caught:
        gx.chain(*parts)
    suggestion = caught.value.suggestion
    assert suggestion.transformations == (parts[1], parts[0], parts[2], parts[3])
