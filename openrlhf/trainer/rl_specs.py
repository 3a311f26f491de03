"""What each part of an RL run needs to know, taken from the settings in one place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from openrlhf.config import PPOConfig, to_flags_yaml
from openrlhf.config.optimizer import OptimizerConfig
from openrlhf.rollout.actor import Sampling
from openrlhf.trainer.controller import LoopSettings
from openrlhf.trainer.evaluation import EvalSettings
from openrlhf.trainer.experience import Budget, RewardShaping
from openrlhf.trainer.instruments import TraceSettings
from openrlhf.trainer.launch import critic_source
from openrlhf.trainer.policy_update import PolicyLossSpec
from openrlhf.trainer.profiling import FOLDER
from openrlhf.trainer.rl_outputs import OutputSettings
from openrlhf.trainer.sampling import SamplingSettings
from openrlhf.trainer.schedule import frozen_steps
from openrlhf.trainer.updates import UpdateSettings
from openrlhf.trainer.value_update import ValueLossSpec
from openrlhf.utils.seeds import derive_seed

# Sets the seeds of evaluation apart from those of training, whose groups have the same numbers.
_EVAL_STREAM = 7919

# Log-probs of one model at temperature 1, computed by engine and trainer, differ by less than this, in nats: measured
# were 1e-6 in fp32 on a CPU, and 0.008 to 0.055 in bf16.
_ROUNDING = {"fp32": 0.01, "bf16": 0.3, "fp16": 0.1}


def policy_loss_spec(config: PPOConfig) -> PolicyLossSpec:
    """Returns: the policy's loss."""
    actor, kl = config.actor, config.algo.kl
    low, high = actor.eps_clip_low_high or (actor.eps_clip, actor.eps_clip)
    return PolicyLossSpec(
        name=actor.policy_loss_type,
        clip_low=low,
        clip_high=high,
        dual_clip=actor.dual_clip,
        aggregation=config.algo.loss_aggregation,
        constant=_response_limit(config),
        kl_estimator=kl.estimator if kl.use_loss and kl.enabled else None,
        temperature=config.rollout.temperature,
        kl_corrected=kl.corrected,
        entropy_coef=actor.entropy_coef or None,
    )


def value_loss_spec(config: PPOConfig) -> ValueLossSpec | None:
    """Returns: the critic's loss; None without a critic."""
    if not config.has_critic:
        return None
    return ValueLossSpec(config.critic.value_clip, config.algo.loss_aggregation, _response_limit(config))


def _response_limit(config: PPOConfig) -> float:
    return float(config.rollout.max_new_tokens or config.data.max_len)


def reward_shaping(config: PPOConfig) -> RewardShaping:
    """Returns: what is done to rewards."""
    reward = config.reward
    return RewardShaping(
        clip=reward.clip_range,
        stop_properly_coef=reward.stop_properly_penalty_coef,
        overlong_buffer=reward.overlong_buffer_len,
        overlong_factor=reward.overlong_penalty_factor,
        max_new_tokens=config.rollout.max_new_tokens,
    )


def rollout_budget(config: PPOConfig) -> Budget:
    """Returns: the size of a forward that computes log-probs, values or scores."""
    train, rollout = config.train, config.rollout
    if train.dynamic_batch_enable:
        return Budget(None, rollout.max_tokens_per_gpu or train.max_tokens_per_gpu)
    return Budget(rollout.micro_batch_size, None)


def loop_settings(config: PPOConfig, pad_token_id: int) -> LoopSettings:
    """Returns: what the loop needs."""
    return LoopSettings(
        algo=config.algo,
        shaping=reward_shaping(config),
        temperature=config.rollout.temperature,
        budget=rollout_budget(config),
        pad_token_id=pad_token_id,
        timeout=config.train.step_timeout,
        eval_steps=config.eval.steps,
        on_policy_samples=on_policy_samples(config),
        epochs=config.train.max_epochs,
        trace=trace_settings(config),
        # Logits are divided by the temperature, and their rounding with them.
        gap_limit=_ROUNDING[config.ds.param_dtype] / min(1.0, config.rollout.temperature),
    )


def trace_settings(config: PPOConfig) -> TraceSettings | None:
    """Returns: which steps are traced, and where to; None for none."""
    steps = config.logger.profiled
    return None if steps is None else TraceSettings(steps, Path(config.ckpt.output_dir) / FOLDER)


def on_policy_samples(config: PPOConfig) -> int:
    """Up to how many samples a rollout needs no pass for the old log-probs, as ``LoopSettings`` has it.

    With one optimizer step its own forward is that of the old policy, and nothing of the loss but the ratio reads them.
    What is read before the update needs the pass: a KL in the reward, a coefficient that adapts to the KL, a KL to be
    measured while the actor is frozen, and a rollout correction.
    """
    algo, kl = config.algo, config.algo.kl
    kl_before = kl.enabled and (not kl.use_loss or kl.target is not None or frozen_steps(config) > 0)
    if config.train.max_epochs > 1 or kl_before or algo.advantage.is_correction_enable:
        return 0
    return config.train.batch_size


def update_settings(config: PPOConfig, pad_token_id: int) -> UpdateSettings:
    """Returns: how a rollout is trained on."""
    train = config.train
    budget = Budget(train.micro_batch_size, None)
    if train.dynamic_batch_enable:
        budget = Budget(None, train.max_tokens_per_gpu)
    return UpdateSettings(
        train=train,
        policy_loss=policy_loss_spec(config),
        value_loss=value_loss_spec(config),
        freezing_steps=frozen_steps(config),
        budget=budget,
        pad_token_id=pad_token_id,
    )


def sampling_settings(config: PPOConfig, *, seeded: bool) -> SamplingSettings:
    """Returns: how rollouts are drawn.

    Args:
        seeded: every sample has a seed of its own, so that the run can be repeated.
    """
    algo = config.algo
    return SamplingSettings(
        rollout=config.rollout,
        num_episodes=config.train.num_episodes,
        seed=config.train.seed,
        sample_seed=config.train.seed if seeded else None,
        logprobs=algo.advantage.is_correction_enable,
        filter_range=algo.dynamic_filtering_range if algo.dynamic_filtering_enable else None,
    )


def eval_settings(config: PPOConfig, *, seeded: bool) -> EvalSettings:
    """Returns: how evaluation samples."""
    seed = derive_seed(config.train.seed, _EVAL_STREAM) % 2**31 if seeded else None
    sampling = Sampling(
        config.eval.temperature, config.rollout.top_p, config.rollout.max_new_tokens, seed, logprobs=False
    )
    return EvalSettings(
        samples=config.eval.n_samples_per_prompt,
        sampling=sampling,
        with_pass_rates=not config.reward.model_name_or_path,
    )


def output_settings(config: PPOConfig, num_prompts: int) -> OutputSettings:
    """Returns: what is written."""
    return OutputSettings(
        ckpt=config.ckpt,
        logger=config.logger,
        save_samples=config.rollout.save_samples,
        timeout=config.train.step_timeout,
        fixed=_fixed_settings(config, num_prompts),
        config_yaml=to_flags_yaml(config),
        save_critic=config.critic.save_value_network,
        save_ema=config.train.enable_ema,
    )


def _fixed_settings(config: PPOConfig, num_prompts: int) -> dict[str, Any]:
    train, rollout = config.train, config.rollout
    fixed: dict[str, Any] = {
        "prompts": num_prompts,
        "--algo.advantage.estimator": config.algo.advantage.estimator,
        "--algo.dynamic_filtering_enable": config.algo.dynamic_filtering_enable,
        "--data.prompt_dataset": config.data.prompt_dataset,
        "--train.seed": train.seed,
        "--train.batch_size": train.batch_size,
        "--train.max_epochs": train.max_epochs,
        "--train.num_episodes": train.num_episodes,
        "--train.enable_ema": train.enable_ema,
        "--rollout.batch_size": rollout.batch_size,
        "--rollout.n_samples_per_prompt": rollout.n_samples_per_prompt,
        "--actor.model_name_or_path": config.actor.model_name_or_path,
    }
    fixed |= _fixed_optimizer("actor", config.actor.optimizer) | config.ds.adapter_flags
    if config.has_critic:
        fixed |= _fixed_optimizer("critic", config.critic.optimizer)
        fixed["--critic.freezing_steps"] = frozen_steps(config)
        fixed["--critic.model_name_or_path"] = critic_source(config)[0]
    return fixed


def _fixed_optimizer(owner: str, optimizer: OptimizerConfig) -> dict[str, Any]:
    # They are compared with what JSON holds, which knows no tuples.
    fixed = optimizer.fixed(f"{owner}.")
    return {flag: list(value) if isinstance(value, tuple) else value for flag, value in fixed.items()}
