"""What is done to a reward before it becomes an advantage."""

from __future__ import annotations

import torch


def clip_rewards(rewards: torch.Tensor, bounds: tuple[float, float] | None) -> torch.Tensor:
    """Bounds the rewards, after the group baseline where there is one.

    Args:
        rewards: [N], one a trajectory.
        bounds: (low, high) in the reward's unit; None for no bounds.

    Returns: [N].

    Raises:
        ValueError: where low is above high.
    """
    if bounds is None:
        return rewards
    low, high = bounds
    if low > high:
        raise ValueError(f"the reward clip range ({low}, {high}) is empty")
    return rewards.clamp(low, high)
