"""Supervised fine-tuning: what `train_sft` runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from openrlhf.algorithms.aggregate import aggregate
from openrlhf.backends.base import Backend
from openrlhf.backends.deepspeed_backend import DeepSpeedBackend
from openrlhf.config import SFTConfig
from openrlhf.data.packed_batch import PackedBatch, empty_batch, pack_rows
from openrlhf.data.rows import Rows
from openrlhf.data.sft import SFTDataset, SFTFormat
from openrlhf.data.streaming import StreamedRows
from openrlhf.trainer.streamed import objective_over
from openrlhf.trainer.supervised import Objective
from openrlhf.trainer.supervised_run import check_vocabulary, run_supervised, train_and_export, training_backend


class SFTObjective(Objective):
    """Cross entropy, as a mean over the trained tokens of an optimizer step."""

    def __init__(self, data: SFTDataset, pad_token_id: int) -> None:
        """Args: ``pad_token_id`` fills the batch of a rank that is short of rows."""
        self._data = data
        self._pad_token_id = pad_token_id
        self.lengths = data.lengths
        self._trained = data.trained_tokens

    def pack(self, items: Sequence[int]) -> PackedBatch:
        """Lays rows end to end."""
        if not items:
            return empty_batch(self._pad_token_id)
        records = [self._data[item] for item in items]
        return pack_rows([record.tokens for record in records], [record.loss_mask for record in records])

    def units(self, items: Sequence[int]) -> int:
        """Trained tokens of the rows."""
        return int(self._trained[np.asarray(items, dtype=np.int64)].sum())

    def loss(self, backend: Backend, batch: PackedBatch, units: int) -> tuple[torch.Tensor, dict[str, float]]:
        """This batch's share of the mean negative log-likelihood over ``units`` tokens."""
        batch = batch.to(backend.device)
        scores = backend.forward(batch)
        share = aggregate(-scores.logprobs, batch.action_mask, batch.cu_seqlens, "token_mean", units)
        return share, {}


def run(config: SFTConfig) -> None:
    """Fine-tunes a model on the responses of a data set and writes it to --ckpt.output_dir.

    Every rank of a launcher calls it; without a launcher the process is the only rank.

    Raises:
        ConfigError, DataError: the settings or the data cannot be used, or another run writes into the same folder.
        RankError: something could not be written or read, on all ranks.
    """
    run_supervised(config, tokenise, train)


def train(
    config: SFTConfig, tokenizer: Any, data: SFTDataset | StreamedRows, evaluation: SFTDataset | None, *, device: str
) -> DeepSpeedBackend:
    """Trains and exports, in a process group that stands; collective.

    Args:
        data: of training.
        evaluation: held out; None where there is none.
        device: "cpu" or "cuda".

    Returns: the backend with the trained model.
    """
    backend = training_backend(config, device, len(data))
    check_vocabulary(backend, [data] if evaluation is None else [data, evaluation], config.model.model_name_or_path)
    objective = objective_over(data, lambda part: SFTObjective(part, tokenizer.pad_token_id))
    held_out = None if evaluation is None else SFTObjective(evaluation, tokenizer.pad_token_id)
    train_and_export(config, backend, tokenizer, objective, held_out, title="Supervised fine-tuning", fixed={})
    return backend


def tokenise(config: SFTConfig, rows: Rows, tokenizer: Any, *, progress: bool = False, workers: int = 0) -> SFTDataset:
    """Returns: the data that the rows make.

    Raises: ConfigError, DataError.
    """
    form, max_len = data_format(config), config.data.max_len
    return SFTDataset(rows, tokenizer, form, max_len=max_len, progress=progress, workers=workers)


def data_format(config: SFTConfig) -> SFTFormat:
    """Returns: how rows become text."""
    return SFTFormat(
        input_key=config.data.input_key,
        output_key=config.data.output_key,
        input_template=config.data.input_template,
        apply_chat_template=config.data.apply_chat_template,
        multiturn=config.data.multiturn,
        pretrain_mode=config.model.pretrain_mode_enable,
    )
