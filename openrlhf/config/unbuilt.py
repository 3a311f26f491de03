"""Flags and commands that are understood but whose feature does not exist yet, so that none is accepted and ignored.

A feature that gets built takes its line out of these tables, and nothing else changes here.
"""

from __future__ import annotations

from openrlhf.config.commands import Config, PPOConfig, command_of
from openrlhf.config.errors import ConfigError
from openrlhf.config.flags import flags_of

COMMANDS = {
    "train_rm": "reward model training",
    "train_dpo": "DPO",
    "lora_combiner": "merging LoRA adapters",
    "serve_rm": "the reward server",
}

# flag -> feature, for every command that has the flag; refused unless it stands at its default or in OFF.
FLAGS = {
    "optim": "the Muon optimizer",
    "actor.optim": "the Muon optimizer",
    "critic.optim": "the Muon optimizer",
    "use_ms": "ModelScope",
    "data.dataloader_num_workers": "preparing rows in other processes",
    "data.max_images_per_prompt": "training on images",
    "ds.zpg": "ZeRO++ sharding",
    "ds.adam_offload": "optimizer offload",
    "ds.use_liger_kernel": "Liger kernels",
    "ds.grad_accum_dtype": "a gradient accumulation type of its own",
    "ds.overlap_comm": "overlapped gradient reduction",
    "ds.deepcompile": "DeepCompile",
    "ds.tensor_parallel_size": "tensor parallel training",
    "ds.ring_attn_size": "ring attention",
    "ds.use_universal_ckpt": "resuming from universal checkpoints",
    "ds.lora.rank": "LoRA",
    "ds.load_in_4bit": "4-bit loading",
    "model.aux_loss_coef": "the router balancing loss",
    "actor.aux_loss_coef": "the router balancing loss",
    "actor.entropy_coef": "the entropy bonus",
    "actor.policy_loss_type": "GSPO",
    "actor.freeze_visual_encoder": "training on images",
    "critic.freezing_steps": "training a critic",
    "critic.save_value_network": "training a critic",
    "critic.model_name_or_path": "training a critic",
    "ref.offload": "offload of the reference model",
    "reward.model_name_or_path": "a reward model inside RL",
    "reward.normalize_enable": "a reward model inside RL",
    "reward.offload": "a reward model inside RL",
    "reward.overlong_buffer_len": "the penalty for overlong answers",
    "reward.stop_properly_penalty_coef": "the penalty for truncated answers",
    "train.agent_func_path": "multi-turn and other agents",
    "train.async_enable": "asynchronous training",
    "train.partial_rollout_enable": "asynchronous training",
    "rollout.vllm_generate_batch_size": "asynchronous training",
    "train.enable_ema": "the moving average of weights",
    "train.colocate_critic_reward": "training a critic",
    "algo.kl.target": "the adaptive KL coefficient",
    "algo.dynamic_filtering_enable": "dynamic filtering",
    "algo.advantage.is_correction_enable": "the rollout correction",
    "vllm.sync_with_ray": "weight transfer through Ray's collectives",
    "ckpt.best_metric_key": "keeping the best checkpoint",
}

# The same for RL alone, where the supervised commands already have the feature.
RL_FLAGS = {
    "eval.dataset": "evaluation during RL",
    "eval.steps": "evaluation during RL",
    "vllm.tensor_parallel_size": "tensor parallel engines",
}

# The same on GPUs; on the CPU they have no effect.
GPU_FLAGS = {
    "vllm.enable_sleep": "freeing GPU memory in turns",
    "ds.enable_sleep": "freeing GPU memory in turns",
    "vllm.sync_backend": "weight transfer other than by shared memory",
}

# Values besides the default that leave a feature off.
OFF = {
    "actor.entropy_coef": (0.0,),
    "ckpt.best_metric_key": ("none",),
    "vllm.sync_backend": ("shm",),
}

# flag -> values that exist so far, for flags whose default is one of the missing ones.
BUILT_CHOICES = {
    "algo.advantage.estimator": ("reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo"),
}


def check_unbuilt(config: Config) -> None:
    """Raises ConfigError for the first flag that asks for a feature which does not exist yet."""
    command = command_of(config)
    if command in COMMANDS:
        raise ConfigError(
            f"The command {command} is not built yet: its flags are read, but {COMMANDS[command]} does not exist."
        )
    for name, built in BUILT_CHOICES.items():
        flag = flags_of(type(config)).get(name)
        if flag is not None and flag.value(config) not in built:
            value = flag.value(config)
            which = f"{value} (the default)" if value == flag.default else value
            raise ConfigError(f"--{name} {which} is not built yet; choose one of {', '.join(built)}.")
    _check_off(config, FLAGS | RL_FLAGS if isinstance(config, PPOConfig) else FLAGS)
    if isinstance(config, PPOConfig) and (config.reward.remote_url or "").startswith(("http://", "https://")):
        raise ConfigError("--reward.remote_url: reward servers are not built yet; give a Python file with reward_func.")


def check_unbuilt_on_gpu(config: Config) -> None:
    """Raises ConfigError for the first flag that asks for something which GPUs cannot do here yet."""
    _check_off(config, GPU_FLAGS)


def _check_off(config: Config, features: dict[str, str]) -> None:
    flags = flags_of(type(config))
    for name, feature in features.items():
        if name not in flags:
            continue
        value = flags[name].value(config)
        if value != flags[name].default and value not in OFF.get(name, ()):
            raise ConfigError(f"--{name} asks for {feature}, which is not built yet; leave the flag out.")
