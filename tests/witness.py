"""What is wrong with a chain: the search for a witness, which does not look at the rules.

A chain is a tuple of names of `STAGES`. A witness is an update that raises, a law that breaks, a
stage or a ``feedback=False`` that can be taken away without a change, or a compressor that saves
nothing. What feedback and unbiased compressors promise shows only over many steps, or on average.
"""

import itertools
from functools import cache
from typing import NamedTuple

import pytest
import torch

import gradtx as gx
from gradtx.core.payload import decode_leaves
from gradtx.core.rules import check
from gradtx.core.tree import flatten, map_leaves
from gradtx.exchange.group import Group, default_group, find_group
from gradtx.testing import LawViolation, check_laws, run_ranks


class NormState(NamedTuple):
    """What `Normalize` remembers."""

    norm: torch.Tensor


class Normalize:
    """Divides by a moving average of the largest magnitude, which all ranks have to agree on."""

    def init(self, params):
        return NormState(torch.ones(()))

    def update(self, updates, state, params=None):
        largest = max(float(leaf.abs().max()) for leaf in flatten(updates)[0] if leaf is not None)
        norm = (state.norm + largest) / 2
        return map_leaves(lambda leaf: leaf / norm, updates), NormState(norm)


class Squash:
    """Makes large values small, each on its own."""

    def init(self, params):
        return ()

    def update(self, updates, state, params=None):
        return map_leaves(lambda leaf: leaf / (1 + leaf.abs()), updates), state


SCHEDULE = gx.Schedule(lambda step: 0.25 if step % 2 else 0.5, (0.25, 0.5), "halves")
COMPRESSORS = {
    "topk": gx.topk(0.5),
    "topk_global": gx.topk(0.5, scope="global"),
    "topk_float16": gx.topk(0.5, values="float16"),
    "topk_scheduled": gx.topk(SCHEDULE),
    "threshold": gx.threshold(0.3, capacity=0.5),
    "random_k": gx.random_k(0.25),
    "random_k_unbiased": gx.random_k(0.25, unbiased=True),
    "sign": gx.sign(),
    "vote": gx.sign(majority_vote=True),
    "cast_float16": gx.cast("float16"),
    "cast_float8": gx.cast("float8_e4m3fn"),
    "quantize": gx.quantize(8),
    "quantize_coarse": gx.quantize(2, block=16, norm="l2"),
    "quantize_nearest": gx.quantize(4, stochastic=False),
    "ternary": gx.ternary(),
    "natural": gx.natural(),
    "powersgd": gx.powersgd(1),
}
# Those of them that are wrong on average, and say that they go without feedback.
OPEN = {
    "topk_open": gx.topk(0.5, feedback=False),
    "topk_float16_open": gx.topk(0.5, values="float16", feedback=False),
    "topk_scheduled_open": gx.topk(SCHEDULE, feedback=False),
    "threshold_open": gx.threshold(0.3, capacity=0.5, feedback=False),
    "random_k_open": gx.random_k(0.25, feedback=False),
    "sign_open": gx.sign(feedback=False),
    "cast_float8_open": gx.cast("float8_e4m3fn", feedback=False),
    "quantize_nearest_open": gx.quantize(4, stochastic=False, feedback=False),
    "powersgd_open": gx.powersgd(1, feedback=False),
}
FOREIGN = {
    "normalize": gx.declare(Normalize(), name="normalize"),
    "squash": gx.declare(Squash(), name="squash", stateful=False, needs_reduced=False),
}


def halving(step):
    return -(0.5**step)


TRANSFORMS = {
    "clip_global": gx.clip_by_global_norm(1.0),
    "clip_local": gx.clip_by_local_norm(1.5),
    "scale": gx.scale(-0.5),
    "schedule": gx.scale_by_schedule(halving),
    "decay": gx.add_decayed_weights(0.25),
}
STAGES = {
    "unscale": gx.unscale(),
    "skip_bn": gx.skip_bn(),
    "ef": gx.ef(),
    "momentum_correction": gx.momentum_correction(0.5),
    "allreduce": gx.allreduce(),
    **COMPRESSORS,
    **OPEN,
    **FOREIGN,
    **TRANSFORMS,
}
# With fewer values chosen, what a second compressor saves is not lost among the indices.
SPARING = {
    "topk": gx.topk(0.1),
    "topk_global": gx.topk(0.1, scope="global"),
    "topk_float16": gx.topk(0.1, values="float16"),
    "topk_scheduled": gx.topk(gx.Schedule(lambda step: 0.1, (0.1,), "tenth")),
    "threshold": gx.threshold(0.3, capacity=0.1),
    "random_k": gx.random_k(0.1),
}
SPARING |= {f"{name}_open": tx for name, tx in SPARING.items() if f"{name}_open" in OPEN}

FEEDBACKS = (("ef",), ("momentum_correction",))

PARAMS = {"bn": torch.ones(3, 4), "w": torch.ones(4, 6)}
SCALES = (2.0, 1.0, 16.0)
LARGE = {"w": (torch.linspace(-1.0, 2.0, 6000) ** 3).reshape(60, 100)}


def drawn(like, seed):
    """Normal gradients of few bits: a product with a small whole number, and its quotient, are
    exact."""
    generator = torch.Generator().manual_seed(seed)
    return map_leaves(
        lambda leaf: (2**17 * torch.randn(leaf.shape, generator=generator)).round() / 2**17, like
    )


GOOD = [drawn(PARAMS, seed) for seed in (1, 2)]
BAD = {"bn": torch.ones(3, 4), "w": torch.ones(4, 6).index_fill(0, torch.tensor(2), torch.inf)}
GRADIENTS = [GOOD[0], BAD, GOOD[1]]


class TwoRanks(Group):
    """One of two ranks that have the same gradients: no thread is needed to play both."""

    size = 2

    def _all_gather(self, message):
        return [message, message.clone()]

    def _all_reduce(self, buffer):
        return 2 * buffer


def orders(names, *lengths):
    """All orders of some stages, with repetition."""
    return [order for n in lengths for order in itertools.product(names, repeat=n)]


@cache
def violations_of(names):
    return check([STAGES[name].stage for name in names])


def built(names, stages=STAGES):
    return gx.chain(*(stages[name] for name in names), check=False)


def without(names, *positions):
    return tuple(name for i, name in enumerate(names) if i not in positions)


def outputs(tx, gradients, scales, group):
    """What comes out of each step, payloads decoded."""
    out = []
    params = map_leaves(torch.ones_like, gradients[0])
    with default_group(group):
        state = tx.init(params)
        for grads, scale in zip(gradients, scales, strict=True):
            updates, state = tx.update(grads, state, params, loss_scale=scale)
            out.append(decode_leaves(flatten(updates)[0]))
    return out, state


def printed(out):
    """All numbers; NaN equals NaN there."""
    return repr([[leaf.tolist() for leaf in leaves] for leaves in out])


@cache
def results(names, group_type):
    """All numbers that come out over a few steps; or the error."""
    try:
        return printed(outputs(built(names), GRADIENTS, SCALES, group_type())[0])
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def raises(names):
    return not results(names, Group).startswith("[")


@cache
def of_two_ranks(names):
    """Results and last states on two ranks with other gradients."""
    return run_ranks(
        2, lambda i: outputs(built(names), [GOOD[i], GOOD[1 - i]], SCALES[:2], find_group())
    )


def same_on_two_ranks(names, others):
    pairs = zip(of_two_ranks(names), of_two_ranks(others), strict=True)
    return all(printed(one) == printed(other) for (one, _), (other, _) in pairs)


def superfluous_stage(names):
    """The position of a stage that can go: no result changes, on one rank or on two."""
    for i, name in enumerate(names):
        fewer = without(names, i)
        if any(results(fewer, group) != results(names, group) for group in (Group, TwoRanks)):
            continue
        # Ranks with other gradients may need an exchange all the same.
        if name != "allreduce" or same_on_two_ranks(names, fewer):
            return i
    return None


@cache
def bytes_sent(names):
    """On a large leaf, in the second of two steps, without the handshake."""
    group, tx = TwoRanks(), built(names, STAGES | SPARING)
    with default_group(group):
        _, state = tx.update(LARGE, tx.init(LARGE), LARGE, loss_scale=1.0)
        before = group.sent
        tx.update(LARGE, state, LARGE, loss_scale=1.0)
    return group.sent - before


def without_compressor(names, i):
    """The chain without a compressor and the feedback that is for it alone, and, if the ranks have
    talked before, without the exchange behind it, too."""
    end = i + 1
    if names[end : end + 1] in FEEDBACKS and raises(without(names, i)):
        end += 1
    yield names[:i] + names[end:]
    if names[end : end + 1] == ("allreduce",) and "allreduce" in names[:i]:
        yield names[:i] + names[end + 1 :]


def useless_compressor(names):
    """The position of a compressor that can go at no cost in bytes."""
    for i, name in enumerate(names):
        for fewer in without_compressor(names, i) if STAGES[name].stage.lossy else ():
            comparable = "allreduce" in fewer and not raises(fewer)
            if comparable and bytes_sent(fewer) <= bytes_sent(names):
                return i
    return None


@cache
def broken_law(names, ranks, laws):
    try:
        check_laws(built(names), params=PARAMS, ranks=ranks, steps=3, laws=laws)
    except LawViolation as violation:
        return violation.law
    return None


def last_result(names, gradients, scales):
    return outputs(built(names), gradients, scales, Group())[0][-1:]


def bad_step_shows(names):
    """Whether a step comes out otherwise after a bad one, although states have kept nothing."""
    after = printed(last_result(names, GRADIENTS, SCALES))
    return after != printed(last_result(names, GOOD, (SCALES[0], SCALES[2])))


def depends_on_scale(names):
    """Whether a result changes with the loss scale, by more than rounding.

    The scales are no powers of two, but the product with the gradients is exact.
    """
    scales = (3.0, 80.0)
    scaled = [map_leaves(lambda x, s=s: x * s, g) for g, s in zip(GOOD, scales, strict=True)]
    plain = last_result(names, GOOD, (1.0, 1.0))[0]
    other = last_result(names, scaled, scales)[0]
    pairs = list(zip(plain, other, strict=True))
    return any(bool(((a - b).abs() > 1e-5 * a.abs().max()).any()) for a, b in pairs)


def fields(state, kind, name):
    """What states of a kind hold in a field."""
    if isinstance(state, kind) and name in getattr(state, "_fields", ()):
        yield getattr(state, name)
    elif isinstance(state, tuple):
        for part in state:
            yield from fields(part, kind, name)


def ranks_part(names):
    """Whether what needs the gradient of all ranks is in other states on two ranks."""
    norms = [list(fields(state, NormState, "norm")) for _, state in of_two_ranks(names)]
    return norms[0] != norms[1]


def fragment(names):
    """What stands before the exchange; its results are those of the chain on one rank."""
    found = names[: names.index("allreduce")] if "allreduce" in names else names
    return tuple(name for name in found if name != "unscale")


def entrance(names):
    """What stands before the first compressor."""
    lossy = (STAGES[name].stage.lossy for name in names)
    return names[: next((i for i, found in enumerate(lossy) if found), len(names))]


def flat(leaves):
    return torch.cat([leaf.double().reshape(-1) for leaf in leaves if leaf is not None])


def fed(names, gradients, steps=1):
    """What came to the compressors of a fragment, in all steps together, and what went out; and
    the norm of what is left in the end."""
    many, ones = [gradients] * steps, (1.0,) * steps
    came_in, _ = outputs(built(entrance(names)), many, ones, Group())
    given, state = outputs(built(names), many, ones, Group())
    left = [flat(flatten(tree)[0]) for tree in fields(state, tuple, "residual")]
    return sum(map(flat, came_in)), sum(map(flat, given)), [float(x.norm()) for x in left]


def even(like, seed=0):
    """Magnitudes between 2.4 and 4."""
    generator = torch.Generator().manual_seed(seed)

    def draw(leaf):
        uniform = torch.rand(leaf.shape, generator=generator)
        signs = torch.where(torch.rand(leaf.shape, generator=generator) < 0.5, -1.0, 1.0)
        return (2.4 + 1.6 * uniform) * signs

    return map_leaves(draw, like)


EVEN = even({"bn": torch.zeros(4, 4), "w": torch.zeros(16, 16)})
STEPS, BEHIND = 60, 0.55


def promises_mean(names):
    """Whether the results are to have the gradient as their mean.

    Not where ``feedback=False`` is written, for votes, and for velocities.
    """
    others = {"vote", "momentum_correction"}
    return all(STAGES[name].stage.feedback and name not in others for name in names)


@cache
def falls_behind(names):
    """Whether of a gradient that stays the same half has not come out after many steps."""
    if entrance(names) == names:
        return False
    came_in, given, left = fed(names, EVEN, STEPS)
    size = BEHIND * float(came_in.norm())
    behind = promises_mean(names) and not float((came_in - given).norm()) <= size
    return behind or not all(part <= size for part in left)


def spiked(leaf):
    flat = torch.full((leaf.numel(),), 0.03)
    flat[0] = 1.0
    return flat.reshape(leaf.shape)


# Several leaves: the random numbers are others in each.
SQUARES = {name: torch.zeros(32, 32) for name in ("a", "b", "bn", "c")}
STRAINING = [
    map_leaves(lambda leaf: 0.01 * leaf, even(SQUARES)),
    map_leaves(spiked, SQUARES),
    map_leaves(lambda leaf: 20 * spiked(leaf), SQUARES),
]


@cache
def leaves_more_than_came_in(names):
    """Whether feedback keeps more than there was: to send nothing at all would be better."""
    if not {"ef", "momentum_correction"} & {*names}:
        return False
    runs = [fed(names, gradients) for gradients in STRAINING]
    return any(part > 1.05 * float(came_in.norm()) for came_in, _, left in runs for part in left)


def closed(name):
    return name.removesuffix("_open")


def without_all(names, positions):
    """The chain without some compressors, and without a feedback that then has none."""
    kept = without(names, *positions)
    behind = [i + 1 for i in positions if names[i + 1 : i + 2] in FEEDBACKS]
    return without(names, *positions, *behind) if behind and raises(kept) else kept


def waived(names):
    return [i for i, name in enumerate(names) if name in OPEN]


@cache
def loses(names):
    """Whether what is given and what is left do not add up to what came in, at once or in time."""
    return bool(broken_law(names, (1,), ("L2",))) or falls_behind(fragment(names))


def loses_more_than_it_says(names):
    """Whether something is lost, too, once the stages that say ``feedback=False`` are gone."""
    rest = without_all(names, waived(names)) if waived(names) else ()
    return bool(rest) and not raises(rest) and loses(rest)


def idle_waiver(names):
    """The position of a ``feedback=False`` that, as if it were the only one, can go: nothing is
    lost without it."""
    for i in waived(names):
        fewer = (*names[:i], names[i].removesuffix("_open"), *names[i + 1 :])
        fewer = without_all(fewer, waived(fewer))
        if not raises(fewer) and not loses(fewer):
            return i
    return None


@cache
def lawless(names):
    """Which law breaks, in words, or None."""
    if loses_more_than_it_says(names):
        return "loses more than it says"
    law = broken_law(names, (1,), ("L2", "L1", "L3", "L5", "L8", "L0")) or broken_law(
        names, (2,), ("L0", "L2", "L1", "L3", "L4", "L5", "L9", "L10")
    )
    if law:
        return f"breaks {law}"
    if bad_step_shows(names):
        return "a bad step shows"
    if "unscale" in names and depends_on_scale(names):
        return "depends on the loss scale"
    if {"normalize", "allreduce"} <= set(names) and ranks_part(names):
        return "ranks part"
    if falls_behind(fragment(names)):
        return "falls behind"
    if leaves_more_than_came_in(fragment(names)):
        return "leaves more than came in"
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
    if idle_waiver(names) is not None:
        return "a feedback=False without effect"
    return lawless(names)


def suggested(names):
    """The names of what is suggested instead, or None."""
    with pytest.raises(gx.ChainOrderError) as caught:
        gx.chain(*(STAGES[name] for name in names))
    suggestion = caught.value.suggestion
    if suggestion is None:
        return None
    known = {id(tx): name for name, tx in STAGES.items()}
    return tuple(known[id(tx)] for tx in suggestion.transformations)


@cache
def can_pass(names):
    """Whether some order of the stages, given sorted, passes."""
    return any(not violations_of(order) for order in set(itertools.permutations(names)))


def check_suggestion(names):
    """What is suggested are the same stages in an order that passes; none only if none does."""
    found = suggested(names)
    assert (found is not None) == can_pass(tuple(sorted(names))), names
    if found is not None:
        assert sorted(found) == sorted(names), names
        assert not violations_of(found), names
