"""A panel as SVG that stands inside a HTML page and takes its colours from the page's style sheet."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from openrlhf.tracking.report_data import Panel, Series, colours_of, compact

WIDTH, HEIGHT = 560, 240
LEFT, RIGHT, TOP, BOTTOM = 66, 16, 12, 46

# Numbers that differ by less, as a share of their size, differ by rounding alone.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Scale:
    """Maps data to pixels; ``log`` works on the decimal logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Returns: the pixel of ``value``."""
        if self.log:
            value = math.log10(value)
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values inside the range."""
        if self.log:
            low, high = math.ceil(self.low - 1e-9), math.floor(self.high + 1e-9)
            stride = max(1, math.ceil((high - low + 1) / 5))
            return [10.0**power for power in range(low, high + 1, stride)]
        return nice_ticks(self.low, self.high)


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` multiples of 1, 2 or 5 times a power of ten between ``low`` and ``high``."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((power * m for m in (1, 2, 5, 10)), key=lambda candidate: abs(math.log(candidate / rough)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) if step > 1e-9 else i * step for i in range(first, last + 1)]


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Texts with as many digits as are needed to tell the ticks apart."""
    for digits in range(6, 16):
        labels = [f"{value:,.{digits}g}" for value in ticks]
        if len(set(labels)) == len(labels):
            break
    return labels


def value_range(panel: Panel) -> tuple[float, float]:
    """Lowest and highest value that the panel must hold, with some air; decimal logarithms for a log panel."""
    if panel.kind == "stack":
        tops = [sum(v for v in column if math.isfinite(v)) for column in zip(*(s.y for s in panel.series), strict=True)]
        return 0.0, (max(tops) or 1.0) * 1.05
    numbers = [v for s in panel.series for v in (*s.y, *s.low, *s.high) if math.isfinite(v)]
    if panel.log:
        logs = [math.log10(v) for v in numbers if v > 0] or [0.0]
        return math.floor(min(logs) - 1e-9), math.ceil(max(logs) + 1e-9) + (min(logs) == max(logs))
    low, high = min(numbers), max(numbers)
    size = max(abs(low), abs(high))
    air = (high - low) * 0.06 if high - low > _ROUNDING * size else size * 0.1 or 1.0
    # A quantity that is never negative should not seem to be.
    return (0.0 if low >= 0 and low < 0.35 * high else low - air), high + air


def panel_svg(panel: Panel) -> str:
    """Returns: a ``<figure>`` with title, legend, chart and the numbers that the page's script shows on hovering."""
    xs = [x for s in panel.series for x in s.x]
    low, high = value_range(panel)
    left, right = min(xs), max(xs)
    x = Scale(left - (left == right), right + (left == right), LEFT, WIDTH - RIGHT)
    y = Scale(low, high, HEIGHT - BOTTOM, TOP, panel.log)
    marks = _stack(panel, x, y) if panel.kind == "stack" else _lines(panel, x, y)
    label = escape(f"{panel.title} over steps {left:.0f} to {right:.0f}", quote=True)
    return (
        f'<figure class="panel"><figcaption><b>{escape(panel.title)}</b> <span>{escape(panel.unit)}</span></figcaption>'
        f"{_legend(panel)}"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}" data-chart="{_hover_data(panel, x, y)}">'
        f'{_axes(x, y, left, right)}{"".join(marks)}<g class="hover"></g></svg></figure>'
    )


def _axes(x: Scale, y: Scale, left: float, right: float) -> str:
    parts = []
    for value, text in zip(y.ticks(), tick_labels(y.ticks()), strict=True):
        at = y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{text}</text>')
    steps = [left] if left == right else [t for t in nice_ticks(left, right, 7) if t == int(t)] or [left, right]
    for value in steps:
        where = f'x="{x(value):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle"'
        parts.append(f'<text class="tick" {where}>{value:,.0f}</text>')
    parts.append(
        f'<text class="tick" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">step</text>'
    )
    base = HEIGHT - BOTTOM
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
    return "".join(parts)


def _lines(panel: Panel, x: Scale, y: Scale) -> list[str]:
    bands, lines = [], []
    for series, colour in zip(panel.series, colours_of(panel), strict=True):
        if series.low:
            bands.extend(
                f'<path class="band c{colour}" d="{_area(run, x, y)}"/>'
                for run in _runs(series.x, series.low, series.high, log=panel.log)
            )
        kind = "line faint" if series.faint else "line"
        for run in _runs(series.x, series.y, log=panel.log):
            if len(run) == 1:
                at, value = run[0]
                lines.append(f'<circle class="dot c{colour}" cx="{x(at):.1f}" cy="{y(value):.1f}" r="3.5"/>')
                if len(series.x) == 1:
                    # A dot alone has nothing to be compared with but its number.
                    where = f'x="{x(at) + 8:.1f}" y="{y(value) + 4:.1f}"'
                    lines.append(f'<text class="tick" {where}>{compact(value)}</text>')
                continue
            path = "M" + "L".join(f"{x(at):.1f},{y(value):.1f}" for at, value in run)
            lines.append(f'<path class="{kind} c{colour}" d="{path}"/>')
    return bands + lines


def _stack(panel: Panel, x: Scale, y: Scale) -> list[str]:
    steps = panel.series[0].x
    below = [0.0] * len(steps)
    marks = []
    for colour, series in zip(colours_of(panel), panel.series, strict=True):
        above = [b + (v if math.isfinite(v) else 0.0) for b, v in zip(below, series.y, strict=True)]
        rows = list(zip(steps, below, above, strict=True))
        if len(rows) == 1:
            at, low, high = rows[0]
            rows = [(at - 0.5, low, high), (at + 0.5, low, high)]
        marks.append(f'<path class="area c{colour}" d="{_area(rows, x, y)}"/>')
        below = above
    return marks


def _area(rows: Sequence[tuple[float, ...]], x: Scale, y: Scale) -> str:
    top = [f"{x(row[0]):.1f},{y(row[2]):.1f}" for row in rows]
    bottom = [f"{x(row[0]):.1f},{y(row[1]):.1f}" for row in reversed(rows)]
    return "M" + "L".join(top + bottom) + "Z"


def _runs(*columns: Sequence[float], log: bool = False) -> list[list[tuple[float, ...]]]:
    """Stretches without a gap: every number of a row finite, and above 0 where the axis is logarithmic."""
    runs: list[list[tuple[float, ...]]] = [[]]
    for row in zip(*columns, strict=True):
        if all(math.isfinite(v) for v in row) and (not log or min(row[1:]) > 0):
            runs[-1].append(row)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _legend(panel: Panel) -> str:
    if len(panel.series) < 2:
        return ""
    keys = [
        f'<li><i class="key c{colour}{" faint" if series.faint else ""}"></i>{escape(series.label)}</li>'
        for series, colour in zip(panel.series, colours_of(panel), strict=True)
    ]
    return f'<ul class="legend">{"".join(keys)}</ul>'


def _hover_data(panel: Panel, x: Scale, y: Scale) -> str:
    """Pixels and texts for the page's script, so that it needs no scales of its own."""

    def points(series: Series) -> list[list[object]]:
        rows = [
            (x(at), value, y(value) if value > 0 or not panel.log else None)
            for at, value in zip(series.x, series.y, strict=True)
            if math.isfinite(value)
        ]
        return [[round(px, 1), compact(v), None if py is None else round(py, 1)] for px, v, py in rows]

    colours = colours_of(panel)
    data = {
        "steps": [[round(x(at), 1), f"{at:,.0f}"] for at in sorted({x for s in panel.series for x in s.x})],
        "stack": panel.kind == "stack",
        "series": [{"label": s.label, "colour": colours[i], "points": points(s)} for i, s in enumerate(panel.series)],
    }
    return escape(json.dumps(data, separators=(",", ":"), ensure_ascii=False), quote=True)
