"""Policy losses per token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from openrlhf.algorithms.aggregate import count_tokens, mask_out


@dataclass(frozen=True)
class MetricSums:
    """Sums over trained tokens with their count, so that means over micro-batches and ranks are exact.

    Attributes:
        sums: by name, the sum over the trained tokens; scalars that stay on their device until ``means``.
        count: the trained tokens.
    """

    sums: Mapping[str, float | torch.Tensor]
    count: float | torch.Tensor

    def __add__(self, other: MetricSums) -> MetricSums:
        """Returns: the sums over both shares."""
        names = {**self.sums, **other.sums}
        total = {name: self.sums.get(name, 0.0) + other.sums.get(name, 0.0) for name in names}
        return MetricSums(total, self.count + other.count)

    def means(self) -> dict[str, float]:
        """Returns: by name, the mean over the tokens; NaN where there were none."""
        count = float(self.count)
        return {name: float(value) / count if count else math.nan for name, value in self.sums.items()}


def ppo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[torch.Tensor, MetricSums]:
    """PPO's clipped loss: -min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(logprob - old logprob).

    Source: arXiv 1707.06347, eq. 7; two clip bounds: arXiv 2503.14476, eq. 10; dual clip for A < 0, which bounds the
    loss by -c A: arXiv 1912.09729, eq. 5.

    Args:
        logprobs: [T], of the policy that is trained; the only input that gets a gradient.
        old_logprobs: [T], of the policy at the start of the update.
        advantages: [T].
        mask: bool [T]; nothing that stands where it is False has an effect.
        clip_low: how far below 1 the ratio may go.
        clip_high: how far above 1 the ratio may go.
        dual_clip: c, above 1; None for no dual clip.

    Returns:
        The loss [T], 0 where ``mask`` is False, to be given to ``aggregate``; and the sums of ``ppo_kl`` (old - new,
        not clamped), ``clip_fraction`` (tokens that the clip keeps from having a gradient) and ``ratio_mean``.

    Raises:
        ValueError: for a ``dual_clip`` that is not above 1.
    """
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual clip must be above 1, got {dual_clip}")
    mask = mask.bool()
    advantages = mask_out(advantages.detach(), mask)
    log_ratio = mask_out(logprobs, mask) - mask_out(old_logprobs.detach(), mask)
    ratio = log_ratio.detach().exp()

    # Which term is the smaller one is decided without a gradient, and the exponential with a gradient sees only the
    # tokens that need it: where the ratio overflowed, 0 times infinity would make the whole gradient NaN.
    # Every comparison is False for NaN, so that a NaN goes through the ratio and shows in value and gradient.
    above, below = ratio > 1 + clip_high, ratio < 1 - clip_low
    clipped = (above & (advantages >= 0)) | (below & (advantages <= 0))
    bound = ratio.clamp(1 - clip_low, 1 + clip_high)
    if dual_clip is not None:
        capped = (advantages < 0) & (ratio > dual_clip)
        bound = torch.where(capped, torch.full_like(ratio, dual_clip), bound)
        clipped = clipped | capped
    live_ratio = torch.where(clipped, torch.zeros_like(log_ratio), log_ratio).exp()
    loss = -torch.where(clipped, bound, live_ratio) * advantages
    stats = {
        "ppo_kl": -log_ratio.detach(),
        "clip_fraction": (clipped & (advantages != 0)).to(ratio.dtype),
        "ratio_mean": ratio,
    }
    sums = {name: mask_out(value, mask).sum() for name, value in stats.items()}
    return mask_out(loss, mask), MetricSums(sums, count_tokens(mask))
