"""The RL loop: prompts, rollout, rewards, experience, update, weights back to the engines."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from openrlhf.algorithms.kl import adapt_kl_coef
from openrlhf.config import AlgoConfig
from openrlhf.data.trajectory import Trajectory
from openrlhf.tracking.progress import Console
from openrlhf.trainer.evaluation import Evaluator
from openrlhf.trainer.experience import (
    Budget,
    Experience,
    RewardShaping,
    add_advantages,
    add_correction,
    build_experience,
    deal,
)
from openrlhf.trainer.instruments import StepTracer, TraceSettings, usage_metrics
from openrlhf.trainer.rl_metrics import StepMetrics
from openrlhf.trainer.sampling import Collected, RolloutCollector
from openrlhf.trainer.scoring import RewardScorer
from openrlhf.trainer.turns import DeviceTurns
from openrlhf.trainer.updates import Updater
from openrlhf.trainer.workers import Dealt, WorkerGroup
from openrlhf.utils.errors import RunError

MAX_BARREN_STEPS = 3
"""Steps in a row without one sample that can be trained on, after which a run stops."""


@dataclass
class Position:
    """Where a run stands.

    Attributes:
        step: rollout steps done.
        updates: optimizer steps of the actor done.
        kl_coef: coefficient of the KL to the reference.
    """

    step: int = 0
    updates: int = 0
    kl_coef: float = 0.0


@dataclass(frozen=True)
class LoopSettings:
    """The parts of the settings that the loop needs.

    Attributes:
        shaping: of rewards.
        temperature: that samples are drawn at.
        budget: of one forward for log-probs and values.
        timeout: seconds that one phase may take.
        eval_steps: rollout steps between evaluations.
        on_policy_samples: up to so many samples make one optimizer step whose own forward gives the old log-probs; 0
            where they are needed before it.
        epochs: passes of the optimizer over the samples of a rollout.
        trace: steps that the ranks that train are traced in.
        gap_limit: nats; a larger mean difference of the log-probs of engine and trainer is no rounding.
    """

    algo: AlgoConfig
    shaping: RewardShaping
    temperature: float
    budget: Budget
    pad_token_id: int
    timeout: float
    eval_steps: int = -1
    on_policy_samples: int = 0
    epochs: int = 1
    trace: TraceSettings | None = None
    gap_limit: float = math.inf


@dataclass(frozen=True)
class Models:
    """The groups that score tokens.

    Attributes:
        ref: of a reference model; None where there is none, or the actor answers for it.
        reference_below_adapters: the actor does, with its adapters off.
    """

    actor: WorkerGroup
    ref: WorkerGroup | None = None
    critic: WorkerGroup | None = None
    reference_below_adapters: bool = False

    @property
    def reference(self) -> WorkerGroup | None:
        """The group that answers for the reference model; None without a reference."""
        return self.actor if self.reference_below_adapters else self.ref

    @property
    def groups(self) -> list[WorkerGroup]:
        """All that are there."""
        return [group for group in (self.actor, self.ref, self.critic) if group is not None]

    @property
    def training(self) -> list[WorkerGroup]:
        """Those with an optimizer."""
        return [group for group in (self.actor, self.critic) if group is not None]


class RLController:
    """Drives one RL run; owns no process and no file of its own."""

    def __init__(
        self,
        settings: LoopSettings,
        *,
        collector: RolloutCollector,
        turns: DeviceTurns,
        models: Models,
        scorer: RewardScorer,
        updater: Updater,
        evaluator: Evaluator | None,
        console: Console,
    ) -> None:
        self._settings, self._algo = settings, settings.algo
        self._collector = collector
        self._turns = turns
        self._models = models
        self._scorer = scorer
        self._updater = updater
        self._evaluator = evaluator
        self._console = console
        self._tracer = StepTracer(settings.trace, settings.timeout, console)
        self.position = Position(kl_coef=settings.algo.kl.init_coef)
        self._evaluated_at: int | None = None
        # Steps in a row of which nothing could be trained on.
        self._barren = 0
        self._told_of_gap = False

    @property
    def evaluated(self) -> bool:
        """Whether the present weights were evaluated, or cannot be."""
        return self._evaluator is None or self._evaluated_at == self.position.step

    def state_dict(self) -> dict[str, Any]:
        """Returns: all that ``load_state_dict`` needs to go on from here."""
        return {
            "position": vars(self.position).copy(),
            "evaluated_at": self._evaluated_at,
            "collector": self._collector.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to where ``state`` was taken."""
        self.position = Position(**state["position"])
        if self._algo.kl.target is None:
            # Only one that adapts has a history; else the flag says what it is from here on.
            self.position.kl_coef = self._algo.kl.init_coef
        self._evaluated_at = state["evaluated_at"]
        self._collector.load_state_dict(state["collector"])

    def run_step(self) -> StepMetrics | None:
        """Does one step. Returns: what was measured, and the samples; None where the run is at its end."""
        metrics = StepMetrics()
        start = time.monotonic()
        with self._phase("wake", metrics):
            self._turns.sampling(self.position.updates)
        with self._phase("rollout", metrics):
            collected = self._collector.collect()
        if collected is None or self._nothing_passed(collected):
            self._tracer.close(self.position.step)
            return None
        with self._phase("sleep", metrics):
            self._turns.training()
        if self._settings.trace is not None:
            self._tracer.begin(self.position.step + 1, self._models.training)
        if self._scorer.has_models:
            with self._phase("reward", metrics):
                self._scorer.add_rewards(collected.trajectories)
        kept = self._trainable(collected, metrics)
        if kept:
            self._learn(kept, collected.probes, metrics)
        self.position.step += 1
        if self._settings.eval_steps > 0 and self.position.step % self._settings.eval_steps == 0:
            with self._phase("evaluation", metrics):
                metrics.values |= self.evaluate()
        metrics.finish(time.monotonic() - start)
        self._tracer.end(self.position.step)
        return metrics

    def _learn(self, kept: list[Trajectory], probes: list[Trajectory], metrics: StepMetrics) -> None:
        experience = build_experience(kept)
        with self._phase("logprobs", metrics):
            self._add_scores(experience)
            metrics.add_logprob_gap(self._score_probes(probes))
        self._tell_of_gap(metrics.values.get("sync/logprob_gap", 0.0))
        with self._phase("advantages", metrics):
            self._add_advantages(experience, metrics)
        with self._phase("update", metrics):
            self.position.updates += self._updater.run(experience, self.position.step, self.position.kl_coef, metrics)
        with self._phase("sync", metrics):
            metrics.values["sync/bytes"] = self.send_weights()
        self._measure(experience, metrics)
        self._adapt_kl(metrics, len(experience.trajectories))

    def send_weights(self) -> int:
        """Gives the engines the actor's weights. Returns: bytes sent to each engine."""
        return self._turns.send(self.position.updates)

    def hold_models(self) -> None:
        """Has the models where they can be saved from."""
        self._turns.training()

    def evaluate(self) -> dict[str, float]:
        """Returns: the metrics of an evaluation with the engines' present weights; none without evaluation data."""
        self._evaluated_at = self.position.step
        if self._evaluator is None:
            return {}
        self._turns.sampling(self.position.updates)
        return self._evaluator.run()

    def _nothing_passed(self, collected: Collected) -> bool:
        if collected.trajectories or not collected.dropped:
            return False
        self._console.warn(
            f"the data ended, and none of the last {len(collected.dropped)} samples lay in a group that "
            "--algo.dynamic_filtering_range lets pass; the run ends here"
        )
        return True

    def _trainable(self, collected: Collected, metrics: StepMetrics) -> list[Trajectory]:
        """The samples to train on; none where a step is passed over, which a run survives a few times."""
        samples = collected.all_samples()
        metrics.add_trajectories(samples)
        if self._algo.dynamic_filtering_enable:
            kept, dropped = (len({t.group_id for t in part}) for part in (collected.trajectories, collected.dropped))
            metrics.add_filter(kept, dropped)
        try:
            kept = trainable(collected.trajectories, self.position.step + 1)
        except RunError as error:
            self._barren += 1
            if self.position.updates == 0 or self._barren >= MAX_BARREN_STEPS:
                raise
            self._console.warn(str(error))
            return []
        self._barren = 0
        return kept

    def _add_scores(self, experience: Experience) -> None:
        models, timeout = self._models, self._settings.timeout
        fields = experience.batch.token_fields
        repeats = len(experience.trajectories) <= self._settings.on_policy_samples
        asked = [None if repeats else models.actor, models.reference, models.critic]
        old = None
        with self._console.phase("log-probs", total=sum(m is not None for m in asked), unit="models") as bar:
            if not repeats:
                old = self._logprobs(models.actor, experience)
                bar.update()
            if models.reference is not None:
                below = models.reference_below_adapters
                fields["ref_logprobs"] = self._logprobs(models.reference, experience, adapters=not below)
                bar.update()
            if models.critic is not None:
                dealt = self._dealt(models.critic, experience)
                fields["old_values"] = models.critic.values(experience.batch, dealt, timeout)
                bar.update()
        if old is not None:
            fields["old_logprobs"] = old

    def _dealt(self, group: WorkerGroup, experience: Experience) -> Dealt:
        rows = list(range(experience.batch.num_rows))
        return deal(experience.batch, rows, group.size, self._settings.budget, self._settings.pad_token_id)

    def _logprobs(self, group: WorkerGroup, experience: Experience, *, adapters: bool = True) -> torch.Tensor:
        settings, dealt = self._settings, self._dealt(group, experience)
        return group.logprobs(experience.batch, dealt, settings.temperature, settings.timeout, adapters=adapters)

    def _score_probes(self, probes: Sequence[Trajectory]) -> Experience | None:
        if not probes:
            return None
        experience = build_experience(probes)
        experience.batch.token_fields["old_logprobs"] = self._logprobs(self._models.actor, experience)
        return experience

    def _tell_of_gap(self, gap: float) -> None:
        if self._told_of_gap or not gap > self._settings.gap_limit:
            return
        self._told_of_gap = True
        self._console.warn(
            f"the log-probs of engine and trainer differ by {gap:.2g} nats in step {self.position.step + 1}, where "
            f"rounding gives less than {self._settings.gap_limit:g}: what is sampled is not what is trained. All "
            "weights arrived, so probably vLLM computes another model from this config.json than transformers does, or "
            "--vllm.extra has it compute with fewer bits"
        )

    def _add_advantages(self, experience: Experience, metrics: StepMetrics) -> None:
        add_advantages(experience, self._algo, self._settings.shaping, self.position.kl_coef)
        if self._algo.advantage.is_correction_enable:
            metrics.add_correction(add_correction(experience, self._algo.advantage))
        metrics.add_experience(experience, self._algo.kl.estimator, self._settings.shaping)
        if self._models.reference is not None:
            metrics.values["kl/coef"] = self.position.kl_coef

    def _measure(self, experience: Experience, metrics: StepMetrics) -> None:
        groups = [*self._models.groups, *self._scorer.groups]
        # A CPU has neither a memory of its own nor a peak that is known.
        usage = [(g.role, g.call("usage", timeout=self._settings.timeout)) for g in groups if g.device == "cuda"]
        metrics.values |= usage_metrics(usage, experience.batch.lengths.tolist(), self._settings.epochs)

    def _adapt_kl(self, metrics: StepMetrics, samples: int) -> None:
        kl = self._algo.kl
        if kl.target is not None:
            self.position.kl_coef = adapt_kl_coef(
                self.position.kl_coef, metrics.values["kl/reference"], kl.target, samples, kl.horizon
            )

    @contextmanager
    def _phase(self, name: str, metrics: StepMetrics) -> Iterator[None]:
        start = time.monotonic()
        yield
        if self._turns.in_use or name not in ("wake", "sleep"):
            metrics.values[f"time/{name}"] = time.monotonic() - start


def trainable(trajectories: Sequence[Trajectory], step: int) -> list[Trajectory]:
    """Returns: the samples that have a reward and at least one token of the policy.

    Raises: RunError with the most frequent reason, where there are none.
    """
    kept = [t for t in trajectories if t.reward is not None and t.response_length > 0]
    if not kept:
        reasons = Counter(t.failure or "the response is empty" for t in trajectories)
        reason, count = reasons.most_common(1)[0]
        raise RunError(
            f"none of the {len(trajectories)} samples of step {step} can be trained on; no weight was moved; "
            f"{count} of them: {reason}"
        )
    return kept
