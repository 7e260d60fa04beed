"""What the algorithms cost beside each other, as text."""

from __future__ import annotations

from gradtx.exchange.choice import Alternative
from gradtx.exchange.cost import Link, Traffic, seconds_text
from gradtx.exchange.outgoing import Outgoing


def described(plan: Outgoing, algorithm: str, link: Link | None) -> list[str]:
    """The algorithms that a plan had to choose from, and what it took, as lines of a table.

    Args:
        plan: of a step.
        algorithm: what the exchange was given.
        link: what it chose by, if it did; times are for the default link else.
    """
    rows, limit = plan.compared()
    seen: list[Alternative] = []
    for row in rows:
        if all(row.choice != other.choice for other in seen):
            seen.append(row)
    lines = [f"  {'algorithm':12} {'bytes sent':>12} {'messages':>9} {'predicted':>10}"]
    for row in seen:
        notes = []
        if row.choice == plan.choice:
            notes.append(_reason(algorithm, link))
        if row.traffic.sent > limit:
            notes.append("more than dense FP32")
        lines.append(_line(row.name, row.traffic, link or Link(), notes))
    which = "the default" if link is None else "the given"
    lines.append(f"  predicted for {which} link, {(link or Link()).text()}")
    if link is not None:
        lines.append("  what sends more than dense FP32 is not taken, however fast it is")
    return lines


def _reason(algorithm: str, link: Link | None) -> str:
    if algorithm != "auto":
        return "taken: it was asked for"
    if link is None:
        return "taken: the fewest bytes, leaf by leaf"
    return "taken: the least time"


def _line(name: str, traffic: Traffic, link: Link, notes: list[str]) -> str:
    row = (
        f"  {name:12} {traffic.sent:12,.0f} {traffic.steps:9} "
        f"{seconds_text(traffic.seconds(link)):>10}"
    )
    return f"{row}  {'; '.join(notes)}".rstrip()
