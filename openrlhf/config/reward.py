"""Where rewards come from: the `reward` group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from openrlhf.config.model import PlacementConfig

Combine = Literal["sum", "mean", "min", "max"]


@dataclass(frozen=True)
class RewardConfig(PlacementConfig):
    """Rewards and what is done to them."""

    model_name_or_path: str | None = None
    """Folder or hub name of a reward model; several are separated by commas."""
    combine: Combine = "sum"
    """What becomes of the scores of several reward models: sum, mean, min or max."""
    remote_url: str | None = None
    """Python file with reward_func(queries, prompts, labels), or URLs of reward servers, separated by commas."""
    api_key_env: str | None = None
    """Environment variable with the key of the reward servers, which is sent as 'Authorization: Bearer KEY'."""
    timeout: float = 300.0
    """Seconds that one call of the reward source may take; all tries together stay below --train.step_timeout."""
    max_retries: int = 2
    """Further tries after a failed or overdue call; then the sample is dropped and counted."""
    workers: int = 4
    """Processes beside each engine that run the reward function."""
    normalize_enable: bool = False
    """Normalise each reward model's scores by the mean and deviation that its config stores."""
    clip_range: tuple[float, float] = (-10.0, 10.0)
    """Bounds that rewards are clipped to, after the group baseline."""
    overlong_buffer_len: float | None = None
    """Last tokens of --rollout.max_new_tokens in which a penalty for length grows; unset adds none."""
    overlong_penalty_factor: float = 1.0
    """Size of that penalty at full length."""
    stop_properly_penalty_coef: float | None = None
    """Reward of truncated samples: a factor in [0, 1] scales it, a negative number replaces it."""
    offload: bool = False
    """Keep the reward model in host memory between its forwards."""


@dataclass(frozen=True)
class ServeRewardConfig:
    """The served reward model."""

    model_name_or_path: str | None = None
    """Folder or hub name of the reward model."""
    normalize_enable: bool = False
    """Normalise scores by the mean and deviation stored with the model."""
