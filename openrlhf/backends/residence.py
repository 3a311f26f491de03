"""Moving a model out of the accelerator's memory and back."""

from __future__ import annotations

from typing import Any

import torch

from openrlhf.backends.frozen import move_frozen


def move_plain(module: Any, engine: Any, device: torch.device | str) -> None:
    """Moves weights and optimizer where DeepSpeed has not laid them out in buffers of its own.

    Args:
        engine: DeepSpeed's, or None for a model without one.
    """
    module.to(device)
    for state in [] if engine is None else engine.optimizer.state.values():
        for key, value in state.items():
            # A step counter stands where torch put it.
            if isinstance(value, torch.Tensor) and value.dim():
                state[key] = value.to(device)


def leave_accelerator(module: Any, engine: Any, *, plain: bool) -> None:
    """Moves all to host memory.

    Args:
        plain: the engine keeps no buffers of its own.
    """
    if plain:
        move_plain(module, engine, "cpu")
    else:
        engine.offload_states()
        if engine.zero_optimization_stage() < 3:
            move_frozen(module, "cpu")
    torch.cuda.empty_cache()


def return_to(device: torch.device, module: Any, engine: Any, *, plain: bool) -> None:
    """Undoes ``leave_accelerator``."""
    if plain:
        move_plain(module, engine, device)
    else:
        engine.reload_states()
        if engine.zero_optimization_stage() < 3:
            move_frozen(module, device)


def give_up(module: Any, device: torch.device) -> None:
    """Frees the memory of a model that is not needed any more, whoever still refers to it.

    On stage 3 DeepSpeed's own tables keep the modules as long as the process lives, so their weights are emptied.
    """
    for tensor in [*module.parameters(), *module.buffers()]:
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        # This rank's part of a sharded parameter.
        shard = getattr(tensor, "ds_tensor", None)
        if shard is not None:
            shard.data = torch.empty(0, dtype=shard.dtype, device=shard.device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
