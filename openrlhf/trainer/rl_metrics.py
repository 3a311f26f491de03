"""What one RL step is measured by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from openrlhf.algorithms.kl import KLEstimator, estimate_kl
from openrlhf.algorithms.metric_sums import MetricSums
from openrlhf.algorithms.value_loss import explained_variance
from openrlhf.backends.base import StepResult
from openrlhf.data.trajectory import Trajectory
from openrlhf.trainer.experience import Experience, RewardShaping, shaped_rewards
from openrlhf.trainer.policy_update import RankResult


def mean(values: Sequence[float]) -> float:
    """Returns: the mean, NaN of nothing."""
    return math.fsum(values) / len(values) if values else math.nan


def deviation(values: Sequence[float]) -> float:
    """Returns: the unbiased standard deviation, NaN of fewer than two values."""
    return torch.tensor(values, dtype=torch.float64).std().item() if len(values) > 1 else math.nan


@dataclass
class UpdateLog:
    """The optimizer steps of one model in one rollout step."""

    losses: list[float] = field(default_factory=list)
    steps: list[StepResult] = field(default_factory=list)
    sums: MetricSums = field(default_factory=lambda: MetricSums({}, 0.0))

    def add(self, results: Sequence[RankResult]) -> None:
        """Takes one optimizer step as all ranks report it: parts of the loss and sums add up, the norm is shared."""
        self.steps.append(results[0].step)
        self.losses.append(math.fsum(result.loss for result in results))
        for result in results:
            self.sums = self.sums + MetricSums(result.sums, result.count)

    def summary(self, role: str) -> dict[str, float]:
        """Returns: the norm, the rates and the number of steps of the model ``role``."""
        done = [step for step in self.steps if not step.skipped]
        return {
            f"{role}/grad_norm": mean([step.grad_norm for step in done]),
            **self.steps[-1].rate_metrics(role),
            f"{role}/updates": float(len(done)),
            f"{role}/skipped_steps": float(len(self.steps) - len(done)),
        }


@dataclass
class StepMetrics:
    """Collects the numbers of one step under their names (docs/metrics.md).

    Attributes:
        values: by name, finished numbers.
        trajectories: all samples of the step, those that could not be trained on too.
        actor, critic: their optimizer steps.
    """

    values: dict[str, float] = field(default_factory=dict)
    trajectories: list[Trajectory] = field(default_factory=list)
    actor: UpdateLog = field(default_factory=UpdateLog)
    critic: UpdateLog = field(default_factory=UpdateLog)
    _tokens: int = 0

    def add_trajectories(self, trajectories: Sequence[Trajectory]) -> None:
        """Takes what was sampled; a sample without a reward is counted and enters no mean of rewards."""
        self.trajectories = list(trajectories)
        rewards = [t.reward for t in trajectories if t.reward is not None]
        scores = [t.score for t in trajectories if t.score is not None]
        # A sample that failed before it had tokens has no length.
        sampled = [t for t in trajectories if t.segments]
        self._tokens = sum(t.total_length for t in trajectories)
        self.values |= {
            "reward/mean": mean(rewards),
            "reward/std": deviation(rewards),
            "reward/failed": float(sum(t.reward is None for t in trajectories)),
            "score/mean": mean(scores),
            "rollout/samples": float(len(trajectories)),
            "rollout/tokens": float(self._tokens),
            "rollout/response_length": mean([t.response_length for t in sampled]),
            "rollout/truncated": mean([float(t.truncated) for t in sampled]),
            "rollout/prompt_cut": float(sum(t.prompt_tokens_cut > 0 for t in trajectories)),
        }
        for name in sorted({name for t in trajectories for name in t.extra_logs}):
            self.values[f"extra/{name}"] = mean([t.extra_logs[name] for t in trajectories if name in t.extra_logs])

    def add_logprob_gap(self, scored: Experience | None) -> None:
        """Compares the engine's log-probs with the trainer's on the probe samples; None where no probe fitted."""
        if scored is None:
            return
        batch = scored.batch
        gap = (batch.token_fields["rollout_logprobs"] - batch.token_fields["old_logprobs"]).abs()[batch.action_mask]
        if gap.numel():
            self.values["sync/logprob_gap"] = gap.mean().item()
            self.values["sync/logprob_gap_max"] = gap.max().item()

    def add_experience(self, experience: Experience, estimator: KLEstimator, shaping: RewardShaping) -> None:
        """Takes the KL to the reference over the tokens that are trained, not clamped, and what shaping did.

        Without ``old_logprobs`` it is the update that measures the KL.
        """
        batch = experience.batch
        if shaping.stop_properly_coef is not None or shaping.overlong_buffer is not None:
            self.values["reward/shaped_mean"] = shaped_rewards(experience.trajectories, shaping).mean().item()
        if {"old_logprobs", "ref_logprobs"} <= batch.token_fields.keys():
            fields = batch.token_fields
            kl = estimate_kl(fields["old_logprobs"] - fields["ref_logprobs"], estimator)
            self.values["kl/reference"] = kl[batch.action_mask].double().mean().item()

    def add_filter(self, kept: int, dropped: int) -> None:
        """Takes the groups that dynamic filtering kept and took out."""
        self.values["filter/dropped_groups"] = float(dropped)
        self.values["filter/pass_rate"] = kept / (kept + dropped) if kept + dropped else math.nan

    def add_correction(self, sums: MetricSums) -> None:
        """Takes how far the engine's probabilities lie from the trainer's, and what the correction did."""
        means = sums.means()
        self.values |= {
            "correction/touched": means["correction_touched"],
            "correction/weight": means["correction_weight"],
            "correction/rollout_minus_old": means["rollout_minus_old"],
            "correction/ratio_max": float(sums.maxima["correction_ratio"]),
        }

    def finish(self, seconds: float) -> None:
        """Closes the step.

        Args:
            seconds: that the whole step took.
        """
        if self.actor.steps:
            self.values |= self._policy()
        if self.critic.steps:
            self.values |= self._critic()
        self.values |= {
            "time/step": seconds,
            "throughput/tokens_per_s": self._tokens / seconds,
            "throughput/response_tokens_per_s": sum(t.response_length for t in self.trajectories) / seconds,
        }

    def _policy(self) -> dict[str, float]:
        means = self.actor.sums.means()
        values = {
            "policy/loss": mean(self.actor.losses),
            "policy/ppo_kl": means.get("ppo_kl", math.nan),
            "policy/clip_fraction": means.get("clip_fraction", math.nan),
            "policy/ratio_mean": means.get("ratio_mean", math.nan),
        }
        values |= {f"policy/{name}": means[name] for name in ("kl_loss", "entropy") if name in means}
        if "kl_reference" in means:
            values["kl/reference"] = means["kl_reference"]
        return values | self.actor.summary("actor")

    def _critic(self) -> dict[str, float]:
        means = self.critic.sums.means()
        values = {
            "critic/loss": mean(self.critic.losses),
            "critic/clip_fraction": means["value_clip_fraction"],
            "critic/value_mean": means["value_mean"],
            "critic/return_mean": means["return_mean"],
            "critic/explained_variance": explained_variance(means),
        }
        return values | self.critic.summary("critic")
