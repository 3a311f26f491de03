"""Estimators of the KL divergence to the reference model, per token."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch

from openrlhf.algorithms.aggregate import mask_out

KLEstimator = Literal["k1", "k2", "k3"]

MAX_KL = 10.0
MAX_LOG_RATIO = 10.0
MAX_ADAPTATION = 0.2


def kl_per_token(
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor | None,
    mask: torch.Tensor,
    estimator: KLEstimator = "k1",
) -> torch.Tensor:
    """KL(policy || reference) estimated at each sampled token, with d = logprob - reference logprob.

    k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (J. Schulman, "Approximating KL divergence", 2020). k1 and k3 are
    unbiased in their value; k3 is never negative.
    Values are clamped to +-10, with a zero gradient there; elsewhere value and gradient are those of the formula.

    Args:
        logprobs: [T], of the policy.
        ref_logprobs: [T], or None where there is no reference model: the KL is then 0 everywhere.
        mask: bool [T]; nothing that stands where it is False has an effect.
        estimator: which of the three.

    Returns: [T] in nats, 0 where ``mask`` is False.
    """
    if estimator not in get_args(KLEstimator):
        raise ValueError(f"unknown KL estimator {estimator!r}; there are {', '.join(get_args(KLEstimator))}")
    if ref_logprobs is None:
        return torch.zeros_like(logprobs)
    d = mask_out(logprobs, mask) - mask_out(ref_logprobs.detach(), mask)
    value = estimate_kl(d.detach(), estimator)
    # The bound stands before the exponential: clamping an infinite result would leave 0 times infinity in backward.
    # The comparison is False for NaN, which therefore shows.
    clamped = value.abs() > MAX_KL
    live = estimate_kl(torch.where(clamped, torch.zeros_like(d), d), estimator)
    return torch.where(clamped, value.clamp(-MAX_KL, MAX_KL), live)


def kl_loss(
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor | None,
    mask: torch.Tensor,
    estimator: KLEstimator,
) -> torch.Tensor:
    """The KL as a term of the loss, with the plain gradient of the estimator.

    The expected gradient of k1 is zero (it is the score function's mean), so it is refused; k2's is that of the KL;
    k3's is that of the reverse KL, and close to it as long as the policy is close to the reference.

    Args: as ``kl_per_token``.

    Returns: [T], to be given to ``aggregate`` and multiplied by the coefficient; 0 without a reference model.

    Raises:
        ValueError: for k1.
    """
    if estimator == "k1":
        raise ValueError("k1 in the loss has an expected gradient of zero; use k2 or k3, or put the KL in the reward")
    return kl_per_token(logprobs, ref_logprobs, mask, estimator)


def corrected_kl_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor | None,
    mask: torch.Tensor,
    estimator: KLEstimator,
) -> torch.Tensor:
    """The KL as a term of the loss, weighted by r = exp(logprob - old logprob), so that its expected gradient is right.

    The samples come from the old policy. With r the value is unbiased for the present one, and with a gradient through
    r the gradient of k1 and k3 is unbiased as well (k3: DeepSeek-V3.2, arXiv 2512.02556, "unbiased KL estimate").
    k2's own gradient is that of the KL already, so there r is a weight without a gradient.
    log r is bounded to +-10, with a zero gradient beyond, and the KL as in ``kl_per_token``.

    Args: as ``kl_per_token``; ``old_logprobs`` [T] of the policy at the start of the update.

    Returns: [T], to be given to ``aggregate`` and multiplied by the coefficient; 0 without a reference model.
    """
    kl = kl_per_token(logprobs, ref_logprobs, mask, estimator)
    if ref_logprobs is None:
        return kl
    log_ratio = mask_out(logprobs, mask) - mask_out(old_logprobs.detach(), mask)
    # clamp keeps NaN, and has a zero gradient outside its bounds.
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return (ratio.detach() if estimator == "k2" else ratio) * kl


def adapt_kl_coef(coef: float, kl: float, target: float, samples: int, horizon: float) -> float:
    """The next coefficient of the KL: coef (1 + clip(kl / target - 1, -0.2, 0.2) samples / horizon).

    Source: arXiv 1909.08593, section 2.2, without its separate gain: 1 / horizon takes its place for each sample.

    Args:
        coef: the present coefficient.
        kl: measured on the batch, in nats.
        target: that the KL shall come near, in nats, above 0.
        samples: trajectories of the batch.
        horizon: trajectories over which the coefficient adapts.

    Raises:
        ValueError: for a KL that is no finite number, a target or horizon that is not above 0, or so many samples that
            one step could make the coefficient 0 or less.
    """
    if not math.isfinite(kl):
        raise ValueError(f"the KL coefficient cannot adapt to a KL of {kl}")
    if not (target > 0 and horizon > 0):
        raise ValueError(f"the target and the horizon of the KL must be above 0, got {target} and {horizon}")
    if not 0 <= MAX_ADAPTATION * samples < horizon:
        raise ValueError(
            f"{samples} samples a step are too many for a KL horizon of {horizon}: take one above "
            f"{MAX_ADAPTATION * samples:g}"
        )
    error = min(max(kl / target - 1, -MAX_ADAPTATION), MAX_ADAPTATION)
    return coef * (1 + error * samples / horizon)


def estimate_kl(d: torch.Tensor, estimator: str) -> torch.Tensor:
    """The formula alone, not clamped: [T] in nats for log-prob differences ``d`` [T] to the reference."""
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    return torch.expm1(-d) + d
