"""One rank's share of an optimizer step of the policy: micro-batches in, gradients and exact sums out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from openrlhf.algorithms.aggregate import Aggregation, aggregate
from openrlhf.algorithms.kl import KLEstimator, kl_loss
from openrlhf.algorithms.policy_loss import MetricSums, ppo
from openrlhf.backends.base import Backend, StepResult, TokenScores
from openrlhf.data.packed_batch import PackedBatch


@dataclass(frozen=True)
class PolicyLossSpec:
    """The policy's loss, apart from the data.

    Attributes:
        clip_low, clip_high, dual_clip: of PPO.
        aggregation: how token losses become one number.
        constant: tokens that aggregation "constant" counts for each trajectory.
        kl_estimator: of the KL in the loss; None where it is in the reward or there is none.
        temperature: that the samples were drawn at.
    """

    clip_low: float
    clip_high: float
    dual_clip: float | None
    aggregation: Aggregation
    constant: float
    kl_estimator: KLEstimator | None
    temperature: float


@dataclass(frozen=True)
class StepShare:
    """What one rank does in one optimizer step.

    Attributes:
        micro_batches: as many on every rank; empty ones where work ran out.
        denominator: what the loss is divided by, counted over all ranks and micro-batches.
        kl_coef: of the KL in the loss.
    """

    micro_batches: list[PackedBatch]
    denominator: float
    kl_coef: float


def policy_loss(
    scores: TokenScores, batch: PackedBatch, spec: PolicyLossSpec, denominator: float, kl_coef: float
) -> tuple[torch.Tensor, MetricSums]:
    """This micro-batch's part of the loss.

    Args:
        scores: of the policy being trained.
        batch: with the token fields ``old_logprobs`` and ``advantages``, ``ref_logprobs`` where the KL is in the loss,
            and the row field ``trajectory_tokens``.

    Returns:
        The part, and sums over the trained tokens for the metrics.
    """
    mask, fields = batch.action_mask, batch.token_fields
    losses, sums = ppo(
        scores.logprobs,
        fields["old_logprobs"],
        fields["advantages"],
        mask,
        spec.clip_low,
        spec.clip_high,
        spec.dual_clip,
    )
    total = losses
    if spec.kl_estimator is not None:
        kl = kl_loss(scores.logprobs, fields.get("ref_logprobs"), mask, spec.kl_estimator)
        total = losses + kl_coef * kl
        sums = MetricSums({**sums.sums, "kl_loss": kl.detach().sum()}, sums.count)
    sums = MetricSums({**sums.sums, "policy_loss": losses.detach().sum()}, sums.count)
    part = aggregate(
        total,
        mask,
        batch.cu_seqlens,
        spec.aggregation,
        denominator,
        constant=spec.constant if spec.aggregation == "constant" else 1.0,
        row_tokens=batch.row_fields.get("trajectory_tokens"),
    )
    return part, sums


@dataclass(frozen=True)
class RankResult:
    """What one optimizer step did on one rank.

    Attributes:
        step: the same on every rank.
        loss: this rank's part.
        sums: for the metrics, by name, over ``count`` tokens.
        warning: a sentence about weights that do not move, once in a run.
    """

    step: StepResult
    loss: float
    sums: dict[str, float]
    count: float
    warning: str | None = None


def update_policy(backend: Backend, share: StepShare, spec: PolicyLossSpec) -> RankResult:
    """Runs one optimizer step on this rank."""
    loss = 0.0
    totals = MetricSums({}, 0.0)
    for micro_batch in share.micro_batches:
        batch = micro_batch.to(backend.device)
        scores = backend.forward(batch, temperature=spec.temperature)
        part, sums = policy_loss(scores, batch, spec, share.denominator, share.kl_coef)
        backend.backward(part)
        loss += float(part.detach())
        totals = totals + sums
    result = backend.step()
    sums = {name: float(value) for name, value in totals.sums.items()}
    return RankResult(result, loss, sums, float(totals.count), backend.movement_warning())
