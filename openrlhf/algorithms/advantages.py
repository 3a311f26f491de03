"""Advantages of a whole rollout batch, from one reward a trajectory.

Every estimator is a pure function of one record, ``AdvantageInputs``, and stands in one registry. All of them here are
the same three steps: a scalar a trajectory (the reward, or how it compares with its group), the discounted sum of what
follows each token, and for some a whitening over the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from openrlhf.algorithms.aggregate import mask_out, row_of_token
from openrlhf.algorithms.shaping import clip_rewards

GROUP_STD_EPSILON = 1e-9
VARIANCE_FLOOR = 1e-8


@dataclass(frozen=True)
class AdvantageInputs:
    """All that an estimator may look at: N trajectories of T tokens in all, of the whole rollout batch.

    Attributes:
        rewards: float [N]; anything, NaN too, where ``scored`` is False.
        scored: bool [N]; False where no reward could be computed. Such a trajectory is in no statistic and gets 0.
        group_ids: int64 [N], equal for the samples of one prompt; in any order.
        mask: bool [T], True where the policy produced the token.
        cu_seqlens: [N + 1], bounds of the trajectories; the segments of one stand end to end.
        kl: float [T], KL to the reference at each token, in nats, to be taken from the reward; None where there is no
            reference model or where the KL is in the loss.
        kl_coef: beta, reward per nat.
        gamma: discount per token that the policy produced.
        reward_clip: (low, high) for the scalar of a trajectory, after the group baseline; None for no bounds.
        whiten_std: False leaves out the division by the standard deviation where an estimator whitens.
    """

    rewards: torch.Tensor
    scored: torch.Tensor
    group_ids: torch.Tensor
    mask: torch.Tensor
    cu_seqlens: torch.Tensor
    kl: torch.Tensor | None = None
    kl_coef: float = 0.0
    gamma: float = 1.0
    reward_clip: tuple[float, float] | None = None
    whiten_std: bool = True

    def __post_init__(self) -> None:
        rows, tokens = self.cu_seqlens.numel() - 1, int(self.cu_seqlens[-1])
        for name, tensor, size in (
            ("rewards", self.rewards, rows),
            ("scored", self.scored, rows),
            ("group_ids", self.group_ids, rows),
            ("mask", self.mask, tokens),
            ("kl", self.kl, tokens),
        ):
            if tensor is not None and tensor.numel() != size:
                raise ValueError(f"{name} has {tensor.numel()} entries, cu_seqlens asks for {size}")
        bad = (self.scored.bool() & ~self.rewards.isfinite()).nonzero().flatten().tolist()
        if bad:
            raise ValueError(f"trajectories {bad} are marked as scored, but their rewards are not finite numbers")

    def trained(self) -> torch.Tensor:
        """Returns: bool [T], tokens of the policy in trajectories that have a reward."""
        return self.mask.bool() & self.scored.bool()[row_of_token(self.cu_seqlens)]


Estimator = Callable[[AdvantageInputs], tuple[torch.Tensor, torch.Tensor]]

ESTIMATORS: dict[str, Estimator] = {}


def register_estimator(name: str) -> Callable[[Estimator], Estimator]:
    """Enters the decorated function into ``ESTIMATORS``.

    Raises:
        ValueError: where the name is taken.
    """

    def enter(estimator: Estimator) -> Estimator:
        if name in ESTIMATORS:
            raise ValueError(f"there is an advantage estimator named {name!r} already")
        ESTIMATORS[name] = estimator
        return estimator

    return enter


def compute_advantages(name: str, inputs: AdvantageInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns of a rollout batch by the estimator ``name``.

    Returns:
        advantages [T] and returns [T] (the discounted sum before any whitening), 0 where nothing is trained.

    Raises:
        ValueError: for an unknown name.
    """
    if name not in ESTIMATORS:
        raise ValueError(f"unknown advantage estimator {name!r}; there are {', '.join(sorted(ESTIMATORS))}")
    return ESTIMATORS[name](inputs)


def reward_to_go(rewards: torch.Tensor, mask: torch.Tensor, cu_seqlens: torch.Tensor, gamma: float) -> torch.Tensor:
    """Discounted sum of the rewards from each trained token to the end of its row.

    Tokens that the policy did not produce are passed over: they add nothing, discount nothing and end nothing, so that
    the answer before a tool's output gets the reward that comes after it.

    Args:
        rewards: [T], per token.
        mask: bool [T].
        cu_seqlens: [N + 1].
        gamma: discount per trained token.

    Returns: [T], 0 where ``mask`` is False.
    """
    mask = mask.bool()
    row = row_of_token(cu_seqlens)
    trained_row = row[mask]
    counts = torch.bincount(trained_row, minlength=cu_seqlens.numel() - 1)
    starts = counts.cumsum(0) - counts
    place = torch.arange(trained_row.numel(), device=mask.device) - starts[trained_row]
    # Rows with the trained tokens alone, so that one pass from the right serves all rows at once.
    width = int(counts.max()) if counts.numel() else 0
    grid = rewards.new_zeros(width, counts.numel())
    grid[place, trained_row] = rewards[mask]
    for t in range(width - 2, -1, -1):
        grid[t] += gamma * grid[t + 1]
    returns = torch.zeros_like(rewards)
    returns[mask] = grid[place, trained_row]
    return returns


def terminal_rewards(scalars: torch.Tensor, mask: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Puts one number a row on the last trained token of the row.

    Args:
        scalars: [N].
        mask: bool [T].
        cu_seqlens: [N + 1].

    Returns: [T], 0 elsewhere; a row without a trained token has no place for its number.
    """
    mask = mask.bool()
    row = row_of_token(cu_seqlens)
    position = torch.arange(mask.numel(), device=mask.device)
    last = torch.full((scalars.numel(),), -1, device=mask.device)
    last = last.scatter_reduce(0, row[mask], position[mask], "amax")
    rewards = scalars.new_zeros(mask.numel())
    rewards[last[last >= 0]] = scalars[last >= 0]
    return rewards


def whiten(values: torch.Tensor, mask: torch.Tensor, std: bool = True) -> torch.Tensor:
    """Shifts to mean 0 over all trained tokens and, with ``std``, scales to variance 1 (biased, floor 1e-8).

    Source: REINFORCE++, arXiv 2501.03262.

    Args:
        values: [T].
        mask: bool [T].

    Returns: [T], 0 where ``mask`` is False.
    """
    mask = mask.bool()
    if not bool(mask.any()):
        return torch.zeros_like(values)
    trained = values[mask]
    centred = trained - trained.mean()
    if std:
        centred = centred * centred.square().mean().clamp(min=VARIANCE_FLOOR).rsqrt()
    white = torch.zeros_like(values)
    white[mask] = centred
    return white


@dataclass(frozen=True)
class GroupStatistics:
    """Per trajectory, statistics of the scored samples of its group; all [N].

    Attributes:
        count: scored samples.
        mean: of their rewards.
        std: unbiased; 0 for fewer than two samples.
        flat: bool, True where the rewards are all equal, or the trajectory itself has none.
    """

    count: torch.Tensor
    mean: torch.Tensor
    std: torch.Tensor
    flat: torch.Tensor


def group_statistics(rewards: torch.Tensor, scored: torch.Tensor, group_ids: torch.Tensor) -> GroupStatistics:
    """Statistics of each group, found by its id, in whatever order the samples stand.

    Args:
        rewards: float [N].
        scored: bool [N]; the others are in no statistic.
        group_ids: int64 [N].
    """
    scored = scored.bool()
    groups, group = torch.unique(group_ids, return_inverse=True)
    number = groups.numel()
    known, values = group[scored], rewards[scored]
    zeros = rewards.new_zeros(number)
    count = zeros.index_add(0, known, torch.ones_like(values))
    mean = zeros.index_add(0, known, values) / count.clamp(min=1)
    squares = zeros.index_add(0, known, (values - mean[known]).square())
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    # Rounding leaves the mean of equal numbers beside them; a group that teaches nothing must give exactly nothing.
    highest = zeros.scatter_reduce(0, known, values, "amax", include_self=False)
    lowest = zeros.scatter_reduce(0, known, values, "amin", include_self=False)
    flat = highest == lowest
    return GroupStatistics(count[group], mean[group], std[group], flat[group] | ~scored)


def group_baseline(inputs: AdvantageInputs) -> torch.Tensor:
    """Returns: [N], reward minus the mean of its group (Dr. GRPO, arXiv 2503.20783; REINFORCE++-baseline)."""
    stats = group_statistics(inputs.rewards, inputs.scored, inputs.group_ids)
    return mask_out(inputs.rewards - stats.mean, ~stats.flat)


def leave_one_out(inputs: AdvantageInputs) -> torch.Tensor:
    """Returns: [N], reward minus the mean of the others of its group, n / (n - 1) (R - mean); arXiv 2402.14740."""
    stats = group_statistics(inputs.rewards, inputs.scored, inputs.group_ids)
    factor = stats.count / (stats.count - 1).clamp(min=1)
    return mask_out(factor * (inputs.rewards - stats.mean), ~stats.flat)


def group_norm(inputs: AdvantageInputs) -> torch.Tensor:
    """Returns: [N], (R - mean) / (unbiased std + 1e-9) of its group (GRPO, arXiv 2402.03300, section 4.1.2)."""
    stats = group_statistics(inputs.rewards, inputs.scored, inputs.group_ids)
    return mask_out((inputs.rewards - stats.mean) / (stats.std + GROUP_STD_EPSILON), ~stats.flat)


def returns_from(scalars: torch.Tensor, inputs: AdvantageInputs) -> torch.Tensor:
    """Reward-to-go of r_t = -beta KL_t + 1[last trained token] clip(scalar) (arXiv 2501.03262).

    Args:
        scalars: [N], one a trajectory.

    Returns: [T], 0 where nothing is trained.
    """
    trained = inputs.trained()
    clipped = clip_rewards(mask_out(scalars, inputs.scored), inputs.reward_clip)
    rewards = terminal_rewards(clipped, trained, inputs.cu_seqlens)
    if inputs.kl is not None:
        rewards = rewards - inputs.kl_coef * mask_out(inputs.kl.to(rewards.dtype), trained)
    return reward_to_go(rewards, trained, inputs.cu_seqlens, inputs.gamma)


@register_estimator("reinforce")
def reinforce_plus_plus(inputs: AdvantageInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE++ (arXiv 2501.03262): reward-to-go of the reward itself, whitened over the batch's tokens."""
    returns = returns_from(inputs.rewards, inputs)
    return whiten(returns, inputs.trained(), inputs.whiten_std), returns


@register_estimator("reinforce_baseline")
def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE++-baseline (arXiv 2501.03262): the group's mean is taken off first, then the same."""
    returns = returns_from(group_baseline(inputs), inputs)
    return whiten(returns, inputs.trained(), inputs.whiten_std), returns


@register_estimator("rloo")
def rloo(inputs: AdvantageInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """RLOO (arXiv 2402.14740): reward-to-go of the leave-one-out reward, not whitened."""
    returns = returns_from(leave_one_out(inputs), inputs)
    return returns, returns


@register_estimator("group_norm")
def grpo(inputs: AdvantageInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """GRPO (arXiv 2402.03300): reward-to-go of the reward normalised in its group, not whitened over the batch."""
    returns = returns_from(group_norm(inputs), inputs)
    return returns, returns


@register_estimator("dr_grpo")
def dr_grpo(inputs: AdvantageInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Dr. GRPO (arXiv 2503.20783): reward-to-go of reward minus group mean, neither normalised nor whitened."""
    returns = returns_from(group_baseline(inputs), inputs)
    return returns, returns
