"""`--dry_run`: looks at model, data and machines, and says what a run would do, without starting it."""

from __future__ import annotations

import os

from openrlhf.config import PPOConfig, SFTConfig, detect_device
from openrlhf.config.checks_training import training_ranks
from openrlhf.config.commands import command_of
from openrlhf.config.plan import Plan, training_memory
from openrlhf.data.batching import split_updates
from openrlhf.data.sft import SFTDataset
from openrlhf.data.sources import load_dataset_mix
from openrlhf.trainer.dry_run_parts import (
    PEEK,
    add_memory,
    add_model,
    data_cells,
    file_cells,
    plan_tokenizer,
    sizes_words,
)
from openrlhf.trainer.dry_run_rl import rl_plan
from openrlhf.trainer.supervised_outputs import refuse_used, state_to_resume


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
    tokenizer = plan_tokenizer(config, config.model.model_name_or_path)
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
            ("updates an epoch", f"{len(updates)} of {sizes_words(updates)} rows"),
            ("epochs", f"{config.train.max_epochs}"),
            ("updates in all", f"{len(updates) * config.train.max_epochs}"),
            ("rows of a forward", f"up to {config.train.micro_batch_size} a rank"),
            ("ranks", f"{ranks}"),
        ],
    )
    refuse_used(config.ckpt)
    plan.add("files", file_cells(config.ckpt, state_to_resume(config.ckpt)))
    tokens = config.train.micro_batch_size * data.max_len
    checkpointing = config.model.gradient_checkpointing_enable
    memory = {"model": training_memory(facts, config.ds, ranks=ranks, tokens=tokens, checkpointing=checkpointing)}
    add_memory(plan, memory, [(("model",), ranks)], detect_device(config.device))
    return plan
