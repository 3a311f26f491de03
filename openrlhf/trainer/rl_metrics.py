"""What one RL step is measured by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from openrlhf.algorithms.kl import KLEstimator, estimate_kl
from openrlhf.algorithms.policy_loss import MetricSums
from openrlhf.backends.base import StepResult
from openrlhf.data.trajectory import Trajectory
from openrlhf.trainer.experience import Experience
from openrlhf.trainer.policy_update import RankResult


def mean(values: Sequence[float]) -> float:
    """Returns: the mean, NaN of nothing."""
    return math.fsum(values) / len(values) if values else math.nan


def deviation(values: Sequence[float]) -> float:
    """Returns: the unbiased standard deviation, NaN of fewer than two values."""
    return torch.tensor(values, dtype=torch.float64).std().item() if len(values) > 1 else math.nan


@dataclass
class StepMetrics:
    """Collects the numbers of one step under their names (docs/metrics.md).

    Attributes:
        values: by name, finished numbers.
        trajectories: all samples of the step, those that could not be trained on too.
    """

    values: dict[str, float] = field(default_factory=dict)
    trajectories: list[Trajectory] = field(default_factory=list)
    _tokens: int = 0
    _losses: list[float] = field(default_factory=list)
    _steps: list[StepResult] = field(default_factory=list)
    _sums: MetricSums = field(default_factory=lambda: MetricSums({}, 0.0))

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

    def add_experience(self, experience: Experience, estimator: KLEstimator) -> None:
        """Takes the KL to the reference over the tokens that are trained, not clamped."""
        batch = experience.batch
        if "ref_logprobs" in batch.token_fields:
            fields = batch.token_fields
            kl = estimate_kl(fields["old_logprobs"] - fields["ref_logprobs"], estimator)
            self.values["kl/reference"] = kl[batch.action_mask].double().mean().item()

    def add_update(self, results: Sequence[RankResult]) -> None:
        """Takes one optimizer step as all ranks report it: parts of the loss and sums add up, the norm is shared."""
        self._steps.append(results[0].step)
        self._losses.append(math.fsum(result.loss for result in results))
        for result in results:
            self._sums = self._sums + MetricSums(result.sums, result.count)

    def finish(self, seconds: float) -> None:
        """Closes the step.

        Args:
            seconds: that the whole step took.
        """
        means = self._sums.means()
        done = [step for step in self._steps if not step.skipped]
        self.values |= {
            "policy/loss": mean(self._losses),
            "policy/ppo_kl": means.get("ppo_kl", math.nan),
            "policy/clip_fraction": means.get("clip_fraction", math.nan),
            "policy/ratio_mean": means.get("ratio_mean", math.nan),
            "actor/grad_norm": mean([step.grad_norm for step in done]),
            "actor/lr": self._steps[-1].lr,
            "actor/updates": float(len(done)),
            "actor/skipped_steps": float(len(self._steps) - len(done)),
            "time/step": seconds,
            "throughput/tokens_per_s": self._tokens / seconds,
            "throughput/response_tokens_per_s": sum(t.response_length for t in self.trajectories) / seconds,
        }
        if "kl_loss" in means:
            self.values["policy/kl_loss"] = means["kl_loss"]
