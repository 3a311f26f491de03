"""Weights that stand still below adapters: no state and no export has them, and DeepSpeed moves trained ones alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

# Sums of the same weights on other numbers of ranks differ by rounding.
_SAME = 1e-9


def frozen_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields: the parameters that are not trained."""
    return (parameter for parameter in module.parameters() if not parameter.requires_grad)


# Elements that are widened at one time.
PIECE = 2**24


def fingerprint(module: nn.Module, device: torch.device, *, sharded: bool) -> float:
    """Returns: a number that another base model hardly shares; the same on all ranks. Collective where ``sharded``.

    Args: ``sharded``: by ZeRO-3.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for index, parameter in enumerate(frozen_parameters(module)):
        values = _own_part(parameter) if sharded else parameter.detach().flatten()
        # Piece by piece, since a float64 copy of a whole embedding takes gigabytes.
        for piece in values.split(PIECE):
            wide = piece.to(device, torch.float64)
            total += math.cos(index) * (wide.abs().sum() + 2 * wide.sum())
    if sharded:
        dist.all_reduce(total)
    return total.item()


def _own_part(parameter: Any) -> torch.Tensor:
    """This rank's part of a sharded weight, without what only fills it up."""
    values = parameter.ds_tensor.detach().flatten()
    rest = parameter.ds_numel - values.numel() * dist.get_rank(parameter.ds_process_group)
    return values[: max(0, rest)]


def same_base(there: float, here: float) -> bool:
    """Returns: whether two fingerprints are of the same weights."""
    return math.isclose(there, here, rel_tol=_SAME, abs_tol=_SAME)


def move_frozen(module: nn.Module, device: torch.device | str) -> None:
    """Moves the weights that are not trained, which on ZeRO 0 to 2 are whole on every rank."""
    for parameter in frozen_parameters(module):
        parameter.data = parameter.data.to(device)
