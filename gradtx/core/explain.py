"""`explain`: a chain, or the rules, in words."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from gradtx.core.arguments import check_whole
from gradtx.core.chain import Chain, chain, rehearsed
from gradtx.core.rules import NO_EXCHANGE, PAYLOAD_AT_END, RULES, check
from gradtx.core.stream import streams
from gradtx.core.tree import PyTree, arrays_in, flatten


def explain(tx: Any, params: PyTree = None, *, ranks: int | None = None) -> str:
    """Describes a chain: its stages, the stream between them, its core form, and what it sends.

    Args:
        tx: a transformation; built with ``check=False``, its violations are shown too.
        params: a pytree of torch tensors, or an `nn.Module`: what is sent for them in a step is
            shown, at most, by each algorithm of the exchange, and which of these is taken.
        ranks: how many ranks are to exchange, of a chain with two exchanges in the last one, so how
            many nodes; by default those that do.

    Returns:
        The description, over several lines.

    Raises:
        TypeError: if `ranks` is no int.
        ValueError: if it is less than 1, or given without `params`; for `params` of a chain without
            an exchange, or that zeros do not get through.

    Example:
        >>> import gradtx as gx
        >>> print(gx.explain(gx.chain(gx.unscale(), gx.topk(0.01), gx.ef(), gx.allreduce())))
        stages
                              loss-scaled, local, dense, exact
          0  unscale()        true, local, dense, exact
          1  topk(0.01)       true, local, sparse, lossy
          2  ef()             true, local, sparse, compensated
          3  allreduce()      true, reduced, dense, compensated
        core form
          unscale()
          apply_if_finite(error_feedback(topk(0.01)), allreduce())

        >>> import torch
        >>> tx = gx.chain(gx.topk(0.01), gx.ef(), gx.allreduce(link=gx.Link()))
        >>> text = gx.explain(tx, {"w": torch.zeros(1000, 1000)}, ranks=8)
        >>> print(text[text.index("on 8 ranks") :])
        on 8 ranks, for each of them, at most
          algorithm      bytes sent  messages  predicted
          dense           7,000,035        14    56.7 ms
          gather            355,208         7    3.19 ms  taken: the least time
          sharded           373,576        16    3.79 ms
          root            2,629,872         3      24 ms
          predicted for the given link, 50 us and 1 Gbit/s
          what sends more than dense FP32 is not taken, however fast it is
    """
    built = tx if isinstance(tx, Chain) else chain(tx, check=False)
    flow = streams(built.stages)
    codes = [_short(stage.code()) for stage in built.stages]
    width = max([len(code) for code in codes] + [15])
    lines = ["stages", f"     {'':{width}}  {flow[0]}"]
    lines += [
        f"  {i}  {code:{width}}  {stream}"
        for i, (code, stream) in enumerate(zip(codes, flow[1:], strict=True))
    ]
    lines += ["core form", *(f"  {_short(part.code())}" for part in built.core)]
    violations = check(built.stages)
    if params is not None or ranks is not None:
        lines += _sent(built, params, ranks)
    if violations:
        lines.append("refused by chain(), because")
        lines += [f"  {v.code} at {', '.join(map(str, v.stages))}: {v.reason}" for v in violations]
    return "\n".join(lines)


def _sent(tx: Chain, params: PyTree, ranks: int | None) -> list[str]:
    if params is None:
        raise ValueError(f"explain(ranks={ranks!r}): expected params too, whose sizes matter")
    if ranks is not None:
        check_whole("explain(ranks", ranks, 1)
    if tx.exchange is None:
        raise ValueError(f"explain(params=...): there is no exchange in {tx.code()}")
    state = tx.init(params)
    size = tx.exchange.ranks(arrays_in(state))[1] if ranks is None else ranks
    context = replace(tx.context(state), rank=0, size=size)
    arrives = rehearsed(tx, state, context)
    if arrives is None:
        raise ValueError(f"explain(params=...): zeros do not get through {tx.code()}")
    found = tx.exchange.describe(flatten(arrives)[0], context)
    those = "node" if tx.inners else "rank"
    paths = ", ".join(repr(state.layout.leaves[i].path) for i in state.layout.tables)
    rows = [f"  and the rows of {paths}, as many as a step has"] if paths else []
    return [f"on {size} {those}{'s' * (size > 1)}, for each of them, at most", *found, *rows]


def rules_table() -> str:
    """The order rules as a Markdown table; `docs/rules.md` holds it."""
    lines = ["| code | rule | what goes wrong | what to write |", "|---|---|---|---|"]
    for rule in sorted((*RULES, PAYLOAD_AT_END, NO_EXCHANGE), key=lambda rule: rule.code):
        reason, fix = (text.format("A", "B", "C") for text in (rule.reason, rule.fix))
        lines.append(f"| {rule.code} | {rule.title} | {reason} | {fix} |")
    return "\n".join(lines)


def _short(code: str) -> str:
    return re.sub(r"(?<![\w'\".])gx\.", "", code)
