"""The plot of ``bench sync``: what each method spends its time on, beside the least it could."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradtx.bench.sync import Row

# Okabe and Ito's colours, by phase.
COLOURS = {
    "feedback": "#CC79A7",
    "select": "#D55E00",
    "encode": "#E69F00",
    "transport": "#0072B2",
    "decode": "#56B4E9",
    "apply": "#009E73",
    "hook": "#777777",
    "rest": "#CCCCCC",
}


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draws a bar of phases for each method, and writes the picture.

    Args:
        rows: what to draw.
        path: where to, as PNG, SVG or PDF by its suffix.
        title: what was measured, and where.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.5 + 0.45 * len(rows)), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    places = range(len(rows))
    starts = [0.0] * len(rows)
    for phase, colour in COLOURS.items():
        lengths = [1000 * row.phases[phase] for row in rows]
        if any(lengths):
            axes.barh(places, lengths, 0.7, starts, color=colour, label=phase)
            starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    floors = [1000 * row.floor for row in rows]
    axes.plot(floors, list(places), "k|", markersize=14, markeredgewidth=2, label="floor")
    axes.set_yticks(places, [row.name.replace("'", "") for row in rows])
    axes.invert_yaxis()
    axes.set(title=title, xlabel="milliseconds, the round of median length")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path)
