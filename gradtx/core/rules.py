"""The order rules: one row a rule; `check` applies them all.

`docs/rules.md` and ``python -m gradtx explain`` are made from this table.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from gradtx.core.errors import Violation
from gradtx.core.stage import Kind, Stage
from gradtx.core.stream import Stream, streams


@dataclass(frozen=True)
class Flow:
    """A flat chain as the rules look at it."""

    stages: tuple[Stage, ...]

    @cached_property
    def streams(self) -> list[Stream]:
        """The stream before each stage, and at the end."""
        return streams(self.stages)

    def where(self, *kinds: Kind) -> list[int]:
        """The positions of the stages of these kinds."""
        return [i for i, stage in enumerate(self.stages) if stage.kind in kinds]

    def end_of_segment(self, i: int) -> int:
        """The position of the first exchange from `i` on, or the length of the chain."""
        return next((j for j in self.where(Kind.EXCHANGE) if j >= i), len(self.stages))

    def covered(self, feedback: int) -> range:
        """The compressors that the feedback at a position takes hold of."""
        start, over = feedback, self.stages[feedback].over
        while start > 0 and self.stages[start - 1].kind is Kind.COMPRESSOR:
            if over is not None and feedback - start == over:
                break
            start -= 1
        return range(start, feedback)


Finder = Callable[[Flow], Iterator[tuple[int, ...]]]


@dataclass(frozen=True)
class Rule:
    """One row of the table.

    Attributes:
        code: its name, for ever.
        title: the rule in a few words.
        find: the positions of the stages at fault, the stage itself first.
        reason: what goes wrong; ``{0}``, ``{1}`` are the stages found.
        fix: what to write instead.
    """

    code: str
    title: str
    find: Finder
    reason: str
    fix: str


def _second_unscale(flow: Flow) -> Iterator[tuple[int, ...]]:
    unscales = flow.where(Kind.UNSCALE)
    for i in unscales[1:]:
        yield (i, unscales[0])


def _not_linear_before_unscale(flow: Flow) -> Iterator[tuple[int, ...]]:
    for unscale in flow.where(Kind.UNSCALE)[:1]:
        for i, stage in enumerate(flow.stages[:unscale]):
            # A compressor whose error nobody keeps, and that gives the same times the scale.
            scale_free = stage.homogeneous and not stage.feedback
            if stage.stateful or not (stage.linear or scale_free):
                yield (i, unscale)


def _filter_without_compressor(flow: Flow) -> Iterator[tuple[int, ...]]:
    for i in flow.where(Kind.FILTER):
        if not any(i < j < flow.end_of_segment(i) for j in flow.where(Kind.COMPRESSOR)):
            yield (i,)


def _filter_behind_compressor(flow: Flow) -> Iterator[tuple[int, ...]]:
    for i in flow.where(Kind.FILTER):
        for j in flow.where(Kind.COMPRESSOR):
            if j < i:
                yield (i, j)
                break


def _form_not_taken(flow: Flow) -> Iterator[tuple[int, ...]]:
    for i in flow.where(Kind.COMPRESSOR):
        form = flow.streams[i].form
        if form not in flow.stages[i].takes:
            yield (i, max(j for j in flow.where(Kind.COMPRESSOR) if j < i))


def _biased_without_feedback(flow: Flow) -> Iterator[tuple[int, ...]]:
    covered = {i for f in flow.where(Kind.FEEDBACK) for i in flow.covered(f)}
    for i in flow.where(Kind.COMPRESSOR):
        stage = flow.stages[i]
        if stage.biased and stage.feedback and i not in covered:
            yield (i,)


def _feedback_over_nothing(flow: Flow) -> Iterator[tuple[int, ...]]:
    for i in flow.where(Kind.FEEDBACK):
        covered = flow.covered(i)
        without = [j for j in covered if not flow.stages[j].feedback]
        if not covered or without:
            yield (i, *without)


def _second_feedback(flow: Flow) -> Iterator[tuple[int, ...]]:
    feedbacks = flow.where(Kind.FEEDBACK)
    for first, second in itertools.pairwise(feedbacks):
        if flow.end_of_segment(first) == flow.end_of_segment(second):
            yield (second, first)


def _feedback_over_no_contraction(flow: Flow) -> Iterator[tuple[int, ...]]:
    for i in flow.where(Kind.FEEDBACK):
        for j in flow.covered(i):
            if not flow.stages[j].contraction:
                yield (i, j)


def _left_out_for_good(flow: Flow) -> Iterator[tuple[int, ...]]:
    covered = {j for f in flow.where(Kind.FEEDBACK) for j in flow.covered(f)}
    for i in flow.where(Kind.EXCHANGE):
        compressors = [j for j in flow.where(Kind.COMPRESSOR) if flow.end_of_segment(j) == i]
        without = [j for j in compressors if j not in covered]
        if flow.stages[i].leaves_out and (without or not compressors):
            yield (i, *without)


def _compressed_inside(flow: Flow) -> Iterator[tuple[int, ...]]:
    exchanges = flow.where(Kind.EXCHANGE)
    for i in flow.where(Kind.COMPRESSOR):
        following = [j for j in exchanges if j > i]
        first = flow.end_of_segment(i)
        apart = [j for j in following if not flow.stages[j].same_ranks(flow.stages[first])]
        if apart:
            yield (i, first, apart[-1])


def _compressor_behind_exchange(flow: Flow) -> Iterator[tuple[int, ...]]:
    for i in flow.where(Kind.COMPRESSOR):
        if flow.streams[i].reduced:
            yield (i, max(j for j in flow.where(Kind.EXCHANGE) if j < i))


def _payload_at_dense_stage(flow: Flow) -> Iterator[tuple[int, ...]]:
    for i in flow.where(Kind.UNSCALE, Kind.TRANSFORM, Kind.ACCUMULATE):
        form = flow.streams[i].form
        if form not in flow.stages[i].takes:
            yield (i, max(j for j in flow.where(Kind.COMPRESSOR) if j < i))


def _accumulate_too_late(flow: Flow) -> Iterator[tuple[int, ...]]:
    for i in flow.where(Kind.ACCUMULATE):
        for j, stage in enumerate(flow.stages[:i]):
            if stage.kind is Kind.UNSCALE:
                continue
            if stage.kind is Kind.EXCHANGE or stage.stateful or not stage.linear:
                yield (i, j)
                break


def _delayed_nothing(flow: Flow) -> Iterator[tuple[int, ...]]:
    for i in flow.where(Kind.DELAY):
        if i + 1 not in flow.where(Kind.EXCHANGE)[-1:]:
            yield (i,)


def _second_exchange(flow: Flow) -> Iterator[tuple[int, ...]]:
    exchanges = flow.where(Kind.EXCHANGE)
    for n, i in enumerate(exchanges):
        same = [j for j in exchanges[:n] if flow.stages[i].same_ranks(flow.stages[j])]
        if same:
            yield (i, same[0])


def _needs_reduced_before_exchange(flow: Flow) -> Iterator[tuple[int, ...]]:
    for i, stage in enumerate(flow.stages):
        exchange = flow.end_of_segment(i)
        if stage.needs_reduced and not flow.streams[i].reduced and exchange < len(flow.stages):
            yield (i, exchange)


RULES: tuple[Rule, ...] = (
    Rule(
        "GX101",
        "one unscale",
        _second_unscale,
        "{0} is the second unscale: the gradients would be divided by the loss scale twice",
        "leave it out",
    ),
    Rule(
        "GX102",
        "unscale first",
        _not_linear_before_unscale,
        "{0} stands before {1} and is stateful or not linear: it sees gradients that are still "
        "multiplied by the loss scale, so what it remembers or compares changes its unit with the "
        "scale, and an overflow can hide",
        "put {1} before {0}",
    ),
    Rule(
        "GX202",
        "filter before compressor",
        _filter_behind_compressor,
        "{0} stands to the right of {1}: its leaves have been compressed already",
        "put {0} before {1}",
    ),
    Rule(
        "GX305",
        "compress before the exchange",
        _compressor_behind_exchange,
        "{0} compresses after {1} has sent: it loses information and saves no traffic",
        "put {0} (and its ef()) before {1}",
    ),
    Rule(
        "GX301",
        "something left to compress",
        _form_not_taken,
        "{0} cannot take what {1} gives: there are no values left to choose from or to round",
        "put {0} before {1}, or leave it out",
    ),
    Rule(
        "GX302",
        "feedback over a biased compressor",
        _biased_without_feedback,
        "{0} is biased and has no error feedback over it: what it leaves out is lost for ever",
        "put ef() directly behind the run of compressors, or, to go without on purpose, "
        "give {0} the argument feedback=False",
    ),
    Rule(
        "GX303",
        "feedback directly behind its compressors",
        _feedback_over_nothing,
        "{0} has no lossy compressor directly to its left, or one that says feedback=False: "
        "there is no error for it to feed back",
        "put it directly behind the compressor it is for, or leave it out",
    ),
    Rule(
        "GX304",
        "one feedback",
        _second_feedback,
        "{0} is a second error feedback before one exchange: the error would be counted twice, "
        "or kept for slots whose positions change",
        "keep one, behind the last compressor: it takes hold of the whole run",
    ),
    Rule(
        "GX306",
        "feedback over a contraction",
        _feedback_over_no_contraction,
        "{0} stands over {1}, which is no contraction or not linear over the ranks: what it "
        "leaves out may be more than it is given, and the residual grow without bound",
        "leave {0} out, or choose arguments of {1} with which it is biased and a contraction",
    ),
    Rule(
        "GX307",
        "feedback under an exchange that leaves something out",
        _left_out_for_good,
        "{0} leaves the small ones among the sums of compressed values out, and there is no error "
        "feedback over these that would send them again",
        "put a compressor of values at positions and ef() before {0}, as in chain(topk(0.01), "
        "ef(), ...), or leave the density out",
    ),
    Rule(
        "GX401",
        "dense stages before the compressors",
        _payload_at_dense_stage,
        "{0} takes dense gradients only and {1} hands on a payload",
        "put {0} before {1}",
    ),
    Rule(
        "GX402",
        "one exchange",
        _second_exchange,
        "{0} exchanges a second time over the same ranks: the traffic is paid twice",
        "leave it out",
    ),
    Rule(
        "GX406",
        "dense inside, compressed between",
        _compressed_inside,
        "{0} compresses before {1}, and what comes of that goes on through {2}, densely: nothing "
        "is saved where it is dear",
        "put {0} (and its ef()) behind {1}",
    ),
    Rule(
        "GX403",
        "reduced gradients behind the exchange",
        _needs_reduced_before_exchange,
        "{0} needs the gradient of all ranks and stands before {1}: every rank would act on its "
        "own, and the replicas part",
        "put {0} behind {1}; if it does act on local gradients, say so: "
        "declare(..., needs_reduced=False)",
    ),
    Rule(
        "GX501",
        "accumulate first",
        _accumulate_too_late,
        "{0} stands to the right of {1}, which then acts on every micro-step and not once a "
        "window: the result is not that of one large batch, or everything is sent every time",
        "put {0} before {1}",
    ),
    Rule(
        "GX502",
        "a delay directly before the exchange",
        _delayed_nothing,
        "{0} has no exchange directly to its right, or one that another follows: it acts on the "
        "last one, and there is nothing else for it to delay",
        "put it directly before allreduce()",
    ),
    Rule(
        "GX201",
        "a filter protects from something",
        _filter_without_compressor,
        "{0} has no compressor to its right before the exchange (or the end): it does nothing",
        "put it before a compressor, or leave it out",
    ),
)


def _payload_at_end(flow: Flow) -> Iterator[tuple[int, ...]]:
    if flow.streams[-1].form != "dense":
        yield (max(flow.where(Kind.COMPRESSOR)),)


def _no_exchange(flow: Flow) -> Iterator[tuple[int, ...]]:
    if not flow.where(Kind.EXCHANGE):
        yield ()


PAYLOAD_AT_END = Rule(
    "GX404",
    "a Pipeline writes dense gradients (raised by Pipeline)",
    _payload_at_end,
    "what {0} gives comes out at the end, and nothing decodes it",
    "put allreduce() behind the compressors",
)
NO_EXCHANGE = Rule(
    "GX405",
    "several ranks exchange (raised by Pipeline)",
    _no_exchange,
    "there are several ranks and no exchange: every rank would step on its own gradients, and the "
    "replicas part",
    "put allreduce() into the chain",
)


def check(stages: Sequence[Stage], rules: Sequence[Rule] = RULES) -> list[Violation]:
    """All rules that a flat chain breaks, the most telling first; none for a chain that passes."""
    flow = Flow(tuple(stages))
    found = []
    for rule in rules:
        for positions in rule.find(flow):
            names = [flow.stages[i].code().removeprefix("gx.") for i in positions]
            names += [""] * (3 - len(names))
            found.append(
                Violation(
                    rule.code,
                    tuple(sorted(positions)),
                    rule.reason.format(*names),
                    rule.fix.format(*names),
                )
            )
    return found
