"""What the commands of supervised training do around their loop: start, load, lock, leave."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from openrlhf.backends.deepspeed_backend import DeepSpeedBackend
from openrlhf.backends.distributed import init_distributed, shutdown_distributed
from openrlhf.config import DPOConfig, RMConfig, SFTConfig
from openrlhf.config.errors import ConfigError
from openrlhf.config.parse import print_note
from openrlhf.data.rows import Rows
from openrlhf.data.sources import load_dataset_mix
from openrlhf.models.loading import load_tokenizer
from openrlhf.trainer.process import choose_device, make_deterministic, prepare_process, rank_from_environment
from openrlhf.trainer.supervised import LoopSettings
from openrlhf.trainer.supervised_outputs import sole_run

SupervisedConfig = SFTConfig | RMConfig | DPOConfig


class TokenisedData(Protocol):
    """Rows or pairs that were tokenised at the start."""

    largest_token: int

    def summary(self) -> str:
        """Returns: one line on what is in it."""


def run_supervised(
    config: SupervisedConfig,
    load_data: Callable[..., Any],
    load_evaluation: Callable[..., Any],
    train: Callable[..., Any],
) -> None:
    """Runs a command of supervised training; every rank of a launcher calls it, or else the process is the only rank.

    Args:
        load_data: takes the config, the tokenizer and whether to show progress, and gives the training data.
        load_evaluation: likewise the held-out data, or None.
        train: takes the config, the tokenizer, both and the device; collective.

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
    data = load_data(config, tokenizer, progress=speaking)
    evaluation = load_evaluation(config, tokenizer, progress=speaking)
    if speaking:
        for name, part in (("training", data), ("evaluation", evaluation)):
            if part is not None:
                print(f"{name} data: {part.summary()}", flush=True)
    init_distributed(device)
    with sole_run(config.ckpt, print_note):
        train(config, tokenizer, data, evaluation, device=device)
    shutdown_distributed()


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
    optimizer, adam = config.optimizer, config.optimizer.adam
    return {
        "--train.batch_size": config.train.batch_size,
        "--train.max_epochs": config.train.max_epochs,
        "--lr_scheduler": optimizer.lr_scheduler,
        "--lr_warmup_ratio": optimizer.lr_warmup_ratio,
        "--min_lr_ratio": optimizer.min_lr_ratio,
        "--adam.lr": adam.lr,
        "--adam.betas": tuple(adam.betas),
        "--adam.eps": adam.eps,
        "--adam.weight_decay": adam.weight_decay,
    }


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
    largest = max(part.largest_token for part in parts)
    if largest >= known:
        raise ConfigError(
            f"the tokenizer writes token {largest}, and {flag} {model} has only {known} embeddings: take the tokenizer "
            "that belongs to the model, or resize its embeddings first"
        )
