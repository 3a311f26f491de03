"""The RL loop: prompts, rollout, experience, update, weights back to the engines."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from openrlhf.config import PPOConfig
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


class RLController:
    """Drives one RL run; owns no process and no file of its own."""

    def __init__(
        self,
        config: PPOConfig,
        *,
        prompts: PromptDataset,
        pool: RolloutPool,
        actor: WorkerGroup,
        ref: WorkerGroup | None,
        loss: PolicyLossSpec,
        pad_token_id: int,
        seeded: bool,
        console: Console,
    ) -> None:
        self._config = config
        self._prompts = prompts
        self._pool = pool
        self._actor = actor
        self._ref = ref
        self._loss = loss
        self._pad = pad_token_id
        self._seeded = seeded
        self._console = console
        self._timeout = config.train.step_timeout
        self._kl_coef = config.algo.kl.init_coef
        self.sampler = StatefulSampler(len(prompts), seed=config.train.seed)
        self.position = Position()

    def run_step(self) -> StepMetrics | None:
        """Does one step. Returns: what was measured, and the samples; None where the run is at its end."""
        indices = self._next_prompts()
        if not indices:
            return None
        metrics = StepMetrics()
        start = time.monotonic()
        with self._phase("rollout", metrics):
            trajectories, probes = self._rollout(indices)
        metrics.add_trajectories(trajectories)
        experience = build_experience(self._trainable(trajectories))
        with self._phase("logprobs", metrics):
            self._add_logprobs(experience)
            metrics.add_logprob_gap(probes, self._score_probes(probes))
        with self._phase("advantages", metrics):
            add_advantages(experience, self._config.algo, self._config.reward.clip_range, self._kl_coef)
        metrics.add_experience(experience, self._config.algo.kl.estimator)
        with self._phase("update", metrics):
            self._update(experience, metrics)
        with self._phase("sync", metrics):
            metrics.values["sync/bytes"] = self.send_weights()
        self.position.step += 1
        metrics.finish(time.monotonic() - start)
        return metrics

    def send_weights(self) -> int:
        """Gives the engines the actor's weights. Returns: bytes sent to each engine."""
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self._config.ds.param_dtype]
        version = self.position.updates
        engines = dict(zip(self._pool.names, self._pool.engines, strict=True))
        return self._actor.call("send_weights", engines, dtype, version, self._timeout, timeout=self._timeout)[0]

    def _next_prompts(self) -> list[int]:
        indices = self.sampler.next_batch(self._config.rollout.batch_size)
        if not indices and self.sampler.epoch + 1 < self._config.train.num_episodes:
            self.sampler.set_epoch(self.sampler.epoch + 1)
            indices = self.sampler.next_batch(self._config.rollout.batch_size)
        return indices

    def _rollout(self, indices: Sequence[int]) -> tuple[list[Trajectory], list[Trajectory]]:
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
        rollout, samples = self._config.rollout, self._config.rollout.n_samples_per_prompt
        first = self.position.groups
        self.position.groups += len(indices)
        prompts = [self._prompts[index] for index in indices]
        # The nucleus of top_p renormalises log-probs, so what is compared with the trainer is sampled from all tokens.
        probe_tokens = min(_PROBE_TOKENS, rollout.max_new_tokens or _PROBE_TOKENS)
        for number, prompt in enumerate(prompts[:_PROBE_PROMPTS]):
            sampling = Sampling(rollout.temperature, 1.0, probe_tokens, self._seed(first + number, samples), True)
            yield GroupRequest(-1 - number, prompt, 1, sampling, probe=True)
        for group, prompt in enumerate(prompts, start=first):
            sampling = Sampling(
                rollout.temperature, rollout.top_p, rollout.max_new_tokens, self._seed(group, samples), False
            )
            yield GroupRequest(group, prompt, samples, sampling)

    def _seed(self, group: int, samples: int) -> int | None:
        return (self._config.train.seed * 2**40 + group * samples) % 2**62 if self._seeded else None

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
        train = self._config.train
        if train.dynamic_batch_enable:
            return Budget(None, max_tokens or train.max_tokens_per_gpu)
        return Budget(micro_batch_size, None)

    def _logprobs(self, group: WorkerGroup, experience: Experience) -> torch.Tensor:
        rollout = self._config.rollout
        budget = self._budget(rollout.micro_batch_size, rollout.max_tokens_per_gpu)
        rows = range(experience.batch.num_rows)
        dealt = deal(experience.batch, list(rows), group.size, budget, self._pad)
        return group.logprobs(experience.batch, dealt, rollout.temperature, self._timeout)

    def _add_logprobs(self, experience: Experience) -> None:
        fields = experience.batch.token_fields
        with self._console.phase("log-probs", total=1 + (self._ref is not None), unit="models") as bar:
            old = self._logprobs(self._actor, experience)
            bar.update()
            if self._ref is not None:
                fields["ref_logprobs"] = self._logprobs(self._ref, experience)
                bar.update()
        fields["old_logprobs"] = old

    def _score_probes(self, probes: Sequence[Trajectory]) -> Experience:
        experience = build_experience(probes)
        experience.batch.token_fields["old_logprobs"] = self._logprobs(self._actor, experience)
        return experience

    def _update(self, experience: Experience, metrics: StepMetrics) -> None:
        train = self._config.train
        generator = torch.Generator().manual_seed(train.seed + self.position.step)
        total = len(experience.trajectories)
        sizes = split_updates(total, train.batch_size)
        with self._console.phase("update", total=len(sizes) * train.max_epochs, unit="steps") as bar:
            for _ in range(train.max_epochs):
                order = torch.randperm(total, generator=generator).tolist()
                for size in sizes:
                    chosen, order = order[:size], order[size:]
                    self._optimizer_step(experience, sorted(chosen), metrics)
                    bar.update()

    def _optimizer_step(self, experience: Experience, chosen: list[int], metrics: StepMetrics) -> None:
        rows = experience.rows_of(chosen)
        budget = self._budget(self._config.train.micro_batch_size, self._config.train.max_tokens_per_gpu)
        batches, _ = deal(experience.batch, rows, self._actor.size, budget, self._pad)
        units = denominator(experience, rows, self._loss.aggregation)
        shares = [StepShare(share, units, self._kl_coef) for share in batches]
        results = self._actor.call("update", self._loss, timeout=self._timeout, per_rank=shares)
        metrics.add_update(results)
        self.position.updates += 1

    @contextmanager
    def _phase(self, name: str, metrics: StepMetrics) -> Iterator[None]:
        start = time.monotonic()
        yield
        metrics.values[f"time/{name}"] = time.monotonic() - start
