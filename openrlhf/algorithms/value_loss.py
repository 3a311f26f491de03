"""The loss of a critic per token."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from openrlhf.algorithms.aggregate import count_tokens, mask_out
from openrlhf.algorithms.metric_sums import MetricSums


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    clip: float | None = None,
) -> tuple[torch.Tensor, MetricSums]:
    """max((V - R)^2, (V_old + clip(V - V_old, -eps, eps) - R)^2) / 2, or the first square alone without a clip.

    Source: the clipped value objective of PPO's reference code; S. Huang et al., "The 37 implementation details of
    proximal policy optimization", 2022, detail 9; GAE's targets: arXiv 1506.02438.

    Args:
        values: [T], of the critic that is trained; the only input that gets a gradient.
        old_values: [T], of the critic at the start of the update.
        returns: [T], what the values shall be.
        mask: bool [T]; nothing that stands where it is False has an effect.
        clip: eps, above 0, in the unit of the reward; None for no clip.

    Returns:
        The loss [T], 0 where ``mask`` is False, to be given to ``aggregate``; and the sums of ``value_clip_fraction``
        (tokens that the clip keeps from having a gradient), ``value_mean``, ``return_mean``, and, for
        ``explained_variance``, ``return_square``, ``value_error`` and ``value_error_square``, these in float64.

    Raises:
        ValueError: for a ``clip`` that is not above 0.
    """
    if clip is not None and not clip > 0:
        raise ValueError(f"the value clip must be above 0, got {clip}")
    mask = mask.bool()
    values, targets = mask_out(values, mask), mask_out(returns.detach().to(values.dtype), mask)
    clipped, bound = torch.zeros_like(mask), torch.zeros_like(targets)
    if clip is not None:
        old = mask_out(old_values.detach().to(values.dtype), mask)
        # The comparison below does not see a NaN among the old values, so it is brought into the error.
        values = values + torch.where(old.isnan(), old, torch.zeros_like(old))
        drift = values.detach() - old
        bound = (old + drift.clamp(-clip, clip) - targets).square()
        # Inside the clip the two squares are equal but for rounding, which must not take a gradient away.
        clipped = (drift.abs() > clip) & (bound > (values.detach() - targets).square())
    error = values - targets
    loss = torch.where(clipped, bound, error.square()) / 2
    wide_targets, wide_error = targets.double(), error.detach().double()
    stats = {
        "value_clip_fraction": clipped.double(),
        "value_mean": values.detach().double(),
        "return_mean": wide_targets,
        "return_square": wide_targets.square(),
        "value_error": wide_error,
        "value_error_square": wide_error.square(),
    }
    return loss, MetricSums({name: value.sum() for name, value in stats.items()}, count_tokens(mask))


def explained_variance(means: Mapping[str, float]) -> float:
    """1 - Var(V - R) / Var(R) over all tokens of a step, exact however the tokens were split.

    Args:
        means: ``MetricSums.means()`` of the sums that ``value_loss`` gives, added over the step.

    Returns: at most 1; NaN where the returns are all equal, or nothing was trained.
    """
    spread = means["return_square"] - means["return_mean"] ** 2
    # Equal returns leave rounding and no variance.
    if not spread > 1e-12 * max(1.0, means["return_square"]):
        return math.nan
    return 1 - (means["value_error_square"] - means["value_error"] ** 2) / spread
