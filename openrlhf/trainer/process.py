"""What a process settles before it loads a model: its rank, its device, what libraries read at their start."""

from __future__ import annotations

import os

import torch
import transformers

from openrlhf.backends.distributed import quiet_deepspeed

_CONTROLLER_THREADS = 4


def rank_from_environment() -> int:
    """Returns: this process's rank before the group stands; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def prepare_process(device: str, *, bars: bool) -> None:
    """Sets what libraries read when they are first used.

    Args:
        bars: let transformers draw its bars over loading and saving.
    """
    # Now, because transformers may import DeepSpeed long before the ranks meet.
    quiet_deepspeed(device)
    if not bars:
        transformers.utils.logging.disable_progress_bar()


def few_threads() -> None:
    """Leaves the cores to others: what a controller computes is small, and its threads would wait for one another."""
    torch.set_num_threads(min(_CONTROLLER_THREADS, torch.get_num_threads()))


def make_deterministic() -> None:
    """Has torch take deterministic kernels only, or raise where there is none; before the first CUDA call."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
