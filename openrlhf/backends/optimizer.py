"""The optimizer, its parameter groups and its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn
from transformers import get_scheduler
from transformers.trainer_utils import SchedulerType

from openrlhf.backends.muon import MuonWithAdamW, muon_parameters
from openrlhf.config.errors import ConfigError

# What a schedule calls its floor; all others have none and would not start with the argument.
FLOOR_ARGUMENT = {
    "cosine_with_min_lr": "min_lr_rate",
    "cosine_warmup_with_min_lr": "min_lr_rate",
    "warmup_stable_decay": "min_lr_ratio",
}


def parameter_groups(named: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Splits trainable parameters: matrices decay, biases and norms do not.

    Under ZeRO-3 a parameter's own shape is empty; its true one is ``ds_shape``.
    """
    decayed, kept = [], []
    for _, parameter in named:
        if parameter.requires_grad:
            shape = getattr(parameter, "ds_shape", parameter.shape)
            (kept if len(shape) <= 1 else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_adamw(
    model: nn.Module, adam: Any, device: torch.device, *, without: Collection[nn.Parameter] = ()
) -> torch.optim.AdamW | None:
    """torch's AdamW: nothing has to be compiled for it.

    Args:
        adam: ``AdamConfig`` (lr, betas, eps, weight_decay).
        device: of the model.
        without: parameters that something else moves.

    Returns: None where there is nothing left to move.
    """
    elsewhere = {id(parameter) for parameter in without}
    named = [(name, parameter) for name, parameter in model.named_parameters() if id(parameter) not in elsewhere]
    groups = parameter_groups(named, adam.weight_decay)
    if not groups:
        return None
    return torch.optim.AdamW(
        groups, lr=adam.lr, betas=tuple(adam.betas), eps=adam.eps, fused=True if device.type == "cuda" else None
    )


def build_optimizer(
    model: nn.Module, settings: Any, device: torch.device, compute: torch.dtype
) -> torch.optim.Optimizer:
    """Builds the optimizer that ``--optim`` names.

    Args:
        settings: ``OptimizerConfig``.
        device: of the model; where the optimizer's state stays in host memory, AdamW steps there all the same.
        compute: number format of the model, and of Muon's Newton-Schulz iterations.

    Raises: ConfigError where Muon has no matrix to move.
    """
    if settings.optim == "adam":
        return build_adamw(model, settings.adam, device)
    matrices = muon_parameters(model)
    if not matrices:
        raise ConfigError("--optim muon: the model has no trainable matrix in a hidden layer; take --optim adam")
    return MuonWithAdamW(
        matrices,
        build_adamw(model, settings.adam, device, without=matrices),
        muon=settings.muon,
        weight_decay=settings.adam.weight_decay,
        # float16 would overflow in the iterations.
        compute=torch.float32 if compute == torch.float32 else torch.bfloat16,
        device=device,
    )


def build_scheduler(
    optimizer: torch.optim.Optimizer, name: str, *, total_steps: int, warmup_ratio: float, min_lr_ratio: float
) -> torch.optim.lr_scheduler.LRScheduler:
    """Builds the schedule that moves once for every optimizer step that moved weights.

    Args:
        total_steps: optimizer steps of the whole run.
        warmup_ratio: share of them over which the rate rises from 0, rounded up; at least the last step is left, so
            that a run of one step trains too.
        min_lr_ratio: the last rate over the initial one, for schedules that have a floor.

    Raises:
        ConfigError: there is no schedule of this name, or it needs something that a trainer does not give.
    """
    known = [kind.value for kind in SchedulerType if kind.value not in ("reduce_lr_on_plateau", "greedy")]
    if name not in known:
        raise ConfigError(f"--lr_scheduler {name} is not one of {', '.join(known)}")
    warmup = min(math.ceil(total_steps * warmup_ratio), max(total_steps - 1, 0))
    extra: dict[str, Any] = {}
    if name in FLOOR_ARGUMENT:
        extra[FLOOR_ARGUMENT[name]] = min_lr_ratio
    if name == "warmup_stable_decay":
        # No flag says how long the decay lasts; a tenth of the run is the habit.
        extra["num_decay_steps"] = math.ceil(0.1 * total_steps)
    return get_scheduler(
        name, optimizer, num_warmup_steps=warmup, num_training_steps=total_steps, scheduler_specific_kwargs=extra
    )


def engine_with_optimizer(
    model: Any,
    settings: Any,
    total_steps: int,
    device: torch.device,
    compute: torch.dtype,
    config: dict[str, Any],
) -> tuple[Any, torch.optim.Optimizer]:
    """Gives a model to DeepSpeed, with an optimizer and a schedule of its own; collective.

    Args:
        settings: ``OptimizerConfig``.
        total_steps: optimizer steps of the whole run.
        device, compute: as ``build_optimizer``.
        config: DeepSpeed's.

    Returns: the engine, and the optimizer that it steps.
    """
    import deepspeed
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    # Otherwise it warns of an optimizer that it has not been tested with.
    if MuonWithAdamW not in ZERO_SUPPORTED_OPTIMIZERS:
        ZERO_SUPPORTED_OPTIMIZERS.append(MuonWithAdamW)
    optimizer = build_optimizer(model, settings, device, compute)
    scheduler = build_scheduler(
        optimizer,
        settings.lr_scheduler,
        total_steps=total_steps,
        warmup_ratio=settings.lr_warmup_ratio,
        min_lr_ratio=settings.min_lr_ratio,
    )
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    if isinstance(optimizer, MuonWithAdamW):
        optimizer.attach(engine)
    return engine, optimizer
