"""What the commands of supervised training do around their loop: start, load, lock, leave."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from openrlhf.backends.deepspeed_backend import DeepSpeedBackend
from openrlhf.backends.distributed import desert_distributed, init_distributed, shutdown_distributed
from openrlhf.backends.shapes import parameter_shapes
from openrlhf.config import DPOConfig, RMConfig, SFTConfig, to_flags_yaml
from openrlhf.config.commands import command_of
from openrlhf.config.errors import ConfigError
from openrlhf.config.parse import print_note
from openrlhf.data.rows import Rows
from openrlhf.data.sources import load_dataset_mix
from openrlhf.data.streaming import StreamedRows
from openrlhf.models.loading import load_tokenizer
from openrlhf.models.value_head import HeadSpec
from openrlhf.trainer.process import make_deterministic, prepare_process, rank_from_environment
from openrlhf.trainer.supervised import LoopSettings, Objective, SupervisedTrainer, planned_steps
from openrlhf.trainer.supervised_outputs import SupervisedOutputs, sole_run
from openrlhf.utils.devices import choose_device

SupervisedConfig = SFTConfig | RMConfig | DPOConfig


class TokenisedData(Protocol):
    """Rows or pairs that were tokenised at the start."""

    largest_token: int

    def summary(self) -> str:
        """Returns: one line on what is in it."""


def run_supervised(
    config: SupervisedConfig,
    tokenise: Callable[..., Any],
    train: Callable[..., Any],
) -> None:
    """Runs a command of supervised training; every rank of a launcher calls it, or else the process is the only rank.

    Args:
        tokenise: takes the config, rows, the tokenizer, whether to show progress and the number of processes, and gives
            the rows' data.
        train: takes the config, the tokenizer, training and held-out data (or None) and the device; collective.

    Raises:
        ConfigError, DataError: the settings or the data cannot be used, or another run writes into the same folder.
        RankError: something could not be written or read, on all ranks.
    """
    device = choose_device(config.device)
    if config.train.full_determinism_enable:
        make_deterministic()
    speaking = rank_from_environment() == 0
    prepare_process(device, bars=speaking and sys.stdout.isatty())
    tokenizer = load_tokenizer(
        config.model.model_name_or_path,
        use_fast=not config.data.disable_fast_tokenizer,
        trust_remote_code=config.trust_remote_code,
        chat_template=config.data.tokenizer_chat_template,
    )
    # Before the ranks meet: what is wrong with the data is then said within seconds.
    data, evaluation = load_data(config, tokenise, tokenizer, progress=speaking)
    if speaking:
        for name, part in (("training", data), ("evaluation", evaluation)):
            if part is not None:
                print(f"{name} data: {part.summary()}", flush=True)
        if isinstance(data, StreamedRows) and data.in_memory:
            files = ", ".join(data.in_memory)
            print_note(f"{files}: read into memory whole, which JSON lines, Parquet and Arrow files are not.")
    try:
        init_distributed(device)
        with sole_run(config.ckpt, print_note):
            train(config, tokenizer, data, evaluation, device=device)
            if speaking and isinstance(data, StreamedRows):
                print(f"training data: {data.closing()}", flush=True)
        shutdown_distributed()
    except BaseException:
        desert_distributed()
        raise
    finally:
        if isinstance(data, StreamedRows):
            data.close()


def load_data(
    config: SupervisedConfig, tokenise: Callable[..., Any], tokenizer: Any, *, progress: bool = False
) -> tuple[Any, Any]:
    """Returns: the training data, and the held-out data in the same format; None where nothing is to be evaluated.

    Raises: ConfigError, DataError.
    """
    held_out = evaluation_rows(config)
    rows = training_rows(config)
    workers = config.data.dataloader_num_workers
    tokenised = partial(tokenise, config, tokenizer=tokenizer, progress=progress, workers=workers)
    if not config.data.streaming:
        data = tokenised(rows)
        return data, None if held_out is None else tokenised(held_out)
    # Last, because its processes stay: none is to be forked beside the threads that look after them.
    evaluation = None if held_out is None else tokenised(held_out)
    return StreamedRows(rows, partial(tokenise, config, tokenizer=tokenizer), workers=workers), evaluation


def training_backend(
    config: SupervisedConfig, device: str, items: int, head: HeadSpec | None = None
) -> DeepSpeedBackend:
    """Loads the model that is trained; collective.

    Args:
        items: rows or pairs of the training data, from which the schedule's length follows.
        head: a scalar head in place of the one that gives logits.
    """
    return DeepSpeedBackend.for_training(
        config.model.model_name_or_path,
        ds=config.ds,
        optimizer=config.optimizer,
        gradient_checkpointing=config.model.gradient_checkpointing_enable,
        gradient_checkpointing_reentrant=config.model.gradient_checkpointing_reentrant,
        total_steps=planned_steps(items, loop_settings(config)),
        device=device,
        seed=config.train.seed,
        trust_remote_code=config.trust_remote_code,
        head=head,
    )


def train_and_export(
    config: SupervisedConfig,
    backend: DeepSpeedBackend,
    tokenizer: Any,
    objective: Objective,
    held_out: Objective | None,
    *,
    title: str,
    fixed: dict[str, Any],
    before_export: Callable[[], str] | None = None,
) -> None:
    """Runs the loop from its start, or from where an earlier run stood, to the exported model; collective.

    Args:
        title: of the report.
        fixed: by flag, what a resumed run must share beside ``fixed_settings``.
        before_export: called on all ranks before each export; gives a line to print.
    """
    outputs = SupervisedOutputs(
        backend,
        tokenizer,
        shapes=parameter_shapes(backend.module),
        ckpt=config.ckpt,
        logger=config.logger,
        command=command_of(config),
        title=title,
        config_yaml=to_flags_yaml(config),
        before_export=before_export,
    )
    trainer = SupervisedTrainer(
        backend,
        objective,
        loop_settings(config),
        outputs,
        seed=config.train.seed,
        fixed=fixed_settings(config) | fixed,
        eval_objective=held_out,
    )
    try:
        trainer.run()
    finally:
        outputs.close()


def loop_settings(config: SupervisedConfig) -> LoopSettings:
    """Returns: the length and the rhythm of the run."""
    return LoopSettings(
        batch_size=config.train.batch_size,
        micro_batch_size=config.train.micro_batch_size,
        max_epochs=config.train.max_epochs,
        eval_steps=config.eval.steps,
        save_steps=config.ckpt.save_steps,
        profile=config.logger.profiled,
    )


def fixed_settings(config: SupervisedConfig) -> dict[str, Any]:
    """Returns: by flag, what a resumed run must share with the one that it goes on from."""
    return (
        {
            "--train.batch_size": config.train.batch_size,
            "--train.max_epochs": config.train.max_epochs,
        }
        | config.optimizer.fixed("")
        | config.ds.adapter_flags
    )


def training_rows(config: SupervisedConfig) -> Rows:
    """Returns: the rows of --data.dataset.

    Raises: ConfigError, DataError.
    """
    return load_dataset_mix(
        config.data.dataset,
        config.data.dataset_probs,
        split=config.data.dataset_split,
        max_samples=config.data.max_samples,
        seed=config.train.seed,
        use_ms=config.use_ms,
    )


def evaluation_rows(config: SupervisedConfig) -> Rows | None:
    """Returns: the rows of --eval.dataset; None where nothing is to be evaluated.

    Raises: ConfigError, DataError.
    """
    if config.eval.dataset is None or config.eval.steps <= 0:
        return None
    return load_dataset_mix(
        config.eval.dataset,
        None,
        split=config.eval.split,
        max_samples=config.data.max_samples,
        seed=config.train.seed,
        use_ms=config.use_ms,
    )


def check_vocabulary(
    backend: DeepSpeedBackend, parts: Sequence[TokenisedData], model: str, flag: str = "--model.model_name_or_path"
) -> None:
    """Raises: ConfigError where the tokenizer writes ids that ``model``, named by ``flag``, has no embedding for."""
    known = backend.module.get_input_embeddings().num_embeddings

    def check(largest: int) -> None:
        if largest >= known:
            raise ConfigError(
                f"the tokenizer writes token {largest}, and {flag} {model} has only {known} embeddings: take the "
                "tokenizer that belongs to the model, or resize its embeddings first"
            )

    for part in parts:
        check(part.largest_token)
        if isinstance(part, StreamedRows):
            part.check_tokens(check)
