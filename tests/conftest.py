"""Environment of all tests: offline, quiet, and small enough for two cores."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

DEFAULTS = {
    # Several processes share two cores; more threads each only fight.
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "WANDB_MODE": "offline",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "DS_ACCELERATOR": "cpu",
    # One build of compiled extensions for this environment, shared with no other.
    "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix) / "torch_extensions"),
}


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_configure(config: pytest.Config) -> None:
    """Sets the defaults before anything that reads them is imported; what the user has set stays."""
    for name, value in DEFAULTS.items():
        if name == "DS_ACCELERATOR" and "gpu" in (config.option.markexpr or ""):
            continue
        os.environ.setdefault(name, value)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests that need a GPU where there is none, and says so."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_gpu():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU; none is visible here"))
