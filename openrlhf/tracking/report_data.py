"""What a report shows: the metrics of a run sorted into panels, and rollouts of its first and last step."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from openrlhf.config.flags_yaml import CONFIG_FILE
from openrlhf.tracking.jsonl import read_jsonl
from openrlhf.tracking.metrics import METRICS_FILE
from openrlhf.tracking.progress import PHASES
from openrlhf.tracking.rollouts import ROLLOUTS_FILE

MAX_POINTS = 600
COLOURS = 8
SMOOTH_FROM = 30


@dataclass(frozen=True)
class Series:
    """One line of a panel.

    Attributes:
        label: in the legend.
        x: steps at which the metric was logged.
        y: its values; NaN leaves a gap.
        faint: drawn in the background, beside its own smoothed form.
        low, high: a band around the line, or empty.
    """

    label: str
    x: list[float]
    y: list[float]
    faint: bool = False
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Panel:
    """One chart.

    Attributes:
        title: what it shows.
        unit: of the vertical axis.
        series: at least one.
        kind: lines, or areas stacked on each other.
        log: logarithmic vertical axis.
    """

    title: str
    unit: str
    series: list[Series]
    kind: Literal["lines", "stack"] = "lines"
    log: bool = False


def colours_of(panel: Panel) -> list[int]:
    """Returns: a colour number for each series; a faint one shares the number of the smoothed one after it."""
    numbers, current = [], -1
    for i in range(len(panel.series)):
        if i == 0 or not panel.series[i - 1].faint:
            current += 1
        numbers.append(current % COLOURS)
    return numbers


@dataclass(frozen=True)
class Layout:
    """A panel as it is asked for: label and metric of each series, and the metric of a band's half width."""

    title: str
    unit: str
    series: tuple[tuple[str, str], ...]
    band: str | None = None
    log: bool = False
    smooth: bool = False


LAYOUTS = (
    Layout("Reward", "mean ± standard deviation", (("reward", "reward/mean"),), band="reward/std", smooth=True),
    Layout("Loss", "per token or pair", (("training", "loss/train"), ("evaluation", "loss/eval")), smooth=True),
    Layout(
        "Pairs ranked right", "share", (("training", "accuracy/train"), ("evaluation", "accuracy/eval")), smooth=True
    ),
    Layout(
        "Scores",
        "reward",
        (("chosen", "reward_chosen/train"), ("rejected", "reward_rejected/train")),
        smooth=True,
    ),
    Layout("Response length", "tokens", (("response length", "rollout/response_length"),), smooth=True),
    Layout("KL to the reference", "nats per token", (("KL", "kl/reference"),)),
    Layout("Policy loss", "per token", (("policy loss", "policy/loss"),), smooth=True),
    Layout("Critic loss", "per token", (("critic loss", "critic/loss"),), smooth=True),
    Layout("Values and returns", "reward", (("value", "critic/value_mean"), ("return", "critic/return_mean"))),
    Layout("Variance that values explain", "share", (("explained variance", "critic/explained_variance"),)),
    Layout(
        "Gradient norm",
        "before clipping",
        (("gradient norm", "actor/grad_norm"), ("of the critic", "critic/grad_norm")),
        smooth=True,
    ),
    Layout(
        "Log-prob gap, engine to trainer",
        "nats, log scale",
        (("mean", "sync/logprob_gap"), ("largest", "sync/logprob_gap_max")),
        log=True,
    ),
    Layout("Largest ratio, trainer to engine", "of probabilities", (("largest ratio", "correction/ratio_max"),)),
    Layout("Weight of the rollout correction", "mean over tokens", (("weight", "correction/weight"),)),
    Layout("Tokens that the correction changes", "share", (("changed", "correction/touched"),)),
    Layout("Policy change in an update", "nats per token", (("old − new log-prob", "policy/ppo_kl"),)),
    Layout(
        "Clipped tokens",
        "share",
        (("clip fraction", "policy/clip_fraction"), ("of the critic", "critic/clip_fraction")),
    ),
    Layout("Entropy", "nats per token", (("entropy", "policy/entropy"),)),
    Layout("Truncated responses", "share", (("truncated", "rollout/truncated"),)),
    Layout("Groups that the filter lets pass", "share", (("pass rate", "filter/pass_rate"),)),
    Layout("Throughput", "tokens per second", (("tokens/s", "throughput/tokens_per_s"),), smooth=True),
    Layout(
        "Model FLOPs utilisation",
        "share of the peak",
        (("utilisation", "throughput/mfu"), ("of the critic", "throughput/critic_mfu")),
    ),
    Layout(
        "Peak memory",
        "GiB",
        (
            ("training", "memory/peak_gib"),
            ("actor", "memory/actor_gib"),
            ("reference", "memory/ref_gib"),
            ("critic", "memory/critic_gib"),
            ("reward model", "memory/reward_gib"),
        ),
    ),
    Layout("Learning rate", "", (("learning rate", "actor/lr"), ("of the critic", "critic/lr"))),
)

# How the names of the metrics begin that users' files give.
EXTRA = "extra/"

# What evaluation measures: title, unit, and how the names of its metrics end. A metric belongs to the first that fits.
EVALUATIONS = (
    ("Evaluation", "pass rate", re.compile(r"pass\d+$")),
    ("Evaluation: rewards", "reward", re.compile(r"_(reward|score)$")),
    ("Evaluation: response length", "tokens", re.compile(r"_length$")),
    ("Evaluation: truncated responses", "share", re.compile(r"_truncated$")),
    ("Evaluation: responses without a reward", "responses", re.compile(r"_failed$")),
    ("Evaluation: further numbers", "", re.compile(r"")),
)


@dataclass(frozen=True)
class Run:
    """The files of a run, read.

    Attributes:
        steps: logged steps, ascending.
        rows: metrics of each step; None where a value was not a finite number.
        rollouts: lines of rollouts.jsonl.
        config: the resolved settings as text; empty where there is no file.
    """

    steps: list[int]
    rows: list[dict[str, float | None]]
    rollouts: list[dict[str, Any]]
    config: str

    @property
    def names(self) -> list[str]:
        """Metrics that occur, sorted."""
        return sorted({name for row in self.rows for name in row} - {"time", "step"})

    def values(self, name: str) -> tuple[list[float], list[float]]:
        """Returns: the steps at which ``name`` was logged, and its values, NaN where it was not a number."""
        pairs = [(s, row[name]) for s, row in zip(self.steps, self.rows, strict=True) if name in row]
        return [float(s) for s, _ in pairs], [math.nan if v is None else float(v) for _, v in pairs]

    def finite(self, name: str) -> list[tuple[float, float]]:
        """Returns: (step, value) where ``name`` is a finite number."""
        return [(s, v) for s, v in zip(*self.values(name), strict=True) if math.isfinite(v)]

    def seconds(self) -> float:
        """Wall time from the first to the last line; NaN for fewer than two."""
        times = [row["time"] for row in self.rows if row.get("time") is not None]
        return times[-1] - times[0] if len(times) > 1 else math.nan


def load_run(output_dir: Path | str) -> Run:
    """Reads the metrics, rollouts and settings of a run; absent files are empty."""
    folder = Path(output_dir)
    merged: dict[int, dict[str, float | None]] = {}
    for line in read_jsonl(folder / METRICS_FILE):
        merged.setdefault(int(line["step"]), {}).update({k: v for k, v in line.items() if k != "step"})
    config = folder / CONFIG_FILE
    steps = sorted(merged)
    return Run(
        steps=steps,
        rows=[merged[step] for step in steps],
        rollouts=read_jsonl(folder / ROLLOUTS_FILE),
        config=config.read_text(encoding="utf-8") if config.exists() else "",
    )


def panels(run: Run) -> list[Panel]:
    """The charts of a run, in order, without those that would be empty."""
    found = []
    for layout in LAYOUTS:
        series = [s for label, name in layout.series for s in _series(run, label, name, layout)]
        # A gap of exactly 0 has no place on a logarithmic axis; the table shows it.
        if series and not (layout.log and all(not value > 0 for s in series for value in s.y)):
            found.append(Panel(layout.title, layout.unit, series, log=layout.log))
    found[1:1] = _evaluation_panels(run)
    found += _extra_panels(run)
    times = _time_panel(run)
    if times is not None:
        found.append(times)
    return found


def _extra_panels(run: Run) -> list[Panel]:
    """One panel for each number that a user's reward function or agent has logged."""
    found = []
    for name in run.names:
        if name.startswith(EXTRA):
            label = name.removeprefix(EXTRA)
            layout = Layout(f"Extra: {label}", "mean over samples", ((label, name),), smooth=True)
            series = _series(run, label, name, layout)
            if series:
                found.append(Panel(layout.title, layout.unit, series))
    return found


def _evaluation_panels(run: Run) -> list[Panel]:
    """One panel for each kind of number, one line for each source of prompts (and each k of pass@k)."""
    by_kind: dict[tuple[str, str], list[Series]] = {kind[:2]: [] for kind in EVALUATIONS}
    for name in run.names:
        numbers = run.finite(name)
        # Where no answer ever failed there is nothing to see.
        if not name.startswith("eval/") or not (any(v for _, v in numbers) if name.endswith("_failed") else numbers):
            continue
        kind = next((title, unit) for title, unit, ending in EVALUATIONS if ending.search(name))
        x, y = run.values(name)
        by_kind[kind].append(Series(name.removeprefix("eval/"), thin(x), thin(y)))
    return [
        # A line alone has no legend.
        Panel(title, unit if len(series) > 1 else ", ".join(filter(None, (series[0].label, unit))), series)
        for (title, unit), series in by_kind.items()
        if series
    ]


def _series(run: Run, label: str, name: str, layout: Layout) -> list[Series]:
    if not run.finite(name):
        return []
    x, y = run.values(name)
    low: list[float] = []
    high: list[float] = []
    if layout.band is not None and run.finite(layout.band):
        spread = dict(run.finite(layout.band))
        low = [v - spread.get(s, math.nan) for s, v in zip(x, y, strict=True)]
        high = [v + spread.get(s, math.nan) for s, v in zip(x, y, strict=True)]
    smooth = layout.smooth and len(x) >= SMOOTH_FROM
    raw = Series(label, thin(x), thin(y), faint=smooth, low=thin(low), high=thin(high))
    if not smooth:
        return [raw]
    window = max(3, len(x) // 20)
    return [raw, Series(f"{label}, mean of {window} steps", thin(x), thin(rolling_mean(y, window)))]


def _time_panel(run: Run) -> Panel | None:
    """Seconds by phase; what the phases leave of the step is "other"."""
    phases = [name for name in PHASES if run.finite(f"time/{name}")]
    if not run.finite("time/step"):
        return None
    x, total = run.values("time/step")
    if not phases:
        return Panel("Time of a step", "seconds", [Series("step", thin(x), thin(total))])
    parts = {}
    for name in phases:
        known = dict(run.finite(f"time/{name}"))
        parts[name] = [known.get(step, 0.0) for step in x]
    rest = [max(0.0, t - sum(part[i] for part in parts.values())) for i, t in enumerate(total)]
    series = [Series(name, thin(x), thin(y)) for name, y in [*parts.items(), ("other", rest)]]
    return Panel("Time of a step by phase", "seconds", series, kind="stack")


def thin(values: Sequence[float], limit: int = MAX_POINTS) -> list[float]:
    """At most ``limit`` values: means of neighbours, NaN where all of them are; the same places for every list."""
    count = len(values)
    if count <= limit:
        return list(values)
    edges = [round(i * count / limit) for i in range(limit + 1)]
    return [_mean(values[a:b]) for a, b in zip(edges, edges[1:], strict=False)]


def rolling_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and the ``window - 1`` before it, over those that are numbers."""
    return [_mean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def first_and_last_rollouts(run: Run, limit: int = 6) -> list[tuple[int, list[dict[str, Any]]]]:
    """Rollouts to show: (step, rollouts) of the first and of the last step that has any, other prompts first."""
    steps = sorted({int(row["step"]) for row in run.rollouts})
    shown = []
    for step in dict.fromkeys(steps[:1] + steps[-1:]):
        rows = [row for row in run.rollouts if row["step"] == step]
        # One sample of each prompt before a second of any.
        rows.sort(key=lambda row: row.get("sample_id", 0))
        shown.append((step, rows[:limit]))
    return shown


def compact(value: float | None, digits: int = 4) -> str:
    """A number for people: ``digits`` digits, powers of ten only where they are needed."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e6:
        return f"{value:.{digits - 2}e}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"
