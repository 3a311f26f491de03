"""`--dry_run`: looks at model, data and machines, and says what a run would do, without starting it."""

from __future__ import annotations

import os

from openrlhf.config import DPOConfig, PPOConfig, RMConfig, SFTConfig, detect_device
from openrlhf.config.checks_training import training_ranks
from openrlhf.config.commands import command_of
from openrlhf.config.plan import Plan, count_words, inference_memory, training_memory
from openrlhf.data.batching import split_updates
from openrlhf.trainer.dry_run_parts import (
    PEEK,
    add_memory,
    add_model,
    data_cells,
    file_cells,
    model_facts,
    plan_tokenizer,
    sizes_words,
)
from openrlhf.trainer.dry_run_rl import rl_plan
from openrlhf.trainer.supervised_outputs import refuse_used, state_to_resume


def run(config: SFTConfig | RMConfig | DPOConfig | PPOConfig) -> None:
    """Prints the plan of a run, on one rank.

    Raises:
        ConfigError, DataError: what the run would fail on.
    """
    plan = rl_plan(config) if isinstance(config, PPOConfig) else supervised_plan(config)
    if int(os.environ.get("RANK", 0)) == 0:
        print(plan.text())


def supervised_plan(config: SFTConfig | RMConfig | DPOConfig) -> Plan:
    """Returns: the plan of `train_sft`, `train_rm` or `train_dpo`.

    Raises: ConfigError, DataError.
    """
    from openrlhf.trainer import dpo, rm, sft
    from openrlhf.trainer.supervised_run import evaluation_rows, training_rows

    pairs = isinstance(config, RMConfig | DPOConfig)
    tokenise = {SFTConfig: sft.tokenise, RMConfig: rm.tokenise, DPOConfig: dpo.tokenise}[type(config)]
    plan = Plan(f"Plan of {command_of(config)} (nothing was started)")
    facts = add_model(plan, config, config.model.model_name_or_path, scalar=isinstance(config, RMConfig))
    tokenizer = plan_tokenizer(config, config.model.model_name_or_path)
    rows = training_rows(config)
    peek = tokenise(config, rows.take(PEEK), tokenizer)
    cells = data_cells("data.dataset", config.data.dataset, rows)
    cells.append((f"first {min(PEEK, len(rows))} rows", peek.summary()))
    held_out = evaluation_rows(config)
    if held_out is not None:
        tokenise(config, held_out.take(PEEK), tokenizer)
        cells += data_cells("eval.dataset", config.eval.dataset, held_out)
    plan.add("data", cells)

    ranks, _ = training_ranks(config)
    unit = "pairs" if pairs else "rows"
    updates = split_updates(len(rows), config.train.batch_size)
    plan.add(
        "batches",
        [
            ("updates an epoch", f"{len(updates)} of {sizes_words(updates)} {unit}"),
            ("epochs", f"{config.train.max_epochs}"),
            ("updates in all", f"{len(updates) * config.train.max_epochs}"),
            (f"{unit} of a forward", f"up to {config.train.micro_batch_size} a rank"),
            ("ranks", f"{ranks}"),
        ],
    )
    refuse_used(config.ckpt)
    plan.add("files", file_cells(config.ckpt, state_to_resume(config.ckpt), adapters=config.ds.lora.rank > 0))
    tokens = config.train.micro_batch_size * config.data.max_len * (2 if pairs else 1)
    checkpointing = config.model.gradient_checkpointing_enable
    memory = {"model": training_memory(facts, config.ds, ranks=ranks, tokens=tokens, checkpointing=checkpointing)}
    if isinstance(config, DPOConfig) and config.model.has_reference:
        _add_reference(plan, config, memory, ranks=ranks, tokens=tokens)
    add_memory(plan, memory, [(tuple(memory), ranks)], detect_device(config.device))
    return plan


def _add_reference(
    plan: Plan, config: DPOConfig, memory: dict[str, dict[str, float]], *, ranks: int, tokens: int
) -> None:
    """Says which model is the reference, and what it takes beside the one that is trained."""
    from openrlhf.trainer.reference import reference_path

    path = reference_path(config)
    if config.reference_below_adapters:
        cells = [("path", path), ("kind", "the trained model with its adapters off: no memory of its own")]
        plan.add("reference", cells)
        return
    facts, kind = model_facts(path, config.trust_remote_code)
    when = "once, before the other is loaded" if config.ref.precompute else "during training"
    cells = [("path", path), ("kind", f"{kind}, {count_words(facts.parameters)} parameters"), ("asked", when)]
    plan.add("reference", cells)
    if not config.ref.precompute:
        memory["reference"] = inference_memory(facts, config.ds, ranks=ranks, tokens=tokens)
