"""Rows of a data set as preference pairs, for the commands that train on them."""

from __future__ import annotations

from typing import Any

from openrlhf.config import DPOConfig, RMConfig
from openrlhf.data.preference import PreferenceDataset, PreferenceFormat
from openrlhf.data.rows import Rows


def tokenise_pairs(
    config: RMConfig | DPOConfig,
    rows: Rows,
    tokenizer: Any,
    *,
    margin: bool,
    progress: bool = False,
    workers: int = 0,
) -> PreferenceDataset:
    """Args: ``margin``: every row has a margin, which is read. Raises: ConfigError, DataError."""
    data = config.data
    form = PreferenceFormat(
        prompt_key=data.prompt_key,
        chosen_key=data.chosen_key,
        rejected_key=data.rejected_key,
        input_template=data.input_template,
        apply_chat_template=data.apply_chat_template,
        margin=margin,
    )
    return PreferenceDataset(rows, tokenizer, form, max_len=data.max_len, progress=progress, workers=workers)
