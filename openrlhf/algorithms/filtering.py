"""Which groups of samples are worth training on."""

from __future__ import annotations

import math

import torch

from openrlhf.algorithms.groups import group_statistics


def keep_groups(
    scores: torch.Tensor, scored: torch.Tensor, group_ids: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, float]:
    """Dynamic sampling (DAPO, arXiv 2503.14476, eq. 11): keeps groups that have something to teach.

    A group stays where the mean of its scores lies inside the range, bounds excluded, and its scores are not all
    equal: equal ones give no advantage, wherever in the range they lie.

    Args:
        scores: float [N]; anything, NaN too, where ``scored`` is False.
        scored: bool [N]; the others are in no mean and do not stay. A group with fewer than two goes.
        group_ids: int64 [N], equal for the samples of one prompt, in any order.
        low: lower bound, excluded, in the score's unit.
        high: upper bound, excluded.

    Returns:
        bool [N], True for the trajectories to train on; and the share of groups that stay, NaN without groups.

    Raises:
        ValueError: for a range with nothing inside, or a scored sample whose score is not a finite number.
    """
    if not low < high:
        raise ValueError(f"the range of dynamic filtering ({low}, {high}) is empty")
    scored = scored.bool()
    bad = (scored & ~scores.isfinite()).nonzero().flatten().tolist()
    if bad:
        raise ValueError(f"trajectories {bad} are marked as scored, but their scores are not finite numbers")
    stats = group_statistics(scores.double(), scored, group_ids)
    # ``flat`` is True for a sample without a score, whose group may stay all the same.
    keep = (stats.mean > low) & (stats.mean < high) & ~stats.flat
    groups, kept = torch.unique(group_ids).numel(), torch.unique(group_ids[keep]).numel()
    return keep, kept / groups if groups else math.nan
