"""Rewards from reward models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from openrlhf.config.reward import Combine
from openrlhf.data.packed_batch import PackedBatch, pack_rows
from openrlhf.data.trajectory import Trajectory
from openrlhf.trainer.experience import Budget, deal
from openrlhf.trainer.workers import WorkerGroup


@dataclass(frozen=True)
class RewardModel:
    """One reward model.

    Attributes:
        group: its ranks.
        tokenizer: its own where it reads other token ids than the policy writes; None where they are the same.
        mean, std: what its scores are normalised by.
    """

    group: WorkerGroup
    tokenizer: Any = None
    mean: float = 0.0
    std: float = 1.0


class RewardScorer:
    """Scores trajectories with all reward models of a run."""

    def __init__(
        self,
        models: Sequence[RewardModel],
        policy_tokenizer: Any,
        *,
        combine: Combine,
        budget: Budget,
        max_len: int,
        timeout: float,
    ) -> None:
        """
        Args:
            policy_tokenizer: of the trajectories' tokens.
            budget: of one forward.
            max_len: tokens of a row; longer ones (of another tokenizer) lose tokens on their left.
            timeout: seconds that a model may take for all rows.
        """
        self._models = list(models)
        self._policy_tokenizer = policy_tokenizer
        self._combine = combine
        self._budget = budget
        self._max_len = max_len
        self._timeout = timeout

    @property
    def has_models(self) -> bool:
        """Whether there is any model, and so anything that ``add_rewards`` might add."""
        return bool(self._models)

    @property
    def groups(self) -> list[WorkerGroup]:
        """The ranks of each model."""
        return [model.group for model in self._models]

    def add_rewards(self, trajectories: Sequence[Trajectory]) -> None:
        """Gives every trajectory that was sampled, and that nobody has rewarded yet, its reward and score."""
        waiting = [t for t in trajectories if t.reward is None and t.failure is None and t.segments]
        if not waiting or not self._models:
            return
        scores = torch.stack([self._score(model, waiting) for model in self._models])
        rewards = combine_scores(scores, self._combine)
        usable = scores.isfinite().all(0)
        for index, trajectory in enumerate(waiting):
            if usable[index]:
                trajectory.reward = trajectory.score = float(rewards[index])
            else:
                # What cannot be scored is dropped and counted, whatever the other models say of it.
                trajectory.failure = f"a reward model's score is no number: {scores[:, index].tolist()}"

    def _score(self, model: RewardModel, trajectories: Sequence[Trajectory]) -> torch.Tensor:
        batch = self._rows(model, trajectories)
        dealt = deal(batch, list(range(batch.num_rows)), model.group.size, self._budget, 0)
        scores = model.group.row_scores(batch, dealt, self._timeout)
        return (scores - model.mean) / model.std

    def _rows(self, model: RewardModel, trajectories: Sequence[Trajectory]) -> PackedBatch:
        # A conversation in several segments is judged by the last one, which holds its end.
        rows = [trajectory.segments[-1].tokens for trajectory in trajectories]
        if model.tokenizer is not None:
            rows = [self._translate(model.tokenizer, trajectory) for trajectory in trajectories]
        return pack_rows(rows, [torch.zeros(len(row), dtype=torch.bool) for row in rows])

    def _translate(self, tokenizer: Any, trajectory: Trajectory) -> list[int]:
        """The conversation in the reward model's own ids: its text, and its end of a row where the policy stopped."""
        segment = trajectory.segments[-1]
        text = self._policy_tokenizer.decode(segment.tokens, skip_special_tokens=True)
        ids = tokenizer(text, add_special_tokens=True).input_ids
        end = tokenizer.eos_token_id
        if end is not None and (not ids or (not trajectory.truncated and ids[-1] != end)):
            ids = [*ids, end]
        return ids[-self._max_len :]


def combine_scores(scores: torch.Tensor, how: Combine) -> torch.Tensor:
    """Makes one reward of the scores of several models.

    Args:
        scores: [M, N], M models, N trajectories.

    Returns: [N].
    """
    if how == "sum":
        return scores.sum(0)
    if how == "mean":
        return scores.mean(0)
    return scores.amin(0) if how == "min" else scores.amax(0)
