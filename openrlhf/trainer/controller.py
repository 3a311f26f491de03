"""The RL loop: prompts, rollout, experience, update, weights back to the engines."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from openrlhf.config import AlgoConfig, PPOTrainConfig, RolloutConfig
from openrlhf.data.batching import split_updates
from openrlhf.data.prompts import PromptDataset
from openrlhf.data.sampler import StatefulSampler
from openrlhf.data.trajectory import Trajectory
from openrlhf.rollout.actor import GroupRequest, Sampling
from openrlhf.rollout.pool import RolloutPool
from openrlhf.tracking.progress import Console
from openrlhf.trainer.experience import Budget, Experience, add_advantages, build_experience, deal, denominator
from openrlhf.trainer.policy_update import PolicyLossSpec, StepShare
from openrlhf.trainer.rl_metrics import StepMetrics
from openrlhf.trainer.workers import WorkerGroup
from openrlhf.utils.errors import RunError

SENDER_SHARE = 0.9
"""Of --train.step_timeout, what the sender of weights waits for one answer of an engine."""

_PROBE_PROMPTS = 8
_PROBE_TOKENS = 32


@dataclass
class Position:
    """Where a run stands.

    Attributes:
        step: rollout steps done.
        updates: optimizer steps done.
        groups: prompts sampled so far; numbers the groups, and seeds their samples.
    """

    step: int = 0
    updates: int = 0
    groups: int = 0


@dataclass(frozen=True)
class LoopSettings:
    """The parts of the settings that the loop needs.

    Attributes:
        loss: the policy's loss, which the ranks are handed.
        reward_clip: bounds of a trajectory's scalar.
        engine_dtype: of the weights that are sent.
        seeded: every sample has a seed of its own, so that the run can be repeated.
    """

    rollout: RolloutConfig
    train: PPOTrainConfig
    algo: AlgoConfig
    loss: PolicyLossSpec
    reward_clip: tuple[float, float]
    engine_dtype: torch.dtype
    pad_token_id: int
    seeded: bool


class RLController:
    """Drives one RL run; owns no process and no file of its own."""

    def __init__(
        self,
        settings: LoopSettings,
        prompts: PromptDataset,
        *,
        pool: RolloutPool,
        actor: WorkerGroup,
        ref: WorkerGroup | None,
        console: Console,
    ) -> None:
        self._rollout, self._train, self._algo = settings.rollout, settings.train, settings.algo
        self._settings = settings
        self._prompts = prompts
        self._pool = pool
        self._actor = actor
        self._ref = ref
        self._console = console
        self._timeout = settings.train.step_timeout
        self._kl_coef = settings.algo.kl.init_coef
        self.sampler = StatefulSampler(len(prompts), seed=settings.train.seed)
        self.position = Position()

    def run_step(self) -> StepMetrics | None:
        """Does one step. Returns: what was measured, and the samples; None where the run is at its end."""
        indices = self._next_prompts()
        if not indices:
            return None
        metrics = StepMetrics()
        start = time.monotonic()
        with self._phase("rollout", metrics):
            trajectories, probes = self._sample(indices)
        metrics.add_trajectories(trajectories)
        experience = build_experience(self._trainable(trajectories))
        with self._phase("logprobs", metrics):
            self._add_logprobs(experience)
            metrics.add_logprob_gap(self._score_probes(probes))
        with self._phase("advantages", metrics):
            add_advantages(experience, self._algo, self._settings.reward_clip, self._kl_coef)
        metrics.add_experience(experience, self._algo.kl.estimator)
        with self._phase("update", metrics):
            self._update(experience, metrics)
        with self._phase("sync", metrics):
            metrics.values["sync/bytes"] = self.send_weights()
        self.position.step += 1
        metrics.finish(time.monotonic() - start)
        return metrics

    def send_weights(self) -> int:
        """Gives the engines the actor's weights. Returns: bytes sent to each engine."""
        engines = dict(zip(self._pool.names, self._pool.engines, strict=True))
        # The sender gives up first, since it knows which engine it waits for.
        patience = SENDER_SHARE * self._timeout
        return self._actor.call(
            "send_weights", engines, self._settings.engine_dtype, self.position.updates, patience, timeout=self._timeout
        )[0]

    def _next_prompts(self) -> list[int]:
        indices = self.sampler.next_batch(self._rollout.batch_size)
        if not indices and self.sampler.epoch + 1 < self._train.num_episodes:
            self.sampler.set_epoch(self.sampler.epoch + 1)
            indices = self.sampler.next_batch(self._rollout.batch_size)
        return indices

    def _sample(self, indices: Sequence[int]) -> tuple[list[Trajectory], list[Trajectory]]:
        requests = list(self._requests(indices))
        trajectories: list[Trajectory] = []
        total = sum(request.num_samples for request in requests if not request.probe)
        with self._console.phase("rollout", total=total, unit="samples") as bar:
            for group in self._pool.stream(requests):
                trajectories += group
                bar.update(sum(1 for trajectory in group if trajectory.group_id >= 0))
        # Groups arrive as they finish; a fixed order keeps a seeded run repeatable.
        trajectories.sort(key=lambda trajectory: (trajectory.group_id, trajectory.sample_id))
        probes = [trajectory for trajectory in trajectories if trajectory.group_id < 0]
        return trajectories[len(probes) :], probes

    def _requests(self, indices: Sequence[int]) -> Iterator[GroupRequest]:
        rollout = self._rollout
        seed = self._train.seed if self._settings.seeded else None
        first = self.position.groups
        self.position.groups += len(indices)
        prompts = [self._prompts[index] for index in indices]
        # The nucleus of top_p renormalises log-probs, so what is compared with the trainer is sampled from all tokens.
        length = min(_PROBE_TOKENS, rollout.max_new_tokens or _PROBE_TOKENS)
        probing = Sampling(rollout.temperature, 1.0, length, seed, logprobs=True)
        for group, prompt in enumerate(prompts[:_PROBE_PROMPTS], start=first):
            yield GroupRequest(-1 - group, prompt, 1, probing, probe=True)
        sampling = Sampling(rollout.temperature, rollout.top_p, rollout.max_new_tokens, seed, logprobs=False)
        for group, prompt in enumerate(prompts, start=first):
            yield GroupRequest(group, prompt, rollout.n_samples_per_prompt, sampling)

    def _trainable(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        kept = [t for t in trajectories if t.reward is not None and t.response_length > 0]
        if not kept:
            reasons = Counter(t.failure or "the response is empty" for t in trajectories)
            reason, count = reasons.most_common(1)[0]
            raise RunError(
                f"none of the {len(trajectories)} samples of step {self.position.step + 1} can be trained on; "
                f"{count} of them: {reason}"
            )
        return kept

    def _budget(self, micro_batch_size: int, max_tokens: int | None) -> Budget:
        if self._train.dynamic_batch_enable:
            return Budget(None, max_tokens or self._train.max_tokens_per_gpu)
        return Budget(micro_batch_size, None)

    def _logprobs(self, group: WorkerGroup, experience: Experience) -> torch.Tensor:
        budget = self._budget(self._rollout.micro_batch_size, self._rollout.max_tokens_per_gpu)
        rows = list(range(experience.batch.num_rows))
        dealt = deal(experience.batch, rows, group.size, budget, self._settings.pad_token_id)
        return group.logprobs(experience.batch, dealt, self._rollout.temperature, self._timeout)

    def _add_logprobs(self, experience: Experience) -> None:
        fields = experience.batch.token_fields
        with self._console.phase("log-probs", total=1 + (self._ref is not None), unit="models") as bar:
            old = self._logprobs(self._actor, experience)
            bar.update()
            if self._ref is not None:
                fields["ref_logprobs"] = self._logprobs(self._ref, experience)
                bar.update()
        fields["old_logprobs"] = old

    def _score_probes(self, probes: Sequence[Trajectory]) -> Experience | None:
        if not probes:
            return None
        experience = build_experience(probes)
        experience.batch.token_fields["old_logprobs"] = self._logprobs(self._actor, experience)
        return experience

    def _update(self, experience: Experience, metrics: StepMetrics) -> None:
        train = self._train
        total = len(experience.trajectories)
        sizes = split_updates(total, train.batch_size)
        with self._console.phase("update", total=len(sizes) * train.max_epochs, unit="steps") as bar:
            for epoch in range(train.max_epochs):
                order = np.random.default_rng([train.seed, self.position.step, epoch]).permutation(total).tolist()
                for size in sizes:
                    chosen, order = order[:size], order[size:]
                    self._optimizer_step(experience, sorted(chosen), metrics)
                    bar.update()

    def _optimizer_step(self, experience: Experience, chosen: list[int], metrics: StepMetrics) -> None:
        rows = experience.rows_of(chosen)
        budget = self._budget(self._train.micro_batch_size, self._train.max_tokens_per_gpu)
        batches, _ = deal(experience.batch, rows, self._actor.size, budget, self._settings.pad_token_id)
        units = denominator(experience, rows, self._settings.loss.aggregation)
        shares = [StepShare(share, units, self._kl_coef) for share in batches]
        results = self._actor.call("update", self._settings.loss, timeout=self._timeout, per_rank=shares)
        metrics.add_update(results)
        if results[0].warning is not None:
            self._console.warn(results[0].warning)
        self.position.updates += 1

    @contextmanager
    def _phase(self, name: str, metrics: StepMetrics) -> Iterator[None]:
        start = time.monotonic()
        yield
        metrics.values[f"time/{name}"] = time.monotonic() - start
