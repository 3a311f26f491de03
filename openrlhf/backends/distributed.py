"""Joining and leaving the group of training processes."""

from __future__ import annotations

import logging
import os
import warnings
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from openrlhf.config.errors import ConfigError


def quiet_deepspeed(device: str) -> None:
    """Has DeepSpeed take our device and speak only where something is wrong; best before it is imported."""
    # It otherwise asks which accelerators it could build for, and may take another than we do.
    os.environ.setdefault("DS_ACCELERATOR", device)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # It calls collectives by names that torch has deprecated, and each call would say so.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)


def _lighten_deepspeed(device: str) -> None:
    """Leaves out of DeepSpeed's start what costs seconds and is of no use here."""
    if device == "cpu":
        # A shared-memory extension would be compiled for half a minute. (As an attribute of the package,
        # `deepspeed.comm.torch` is PyTorch itself.)
        import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    # The memory in use is printed, and garbage collected for it, some ten times for every bf16 optimizer.
    import_module("deepspeed.runtime.bf16_optimizer").see_memory_usage = lambda *args, **options: None
    # Muon is imported whatever the optimizer is, and its decorators load all of torch's compiler.
    before = os.environ.get("TORCHDYNAMO_DISABLE")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    try:
        import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        del os.environ["TORCHDYNAMO_DISABLE"]
        if before is not None:
            os.environ["TORCHDYNAMO_DISABLE"] = before


def init_distributed(device: str, timeout_s: float = 1800.0) -> torch.device:
    """Joins the group that RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT describe.

    A process that finds none of these is a group of its own.

    Args:
        device: "cpu" (gloo) or "cuda" (NCCL; this process takes card LOCAL_RANK).
        timeout_s: seconds that one collective may wait for the other ranks.

    Returns: the device of this process.
    """
    if "WORLD_SIZE" not in os.environ:
        single = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        os.environ.update(single)
    quiet_deepspeed(device)
    import deepspeed

    _lighten_deepspeed(device)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not deepspeed.comm.is_initialized():
        backend = "nccl" if device == "cuda" else "gloo"
        deepspeed.init_distributed(
            backend, auto_mpi_discovery=False, timeout=timedelta(seconds=timeout_s), verbose=False
        )
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")


def shutdown_distributed() -> None:
    """Meets the other ranks and leaves the group; without it, some exits abort in gloo."""
    if dist.is_initialized():
        import deepspeed

        dist.barrier()
        # DeepSpeed's own call, which also forgets the groups that it keeps: a later group would be given dead ones.
        deepspeed.comm.destroy_process_group()


def desert_distributed() -> None:
    """After a failure, leaves the group without meeting the other ranks, which may be gone.

    Over gloo alone: its threads would abort the exit, and NCCL may wait for a collective that never ends.
    """
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


class RankError(RuntimeError):
    """What went wrong on one rank, raised on all of them."""


def raise_if_any(what: str, error: BaseException | None) -> None:
    """Collective: raises on every rank where any rank brings an error.

    Raises:
        ConfigError: the first one that a rank brings, where it is that: what the user has to change needs no rank.
        RankError: naming what failed, on which rank and why.
    """
    own = None
    if error is not None:
        of_user = isinstance(error, ConfigError)
        own = (of_user, str(error) if of_user else f"{type(error).__name__}: {error}")
    found: list[tuple[bool, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    for rank, item in enumerate(found):
        if item is not None:
            of_user, message = item
            if of_user:
                raise ConfigError(message) from error
            raise RankError(f"{what} failed on rank {rank}: {message}") from error


def from_rank_0(value: Any) -> Any:
    """Collective: returns rank 0's ``value`` on every rank; it has to pickle."""
    held = [value]
    dist.broadcast_object_list(held)
    return held[0]
