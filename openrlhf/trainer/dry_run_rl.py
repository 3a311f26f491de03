"""The plan of an RL run: who learns from what, in how many steps, where, and with how much memory."""

from __future__ import annotations

from typing import Any

import torch

from openrlhf.config import ConfigError, PPOConfig
from openrlhf.config.commands import command_of
from openrlhf.config.plan import ModelFacts, Plan, count_words, inference_memory, training_memory
from openrlhf.data.batching import split_updates
from openrlhf.data.prompts import PromptDataset
from openrlhf.data.rows import Rows
from openrlhf.data.sources import load_dataset_mix
from openrlhf.data.templates import encode
from openrlhf.models.loading import load_config
from openrlhf.trainer.dry_run_parts import (
    PEEK,
    Cells,
    adapter_words,
    add_memory,
    add_model,
    data_cells,
    file_cells,
    model_facts,
    plan_tokenizer,
    resources,
    sizes_words,
)
from openrlhf.trainer.schedule import check_frozen, frozen_steps, step_prompts, step_updates


def rl_plan(config: PPOConfig) -> Plan:
    """Returns: the plan of `train_ppo_ray`.

    Raises: ConfigError, DataError.
    """
    plan = Plan(f"Plan of {command_of(config)} (nothing was started)")
    facts = {"actor": add_model(plan, config, config.actor.model_name_or_path)}
    add_scalar_models(plan, config, facts)
    plan.add("rewards", reward_cells(config))
    tokenizer = plan_tokenizer(config, config.actor.model_name_or_path)
    data = config.data
    rows = _rows(config, data.prompt_dataset, data.prompt_probs, data.prompt_split)
    cells = data_cells("data.prompt_dataset", data.prompt_dataset, rows)
    cells += prompt_cells(config, rows, tokenizer)
    batches = batch_cells(plan, config, len(rows))
    if config.eval.dataset is not None and config.eval.steps > 0:
        held_out = _rows(config, config.eval.dataset, None, config.eval.split)
        cells += data_cells("eval.dataset", config.eval.dataset, held_out)
        cells += prompt_cells(config, held_out, tokenizer)
        samples = f"{len(held_out)} prompts x {config.eval.n_samples_per_prompt} samples"
        batches.append(("evaluation", f"{samples}; at the start, every {config.eval.steps} steps and at the end"))
    plan.add("data", cells)
    plan.add("batches", batches)
    plan.add("files", rl_file_cells(config, len(rows)))
    add_placement(plan, config, facts, len(rows))
    return plan


def rl_file_cells(config: PPOConfig, num_prompts: int) -> Cells:
    """Returns: where the run would write, and what it would go on from.

    Raises: ConfigError, where states of another run lie there.
    """
    from openrlhf.trainer.rl_specs import output_settings
    from openrlhf.trainer.rl_states import RLStates

    states = RLStates(config.ckpt, has_critic=config.has_critic)
    states.check(output_settings(config, num_prompts).fixed)
    return file_cells(config.ckpt, states.to_resume(), adapters=config.ds.lora.rank > 0)


def add_scalar_models(plan: Plan, config: PPOConfig, facts: dict[str, ModelFacts]) -> None:
    """Adds critic and reward models, as far as there are any, to the plan and to ``facts`` by role."""
    from openrlhf.trainer.launch import critic_source
    from openrlhf.trainer.placement import reward_roles

    rows: Cells = []
    if config.has_critic:
        path, fresh = critic_source(config)
        facts["critic"], kind = model_facts(path, config.trust_remote_code, scalar=True, trained=config.ds)
        words = f"{path}: {kind}, {count_words(facts['critic'].parameters)} parameters"
        words += ", a new scalar head" if fresh else ", its own scalar head"
        if facts["critic"].adapters:
            words += f", {adapter_words(facts['critic'], config.ds)}"
        rows.append(("critic", words))
    for role, path in zip(reward_roles(config), config.reward_models, strict=True):
        facts[role], kind = model_facts(path, config.trust_remote_code, scalar=True)
        words = f"{path}: {kind}, {count_words(facts[role].parameters)} parameters"
        if config.reward.normalize_enable:
            saved = load_config(path, trust_remote_code=config.trust_remote_code).to_dict()
            mean, std = saved.get("mean"), saved.get("std")
            if mean is not None and std is not None:
                words += f", scores normalised by mean {mean:g} and deviation {std:g}"
            else:
                plan.warnings.append(
                    f"config.json of {path} stores no mean and std of its scores, so --reward.normalize_enable leaves "
                    "them as they are."
                )
        rows.append((role, words))
    if rows:
        plan.add("models with a scalar head", rows)


def reward_cells(config: PPOConfig) -> Cells:
    """Returns: where rewards come from, and who plays the episodes."""
    agent, reward = config.train.agent_func_path, config.reward
    cells: Cells = [("episodes", f"the agent of {agent}" if agent else "one response to each prompt")]
    if reward.remote_url:
        cells.append(("reward", reward.remote_url))
    elif config.reward_models:
        count = len(config.reward_models)
        cells.append(("reward", f"{reward.combine} of {count} reward models" if count > 1 else "the reward model"))
    else:
        cells.append(("reward", "the agent's own"))
    return cells


def prompt_cells(config: PPOConfig, rows: Rows, tokenizer: Any) -> Cells:
    """Returns: how long the first prompts are, and how many would be cut. Raises: ConfigError, DataError."""
    data = config.data
    prompts = PromptDataset(
        rows.take(PEEK), tokenizer, input_key=data.input_key, label_key=data.label_key,
        input_template=data.input_template, apply_chat_template=data.apply_chat_template,
    )  # fmt: skip
    lengths = sorted(len(encode(tokenizer, record.prompt, templated=record.templated)) for record in prompts)
    room = data.max_len - (config.rollout.max_new_tokens or 1)
    cut = sum(length > room for length in lengths)
    words = f"{lengths[len(lengths) // 2]} tokens in the middle, {lengths[-1]} at most"
    return [(f"first {len(lengths)} prompts", f"{words}; {cut} longer than the {room} that fit")]


def batch_cells(plan: Plan, config: PPOConfig, prompts: int) -> Cells:
    """Returns: what a step and the whole run are made of; adds what deserves a look to the plan."""
    rollout, train = config.rollout, config.train
    check_frozen(config, prompts)
    steps = step_prompts(config, prompts)
    updates, frozen = step_updates(config, prompts), frozen_steps(config)
    at_most = "at most " if config.algo.dynamic_filtering_enable else ""
    samples = steps[0] * rollout.n_samples_per_prompt
    cells: Cells = [
        ("samples a step", f"{steps[0]} prompts x {rollout.n_samples_per_prompt} = {samples}"),
        ("updates a step", f"{updates[0]} of {sizes_words(split_updates(samples, train.batch_size))} samples"),
        ("episodes", f"{train.num_episodes}"),
        ("steps", f"{at_most}{len(steps)}"),
        ("updates in all", f"{at_most}{sum(updates[frozen:])}"),
    ]
    if config.has_critic:
        cells.append(("critic's updates", f"{at_most}{sum(updates)}"))
    if config.algo.dynamic_filtering_enable:
        low, high = config.algo.dynamic_filtering_range
        cells.append(("filter", f"groups whose mean score lies between {low:g} and {high:g} and that differ"))
    if train.enable_ema:
        cells.append(("moving average", f"of the policy, decay {train.ema_beta:g}, exported beside it"))
    return cells


def add_placement(plan: Plan, config: PPOConfig, facts: dict[str, ModelFacts], prompts: int) -> None:
    """Adds who runs where, against what the cluster or this machine has, and the memory that it takes.

    Raises: ConfigError where there are too few GPUs.
    """
    from openrlhf.trainer.placement import colocated_roles, places_of, role_sizes

    gpus, cpus, source = resources()
    device = "cuda" if config.device == "cuda" or (config.device == "auto" and gpus) else "cpu"
    sizes = role_sizes(config)
    width = {"engine": config.vllm.tensor_parallel_size}
    groups = [(roles, places_of(config, roles, width)) for roles in colocated_roles(config)]
    unit = "GPUs" if device == "cuda" else "CPU places"
    each = config.engines_per_place
    titles = {"engine": f"{each} engines on each"} if each > 1 else {}
    cells: Cells = [
        (" + ".join(titles.get(role, role) for role in roles), f"{count} {unit}") for roles, count in groups
    ]
    needed = sum(count for _, count in groups)
    there = gpus if device == "cuda" else cpus
    if config.reference_below_adapters:
        cells.append(("reference", "the actor with its adapters off"))
    cells.append(("together", f"{needed} {unit}, of {'any number' if there is None else there} on {source}"))
    plan.add("placement", cells)
    if there is not None and needed > there:
        # Several reward models have one flag.
        sized = dict.fromkeys(role.split()[0] for role in sizes if role != "engine")
        flags = ", ".join(f"--{role}.num_gpus_per_node" for role in sized)
        raise ConfigError(
            f"the run needs {needed} {unit}, and {source} has {there}; lower {flags} or --vllm.num_engines, or share "
            "places with --train.colocate_all."
        )
    add_memory(plan, rl_memory(config, facts, device, prompts), groups, device, unit="place")


def rl_memory(
    config: PPOConfig, facts: dict[str, ModelFacts], device: str, prompts: int
) -> dict[str, dict[str, float]]:
    """Estimates memory.

    Args:
        facts: by role; the reference model and the engine are the actor's.

    Returns: role -> part -> bytes of one worker; of the engines of one place together.
    """
    ds, trained, scored = config.ds, *_forward_tokens(config)
    # The critic recomputes activations where the actor does.
    training = {"tokens": trained, "checkpointing": config.actor.gradient_checkpointing_enable}
    memory = {"actor": training_memory(facts["actor"], ds, ranks=config.actor.world_size, **training)}
    if config.algo.kl.enabled and not config.reference_below_adapters:
        memory["ref"] = inference_memory(facts["actor"], ds, ranks=config.ref.world_size, tokens=scored)
    if "critic" in facts:
        memory["critic"] = training_memory(facts["critic"], ds, ranks=config.critic.world_size, **training)
    for role in facts:
        if role.startswith("reward"):
            memory[role] = inference_memory(facts[role], ds, ranks=config.reward.world_size, tokens=scored)
    if device == "cuda" and ds.adam_offload:
        for parts in memory.values():
            parts.pop("optimizer", None)
    if config.train.enable_ema and device == "cpu":
        shards = config.actor.world_size if ds.zero_stage or ds.param_dtype != "fp32" else 1
        memory["actor"]["average"] = 4 * facts["actor"].trained / shards
    memory["engine"] = _engine_memory(config, facts["actor"], device, prompts)
    return memory


def _forward_tokens(config: PPOConfig) -> tuple[int, int]:
    """Tokens of one micro-batch in training, and in a forward that only scores."""
    train, rollout, longest = config.train, config.rollout, config.data.max_len
    if not train.dynamic_batch_enable:
        return train.micro_batch_size * longest, rollout.micro_batch_size * longest
    budget = train.max_tokens_per_gpu
    return max(budget, longest), max(rollout.max_tokens_per_gpu or budget, longest)


def _engine_memory(config: PPOConfig, facts: ModelFacts, device: str, prompts: int) -> dict[str, float]:
    """What the engines of one place take: their part of the weights, and the KV cache that they are started with."""
    from openrlhf.rollout.engine_spec import cpu_cache_bytes
    from openrlhf.trainer.launch import engine_sequences

    weights = inference_memory(facts, config.ds, ranks=1, tokens=0)["weights"] / config.vllm.tensor_parallel_size
    memory = {"weights": weights}
    if device == "cpu":
        cache = cpu_cache_bytes(
            config.actor.model_name_or_path,
            engine_sequences(config, prompts, on_gpu=False) * config.data.max_len,
            config.ds.param_dtype,
            config.trust_remote_code,
        )
        memory["KV cache"] = float(config.vllm.extra.get("kv_cache_memory_bytes", cache))
    elif torch.cuda.is_available():
        share = config.vllm.gpu_memory_utilization * torch.cuda.get_device_properties(0).total_memory
        memory["KV cache"] = max(0.0, share - weights)
    return {part: config.engines_per_place * amount for part, amount in memory.items()}


def _rows(config: PPOConfig, spec: str, probs: str | None, split: str) -> Rows:
    return load_dataset_mix(
        spec, probs, split=split, max_samples=config.data.max_samples, seed=config.train.seed, use_ms=config.use_ms
    )
