"""Whole weights out of a model that may be sharded: for the rollout engine and for a folder that transformers loads."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from openrlhf.backends.checkpoints import MODEL_CONFIG, PARTIAL_EXPORT
from openrlhf.backends.distributed import raise_if_any
from openrlhf.backends.moving_average import MovingAverage
from openrlhf.models.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, plain_weights, save_adapter

# Bytes of parameters that stand whole at one time while a sharded model is read.
GATHER_BYTES = 512 * 1024**2


def _true_size(parameter: nn.Parameter) -> int:
    return getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()


Item = TypeVar("Item")


def _buckets(sized: Iterable[tuple[Item, int]], limit: int) -> Iterator[list[Item]]:
    bucket: list[Item] = []
    filled = 0
    for item, size in sized:
        if bucket and filled + size > limit:
            yield bucket
            bucket, filled = [], 0
        bucket.append(item)
        filled += size
    if bucket:
        yield bucket


def _gathered(parameters: list[nn.Parameter], sharded: bool) -> Any:
    if not sharded:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=None)


def full_parameters(
    module: Any, *, sharded: bool, bucket_bytes: int = GATHER_BYTES
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields: the names and layouts of a saved HF model, with whole tensors.

    A weight that two modules share comes once, under its first name; adapters are merged into the weights below them.
    The tensors are the live weights, or gathered or merged ones that stay whole for as long as the caller holds them:
    hold few. Collective where ``sharded``.
    """
    weights = plain_weights(module)
    sized = [(weight, sum(_true_size(parameter) for parameter in weight.parameters)) for weight in weights]
    for bucket in _buckets(sized, bucket_bytes):
        with _gathered([parameter for weight in bucket for parameter in weight.parameters], sharded):
            tensors = {weight.name: weight.tensor() for weight in bucket}
            # transformers lays some weights (experts) out in another way than files and engines do.
            yield from revert_weight_conversion(module, tensors).items()


def _state_on_rank_0(module: Any, sharded: bool, average: MovingAverage | None) -> dict[str, torch.Tensor] | None:
    """What rank 0 has to write: its own tensors, or copies in host memory where no rank has them whole."""
    if not sharded and average is None:
        return module.state_dict() if dist.get_rank() == 0 else None
    state: dict[str, torch.Tensor] = {}
    sized = [((name, parameter), _true_size(parameter)) for name, parameter in module.named_parameters()]
    for bucket in _buckets(sized, GATHER_BYTES):
        with _gathered([parameter for _, parameter in bucket], sharded):
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

    Args:
        average: takes the place of the trainable weights.

    Raises:
        RankError: it could not be written, on all ranks; the files that were there before still stand.
    """
    state = _state_on_rank_0(module, sharded, average)
    _write(folder, state, lambda partial: module.save_pretrained(partial, state_dict=state, max_shard_size="5GB"))


def write_adapter_folder(module: Any, folder: Path, *, sharded: bool, average: MovingAverage | None = None) -> None:
    """Rank 0 writes the adapters of a model, and a scalar head, as a folder that peft loads; collective.

    Args, Raises: as ``write_hf_folder``.
    """
    trained = _trained_on_rank_0(module, sharded, average)
    _write(folder, trained, lambda partial: save_adapter(module, trained, partial))


def _trained_on_rank_0(module: Any, sharded: bool, average: MovingAverage | None) -> dict[str, torch.Tensor] | None:
    """Copies in host memory of everything that is trained, which for adapters is little; None on the other ranks."""
    parameters = {name: item for name, item in module.named_parameters() if item.requires_grad}
    if average is not None:
        device = next(module.parameters()).device
        found = {name: tensor.to("cpu", parameters[name].dtype) for name, tensor in average.whole(device)}
    else:
        with _gathered(list(parameters.values()), sharded):
            found = {name: item.detach().to("cpu", copy=True) for name, item in parameters.items()}
    return found if dist.get_rank() == 0 else None


def _write(folder: Path, state: dict[str, torch.Tensor] | None, write: Callable[[Path], None]) -> None:
    """Has the rank that has a ``state`` write it inside ``folder`` first, and moves the files when all are there: the
    folder may be a mount point, and beside it nothing may be writable. Collective.
    """
    problem: Exception | None = None
    if state is not None:
        existed = os.path.exists(folder)
        partial = folder / PARTIAL_EXPORT
        try:
            shutil.rmtree(partial, ignore_errors=True)
            write(partial)
            _replace_files(partial, folder)
        except Exception as error:  # safetensors and torch each raise a type of their own for a full disk
            problem = error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            if problem is not None and not existed:
                shutil.rmtree(folder, ignore_errors=True)
    raise_if_any(f"saving the model to {folder}", problem)


def _replace_files(source: Path, target: Path) -> None:
    """Moves every file over; weights and adapters of an earlier save that has no file of this name go, lest both be
    loaded.

    The config is the last to come: a folder that has one is a model.
    """
    paths = sorted(source.iterdir(), key=lambda path: path.name == MODEL_CONFIG)
    # safetensors leaves its files to their owner alone; the config was opened as any file, so it shows the umask.
    mode = stat.S_IMODE((source / MODEL_CONFIG).stat().st_mode)
    for path in paths:
        if path.is_file():
            path.chmod(mode)
        os.replace(path, target / path.name)
    names = {path.name for path in paths}
    for path in [*target.glob("model*.safetensors*"), target / ADAPTER_CONFIG, target / ADAPTER_WEIGHTS]:
        if path.name not in names:
            path.unlink(missing_ok=True)
