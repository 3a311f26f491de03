"""From our flags to DeepSpeed's config dictionary."""

from __future__ import annotations

from typing import Any

import torch

from openrlhf.config.errors import ConfigError

# Elements of one gradient or parameter bucket.
BUCKET = 500_000_000

# Gathering small parameters (norms, biases) one by one costs more than they weigh.
KEEP_WHOLE = 10_000

# DeepSpeed's own clock would wait for the device at every forward, which then runs dry while the host queues the next.
_NO_CLOCK = {"throughput": {"enabled": False}}


def effective_stage(zero_stage: int, param_dtype: str) -> int:
    """Stage 0 in half precision runs as stage 1: same result for one rank, less memory for more, and DeepSpeed's own
    optimizer for that case takes a first Adam step that differs.
    """
    if zero_stage not in (0, 1, 2, 3):
        raise ConfigError(f"--ds.zero_stage {zero_stage} does not exist; take 0, 1, 2 or 3")
    return 1 if zero_stage == 0 and param_dtype != "fp32" else zero_stage


def _zero_section(ds: Any, stage: int, device: torch.device, training: bool, keep_whole: int) -> dict[str, Any]:
    offload = {"device": "cpu", "pin_memory": device.type == "cuda"}
    section: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": BUCKET,
        "allgather_bucket_size": BUCKET,
        # Training on another stage has been refused; a model without gradients reduces none.
        "overlap_comm": training and ds.overlap_comm,
        "offload_optimizer": offload if training and ds.adam_offload and stage else {"device": "none"},
    }
    if stage == 3:
        section |= {
            # The second copy of the weights saves gathering them between nodes in the backward: of no use without one.
            "zero_hpz_partition_size": ds.zpg if training else 1,
            "memory_efficient_linear": False,
            "stage3_param_persistence_threshold": keep_whole,
            "stage3_prefetch_bucket_size": 50_000_000,
            "stage3_max_live_parameters": 1_000_000_000,
            "stage3_max_reuse_distance": 1_000_000_000,
        }
    return section


def _precision_section(ds: Any, device: torch.device) -> dict[str, Any]:
    if ds.param_dtype == "fp16" and device.type == "cpu":
        raise ConfigError("--ds.param_dtype fp16 does not train on the CPU; take bf16 or fp32")
    if ds.param_dtype == "bf16":
        # Stage 1 then adds a gradient to its float32 sum as soon as it is there, and keeps no copy in half precision;
        # the other stages do so anyway.
        return {"bf16": {"enabled": True, "immediate_grad_update": True}}
    if ds.param_dtype == "fp16":
        return {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2}}
    if ds.param_dtype == "fp32":
        return {}
    raise ConfigError(f"--ds.param_dtype {ds.param_dtype} is not one of bf16, fp16, fp32")


def training_config(ds: Any, max_norm: float, device: torch.device, *, keep_whole: int = KEEP_WHOLE) -> dict[str, Any]:
    """Builds the config of a model that is trained.

    Args:
        ds: ``DeepSpeedConfig``.
        max_norm: the gradient is clipped to this norm; 0 does not clip.
        keep_whole: parameters with fewer elements than this are not sharded on stage 3.
    """
    stage = effective_stage(ds.zero_stage, ds.param_dtype)
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # The caller decides what a step is. Without this, stages 1-2 train on a wrong gradient and stage 0 lets ranks
        # drift apart when there are several backwards a step.
        "managed_gradient_accumulation": False,
        "zero_allow_untested_optimizer": True,
        # Without ZeRO nothing is split over ranks, and nothing has to be converted.
        "checkpoint": {"load_universal": bool(ds.use_universal_ckpt and stage)},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": _zero_section(ds, stage, device, training=True, keep_whole=keep_whole),
        # fp32 without ZeRO has no optimizer of DeepSpeed's that would tell the norm: clipped by us.
        "gradient_clipping": float(max_norm) if stage else 0.0,
        "data_types": {"grad_accum_dtype": ds.grad_accum_dtype or "fp32"},
        "timers": _NO_CLOCK,
        **_precision_section(ds, device),
    }


def inference_config(ds: Any, device: torch.device, *, keep_whole: int = KEEP_WHOLE) -> dict[str, Any]:
    """Builds the config of a model that only answers, sharded by ZeRO-3.

    Args: as ``training_config``.
    """
    precision = {} if ds.param_dtype == "fp32" else {ds.param_dtype: {"enabled": True}}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": _zero_section(ds, 3, device, training=False, keep_whole=keep_whole),
        "timers": _NO_CLOCK,
        **precision,
    }
