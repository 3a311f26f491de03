"""The optimizer steps of one rollout: which samples each takes, and what every rank gets of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from openrlhf.config import PPOTrainConfig
from openrlhf.data.batching import split_updates
from openrlhf.tracking.progress import Console
from openrlhf.trainer.experience import Budget, Experience, deal, denominator
from openrlhf.trainer.policy_update import PolicyLossSpec, StepShare
from openrlhf.trainer.rl_metrics import StepMetrics
from openrlhf.trainer.value_update import ValueLossSpec
from openrlhf.trainer.workers import WorkerGroup


@dataclass(frozen=True)
class UpdateSettings:
    """How a rollout is trained on.

    Attributes:
        value_loss: of the critic; None without one.
        freezing_steps: first rollout steps in which the critic is trained alone.
        budget: of one micro-batch.
    """

    train: PPOTrainConfig
    policy_loss: PolicyLossSpec
    value_loss: ValueLossSpec | None
    freezing_steps: int
    budget: Budget
    pad_token_id: int


class Updater:
    """Trains the actor, and the critic where there is one."""

    def __init__(
        self, settings: UpdateSettings, actor: WorkerGroup, critic: WorkerGroup | None, console: Console
    ) -> None:
        self._settings = settings
        self._actor = actor
        self._critic = critic
        self._console = console

    def run(self, experience: Experience, step: int, kl_coef: float, metrics: StepMetrics) -> int:
        """Makes all optimizer steps of a rollout; nothing is dropped, and the steps are of nearly equal size.

        Args:
            step: rollout steps done before.
            kl_coef: of the KL in the loss.

        Returns: optimizer steps of the actor.
        """
        train = self._settings.train
        total = len(experience.trajectories)
        sizes = split_updates(total, train.batch_size)
        updates = 0
        with self._console.phase("update", total=len(sizes) * train.max_epochs, unit="steps") as bar:
            for epoch in range(train.max_epochs):
                order = np.random.default_rng([train.seed, step, epoch]).permutation(total).tolist()
                for size in sizes:
                    chosen, order = sorted(order[:size]), order[size:]
                    rows = experience.rows_of(chosen)
                    if self._critic is not None:
                        self._update_critic(self._critic, experience, rows, metrics)
                    if step >= self._settings.freezing_steps:
                        self._update_actor(experience, rows, kl_coef, metrics)
                        updates += 1
                    bar.update()
        return updates

    def _update_actor(self, experience: Experience, rows: Sequence[int], kl_coef: float, metrics: StepMetrics) -> None:
        loss = self._settings.policy_loss
        shares = self._shares(self._actor, experience, rows, loss.aggregation, kl_coef)
        results = self._actor.call("update", loss, timeout=self._settings.train.step_timeout, per_rank=shares)
        metrics.actor.add(results)
        if results[0].warning is not None:
            self._console.warn(f"actor: {results[0].warning}")

    def _update_critic(
        self, critic: WorkerGroup, experience: Experience, rows: Sequence[int], metrics: StepMetrics
    ) -> None:
        loss = self._settings.value_loss
        shares = self._shares(critic, experience, rows, loss.aggregation, 0.0)
        results = critic.call("update_critic", loss, timeout=self._settings.train.step_timeout, per_rank=shares)
        metrics.critic.add(results)
        if results[0].warning is not None:
            self._console.warn(f"critic: {results[0].warning}")

    def _shares(
        self, group: WorkerGroup, experience: Experience, rows: Sequence[int], aggregation: str, kl_coef: float
    ) -> list[StepShare]:
        settings = self._settings
        batches, _ = deal(experience.batch, rows, group.size, settings.budget, settings.pad_token_id)
        units = denominator(experience, rows, aggregation)
        return [StepShare(share, units, kl_coef) for share in batches]
