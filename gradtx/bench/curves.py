"""The plot of ``bench convergence``: loss against bytes sent, on logarithmic axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradtx.bench.summary import Summary, mean_curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours; black is for the dense runs.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
LINES = ("-", "--", ":", "-.")


def draw(summaries: Mapping[str, Sequence[Summary]], path: Path) -> None:
    """Draws each chain's held-out loss over what one rank had sent by then, mean over seeds.

    Args:
        summaries: for each task, the dense chain first.
        path: where to, as PNG, SVG or PDF by its suffix.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5 * len(summaries)), dpi=150, layout="constrained")
    panels = figure.subplots(len(summaries), squeeze=False)[:, 0]
    for axes, (task, rows) in zip(panels, summaries.items(), strict=True):
        _draw_task(axes, task, rows)
    figure.savefig(path)


def _draw_task(axes: Axes, task: str, rows: Sequence[Summary]) -> None:
    styles: Any = cycle(product(LINES, COLOURS))
    dense, *others = rows
    _draw_line(axes, dense, "-", "black")
    for row, (line, colour) in zip(others, styles, strict=False):
        _draw_line(axes, row, line, colour)
    job = dense.runs[0].job
    axes.set(xscale="log", yscale="log", title=f"{task}, {job.steps:,} steps, {job.ranks} ranks")
    axes.set_xlabel("bytes sent by one rank so far")
    axes.set_ylabel("held-out loss, nats")
    for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        which(lambda value, _: f"{value:g}")
    axes.grid(which="major", alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)


def _draw_line(axes: Axes, row: Summary, line: str, colour: str) -> None:
    x, y = mean_curve(row.runs, "wire_bytes"), mean_curve(row.runs, "loss")
    axes.plot(x, y, line, color=colour, label=row.stages, linewidth=1.5)
