"""Merging an adapter into its base: what `lora_combiner` runs, in a process of its own."""

from __future__ import annotations

import logging
import sys

from openrlhf.config import LoraCombinerConfig
from openrlhf.trainer.process import prepare_process


def run(config: LoraCombinerConfig) -> None:
    """Merges --lora_path into --model_path and writes --output_path.

    Raises:
        ConfigError: one of the folders cannot be used, or the adapter does not fit the base.
        RunError: the model could not be written; nothing of it is left then.
    """
    prepare_process("cpu", bars=sys.stdout.isatty())
    # peft imports bitsandbytes, which recommends another package whenever it is imported on a CPU.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    from openrlhf.models.merging import merge_folders

    merge_folders(config, note=lambda text: print(text, flush=True))
