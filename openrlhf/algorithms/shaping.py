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


def overlong_penalty(lengths: torch.Tensor, max_new_tokens: int, buffer: float, factor: float) -> torch.Tensor:
    """DAPO's soft penalty for length (arXiv 2503.14476, eq. 13), to be added to the reward.

    -factor min(max(length - (max_new_tokens - buffer), 0), buffer) / buffer: 0 up to the buffer, then linear, -factor
    from ``max_new_tokens`` on.

    Args:
        lengths: [N], tokens that the policy produced in each trajectory.
        max_new_tokens: that it may produce.
        buffer: last tokens of these, in which the penalty grows; above 0 and at most ``max_new_tokens``.
        factor: penalty at full length, 0 or more, in the reward's unit.

    Returns: float [N], 0 or less.

    Raises:
        ValueError: for a buffer or a factor outside its range.
    """
    if not 0 < buffer <= max_new_tokens:
        raise ValueError(f"the overlong buffer must be above 0 and at most {max_new_tokens} new tokens, got {buffer}")
    if not factor >= 0:
        raise ValueError(f"the factor of the overlong penalty must be 0 or more, got {factor}")
    dtype = lengths.dtype if lengths.is_floating_point() else torch.float64
    excess = (lengths.to(dtype) - (max_new_tokens - buffer)).clamp(0, buffer)
    return -factor * excess / buffer


def stop_properly(rewards: torch.Tensor, truncated: torch.Tensor, coef: float) -> torch.Tensor:
    """The reward of trajectories that were cut off: scaled by a coefficient in [0, 1], replaced by a negative one.

    Args:
        rewards: [N]; NaN where there is none stays NaN.
        truncated: bool [N].
        coef: at most 1.

    Returns: [N].

    Raises:
        ValueError: for a coefficient above 1, or none at all.
    """
    if not coef <= 1:
        raise ValueError(f"the coefficient of the stop-properly penalty must be at most 1, got {coef}")
    replaced = torch.where(rewards.isnan(), rewards, torch.full_like(rewards, coef)) if coef < 0 else rewards * coef
    return torch.where(truncated.bool(), replaced, rewards)
