"""Checks of the flags that every training command shares."""

from __future__ import annotations

import os
from collections.abc import Iterator

from openrlhf.config.commands import DPOConfig, PPOConfig, RMConfig, TrainingConfig
from openrlhf.config.deepspeed import ALL_LINEAR, DeepSpeedConfig
from openrlhf.config.errors import ConfigError
from openrlhf.config.flags import flags_of
from openrlhf.config.model import PlacementConfig
from openrlhf.config.optimizer import OptimizerConfig

# The names of transformers' get_scheduler, less those that need what no flag tells.
SCHEDULERS = (
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
)
RM_LOSSES = ("sigmoid", "logexp")
# Preference losses that label smoothing is defined for.
SMOOTHED_LOSSES = ("dpo", "simpo")


def check_training(config: TrainingConfig) -> None:
    """Raises ConfigError where model, optimizer, sharding or checkpoint flags are missing or do not fit together."""
    owner = "actor" if isinstance(config, PPOConfig) else "model"
    model = config.actor if isinstance(config, PPOConfig) else config.model
    if not model.model_name_or_path:
        raise ConfigError(f"--{owner}.model_name_or_path is missing: give a folder or a hub name.")
    for prefix, optimizer in optimizers(config):
        check_optimizer(optimizer, prefix)
    check_sharding(config)
    check_checkpoints(config)
    # Raises where the steps cannot be read.
    _ = config.logger.profiled
    if isinstance(config, RMConfig) and config.model.loss_type not in RM_LOSSES:
        raise ConfigError(f"--model.loss_type must be one of {', '.join(RM_LOSSES)}, found {config.model.loss_type!r}.")
    if isinstance(config, DPOConfig):
        check_preference_loss(config)


def check_preference_loss(config: DPOConfig) -> None:
    """Raises ConfigError for two losses at once, and for what the loss does not have or cannot do."""
    model = config.model
    if model.ipo_enable and model.loss_type not in ("dpo", "ipo"):
        raise ConfigError(f"--model.ipo_enable and --model.loss_type {model.loss_type} are two losses; keep one.")
    if model.label_smoothing and model.loss not in SMOOTHED_LOSSES:
        raise ConfigError(
            f"--model.label_smoothing {model.label_smoothing} does not exist for the loss {model.loss}; leave it out, "
            f"or take one of {', '.join(SMOOTHED_LOSSES)}."
        )
    if model.has_reference and config.ref.precompute and config.data.streaming:
        raise ConfigError(
            "--ref.precompute asks the reference about all pairs before training, and --data.streaming reads none of "
            "them before its turn; keep one."
        )
    if model.loss == "kto" and config.ref.precompute:
        raise ConfigError(
            "--ref.precompute does not go with --model.loss_type kto, which asks the reference about responses after "
            "other prompts, as the steps bring them together; leave it out, or take --ref.offload."
        )
    if model.loss == "kto" and config.train.batch_size < 2:
        raise ConfigError(
            f"--model.loss_type kto sets responses after the prompts of other pairs of a step, and --train.batch_size "
            f"{config.train.batch_size} has only one; take 2 or more."
        )


def optimizers(config: TrainingConfig) -> Iterator[tuple[str, OptimizerConfig]]:
    """Yields: the prefix of its flags, and the settings, of each optimizer that the run has."""
    if not isinstance(config, PPOConfig):
        yield "", config.optimizer
        return
    yield "actor.", config.actor.optimizer
    if config.algo.advantage.estimator == "gae":
        yield "critic.", config.critic.optimizer


def check_optimizer(optimizer: OptimizerConfig, prefix: str) -> None:
    """Raises ConfigError for an unknown schedule; ``prefix`` stands before the flag's name."""
    if optimizer.lr_scheduler not in SCHEDULERS:
        raise ConfigError(
            f"--{prefix}lr_scheduler must be one of {', '.join(SCHEDULERS)}, found {optimizer.lr_scheduler!r}."
        )


def training_ranks(config: TrainingConfig) -> tuple[int, str]:
    """Returns: ranks of the trained model, and the words that name where the number comes from."""
    if isinstance(config, PPOConfig):
        actor: PlacementConfig = config.actor
        return actor.world_size, "--actor.num_nodes x --actor.num_gpus_per_node"
    return int(os.environ.get("WORLD_SIZE", 1)), "the launcher"


def check_sharding(config: TrainingConfig) -> None:
    """Raises ConfigError where ranks do not divide, or where DeepSpeed options exclude each other."""
    ds = config.ds
    ranks, source = training_ranks(config)
    for name, size in (("ring_attn_size", ds.ring_attn_size), ("tensor_parallel_size", ds.tensor_parallel_size)):
        if ranks % size:
            raise ConfigError(f"--ds.{name} {size} does not divide the {ranks} ranks from {source}; take a divisor.")
    replicas = ranks // (ds.ring_attn_size * ds.tensor_parallel_size)
    if config.train.batch_size < replicas:
        raise ConfigError(
            f"--train.batch_size {config.train.batch_size} is smaller than the {replicas} ranks from {source}, so that "
            "some would never have a sample; raise it or take fewer ranks."
        )
    check_second_shard_group(config)
    check_gradients(ds)
    check_adapters(ds)
    if ds.ring_attn_size > 1 and not ds.packing_samples:
        raise ConfigError("--ds.ring_attn_size works on packed rows; leave out --ds.no_packing_samples.")
    check_compile(ds)
    if ds.use_universal_ckpt and not config.ckpt.load_enable:
        raise ConfigError("--ds.use_universal_ckpt is about resuming; add --ckpt.load_enable.")
    for prefix, optimizer in optimizers(config):
        if ds.use_universal_ckpt and optimizer.optim == "muon":
            raise ConfigError(
                f"--ds.use_universal_ckpt does not go with --{prefix}optim muon: DeepSpeed converts the state of Adam "
                "alone; resume on the number of ranks that wrote the checkpoint, or start from an exported model."
            )


def check_second_shard_group(config: TrainingConfig) -> None:
    """Raises ConfigError where --ds.zpg has no weights to shard, or ranks are left over."""
    ds = config.ds
    if ds.zpg == 1:
        return
    if ds.zero_stage != 3:
        raise ConfigError(f"--ds.zpg {ds.zpg} shards weights, which needs --ds.zero_stage 3, found {ds.zero_stage}.")
    models = [training_ranks(config)]
    if isinstance(config, PPOConfig) and config.has_critic:
        models.append((config.critic.world_size, "--critic.num_nodes x --critic.num_gpus_per_node"))
    for ranks, source in models:
        if ranks % ds.zpg:
            raise ConfigError(
                f"--ds.zpg {ds.zpg} does not divide the {ranks} ranks from {source}; take the ranks of one node."
            )


def check_gradients(ds: DeepSpeedConfig) -> None:
    """Raises ConfigError where gradients cannot be added up or reduced as it is asked for."""
    accumulate = ds.grad_accum_dtype
    if accumulate not in (None, "fp32", "bf16"):
        raise ConfigError(f"--ds.grad_accum_dtype must be fp32 or bf16, found {accumulate!r}.")
    if accumulate == "bf16" and ds.param_dtype != "bf16":
        raise ConfigError(
            f"--ds.grad_accum_dtype bf16 would round the gradients of {ds.param_dtype} weights; leave it out, or take "
            "--ds.param_dtype bf16."
        )
    if ds.overlap_comm and ds.zero_stage != 2:
        raise ConfigError(
            f"--ds.overlap_comm works with --ds.zero_stage 2 alone, found {ds.zero_stage}: elsewhere DeepSpeed would "
            "have to know the last backward of a step beforehand; leave the flag out."
        )


def check_adapters(ds: DeepSpeedConfig) -> None:
    """Raises ConfigError where weights in 4 bits have nothing to train above them, or would be sharded or compiled."""
    targets = ds.lora.target_modules
    if ALL_LINEAR in targets and len(targets) > 1:
        raise ConfigError(f"--ds.lora.target_modules {ALL_LINEAR} stands for all layers; leave out the other names.")
    if not targets:
        raise ConfigError(f"--ds.lora.target_modules names no layer; take {ALL_LINEAR}, or leave the flag out.")
    if not ds.load_in_4bit:
        return
    if ds.lora.rank == 0:
        raise ConfigError("--ds.load_in_4bit freezes the base weights, so it needs adapters: set --ds.lora.rank.")
    if ds.zero_stage == 3:
        raise ConfigError(
            "--ds.load_in_4bit does not go with --ds.zero_stage 3, which would split packed weights over the ranks; "
            "take stage 2, where only the adapters' states are split, or leave the weights in --ds.param_dtype."
        )
    if ds.torch_compile:
        raise ConfigError("--ds.torch_compile does not go with --ds.load_in_4bit; leave one of them out.")


def check_compile(ds: DeepSpeedConfig) -> None:
    """Raises ConfigError where compiled layers do not go with how the model is sharded, and for DeepCompile."""
    if ds.deepcompile:
        raise ConfigError(
            "--ds.deepcompile has DeepSpeed count the micro-batches of a step, and here a step ends when its loss is "
            "whole (managed_gradient_accumulation is off); take --ds.torch_compile on stages 0 to 2, or leave it out."
        )
    if ds.torch_compile and ds.zero_stage == 3:
        raise ConfigError(
            "--ds.torch_compile does not go with --ds.zero_stage 3, which gathers weights inside of each layer; take "
            "stage 2, or leave the flag out."
        )


def check_checkpoints(config: TrainingConfig) -> None:
    """Raises ConfigError where checkpoints would be empty, or where what is written would overwrite something else."""
    ckpt = config.ckpt
    for flag, folder in (("--ckpt.output_dir", ckpt.output_dir), ("--ckpt.path", ckpt.path)):
        if not folder.strip():
            raise ConfigError(f"{flag} is empty; name a folder, or leave the flag out.")
        check_apart_from_models(config, flag, folder)
    pattern = next((sign for sign in "[*?" if sign in os.path.abspath(ckpt.path)), None)
    if pattern is not None and (ckpt.save_steps > 0 or ckpt.load_enable):
        # It would look for the files of a state in run1 where it was given run[1].
        raise ConfigError(
            f"--ckpt.path {ckpt.path}: the folder's whole name has a {pattern}, which DeepSpeed reads as a pattern "
            "when it loads a state, so that it finds none or another run's; take another folder."
        )
    if ckpt.save_steps > 0 and ckpt.disable_ds and not ckpt.save_hf:
        raise ConfigError(
            "--ckpt.disable_ds without --ckpt.save_hf leaves nothing to write every --ckpt.save_steps; add "
            "--ckpt.save_hf."
        )
    if os.path.abspath(ckpt.path) == os.path.abspath(ckpt.output_dir):
        raise ConfigError("--ckpt.path and --ckpt.output_dir are the same folder; states and export need one each.")


def check_apart_from_models(config: TrainingConfig, flag: str, folder: str) -> None:
    """Raises ConfigError where ``folder``, which is written to, is a model's folder or lies in one; links count."""
    written = os.path.realpath(folder)
    for name, model_flag in flags_of(type(config)).items():
        model = model_flag.value(config)
        if name.rpartition(".")[2] != "model_name_or_path" or not model or not os.path.isdir(model):
            continue
        read = os.path.realpath(model)
        if os.path.commonpath([read, written]) == read:
            where = "is the folder of" if read == written else "lies inside of"
            raise ConfigError(
                f"{flag} {folder} {where} the model that --{name} {model} names, and would overwrite or clutter it; "
                "write to another folder."
            )
