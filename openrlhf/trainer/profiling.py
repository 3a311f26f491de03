"""Traces of chosen steps, by torch.profiler."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

FOLDER = "profile"
"""Below --ckpt.output_dir."""
TOP_OPERATORS = 40


class StepTrace:
    """Records from its creation until ``finish`` what this process does."""

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()

    def finish(self, folder: Path, name: str) -> str | None:
        """Writes ``<name>.json.gz``, which Perfetto and chrome://tracing open, and ``<name>.txt``, the top operators.

        Returns: None, or a sentence where they could not be written: that is no reason to end a run.
        """
        trace = folder / f"{name}.json.gz"
        try:
            self._profile.stop()
            folder.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(trace))
            (folder / f"{name}.txt").write_text(self._table() + "\n")
        except (OSError, RuntimeError) as error:
            # Half a trace under its final name would be taken for a whole one.
            with suppress(OSError):
                trace.unlink()
            return f"the trace {trace} could not be written: {error}"
        return None

    def _table(self) -> str:
        device = "device" if torch.cuda.is_available() else "cpu"
        return self._profile.key_averages().table(sort_by=f"self_{device}_time_total", row_limit=TOP_OPERATORS)


def trace_name(role: str, rank: int, steps: tuple[int, int]) -> str:
    """Returns: the name of the files of one rank: ``actor_rank0_steps3-5``."""
    return f"{role}_rank{rank}_steps{steps[0]}-{steps[1]}"


def written_note(folder: Path, steps: tuple[int, int]) -> str:
    """Returns: where the traces lie, in one line."""
    return (
        f"steps {steps[0]} to {steps[1]} were traced: {folder} has a trace (.json.gz) and a table (.txt) of each rank"
    )


def missed_note(steps: tuple[int, int], last: int) -> str:
    """Returns: a sentence about a run that ended after step ``last``, before the first step to trace."""
    return f"--logger.profile_steps {steps[0]}:{steps[1]} traced nothing: the run ended after step {last}"
