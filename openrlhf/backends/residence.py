"""Moving a model out of the accelerator's memory and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

from openrlhf.backends.frozen import move_frozen
from openrlhf.backends.parked import Parked


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


def _buffers_of_stage_1(optimizer: Any) -> Iterator[torch.Tensor]:
    """What DeepSpeed's optimizer for bf16 on stage 1 holds, which is the only one that it does not move itself."""
    yield from optimizer.bf16_groups_flat
    yield from (weights.detach() for weights in optimizer.fp32_groups_flat_partition)
    yield from optimizer.fp32_groups_gradients_flat
    for state in optimizer.optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.dim())


def leave_accelerator(module: Any, engine: Any, *, plain: bool) -> Parked:
    """Moves all to host memory.

    Args:
        plain: the engine keeps no buffers of its own.

    Returns: what ``return_to`` needs.
    """
    parked = Parked(())
    if plain:
        move_plain(module, engine, "cpu")
    elif isinstance(engine.optimizer, BF16_Optimizer):
        parked = Parked(_buffers_of_stage_1(engine.optimizer))
        move_frozen(module, "cpu")
    elif engine.zero_optimization_stage() < 3:
        engine.offload_states()
        move_frozen(module, "cpu")
    else:
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as Kind

        engine.offload_states(include=[Kind.lp_params, Kind.lp_grads, Kind.contiguous_grad_buffer])
        _move_steps_of_stage_3(engine, "cpu")
    torch.cuda.empty_cache()
    return parked


def return_to(device: torch.device, module: Any, engine: Any, parked: Parked, *, plain: bool) -> None:
    """Undoes ``leave_accelerator``, which gave ``parked``."""
    if plain:
        move_plain(module, engine, device)
    elif isinstance(engine.optimizer, BF16_Optimizer):
        parked.restore()
        move_frozen(module, device)
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
