"""Starts the parts of an RL run on the places that they were given: engines, and the groups of models."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import ray

from openrlhf.config import PPOConfig
from openrlhf.config.api_keys import client_key
from openrlhf.config.checks_rl import SAMPLE_SHARE
from openrlhf.models.loading import DTYPES, load_tokenizer
from openrlhf.models.value_head import HeadSpec
from openrlhf.rollout.actor import AgentSpec, RolloutActor
from openrlhf.rollout.engine_spec import EngineSpec, cpu_cache_bytes
from openrlhf.rollout.pool import RolloutPool
from openrlhf.trainer.controller import Models
from openrlhf.trainer.placement import Place, reward_roles
from openrlhf.trainer.schedule import frozen_steps, step_updates
from openrlhf.trainer.scoring import RewardModel
from openrlhf.trainer.workers import ModelSpec, WorkerGroup
from openrlhf.utils.seeds import derive_seed
from openrlhf.utils.supervise import Supervisor

_CPU_SEQUENCES, _GPU_SEQUENCES = 128, 512


def make_engines(
    config: PPOConfig, places: list[Place], supervisor: Supervisor, on_gpu: bool, num_prompts: int
) -> RolloutPool:
    """Makes the processes of the engines, which ``start_engines`` has them start."""
    sequences = engine_sequences(config, num_prompts, on_gpu=on_gpu)
    spec, agent = _engine_spec(config, sequences, on_gpu), _agent_spec(config)
    remote = ray.remote(RolloutActor)
    engines = [
        remote.options(**place.options(), max_concurrency=100_000).remote(
            # Engines with one seed would draw the same numbers for requests that have none of their own.
            replace(spec, seed=derive_seed(config.train.seed, index) % 2**31),
            agent,
        )
        for index, place in enumerate(places)
    ]
    pool = RolloutPool(engines, supervisor, samples_in_flight=2 * sequences, timeout=config.train.step_timeout)
    for name, engine in zip(pool.names, engines, strict=True):
        supervisor.watch(name, engine.watch.remote())
    return pool


def start_engines(config: PPOConfig, pool: RolloutPool, supervisor: Supervisor, on_gpu: bool) -> dict[str, Any]:
    """Starts the engines; those that share a GPU one after the other, since each measures what is free on it.

    Returns: by engine name, what will say that it has started.
    """
    ready: dict[str, Any] = {}
    named = list(zip(pool.names, pool.engines, strict=True))
    # Engines of one wave stand on different GPUs.
    wave = len(named) // config.engines_per_place if on_gpu else len(named)
    for first in range(0, len(named), wave):
        supervisor.get_all(ready, what="its start", timeout=config.vllm.start_timeout)
        ready |= {name: engine.start.remote() for name, engine in named[first : first + wave]}
    return ready


def engine_sequences(config: PPOConfig, num_prompts: int, *, on_gpu: bool) -> int:
    """Returns: requests that one engine works on at once."""
    samples = min(num_prompts, config.rollout.batch_size) * config.rollout.n_samples_per_prompt
    return min(-(-samples // config.vllm.num_engines), _GPU_SEQUENCES if on_gpu else _CPU_SEQUENCES)


def _engine_spec(config: PPOConfig, sequences: int, on_gpu: bool) -> EngineSpec:
    cache = None
    if not on_gpu:
        cache = cpu_cache_bytes(
            config.actor.model_name_or_path,
            sequences * config.data.max_len,
            config.ds.param_dtype,
            config.trust_remote_code,
        )
    return EngineSpec(
        model=config.actor.model_name_or_path,
        dtype=str(DTYPES[config.ds.param_dtype]).removeprefix("torch."),
        max_model_len=config.data.max_len,
        seed=config.train.seed,
        max_num_seqs=sequences,
        tensor_parallel_size=config.vllm.tensor_parallel_size,
        enforce_eager=config.vllm.enforce_eager,
        enable_prefix_caching=config.vllm.enable_prefix_caching or _shares_prompts(config, on_gpu),
        enable_sleep=engines_sleep(config, on_gpu=on_gpu),
        gpu_memory_utilization=config.vllm.gpu_memory_utilization,
        kv_cache_bytes=cache,
        trust_remote_code=config.trust_remote_code,
        extra=config.vllm.extra,
    )


def engines_sleep(config: PPOConfig, *, on_gpu: bool) -> bool:
    """Returns: whether engines free their GPU memory while others work; only those that share it have a reason to."""
    shares = config.train.colocate_all and not config.train.async_enable
    return on_gpu and shares and config.vllm.enable_sleep


def engine_share(config: PPOConfig) -> float:
    """Returns: of a card's memory, what its engines take at most."""
    # A cache of so many bytes or blocks is taken whatever the share of the engine is.
    if config.vllm.extra.keys() & {"kv_cache_memory_bytes", "num_gpu_blocks_override"}:
        return 1.0
    return config.engines_per_place * config.vllm.gpu_memory_utilization


def _shares_prompts(config: PPOConfig, on_gpu: bool) -> bool:
    """Whether the samples of a group reuse the cache of their prompt without being told to.

    A cached prompt changes the last bits of log-probs, so not where a run is to be repeated.
    """
    return on_gpu and config.rollout.n_samples_per_prompt > 1 and not config.train.full_determinism_enable


def _agent_spec(config: PPOConfig) -> AgentSpec:
    return AgentSpec(
        tokenizer=config.actor.model_name_or_path,
        use_fast_tokenizer=not config.data.disable_fast_tokenizer,
        trust_remote_code=config.trust_remote_code,
        agent_file=config.train.agent_func_path,
        reward_source=config.reward.remote_url,
        rewarded_by_model=bool(config.reward_models),
        reward_timeout=config.reward.timeout,
        reward_retries=config.reward.max_retries,
        reward_workers=config.reward.workers,
        sample_timeout=SAMPLE_SHARE * config.train.step_timeout,
        reward_key=client_key(config.reward.api_key_env),
    )


class ModelLauncher:
    """Starts the groups of one run."""

    def __init__(
        self, config: PPOConfig, places: dict[str, list[Place]], supervisor: Supervisor, *, on_gpu: bool
    ) -> None:
        self._config = config
        self._places = places
        self._supervisor = supervisor
        self._device = "cuda" if on_gpu else "cpu"

    def start_models(self, num_prompts: int, pad_token_id: int) -> tuple[Models, list[dict[str, Any]]]:
        """Loads actor, reference model and critic.

        Args:
            num_prompts: that the run has, from which the schedule's length follows.

        Returns: the groups, and what each rank of the actor says of where it stands.
        """
        config = self._config
        updates = step_updates(config, num_prompts)
        frozen = frozen_steps(config)
        actor, ranks = self._start("actor", self._actor_spec(sum(updates[frozen:])))
        ref = critic = None
        if "ref" in self._places:
            path = config.actor.model_name_or_path
            ref, _ = self._start("ref", self._spec("ref", path, offload=config.ref.offload))
        if "critic" in self._places:
            critic, _ = self._start("critic", self._critic_spec(sum(updates), pad_token_id))
        return Models(actor, ref, critic, config.reference_below_adapters), ranks

    def start_reward_models(self, policy_tokenizer: Any) -> list[RewardModel]:
        """Loads the reward models."""
        config = self._config
        models = []
        for role, path in zip(reward_roles(config), config.reward_models, strict=True):
            tokenizer = load_tokenizer(
                path, use_fast=not config.data.disable_fast_tokenizer, trust_remote_code=config.trust_remote_code
            )
            head = HeadSpec(prefix=config.ds.value_head_prefix, pad_token_id=tokenizer.pad_token_id)
            group, _ = self._start(role, self._spec(role, path, head=head, offload=config.reward.offload))
            same = tokenizer.get_vocab() == policy_tokenizer.get_vocab()
            mean, std = 0.0, 1.0
            if config.reward.normalize_enable:
                mean, std = group.call("statistics", timeout=config.train.step_timeout)[0]
            models.append(RewardModel(group, None if same else tokenizer, mean, std))
        return models

    def _actor_spec(self, total_steps: int) -> ModelSpec:
        actor, train = self._config.actor, self._config.train
        return self._spec(
            "actor",
            actor.model_name_or_path,
            optimizer=actor.optimizer,
            total_steps=total_steps,
            gradient_checkpointing=actor.gradient_checkpointing_enable,
            gradient_checkpointing_reentrant=actor.gradient_checkpointing_reentrant,
            ema_beta=train.ema_beta if train.enable_ema else None,
        )

    def _critic_spec(self, total_steps: int, pad_token_id: int) -> ModelSpec:
        config = self._config
        path, fresh = critic_source(config)
        head = HeadSpec(
            prefix=config.ds.value_head_prefix, fresh=fresh, seed=config.train.seed, pad_token_id=pad_token_id
        )
        return self._spec(
            "critic",
            path,
            head=head,
            optimizer=config.critic.optimizer,
            total_steps=total_steps,
            gradient_checkpointing=config.actor.gradient_checkpointing_enable,
            gradient_checkpointing_reentrant=config.actor.gradient_checkpointing_reentrant,
        )

    def _spec(self, role: str, model: str, **more: Any) -> ModelSpec:
        config = self._config
        return ModelSpec(
            model=model,
            ds=config.ds,
            device=self._device,
            trust_remote_code=config.trust_remote_code,
            seed=config.train.seed,
            threads=max(1, (os.cpu_count() or 1) // len(self._places[role])),
            full_determinism=config.train.full_determinism_enable,
            timeout=config.train.step_timeout,
            **more,
        )

    def _start(self, role: str, spec: ModelSpec) -> tuple[WorkerGroup, list[dict[str, Any]]]:
        group = WorkerGroup(role, self._places[role], self._supervisor)
        return group, group.setup(spec, self._config.train.step_timeout)


def critic_source(config: PPOConfig) -> tuple[str, bool]:
    """Returns: where the critic's weights come from, and whether its head is drawn anew.

    Unset, the critic starts from the reward model with its head, or from the policy with a new one.
    """
    critic = config.critic
    if critic.model_name_or_path:
        return critic.model_name_or_path, critic.fresh_head
    if config.reward_models:
        return config.reward_models[0], critic.fresh_head
    return config.actor.model_name_or_path, True
