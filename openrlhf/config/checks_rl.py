"""Checks of the RL flags against each other."""

from __future__ import annotations

from openrlhf.config.algo import GROUP_ESTIMATORS, SEQUENCE_LOSSES
from openrlhf.config.api_keys import client_key
from openrlhf.config.commands import PPOConfig
from openrlhf.config.errors import ConfigError
from openrlhf.config.model import PlacementConfig
from openrlhf.config.urls import parse_urls

SYNC_BACKENDS = ("auto", "nccl", "ipc", "gloo", "shm")

# Engine arguments that the run relies on, and what decides them.
RESERVED_ENGINE_ARGUMENTS = {
    "model": "--actor.model_name_or_path",
    "dtype": "--ds.param_dtype",
    "max_model_len": "--data.max_len",
    "seed": "--train.seed",
    "tensor_parallel_size": "--vllm.tensor_parallel_size",
    # An engine has as many GPUs, and weights are sent to as many workers.
    "pipeline_parallel_size": "--vllm.tensor_parallel_size",
    "prefill_context_parallel_size": "--vllm.tensor_parallel_size",
    "data_parallel_size": "--vllm.num_engines",
    **dict.fromkeys(("nnodes", "node_rank", "master_addr", "master_port", "device_ids"), "the place of each engine"),
    # Ray would be asked for GPUs that the engine has been given already.
    "distributed_executor_backend": "the place of each engine",
    "gpu_memory_utilization": "--vllm.gpu_memory_utilization",
    "enable_sleep_mode": "--vllm.enable_sleep",
    "trust_remote_code": "--trust_remote_code",
    "logprobs_mode": "the comparison of the engine's log-probs with the trainer's",
    "weight_transfer_config": "the transfer of weights",
    "worker_extension_cls": "the transfer of weights",
    # Experts that change places while the engine runs are not where the next weights put them.
    **dict.fromkeys(("enable_eplb", "eplb_config", "enable_elastic_ep"), "the transfer of weights"),
}
# Relatives of these, by how they begin.
RESERVED_PREFIXES = {"data_parallel_": "--vllm.num_engines", "_api_process_": "--vllm.num_engines"}


SAMPLE_SHARE = 0.8
"""Of --train.step_timeout, what one sample may take, so that one that hangs is dropped before the run gives up."""


def check_rl(config: PPOConfig) -> None:
    """Raises ConfigError where flags of RL do not fit together."""
    check_reward_source(config)
    check_losses(config)
    check_deadlines(config)
    check_groups(config)
    check_batches(config)
    check_schedule(config)
    check_kl(config)
    check_correction(config)
    check_dropout(config)
    check_adapters_sleep(config)
    check_penalties(config)
    check_colocation(config)
    check_reserved_arguments(config)
    if config.vllm.sync_backend not in SYNC_BACKENDS:
        known = ", ".join(SYNC_BACKENDS)
        raise ConfigError(f"--vllm.sync_backend must be one of {known}, found {config.vllm.sync_backend!r}.")
    if config.train.dynamic_batch_enable and not config.ds.packing_samples:
        raise ConfigError(
            "--train.dynamic_batch_enable counts tokens of packed rows; leave out --ds.no_packing_samples."
        )


def check_reward_source(config: PPOConfig) -> None:
    """Raises ConfigError unless exactly one source of rewards is given, in a form that is one."""
    url = config.reward.remote_url
    model, agent = config.reward.model_name_or_path, config.train.agent_func_path
    if not (url or model or agent):
        raise ConfigError(
            "No reward: give --reward.remote_url a Python file with reward_func(queries, prompts, labels) or the "
            "address of a reward server, --reward.model_name_or_path a reward model, or --train.agent_func_path an "
            "agent."
        )
    given = [
        flag
        for flag, value in (
            ("--reward.remote_url", url),
            ("--reward.model_name_or_path", model),
            ("--train.agent_func_path", agent),
        )
        if value
    ]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are given, but rewards come from one source; keep one.")
    if agent and not agent.endswith(".py"):
        raise ConfigError(f"--train.agent_func_path takes a Python file (.py), found {agent!r}.")
    if url and "://" in url:
        parse_urls(url)
        client_key(config.reward.api_key_env)
    elif url and not url.endswith(".py"):
        raise ConfigError(f"--reward.remote_url takes a Python file (.py) or an http address, found {url!r}.")
    if model and not config.reward_models:
        raise ConfigError(f"--reward.model_name_or_path {model!r} names no model.")
    if model and config.algo.dynamic_filtering_enable:
        raise ConfigError(
            "--algo.dynamic_filtering_enable judges groups as soon as they are sampled, by the scores of a reward "
            "function or an agent; --reward.model_name_or_path scores them only afterwards. Leave one out."
        )


def check_losses(config: PPOConfig) -> None:
    """Raises ConfigError where loss, aggregation and clip do not belong together."""
    loss, aggregation = config.actor.policy_loss_type, config.algo.loss_aggregation
    if loss in SEQUENCE_LOSSES and aggregation not in (None, "seq_mean"):
        raise ConfigError(
            f"--actor.policy_loss_type {loss} has one ratio for each sequence, so its loss is a mean over sequences: "
            f"leave out --algo.loss_aggregation {aggregation}."
        )
    if config.actor.dual_clip is not None and loss not in ("ppo", "gspo"):
        raise ConfigError(f"--actor.dual_clip belongs to ppo and gspo, and --actor.policy_loss_type is {loss}.")


def check_deadlines(config: PPOConfig) -> None:
    """Raises ConfigError where a reward function that hangs would end the run before its sample is given up."""
    reward, step = config.reward, config.train.step_timeout
    longest = reward.timeout * (1 + reward.max_retries)
    if config.reward.remote_url and longest >= SAMPLE_SHARE * step:
        raise ConfigError(
            f"--reward.timeout {reward.timeout:g} x (1 + --reward.max_retries {reward.max_retries}) = {longest:g} s is "
            f"not below {SAMPLE_SHARE:.0%} of --train.step_timeout {step:g}, after which a sample is given up; lower "
            "the former or raise the latter."
        )


def check_groups(config: PPOConfig) -> None:
    """Raises ConfigError where samples are compared within a group of one."""
    estimator, samples = config.algo.advantage.estimator, config.rollout.n_samples_per_prompt
    if samples > 1:
        return
    if estimator in GROUP_ESTIMATORS:
        raise ConfigError(
            f"--algo.advantage.estimator {estimator} compares the samples of one prompt, so "
            f"--rollout.n_samples_per_prompt must be 2 or more, found {samples}."
        )
    if config.algo.dynamic_filtering_enable:
        raise ConfigError(
            "--algo.dynamic_filtering_enable judges groups, so --rollout.n_samples_per_prompt must be 2 or more."
        )


def check_batches(config: PPOConfig) -> None:
    """Raises ConfigError where a rollout cannot fill one optimizer step."""
    rollout, batch = config.rollout, config.train.batch_size
    samples = rollout.batch_size * rollout.n_samples_per_prompt
    if batch > samples:
        raise ConfigError(
            f"--train.batch_size {batch} is more than the {samples} samples of a rollout (--rollout.batch_size "
            f"{rollout.batch_size} x --rollout.n_samples_per_prompt {rollout.n_samples_per_prompt}); lower it or raise "
            "them."
        )
    if samples < config.actor.world_size:
        raise ConfigError(
            f"A rollout has {samples} samples for {config.actor.world_size} actor workers; raise --rollout.batch_size "
            "or lower --actor.num_gpus_per_node."
        )


def check_schedule(config: PPOConfig) -> None:
    """Raises ConfigError where synchronous training is told to overlap, or overlapping engines to sleep."""
    train, rollout = config.train, config.rollout
    oversample = rollout.vllm_generate_batch_size
    if oversample is not None and oversample < rollout.batch_size:
        raise ConfigError(
            f"--rollout.vllm_generate_batch_size {oversample} is less than --rollout.batch_size {rollout.batch_size}; "
            "it counts the prompts in generation, so raise it."
        )
    if oversample is not None and oversample > rollout.batch_size and not train.async_enable:
        raise ConfigError(
            f"--rollout.vllm_generate_batch_size {oversample} above --rollout.batch_size {rollout.batch_size} needs "
            "--train.async_enable."
        )
    if train.partial_rollout_enable and not train.async_enable:
        raise ConfigError("--train.partial_rollout_enable needs --train.async_enable.")
    if train.async_enable and config.vllm.enable_sleep:
        raise ConfigError("--vllm.enable_sleep stops the engines that --train.async_enable keeps busy; keep one.")
    for name, asked in (("vllm", config.vllm.enable_sleep), ("ds", config.ds.enable_sleep)):
        if asked and not train.colocate_all:
            raise ConfigError(
                f"--{name}.enable_sleep frees a GPU for others that share it; add --train.colocate_all or leave it out."
            )


def check_kl(config: PPOConfig) -> None:
    """Raises ConfigError for a KL in the loss whose gradient teaches nothing, or a target for a KL that is off."""
    kl = config.algo.kl
    if not kl.enabled:
        if kl.target is not None:
            raise ConfigError("--algo.kl.target adapts a coefficient that --algo.kl.init_coef 0 turned off; raise it.")
        return
    if kl.corrected and not kl.use_loss:
        raise ConfigError("--algo.kl.corrected weighs the KL in the loss; add --algo.kl.use_loss or leave it out.")
    samples = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    if kl.target is not None and not (kl.target > 0 and 0.2 * samples < kl.horizon):
        raise ConfigError(
            f"--algo.kl.target {kl.target} must be above 0, and --algo.kl.horizon {kl.horizon} above a fifth of the "
            f"{samples} samples of a rollout, or one step could turn the coefficient around."
        )
    if kl.use_loss and kl.estimator == "k1" and not kl.corrected:
        raise ConfigError(
            "--algo.kl.use_loss with --algo.kl.estimator k1 has an expected gradient of zero; take k2 or k3, or leave "
            "out --algo.kl.use_loss."
        )


def check_correction(config: PPOConfig) -> None:
    """Raises ConfigError where the engine's probabilities are not those of the whole distribution."""
    if config.algo.advantage.is_correction_enable and config.rollout.top_p < 1:
        raise ConfigError(
            "--algo.advantage.is_correction_enable compares probabilities of the whole distribution, and "
            f"--rollout.top_p {config.rollout.top_p} samples from a part of it; set --rollout.top_p 1."
        )


def check_dropout(config: PPOConfig) -> None:
    """Raises ConfigError where the policy that is updated would not be the one that sampled."""
    lora = config.ds.lora
    if lora.rank > 0 and lora.dropout > 0:
        raise ConfigError(
            f"--ds.lora.dropout {lora.dropout} is drawn in the update alone, so that its probabilities would not be "
            "those that the samples were drawn with, and the first ratio not 1; leave it at 0 in train_ppo_ray."
        )


def check_adapters_sleep(config: PPOConfig) -> None:
    """Raises ConfigError where frozen weights would not come back: on stage 3 DeepSpeed moves all parts of weights away
    and returns those that are trained.
    """
    if config.ds.enable_sleep and config.ds.lora.rank > 0 and config.ds.zero_stage == 3:
        raise ConfigError(
            "--ds.enable_sleep does not go with --ds.lora.rank under --ds.zero_stage 3, where DeepSpeed brings back "
            "trained weights alone; take stage 2, or leave --ds.enable_sleep out."
        )


def check_penalties(config: PPOConfig) -> None:
    """Raises ConfigError where the buffer of the length penalty has nothing to lie in."""
    buffer, longest = config.reward.overlong_buffer_len, config.rollout.max_new_tokens
    if buffer is None:
        return
    if config.train.agent_func_path:
        raise ConfigError(
            "--reward.overlong_buffer_len is counted back from --rollout.max_new_tokens, which bounds each turn of an "
            "agent and not the whole conversation; let the agent take the penalty off its rewards."
        )
    if longest is None:
        raise ConfigError("--reward.overlong_buffer_len is counted back from --rollout.max_new_tokens; set that too.")
    if buffer > longest:
        raise ConfigError(
            f"--reward.overlong_buffer_len {buffer} is longer than --rollout.max_new_tokens {longest}; lower it."
        )


def check_reserved_arguments(config: PPOConfig) -> None:
    """Raises ConfigError where --vllm.extra would change what agents, trainer or weight transfer rely on."""
    for name in config.vllm.extra:
        # vLLM's command line writes dashes, and a user may copy it.
        plain = name.replace("-", "_")
        begun = (owner for start, owner in RESERVED_PREFIXES.items() if plain.startswith(start))
        owner = RESERVED_ENGINE_ARGUMENTS.get(plain) or next(begun, None)
        if owner is not None:
            raise ConfigError(f"--vllm.extra must leave {name!r} out: {owner} decides it.")


def check_colocation(config: PPOConfig) -> None:
    """Raises ConfigError where groups that share GPUs differ in size. Groups that are not started do not count."""
    train, actor = config.train, config.actor
    critic = config.algo.advantage.estimator == "gae"
    reward = config.reward.model_name_or_path is not None
    own_reference = config.algo.kl.enabled and not config.reference_below_adapters
    if own_reference and (train.colocate_actor_ref or train.colocate_all):
        flag = "--train.colocate_all" if train.colocate_all else "--train.colocate_actor_ref"
        _same_size(flag, "actor", actor, "ref", config.ref)
    if train.colocate_all and critic:
        _same_size("--train.colocate_all", "actor", actor, "critic", config.critic)
    if train.colocate_all and reward:
        _same_size("--train.colocate_all", "actor", actor, "reward", config.reward)
    if train.colocate_critic_reward and critic and reward:
        _same_size("--train.colocate_critic_reward", "critic", config.critic, "reward", config.reward)
    if train.colocate_all and not train.async_enable:
        _check_engines_fill(config)


def _check_engines_fill(config: PPOConfig) -> None:
    vllm, actor = config.vllm, config.actor
    each, left = divmod(vllm.num_engines * vllm.tensor_parallel_size, actor.world_size)
    if left or (each > 1 and vllm.tensor_parallel_size > 1):
        raise ConfigError(
            f"--train.colocate_all puts engines and actor on the same GPUs, but --vllm.num_engines "
            f"{vllm.num_engines} x --vllm.tensor_parallel_size {vllm.tensor_parallel_size} is not "
            f"--actor.num_nodes {actor.num_nodes} x --actor.num_gpus_per_node {actor.num_gpus_per_node}; make them "
            "equal, or, with --vllm.tensor_parallel_size 1, --vllm.num_engines a multiple of it: each GPU then has "
            "several engines."
        )


def _same_size(flag: str, name: str, group: PlacementConfig, other_name: str, other: PlacementConfig) -> None:
    if (group.num_nodes, group.num_gpus_per_node) != (other.num_nodes, other.num_gpus_per_node):
        raise ConfigError(
            f"{flag} needs groups of one size, but {name} has {group.num_nodes} x {group.num_gpus_per_node} and "
            f"{other_name} {other.num_nodes} x {other.num_gpus_per_node}; set --{other_name}.num_nodes and "
            f"--{other_name}.num_gpus_per_node to {name}'s."
        )
