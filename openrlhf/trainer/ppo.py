"""Reinforcement learning on Ray, vLLM and DeepSpeed: what `train_ppo_ray` runs."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import ray

from openrlhf.config import PPOConfig, to_flags_yaml
from openrlhf.config.errors import ConfigError
from openrlhf.data.batching import planned_updates
from openrlhf.data.prompts import PromptDataset
from openrlhf.data.sources import load_dataset_mix
from openrlhf.models.loading import DTYPES, load_tokenizer
from openrlhf.rollout.actor import AgentSpec, RolloutActor
from openrlhf.rollout.engine_spec import EngineSpec, cpu_cache_bytes
from openrlhf.rollout.pool import RolloutPool
from openrlhf.tracking.progress import Console
from openrlhf.trainer.cluster import Place, place_roles, ray_session, role_sizes
from openrlhf.trainer.controller import LoopSettings, RLController
from openrlhf.trainer.policy_update import PolicyLossSpec
from openrlhf.trainer.rl_outputs import OutputSettings, RLOutputs
from openrlhf.trainer.workers import ModelSpec, WorkerGroup
from openrlhf.utils.errors import RunError
from openrlhf.utils.seeds import derive_seed
from openrlhf.utils.supervise import Supervisor

# Of --train.step_timeout, what one sample may take, so that a sample which hangs is dropped before the pool gives up.
_SAMPLE_SHARE = 0.8
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
        actor, ref, sender = _start_models(config, places, supervisor, on_gpu, len(prompts))
        engines = supervisor.get_all(engines_ready, what="its start", timeout=config.vllm.start_timeout)
        _check_nodes(sender, engines)
        settings = _loop_settings(config, tokenizer.pad_token_id, seeded=not on_gpu or _deterministic(config))
        controller = RLController(settings, prompts, pool=pool, actor=actor, ref=ref, console=console)
        outputs = RLOutputs(_output_settings(config, len(prompts)), controller, actor, tokenizer, console)
        _train(controller, outputs)
        try:
            _close(pool, [actor] + ([ref] if ref else []), supervisor)
        except RunError as error:
            # All results are written; how the workers go is no reason to call the run a failure.
            console.warn(str(error))


def _train(controller: RLController, outputs: RLOutputs) -> None:
    try:
        outputs.resume()
        controller.send_weights()
        while (metrics := controller.run_step()) is not None:
            outputs.after_step(metrics)
        outputs.finish()
    finally:
        outputs.close()


def _deterministic(config: PPOConfig) -> bool:
    return config.train.full_determinism_enable


def _loop_settings(config: PPOConfig, pad_token_id: int, *, seeded: bool) -> LoopSettings:
    return LoopSettings(
        rollout=config.rollout,
        train=config.train,
        algo=config.algo,
        loss=loss_spec(config),
        reward_clip=config.reward.clip_range,
        engine_dtype=DTYPES[config.ds.param_dtype],
        pad_token_id=pad_token_id,
        seeded=seeded,
    )


def _output_settings(config: PPOConfig, num_prompts: int) -> OutputSettings:
    fixed = {
        "prompts": num_prompts,
        "--train.seed": config.train.seed,
        "--train.batch_size": config.train.batch_size,
        "--train.max_epochs": config.train.max_epochs,
        "--train.num_episodes": config.train.num_episodes,
        "--rollout.batch_size": config.rollout.batch_size,
        "--rollout.n_samples_per_prompt": config.rollout.n_samples_per_prompt,
        "--actor.lr_scheduler": config.actor.optimizer.lr_scheduler,
        "--actor.adam.lr": config.actor.optimizer.adam.lr,
    }
    return OutputSettings(
        ckpt=config.ckpt,
        logger=config.logger,
        save_samples=config.rollout.save_samples,
        timeout=config.train.step_timeout,
        fixed=fixed,
        config_yaml=to_flags_yaml(config),
    )


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
        dtype=str(DTYPES[config.ds.param_dtype]).removeprefix("torch."),
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
        sample_timeout=_SAMPLE_SHARE * config.train.step_timeout,
    )
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
    return pool, {name: engine.start.remote() for name, engine in zip(pool.names, engines, strict=True)}


def _start_models(
    config: PPOConfig, places: dict[str, list[Place]], supervisor: Supervisor, on_gpu: bool, num_prompts: int
) -> tuple[WorkerGroup, WorkerGroup | None, dict[str, Any]]:
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
    ranks = groups["actor"].setup(
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
    return groups["actor"], groups.get("ref"), ranks[0]


def _check_nodes(sender: dict[str, Any], engines: dict[str, dict[str, Any]]) -> None:
    apart = sorted(name for name, info in engines.items() if info["node"] != sender["node"])
    if apart:
        raise ConfigError(
            f"{', '.join(apart)} and actor worker 0 stand on different nodes, and weights travel through one node's "
            "shared memory: run on one node that has room for all of them."
        )


def _close(pool: RolloutPool, groups: list[WorkerGroup], supervisor: Supervisor) -> None:
    for group in groups:
        group.call("close", timeout=_CLOSE_TIMEOUT_S)
    stops = {name: engine.stop.remote() for name, engine in zip(pool.names, pool.engines, strict=True)}
    supervisor.get_all(stops, what="its end", timeout=_CLOSE_TIMEOUT_S)
