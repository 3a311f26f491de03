"""Metrics over tokens that are exact over any split into micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class MetricSums:
    """Sums over trained tokens with their count, so that means over micro-batches and ranks are exact.

    Attributes:
        sums: by name, the sum over the trained tokens; scalars that stay on their device until ``means``.
        count: the trained tokens.
        maxima: by name, the largest value over the trained tokens.
    """

    sums: Mapping[str, float | torch.Tensor]
    count: float | torch.Tensor
    maxima: Mapping[str, float | torch.Tensor] = field(default_factory=dict)

    def __add__(self, other: MetricSums) -> MetricSums:
        """Returns: the sums, and the larger maxima, over both shares."""
        names = {**self.sums, **other.sums}
        total = {name: self.sums.get(name, 0.0) + other.sums.get(name, 0.0) for name in names}
        maxima = dict(self.maxima)
        for name, value in other.maxima.items():
            # torch.maximum keeps a NaN, whichever side it stands on.
            maxima[name] = _maximum(maxima[name], value) if name in maxima else value
        return MetricSums(total, self.count + other.count, maxima)

    def means(self) -> dict[str, float]:
        """Returns: by name, the mean over the tokens; NaN where there were none."""
        count = float(self.count)
        return {name: float(value) / count if count else math.nan for name, value in self.sums.items()}


def _maximum(a: float | torch.Tensor, b: float | torch.Tensor) -> torch.Tensor:
    a = torch.as_tensor(a, dtype=torch.float64)
    return torch.maximum(a, torch.as_tensor(b, dtype=torch.float64, device=a.device))
