"""From finished trajectories to the rows that a policy is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from openrlhf.algorithms.advantages import AdvantageInputs, compute_advantages
from openrlhf.algorithms.aggregate import count_units, sum_by_row
from openrlhf.algorithms.kl import kl_per_token
from openrlhf.algorithms.metric_sums import MetricSums
from openrlhf.algorithms.rollout_correction import correction_weights
from openrlhf.algorithms.shaping import overlong_penalty, stop_properly
from openrlhf.config import AdvantageConfig, AlgoConfig
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


@dataclass(frozen=True)
class RewardShaping:
    """What is done to a trajectory's reward before it becomes an advantage.

    Attributes:
        clip: bounds, after the group baseline.
        stop_properly_coef: for truncated trajectories: in [0, 1] it scales the reward, a negative one replaces it.
        overlong_buffer: last tokens of ``max_new_tokens`` in which a penalty grows up to ``overlong_factor``.
    """

    clip: tuple[float, float]
    stop_properly_coef: float | None = None
    overlong_buffer: float | None = None
    overlong_factor: float = 1.0
    max_new_tokens: int | None = None


def shaped_rewards(trajectories: Sequence[Trajectory], shaping: RewardShaping) -> torch.Tensor:
    """Returns: float64 [M], the reward of each trajectory with the penalties for its length and for its end."""
    rewards = torch.tensor([trajectory.reward for trajectory in trajectories], dtype=torch.float64)
    if shaping.stop_properly_coef is not None:
        truncated = torch.tensor([trajectory.truncated for trajectory in trajectories])
        rewards = stop_properly(rewards, truncated, shaping.stop_properly_coef)
    if shaping.overlong_buffer is not None:
        lengths = torch.tensor([trajectory.response_length for trajectory in trajectories])
        rewards = rewards + overlong_penalty(
            lengths, shaping.max_new_tokens, shaping.overlong_buffer, shaping.overlong_factor
        )
    return rewards


def _turn_rewards(experience: Experience, rewards: torch.Tensor) -> torch.Tensor | None:
    """[T], rewards of an environment at the last token of the turn that earned each; None where there are no turns.

    What the shaping changed stands on the last token, so that the sum is the trajectory's reward.
    """
    trajectories = experience.trajectories
    if all(trajectory.step_rewards is None for trajectory in trajectories):
        return None
    placed = torch.zeros(experience.batch.tokens.numel(), dtype=rewards.dtype)
    starts = experience.batch.cu_seqlens.tolist()
    for index, trajectory in enumerate(trajectories):
        first = experience.first_row[index]
        ends = [
            (starts[first + number] + stop - 1, stop > start)
            for number, segment in enumerate(trajectory.segments)
            for start, stop in segment.action_ranges
        ]
        last = next(end for end, sampled in reversed(ends) if sampled)
        steps = trajectory.step_rewards or []
        for (end, sampled), reward in zip(ends, steps, strict=False):
            placed[end if sampled else last] += reward
        placed[last] += rewards[index] - sum(steps)
    return placed


def add_advantages(experience: Experience, algo: AlgoConfig, shaping: RewardShaping, kl_coef: float) -> None:
    """Fills the token fields ``advantages`` and ``returns`` from rewards, groups and, where they are there, KL and
    values.

    The batch must have ``ref_logprobs`` where there is a reference model, ``old_logprobs`` where its KL is in the
    reward, and ``old_values`` where there is a critic.
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
    rewards = shaped_rewards(experience.trajectories, shaping)
    placed = _turn_rewards(experience, rewards)
    inputs = AdvantageInputs(
        rewards=rewards.float(),
        scored=torch.ones(rewards.numel(), dtype=torch.bool),
        group_ids=torch.tensor([trajectory.group_id for trajectory in experience.trajectories]),
        mask=batch.action_mask,
        cu_seqlens=experience.bounds(),
        kl=kl,
        kl_coef=kl_coef,
        gamma=algo.advantage.gamma,
        lambd=algo.advantage.lambd,
        values=batch.token_fields.get("old_values"),
        token_rewards=None if placed is None else placed.float(),
        reward_clip=shaping.clip,
        whiten_std=not algo.advantage.no_std_norm,
    )
    advantages, returns = compute_advantages(algo.advantage.estimator, inputs)
    batch.token_fields["advantages"], batch.token_fields["returns"] = advantages, returns


def add_correction(experience: Experience, advantage: AdvantageConfig) -> MetricSums:
    """Fills the token field ``correction_weights`` from the engine's log-probs and ``old_logprobs``.

    Returns: sums over the tokens that the engine gave log-probs for.
    """
    batch = experience.batch
    weights, sums = correction_weights(
        advantage.is_correction_type,
        batch.token_fields["old_logprobs"],
        batch.token_fields["rollout_logprobs"],
        batch.action_mask,
        experience.bounds(),
        *advantage.is_correction_threshold,
        known=batch.row_fields["has_rollout_logprobs"][batch.row_of_token()],
    )
    batch.token_fields["correction_weights"] = weights
    return sums


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
