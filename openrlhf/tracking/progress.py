"""What a run says while it runs: a bar for the phase at work, one line for each finished step."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from tqdm import tqdm

LOG_INTERVAL_S = 30.0

PHASES = {
    "wake": "wake",
    "rollout": "roll",
    "sleep": "slp",
    "reward": "rew",
    "logprobs": "logp",
    "advantages": "adv",
    "update": "upd",
    "sync": "sync",
    "evaluation": "eval",
}
"""Phases of an RL step in the order in which they come, with their short names; each has a metric ``time/<phase>``."""


@dataclass(frozen=True)
class Column:
    """One number of the summary line; left out where its metric is absent.

    Attributes:
        label: what stands before the number.
        metric: its name in the metrics of the step.
        format: a format specification that gives every value of a usual size the same width.
        unit: what stands behind the number.
    """

    label: str
    metric: str
    format: str
    unit: str = ""


COLUMNS = (
    Column("reward", "reward/mean", "6.3f"),
    Column("±", "reward/std", "5.3f"),
    Column("len", "rollout/response_length", "6.1f"),
    Column("kl", "kl/reference", "8.1e"),
    Column("loss", "policy/loss", "8.1e"),
    Column("loss", "loss/train", "7.4f"),
    Column("eval", "loss/eval", "7.4f"),
    Column("acc", "accuracy/train", "5.3f"),
    Column("eval acc", "accuracy/eval", "5.3f"),
    Column("grad", "actor/grad_norm", "7.1e"),
    Column("lr", "actor/lr", "7.1e"),
    Column("gap", "sync/logprob_gap", "7.1e"),
    Column("tok/s", "throughput/tokens_per_s", "6.0f"),
    Column("mfu", "throughput/mfu", "3.0%"),
    Column("mem", "memory/actor_gib", "3.0f", "GiB"),
    Column("mem", "memory/peak_gib", "3.0f", "GiB"),
)
NOT_IN_RL = {"actor/lr"}
# Advantages and the change of turns take next to no time, and an evaluation has a line of its own.
NOT_IN_LINE = {"advantages", "wake", "sleep", "evaluation"}


class Bar:
    """How far a phase is. On a terminal a bar that goes away with the phase; in a log a line every half minute."""

    def __init__(self, name: str, total: int, unit: str, stream: TextIO, live: bool) -> None:
        """Args: ``total`` in ``unit``; ``live``: draw a bar."""
        self._name, self._total, self._unit, self._stream = name, total, unit, stream
        self._done, self._start = 0, time.monotonic()
        self._said = self._start
        self._bar = None
        if live:
            self._bar = tqdm(total=total, desc=name, unit=unit, file=stream, leave=False, dynamic_ncols=True)

    def update(self, count: int = 1) -> None:
        """Takes that ``count`` more are done."""
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
            return
        now = time.monotonic()
        if now - self._said >= LOG_INTERVAL_S:
            self._said = now
            line = f"{self._name}: {self._done} of {self._total} {self._unit} after {duration(now - self._start)}"
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.close()


class Console:
    """Bars, summary lines and notes of one run, on one stream."""

    def __init__(self, total_steps: int, stream: TextIO | None = None, first_step: int = 0) -> None:
        """Args: ``total_steps`` of the run; ``stream``: stdout where None; ``first_step``: done before this start."""
        self._stream = sys.stdout if stream is None else stream
        self._total, self._first = total_steps, first_step
        self._start = time.monotonic()
        # When the first step of this start was done: it warms up, and takes several times as long as the others.
        self._warm: float | None = None
        self.live = self._stream.isatty()

    def begin(self, first_step: int) -> None:
        """Starts the clock by which the time that is left is guessed; ``first_step`` steps were done before."""
        self._first, self._start, self._warm = first_step, time.monotonic(), None

    @contextmanager
    def phase(self, name: str, total: int, unit: str = "samples") -> Iterator[Bar]:
        """Shows a bar while the body runs.

        Args:
            name: of the phase.
            total: how many ``unit`` there are to do.
        """
        bar = Bar(name, total, unit, self._stream, self.live)
        try:
            yield bar
        finally:
            bar.close()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the summary line of a step, aligned with those before it."""
        self.note(summary_line(step, self._total, metrics, self._seconds_left(step)))

    def estimate(self, step: int) -> None:
        """After the second step of this start, says how long the others take; else nothing. To be asked each step."""
        left = self._seconds_left(step)
        more = self._total - step
        if step == self._first + 2 and more > 0:
            steps = "one more step takes" if more == 1 else f"{more} more steps take"
            self.note(f"if they go as the second, {steps} about {duration(left)}")

    def _seconds_left(self, step: int) -> float:
        """NaN before the first step of this start."""
        done, now = step - self._first, time.monotonic()
        if done == 1 and self._warm is None:
            self._warm = now
        if done > 1 and self._warm is not None:
            return (self._total - step) * (now - self._warm) / (done - 1)
        return (self._total - step) * (now - self._start) / done if done > 0 else math.nan

    def note(self, text: str) -> None:
        """Prints a line without disturbing a bar."""
        if self.live:
            tqdm.write(text, file=self._stream)
        else:
            print(text, file=self._stream)
        self._stream.flush()

    @property
    def warn(self) -> Callable[[str], None]:
        """Returns: a function that prints a warning."""
        return lambda text: self.note(f"warning: {text}")


def summary_line(step: int, total: int, metrics: Mapping[str, float], seconds_left: float = math.nan) -> str:
    """One line for a step; the same metrics give the same columns, whatever their values.

    Args:
        step: counted from 1.
        total: steps of the run.
        metrics: of the step; phases come from ``time/<phase>``.
        seconds_left: until the end of the run; NaN leaves it out.
    """
    width = len(str(total))
    parts = [f"step {step:>{width}}/{total}"]
    for column in COLUMNS:
        if column.metric not in metrics or ("reward/mean" in metrics and column.metric in NOT_IN_RL):
            continue
        number = f"{metrics[column.metric]:{column.format}}{column.unit}"
        if column.label == "±":
            parts[-1] += f"±{number}"
        else:
            parts.append(f"{column.label} {number}")
    if "time/step" in metrics:
        shown = [name for name in PHASES if name not in NOT_IN_LINE and f"time/{name}" in metrics]
        phases = [f"{PHASES[name]} {metrics[f'time/{name}']:.1f}" for name in shown]
        parts.append(f"{metrics['time/step']:5.1f}s" + (f" ({' '.join(phases)})" if phases else ""))
    if math.isfinite(seconds_left) and step < total:
        parts.append(f"{duration(seconds_left)} left")
    if metrics.get("reward/failed", 0) > 0:
        parts.append(f"no reward: {metrics['reward/failed']:.0f}")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Returns: "42s", "3m05s" or "2h07m"."""
    whole = int(round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
