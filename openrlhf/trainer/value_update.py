"""One rank's share of an optimizer step of the critic."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from openrlhf.algorithms.aggregate import Aggregation
from openrlhf.algorithms.metric_sums import MetricSums
from openrlhf.algorithms.value_loss import value_loss
from openrlhf.backends.base import Backend
from openrlhf.data.packed_batch import PackedBatch
from openrlhf.trainer.policy_update import RankResult, StepShare, aggregate_part, run_update


@dataclass(frozen=True)
class ValueLossSpec:
    """The critic's loss, apart from the data.

    Attributes:
        clip: how far a value may move from its old one; None for no clip.
        aggregation, constant: as for the policy.
    """

    clip: float | None
    aggregation: Aggregation
    constant: float


def critic_loss(
    values: torch.Tensor, batch: PackedBatch, spec: ValueLossSpec, denominator: float
) -> tuple[torch.Tensor, MetricSums]:
    """This micro-batch's part of the loss.

    Args:
        values: [T], of the state before each token.
        batch: with the token fields ``old_values`` and ``returns``, and the row field ``trajectory_tokens``.

    Returns:
        The part, and sums over the trained tokens for the metrics.
    """
    fields = batch.token_fields
    losses, sums = value_loss(values, fields["old_values"], fields["returns"], batch.action_mask, spec.clip)
    return aggregate_part(losses, batch, spec.aggregation, denominator, spec.constant), sums


def update_critic(backend: Backend, share: StepShare, spec: ValueLossSpec) -> RankResult:
    """Runs one optimizer step of the critic on this rank."""

    def part(batch: PackedBatch) -> tuple[torch.Tensor, MetricSums]:
        return critic_loss(backend.values(batch), batch, spec, share.denominator)

    return run_update(backend, share.micro_batches, part)
