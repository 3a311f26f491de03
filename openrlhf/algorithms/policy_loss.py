"""Policy losses per token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import torch

from openrlhf.algorithms.aggregate import Aggregation, count_tokens, mask_out, row_of_token, sum_by_row
from openrlhf.algorithms.metric_sums import MetricSums
from openrlhf.algorithms.registry import look_up, register


@dataclass(frozen=True)
class PolicyLossInputs:
    """All that a policy loss may look at: N rows of T tokens in all.

    Attributes:
        logprobs: [T], of the policy that is trained; the only input that gets a gradient.
        old_logprobs: [T], of the policy at the start of the update.
        advantages: [T].
        mask: bool [T]; nothing that stands where it is False has an effect.
        cu_seqlens: [N + 1], bounds of the rows that a sequence-level loss takes a ratio of.
        clip_low: how far below 1 the ratio may go (``ppo``, ``gspo``); the same in log space for ``gmpo``.
        clip_high: how far above; ``cispo`` takes 1 + clip_high as its ceiling unless it has one of its own.
        dual_clip: c above 1, of ``ppo`` and ``gspo``; None for no dual clip.
        cispo_ceiling: largest weight of ``cispo``; None for 1 + clip_high.
        sapo_tau_positive: temperature of ``sapo`` where the advantage is above 0.
        sapo_tau_negative: the same elsewhere.
    """

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    cu_seqlens: torch.Tensor
    clip_low: float
    clip_high: float
    dual_clip: float | None = None
    cispo_ceiling: float | None = None
    sapo_tau_positive: float = 1.0
    sapo_tau_negative: float = 1.05


PolicyLoss = Callable[[PolicyLossInputs], tuple[torch.Tensor, MetricSums]]

POLICY_LOSSES: dict[str, PolicyLoss] = {}

# A ratio of a whole row says how a row does, so the mean over rows is the objective that their papers derive.
DEMANDED_AGGREGATION: MappingProxyType[str, Aggregation] = MappingProxyType({"gspo": "seq_mean", "gmpo": "seq_mean"})

# The others have no clip that a dual clip could stand beside.
DUAL_CLIP_LOSSES = ("ppo", "gspo")


def register_policy_loss(name: str) -> Callable[[PolicyLoss], PolicyLoss]:
    """Enters the decorated function into ``POLICY_LOSSES``.

    Raises:
        ValueError: where the name is taken.
    """
    return register(POLICY_LOSSES, "policy loss", name)


def policy_loss(name: str, inputs: PolicyLossInputs) -> tuple[torch.Tensor, MetricSums]:
    """The loss ``name`` at each token, to be given to ``aggregate`` with the mode that ``DEMANDED_AGGREGATION`` says.

    Returns:
        The loss [T], 0 where the mask is False; and the sums of ``ppo_kl`` (old - new at the token, not clamped),
        ``clip_fraction`` (tokens that the rule keeps from having a gradient; for ``cispo``, which keeps all, tokens
        whose weight is bounded) and ``ratio_mean`` (the ratio that the loss uses: of the token or of its row).

    Raises:
        ValueError: for an unknown name, or a parameter that the loss does not allow.
    """
    loss = look_up(POLICY_LOSSES, "policy loss", name)
    if inputs.dual_clip is not None and name not in DUAL_CLIP_LOSSES:
        others = " or ".join(DUAL_CLIP_LOSSES)
        raise ValueError(f"the policy loss {name} has no dual clip; leave it out or use {others}")
    return loss(inputs)


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

    Args and Returns: as ``PolicyLossInputs`` and ``policy_loss``.

    Raises:
        ValueError: for a ``dual_clip`` that is not above 1.
    """
    mask = mask.bool()
    advantages = mask_out(advantages.detach(), mask)
    log_ratio = _log_ratio(logprobs, old_logprobs, mask)
    loss, clipped = _clipped_objective(log_ratio, advantages, (clip_low, clip_high), dual_clip)
    return mask_out(loss, mask), _sums(log_ratio, clipped & (advantages != 0), log_ratio.detach().exp(), mask)


@register_policy_loss("ppo")
def _ppo(inputs: PolicyLossInputs) -> tuple[torch.Tensor, MetricSums]:
    return ppo(
        inputs.logprobs,
        inputs.old_logprobs,
        inputs.advantages,
        inputs.mask,
        inputs.clip_low,
        inputs.clip_high,
        inputs.dual_clip,
    )


@register_policy_loss("gspo")
def gspo(inputs: PolicyLossInputs) -> tuple[torch.Tensor, MetricSums]:
    """GSPO (arXiv 2507.18071): PPO with s = exp(mean over the row of log r) in place of each r.

    Every token has the loss of s with its own advantage; their mean over the row is the loss of the row, and its
    gradient reaches all trained tokens of the row alike.
    """
    mask, advantages, log_ratio = _masked(inputs)
    sequence = _row_mean(log_ratio, mask, inputs.cu_seqlens)
    loss, clipped = _clipped_objective(sequence, advantages, (inputs.clip_low, inputs.clip_high), inputs.dual_clip)
    return mask_out(loss, mask), _sums(log_ratio, clipped & (advantages != 0), sequence.detach().exp(), mask)


@register_policy_loss("cispo")
def cispo(inputs: PolicyLossInputs) -> tuple[torch.Tensor, MetricSums]:
    """CISPO (MiniMax-M1, arXiv 2506.13585): -sg[min(r, ceiling)] A logprob.

    The weight is bounded from above alone, and no token loses its gradient.

    Raises:
        ValueError: for a ceiling that is not above 0.
    """
    ceiling = 1 + inputs.clip_high if inputs.cispo_ceiling is None else inputs.cispo_ceiling
    if not ceiling > 0:
        raise ValueError(f"the ceiling of cispo must be above 0, got {ceiling}")
    mask, advantages, log_ratio = _masked(inputs)
    ratio = log_ratio.detach().exp()
    loss = -ratio.clamp(max=ceiling) * advantages * mask_out(inputs.logprobs, mask)
    return mask_out(loss, mask), _sums(log_ratio, (ratio > ceiling) & (advantages != 0), ratio, mask)


@register_policy_loss("sapo")
def sapo(inputs: PolicyLossInputs) -> tuple[torch.Tensor, MetricSums]:
    """SAPO (arXiv 2511.20347): -(4 / tau) sigmoid(tau (r - 1)) A, with tau by the sign of A.

    At r = 1 its gradient is that of PPO; away from 1 it fades instead of being cut.

    Raises:
        ValueError: for a tau that is not above 0.
    """
    for name, tau in (("positive", inputs.sapo_tau_positive), ("negative", inputs.sapo_tau_negative)):
        if not tau > 0:
            raise ValueError(f"the {name} tau of sapo must be above 0, got {tau}")
    mask, advantages, log_ratio = _masked(inputs)
    ratio = log_ratio.detach().exp()
    taus = torch.full_like(ratio, inputs.sapo_tau_negative).masked_fill(advantages > 0, inputs.sapo_tau_positive)
    # Here the gate is flat in this precision; its slope 0 times an infinite ratio would be NaN.
    gate = torch.sigmoid(taus * (ratio - 1))
    flat = gate == 1
    live_ratio = torch.where(flat, torch.zeros_like(log_ratio), log_ratio).exp()
    gate = torch.where(flat, gate, torch.sigmoid(taus * (live_ratio - 1)))
    loss = -4 / taus * gate * advantages
    return mask_out(loss, mask), _sums(log_ratio, flat & (advantages != 0), ratio, mask)


@register_policy_loss("gmpo")
def gmpo(inputs: PolicyLossInputs) -> tuple[torch.Tensor, MetricSums]:
    """GMPO (arXiv 2507.20673): -G A with G the geometric mean of the row's clipped ratios.

    log r is bounded by clip_high from above where A > 0 and by -clip_low from below where A < 0; a bounded token counts
    in the mean and has no gradient through it. Every token has the loss of G with its own advantage.
    """
    mask, advantages, log_ratio = _masked(inputs)
    value = log_ratio.detach()
    above = (value > inputs.clip_high) & (advantages >= 0)
    below = (value < -inputs.clip_low) & (advantages <= 0)
    clipped = above | below
    bounded = torch.where(clipped, value.clamp(-inputs.clip_low, inputs.clip_high), log_ratio)
    sequence = _row_mean(bounded, mask, inputs.cu_seqlens)
    # A mean that overflows belongs to tokens with A < 0; infinity times an advantage of 0 would be NaN.
    idle = advantages == 0
    ratio = torch.where(idle, torch.zeros_like(sequence), sequence).exp()
    return mask_out(-ratio * advantages, mask), _sums(log_ratio, clipped & ~idle, sequence.detach().exp(), mask)


def _masked(inputs: PolicyLossInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns: mask, advantages without a gradient, and log ratios with one, the last two 0 outside the mask."""
    mask = inputs.mask.bool()
    return mask, mask_out(inputs.advantages.detach(), mask), _log_ratio(inputs.logprobs, inputs.old_logprobs, mask)


def _log_ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return mask_out(logprobs, mask) - mask_out(old_logprobs.detach(), mask)


def _row_mean(values: torch.Tensor, mask: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Returns: [T], at each token the mean of its row's trained tokens; ``values`` [T] are 0 outside the mask."""
    counts = sum_by_row(mask.to(values.dtype), cu_seqlens).clamp(min=1)
    return (sum_by_row(values, cu_seqlens) / counts)[row_of_token(cu_seqlens, values.numel())]


def _clipped_objective(
    log_ratio: torch.Tensor, advantages: torch.Tensor, clip: tuple[float, float], dual_clip: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns: PPO's loss [T] for log ratios [T] of tokens or rows, and bool [T], where a bound took the gradient."""
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual clip must be above 1, got {dual_clip}")
    low, high = clip
    ratio = log_ratio.detach().exp()
    # Which term is the smaller one is decided without a gradient, and the exponential with a gradient sees only the
    # tokens that need it: where the ratio overflowed, 0 times infinity would make the whole gradient NaN.
    # Every comparison is False for NaN, so that a NaN goes through the ratio and shows in value and gradient.
    above, below = ratio > 1 + high, ratio < 1 - low
    clipped = (above & (advantages >= 0)) | (below & (advantages <= 0))
    bound = ratio.clamp(1 - low, 1 + high)
    if dual_clip is not None:
        capped = (advantages < 0) & (ratio > dual_clip)
        bound = torch.where(capped, torch.full_like(ratio, dual_clip), bound)
        clipped = clipped | capped
    live_ratio = torch.where(clipped, torch.zeros_like(log_ratio), log_ratio).exp()
    return -torch.where(clipped, bound, live_ratio) * advantages, clipped


def _sums(log_ratio: torch.Tensor, clipped: torch.Tensor, ratio: torch.Tensor, mask: torch.Tensor) -> MetricSums:
    stats = {"ppo_kl": -log_ratio.detach(), "clip_fraction": clipped.to(ratio.dtype), "ratio_mean": ratio}
    return MetricSums({name: mask_out(value, mask).sum() for name, value in stats.items()}, count_tokens(mask))
