"""Reinforcement learning on Ray, vLLM and DeepSpeed: what `train_ppo_ray` runs."""

from __future__ import annotations

import os
from typing import Any

import ray

from openrlhf.config import PPOConfig, to_flags_yaml
from openrlhf.config.errors import ConfigError
from openrlhf.data.batching import planned_updates
from openrlhf.data.prompts import PromptDataset
from openrlhf.data.sources import load_dataset_mix
from openrlhf.models.loading import load_tokenizer
from openrlhf.rollout.actor import AgentSpec, RolloutActor
from openrlhf.rollout.engine_spec import EngineSpec, cpu_cache_bytes
from openrlhf.rollout.pool import RolloutPool
from openrlhf.tracking.progress import Console
from openrlhf.trainer.cluster import Place, place_roles, ray_session, role_sizes
from openrlhf.trainer.controller import RLController
from openrlhf.trainer.policy_update import PolicyLossSpec
from openrlhf.trainer.rl_outputs import RLOutputs
from openrlhf.trainer.workers import ModelSpec, WorkerGroup
from openrlhf.utils.supervise import Supervisor

_ENGINE_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_CPU_SEQUENCES, _GPU_SEQUENCES = 128, 512
_CLOSE_TIMEOUT_S = 60.0


def run(config: PPOConfig) -> None:
    """Trains a policy.

    Raises:
        ConfigError, DataError: the input cannot be used.
        RunError: a worker died, failed or did not answer; the last checkpoint is whole.
    """
    tokenizer = load_tokenizer(
        config.actor.model_name_or_path,
        use_fast=not config.data.disable_fast_tokenizer,
        trust_remote_code=config.trust_remote_code,
    )
    prompts = _load_prompts(config, tokenizer)
    total_steps = config.train.num_episodes * -(-len(prompts) // config.rollout.batch_size)
    console = Console(total_steps)
    with ray_session(config) as device:
        on_gpu = device == "cuda"
        supervisor = Supervisor()
        console.note(f"starting {', '.join(f'{n} {role}' for role, n in role_sizes(config).items())} on Ray")
        places = place_roles(config, on_gpu=on_gpu)
        # The engines take the longest to start, so they start first and the models load beside them.
        pool, engines_ready = _start_engines(config, places["engine"], supervisor, on_gpu, len(prompts))
        actor, ref = _start_models(config, places, supervisor, on_gpu, len(prompts))
        _check_nodes(supervisor.get_all(engines_ready, what="its start", timeout=config.vllm.start_timeout), on_gpu)
        controller = RLController(
            config,
            prompts=prompts,
            pool=pool,
            actor=actor,
            ref=ref,
            loss=loss_spec(config),
            pad_token_id=tokenizer.pad_token_id,
            seeded=not on_gpu or config.train.full_determinism_enable,
            console=console,
        )
        outputs = RLOutputs(config, controller, actor, tokenizer, console, to_flags_yaml(config))
        _train(controller, outputs)
        _close(pool, [actor] + ([ref] if ref else []), supervisor)


def _train(controller: RLController, outputs: RLOutputs) -> None:
    try:
        outputs.resume()
        controller.send_weights()
        while (metrics := controller.run_step()) is not None:
            outputs.after_step(metrics)
        outputs.finish()
    finally:
        outputs.close()


def loss_spec(config: PPOConfig) -> PolicyLossSpec:
    """Returns: the policy's loss that the settings ask for."""
    actor, kl = config.actor, config.algo.kl
    low, high = actor.eps_clip_low_high or (actor.eps_clip, actor.eps_clip)
    return PolicyLossSpec(
        clip_low=low,
        clip_high=high,
        dual_clip=actor.dual_clip,
        aggregation=config.algo.loss_aggregation or "token_mean",
        constant=float(config.rollout.max_new_tokens or config.data.max_len),
        kl_estimator=kl.estimator if kl.use_loss and kl.init_coef > 0 else None,
        temperature=config.rollout.temperature,
    )


def _load_prompts(config: PPOConfig, tokenizer: Any) -> PromptDataset:
    rows = load_dataset_mix(
        config.data.prompt_dataset,
        config.data.prompt_probs,
        split=config.data.prompt_split,
        max_samples=config.data.max_samples,
        seed=config.train.seed,
        use_ms=config.use_ms,
    )
    return PromptDataset(
        rows,
        tokenizer,
        input_key=config.data.input_key,
        label_key=config.data.label_key,
        input_template=config.data.input_template,
        apply_chat_template=config.data.apply_chat_template,
    )


def _start_engines(
    config: PPOConfig, places: list[Place], supervisor: Supervisor, on_gpu: bool, num_prompts: int
) -> tuple[RolloutPool, dict[str, Any]]:
    samples = min(num_prompts, config.rollout.batch_size) * config.rollout.n_samples_per_prompt
    per_engine = -(-samples // config.vllm.num_engines)
    sequences = min(per_engine, _GPU_SEQUENCES if on_gpu else _CPU_SEQUENCES)
    cache = None
    if not on_gpu:
        cache = cpu_cache_bytes(
            config.actor.model_name_or_path,
            sequences * config.data.max_len,
            config.ds.param_dtype,
            config.trust_remote_code,
        )
    spec = EngineSpec(
        model=config.actor.model_name_or_path,
        dtype=_ENGINE_DTYPES[config.ds.param_dtype],
        max_model_len=config.data.max_len,
        seed=config.train.seed,
        max_num_seqs=sequences,
        tensor_parallel_size=config.vllm.tensor_parallel_size,
        enforce_eager=config.vllm.enforce_eager,
        enable_prefix_caching=config.vllm.enable_prefix_caching,
        gpu_memory_utilization=config.vllm.gpu_memory_utilization,
        kv_cache_bytes=cache,
        trust_remote_code=config.trust_remote_code,
        extra=config.vllm.extra,
    )
    agent = AgentSpec(
        tokenizer=config.actor.model_name_or_path,
        use_fast_tokenizer=not config.data.disable_fast_tokenizer,
        trust_remote_code=config.trust_remote_code,
        reward_file=config.reward.remote_url,
        reward_timeout=config.reward.timeout,
        reward_retries=config.reward.max_retries,
        reward_workers=config.reward.workers,
        sample_timeout=config.train.step_timeout,
    )
    remote = ray.remote(RolloutActor)
    engines = [remote.options(**place.options(), max_concurrency=100_000).remote(spec, agent) for place in places]
    pool = RolloutPool(engines, supervisor, samples_in_flight=2 * sequences, timeout=config.train.step_timeout)
    for name, engine in zip(pool.names, engines, strict=True):
        supervisor.watch(name, engine.watch.remote())
    return pool, {name: engine.start.remote() for name, engine in zip(pool.names, engines, strict=True)}


def _start_models(
    config: PPOConfig, places: dict[str, list[Place]], supervisor: Supervisor, on_gpu: bool, num_prompts: int
) -> tuple[WorkerGroup, WorkerGroup | None]:
    def spec(role: str, **training: Any) -> ModelSpec:
        return ModelSpec(
            model=config.actor.model_name_or_path,
            ds=config.ds,
            device="cuda" if on_gpu else "cpu",
            trust_remote_code=config.trust_remote_code,
            seed=config.train.seed,
            threads=max(1, (os.cpu_count() or 1) // len(places[role])),
            full_determinism=config.train.full_determinism_enable,
            timeout=config.train.step_timeout,
            **training,
        )

    groups = {role: WorkerGroup(role, places[role], supervisor) for role in ("actor", "ref") if role in places}
    groups["actor"].setup(
        spec(
            "actor",
            optimizer=config.actor.optimizer,
            total_steps=planned_updates(
                num_prompts=num_prompts,
                rollout_batch_size=config.rollout.batch_size,
                samples_per_prompt=config.rollout.n_samples_per_prompt,
                train_batch_size=config.train.batch_size,
                num_episodes=config.train.num_episodes,
                max_epochs=config.train.max_epochs,
            ),
            gradient_checkpointing=config.actor.gradient_checkpointing_enable,
            gradient_checkpointing_reentrant=config.actor.gradient_checkpointing_reentrant,
        ),
        config.train.step_timeout,
    )
    if "ref" in groups:
        groups["ref"].setup(spec("ref"), config.train.step_timeout)
    return groups["actor"], groups.get("ref")


def _check_nodes(started: dict[str, dict[str, Any]], on_gpu: bool) -> None:
    nodes = {info["node"] for info in started.values()}
    if len(nodes) > 1 and not on_gpu:
        raise ConfigError(
            f"the engines stand on {len(nodes)} nodes, and weights travel through one node's shared memory on the CPU: "
            "run on one node, or lower --vllm.num_engines"
        )


def _close(pool: RolloutPool, groups: list[WorkerGroup], supervisor: Supervisor) -> None:
    for group in groups:
        group.call("close", timeout=_CLOSE_TIMEOUT_S)
    stops = {name: engine.stop.remote() for name, engine in zip(pool.names, pool.engines, strict=True)}
    supervisor.get_all(stops, what="its end", timeout=_CLOSE_TIMEOUT_S)
