"""What the plans of all commands are made of: models, data, memory, and what machines there are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from openrlhf.config import CkptConfig, ConfigError, DeepSpeedConfig, PPOConfig
from openrlhf.config.commands import TrainingConfig
from openrlhf.config.plan import ModelFacts, Plan, count_words, memory_rows, size_words
from openrlhf.data.rows import Rows
from openrlhf.models.adapters import adapter_size, linear_size
from openrlhf.models.loading import context_length, load_config, load_tokenizer

# Rows that are rendered and tokenised; the run itself looks at all.
PEEK = 200

Cells = list[Sequence[str]]


def add_model(plan: Plan, config: TrainingConfig, path: str, *, scalar: bool = False) -> ModelFacts:
    """Adds what is known of the model without loading its weights.

    Args:
        scalar: with a scalar head in place of the one that gives logits.

    Raises: ConfigError where there is no such model.
    """
    facts, kind = model_facts(path, config.trust_remote_code, scalar=scalar, trained=config.ds)
    cells = [("path", path), ("kind", f"{kind}, {count_words(facts.parameters)} parameters in {config.ds.param_dtype}")]
    if facts.adapters:
        cells.append(("trained", adapter_words(facts, config.ds)))
    if facts.context is not None:
        cells.append(("context", f"{facts.context} tokens, of which --data.max_len uses {config.data.max_len}"))
    plan.add("model", cells)
    return facts


def adapter_words(facts: ModelFacts, ds: DeepSpeedConfig) -> str:
    """Returns: what is trained of a model with adapters, and what it stands on."""
    below = "weights in nf4" if facts.packed else "frozen weights"
    return f"{count_words(facts.adapters)} parameters of adapters of rank {ds.lora.rank}, over {below}"


def model_facts(
    path: str, trust_remote_code: bool, *, scalar: bool = False, trained: DeepSpeedConfig | None = None
) -> tuple[ModelFacts, str]:
    """Returns: the sizes of a model, from its config alone, and its type.

    Args:
        scalar: with a scalar head in place of the one that gives logits.
        trained: how, where it is trained; adapters may be put into it then.

    Raises: ConfigError where it cannot be read, or its layers are not those that adapters were asked for.
    """
    config = load_config(path, trust_remote_code=trust_remote_code)
    if scalar:
        config.num_labels = 1
    auto_class = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    try:
        with torch.device("meta"):
            model = auto_class.from_config(config, trust_remote_code=trust_remote_code)
    except ValueError as error:
        kind = "model that can be given a scalar head" if scalar else "language model"
        raise ConfigError(f"{path} is no {kind}: {str(error).splitlines()[0]}") from error
    text = config.get_text_config()
    lora = None if trained is None or trained.lora.rank == 0 else trained.lora
    facts = ModelFacts(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        hidden=text.hidden_size,
        layers=text.num_hidden_layers,
        vocab=1 if scalar else text.vocab_size,
        context=context_length(config),
        adapters=0 if lora is None else adapter_size(model, lora),
        packed=linear_size(model) if lora is not None and trained.load_in_4bit else 0,
    )
    return facts, config.model_type


def data_cells(flag: str, spec: str, rows: Rows) -> Cells:
    """Returns: where the rows come from, how many there are and what columns they have."""
    return [(flag, f"{spec}: {len(rows)} rows"), ("columns", ", ".join(rows.column_names))]


def add_memory(
    plan: Plan,
    memory: dict[str, dict[str, float]],
    groups: list[tuple[tuple[str, ...], int]],
    device: str,
    *,
    unit: str = "worker",
) -> None:
    """Adds estimated bytes by part, and warns where they are more than there are.

    Args:
        groups: roles that share places, and how many places.
        unit: what the bytes are of on a CPU.
    """
    where = "GPU" if device == "cuda" else unit
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


def plan_tokenizer(config: TrainingConfig, path: str) -> Any:
    return load_tokenizer(
        path,
        use_fast=not config.data.disable_fast_tokenizer,
        trust_remote_code=config.trust_remote_code,
        chat_template=None if isinstance(config, PPOConfig) else config.data.tokenizer_chat_template,
    )


def sizes_words(updates: Sequence[int]) -> str:
    low, high = min(updates), max(updates)
    return str(low) if low == high else f"{low} to {high}"


def file_cells(ckpt: CkptConfig, state: Path | None, *, adapters: bool = False) -> Cells:
    """Returns: where a run would write, and the ``state`` that it would go on from.

    Args: ``adapters``: they alone are trained and written.
    """
    what = "adapter (merge it with openrlhf lora_combiner), metrics" if adapters else "model, metrics"
    cells: Cells = [(what, ckpt.output_dir)]
    if ckpt.save_steps > 0:
        cells.append(("states", f"{ckpt.path}, every {ckpt.save_steps} steps"))
    if ckpt.load_enable:
        cells.append(("goes on from", str(state) if state is not None else "nothing: there is no state yet"))
    return cells
