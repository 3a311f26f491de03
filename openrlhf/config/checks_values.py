"""Ranges of single numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from openrlhf.config.commands import Config
from openrlhf.config.errors import ConfigError
from openrlhf.config.flags import Flag, flags_of


@dataclass(frozen=True)
class Range:
    """What a number may be: ``words`` complete the sentence "--flag must be ..."."""

    words: str
    holds: Callable[[float], bool]


# NaN is in none of them: each test is written so that it fails on NaN.
POSITIVE = Range("above 0", lambda x: 0 < x < inf)
POSITIVE_OR_INF = Range("above 0", lambda x: x > 0)
NOT_NEGATIVE = Range("0 or more", lambda x: 0 <= x < inf)
COUNT = Range("1 or more", lambda x: x >= 1)
COUNT_OR_NEVER = Range("1 or more, or -1 for never", lambda x: x >= 1 or x == -1)
SHARE = Range("between 0 and 1", lambda x: 0 <= x <= 1)
SHARE_ABOVE_0 = Range("above 0 and at most 1", lambda x: 0 < x <= 1)
SHARE_BELOW_1 = Range("at least 0 and below 1", lambda x: 0 <= x < 1)
ANY_OR_INF = Range("a number", lambda x: x == x)
LENGTH = Range("2 or more", lambda x: x >= 2)

# By the flag's whole name or, where that is not here, by its last part.
RANGES: dict[str, Range] = {
    "num_nodes": COUNT,
    "num_gpus_per_node": COUNT,
    "num_engines": COUNT,
    "tensor_parallel_size": COUNT,
    "gpu_memory_utilization": SHARE_ABOVE_0,
    "start_timeout": POSITIVE,
    "step_timeout": POSITIVE,
    "timeout": POSITIVE,
    "max_retries": NOT_NEGATIVE,
    "workers": COUNT,
    "is_correction_threshold": Range("0 or more", lambda x: x >= 0),
    "async_queue_size": COUNT,
    "steps": COUNT_OR_NEVER,
    "save_steps": COUNT_OR_NEVER,
    "logging_steps": COUNT,
    "max_num": COUNT,
    "max_mem": POSITIVE_OR_INF,
    "local_rank": Range("-1 or more", lambda x: x >= -1),
    "zero_stage": Range("0, 1, 2 or 3", lambda x: 0 <= x <= 3),
    "zpg": COUNT,
    "ema_beta": SHARE_BELOW_1,
    "dataloader_num_workers": NOT_NEGATIVE,
    "max_tokens_per_gpu": COUNT,
    "ds.lora.rank": NOT_NEGATIVE,
    "ds.lora.alpha": COUNT,
    "ds.lora.dropout": SHARE_BELOW_1,
    "num_episodes": COUNT,
    "batch_size": COUNT,
    "vllm_generate_batch_size": COUNT,
    "micro_batch_size": COUNT,
    "max_epochs": COUNT,
    "max_len": LENGTH,
    "max_new_tokens": COUNT,
    "max_samples": COUNT,
    "save_samples": NOT_NEGATIVE,
    "eps_clip": SHARE_ABOVE_0,
    "eps_clip_low_high": Range("0 or more", lambda x: x >= 0),
    "dual_clip": Range("above 1", lambda x: 1 < x < inf),
    "value_clip": POSITIVE,
    "lambd": SHARE,
    "gamma": SHARE,
    "top_p": SHARE_ABOVE_0,
    # vLLM raises lower ones to this, and the trainer would divide by another temperature.
    "rollout.temperature": Range("0.01 or more", lambda x: 0.01 <= x < inf),
    "eval.temperature": NOT_NEGATIVE,
    "seed": Range("between 0 and 4294967295", lambda x: 0 <= x < 2**32),
    "freezing_steps": COUNT_OR_NEVER,
    "n_samples_per_prompt": COUNT,
    "algo.kl.target": POSITIVE,
    "horizon": COUNT,
    "init_coef": NOT_NEGATIVE,
    "aux_loss_coef": NOT_NEGATIVE,
    "entropy_coef": NOT_NEGATIVE,
    "nll_loss_coef": NOT_NEGATIVE,
    "simpo_gamma": NOT_NEGATIVE,
    "kto_desirable_weight": POSITIVE,
    "kto_undesirable_weight": POSITIVE,
    "clip_range": ANY_OR_INF,
    "lr": POSITIVE,
    "momentum": SHARE_BELOW_1,
    "ns_steps": COUNT,
    "betas": SHARE_BELOW_1,
    "eps": POSITIVE,
    "weight_decay": NOT_NEGATIVE,
    "lr_warmup_ratio": SHARE,
    "min_lr_ratio": SHARE,
    "max_norm": NOT_NEGATIVE,
    "overlong_buffer_len": POSITIVE,
    "overlong_penalty_factor": NOT_NEGATIVE,
    "stop_properly_penalty_coef": Range("at most 1", lambda x: -inf < x <= 1),
    "ring_attn_size": COUNT,
    "ring_attn_head_stride": COUNT,
    "max_images_per_prompt": NOT_NEGATIVE,
    "dynamic_filtering_range": ANY_OR_INF,
    "beta": POSITIVE,
    "label_smoothing": Range("at least 0 and below 0.5", lambda x: 0 <= x < 0.5),
    "max_batch_tokens": COUNT,
    "max_waiting_texts": COUNT,
    "max_body_mb": COUNT,
    "stop_timeout": POSITIVE,
    "port": Range("between 1 and 65535", lambda x: 1 <= x <= 65535),
}

# Pairs whose first number lies below their second.
ORDERED = ("reward.clip_range", "algo.dynamic_filtering_range", "algo.advantage.is_correction_threshold")


def range_of(flag: Flag) -> Range | None:
    """Returns: what the numbers of a flag may be; None for a flag that holds none."""
    return RANGES.get(flag.name) or RANGES.get(flag.name.rpartition(".")[2])


def check_values(config: Config) -> None:
    """Raises ConfigError for the first number outside its range."""
    for flag in flags_of(type(config)).values():
        value, allowed = flag.value(config), range_of(flag)
        if flag.kind not in (int, float) or value is None:
            continue
        numbers = value if isinstance(value, tuple) else (value,)
        if not all(allowed.holds(number) for number in numbers):
            raise ConfigError(f"--{flag.name} must be {allowed.words}, found {' '.join(map(str, numbers))}.")
        if flag.name in ORDERED and not numbers[0] < numbers[1]:
            raise ConfigError(f"--{flag.name} takes a low and a higher number, found {numbers[0]} {numbers[1]}.")
