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
    if engine is not None:
        _move_state(engine.optimizer, device)


def _move_state(optimizer: torch.optim.Optimizer, device: torch.device | str) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            # A step counter stands where torch put it.
            if isinstance(value, torch.Tensor) and value.dim():
                state[key] = value.to(device)


def _move_steps_of_stage_3(engine: Any, device: torch.device | str) -> None:
    """Moves what the optimizer of stage 3 holds, unless it stays in host memory; DeepSpeed does so for its own Adam
    alone.
    """
    if engine.zero_use_cpu_optimizer():
        return
    for weights in engine.optimizer.fp32_partitioned_groups_flat:
        weights.data = weights.data.to(device)
    _move_state(engine.optimizer.optimizer, device)


def leave_accelerator(module: Any, engine: Any, *, plain: bool) -> None:
    """Moves all to host memory.

    Args:
        plain: the engine keeps no buffers of its own.
    """
    if plain:
        move_plain(module, engine, "cpu")
    elif engine.zero_optimization_stage() < 3:
        engine.offload_states()
        move_frozen(module, "cpu")
    else:
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as Kind

        engine.offload_states(include=[Kind.lp_params, Kind.lp_grads, Kind.contiguous_grad_buffer])
        _move_steps_of_stage_3(engine, "cpu")
    torch.cuda.empty_cache()


def return_to(device: torch.device, module: Any, engine: Any, *, plain: bool) -> None:
    """Undoes ``leave_accelerator``."""
    if plain:
        move_plain(module, engine, device)
    else:
        engine.reload_states()
        if engine.zero_optimization_stage() < 3:
            move_frozen(module, device)
        else:
            _move_steps_of_stage_3(engine, device)


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
