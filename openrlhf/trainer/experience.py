"""From finished trajectories to the rows that a policy is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from openrlhf.algorithms.advantages import AdvantageInputs, compute_advantages
from openrlhf.algorithms.aggregate import count_units, sum_by_row
from openrlhf.algorithms.kl import kl_per_token
from openrlhf.config import AlgoConfig
from openrlhf.data.batching import plan_micro_batches
from openrlhf.data.packed_batch import PackedBatch, empty_batch, pack_rows, take_rows
from openrlhf.data.trajectory import Trajectory


@dataclass
class Experience:
    """The scored trajectories of one rollout, row by row.

    Attributes:
        trajectories: M of them, each with a reward and at least one sampled token.
        batch: N rows, one a segment, those of one trajectory side by side, in the order of ``trajectories``.
        first_row: int [M + 1], where each trajectory's rows begin.
    """

    trajectories: list[Trajectory]
    batch: PackedBatch
    first_row: list[int]

    def rows_of(self, trajectories: Sequence[int]) -> list[int]:
        """Returns: the rows of the given trajectories."""
        return [row for i in trajectories for row in range(self.first_row[i], self.first_row[i + 1])]

    def bounds(self) -> torch.Tensor:
        """Returns: [M + 1], token bounds of the trajectories, their segments end to end."""
        return self.batch.cu_seqlens[torch.tensor(self.first_row)]


def build_experience(trajectories: Sequence[Trajectory]) -> Experience:
    """Packs trajectories that can be trained on: the caller has left out those without a reward or an action."""
    first_row = [0]
    rows, masks, rollout_logprobs, has_logprobs, owners = [], [], [], [], []
    for index, trajectory in enumerate(trajectories):
        for segment in trajectory.segments:
            rows.append(segment.tokens)
            masks.append(segment.action_mask())
            known = segment.logprobs is not None
            rollout_logprobs.append(torch.tensor(segment.logprobs if known else [0.0] * len(segment.tokens)))
            has_logprobs.append(known)
            owners.append(index)
        first_row.append(len(rows))
    batch = pack_rows(
        rows,
        masks,
        token_fields={"rollout_logprobs": rollout_logprobs},
        row_fields={"trajectory": torch.tensor(owners), "has_rollout_logprobs": torch.tensor(has_logprobs)},
    )
    experience = Experience(list(trajectories), batch, first_row)
    tokens = sum_by_row(batch.action_mask.long(), experience.bounds())
    batch.row_fields["trajectory_tokens"] = tokens[batch.row_fields["trajectory"]]
    return experience


def add_advantages(experience: Experience, algo: AlgoConfig, reward_clip: tuple[float, float], kl_coef: float) -> None:
    """Fills the token fields ``advantages`` and ``returns`` from rewards, groups and, where it is there, the KL.

    The batch must have ``old_logprobs``, and ``ref_logprobs`` where there is a reference model.
    """
    batch = experience.batch
    kl = None
    if "ref_logprobs" in batch.token_fields and not algo.kl.use_loss:
        kl = kl_per_token(
            batch.token_fields["old_logprobs"],
            batch.token_fields["ref_logprobs"],
            batch.action_mask,
            algo.kl.estimator,
        )
    rewards = torch.tensor([trajectory.reward for trajectory in experience.trajectories], dtype=torch.float32)
    inputs = AdvantageInputs(
        rewards=rewards,
        scored=torch.ones(rewards.numel(), dtype=torch.bool),
        group_ids=torch.tensor([trajectory.group_id for trajectory in experience.trajectories]),
        mask=batch.action_mask,
        cu_seqlens=experience.bounds(),
        kl=kl,
        kl_coef=kl_coef,
        gamma=algo.advantage.gamma,
        reward_clip=reward_clip,
        whiten_std=not algo.advantage.no_std_norm,
    )
    advantages, returns = compute_advantages(algo.advantage.estimator, inputs)
    batch.token_fields["advantages"], batch.token_fields["returns"] = advantages, returns


@dataclass(frozen=True)
class Budget:
    """How large a micro-batch may be.

    Attributes:
        micro_batch_size: rows; None under a token budget.
        max_tokens: tokens; None without one.
    """

    micro_batch_size: int | None
    max_tokens: int | None


def deal(
    batch: PackedBatch, rows: Sequence[int], world_size: int, budget: Budget, pad_token_id: int
) -> tuple[list[list[PackedBatch]], list[list[list[int]]]]:
    """Deals rows to ranks and micro-batches.

    Returns:
        [rank][micro-batch], and in the same shape the rows that each holds (none where it only keeps a rank in step).
    """
    lengths = batch.lengths[torch.tensor(list(rows))].tolist()
    plan = plan_micro_batches(
        lengths, world_size, micro_batch_size=budget.micro_batch_size, max_tokens=budget.max_tokens
    )
    held = [[[rows[i] for i in micro] for micro in rank] for rank in plan]
    filler = _empty_like(batch, pad_token_id)
    batches = [[take_rows(batch, micro) if micro else filler for micro in rank] for rank in held]
    return batches, held


def _empty_like(batch: PackedBatch, pad_token_id: int) -> PackedBatch:
    filler = empty_batch(pad_token_id, list(batch.token_fields))
    filler.row_fields = {name: torch.zeros(1, dtype=field.dtype) for name, field in batch.row_fields.items()}
    return filler


def denominator(experience: Experience, rows: Sequence[int], aggregation: str) -> float:
    """What the loss of an optimizer step over ``rows`` is divided by: trained tokens, or trajectories."""
    step = take_rows(experience.batch, rows)
    owners = step.row_fields["trajectory"]
    first = torch.ones(owners.numel(), dtype=torch.bool)
    first[1:] = owners[1:] != owners[:-1]
    starts = step.cu_seqlens[:-1][first]
    return float(count_units(step.action_mask, torch.cat([starts, step.cu_seqlens[-1:]]), aggregation))
