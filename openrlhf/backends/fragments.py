"""Which part of each weight a rank masters: the parts of all ranks make the whole, each element once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn


@dataclass(frozen=True)
class Fragment:
    """A stretch of a flattened weight in full precision.

    Attributes:
        start: its first element's place in the whole.
        values: [K], live: what the optimizer moves.
    """

    start: int
    values: torch.Tensor


def true_shape(parameter: nn.Parameter) -> torch.Size:
    """Returns: the shape of the whole weight, which a parameter of ZeRO-3 does not have."""
    return parameter.ds_shape if hasattr(parameter, "ds_id") else parameter.shape


def own_fragment(parameter: nn.Parameter) -> Fragment | None:
    """Returns: the part that this rank masters, None where it has none; what every rank holds is mastered by rank 0."""
    if hasattr(parameter, "ds_id"):
        return _zero3_fragment(parameter)
    if hasattr(parameter, "_hp_mapping"):
        mapping = parameter._hp_mapping
        return None if mapping is None else Fragment(mapping.lp_fragment_address.start, mapping.hp_fragment.detach())
    return Fragment(0, parameter.detach().flatten()) if dist.get_rank() == 0 else None


def _zero3_fragment(parameter: nn.Parameter) -> Fragment | None:
    from deepspeed.utils import safe_get_local_fp32_param

    values = safe_get_local_fp32_param(parameter)
    if values is None:
        return None
    # Equal parts, the last ones filled up beyond the end.
    start = values.numel() * dist.get_rank(parameter.ds_process_group)
    size = min(values.numel(), parameter.ds_numel - start)
    return Fragment(start, values.detach()[:size]) if size > 0 else None
