"""The plot of ``python -m gradtx compressors``: error against bits, on logarithmic axes."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradtx.bench.compressors import Row

PICTURES = (".png", ".svg", ".pdf")
# Okabe and Ito's colours: told apart by most readers, and by their markers in grey.
KINDS = {
    "some of the values": ("o", "#0072B2", ("topk", "threshold", "random_k")),
    "a few levels": ("s", "#D55E00", ("sign", "ternary", "quantize")),
    "shorter floats": ("^", "#009E73", ("cast", "natural")),
    "low rank": ("D", "#CC79A7", ("powersgd",)),
}
Place = tuple[int, int, str, str]
# Where a label may stand: its distance from the marker in points, and which of its sides is near.
PLACES: list[Place] = [
    (
        x * distance,
        y * distance,
        ("right", "center", "left")[x + 1],
        ("top", "center", "bottom")[y + 1],
    )
    for distance in (6, 12, 20, 30, 42)
    for x, y in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))
]


def check_plot(path: Path) -> None:
    """Refuses, before anything is measured, what could not be drawn.

    Raises:
        ImportError: without matplotlib.
        ValueError: for a file of another kind.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"--plot {path}: there is no folder {path.parent}")
    if path.suffix not in PICTURES:
        raise ValueError(f"{path}: expected a file that ends in {', '.join(PICTURES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("matplotlib not found: pip install 'gradtx[plot]'")


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draws error against bits, and writes the picture.

    Args:
        rows: what to draw; one without any error has no place on a logarithmic axis.
        path: where to, as PNG, SVG or PDF by its suffix.
        title: what the gradient is.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    drawn = [row for row in rows if row.error > 0]
    for label, (marker, colour, names) in KINDS.items():
        points = [row for row in drawn if row.compressor.startswith(names)]
        x, y = [row.bits for row in points], [row.error for row in points]
        if points:
            axes.scatter(x, y, 45, colour, marker=marker, label=label, ec="white", zorder=3)
    _label_axes(axes, title)
    figure.canvas.draw()  # Labels are placed in pixels: first all else has to have its size.
    _label_points(axes, drawn)
    figure.savefig(path)


def _label_axes(axes: Any, title: str) -> None:
    axes.set(xscale="log", yscale="log", title=title)
    axes.set_xlabel("bits sent for a value, all overhead in (FP32: 32)")
    axes.set_ylabel("relative error  ‖C(x) − x‖ / ‖x‖")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.margins(x=0.12, y=0.1)
    axes.grid(which="major", alpha=0.3)
    axes.axhline(
        1, color="grey", linewidth=0.8, linestyle="--", label="as far off as sending zeros"
    )
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower left", framealpha=1)


def _label_points(axes: Any, rows: Sequence[Row]) -> None:
    """Names each point, at the first place where its name covers nothing, if there is one."""
    pixels = axes.transData.transform([(1, 1), *((row.bits, row.error) for row in rows)])
    taken = [_box(pixel[0] - 7, pixel[1] - 7, 14, 14) for pixel in pixels[1:]]
    taken.append(_box(axes.bbox.x0, pixels[0][1] - 1, axes.bbox.width, 2))  # the line at one
    taken.append(axes.get_legend().get_window_extent())
    for row in rows:
        taken.append(_label_point(axes, row, taken))


def _label_point(axes: Any, row: Row, taken: Sequence[Any]) -> Any:
    for place in PLACES:
        label = _name(axes, row, place)
        box = label.get_window_extent()
        inside = axes.bbox.x0 < box.x0 and box.x1 < axes.bbox.x1
        if inside and not box.count_overlaps(taken):
            _line_to(axes, row, place)
            return box
        label.remove()
    return _name(axes, row, PLACES[0]).get_window_extent()


def _name(axes: Any, row: Row, place: Place) -> Any:
    return axes.annotate(
        row.compressor.replace("'", ""),
        (row.bits, row.error),
        place[:2],
        textcoords="offset points",
        ha=place[2],
        va=place[3],
        fontsize=8,
    )


def _line_to(axes: Any, row: Row, place: Place) -> None:
    line = {"arrowstyle": "-", "color": "grey", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
    point = row.bits, row.error
    axes.annotate("", point, place[:2], textcoords="offset points", arrowprops=line)


def _box(x: float, y: float, width: float, height: float) -> Any:
    from matplotlib.transforms import Bbox

    return Bbox.from_bounds(x, y, width, height)
