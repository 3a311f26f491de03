"""`--dry_run`: looks at model, data and machines, and says what a run would do, without starting it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from openrlhf.config import ConfigError, PPOConfig, SFTConfig, detect_device
from openrlhf.config.checks_training import training_ranks
from openrlhf.config.commands import command_of
from openrlhf.config.plan import (
    ModelFacts,
    Plan,
    count_words,
    inference_memory,
    memory_rows,
    size_words,
    training_memory,
)
from openrlhf.data.batching import planned_updates, split_updates
from openrlhf.data.prompts import PromptDataset
from openrlhf.data.rows import Rows
from openrlhf.data.sft import SFTDataset
from openrlhf.data.sources import load_dataset_mix
from openrlhf.data.templates import encode
from openrlhf.models.loading import context_length, load_config, load_tokenizer

# Rows that are rendered and tokenised; the run itself looks at all.
PEEK = 200

Cells = list[Sequence[str]]


def run(config: SFTConfig | PPOConfig) -> None:
    """Prints the plan of a run, on one rank.

    Raises:
        ConfigError, DataError: what the run would fail on.
    """
    plan = rl_plan(config) if isinstance(config, PPOConfig) else sft_plan(config)
    if int(os.environ.get("RANK", 0)) == 0:
        print(plan.text())


def sft_plan(config: SFTConfig) -> Plan:
    """Returns: the plan of `train_sft`.

    Raises: ConfigError, DataError.
    """
    from openrlhf.trainer.sft import data_format

    plan = Plan(f"Plan of {command_of(config)} (nothing was started)")
    facts = add_model(plan, config, config.model.model_name_or_path)
    tokenizer = _tokenizer(config, config.model.model_name_or_path)
    data = config.data
    rows = load_dataset_mix(
        data.dataset, data.dataset_probs, split=data.dataset_split, max_samples=data.max_samples,
        seed=config.train.seed, use_ms=config.use_ms,
    )  # fmt: skip
    peek = SFTDataset(rows.take(PEEK), tokenizer, data_format(config), max_len=data.max_len)
    cells = data_cells("data.dataset", data.dataset, rows)
    cells.append((f"first {min(PEEK, len(rows))} rows", peek.summary()))
    if config.eval.dataset is not None and config.eval.steps > 0:
        held_out = load_dataset_mix(
            config.eval.dataset, None, split=config.eval.split, max_samples=data.max_samples, seed=config.train.seed,
            use_ms=config.use_ms,
        )  # fmt: skip
        SFTDataset(held_out.take(PEEK), tokenizer, data_format(config), max_len=data.max_len)
        cells += data_cells("eval.dataset", config.eval.dataset, held_out)
    plan.add("data", cells)

    ranks, _ = training_ranks(config)
    updates = split_updates(len(rows), config.train.batch_size)
    plan.add(
        "batches",
        [
            ("updates an epoch", f"{len(updates)} of {_sizes(updates)} rows"),
            ("epochs", f"{config.train.max_epochs}"),
            ("updates in all", f"{len(updates) * config.train.max_epochs}"),
            ("rows of a forward", f"up to {config.train.micro_batch_size} a rank"),
            ("ranks", f"{ranks}"),
        ],
    )
    tokens = config.train.micro_batch_size * data.max_len
    checkpointing = config.model.gradient_checkpointing_enable
    memory = {"model": training_memory(facts, config.ds, ranks=ranks, tokens=tokens, checkpointing=checkpointing)}
    add_memory(plan, memory, [(("model",), ranks)], detect_device(config.device))
    return plan


def rl_plan(config: PPOConfig) -> Plan:
    """Returns: the plan of `train_ppo_ray`.

    Raises: ConfigError, DataError.
    """
    plan = Plan(f"Plan of {command_of(config)} (nothing was started)")
    facts = add_model(plan, config, config.actor.model_name_or_path)
    tokenizer = _tokenizer(config, config.actor.model_name_or_path)
    data = config.data
    rows = load_dataset_mix(
        data.prompt_dataset, data.prompt_probs, split=data.prompt_split, max_samples=data.max_samples,
        seed=config.train.seed, use_ms=config.use_ms,
    )  # fmt: skip
    prompts = PromptDataset(
        rows.take(PEEK), tokenizer, input_key=data.input_key, label_key=data.label_key,
        input_template=data.input_template, apply_chat_template=data.apply_chat_template,
    )  # fmt: skip
    cells = data_cells("data.prompt_dataset", data.prompt_dataset, rows)
    plan.add("data", cells + prompt_cells(config, prompts, tokenizer))
    plan.add("batches", rl_batch_cells(config, len(rows)))
    add_placement(plan, config, facts)
    return plan


def add_model(plan: Plan, config: SFTConfig | PPOConfig, path: str) -> ModelFacts:
    """Adds what is known of the model without loading its weights.

    Raises: ConfigError where there is no such model.
    """
    facts, kind = model_facts(path, config.trust_remote_code)
    cells = [("path", path), ("kind", f"{kind}, {count_words(facts.parameters)} parameters in {config.ds.param_dtype}")]
    if facts.context is not None:
        cells.append(("context", f"{facts.context} tokens, of which --data.max_len uses {config.data.max_len}"))
    plan.add("model", cells)
    return facts


def model_facts(path: str, trust_remote_code: bool) -> tuple[ModelFacts, str]:
    """Returns: the sizes of a model, from its config alone, and its type.

    Raises: ConfigError where it cannot be read.
    """
    config = load_config(path, trust_remote_code=trust_remote_code)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except ValueError as error:
        raise ConfigError(f"{path} is no language model: {str(error).splitlines()[0]}") from error
    text = config.get_text_config()
    facts = ModelFacts(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        hidden=text.hidden_size,
        layers=text.num_hidden_layers,
        vocab=text.vocab_size,
        context=context_length(config),
    )
    return facts, config.model_type


def data_cells(flag: str, spec: str, rows: Rows) -> Cells:
    """Returns: where the rows come from, how many there are and what columns they have."""
    return [(flag, f"{spec}: {len(rows)} rows"), ("columns", ", ".join(rows.column_names))]


def prompt_cells(config: PPOConfig, prompts: PromptDataset, tokenizer: Any) -> Cells:
    """Returns: how long the first prompts are, and how many would be cut."""
    lengths = sorted(len(encode(tokenizer, record.prompt, templated=record.templated)) for record in prompts)
    room = config.data.max_len - (config.rollout.max_new_tokens or 1)
    cut = sum(length > room for length in lengths)
    words = f"{lengths[len(lengths) // 2]} tokens in the middle, {lengths[-1]} at most"
    return [(f"first {len(lengths)} prompts", f"{words}; {cut} longer than the {room} that fit")]


def rl_batch_cells(config: PPOConfig, prompts: int) -> Cells:
    """Returns: what a step and the whole run are made of."""
    rollout, train = config.rollout, config.train
    in_step = min(rollout.batch_size, prompts)
    samples = in_step * rollout.n_samples_per_prompt
    updates = split_updates(samples, train.batch_size)
    steps = train.num_episodes * -(-prompts // rollout.batch_size)
    total = planned_updates(
        num_prompts=prompts, rollout_batch_size=rollout.batch_size, samples_per_prompt=rollout.n_samples_per_prompt,
        train_batch_size=train.batch_size, num_episodes=train.num_episodes, max_epochs=train.max_epochs,
    )  # fmt: skip
    return [
        ("samples a step", f"{in_step} prompts x {rollout.n_samples_per_prompt} = {samples}"),
        ("updates a step", f"{len(updates) * train.max_epochs} of {_sizes(updates)} samples"),
        ("episodes", f"{train.num_episodes}"),
        ("steps", f"{steps}"),
        ("updates in all", f"{total}"),
    ]


def add_placement(plan: Plan, config: PPOConfig, facts: ModelFacts) -> None:
    """Adds who runs where, against what the cluster or this machine has, and the memory that it takes.

    Raises: ConfigError where there are too few GPUs.
    """
    from openrlhf.trainer.cluster import colocated_roles, role_sizes

    gpus, cpus, source = resources()
    device = "cuda" if config.device == "cuda" or (config.device == "auto" and gpus) else "cpu"
    sizes = role_sizes(config)
    width = {"engine": config.vllm.tensor_parallel_size}
    groups = [(roles, max(sizes[role] * width.get(role, 1) for role in roles)) for roles in colocated_roles(config)]
    unit = "GPUs" if device == "cuda" else "CPU places"
    cells: Cells = [(" + ".join(roles), f"{count} {unit}") for roles, count in groups]
    needed = sum(count for _, count in groups)
    there = gpus if device == "cuda" else cpus
    cells.append(("together", f"{needed} {unit}, of {'any number' if there is None else there} on {source}"))
    plan.add("placement", cells)
    if there is not None and needed > there:
        raise ConfigError(
            f"the run needs {needed} {unit}, and {source} has {there}; lower --actor.num_gpus_per_node, "
            "--ref.num_gpus_per_node or --vllm.num_engines, or share places with --train.colocate_all."
        )
    add_memory(plan, rl_memory(config, facts, device), groups, device)


def rl_memory(config: PPOConfig, facts: ModelFacts, device: str) -> dict[str, dict[str, float]]:
    """Returns: role -> part -> bytes of one worker."""
    from openrlhf.rollout.engine_spec import cpu_cache_bytes

    train, rollout, data = config.train, config.rollout, config.data
    by_rows = not train.dynamic_batch_enable
    trained = train.micro_batch_size * data.max_len if by_rows else max(train.max_tokens_per_gpu, data.max_len)
    scored = rollout.micro_batch_size * data.max_len
    if not by_rows:
        scored = max(rollout.max_tokens_per_gpu or train.max_tokens_per_gpu, data.max_len)
    memory = {
        "actor": training_memory(
            facts,
            config.ds,
            ranks=config.actor.world_size,
            tokens=trained,
            checkpointing=config.actor.gradient_checkpointing_enable,
        )  # fmt: skip
    }
    if config.algo.kl.enabled:
        memory["ref"] = inference_memory(facts, config.ds, ranks=config.ref.world_size, tokens=scored)
    weights = inference_memory(facts, config.ds, ranks=1, tokens=0)["weights"] / config.vllm.tensor_parallel_size
    memory["engine"] = {"weights": weights}
    if device == "cpu":
        tokens = rollout.batch_size * rollout.n_samples_per_prompt * data.max_len
        memory["engine"]["KV cache"] = float(
            cpu_cache_bytes(config.actor.model_name_or_path, tokens, config.ds.param_dtype, config.trust_remote_code)
        )
    elif torch.cuda.is_available():
        share = config.vllm.gpu_memory_utilization * torch.cuda.get_device_properties(0).total_memory
        memory["engine"]["KV cache"] = max(0.0, share - weights)
    return memory


def add_memory(
    plan: Plan, memory: dict[str, dict[str, float]], groups: list[tuple[tuple[str, ...], int]], device: str
) -> None:
    """Adds estimated bytes by part, and warns where they are more than there are.

    Args:
        groups: roles that share places, and how many places.
    """
    where = "GPU" if device == "cuda" else "worker"
    plan.add(f"memory of one {where}, estimated", memory_rows(memory))
    each = {roles: sum(sum(memory[role].values()) for role in roles) for roles, _ in groups}
    if device == "cuda" and torch.cuda.is_available():
        there = torch.cuda.get_device_properties(0).total_memory
        plan.warnings += [
            f"{' + '.join(roles)} would take about {size_words(need)} of a GPU's {size_words(there)}."
            for roles, need in each.items()
            if need > there
        ]
    if device == "cpu":
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        need = sum(each[roles] * count for roles, count in groups)
        if need > there:
            plan.warnings.append(
                f"all workers would take about {size_words(need)} of this machine's {size_words(there)}."
            )


def resources() -> tuple[int, int | None, str]:
    """What workers may be placed on: the Ray cluster that RAY_ADDRESS names, or else this machine.

    Returns: GPUs, CPU places (None where Ray is started for the run and has as many as it asks for), and where.
    """
    if "RAY_ADDRESS" not in os.environ:
        return torch.cuda.device_count(), None, "this machine"
    import ray

    joined_before = ray.is_initialized()
    if not joined_before:
        ray.init(logging_level="ERROR")
    try:
        total = ray.cluster_resources()
        return int(total.get("GPU", 0)), int(total.get("CPU", 0)), f"the Ray cluster at {os.environ['RAY_ADDRESS']}"
    finally:
        if not joined_before:
            ray.shutdown()


def _tokenizer(config: SFTConfig | PPOConfig, path: str) -> Any:
    return load_tokenizer(
        path,
        use_fast=not config.data.disable_fast_tokenizer,
        trust_remote_code=config.trust_remote_code,
        chat_template=config.data.tokenizer_chat_template if isinstance(config, SFTConfig) else None,
    )


def _sizes(updates: Sequence[int]) -> str:
    low, high = min(updates), max(updates)
    return str(low) if low == high else f"{low} to {high}"
