"""One rank's share of an optimizer step of the policy: micro-batches in, gradients and exact sums out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from openrlhf.algorithms.aggregate import Aggregation, aggregate, mask_out
from openrlhf.algorithms.kl import KLEstimator, corrected_kl_loss, estimate_kl, kl_loss
from openrlhf.algorithms.metric_sums import MetricSums
from openrlhf.algorithms.policy_loss import PolicyLossInputs
from openrlhf.algorithms.policy_loss import policy_loss as token_losses
from openrlhf.backends.base import Backend, StepResult, TokenScores
from openrlhf.data.packed_batch import PackedBatch


@dataclass(frozen=True)
class PolicyLossSpec:
    """The policy's loss, apart from the data.

    Attributes:
        name: of the loss, in ``POLICY_LOSSES``.
        clip_low, clip_high, dual_clip: of it.
        aggregation: how token losses become one number.
        constant: tokens that aggregation "constant" counts for each trajectory.
        kl_estimator: of the KL in the loss; None where it is in the reward or there is none.
        temperature: that the samples were drawn at.
        kl_corrected: weighs the KL in the loss by the probability ratio.
        entropy_coef: of the entropy bonus; None measures no entropy.
    """

    name: str
    clip_low: float
    clip_high: float
    dual_clip: float | None
    aggregation: Aggregation
    constant: float
    kl_estimator: KLEstimator | None
    temperature: float
    kl_corrected: bool = False
    entropy_coef: float | None = None


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
        scores: of the policy being trained, with entropies where ``spec`` has a coefficient for them.
        batch: with the token fields ``advantages``, ``ref_logprobs`` where the KL is in the loss,
            ``correction_weights`` under a rollout correction, and the row field ``trajectory_tokens``. Without
            ``old_logprobs`` this very forward is that of the old policy: the ratio is 1, and the KL to the reference is
            measured here.

    Returns:
        The part, and sums over the trained tokens for the metrics.
    """
    mask, fields = batch.action_mask, batch.token_fields
    on_policy = "old_logprobs" not in fields
    old = scores.logprobs.detach() if on_policy else fields["old_logprobs"]
    losses, sums = token_losses(
        spec.name,
        PolicyLossInputs(
            logprobs=scores.logprobs,
            old_logprobs=old,
            advantages=fields["advantages"],
            mask=mask,
            cu_seqlens=batch.cu_seqlens,
            clip_low=spec.clip_low,
            clip_high=spec.clip_high,
            dual_clip=spec.dual_clip,
        ),
    )
    if "correction_weights" in fields:
        losses = losses * mask_out(fields["correction_weights"], mask)
    more: dict[str, torch.Tensor] = {}
    total = losses
    if spec.kl_estimator is not None:
        kl = _kl(scores.logprobs, old, batch, spec)
        total = total + kl_coef * kl
        more["kl_loss"] = kl.detach().sum()
        if on_policy:
            measured = estimate_kl(old - fields["ref_logprobs"], spec.kl_estimator)
            more["kl_reference"] = mask_out(measured, mask).double().sum()
    if spec.entropy_coef is not None:
        entropy = mask_out(scores.entropy, mask)
        total = total - spec.entropy_coef * entropy
        more["entropy"] = entropy.detach().sum()
    return aggregate_part(total, batch, spec.aggregation, denominator, spec.constant), MetricSums(
        {**sums.sums, **more}, sums.count
    )


def _kl(logprobs: torch.Tensor, old: torch.Tensor, batch: PackedBatch, spec: PolicyLossSpec) -> torch.Tensor:
    ref, mask = batch.token_fields["ref_logprobs"], batch.action_mask
    if spec.kl_corrected:
        return corrected_kl_loss(logprobs, old, ref, mask, spec.kl_estimator)
    return kl_loss(logprobs, ref, mask, spec.kl_estimator)


def aggregate_part(
    losses: torch.Tensor, batch: PackedBatch, mode: Aggregation, denominator: float, constant: float
) -> torch.Tensor:
    """This micro-batch's part of a loss: ``losses`` [T] over the units of the whole optimizer step."""
    return aggregate(
        losses,
        batch.action_mask,
        batch.cu_seqlens,
        mode,
        denominator,
        constant=constant if mode == "constant" else 1.0,
        row_tokens=batch.row_fields.get("trajectory_tokens"),
    )


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
    """Runs one optimizer step of the policy on this rank."""

    def part(batch: PackedBatch) -> tuple[torch.Tensor, MetricSums]:
        scores = backend.forward(batch, temperature=spec.temperature, entropy=spec.entropy_coef is not None)
        return policy_loss(scores, batch, spec, share.denominator, share.kl_coef)

    return run_update(backend, share.micro_batches, part)


def run_update(
    backend: Backend, micro_batches: list[PackedBatch], part: Callable[[PackedBatch], tuple[torch.Tensor, MetricSums]]
) -> RankResult:
    """Accumulates the gradient over this rank's micro-batches and steps.

    Args:
        part: a micro-batch's part of the loss, and its sums for the metrics.
    """
    loss = torch.zeros((), dtype=torch.float64, device=backend.device)
    totals = MetricSums({}, 0.0)
    for micro_batch in micro_batches:
        value, sums = part(micro_batch.to(backend.device))
        backend.backward(value)
        # Added up where they stand: reading one would make the host wait for the accelerator in every micro-batch.
        loss += value.detach()
        totals = totals + sums
    result = backend.step()
    numbers = read_together({"loss": loss, "count": totals.count, **{f"sum/{k}": v for k, v in totals.sums.items()}})
    sums = {name: numbers[f"sum/{name}"] for name in totals.sums}
    return RankResult(result, numbers["loss"], sums, numbers["count"], backend.movement_warning())


def read_together(values: Mapping[str, float | torch.Tensor]) -> dict[str, float]:
    """Returns: scalars as numbers, through a single transfer from the accelerator."""
    tensors = {name: value.detach().double() for name, value in values.items() if isinstance(value, torch.Tensor)}
    read = dict(zip(tensors, torch.stack(list(tensors.values())).tolist(), strict=True)) if tensors else {}
    return {name: read[name] if name in read else float(value) for name, value in values.items()}
