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
    from openrlhf.models.merging import MergeSpec, merge_folders

    spec = MergeSpec(
        model_path=config.model_path,
        lora_path=str(config.lora_path),
        output_path=str(config.output_path),
        is_rm=config.is_rm,
        param_dtype=config.ds.param_dtype,
        trust_remote_code=config.trust_remote_code,
    )
    merge_folders(spec, note=lambda text: print(text, flush=True))
