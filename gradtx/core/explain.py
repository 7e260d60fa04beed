"""`explain`: a chain, or the rules, in words."""

from __future__ import annotations

import re
from typing import Any

from gradtx.core.chain import Chain, chain
from gradtx.core.rules import NO_EXCHANGE, PAYLOAD_AT_END, RULES, check
from gradtx.core.stream import streams


def explain(tx: Any) -> str:
    """Describes a chain: its stages, the stream between them, and its core form.

    Args:
        tx: a transformation; built with ``check=False``, its violations are shown too.

    Returns:
        The description, over several lines.

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
    if violations:
        lines.append("refused by chain(), because")
        lines += [f"  {v.code} at {', '.join(map(str, v.stages))}: {v.reason}" for v in violations]
    return "\n".join(lines)


def rules_table() -> str:
    """The order rules as a Markdown table; `docs/rules.md` holds it."""
    lines = ["| code | rule | what goes wrong | what to write |", "|---|---|---|---|"]
    for rule in sorted((*RULES, PAYLOAD_AT_END, NO_EXCHANGE), key=lambda rule: rule.code):
        reason, fix = (text.format("A", "B") for text in (rule.reason, rule.fix))
        lines.append(f"| {rule.code} | {rule.title} | {reason} | {fix} |")
    return "\n".join(lines)


def _short(code: str) -> str:
    return re.sub(r"(?<![\w'\".])gx\.", "", code)
