"""What a supervised loop looks at beside its loss: memory and speed of the GPUs, traces of chosen steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from openrlhf.backends.base import Backend
from openrlhf.trainer.device_meter import Usage, peak_memory, utilisation
from openrlhf.trainer.profiling import StepTrace, missed_note, trace_name, written_note
from openrlhf.trainer.supervised_outputs import SupervisedOutputs


def usage_metrics(backend: Backend, usage: Usage, lengths: Sequence[int]) -> dict[str, float]:
    """Sums up what all ranks did in a step; collective on GPUs.

    Args:
        usage: of this rank.
        lengths: tokens of each row of the step.

    Returns: the metrics, without those that cannot be known, the same on all ranks.
    """
    if usage.peak_gib is None:
        return {}
    ranks: list[Usage] = [usage] * backend.world_size
    dist.all_gather_object(ranks, usage)
    values = {"memory/peak_gib": peak_memory(ranks), "throughput/mfu": utilisation(ranks, lengths)}
    return {name: value for name, value in values.items() if value is not None}


class RankTracer:
    """Traces this rank during the steps that were asked for."""

    def __init__(self, backend: Backend, steps: tuple[int, int] | None, outputs: SupervisedOutputs) -> None:
        """Args: ``steps``: the first and the last one, counted from 1; None traces nothing."""
        self._backend = backend
        self._steps = steps
        self._outputs = outputs
        self._trace: StepTrace | None = None
        self._since = 0

    def begin(self, step: int) -> None:
        """Starts the trace where ``step`` is the first to be traced, or a run went on in the middle of them."""
        if self._steps is not None and self._trace is None and self._steps[0] <= step <= self._steps[1]:
            self._trace, self._since = StepTrace(), step

    def end(self, step: int) -> None:
        """Writes the trace where ``step`` is the last one; collective."""
        if self._steps is not None and self._trace is not None and step >= self._steps[1]:
            self._write(self._trace, step)

    def close(self, step: int) -> None:
        """Writes what is being recorded at the end of a run, after ``step``; says so where nothing ever was."""
        if self._trace is not None:
            self._write(self._trace, step)
        elif self._steps is not None and step < self._steps[0]:
            self._outputs.warn(missed_note(self._steps, step))

    def _write(self, trace: StepTrace, step: int) -> None:
        self._trace = None
        steps, folder = (self._since, step), self._outputs.profile_folder
        own = trace.finish(folder, trace_name(self._outputs.command, self._backend.rank, steps))
        problems: list[str | None] = [own] * self._backend.world_size
        dist.all_gather_object(problems, own)
        for problem in problems:
            if problem is not None:
                self._outputs.warn(problem)
        if not any(problems):
            self._outputs.note(written_note(folder, steps))
