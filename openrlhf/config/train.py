"""The optimizer steps: the `train` group."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainConfig:
    """What all training loops share."""

    batch_size: int = 128
    """Samples of an optimizer step, over all ranks."""
    micro_batch_size: int = 8
    """Samples of one forward and backward on one rank."""
    max_epochs: int = 1
    """Passes over the data."""
    seed: int = 42
    """Seed of shuffling, initialisation and sampling."""
    full_determinism_enable: bool = False
    """Use deterministic kernels only; slower."""


@dataclass(frozen=True)
class SFTTrainConfig(TrainConfig):
    """The training loop of SFT."""

    max_epochs: int = 2
    """Passes over the data."""


@dataclass(frozen=True)
class RMTrainConfig(TrainConfig):
    """The training loop of reward models."""

    micro_batch_size: int = 1
    """Pairs of one forward and backward on one rank."""


@dataclass(frozen=True)
class PPOTrainConfig(TrainConfig):
    """The RL loop."""

    micro_batch_size: int = 1
    """Samples of one forward and backward on one rank."""
    max_epochs: int = 1
    """Passes over the samples of one rollout."""
    num_episodes: int = 1
    """Passes over the prompts."""
    dynamic_batch_enable: bool = False
    """Fill micro-batches up to a token budget instead of a number of samples."""
    max_tokens_per_gpu: int = 16192
    """Token budget of a micro-batch under --train.dynamic_batch_enable."""
    colocate_all: bool = False
    """Put all models and engines on the same GPUs (under --train.async_enable: all but the engines)."""
    colocate_actor_ref: bool = False
    """Put actor and reference model on the same GPUs."""
    colocate_critic_reward: bool = False
    """Put critic and reward model on the same GPUs."""
    async_enable: bool = False
    """Generate the next rollout while the last one is trained on."""
    async_queue_size: int = 1
    """Rollouts that may wait for training under --train.async_enable; larger is more off-policy."""
    partial_rollout_enable: bool = False
    """Pause running samples for a weight update and let them go on under the new weights."""
    agent_func_path: str | None = None
    """Python file with a class AgentExecutor; unset samples one response and rewards it."""
    enable_ema: bool = False
    """Keep a moving average of the policy's weights and export it too."""
    ema_beta: float = 0.992
    """Decay of that average."""
    step_timeout: float = 3600.0
    """Seconds that one phase of a step may take before the run stops and names what it waited for."""
