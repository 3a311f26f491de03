"""Sentences about flags that were set and change nothing, so that nobody waits for their effect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch

from openrlhf.config.algo import WHITENING_ESTIMATORS
from openrlhf.config.checks_data import template_notes
from openrlhf.config.checks_serve import serve_notes
from openrlhf.config.commands import Config, DPOConfig, PPOConfig, RMConfig, ServeRMConfig, SFTConfig, TrainingConfig
from openrlhf.config.flags import flags_of


@dataclass(frozen=True)
class Dependent:
    """Flags that mean something only where another one is set.

    Attributes:
        flags: patterns of their names.
        matters: whether they mean something in a config.
        without: completes "... has no effect ...".
    """

    flags: tuple[str, ...]
    matters: Callable[[Config], bool]
    without: str


TRAINING = (
    Dependent(("muon.*",), lambda c: c.optimizer.optim == "muon", "without --optim muon"),
    Dependent(
        ("model.gradient_checkpointing_reentrant",),
        lambda c: c.model.gradient_checkpointing_enable,
        "without --model.gradient_checkpointing_enable",
    ),
    Dependent(
        ("data.input_template",),
        lambda c: not (isinstance(c, SFTConfig) and c.model.pretrain_mode_enable),
        "under --model.pretrain_mode_enable: the text is trained as it is",
    ),
    Dependent(
        ("data.tokenizer_chat_template",), lambda c: c.data.apply_chat_template, "without --data.apply_chat_template"
    ),
)
PAIRS = (
    Dependent(
        ("data.input_template",),
        lambda c: c.data.prompt_key is not None,
        "without --data.prompt_key: the responses contain their prompt as it stands",
    ),
)
REWARD_MODEL = (
    Dependent(
        ("ds.value_head_prefix",),
        lambda c: False,
        "here: the head is new, and exported as score, the name that transformers looks for",
    ),
    Dependent(
        ("model.compute_fp32_loss_enable",),
        lambda c: False,
        "here: the head, its scores and the loss are computed in float32 in every case",
    ),
)
EVERY = (
    Dependent(
        ("ds.adam_offload",),
        lambda c: c.ds.zero_stage > 0 or c.ds.param_dtype != "fp32",
        "under --ds.zero_stage 0 in fp32",
    ),
    Dependent(("ds.lora.*",), lambda c: c.ds.lora.rank > 0, "without --ds.lora.rank"),
    Dependent(("ds.ring_attn_head_stride",), lambda c: c.ds.ring_attn_size > 1, "without --ds.ring_attn_size"),
    Dependent(("eval.*",), lambda c: c.eval.dataset is not None, "without --eval.dataset"),
    Dependent(("eval.dataset",), lambda c: c.eval.steps > 0, "without --eval.steps"),
    Dependent(
        ("ckpt.save_hf", "ckpt.disable_ds", "ckpt.max_num", "ckpt.max_mem"),
        lambda c: c.ckpt.save_steps > 0,
        "without --ckpt.save_steps",
    ),
    Dependent(
        ("logger.wandb.org", "logger.wandb.group", "logger.wandb.project"),
        lambda c: c.logger.wandb.key is not None,
        "without --logger.wandb.key",
    ),
    Dependent(
        ("logger.mlflow.*",),
        lambda c: c.logger.mlflow.tracking_uri is not None,
        "without --logger.mlflow.tracking_uri",
    ),
)
DPO = (
    Dependent(
        ("ref.*",),
        lambda c: c.model.has_reference,
        "without a loss that looks at a reference model (--model.loss_type dpo, ipo or kto)",
    ),
    Dependent(("ref.offload",), lambda c: not c.ref.precompute, "under --ref.precompute, which gives the model up"),
    Dependent(
        ("ref.offload",),
        lambda c: not c.reference_below_adapters,
        "under --ds.lora.rank: the reference is the trained model with its adapters off",
    ),
    Dependent(
        ("ref.offload",),
        lambda c: c.ds.zero_stage < 3,
        "under --ds.zero_stage 3, where each GPU holds only its part of it",
    ),
    Dependent(("model.ipo_sum_enable",), lambda c: c.model.loss == "ipo", "without --model.ipo_enable"),
    Dependent(("model.kto_*",), lambda c: c.model.loss == "kto", "without --model.loss_type kto"),
    Dependent(("model.simpo_gamma",), lambda c: c.model.loss == "simpo", "without --model.loss_type simpo"),
)
RL = (
    Dependent(
        ("critic.*", "algo.advantage.lambd"),
        lambda c: c.algo.advantage.estimator == "gae",
        "without --algo.advantage.estimator gae",
    ),
    Dependent(
        ("ref.*", "algo.kl.estimator", "algo.kl.use_loss", "algo.kl.corrected"),
        lambda c: c.algo.kl.enabled,
        "while --algo.kl.init_coef is 0: there is no reference model",
    ),
    Dependent(
        ("ref.*", "train.colocate_actor_ref"),
        lambda c: not c.reference_below_adapters,
        "under --ds.lora.rank: the reference is the actor itself, with its adapters off",
    ),
    Dependent(
        ("ds.value_head_prefix",),
        lambda c: c.algo.advantage.estimator == "gae" or c.reward.model_name_or_path is not None,
        "without a critic (--algo.advantage.estimator gae) or a --reward.model_name_or_path",
    ),
    Dependent(
        ("reward.timeout", "reward.max_retries"),
        lambda c: c.reward.remote_url is not None,
        "without --reward.remote_url",
    ),
    Dependent(
        ("reward.api_key_env",),
        lambda c: "://" in (c.reward.remote_url or ""),
        "without the address of a server in --reward.remote_url",
    ),
    Dependent(
        ("reward.workers",),
        lambda c: (c.reward.remote_url or "").endswith(".py"),
        "without a Python file in --reward.remote_url",
    ),
    Dependent(
        ("train.colocate_critic_reward",),
        lambda c: c.has_critic or bool(c.reward_models),
        "without a critic or a reward model",
    ),
    Dependent(("train.colocate_actor_ref",), lambda c: c.algo.kl.enabled, "without a reference model"),
    Dependent(
        ("actor.eps_clip", "actor.eps_clip_low_high"),
        lambda c: c.actor.policy_loss_type != "sapo",
        "under --actor.policy_loss_type sapo, which has no clip",
    ),
    Dependent(
        ("ref.offload", "reward.offload"),
        lambda c: c.ds.zero_stage < 3,
        "under --ds.zero_stage 3, where each GPU holds only its part of these models",
    ),
    Dependent(("ckpt.best_metric_key",), lambda c: c.eval.dataset is not None, "without --eval.dataset"),
    Dependent(("algo.kl.horizon",), lambda c: c.algo.kl.target is not None, "without --algo.kl.target"),
    Dependent(
        ("reward.num_nodes", "reward.num_gpus_per_node", "reward.offload", "reward.normalize_enable", "reward.combine"),
        lambda c: c.reward.model_name_or_path is not None,
        "without --reward.model_name_or_path",
    ),
    Dependent(
        ("reward.overlong_penalty_factor",),
        lambda c: c.reward.overlong_buffer_len is not None,
        "without --reward.overlong_buffer_len",
    ),
    Dependent(
        ("algo.advantage.no_std_norm",),
        lambda c: c.algo.advantage.estimator in WHITENING_ESTIMATORS,
        f"unless --algo.advantage.estimator is one of {', '.join(WHITENING_ESTIMATORS)}",
    ),
    Dependent(
        ("algo.advantage.is_correction_*",),
        lambda c: c.algo.advantage.is_correction_enable,
        "without --algo.advantage.is_correction_enable",
    ),
    Dependent(
        ("algo.dynamic_filtering_range",),
        lambda c: c.algo.dynamic_filtering_enable,
        "without --algo.dynamic_filtering_enable",
    ),
    Dependent(("train.ema_beta",), lambda c: c.train.enable_ema, "without --train.enable_ema"),
    Dependent(("train.async_queue_size",), lambda c: c.train.async_enable, "without --train.async_enable"),
    Dependent(
        ("train.max_tokens_per_gpu", "rollout.max_tokens_per_gpu"),
        lambda c: c.train.dynamic_batch_enable,
        "without --train.dynamic_batch_enable",
    ),
    Dependent(
        ("train.micro_batch_size", "rollout.micro_batch_size"),
        lambda c: not c.train.dynamic_batch_enable,
        "under --train.dynamic_batch_enable, which counts tokens",
    ),
    Dependent(("actor.eps_clip",), lambda c: c.actor.eps_clip_low_high is None, "beside --actor.eps_clip_low_high"),
    Dependent(("actor.muon.*",), lambda c: c.actor.optimizer.optim == "muon", "without --actor.optim muon"),
    Dependent(
        ("critic.muon.*",),
        lambda c: c.critic.optimizer.optim == "muon" or c.algo.advantage.estimator != "gae",
        "without --critic.optim muon",
    ),
    Dependent(
        ("actor.gradient_checkpointing_reentrant",),
        lambda c: c.actor.gradient_checkpointing_enable,
        "without --actor.gradient_checkpointing_enable",
    ),
    Dependent(("data.image_key",), lambda c: c.data.max_images_per_prompt > 0, "without --data.max_images_per_prompt"),
)


def notes(config: Config) -> list[str]:
    """Returns: one sentence for each group of flags without effect, and for each setting that deserves a look."""
    if isinstance(config, ServeRMConfig):
        return serve_notes(config)
    if not isinstance(config, TrainingConfig):
        return []
    rl = isinstance(config, PPOConfig)
    dependents = EVERY + (RL if rl else TRAINING)
    if isinstance(config, RMConfig | DPOConfig):
        dependents += PAIRS
    if isinstance(config, RMConfig):
        dependents += REWARD_MODEL
    if isinstance(config, DPOConfig):
        dependents += DPO
    found = []
    for dependent in dependents:
        changed = _changed(config, dependent.flags)
        if changed and not dependent.matters(config):
            verb = "has" if len(changed) == 1 else "have"
            found.append(f"{', '.join(changed)} {verb} no effect {dependent.without}.")
    found += template_notes(config.data)
    return found + (batch_notes(config) if rl else [])


def _changed(config: Config, patterns: tuple[str, ...]) -> list[str]:
    """Returns: flags under the patterns that are not at their default, with dashes."""
    return [
        f"--{flag.name}"
        for flag in flags_of(type(config)).values()
        if any(fnmatch(flag.name, pattern) for pattern in patterns) and flag.value(config) != flag.default
    ]


def batch_notes(config: PPOConfig) -> list[str]:
    """Returns: what becomes of batches that do not divide, and of rows above the token budget."""
    found = []
    batch = config.train.batch_size
    samples = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    if samples % batch:
        updates = -(-samples // batch)
        found.append(
            f"--rollout.batch_size x --rollout.n_samples_per_prompt = {samples} samples do not divide by "
            f"--train.batch_size {batch}: a rollout makes {updates} updates of about {round(samples / updates)}, and "
            "none is dropped."
        )
    if config.train.dynamic_batch_enable and config.train.max_tokens_per_gpu < config.data.max_len:
        found.append(
            f"--train.max_tokens_per_gpu {config.train.max_tokens_per_gpu} is below --data.max_len "
            f"{config.data.max_len}: a row longer than the budget gets a forward of its own."
        )
    return found
