"""Whole weights out of a model that may be sharded: for the rollout engine and for a folder that transformers loads."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from openrlhf.backends.checkpoints import EXPORT_CONFIGS, PARTIAL_EXPORT
from openrlhf.backends.distributed import raise_if_any
from openrlhf.backends.moving_average import MovingAverage

# Bytes of parameters that stand whole at one time while a sharded model is read.
GATHER_BYTES = 512 * 1024**2


def _true_size(parameter: nn.Parameter) -> int:
    return getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()


def _buckets(named: list[tuple[str, nn.Parameter]], limit: int) -> Iterator[list[tuple[str, nn.Parameter]]]:
    bucket: list[tuple[str, nn.Parameter]] = []
    size = 0
    for name, parameter in named:
        if bucket and size + _true_size(parameter) > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, parameter))
        size += _true_size(parameter)
    if bucket:
        yield bucket


def gathered(parameters: list[nn.Parameter], sharded: bool) -> Any:
    """Returns: a context in which parameters are whole; collective where ``sharded``."""
    if not sharded:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=None)


def full_parameters(
    module: Any, *, sharded: bool, bucket_bytes: int = GATHER_BYTES
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields: the names and layouts of a saved HF model, with whole tensors.

    A weight that two modules share comes once, under its first name. The tensors are the live weights, or gathered ones
    that stay whole for as long as the caller holds them: hold few. Collective where ``sharded``.
    """
    for bucket in _buckets(list(module.named_parameters()), bucket_bytes):
        with gathered([parameter for _, parameter in bucket], sharded):
            tensors = {name: parameter.detach() for name, parameter in bucket}
            # transformers lays some weights (experts) out in another way than files and engines do.
            yield from revert_weight_conversion(module, tensors).items()


def _state_on_rank_0(module: Any, sharded: bool, average: MovingAverage | None) -> dict[str, torch.Tensor] | None:
    """What rank 0 has to write: its own tensors, or copies in host memory where no rank has them whole."""
    if not sharded and average is None:
        return module.state_dict() if dist.get_rank() == 0 else None
    state: dict[str, torch.Tensor] = {}
    for bucket in _buckets(list(module.named_parameters()), GATHER_BYTES):
        with gathered([parameter for _, parameter in bucket], sharded):
            if dist.get_rank() == 0:
                state.update({name: parameter.detach().to("cpu", copy=True) for name, parameter in bucket})
    if average is not None:
        dtypes = {name: parameter.dtype for name, parameter in module.named_parameters()}
        device = next(module.parameters()).device
        for name, tensor in average.whole(device):
            if dist.get_rank() == 0:
                state[name] = tensor.to("cpu", dtypes[name])
    if dist.get_rank() != 0:
        return None
    persistent = set(module.state_dict().keys())
    return state | {name: buffer for name, buffer in module.named_buffers() if name in persistent}


def write_hf_folder(module: Any, folder: Path, *, sharded: bool, average: MovingAverage | None = None) -> None:
    """Rank 0 writes config, generation config and safetensors files; collective.

    They are written inside ``folder`` first and moved when all are there: the folder may be a mount point, and beside
    it nothing may be writable.

    Args:
        average: takes the place of the trainable weights.

    Raises:
        RankError: it could not be written, on all ranks; the files that were there before still stand.
    """
    state = _state_on_rank_0(module, sharded, average)
    problem: Exception | None = None
    if state is not None:
        existed = os.path.exists(folder)
        partial = folder / PARTIAL_EXPORT
        try:
            shutil.rmtree(partial, ignore_errors=True)
            module.save_pretrained(partial, state_dict=state, max_shard_size="5GB")
            replace_files(partial, folder)
        except Exception as error:  # safetensors and torch each raise a type of their own for a full disk
            problem = error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            if problem is not None and not existed:
                shutil.rmtree(folder, ignore_errors=True)
    raise_if_any(f"saving the model to {folder}", problem)


def replace_files(source: Path, target: Path) -> None:
    """Moves every file over; weights and adapters of an earlier save that has no file of this name go, lest both be
    loaded.

    The config is the last to come: a folder that has one is a model or an adapter.
    """
    paths = sorted(source.iterdir(), key=lambda path: path.name in EXPORT_CONFIGS)
    # safetensors leaves its files to their owner alone; a config was opened as any file, so it shows the umask.
    mode = stat.S_IMODE(paths[-1].stat().st_mode)
    for path in paths:
        if path.is_file():
            path.chmod(mode)
        os.replace(path, target / path.name)
    names = {path.name for path in paths}
    weights = [*target.glob("model*.safetensors*"), *target.glob("adapter_model.*")]
    for path in [*weights, *(target / name for name in EXPORT_CONFIGS)]:
        if path.name not in names:
            path.unlink(missing_ok=True)
