"""Samples of rollouts in a file that people can read: ``rollouts.jsonl``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from openrlhf.tracking.jsonl import JSONLFile

ROLLOUTS_FILE = "rollouts.jsonl"


@dataclass(frozen=True)
class RolloutRecord:
    """One sample of one prompt, as text.

    Attributes:
        prompt: decoded as the engine saw it.
        response: decoded with special tokens.
        label: as the data set has it.
        reward: None where there is none; ``failure`` then says why.
        score: what filtering and pass rates use.
        tokens: tokens of the response.
        truncated: cut off by the token budget.
        stop_reason: "stop", "length", "environment" or "error".
        weight_version: of the weights that sampled it.
        group_id: shared by the samples of one prompt.
        sample_id: position in the group.
        failure: why there is no reward.
        extra_logs: numbers that the reward source gave beside the reward.
    """

    prompt: str
    response: str
    label: Any = None
    reward: float | None = None
    score: float | None = None
    tokens: int = 0
    truncated: bool = False
    stop_reason: str = "stop"
    weight_version: int = 0
    group_id: int = 0
    sample_id: int = 0
    failure: str | None = None
    extra_logs: Mapping[str, float] = field(default_factory=dict)


class RolloutWriter:
    """Appends rollouts to ``rollouts.jsonl``, one a line with its step, flushed."""

    def __init__(self, output_dir: Path | str, resume_step: int = 0) -> None:
        """Args: ``output_dir``: folder of the file; ``resume_step``: later steps are cut, 0 starts a new file."""
        self._file = JSONLFile(Path(output_dir) / ROLLOUTS_FILE, resume_step)

    def write(self, step: int, rollouts: Iterable[RolloutRecord]) -> None:
        """Appends the rollouts of ``step``."""
        for rollout in rollouts:
            self._file.write({"step": step, **asdict(rollout)})

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
