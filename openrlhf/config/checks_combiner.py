"""Checks of the flags of lora_combiner."""

from __future__ import annotations

from pathlib import Path

from openrlhf.config.checks_system import check_writable
from openrlhf.config.commands import LoraCombinerConfig
from openrlhf.config.errors import ConfigError

PARTIAL = ".partial"
"""Below the output folder: files that are not whole yet. A kill leaves it behind, and the next run takes it away."""


def check_combiner(config: LoraCombinerConfig) -> None:
    """Raises ConfigError where a folder is missing, or the merged model would take the place of something else."""
    if not config.lora_path:
        raise ConfigError("--lora_path is missing: give the folder of the adapter.")
    if not config.output_path:
        raise ConfigError("--output_path is missing: give a folder for the merged model.")
    if config.device == "cuda":
        raise ConfigError("--device cuda: lora_combiner merges on the CPU, with memory for the model; leave it out.")
    output = Path(config.output_path).expanduser()
    for flag, path in (("model_path", config.model_path), ("lora_path", config.lora_path)):
        if path and Path(path).expanduser().exists() and output.resolve() == Path(path).expanduser().resolve():
            raise ConfigError(
                f"--output_path {config.output_path} is the folder of --{flag}, which is to stay: give another one."
            )
    check_writable("output_path", str(output))
    if output.is_dir() and any(path.name != PARTIAL for path in output.iterdir()):
        raise ConfigError(
            f"--output_path {config.output_path} is not empty: give a new folder, or remove what is in it first."
        )
