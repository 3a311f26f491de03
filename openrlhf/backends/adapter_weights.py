"""Weights out of a model with adapters: merged for the rollout engine, and as a folder that peft loads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers.core_model_loading import revert_weight_conversion

from openrlhf.backends.checkpoints import PARTIAL_EXPORT
from openrlhf.backends.distributed import raise_if_any
from openrlhf.backends.moving_average import MovingAverage
from openrlhf.backends.weights import GATHER_BYTES, buckets, gathered, replace_files
from openrlhf.models.adapters import PlainWeight, plain_weights, save_adapter
from openrlhf.models.four_bit import whole_dtype, whole_numel


def _size(weight: PlainWeight) -> int:
    return sum(whole_numel(parameter) * whole_dtype(parameter).itemsize for parameter in weight.parameters)


def merged_parameters(
    module: Any, *, sharded: bool, bucket_bytes: int = GATHER_BYTES
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields: what ``full_parameters`` yields of the model that the adapters make of the one below them, in its dtype;
    tensors without an adapter are the live ones, or gathered. Collective where ``sharded``.
    """
    for bucket in buckets(plain_weights(module), name=lambda weight: weight.name, size=_size, limit=bucket_bytes):
        with gathered([parameter for weight in bucket for parameter in weight.parameters], sharded):
            # transformers lays some weights (experts) out in another way than files and engines do.
            yield from revert_weight_conversion(module, {weight.name: weight.tensor() for weight in bucket}).items()


def write_adapter_folder(module: Any, folder: Path, *, sharded: bool, average: MovingAverage | None = None) -> None:
    """Rank 0 writes the adapters of a model, and a scalar head, inside ``folder`` first, and moves the files when all
    are there; collective.

    Args:
        average: takes the place of the trained weights.

    Raises:
        RankError: it could not be written, on all ranks; the files that were there before still stand.
    """
    trained = _trained(module, sharded, average)
    problem: Exception | None = None
    if dist.get_rank() == 0:
        existed = os.path.exists(folder)
        partial = folder / PARTIAL_EXPORT
        try:
            shutil.rmtree(partial, ignore_errors=True)
            save_adapter(module, trained, partial)
            replace_files(partial, folder)
        except Exception as error:  # safetensors and torch each raise a type of their own for a full disk
            problem = error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            if problem is not None and not existed:
                shutil.rmtree(folder, ignore_errors=True)
    raise_if_any(f"saving the adapter to {folder}", problem)


def _trained(module: Any, sharded: bool, average: MovingAverage | None) -> dict[str, torch.Tensor]:
    """Copies in host memory of everything that is trained, which of a model with adapters is little. Collective."""
    parameters = {name: item for name, item in module.named_parameters() if item.requires_grad}
    if average is not None:
        device = next(module.parameters()).device
        return {name: tensor.to("cpu", parameters[name].dtype) for name, tensor in average.whole(device)}
    with gathered(list(parameters.values()), sharded):
        return {name: item.detach().to("cpu", copy=True) for name, item in parameters.items()}
