"""Statistics of the samples of one prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GroupStatistics:
    """Per trajectory, statistics of the scored samples of its group; all [N].

    Attributes:
        count: scored samples.
        mean: of their rewards.
        std: unbiased; 0 for fewer than two samples.
        flat: bool, True where the rewards are all equal, or the trajectory itself has none.
    """

    count: torch.Tensor
    mean: torch.Tensor
    std: torch.Tensor
    flat: torch.Tensor


def group_statistics(rewards: torch.Tensor, scored: torch.Tensor, group_ids: torch.Tensor) -> GroupStatistics:
    """Statistics of each group, found by its id, in whatever order the samples stand.

    Args:
        rewards: float [N].
        scored: bool [N]; the others are in no statistic.
        group_ids: int64 [N].
    """
    scored = scored.bool()
    groups, group = torch.unique(group_ids, return_inverse=True)
    number = groups.numel()
    known, values = group[scored], rewards[scored]
    zeros = rewards.new_zeros(number)
    count = zeros.index_add(0, known, torch.ones_like(values))
    mean = zeros.index_add(0, known, values) / count.clamp(min=1)
    squares = zeros.index_add(0, known, (values - mean[known]).square())
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    # Rounding leaves the mean of equal numbers beside them; a group that teaches nothing must give exactly nothing.
    highest = zeros.scatter_reduce(0, known, values, "amax", include_self=False)
    lowest = zeros.scatter_reduce(0, known, values, "amin", include_self=False)
    flat = highest == lowest
    return GroupStatistics(count[group], mean[group], std[group], flat[group] | ~scored)
