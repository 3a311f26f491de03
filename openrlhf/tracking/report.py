"""The report of a run: ``report.html``, one page that loads nothing, and ``report.png``."""

from __future__ import annotations

import json
import math
import time
from html import escape
from pathlib import Path
from typing import Any

from openrlhf.tracking.metrics import METRICS_FILE
from openrlhf.tracking.progress import duration
from openrlhf.tracking.report_data import Run, compact, first_and_last_rollouts, load_run, panels
from openrlhf.tracking.report_page import SCRIPT, STYLE
from openrlhf.tracking.report_png import write_png
from openrlhf.tracking.report_svg import panel_svg

HTML_FILE, PNG_FILE = "report.html", "report.png"

# What stands on top of the page: metric and label.
TILES = (
    ("reward/mean", "Reward"),
    ("loss/train", "Training loss"),
    ("loss/eval", "Evaluation loss"),
    ("accuracy/train", "Pairs ranked right"),
    ("accuracy/eval", "Held-out pairs ranked right"),
    ("rollout/response_length", "Response length"),
    ("kl/reference", "KL to the reference"),
    ("sync/logprob_gap", "Log-prob gap"),
    ("throughput/tokens_per_s", "Tokens per second"),
    ("time/step", "Seconds per step"),
)


def write_report(output_dir: Path | str, title: str) -> Path:
    """Writes the report of a run beside its metrics.

    Metrics and rollouts that are absent leave their part of the page out; values that were no numbers leave a gap.

    Args:
        output_dir: folder with metrics.jsonl, and rollouts.jsonl and config.yaml where there are any.
        title: of the page and of the picture.

    Returns: the path of report.html; report.png stands beside it.
    """
    folder = Path(output_dir)
    run = load_run(folder)
    page = folder / HTML_FILE
    page.write_text(report_html(run, title), encoding="utf-8")
    write_png(panels(run), title, folder / PNG_FILE)
    return page


def report_what_there_is(output_dir: Path | str, title: str) -> Path | None:
    """Writes the report of a run that was broken off. Returns: its path; None where no step was logged."""
    # A device such as /dev/full, which stands for a full disk, can be read without end.
    if not (Path(output_dir) / METRICS_FILE).is_file():
        return None
    return write_report(output_dir, title) if load_run(Path(output_dir)).rows else None


def report_html(run: Run, title: str) -> str:
    """Returns: the page. Whatever comes from the run stands in it as text, never as markup."""
    charts = "".join(panel_svg(panel) for panel in panels(run)) or '<p class="none">No metrics were logged.</p>'
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>"
        f'<h1>{escape(title)}</h1><p class="meta">{escape(_meta(run))}</p>'
        f'{_tiles(run)}<section class="panels">{charts}</section>'
        f"{_table(run)}{_rollouts(run)}{_config(run)}"
        f'</main><div id="tip"></div><script>{SCRIPT}</script></body></html>\n'
    )


def _meta(run: Run) -> str:
    parts = [f"{len(run.steps)} logged step{'s' if len(run.steps) != 1 else ''}"]
    if run.steps:
        parts.append(f"last step {run.steps[-1]}")
    if math.isfinite(run.seconds()):
        parts.append(f"{duration(run.seconds())} from first to last")
    parts.append(f"written {time.strftime('%Y-%m-%d %H:%M')}")
    return " · ".join(parts)


def _tiles(run: Run) -> str:
    tiles = []
    for name, label in TILES:
        values = run.finite(name)
        if values:
            was = f"from {compact(values[0][1], 3)}" if len(values) > 1 else ""
            tiles.append(
                f'<div class="tile"><span>{label}</span><b>{compact(values[-1][1], 3)}</b><span>{was}</span></div>'
            )
    return f'<section class="tiles">{"".join(tiles)}</section>' if tiles else ""


def _table(run: Run) -> str:
    rows = []
    for name in run.names:
        _, values = run.values(name)
        finite = [v for v in values if math.isfinite(v)]
        numbers = [values[0], values[-1], *((min(finite), max(finite)) if finite else (None, None))]
        cells = "".join(f"<td>{compact(v)}</td>" for v in numbers)
        rows.append(f"<tr><td>{escape(name)}</td>{cells}</tr>")
    if not rows:
        return ""
    head = "<tr><th>Metric</th><th>First</th><th>Last</th><th>Lowest</th><th>Highest</th></tr>"
    return f'<h2>All numbers</h2><div class="sheet"><table>{head}{"".join(rows)}</table></div>'


def _rollouts(run: Run) -> str:
    shown = first_and_last_rollouts(run)
    if not shown:
        return ""
    known = [row["reward"] for row in run.rollouts if row.get("reward") is not None]
    middle = (min(known) + max(known)) / 2 if known and min(known) < max(known) else None
    steps = []
    for step, rows in shown:
        cards = "".join(_rollout(row, middle) for row in rows)
        steps.append(f"<div><h3>Step {step}</h3>{cards}</div>")
    return f'<h2>Rollouts</h2><section class="steps">{"".join(steps)}</section>'


def _rollout(row: dict[str, Any], middle: float | None) -> str:
    reward = row.get("reward")
    if reward is None:
        chips = [_chip(f"no reward: {row.get('failure') or 'unknown'}", "bad")]
    else:
        tone = "" if middle is None else "good" if reward > middle else "bad"
        chips = [_chip(f"reward {compact(reward)}", tone)]
    chips.append(_chip(f"{row.get('tokens', 0)} tokens"))
    if row.get("truncated"):
        chips.append(_chip("truncated", "bad"))
    chips.append(_chip(f"ended by {row.get('stop_reason', 'unknown')}"))
    chips.append(_chip(f"weights {row.get('weight_version', 0)}"))
    if row.get("label") is not None:
        label = row["label"]
        chips.append(_chip(f"label {label if isinstance(label, str) else json.dumps(label, ensure_ascii=False)}"))
    prompt, response = escape(str(row.get("prompt", ""))), escape(str(row.get("response", "")))
    return (
        f'<article class="rollout"><div class="chips">{"".join(chips)}</div><div class="who">prompt</div>'
        f'<pre>{prompt}</pre><div class="who">response</div><pre>{response}</pre></article>'
    )


def _chip(text: str, tone: str = "") -> str:
    shown = text if len(text) <= 120 else text[:119] + "…"
    return f'<span class="chip {tone}">{escape(shown)}</span>'


def _config(run: Run) -> str:
    if not run.config:
        return ""
    return f"<details><summary>Settings (config.yaml)</summary><pre>{escape(run.config)}</pre></details>"
