"""Every chain that is refused has a witness, and what is suggested instead passes.

A witness is an update that raises, a law that breaks, or a stage that can be taken away without a
change of any result. The search for it does not look at the rules.
"""

import itertools
from collections import Counter
from functools import cache

import pytest
import torch

import gradtx as gx
from gradtx.core.payload import decode_leaves
from gradtx.core.rules import RULES, check
from gradtx.core.tree import flatten
from gradtx.exchange.group import Group, default_group
from gradtx.testing import LawViolation, check_laws

STAGES = {
    "unscale": gx.unscale(),
    "skip_bn": gx.skip_bn(),
    "topk": gx.topk(0.5),
    "sign": gx.sign(),
    "ef": gx.ef(),
    "allreduce": gx.allreduce(),
}
# Half of the values would cost more than all signs do, for the indices.
SPARING = {"topk": gx.topk(0.1)}
CHAINS = [names for n in range(6) for names in itertools.product(STAGES, repeat=n)]
PARAMS = {"bn": torch.zeros(2), "w": torch.zeros(16)}
GRADIENTS = [
    {"bn": torch.tensor([1.0, -3.0]), "w": torch.linspace(-1.0, 3.0, 16)},
    {"bn": torch.tensor([1.0, torch.inf]), "w": torch.ones(16)},
    {"bn": torch.tensor([0.25, 2.0]), "w": torch.linspace(2.0, -1.5, 16) ** 3},
]
SCALES = (2.0, 1.0, 16.0)
LARGE = {"w": torch.linspace(-1.0, 2.0, 6000) ** 3}


class TwoRanks(Group):
    """One of two ranks that have the same gradients: no thread is needed to play both."""

    size = 2

    def _all_gather(self, message):
        return [message, message.clone()]

    def _all_reduce(self, buffer):
        return 2 * buffer


def violations_of(names):
    return check([STAGES[name].stage for name in names])


def built(names):
    return gx.chain(*(STAGES[name] for name in names), check=False)


REFUSED = [names for names in CHAINS if violations_of(names)]
ACCEPTED = [names for names in CHAINS if not violations_of(names)]


@cache
def results(names, group_type):
    """All numbers that come out over a few steps, payloads decoded; or the error."""
    group, tx, out = group_type(), built(names), []
    with default_group(group):
        try:
            state = tx.init(PARAMS)
            for grads, scale in zip(GRADIENTS, SCALES, strict=True):
                updates, state = tx.update(grads, state, loss_scale=scale)
                out.append([leaf.tolist() for leaf in decode_leaves(flatten(updates)[0])])
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return repr(out)  # NaN equals NaN there


def raises(names):
    return not results(names, Group).startswith("[")


@cache
def bytes_sent(names):
    """On a large leaf, in the second of two steps, without the handshake."""
    group = TwoRanks()
    tx = gx.chain(*(SPARING.get(name, STAGES[name]) for name in names), check=False)
    with default_group(group):
        _, state = tx.update(LARGE, tx.init(LARGE), loss_scale=1.0)
        before = group.sent
        tx.update(LARGE, state, loss_scale=1.0)
    return group.sent - before


def without(names, *positions):
    return tuple(name for i, name in enumerate(names) if i not in positions)


def superfluous_stage(names):
    """The position of a stage that can go: no result changes, on one rank or on two.

    The only exchange cannot, nor the first: ranks with other gradients need it.
    """
    for i, name in enumerate(names):
        fewer = without(names, i)
        if name == "allreduce" and "allreduce" not in names[:i]:
            continue
        if all(results(fewer, group) == results(names, group) for group in (Group, TwoRanks)):
            return i
    return None


def useless_compressor(names):
    """The position of a compressor that can go, with its feedback, at no cost in bytes."""
    for i, name in enumerate(names):
        if name in ("topk", "sign"):
            alone, with_feedback = without(names, i), without(names, i, i + 1)
            followed = names[i + 1 : i + 2] == ("ef",)
            fewer = with_feedback if followed and raises(alone) else alone
            comparable = "allreduce" in fewer and not raises(fewer)
            if comparable and bytes_sent(fewer) <= bytes_sent(names):
                return i
    return None


def broken_law(names, ranks, laws):
    try:
        check_laws(built(names), params=PARAMS, ranks=ranks, steps=3, laws=laws)
    except LawViolation as violation:
        return violation.law
    return None


@cache
def witness(names):
    """What is wrong with a chain, or None if nothing is found."""
    if raises(names):
        return "raises"
    if superfluous_stage(names) is not None:
        return "a stage without effect"
    if useless_compressor(names) is not None:
        return "a compressor that saves nothing"
    law = broken_law(names, (1,), ["L2", "L1", "L3", "L5", "L8", "L0"]) or broken_law(
        names, (2,), ["L0", "L2", "L1", "L3", "L4", "L5", "L10"]
    )
    return f"breaks {law}" if law else None


def test_there_are_9331_chains_of_up_to_five_stages_and_65_are_accepted():
    assert len(CHAINS) == 9331
    assert len(ACCEPTED) == 65
    assert sum("allreduce" in names for names in ACCEPTED) == 23
    assert len(REFUSED) == 9266


def test_codes_are_from_the_table():
    found = {violation.code for names in REFUSED for violation in violations_of(names)}
    known = {rule.code for rule in RULES}
    assert found <= known
    # A stage that needs reduced gradients and an unbiased compressor are not among the six.
    assert known - found == {"GX306", "GX403"}


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


def suggestion_for(names):
    with pytest.raises(gx.ChainOrderError) as caught:
        gx.chain(*(STAGES[name] for name in names))
    return caught.value.suggestion


@cache
def can_pass(stages):
    """Whether some order of the stages, given sorted, passes."""
    return any(not violations_of(order) for order in set(itertools.permutations(stages)))


@pytest.mark.parametrize(("length", "every"), [(1, 1), (2, 1), (3, 1), (4, 3), (5, 71)])
def test_suggestions_pass_and_hold_the_same_transformations(length, every):
    """There is none only where no order passes."""
    for names in [names for names in REFUSED if len(names) == length][::every]:
        suggestion = suggestion_for(names)
        assert (suggestion is not None) == can_pass(tuple(sorted(names))), names
        if suggestion is not None:
            found = tuple(part.name for part in suggestion.transformations)
            assert Counter(found) == Counter(names), names
            assert found in ACCEPTED, names


def test_a_suggestion_keeps_hyperparameters():
    parts = [gx.topk(0.25), gx.unscale(), gx.ef(), gx.allreduce(op="sum")]
    with pytest.raises(gx.ChainOrderError) as caught:
        gx.chain(*parts)
    suggestion = caught.value.suggestion
    assert suggestion.transformations == (parts[1], parts[0], parts[2], parts[3])
