"""Whether every trainable weight really moves: a model may train with a falling loss and most of its weights frozen."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def _local_master(parameter: nn.Parameter) -> torch.Tensor | None:
    """The part of the full-precision copy that this rank moves; None where it has none."""
    if hasattr(parameter, "ds_id"):
        from deepspeed.utils import safe_get_local_fp32_param

        return safe_get_local_fp32_param(parameter)
    if hasattr(parameter, "_hp_mapping"):
        return None if parameter._hp_mapping is None else parameter._hp_mapping.hp_fragment
    return parameter


def fingerprints(module: Any, device: torch.device) -> dict[str, tuple[float, float]]:
    """Two sums over each trainable parameter's full-precision copy, over all ranks; collective.

    Half-precision weights would not do: a small learning rate moves the copy long before it moves them.
    """
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    sums = torch.zeros(len(names), 2, dtype=torch.float64, device=device)
    parameters = dict(module.named_parameters())
    for index, name in enumerate(names):
        master = _local_master(parameters[name])
        if master is not None:
            values = master.detach().to(device).flatten()
            sums[index, 0] = values.sum(dtype=torch.float64)
            sums[index, 1] = values[::2].sum(dtype=torch.float64)
    dist.all_reduce(sums)
    return {name: (first, second) for name, (first, second) in zip(names, sums.tolist(), strict=True)}
