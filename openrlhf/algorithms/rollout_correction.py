"""Weights for tokens that an inference engine sampled with other probabilities than the trainer computes."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch

from openrlhf.algorithms.aggregate import mask_out, row_of_token, sum_by_row
from openrlhf.algorithms.metric_sums import MetricSums

CorrectionKind = Literal["tis", "icepop", "seq-mask-tis"]


def correction_weights(
    kind: CorrectionKind,
    old_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    low: float,
    high: float,
    known: torch.Tensor | None = None,
) -> tuple[torch.Tensor, MetricSums]:
    """What each token's policy loss is multiplied by, from w = exp(old logprob - rollout logprob).

    - ``tis``: w bounded to [low, high] (truncated importance sampling; F. Yao et al., "Your efficient RL framework
      secretly brings you off-policy RL training", 2025).
    - ``icepop``: w inside [low, high], 0 outside (IcePop; arXiv 2510.18855).
    - ``seq-mask-tis``: w as it is in rows where exp(mean of log w) lies inside [low, high], 0 in the others.

    A token of weight 0 stays in the denominator of the loss: the mask does not change.

    Args:
        kind: which of the three.
        old_logprobs: [T], of the trainer's policy at the start of the update.
        rollout_logprobs: [T], of the engine for the token that it sampled, at the same temperature.
        mask: bool [T]; nothing that stands where it is False has an effect.
        cu_seqlens: [N + 1], bounds of the rows that ``seq-mask-tis`` keeps or drops.
        low: lower bound, 0 or more.
        high: upper bound.
        known: bool [T], False where the engine gave no log-prob: such a token has weight 1 whatever becomes of its
            row, and is in no mean and no metric. None where all are known.

    Returns:
        The weights [T] without a gradient, 0 where ``mask`` is False; and over the known trained tokens the sums of
        ``correction_touched`` (tokens that the rule bounds or drops), ``correction_weight`` and ``rollout_minus_old``
        (the engine's log-prob minus the trainer's, in nats), with the maximum ``correction_ratio`` of w itself.

    Raises:
        ValueError: for an unknown ``kind`` or bounds between which there is nothing.
    """
    if kind not in get_args(CorrectionKind):
        raise ValueError(f"unknown rollout correction {kind!r}; there are {', '.join(get_args(CorrectionKind))}")
    if not (0 <= low <= high) or math.isinf(low):
        raise ValueError(f"the bounds of the rollout correction must be 0 <= low <= high, got ({low}, {high})")
    mask = mask.bool()
    judged = mask if known is None else mask & known.bool()
    log_ratio = mask_out(old_logprobs.detach(), judged) - mask_out(rollout_logprobs.detach(), judged)
    ratio = log_ratio.exp()
    judge = _row_ratio(log_ratio, judged, cu_seqlens) if kind == "seq-mask-tis" else ratio
    # Comparisons are False for NaN, so that a NaN at a trained token stays in its weight.
    touched = ((judge < low) | (judge > high)) & judged
    changed = ratio.clamp(low, high) if kind == "tis" else torch.zeros_like(ratio)
    weights = torch.where(touched, changed, ratio)
    sums = {
        "correction_touched": touched.to(ratio.dtype).sum(),
        "correction_weight": mask_out(weights, judged).sum(),
        "rollout_minus_old": -log_ratio.sum(),
    }
    largest = mask_out(ratio, judged).amax() if ratio.numel() else ratio.sum()
    # Where nothing is judged the ratio is exp(0): weight 1 for the unknown tokens, and 0 outside the mask.
    return mask_out(weights, mask), MetricSums(sums, judged.sum(), {"correction_ratio": largest})


def _row_ratio(log_ratio: torch.Tensor, judged: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    counts = sum_by_row(judged.to(log_ratio.dtype), cu_seqlens).clamp(min=1)
    return (sum_by_row(log_ratio, cu_seqlens) / counts).exp()[row_of_token(cu_seqlens)]
