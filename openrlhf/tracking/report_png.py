"""The panels of a report as one picture."""

from __future__ import annotations

import math
from pathlib import Path

from openrlhf.tracking.report_data import Panel, colours_of

PALETTE = ("#2a78d6", "#e2662f", "#1a9e6d", "#8a63d2", "#c8920f", "#7a8393", "#c2477f", "#8a5a3b")
INK, QUIET, GRID = "#1d2530", "#6a7482", "#e6e9ee"
COLUMNS = 3


def write_png(panels: list[Panel], title: str, path: Path) -> None:
    """Draws the panels on a grid.

    Args:
        panels: in order; none gives a picture that says so.
        title: of the picture.
        path: the file.
    """
    import matplotlib

    # A dollar sign in a name starts no formula.
    with matplotlib.rc_context({"text.parse_math": False}):
        _write(panels, title, path)


def _write(panels: list[Panel], title: str, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # A figure of its own, and not pyplot, which would choose a backend for the whole process.
    rows = max(1, math.ceil(len(panels) / COLUMNS))
    figure = Figure(figsize=(5.2 * COLUMNS, 3.1 * rows + 0.7), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=15, fontweight="bold", color=INK)
    axes = figure.subplots(rows, COLUMNS, squeeze=False).flatten()
    for axis in axes:
        axis.set_visible(False)
    if not panels:
        figure.text(0.5, 0.5, "no metrics were logged", ha="center", color=QUIET)
    for axis, panel in zip(axes, panels, strict=False):
        axis.set_visible(True)
        _draw(axis, panel)
    figure.savefig(path)


def _draw(axis, panel: Panel) -> None:
    axis.set_title(panel.title, loc="left", fontsize=11, fontweight="bold", color=INK)
    axis.set_title(panel.unit, loc="right", fontsize=8.5, color=QUIET)
    axis.grid(axis="y", color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(colors=QUIET, labelsize=8.5, length=0)
    for side, spine in axis.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color("#b9c0ca")
    if panel.log:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.minorticks_off()
    if panel.kind == "stack":
        _draw_stack(axis, panel)
    else:
        _draw_lines(axis, panel)
    if len(panel.series) > 1:
        # Below the axis, where it covers no data.
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.19), "ncols": min(3, len(panel.series))}
        axis.legend(fontsize=8, frameon=False, labelcolor=INK, **place)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_xlabel("step", fontsize=8.5, color=QUIET)
    steps = sorted({x for series in panel.series for x in series.x})
    if len(steps) == 1:
        axis.set_xticks(steps)


def _draw_stack(axis, panel: Panel) -> None:
    steps = panel.series[0].x
    values = [[v if math.isfinite(v) else 0.0 for v in s.y] for s in panel.series]
    if len(steps) == 1:
        steps, values = [steps[0] - 0.5, steps[0] + 0.5], [v * 2 for v in values]
    colours = [PALETTE[colour] for colour in colours_of(panel)]
    axis.stackplot(steps, values, labels=[s.label for s in panel.series], colors=colours, alpha=0.85)
    axis.set_xlim(steps[0], steps[-1])


def _draw_lines(axis, panel: Panel) -> None:
    for series, colour in zip(panel.series, colours_of(panel), strict=True):
        shade = PALETTE[colour]
        if series.low:
            axis.fill_between(series.x, series.low, series.high, color=shade, alpha=0.13, linewidth=0)
        look = {"alpha": 0.35, "linewidth": 1.0} if series.faint else {"linewidth": 1.8}
        alone = sum(math.isfinite(v) for v in series.y) == 1 or len(series.x) <= 12
        marker = "o" if alone else None
        axis.plot(series.x, series.y, color=shade, label=series.label, marker=marker, markersize=3.5, **look)
