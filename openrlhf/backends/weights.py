"""Whole weights out of a model that may be sharded: for the rollout engine and for a folder that transformers loads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from itertools import chain, groupby
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from openrlhf.backends.checkpoints import EXPORT_CONFIGS, PARTIAL_EXPORT
from openrlhf.backends.distributed import raise_if_any
from openrlhf.backends.fragments import true_shape
from openrlhf.backends.moving_average import MovingAverage
from openrlhf.backends.shards import MAX_SHARD_BYTES, ShardWriter
from openrlhf.utils.move_files import move_files

Item = TypeVar("Item")

# Bytes of parameters that stand whole at one time while a sharded model is read.
GATHER_BYTES = 512 * 1024**2


def _true_size(parameter: nn.Parameter) -> int:
    return getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()


def buckets(
    items: Iterable[Item], *, name: Callable[[Item], str], size: Callable[[Item], int], limit: int
) -> Iterator[list[Item]]:
    """Cuts weights into buckets of ``limit`` bytes.

    Those of one module, two levels above a weight, stay together whatever their size: transformers writes some of them
    (a gate and its projection) as one, and would leave out what it is not shown.
    """
    bucket: list[Item] = []
    filled = 0
    for _, group in groupby(items, key=lambda item: name(item).rsplit(".", 2)[0]):
        together = list(group)
        bytes_together = sum(size(item) for item in together)
        if bucket and filled + bytes_together > limit:
            yield bucket
            bucket, filled = [], 0
        bucket += together
        filled += bytes_together
    if bucket:
        yield bucket


def gathered(parameters: list[nn.Parameter], sharded: bool) -> Any:
    """Returns: a context in which parameters are whole; collective where ``sharded``."""
    if not sharded:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=None)


def full_parameters(
    module: Any, *, sharded: bool, bucket_bytes: int = GATHER_BYTES, average: MovingAverage | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields: the names and layouts of a saved HF model, with whole tensors.

    A weight that two modules share comes once, under its first name. The tensors are the live weights, or gathered ones
    that stay whole for as long as the caller holds them: hold few. Collective where ``sharded`` or with an ``average``.

    Args:
        average: takes the place of the trainable weights.
    """
    averages = iter(()) if average is None else average.whole(next(module.parameters()).device)
    for bucket in buckets(
        module.named_parameters(), name=lambda item: item[0], size=lambda item: _true_size(item[1]), limit=bucket_bytes
    ):
        live = [parameter for _, parameter in bucket if average is None or not parameter.requires_grad]
        with gathered(live, sharded):
            tensors = {
                name: parameter.detach()
                if average is None or not parameter.requires_grad
                else next(averages)[1].to(parameter.dtype)
                for name, parameter in bucket
            }
            # transformers lays some weights (experts) out in another way than files and engines do.
            yield from revert_weight_conversion(module, tensors).items()


def _saved_tensors(module: Any, *, sharded: bool, average: MovingAverage | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields: all that a file of the model holds, buffers too. Collective: consume all."""
    persistent = set(module.state_dict().keys())
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in persistent}
    ignored = set(module._keys_to_ignore_on_save or ())
    parameters = full_parameters(module, sharded=sharded, average=average)
    for name, tensor in chain(parameters, revert_weight_conversion(module, buffers).items()):
        if name not in ignored:
            yield name, tensor


def write_hf_folder(
    module: Any,
    folder: Path,
    *,
    sharded: bool,
    average: MovingAverage | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Rank 0 writes config, generation config and safetensors files as the weights come in; collective.

    They are written inside ``folder`` first and moved when all are there: the folder may be a mount point, and beside
    it nothing may be writable. Beside the model, rank 0 holds one file's worth of weights and one bucket of them.

    Args:
        average: takes the place of the trainable weights.
        max_shard_bytes: of one file.

    Raises:
        RankError: it could not be written, on all ranks; the files that were there before still stand.
    """
    existed = os.path.exists(folder)
    partial = folder / PARTIAL_EXPORT
    writer = ShardWriter(partial, max_shard_bytes) if dist.get_rank() == 0 else None
    problem: Exception | None = None

    def attempt(write: Callable[..., None], *args: Any, **options: Any) -> None:
        """Nothing may raise before the last tensor: other ranks wait in the collectives that bring it."""
        nonlocal problem
        if problem is not None:
            return
        try:
            write(*args, **options)
        except Exception as error:  # safetensors and torch each raise a type of their own for a full disk
            problem = error

    if writer is not None:
        attempt(shutil.rmtree, partial, ignore_errors=True)
        # Everything but weights.
        attempt(module.save_pretrained, partial, state_dict={})
    for name, tensor in _saved_tensors(module, sharded=sharded, average=average):
        if writer is not None:
            attempt(writer.add, name, tensor)
    if writer is not None:
        attempt(writer.finish, sum(true_shape(parameter).numel() for parameter in module.parameters()))
        attempt(replace_files, partial, folder)
        shutil.rmtree(partial, ignore_errors=True)
        if problem is not None and not existed:
            shutil.rmtree(folder, ignore_errors=True)
    raise_if_any(f"saving the model to {folder}", problem)


def replace_files(source: Path, target: Path) -> None:
    """Moves every file over; weights and adapters of an earlier save that has no file of this name go, lest both be
    loaded.

    The config is the last to come: a folder that has one is a model or an adapter.
    """
    names = move_files(source, target, last=EXPORT_CONFIGS)
    weights = [*target.glob("model*.safetensors*"), *target.glob("adapter_model.*")]
    for path in [*weights, *(target / name for name in EXPORT_CONFIGS)]:
        if path.name not in names:
            path.unlink(missing_ok=True)
