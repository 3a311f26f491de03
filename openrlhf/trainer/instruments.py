"""What the RL loop looks at beside the algorithm: memory and speed of the GPUs, traces of chosen steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from openrlhf.tracking.progress import Console
from openrlhf.trainer.device_meter import Usage, peak_memory, utilisation
from openrlhf.trainer.profiling import missed_note, written_note
from openrlhf.trainer.workers import WorkerGroup

# By role, its peak of memory and the utilisation of its optimizer steps.
_METRICS = {
    "actor": ("memory/actor_gib", "throughput/mfu"),
    "critic": ("memory/critic_gib", "throughput/critic_mfu"),
    "ref": ("memory/ref_gib", None),
}
_REWARD_MEMORY = "memory/reward_gib"


@dataclass(frozen=True)
class TraceSettings:
    """Which steps are traced.

    Attributes:
        steps: the first and the last one, counted from 1.
        folder: that the ranks write into.
    """

    steps: tuple[int, int]
    folder: Path


def usage_metrics(
    usage: Iterable[tuple[str, Sequence[Usage]]], lengths: Sequence[int], epochs: int
) -> dict[str, float]:
    """Sums up what the ranks of all models did in a step.

    Args:
        usage: role and ranks of each model; the largest of several reward models counts.
        lengths: tokens of each row that was trained on, ``epochs`` times.

    Returns: the metrics, without those that cannot be known.
    """
    values: dict[str, float] = {}
    for role, ranks in usage:
        memory, speed = _METRICS.get(role, (_REWARD_MEMORY, None))
        peak = peak_memory(ranks)
        if peak is not None:
            values[memory] = max(peak, values.get(memory, 0.0))
        share = None if speed is None else utilisation(ranks, lengths, epochs)
        if speed is not None and share is not None:
            values[speed] = share
    return values


class StepTracer:
    """Has the ranks that train traced during the steps that were asked for."""

    def __init__(self, settings: TraceSettings | None, timeout: float, console: Console) -> None:
        """Args: ``settings``: None traces nothing; ``timeout``: seconds that the ranks may take to write."""
        self._settings = settings
        self._timeout = timeout
        self._console = console
        # Those that record at present, and since which step; None where nobody has been asked to yet.
        self._recording: list[WorkerGroup] | None = None
        self._since = 0

    def begin(self, step: int, groups: Sequence[WorkerGroup]) -> None:
        """Starts the trace where ``step`` is the first to be traced, or a run went on in the middle of them."""
        if self._settings is None or self._recording is not None:
            return
        first, last = self._settings.steps
        if first <= step <= last:
            self._recording, self._since = list(groups), step
            for group in self._recording:
                group.call("start_trace", timeout=self._timeout)

    def end(self, step: int) -> None:
        """Writes the traces where ``step`` is the last one."""
        if self._settings is not None and self._recording and step >= self._settings.steps[1]:
            self._write(self._settings, step)

    def close(self, step: int) -> None:
        """Writes what is being recorded at the end of a run, after ``step``; says so where nothing ever was."""
        if self._settings is None:
            return
        if self._recording:
            self._write(self._settings, step)
        elif self._recording is None and step < self._settings.steps[0]:
            self._console.warn(missed_note(self._settings.steps, step))

    def _write(self, settings: TraceSettings, step: int) -> None:
        groups, self._recording = self._recording or [], []
        steps, folder = (self._since, step), str(settings.folder)
        answers = [group.call("finish_trace", folder, group.role, steps, timeout=self._timeout) for group in groups]
        problems = [answer for ranks in answers for answer in ranks if answer is not None]
        for problem in problems:
            self._console.warn(problem)
        if not problems:
            self._console.note(written_note(settings.folder, steps))
